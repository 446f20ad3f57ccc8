"""Simulated steps with moments in files: reads before updates and writes behind them, bounds, wall, and endurance."""

from __future__ import annotations

import itertools
from typing import Any

import noria
import pytest
import torch
from noria import _C
from noria.planning.bounds import bounds_of
from noria.planning.endurance import days_until_worn, endurance_text
from noria.planning.measured_costs import measured_costs
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.planning.what_if import wall
from torch import nn

from benchmarks.systems.by_noria import least_host_memory

WIDTH = 64
RECORD = 8 * WIDTH * WIDTH  # two moments in fp32
UPDATED = 28 * WIDTH * WIDTH  # that, the weight and its gradient, in both directions
FAST = 1e9
T_US = 1000.0


def plan(num_units: int, in_files: bool = True, more_slots: int = 0, **policy: Any) -> Any:
    """All moments lie in files, or none. `more_slots`: of the gradient ring than the least."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_units)))
    optimizer = torch.optim.AdamW(model.parameters())
    policy = {"device": "cpu", "units": [nn.Linear], "kernel": "fused", "draft_memory": 0, **policy}
    if not in_files:
        return noria.plan(model, optimizer, **policy)
    policy["files"] = "/never/made"
    memory = least_host_memory(model, optimizer, **policy) + more_slots * 4 * WIDTH * WIDTH
    planned = noria.plan(model, optimizer, host_memory=memory, **policy)
    assert len(planned.files.sizes) == num_units and planned.files.slot_bytes == RECORD
    return planned


def gib_s(num_bytes: int, us: float) -> float:
    """Returns the rate at which these bytes take this time."""
    return num_bytes / 2**30 / us * 1e6


def simulated(planned: Any, *, update: float = T_US, read: float = T_US, write: float = T_US) -> PlannedStep:
    """All times are of one unit, in microseconds; all else takes none."""
    disk = {"disk_read": gib_s(RECORD, read), "disk_write": gib_s(RECORD, write)}
    step = PlannedStep(planned, 1, PlanSpeeds(FAST, FAST, gib_s(UPDATED, update), FAST, **disk))
    assert step.check() == []
    return step


def begins(step: PlannedStep, verb: str) -> list[float]:
    """Returns when ops of this verb begin, in times of an op since `step()` was called."""
    return [round((span.start_us - step.end_us) / T_US, 2) for span in step.spans if span.verb == verb]


def test_six_units_take_turns_in_four_slots():
    """Reads follow each other without a gap, each update comes when its moments have, and each write one later."""
    step = simulated(plan(6))
    assert begins(step, "read_state") == [0, 1, 2, 3, 4, 5]
    assert begins(step, "update") == [1, 2, 3, 4, 5, 6]
    assert begins(step, "write_state") == [2, 3, 4, 5, 6, 7]
    assert step.step_us == pytest.approx(7 * T_US, abs=5)
    assert step.file_bytes == (6 * RECORD, 6 * RECORD)


def test_a_read_waits_for_what_is_written_from_its_slot():
    """Writes take three times as long as all else, and follow each other. A slot is free when its write has ended."""
    step = simulated(plan(6), write=3 * T_US)
    writes = begins(step, "write_state")
    assert [after - before for before, after in itertools.pairwise(writes)] == [3] * 5
    assert step.step_us == pytest.approx(18 * T_US, abs=5)
    # Units 0 to 3 take the slots of units 2 to 5 of the step before, and units 4 and 5 those of units 0 and 1.
    ends = [begin + 3 for begin in writes]
    assert begins(step, "read_state") == [*(end - 18 for end in ends[2:]), *ends[:2]]


@pytest.mark.parametrize("slow", ["read", "write"])
@pytest.mark.parametrize("update", ["auto", "backward", "blocking"])
def test_a_slow_disk_is_the_bound_and_the_wall_and_makes_the_step_longer(update, slow):
    planned, before = plan(8, update=update), 0
    for times in (1, 10, 100):
        step = simulated(planned, **{slow: times * T_US})
        assert step.step_us > 1.5 * before
        before = step.step_us
    read, written = step.file_bytes
    alone = {"read": read, "write": written}[slow] / RECORD * 100 * T_US
    assert alone >= 8 * 100 * T_US
    bounds = step.bounds()
    # Under "blocking" nothing is updated while it reads.
    for bound in (bounds.drafting_us, bounds.deferred_us, bounds.blocking_us):
        assert bound == pytest.approx(alone, rel=1e-3)
    name, share = wall(step)
    assert name == {"read": "reads from disk", "write": "writes to disk"}[slow]
    assert share == pytest.approx(alone / step.step_us, rel=1e-3) and 0.95 < share <= 1.001


def test_reads_limit_where_updates_do_and_writes_the_whole_step_or_a_blocking_one():
    times = {"forward_us": 10.0, "backward_us": 20.0, "update_us": 5.0}
    plain, reads, writes = (bounds_of(times | disk) for disk in ({}, {"read_us": 25.0}, {"write_us": 32.0}))
    assert (plain.blocking_us, plain.deferred_us, plain.drafting_us) == (35, 30, 30)
    assert (reads.blocking_us, reads.deferred_us, reads.drafting_us) == (55, 45, 30)
    assert (writes.blocking_us, writes.deferred_us, writes.drafting_us) == (62, 32, 32)


def test_a_blocking_step_ends_when_all_is_written():
    step = simulated(plan(6, update="blocking"), write=2 * T_US)
    assert begins(step, "write_state")[0] == 2
    assert step.step_us == pytest.approx((2 + 6 * 2) * T_US, abs=5)
    assert step.bounds().blocking_us == pytest.approx(6 * 2 * T_US, abs=5)


@pytest.mark.parametrize("backwards", [1, 4])
@pytest.mark.parametrize("read", [1, 3])
def test_under_backward_the_disk_works_behind_the_backward_and_four_units_ahead(backwards, read):
    """A read takes as long as a forward of a unit, or as both passes. Then the first four hide in the forward."""
    planned = plan(12, update="backward")
    tflops = 4 * 2 * WIDTH * WIDTH / T_US / 1e6  # a forward of 4 tokens takes T, and its backward twice that
    disk = {"disk_read": gib_s(RECORD, read * T_US), "disk_write": gib_s(RECORD, T_US)}
    tokens = 4 * backwards
    step = PlannedStep(planned, tokens, PlanSpeeds(FAST, FAST, FAST, tflops, **disk), backwards=backwards)
    assert step.check() == []
    assert 36 * backwards * T_US <= step.step_us <= (36 * backwards + 4) * T_US
    first = min((span for span in step.spans if span.verb == "read_state"), key=lambda span: span.start_us)
    assert first.unit < 11  # that of the last unit was read in the step before


def test_postponed_updates_give_the_disk_work_in_the_forward():
    """A forward takes 6 T and a backward 12 T, reads and writes 18 T each. Slots of the ring make the step shorter."""
    tflops = 4 * 2 * WIDTH * WIDTH / (T_US / 4) / 1e6  # a forward of 4 tokens takes T / 4
    rate = gib_s(RECORD, 0.75 * T_US)
    speeds = PlanSpeeds(FAST, FAST, FAST, tflops, disk_read=rate, disk_write=rate)
    taken, orders = [], []
    for more_slots in range(5):
        step = PlannedStep(plan(24, update="backward", more_slots=more_slots), 4, speeds)
        assert step.check() == []
        taken.append(step.step_us)
        orders.append([span.unit for span in step.spans if span.verb == "write_state"])
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > 1.2 * 18 * T_US and taken[4] < 1.08 * 18 * T_US
    assert orders[0] == [*range(23, -1, -1)]
    postponed = [8, 11, 14, 17]  # the forward needs 8 first
    assert orders[4] == [unit for unit in orders[0] if unit not in postponed] + postponed


def test_every_wait_for_a_file_is_missed_if_it_is_left_out():
    for update in ("auto", "backward"):
        step = simulated(plan(6, update=update))
        complete = step.waits
        verbs = [op.verb for op in step.ops]
        for pair in (("read_state", "update"), ("update", "write_state"), ("write_state", "read_state")):
            step.waits = [[giver for giver in on if (verbs[giver], verbs[i]) != pair] for i, on in enumerate(complete)]
            assert step.waits != complete and step.check(), f"{pair} is not needed under {update}"


def test_a_trace_tells_the_rates_of_the_disk():
    planned = plan(8)
    step = simulated(planned, read=3 * T_US, write=2 * T_US)
    costs = measured_costs(step.all_spans, len(planned.units))
    assert costs.gib_s["read"] == pytest.approx(gib_s(RECORD, 3 * T_US), rel=0.01)
    assert costs.gib_s["write"] == pytest.approx(gib_s(RECORD, 2 * T_US), rel=0.01)
    again = PlannedStep(planned, 1, PlanSpeeds(1, 1, 1, 1), costs)
    assert again.step_us == pytest.approx(step.step_us, rel=0.02)


def test_costs_of_a_run_without_files_leave_the_disk_as_fast_as_it_is_said_to_be():
    costs = measured_costs(simulated(plan(8, in_files=False)).all_spans, 8)
    assert "read" not in costs.gib_s
    slow = PlanSpeeds(1, 1, 1, 1, disk_read=gib_s(RECORD, T_US), disk_write=gib_s(RECORD, 9 * T_US))
    assert PlannedStep(plan(8), 1, slow, costs).step_us >= 8 * 9 * T_US


def test_without_files_a_step_has_neither_reads_nor_writes():
    step = simulated(plan(6, in_files=False))
    assert step.file_bytes == (0, 0) and not {"read", "write"} & {op.lane for op in step.ops}
    assert step.bounds().drafting_us == _C.drafting_bound_us(step.times())


# ---- endurance -------------------------------------------------------------------------------------------------------


def test_a_disk_lasts_as_long_as_its_rated_bytes_at_the_pace_of_the_steps():
    """12 GB in each of 1000 steps a day: 600 TB in 50 days."""
    assert days_until_worn(12e9, 86.4e6, 1) == pytest.approx(50)
    assert days_until_worn(12e9, 86.4e6, 4) == pytest.approx(200)  # they share what is written
    text = endurance_text(3 << 30, 12e9, 86.4e6, 1)
    assert text.startswith("a step reads 3.0 GiB from files and writes 11.2 GiB; ")
    assert text.endswith("at this rate a disk rated for 600 TBW lasts 50 days")
    assert endurance_text(1, 12e9, 86.4e6, 4).endswith("each of 4 disks rated for 600 TBW lasts 200 days")
    assert endurance_text(1, 12e9, 86.4e4, 1).endswith("lasts 12 hours")
    assert endurance_text(1, 12e9, 86.4e8, 1).endswith("lasts 14 years")


def test_nothing_is_said_of_a_disk_that_nothing_is_written_to():
    assert endurance_text(0, 0, 1e6, 1) == "" and endurance_text(1, 1, 0, 1) == ""
