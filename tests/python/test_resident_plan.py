"""Which units stay on the device, what that takes, and what it does to a simulated step."""

from __future__ import annotations

import itertools

import noria
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from noria import _C
from noria.planning.resident import gradient_bytes
from noria.planning.spread import spread_evenly
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.planning.streamed import NUM_SLOTS
from torch import nn

WIDTH, BLOCKS = 64, 8
STATE = 4 * 4  # bytes of an fp32 element: weight, gradient at home, two moments


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


def plan_of(**policy):
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters())
    return noria.plan(model, optimizer, **{"device": "cpu", "kernel": "fused", "window": 2, **policy})


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(0, 3000))
def test_what_is_spread_fits_and_comes_evenly(sizes, budget):
    needs = dict(enumerate(sizes))
    chosen = spread_evenly(needs, budget)
    total, largest = sum(sizes), max(sizes)
    assert chosen == sorted(set(chosen)) and sum(needs[unit] for unit in chosen) <= budget
    if budget >= total:
        assert chosen == list(needs)
    share = min(budget / total, 1.0)
    for end in range(1, len(sizes) + 1):  # at no place are more chosen than their share, but for half a unit
        assert sum(needs[unit] for unit in chosen if unit < end) <= share * sum(sizes[:end]) + largest / 2


def test_as_many_units_stay_as_fit():
    of_one = plan_of(resident="all").resident_bytes // BLOCKS
    for number in range(1, BLOCKS):
        planned = plan_of(resident=number * of_one + of_one // 2)
        assert len(planned.stays) == number and planned.resident_bytes == number * of_one
        gaps = [after - before for before, after in itertools.pairwise(sorted(planned.stays))]
        assert not gaps or max(gaps) - min(gaps) <= 1
    assert plan_of(resident=BLOCKS * of_one).stands_still


def test_an_amount_for_no_unit_is_said():
    planned = plan_of(resident=1000)
    assert not planned.stays and any("no unit stays" in note for note in planned.unpredicted)
    planned = plan_of(resident="1GiB", kernel="torch")
    assert not planned.stays and any("only the host updates them" in note for note in planned.unpredicted)


def test_units_that_stay_and_the_window_share_the_device():
    of_one = plan_of(resident="all").resident_bytes // BLOCKS
    weights = plan_of().units[0].weights
    enough = 2 * of_one + 2 * weights + 4 * weights  # what stays, its gradients, two units and two gradient buffers
    planned = plan_of(resident=2 * of_one, device_memory=enough, window="auto")
    assert len(planned.stays) == 2 and planned.arena_bytes == 4 * weights
    with pytest.raises(noria.UsageError, match="resident="):
        plan_of(resident=2 * of_one, device_memory=2 * of_one + 2 * weights)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "masters"])
def test_units_that_torch_updates_stay_with_pieces_for_updates_until_they_do(dtype):
    own = {"kernel": "torch", "optimizer_device": "device", "dtype": dtype}
    every = plan_of(resident="all", **own)
    of_one, unit = every.resident_bytes // BLOCKS, every.units[0]
    each = 4 + 4 + 4 if dtype is None else 2 + 4 + 4 + 4  # weights, masters, two moments
    least = each * sum(slot.parameter.numel() for slot in unit.parameters)
    assert least <= of_one < least + 4 * len(unit.parameters) * _C.TENSOR_ALIGNMENT
    assert every.stands_still and every.streamed.keys() == every.stays and not every.streamed_at_rest
    part = plan_of(resident=2 * of_one, **own)
    assert len(part.stays) == 2 and part.streamed.keys() == {unit.index for unit in part.units}
    slots = NUM_SLOTS * part.update_slot_bytes
    at_rest = slots + part.resident_bytes + gradient_bytes(part.units, part.stays)
    least = at_rest + 2 * (unit.weights + unit.gradients)
    for room in (least, least + unit.weights):
        planned = plan_of(resident=2 * of_one, device_memory=room, window="auto", **own)
        assert planned.arena_bytes + at_rest <= room
    with pytest.raises(noria.UsageError, match="for pieces that are updated there"):
        plan_of(resident=2 * of_one, device_memory=slots, window="auto", **own)


def test_units_that_stay_are_not_drafted():
    planned = plan_of(resident=3 * plan_of(resident="all").resident_bytes // BLOCKS, draft_memory="1GiB")
    assert len(planned.stays) == 3 and planned.stays | planned.drafted == set(range(BLOCKS))
    assert not planned.stays & planned.drafted


@pytest.mark.parametrize("resident", [0, -1, 1.5, True, "much", None])
def test_nonsense_is_refused(resident):
    with pytest.raises(noria.UsageError, match="resident"):
        plan_of(resident=resident)


def test_the_others_move_less_and_are_updated_less():
    of_one = plan_of(resident="all").resident_bytes // BLOCKS
    steps = [
        PlannedStep(plan_of(resident=number * of_one) if number else plan_of(), 64, PlanSpeeds(0.1, 0.1, 0.05, 1e-2))
        for number in range(BLOCKS)
    ]
    for number, step in enumerate(steps):
        assert not step.check()
        moved = {lane: {span.unit for span in step.spans if span.lane == lane} for lane in ("fetch", "drain", "update")}
        assert all(units == set(range(BLOCKS)) - step.planned.stays for units in moved.values()), number
        visited = [span.unit for span in step.spans if span.verb == "forward"]
        assert sorted(visited) == list(range(BLOCKS))
    times = [step.step_us for step in steps]
    assert times == sorted(times, reverse=True) and times[-1] < times[0] / 4


def test_updates_on_the_device_take_time_there():
    planned = plan_of(resident=4 * plan_of(resident="all").resident_bytes // BLOCKS)
    fast, slow = (PlannedStep(planned, 64, PlanSpeeds(10, 10, 10, 1, device=rate)) for rate in (1000, 0.01))
    updates = [span for span in slow.spans if span.lane == "compute" and span.verb == "update"]
    assert {span.unit for span in updates} == planned.stays
    assert slow.step_us - fast.step_us == pytest.approx(sum(span.end_us - span.start_us for span in updates), rel=0.05)


@pytest.mark.parametrize("own", [{}, {"kernel": "torch", "optimizer_device": "device"}], ids=["kernels", "by torch"])
def test_no_step_is_simulated_faster_than_its_bound(own):
    """Updates of units that stay may run while others are fetched."""
    of_one = plan_of(resident="all", **own).resident_bytes // BLOCKS
    for number in range(1, BLOCKS):
        step = PlannedStep(plan_of(resident=number * of_one, **own), 64, PlanSpeeds(0.1, 0.1, 1, 1, device=0.1))
        rounded = len(step.spans)  # each op takes whole microseconds
        assert step.step_us + rounded >= _C.deferred_bound_us(step.times()) > 100 * rounded, number
