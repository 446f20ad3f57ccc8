"""Room plan: a plan in virtual time, and the bound that no schedule of a mode can beat."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

from tests.python.plan.programs import CELL, Model, budgets, models, training

GIB = 2**30


@st.composite
def costs(draw, num_units):
    times = st.lists(st.integers(0, 50), min_size=num_units, max_size=num_units)
    lanes = ("fetch", "drain", "update")
    microseconds_per_cell = {lane: draw(st.integers(0, 20)) for lane in lanes}
    bandwidth = {lane: CELL / us * 1e6 / GIB for lane, us in microseconds_per_cell.items() if us}
    return _C.Costs(bandwidth, {lane: draw(st.integers(0, 5)) for lane in lanes}, draw(times), draw(times))


@settings(max_examples=80)
@given(st.data())
def test_every_op_starts_when_its_lane_is_free_and_its_waits_have_ended_and_not_later(data):
    model = data.draw(models())
    program = training(model, *data.draw(budgets(model)))
    price = data.draw(costs(len(model.sizes)))
    waits = _C.derive(program.ops, model.buffers)
    spans = _C.simulate(program.ops, waits, price)
    assert [span.op for span in spans] == [op.id for op in program.ops]
    end, lane_free = {}, {}
    for span, op in zip(spans, program.ops, strict=True):
        assert (span.lane, span.verb, span.unit, span.bytes) == (op.lane, op.verb, op.unit, op.bytes)
        assert span.waits == waits[op.id]
        start = max([lane_free.get(op.lane, 0.0), *(end[wait] for wait in waits[op.id])])
        end[op.id] = lane_free[op.lane] = start + _C.duration_us(op, price)
        assert (span.start_us, span.end_us) == (
            pytest.approx(start, abs=0.51),
            pytest.approx(end[op.id], abs=0.51),
        )


def test_evictions_take_no_time_and_make_no_span():
    model = Model([(1, 0)] * 4, [[unit] for unit in range(4)])
    plan = model.plan(model.visits("forward"), 2 * CELL)
    price = _C.Costs(latency_us={"compute": 7}, forward_us=[1, 1, 1, 1])
    spans = _C.simulate(plan.ops, _C.derive(plan.ops, model.buffers), price)
    assert {op.verb for op in plan.ops} - {span.verb for span in spans} == {"evict"}
    assert max(span.end_us for span in spans) == 4
    assert [_C.duration_us(op, price) for op in plan.ops if op.verb == "evict"] == [0, 0]


def test_waiting_for_an_op_that_comes_later_is_our_mistake():
    ops = [_C.Op(0, "fetch", "fetch"), _C.Op(1, "drain", "drain")]
    for waits in ([[1], []], [[], [1]], [[]]):
        with pytest.raises(_C.InvariantError):
            _C.simulate(ops, waits, _C.Costs())


def test_durations_are_latency_and_bytes_over_bandwidth_or_what_the_unit_computes():
    price = _C.Costs({"fetch": 2.0}, {"fetch": 10.0, "drain": 3.0}, [5.0], [6.0, 7.0])
    duration = {
        (lane, verb, unit): _C.duration_us(_C.Op(0, lane, verb, unit, GIB), price)
        for lane, verb, unit in (
            ("fetch", "fetch", 0),
            ("drain", "drain", 0),
            ("compute", "forward", 0),
            ("compute", "backward", 1),
            ("compute", "forward", 1),
            ("compute", "user", -1),
        )
    }
    assert list(duration.values()) == [500_010.0, 3.0, 5.0, 7.0, 0.0, 0.0]


@given(st.lists(st.integers(0, 1000), min_size=12, max_size=12))
def test_bounds_are_those_of_the_design(times):
    forward, backward, update, f_forward, f_backward, drain, c_forward, c_backward, offload, peer, m_copy, m_up = times
    step = _C.StepTimes(*times)
    before, behind = max(forward, f_forward, c_forward), max(backward, drain, f_backward, c_backward)
    assert _C.blocking_bound_us(step) == max(before + behind, drain + offload, peer, m_copy) + max(update, m_up)
    assert _C.deferred_bound_us(step) == max(max(before, update) + behind, drain + offload, peer, m_copy + m_up)
    whole = max(forward + backward, update, f_forward + f_backward, drain + offload, c_forward + c_backward, peer)
    assert _C.drafting_bound_us(step) == max(whole, m_copy + m_up)


def test_copies_and_updates_share_the_memory_of_the_host_where_their_lanes_overlap():
    """A step of 10 + 20 us on the device, updates of 12 us, fetches of 8 + 9 us and drains of 7 us. Each fits
    behind the compute by itself; through the host's memory, copies take 15 us and updates 17 us, 32 together."""
    times = {"forward_us": 10, "backward_us": 20, "update_us": 12, "drain_us": 7}
    times |= {"forward_fetch_us": 8, "backward_fetch_us": 9}
    alone, shared = _C.StepTimes(**times), _C.StepTimes(**times, host_copies_us=15, host_updates_us=17)
    assert (_C.drafting_bound_us(alone), _C.drafting_bound_us(shared)) == (30, 32)
    assert (_C.deferred_bound_us(alone), _C.deferred_bound_us(shared)) == (32, 32)  # the update holds the backward up
    assert (_C.blocking_bound_us(alone), _C.blocking_bound_us(shared)) == (42, 47)  # nothing copies while it updates


@pytest.mark.parametrize(
    ("phase", "num_cells", "window", "compute_us", "move_us"),
    [
        ("forward", 2, 0, 20, 10),
        ("forward", 2, 0, 20, 20),
        ("forward", 3, 0, 10, 20),
        ("backward", 3, 0, 20, 10),
        ("backward", 4, 0, 10, 20),
        ("backward", 4, 0, 20, 20),
        ("forward", 80, 2, 20, 10),
        ("backward", 80, 2, 20, 10),
        ("backward", 80, 3, 10, 20),
    ],
)
def test_a_ring_of_buckets_keeps_its_busiest_lane_busy(phase, num_cells, window, compute_us, move_us):
    """A long model through a small window costs its busiest lane, plus the first fetch and the last drain."""
    num_units = 40
    model = Model([(1, 1)] * num_units, [[unit] for unit in range(num_units)])
    bandwidth = CELL / move_us * 1e6 / GIB
    price = _C.Costs({"fetch": bandwidth, "drain": bandwidth}, {}, [compute_us] * num_units, [compute_us] * num_units)
    plan = model.plan(model.visits(phase), num_cells * CELL, window)
    assert plan.num_fetches == num_units
    spans = _C.simulate(plan.ops, _C.derive(plan.ops, model.buffers), price)
    busiest = num_units * max(compute_us, move_us)
    assert busiest < max(span.end_us for span in spans) <= busiest + compute_us + 2 * move_us


# ---- lanes that share ----------------------------------------------------------------------------------------------


def ends_of(ops, price, waits=None):
    spans = _C.simulate(ops, waits or [[] for _ in ops], price)
    return [span.end_us for span in spans]


def test_a_fetch_and_a_drain_at_once_share_what_the_link_gives_both_ways():
    """2 GiB down and 1 GiB up, at 1 GiB/s each alone, 1.5 together: both run at 3/4 until the drain ends."""
    ops = [_C.Op(0, "fetch", "fetch", 0, 2 * GIB), _C.Op(1, "drain", "drain", 0, GIB)]
    alone = {"fetch": 1.0, "drain": 1.0}
    assert ends_of(ops, _C.Costs(alone)) == [2_000_000, 1_000_000]
    assert ends_of(ops, _C.Costs(alone, both_ways_gib_s=1.5)) == [2_333_333, 1_333_333]
    assert ends_of(ops, _C.Costs(alone, both_ways_gib_s=1.5), [[], [0]]) == [2_000_000, 3_000_000]  # one at a time


def test_copies_and_updates_share_the_memory_of_the_host():
    """An update asks for 3 GiB/s and a fetch for 1, of 2 GiB/s: each gets half of that until the fetch ends."""
    ops = [_C.Op(0, "fetch", "fetch", 0, GIB), _C.Op(1, "update", "update", 1, 6 * GIB)]
    price = _C.Costs({"fetch": 1.0, "update": 3.0}, host_gib_s=2.0)
    assert ends_of(ops, price) == [2_000_000, 3_500_000]  # 3 GiB until 2 s, then 2 GiB/s
    # A copied byte is read and written: the fetch asks for 2, and all get 2/5.
    price = _C.Costs({"fetch": 1.0, "update": 3.0}, host_gib_s=2.0, host_bytes_per_copied=2)
    assert ends_of(ops, price) == [2_500_000, 4_000_000]
    latency = _C.Costs({"fetch": 1.0, "update": 3.0}, {"fetch": 500_000.0}, host_gib_s=2.0)
    assert ends_of(ops, latency)[0] == 2_500_000  # a latency takes no memory


@settings(max_examples=80)
@given(st.data())
def test_lanes_that_share_take_no_more_than_there_is_and_never_less_time(data):
    model = data.draw(models())
    program = training(model, *data.draw(budgets(model)))
    times = data.draw(st.lists(st.integers(0, 50), min_size=len(model.sizes), max_size=len(model.sizes)))
    waits = _C.derive(program.ops, model.buffers)
    rate = CELL / 10 * 1e6 / GIB
    lanes = {"fetch": rate, "drain": rate, "update": rate}
    host, both = (rate * data.draw(st.floats(0.3, 3)) for _ in range(2))
    free = _C.simulate(program.ops, waits, _C.Costs(lanes, {}, times, times))
    shared = _C.simulate(program.ops, waits, _C.Costs(lanes, {}, times, times, 0, both, host))
    wide = _C.simulate(program.ops, waits, _C.Costs(lanes, {}, times, times, 0, 2 * rate, 3 * rate))
    assert [(s.start_us, s.end_us) for s in wide] == [(s.start_us, s.end_us) for s in free]
    rounding = len(free)
    assert max(s.end_us for s in shared) >= max(s.end_us for s in free) - rounding
    for of, most in ((("fetch", "drain"), max(both, rate)), (("fetch", "drain", "update"), host)):
        spans = [span for span in shared if span.lane in of]
        assert sum(span.bytes for span in spans) / GIB <= most * (covered(spans) + rounding) / 1e6
    for span, op in zip(shared, program.ops, strict=True):
        ends = [shared[wait].end_us for wait in waits[op.id]]
        assert span.start_us >= max(ends, default=0) - 1


def covered(spans):
    total, reached = 0, 0
    for span in sorted(spans, key=lambda span: span.start_us):
        total += max(0, span.end_us - max(span.start_us, reached))
        reached = max(reached, span.end_us)
    return total


def test_an_op_that_takes_a_slot_of_the_ring_waits_until_one_is_given_back():
    """Three drains of 1 s into a ring of two slots, and updates of 5 s: the third drain waits for the first update."""
    drains = [_C.Op(number, "drain", "drain", number, GIB) for number in range(3)]
    updates = [_C.Op(3 + number, "update", "update", number, 5 * GIB) for number in range(3)]
    waits = [[], [], [], [0], [1], [2]]
    price = _C.Costs({"drain": 1.0, "update": 1.0})

    def starts(ring_slots, gives=(3, 4, 5)):
        spans = _C.simulate(drains + updates, waits, price, [], ring_slots, [0, 1, 2] if ring_slots else [], gives)
        return [span.start_us / 1e6 for span in spans]

    assert starts(0, ()) == [0, 1, 2, 1, 6, 11]
    assert starts(3) == [0, 1, 2, 1, 6, 11]
    assert starts(2) == [0, 1, 6, 1, 6, 11]
    assert starts(1) == [0, 6, 12, 1, 7, 13]
    with pytest.raises(_C.InvariantError, match="waits for ever"):
        starts(2, ())
    with pytest.raises(_C.InvariantError, match="takes no slot"):
        _C.simulate(updates[:1], [[]], price, [0], 1, [0])


def test_drafts_may_have_a_rate_of_their_own():
    ops = [_C.Op(0, "update", "update", 0, GIB), _C.Op(1, "update", "draft", 1, GIB)]
    assert ends_of(ops, _C.Costs({"update": 2.0})) == [500_000, 1_000_000]
    assert ends_of(ops, _C.Costs({"update": 2.0}, draft_gib_s=1.0)) == [500_000, 1_500_000]
