"""What becomes of activations by the planner's own choice: close to the best of all, and within both budgets."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import noria
import pytest
import torch
from noria.planning.activation_choice import activation_choices, beside_torch
from noria.planning.decisions import choose_again, choose_by_costs
from noria.planning.measured_costs import MeasuredCosts
from noria.planning.step_simulation import PlannedStep, PlanSpeeds, saved_by_blocks
from noria.planning.wrap_plan import WrapPlan, with_stays

from tests.python.test_decisions import CLOSE, Block, plan_of

MIB = 1 << 20
LINKS = {"fetch": 1.0, "drain": 1.0, "update": 10.0}


def us_of(planned: WrapPlan, costs: MeasuredCosts) -> float:
    return PlannedStep(planned, 0, PlanSpeeds(0, 0, 0, 0), costs).step_us


def costs_of(num_units: int, link_gib_s: float, **more: Any) -> MeasuredCosts:
    """Each block takes 3 ms in all, saves 8 MiB, and has inputs of 1 MiB."""
    fields = {"saved": [8 * MIB] * num_units, "inputs": [MIB] * num_units, **more}
    lanes = {**LINKS, "fetch": link_gib_s, "drain": link_gib_s}
    return MeasuredCosts([1000.0] * num_units, [2000.0] * num_units, lanes, {}, **fields)


def crammed(num_units: int = 6, **policy: Any) -> WrapPlan:
    """With room for what two of its blocks save."""
    return plan_of([64] * num_units, activations="auto", activation_memory="16MiB", window=2, **policy)


class Instance:
    """A small model, budgets and costs, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        widths = [draw.choice((32, 64, 128, 256)) for _ in range(draw.randint(2, 4))]
        is_equal = draw.random() < 0.5
        widths = [widths[0]] * len(widths) if is_equal else widths
        saved = [width * 1024 for width in widths]
        every = plan_of(widths, resident="all")
        self.planned = plan_of(
            widths,
            activations="auto",
            activation_memory=int(draw.uniform(2 * max(saved), max(sum(saved), 2 * max(saved) + 1))),
            device_memory=every.least_device + int(1.2 * draw.random() * every.resident_bytes),
            draft_memory=draw.choice((0, "1GiB")),
        )
        us = [width * 10 ** draw.uniform(-1, 1) for width in widths]
        rates = {lane: 10 ** draw.uniform(-2, 0) for lane in ("fetch", "drain", "update")}
        inputs = [size // draw.choice((2, 4, 16)) for size in saved]
        device = {"device_update_gib_s": 10 ** draw.uniform(-1, 1)}
        self.costs = MeasuredCosts(us, [2 * each for each in us], rates, {}, **device, saved=saved, inputs=inputs)

    def best(self) -> float:
        """The step of the best of all choices: who computes again, and who stays."""
        units = range(len(self.planned.units))
        subsets = [frozenset(each) for n in range(len(units) + 1) for each in itertools.combinations(units, n)]
        times = []
        for again, stays in itertools.product(subsets, subsets[:-1]):
            try:
                found = with_stays(dataclasses.replace(self.planned, recomputed=again), stays)
            except noria.UsageError:
                continue
            times.append(us_of(found, self.costs))
        return min(times)


@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.long)])
def test_choices_are_close_to_the_best_of_all(first):
    again = far = 0
    for seed in range(first, first + (400 if first else 40)):
        instance = Instance(seed)
        chosen = choose_by_costs(instance.planned, instance.costs)
        assert us_of(chosen, instance.costs) <= CLOSE * instance.best(), seed
        assert chosen.budgets == instance.planned.budgets
        again += bool(chosen.recomputed)
        far += us_of(dataclasses.replace(instance.planned, recomputed=frozenset()), instance.costs) > 1.1 * us_of(
            chosen, instance.costs
        )
    assert again > 3 and far > 3  # the control arm: to move all is often far from the best


def test_blocks_compute_again_where_links_are_slow():
    slow, fast = (choose_by_costs(crammed(), costs_of(6, link_gib_s)) for link_gib_s in (0.1, 100.0))
    assert slow.recomputed and fast.recomputed == frozenset()
    assert us_of(slow, costs_of(6, 0.1)) < 0.9 * us_of(
        dataclasses.replace(slow, recomputed=fast.recomputed), costs_of(6, 0.1)
    )


def test_nothing_computes_again_where_all_has_room():
    planned = plan_of([64] * 6, activations="auto", activation_memory="48MiB", window=2)
    assert choose_by_costs(planned, costs_of(6, 0.1)).recomputed == frozenset()


def test_blocks_that_must_not_run_twice_are_left_alone():
    inputs = [-1, MIB, -1, MIB, -1, 8 * MIB]  # the last one would free nothing
    chosen = choose_by_costs(crammed(), costs_of(6, 0.1, inputs=inputs))
    assert chosen.recomputed and chosen.recomputed <= {1, 3}


def test_blocks_compute_again_where_the_host_has_no_room_for_what_they_save():
    planned = crammed()
    tight = crammed(host_memory=planned.home_bytes + 8 * MIB)
    fast = costs_of(6, 100.0)
    assert choose_by_costs(planned, fast).recomputed == frozenset()
    chosen = choose_by_costs(tight, fast)
    simulated = PlannedStep(chosen, 0, PlanSpeeds(0, 0, 0, 0), fast)
    assert chosen.recomputed and chosen.home_bytes + simulated.saved.most_at_home <= tight.budgets.host


def test_a_choice_that_runs_goes_on_unless_another_is_much_faster():
    slow, fast = costs_of(6, 0.1), costs_of(6, 100.0)
    chosen = choose_again(dataclasses.replace(crammed(), recomputed=frozenset()), slow)
    assert chosen is not None and chosen.recomputed
    assert choose_again(chosen, slow) is None
    back = choose_again(chosen, fast)
    assert back is not None and back.recomputed == frozenset()


def test_pipelines_and_unmeasured_blocks_are_left_alone():
    slow = costs_of(6, 0.1)
    in_pipeline = dataclasses.replace(crammed(), chooses_activations=False)
    assert choose_by_costs(in_pipeline, slow).recomputed is None
    assert choose_by_costs(crammed(), dataclasses.replace(slow, inputs=[])).recomputed is None


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
def test_the_users_word_counts(activations):
    planned = plan_of([64] * 6, activations=activations, window=2)
    chosen = choose_by_costs(planned, costs_of(6, 0.1))
    assert (
        chosen.recomputed == planned.recomputed == (frozenset(range(6)) if activations == "recompute" else frozenset())
    )


# ---- where torch has its memory beside noria's ----------------------------------------------------------------------


def on_cuda(device_memory: int, **policy: Any) -> WrapPlan:
    """Eight units of 16 MiB of weights, planned as for a machine that is not here."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(Block(65536) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    fields = {"device": "cuda", "units": [Block], "host_memory": "8GiB", "draft_memory": 0, **policy}
    return noria.plan(model, optimizer, device_memory=device_memory, **fields)


@pytest.mark.parametrize("link_gib_s, much", [(1.0, 0.9), (30.0, 1.0)])
def test_what_activations_leave_is_for_the_window(link_gib_s, much):
    """noria may have more than its half, or less."""
    costs = costs_of(8, 100.0, workspace=4 * MIB)
    costs.gib_s["fetch"] = link_gib_s
    planned = on_cuda(160 * MIB, activations="auto")
    assert planned.budgets.shares == 2 and planned.saved_room == 40 * MIB and planned.device_bytes <= 80 * MIB
    plans = activation_choices(planned, costs, lambda each: us_of(each, costs))
    for each in plans:
        assert each.saved_room is not None and each.saved_room >= 16 * MIB  # what two blocks save
        of_blocks = min(each.saved_room, sum(saved_by_blocks(each, costs).values()))
        assert each.device_bytes + of_blocks + 5 * MIB <= 160 * MIB
    assert max(each.device_bytes for each in plans) > 80 * MIB
    best = min(us_of(each, costs) for each in plans)
    every = [
        activation_choices(dataclasses.replace(planned, chooses_activations=False), costs, lambda each: 0.0)[0],
        dataclasses.replace(planned, recomputed=planned.block_units),
    ]
    assert best <= much * min(us_of(each, costs) for each in every)


def test_kept_activations_leave_noria_its_half_at_most():
    costs = costs_of(8, 1.0, workspace=MIB)
    for device_memory, share in ((1024, 512), (160, 160 - 1.25 * 65)):
        planned = on_cuda(device_memory * MIB)
        budgets = beside_torch(planned, costs).budgets
        assert budgets.device == budgets.shares * max(int(share * MIB), planned.device_bytes)
