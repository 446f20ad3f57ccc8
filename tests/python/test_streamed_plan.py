"""What updates on the device take, what goes there and back, and what a simulated step makes of them."""

from __future__ import annotations

import itertools
from typing import Any

import noria
import pytest
import torch
from noria.planning import streamed
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.planning.wrap_plan import WrapPlan
from torch import nn

WIDTH, BLOCKS = 64, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


def plan_of(optimizer: Any = torch.optim.AdamW, **policy: Any) -> WrapPlan:
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    fields = {"device": "cpu", "window": 2, "units": [Block], "optimizer_device": "device", **policy}
    return noria.plan(model, optimizer(model.parameters()), **fields)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "masters"])
@pytest.mark.parametrize("kernel", ["fused", "torch"])
@pytest.mark.parametrize("elements", [8 << 20, 5000, 100])
def test_pieces_cover_their_unit_and_fit_into_a_slot(monkeypatch, elements, kernel, dtype):
    monkeypatch.setattr(streamed, "PIECE_ELEMENTS", elements)
    planned = plan_of(kernel=kernel, dtype=dtype)
    assert planned.streamed.keys() == set(range(BLOCKS))
    for unit, pieces in planned.streamed.items():
        assert pieces[0].begin == 0 and pieces[-1].end == planned.units[unit].home_gradients
        assert all(one.end == next_one.begin for one, next_one in itertools.pairwise(pieces))
        slots = [slot.index for slot in planned.units[unit].parameters]
        assert sorted(index for piece in pieces for index in piece.parameters) == slots
        homes: set[tuple[str, int]] = set()
        for piece in pieces:
            assert piece.num_bytes <= planned.update_slot_bytes
            ends = sorted((copy.slot_offset, copy.slot_offset + copy.num_bytes) for copy in piece.copies)
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
            assert ends[-1][1] <= piece.num_bytes
            homes.update((copy.purpose, copy.home_offset) for copy in piece.copies)
        assert len(homes) == sum(len(piece.copies) for piece in pieces)  # nothing goes twice
    assert (len(planned.streamed[0]) > 1) == (elements < 8 << 20)


def test_what_moves_is_what_the_docs_say():
    planned = plan_of(kernel="fused", dtype=torch.bfloat16)
    count = planned.units[0].home_gradients // torch.bfloat16.itemsize  # with what aligns the parameters
    copies = [copy for piece in planned.streamed[0] for copy in piece.copies]
    assert sum(copy.num_bytes for copy in copies if copy.comes) == 14 * count
    assert sum(copy.num_bytes for copy in copies if copy.goes) == 12 * count


def test_units_that_stay_do_not_move():
    planned = plan_of(kernel="fused", resident="all", device_memory="64MiB")
    assert not planned.streamed and planned.stands_still


@pytest.mark.parametrize("update", ["auto", "blocking"])
def test_a_simulated_step_has_their_ops_in_order(update):
    planned = plan_of(kernel="fused", update=update)
    step = PlannedStep(planned, 64, PlanSpeeds(0.1, 0.1, 0.1, 1e-3, device=1.0))
    assert step.check() == []
    moved = {verb: sum(s.bytes for s in step.spans if s.verb == verb) for verb in ("fetch_state", "drain_state")}
    for verb, way in (("fetch_state", "comes"), ("drain_state", "goes")):
        copies = (copy for pieces in planned.streamed.values() for piece in pieces for copy in piece.copies)
        assert moved[verb] == sum(copy.num_bytes for copy in copies if getattr(copy, way))
    assert not any(span.lane == "update" for span in step.spans)
    least_us = moved["fetch_state"] / (0.1 * (1 << 30)) * 1e6
    assert step.step_us > least_us


def test_muon_is_slow_on_a_host_and_the_simulation_says_so():
    class Matrix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    model = nn.Sequential(*(Matrix() for _ in range(BLOCKS)))
    times = {}
    for place in ("host", "device"):
        optimizer = torch.optim.Muon(model.parameters())
        planned = noria.plan(model, optimizer, device="cpu", window=2, units=[Matrix], optimizer_device=place)
        m, n = WIDTH, 2 * WIDTH
        assert planned.update_flops == dict.fromkeys(range(BLOCKS), 5 * (4 * m * m * n + 2 * m**3))
        speeds = PlanSpeeds(1.0, 1.0, 1.0, 1.0, device=10.0, host_tflops=1e-4)
        times[place] = PlannedStep(planned, 64, speeds).step_us
    assert times["host"] >= BLOCKS * planned.update_flops[0] / 1e-4 / 1e6
    assert times["device"] < times["host"] / 10
