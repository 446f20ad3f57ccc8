"""Room plan: who lies where when. Every plan is walked op by op by a slow judge that knows only the words."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

from tests.python.plan.programs import CELL, Model, budgets, models, training


def judge(model, plan, arena, window, entry=(), adds=False):
    """Walks a plan in issue order; returns what is leased at its end, by unit."""
    visits, ops, table = plan.visits, plan.ops, model.buffers
    weights = {unit: (offset, offset + model.units[unit].weights) for unit, offset in entry}
    open_gradients, brought = {}, {}
    last_opening, computed, fetches, peak_units = -1, -1, [], len(weights)
    peak = max([0, *(end for _, end in weights.values())])

    def take(range_of):
        begin, end = range_of.offset, range_of.offset + range_of.bytes
        assert begin % CELL == 0 and end <= arena, "a lease leaves the arena"
        for other_begin, other_end in [*weights.values(), *open_gradients.values(), *brought.values()]:
            assert end <= other_begin or other_end <= begin, "two leases overlap while both live"
        return begin, end

    for index, op in enumerate(ops):
        assert op.id == index and last_opening <= op.visit, "ops are out of order"
        last_opening = op.visit
        assert op.visit in (computed, computed + 1), "a visit was left out"
        if op.verb == "drain":
            assert op.visit == computed + 1 and model.buffers[op.accesses[0].buffer].unit == op.unit
            assert op.accesses[1].buffer == model.units[op.unit].held and op.accesses[1].mode == "write"
            assert op.bytes == model.units[op.unit].gradients
            del open_gradients[op.unit]
        elif op.verb == "evict":
            assert not open_gradients or op.visit == computed, "drains come first at an opening"
            del weights[op.unit]
        elif op.verb == "fetch" and table[op.accesses[-1].buffer].purpose == "gradient_buffer":
            source, target = op.accesses
            assert adds and (source.buffer, source.mode) == (model.units[op.unit].held, "read")
            assert op.bytes == model.units[op.unit].gradients and table[target.buffer].unit == op.unit
            assert op.unit not in open_gradients, "what it is added to has not been drained yet"
            assert op.unit in visits[min(computed + 1, len(visits) - 1)].gradients, "not for the next visit"
            brought[op.unit] = take(table[target.buffer])
        elif op.verb == "fetch":
            assert op.unit not in weights, "what lies there is fetched again"
            source, target = op.accesses
            assert (source.buffer, source.mode, source.version) == (model.units[op.unit].working, "read", 0)
            assert (target.mode, target.version) == ("write", 0)
            assert table[target.buffer].purpose == "weights" and table[target.buffer].unit == op.unit
            weights[op.unit] = take(table[target.buffer])
            fetches.append(op.unit)
            assert not window or len(weights) <= window, "more units are leased than the window holds"
        else:
            visit = visits[op.visit]
            assert op.visit == computed + 1 and not open_gradients, "a visit opens before the last was drained"
            computed = op.visit
            assert op.verb == visit.phase and op.unit == visit.needs[-1]
            read = {table[a.buffer].unit: table[a.buffer] for a in op.accesses if table[a.buffer].purpose == "weights"}
            assert sorted(read) == visit.needs, "a visit reads exactly what it needs"
            for unit, range_of in read.items():
                assert weights[unit] == (range_of.offset, range_of.offset + range_of.bytes), "a unit is elsewhere"
            written = [table[a.buffer] for a in op.accesses if a.mode == "write"]
            assert [b.unit for b in written] == visit.gradients
            for buffer in written:
                assert buffer.purpose == "gradient_buffer" and buffer.bytes == model.units[buffer.unit].gradients
                assert (buffer.unit in brought) == adds
                there = brought.pop(buffer.unit, None)
                open_gradients[buffer.unit] = there or take(buffer)
                assert open_gradients[buffer.unit] == (buffer.offset, buffer.offset + buffer.bytes)
            assert not brought
        for _, end in [*weights.values(), *open_gradients.values(), *brought.values()]:
            peak = max(peak, end)
        peak_units = max(peak_units, len(weights))
    assert computed == len(visits) - 1 and not open_gradients
    assert sorted(plan.exit) == sorted((unit, begin) for unit, (begin, _) in weights.items())
    assert (plan.num_fetches, plan.fetched) == (
        len(fetches),
        sum(model.units[unit].weights for unit in fetches),
    )
    assert (plan.peak, plan.peak_units) == (peak, peak_units), "the plan's account of itself is wrong"
    return weights


@settings(max_examples=300)
@given(st.data())
def test_every_visit_has_what_it_needs_and_no_two_leases_overlap(data):
    model = data.draw(models())
    arena, window = data.draw(budgets(model))
    entry = ()
    passes = ("forward", "backward"), ("backward", "forward"), ("forward", "backward"), ("backward", "forward")
    for number, (phase, next_phase) in enumerate(passes):
        adds = number == 3
        plan = model.plan(model.visits(phase), arena, window, model.visits(next_phase), entry, adds)
        judge(model, plan, arena, window, entry, adds)
        entry = plan.exit


@settings(max_examples=60)
@given(st.data())
def test_leases_say_from_which_op_to_which_a_range_is_taken(data):
    model, adds = data.draw(models()), data.draw(st.booleans())
    arena, window = data.draw(budgets(model))
    forward = model.plan(model.visits("forward"), arena, window, model.visits("backward"))
    plan = model.plan(model.visits("backward"), arena, window, [], forward.exit, adds)
    ops, leases = plan.ops, plan.leases
    last = len(ops)
    for a, b in combinations(leases, 2):
        apart = a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset
        a_end, b_end = (last if lease.last_op < 0 else lease.last_op for lease in (a, b))
        assert apart or a_end < b.first_op or b_end < a.first_op
    for lease in leases:
        purpose = model.buffers[lease.buffer].purpose
        first, end = ("fetch", "evict") if purpose == "weights" else ("fetch" if adds else "backward", "drain")
        assert (ops[lease.first_op].verb if lease.first_op >= 0 else first) == first
        assert (ops[lease.last_op].verb if lease.last_op >= 0 else "evict") == end
    assert [lease.first_op for lease in leases].count(-1) == len(forward.exit)


@settings(max_examples=100)
@given(st.data())
def test_fetches_are_issued_in_the_order_of_need_and_as_early_as_memory_and_window_allow(data):
    model = data.draw(models())
    arena, window = data.draw(budgets(model))
    plan = model.plan(model.visits("backward"), arena, window)
    visits, ops, table = plan.visits, plan.ops, model.buffers
    opened = {}  # gradient buffers by visit
    for op in ops:
        if op.verb == "backward":
            written = [table[a.buffer] for a in op.accesses if a.mode == "write"]
            opened[op.visit] = [(b.offset, b.offset + b.bytes) for b in written]
    needed_for, previous_opening = [], -1
    for index, op in enumerate(ops):
        if op.verb != "fetch":
            continue
        for visit in range(max(op.visit, 0), len(visits)):
            if op.unit in visits[visit].needs:
                needed_for.append(visit)
                break
        if op.visit > previous_opening:  # the lane waited for this one: something must have been in its way
            target = table[op.accesses[1].buffer]
            before = op.visit - 1
            evicted = [o.unit for o in ops[:index] if o.verb == "evict" and o.visit == op.visit]
            freed = before >= 0 and any(unit in visits[before].needs for unit in evicted)
            drained = any(
                begin < target.offset + target.bytes and target.offset < end for begin, end in opened.get(before, [])
            )
            assert freed or drained, "a fetch could have been issued earlier"
        previous_opening = op.visit
    assert needed_for == sorted(needed_for)


# ---- how many fetches --------------------------------------------------------------------------------------


def fewest_fetches(visits, num_slots, entry):
    """By trying everything: units of one size, slots that gradient buffers of the same size share."""
    states = {frozenset(entry): 0}
    for visit in visits:
        needs, room = frozenset(visit.needs), num_slots - len(visit.gradients)
        following = {}
        for lying, cost in states.items():
            cost += len(needs - lying)
            others = lying - needs
            for size in range(min(len(others), room - len(needs)) + 1):
                for kept in combinations(sorted(others), size):
                    state = needs | frozenset(kept)
                    following[state] = min(cost, following.get(state, cost))
        states = following
    return min(states.values())


def lru_fetches(visits, num_slots, entry):
    lying, fetches = list(entry), 0
    for visit in visits:
        for unit in visit.needs:
            fetches += unit not in lying
        others = [unit for unit in lying if unit not in visit.needs]
        keep = num_slots - len(visit.gradients) - len(visit.needs)
        lying = (others[-keep:] if keep else []) + visit.needs
    return fetches


@settings(max_examples=150)
@given(st.data())
def test_units_of_one_size_are_fetched_as_seldom_as_any_schedule_could(data):
    model = data.draw(models(equal=True))
    arena, window = data.draw(budgets(model))
    visits = model.visits("forward") + model.visits("backward")
    slots = min(arena // CELL, window or arena)
    if window and window < arena // CELL:  # a slot that the window forbids is still one for a gradient buffer
        visits = model.visits("forward")
    entry = [(unit, unit * CELL) for unit in range(data.draw(st.integers(0, min(slots, len(model.sizes)))))]
    plan = model.plan(visits, arena, window, entry=entry)
    assert plan.num_fetches == fewest_fetches(visits, slots, [unit for unit, _ in entry])
    assert plan.num_fetches <= lru_fetches(visits, slots, [unit for unit, _ in entry])


@settings(max_examples=80)
@given(st.data())
def test_what_lies_there_at_entry_is_not_fetched(data):
    model = data.draw(models())
    entry, end = [], 0
    for unit in data.draw(st.permutations(range(len(model.sizes)))):
        entry.append((unit, end))
        end += model.units[unit].weights
    plan = model.plan(model.visits("forward"), end, entry=entry)
    assert plan.num_fetches == 0 and sorted(plan.exit) == sorted(entry)


def test_what_the_next_pass_needs_first_is_what_stays():
    model = Model([(1, 1)] * 6, [[unit] for unit in range(6)])
    plan = model.plan(model.visits("forward"), 3 * CELL, next_visits=model.visits("backward"))
    assert [unit for unit, _ in plan.exit] == [3, 4, 5]
    plan = model.plan(model.visits("forward"), 3 * CELL, next_visits=model.visits("forward"))
    assert {0, 1} < {unit for unit, _ in plan.exit}


def test_needed_units_that_are_in_the_way_are_placed_anew():
    model = Model([(1, 0), (2, 0)], [[0, 1]])
    plan = model.plan(model.visits("forward"), 3 * CELL, entry=[(0, CELL)])  # neither side holds two cells
    judge(model, plan, 3 * CELL, 0, entry=[(0, CELL)])
    assert plan.num_fetches == 2


@pytest.mark.parametrize("num_cells", [3, 4, 5, 9])
def test_a_gradient_buffer_is_not_put_where_the_last_one_was(num_cells):
    """So that compute need not wait for the drain that has only just begun, when there is another place."""
    model = Model([(1, 1)] * 8, [[unit] for unit in range(8)])
    plan = model.plan(model.visits("backward"), num_cells * CELL)
    places = [
        model.buffers[a.buffer].offset
        for op in plan.ops
        for a in op.accesses
        if op.verb == "backward" and a.mode == "write"
    ]
    assert all(a != b for a, b in pairwise(places))


# ---- what does not fit -------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(st.data())
def test_smallest_budget_is_enough_and_anything_less_is_refused(data):
    model = data.draw(models())
    visits = model.visits("forward") + model.visits("backward")
    arena, window = model.smallest()
    judge(model, model.plan(visits, arena, window), arena, window)
    with pytest.raises(
        _C.UsageError, match=rf"expected .*blocks.*, but found .*\. Remedy: raise device_memory .*{arena}"
    ):
        model.plan(visits, arena - CELL, window)
    if window > 1:
        with pytest.raises(_C.UsageError, match=rf"window=[0-9]+\. Remedy: raise window to at least {window}"):
            model.plan(visits, arena, window - 1)


def test_refusal_names_the_unit_what_it_needs_what_there_is_and_what_would_fit():
    mib = 2**20 // CELL
    model = Model([(mib, mib), (406 * mib, 406 * mib)], [[0], [1]])
    with pytest.raises(_C.UsageError) as refusal:
        model.plan(model.visits("backward"), 512 * mib * CELL)
    assert str(refusal.value) == (
        'noria expected device memory for what one visit needs at once: unit "blocks.1" needs 812.0 MiB '
        "(weights 406.0 MiB, gradients 406.0 MiB), but found room for 512.0 MiB (536870912 bytes). Remedy: "
        "raise device_memory until there is room for 812.0 MiB (851443712 bytes), or split the unit"
    )


def test_an_impossible_entry_is_our_mistake():
    model = Model([(2, 1), (2, 1)], [[0], [1]])
    for entry in ([(0, 0), (1, CELL)], [(0, 7 * CELL)], [(0, 1)], [(0, 0), (0, 4 * CELL)]):
        with pytest.raises(_C.InvariantError, match="lies where it cannot lie"):
            model.plan(model.visits("forward"), 8 * CELL, entry=entry)


# ---- versions and text -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_versions_count_the_writes_of_a_buffer_since_the_pass_began(data):
    model = data.draw(models())
    arena, window = data.draw(budgets(model))
    plan = model.plan(model.visits("backward"), arena, window, adds=data.draw(st.booleans()))
    writes = {}
    for op in plan.ops:
        for access in sorted(op.accesses, key=lambda a: a.mode):  # reads first
            counts = access.mode == "write" and model.buffers[access.buffer].purpose != "weights"
            writes[access.buffer] = writes.get(access.buffer, 0) + counts
            assert access.version == writes[access.buffer]


@settings(max_examples=20)
@given(st.data())
def test_same_request_gives_the_same_plan(data):
    model = data.draw(models())
    arena, window = data.draw(budgets(model))
    texts = [training(model, arena, window).plans[0].to_text(model.buffers, model.names) for _ in range(2)]
    assert texts[0] == texts[1]


GOLDEN = """\
pass of 3 visits: 3 fetches of 2.0 KiB, peak 2.0 KiB, at most 2 units leased
  -1  fetch     c  reads working_copy(c)@0  writes weights(c)[0, 512)@0
  -1  fetch     b  reads working_copy(b)@0  writes weights(b)[1024, 2048)@0
   0  backward  c  reads weights(c)[0, 512)@0, held_gradient(c)@0  writes gradient_buffer(c)[512, 1024)@1
   1  drain     c  reads gradient_buffer(c)[512, 1024)@1  writes held_gradient(c)@1
   1  evict     c  ends weights(c)[0, 512)@0
   1  backward  b  reads weights(b)[1024, 2048)@0, held_gradient(b)@0  writes gradient_buffer(b)[0, 1024)@1
   2  drain     b  reads gradient_buffer(b)[0, 1024)@1  writes held_gradient(b)@1
   2  evict     b  ends weights(b)[1024, 2048)@0
   2  fetch     a  reads working_copy(a)@0  writes weights(a)[1024, 1536)@0
   2  backward  a  reads weights(a)[1024, 1536)@0
stays: a[1024]
"""


def test_held_gradients_come_one_visit_ahead_and_before_fetches_that_wait_for_memory():
    """Of five units the window has room for three. A fetch that waits for the first visit's end is behind them."""
    model = Model([(1, 1)] * 5, [[unit] for unit in range(5)])
    plan = model.plan(model.visits("backward"), 5 * CELL, 3, adds=True)
    judge(model, plan, 5 * CELL, 3, adds=True)
    purpose = [model.buffers[op.accesses[-1].buffer].purpose for op in plan.ops]
    ahead = [
        op.visit for op, what in zip(plan.ops, purpose, strict=True) if op.verb == "fetch" and what == "gradient_buffer"
    ]
    assert ahead == [0, 0, 1, 2, 3]
    for opening in (1, 2):
        fetched = [
            what for op, what in zip(plan.ops, purpose, strict=True) if (op.verb, op.visit) == ("fetch", opening)
        ]
        assert fetched[0] == "gradient_buffer" and fetched.count("weights") == len(fetched) - 1 > 0


def test_plan_reads_as_text():
    model = Model([(1, 0), (2, 2), (1, 1)], [[0], [1], [2]])
    plan = model.plan(model.visits("backward"), 4 * CELL)
    assert plan.to_text(model.buffers, ["a", "b", "c"]) == GOLDEN
