"""Costs that a trace tells: from them a simulated step takes what the traced one took."""

import itertools

import noria
import pytest
import torch
from noria import _C
from noria.planning.measured_costs import measured_costs
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from torch import nn

GIB = 2**30


def span(op, lane, verb, unit, start, end, num_bytes=0, waits=()):
    return _C.Span(op, lane, verb, unit, start, end, num_bytes, list(waits))


def test_a_visit_costs_what_follows_its_waits():
    spans = [
        span(0, "fetch", "fetch", 0, 0, 100, 1000),
        span(1, "compute", "forward", 0, 110, 150, 0, [0]),
        span(2, "fetch", "fetch", 1, 100, 300, 1000),
        span(3, "compute", "forward", 1, 310, 360, 0, [2]),  # 10 us after its fetch
        span(4, "compute", "forward", 0, 365, 400),  # of another pass: 5 us after the one before
        span(5, "compute", "backward", 1, 400, 500),
        span(6, "compute", "forward", 0, 505, 525),  # computed again, for its backward
        span(7, "compute", "backward", 0, 525, 600),
    ]
    costs = measured_costs(spans, 3)
    assert costs.forward_us == [40, 60, 0]
    assert costs.backward_us == [100, 100, 0]


def test_forwards_of_a_later_micro_batch_are_visits_of_their_own():
    spans, now = [], 0
    for verbs in 2 * [("forward", "backward")]:
        for verb, units in zip(verbs, ((0, 1), (1, 0)), strict=True):
            for unit in units:
                took = 10 if verb == "forward" else 20
                spans.append(span(len(spans), "compute", verb, unit, now, now + took))
                now += took
    costs = measured_costs([*spans, span(99, "compute", "user", -1, now, now)], 2)
    assert (costs.forward_us, costs.backward_us) == ([10, 10], [20, 20])


def test_sizes_that_are_alike_tell_no_latency():
    """Though they seem to tell a negative one."""
    for longer in (1100, 1800):
        spans = [span(0, "fetch", "fetch", 0, 0, 1000, 924_672), span(1, "fetch", "fetch", 0, 0, longer, 957_696)]
        costs = measured_costs(spans, 1)
        took = [1e6 * size / costs.gib_s["fetch"] / GIB for size in (924_672, 957_696)]
        assert costs.latency_us["fetch"] == 0 and sum(took) == pytest.approx(1000 + longer)


def test_sizes_tell_latency_and_rate_and_one_size_a_rate_alone():
    spans = [
        span(n, "fetch", "fetch", 0, 0, 30 + size // 100, size) for n, size in enumerate((1000, 5000, 20000, 5000))
    ]
    costs = measured_costs([*spans, span(9, "drain", "drain", 0, 0, 50, 1000)], 1)
    assert costs.latency_us["fetch"] == pytest.approx(30, abs=0.1)
    assert costs.gib_s["fetch"] == pytest.approx(1e6 / 0.01 / GIB)
    assert (costs.latency_us["drain"], costs.gib_s["drain"]) == (0, pytest.approx(1e6 / 0.05 / GIB))


def test_the_loop_takes_the_time_from_landed_gradients_to_the_first_update_or_the_end_of_step():
    landed = [span(0, "compute", "backward", 0, 0, 100), span(1, "drain", "drain", 0, 100, 150, 8)]
    step = span(3, "compute", "user", -1, 400, 400)
    assert measured_costs([*landed, step], 1).latency_us["compute"] == 250
    update = span(2, "update", "update", 0, 200, 300, 8)
    assert measured_costs([*landed, update, step], 1).latency_us["compute"] == 50
    assert measured_costs([], 1).latency_us["compute"] == 0


@pytest.mark.parametrize(
    "policy", [{}, {"draft_memory": "1GiB"}, {"update": "backward"}, {"update": "blocking"}], ids=str
)
def test_a_step_with_the_costs_of_a_simulated_one_takes_as_long(policy):
    """What is measured in a simulated trace are the costs that it was simulated with."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    planned = noria.plan(model, optimizer, device="cpu", kernel="fused", window=3, **policy)
    for speeds in (
        PlanSpeeds(0.1, 0.1, 0.1, 1e-4),
        PlanSpeeds(0.01, 0.1, 0.1, 1e-4),
        PlanSpeeds(0.1, 0.1, 0.05, 1e-4, draft=0.02),
    ):
        step = PlannedStep(planned, 64, speeds)
        costs = measured_costs(step.all_spans, len(planned.units))
        again = PlannedStep(planned, 1, PlanSpeeds(1, 1, 1, 1), costs)
        assert again.step_us == pytest.approx(step.step_us, rel=0.01)
        slower = measured_costs(
            PlannedStep(planned, 64, PlanSpeeds(0.001, 0.1, 0.1, 1e-4)).all_spans, len(planned.units)
        )
        assert PlannedStep(planned, 1, PlanSpeeds(1, 1, 1, 1), slower).step_us > 1.25 * step.step_us


def backwards_of(visits, ahead=()):
    """Of a step, by a trace of visits (f, b) and ends of a `step()` (u) in issue order.

    `ahead`: by step, how many visits the device has still before it when the host marks the end.
    """
    verbs = {"f": "forward", "b": "backward", "u": "user"}
    spans, now, by_step = [], 0, itertools.chain(ahead, itertools.repeat(0))
    for number, each in enumerate(visits):
        if each == "u":
            mark = now - 10 * next(by_step)
            spans.append(span(number, "compute", "user", -1, mark, mark))
        else:
            spans.append(span(number, "compute", verbs[each], 0, now, now + 10))
            now += 10
    return measured_costs(sorted(spans, key=lambda each: each.end_us), 1).backwards


def test_backwards_of_a_step_that_began_before_the_trace_do_not_count():
    assert backwards_of("bfbfbu" + "fbfbu" + "fbfbu" + "fb") == 2


@pytest.mark.parametrize("ahead", [(1, 1, 1), (2, 0, 0), (3, 1, 0), (5, 2, 2)], ids=str)
def test_backwards_count_to_their_step_if_the_device_is_behind(ahead):
    assert backwards_of(3 * "fbfbfbu", ahead) == 3
    assert backwards_of(3 * "ffbbfbu", ahead) == 2


def test_a_step_that_is_called_before_the_device_is_through_divides_no_backward():
    assert backwards_of(4 * "fbfbbu", ahead=4 * (1,)) == 2


def test_steps_of_a_second_optimizer_have_no_backwards_of_their_own():
    assert backwards_of(4 * "fbfbfbuu") == 3


@pytest.mark.parametrize("policy", [{}, {"draft_memory": "1GiB"}, {"update": "backward"}], ids=str)
@pytest.mark.parametrize("backwards", [2, 3])
def test_the_same_holds_for_steps_of_several_backwards(policy, backwards):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    planned = noria.plan(model, optimizer, device="cpu", kernel="fused", window=3, **policy)
    for speeds in (
        PlanSpeeds(0.1, 0.1, 0.1, 1e-4),
        PlanSpeeds(0.01, 0.1, 0.1, 1e-4),
        PlanSpeeds(0.1, 0.01, 0.01, 1e-4),
    ):
        step = PlannedStep(planned, 64, speeds, backwards=backwards)
        costs = measured_costs(step.all_spans, len(planned.units))
        assert costs.backwards == backwards
        assert PlannedStep(planned, 1, PlanSpeeds(1, 1, 1, 1), costs).step_us == pytest.approx(step.step_us, rel=0.02)


def test_ops_of_the_same_visit_are_one_visit():
    spans = [
        span(0, "compute", "user", -1, 0, 0),
        span(1, "compute", "forward", 0, 0, 40),
        span(2, "compute", "forward", 0, 45, 60),  # goes on as another op
        span(3, "compute", "backward", 0, 60, 100),
    ]
    costs = measured_costs(spans, 1)
    assert (costs.forward_us, costs.backward_us) == ([60], [40])


def test_hooks_take_the_time_from_the_end_of_all_waits_to_the_visit():
    spans = [
        span(0, "compute", "user", -1, 0, 0),
        span(1, "compute", "forward", 0, 10, 40),
        span(2, "fetch", "fetch", 1, 0, 90, 1000),
        span(3, "compute", "forward", 1, 100, 160, 0, [2]),
    ]
    assert measured_costs(spans, 2).hooks_us == 10


def simulated_copies(both_ways, host=0.0):
    """Spans of copies that overlap more or less, from the simulator, which knows what lanes share."""
    ops, table = [], _C.BufferTable()
    state = _C.Access(table.intern("host:2", 0, 1, "optimizer_state", 0), 0, "write")
    for number in range(60):
        ops.append(_C.Op(len(ops), "fetch", "fetch", 0, (number % 7 + 1) << 20, -1, []))
        if number % 3 == 0:
            ops.append(_C.Op(len(ops), "drain", "drain", 0, (number % 5 + 1) << 20, -1, []))
        if number % 4 == 0 and host:
            ops.append(_C.Op(len(ops), "update", "update", 0, 256 << 20, -1, [state]))
    waits = _C.derive(ops, table)
    costs = _C.Costs({"fetch": 2.0, "drain": 2.0, "update": 8.0}, {}, [0.0], [0.0], 0, both_ways, host, 1)
    return _C.simulate(ops, waits, costs)


def test_a_shared_link_is_seen():
    assert measured_costs(simulated_copies(3.0), 1).both_ways_gib_s == pytest.approx(3.0, rel=0.02)
    assert measured_costs(simulated_copies(0), 1).both_ways_gib_s == 0


def test_memory_that_copies_and_updates_share_is_seen():
    found = measured_costs(simulated_copies(0, host=6.0), 1)
    assert found.host_gib_s == pytest.approx(6.0, rel=0.1)
    assert measured_costs(simulated_copies(0, host=100.0), 1).host_gib_s == 0
