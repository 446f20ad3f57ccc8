"""Room plan: waits. They suffice in every order that lanes allow, and none is left that could go."""

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

from tests.python.plan.programs import CELL, Model, Program, budgets, models, training

TORN = -1


def cells(buffers, access):
    buffer = buffers[access.buffer]
    return [(buffer.place, cell) for cell in range(buffer.offset // CELL, (buffer.offset + buffer.bytes) // CELL)]


def accesses_of(ops, buffers):
    """By op: the cells it reads and those it writes."""
    return [
        tuple({c for a in op.accesses if a.mode == mode for c in cells(buffers, a)} for mode in ("read", "write"))
        for op in ops
    ]


class HostileRun:
    """Runs ops in random orders that lanes and waits allow. What an op writes is torn until the op ends."""

    def __init__(self, ops, buffers):
        self.ops, self.accesses = ops, accesses_of(ops, buffers)
        content, self.expected = {}, []
        for index, (reads, writes) in enumerate(self.accesses):  # issue order is the meaning of the program
            self.expected.append({cell: content.get(cell) for cell in reads})
            content.update(dict.fromkeys(writes, index))
        self.lanes = {}
        for index, op in enumerate(ops):
            self.lanes.setdefault(f"update {index}" if op.lane == "update" else op.lane, []).append(index)

    def num_wrong_reads(self, waits, seed):
        rng = random.Random(seed)
        pace = {lane: rng.choice((0.05, 1, 20)) for lane in self.lanes}  # one lane far behind another
        heads, busy, running, done, content, wrong = dict.fromkeys(self.lanes, 0), set(), [], set(), {}, 0
        candidates = set(self.lanes)
        while candidates or running:
            ready = [
                lane for lane in sorted(candidates - busy) if done.issuperset(waits[self.lanes[lane][heads[lane]]])
            ]
            choices = ready + running
            assert choices, "the waits have a circle"
            weights = [pace[choice] for choice in ready] + [pace[lane] for lane, _ in running]
            chosen = rng.choices(choices, weights)[0]
            if isinstance(chosen, str):
                index = self.lanes[chosen][heads[chosen]]
                reads, writes = self.accesses[index]
                wrong += any(content.get(cell) != seen for cell, seen in self.expected[index].items())
                content.update(dict.fromkeys(writes - reads, TORN))
                busy.add(chosen)
                running.append((chosen, index))
            else:
                lane, index = chosen
                reads, writes = self.accesses[index]
                wrong += any(
                    content.get(cell) != seen for cell, seen in self.expected[index].items() if cell not in writes
                )
                content.update(dict.fromkeys(writes, index))
                running.remove(chosen)
                busy.discard(lane)
                done.add(index)
                heads[lane] += 1
                if heads[lane] == len(self.lanes[lane]):
                    candidates.discard(lane)
        return wrong


def waits_with_kinds(ops, buffers, omit=""):
    hazards = _C.Hazards(buffers)
    hazards.omit(omit)
    return [[(wait.on, _C.kind_of(wait, op.verb)) for wait in hazards.issue(op)] for op in ops]


def all_pairs(ops, buffers):
    """The obvious twin: every earlier op that touches what this one touches, one of them writing; then what
    the lane or another of these already implies is left out."""
    accesses = accesses_of(ops, buffers)
    ended, last_on_lane, result = [], {}, []
    for j, (op, (reads, writes)) in enumerate(zip(ops, accesses, strict=True)):
        conflicts = {
            i
            for i, (other_reads, other_writes) in enumerate(accesses[:j])
            if reads & other_writes or writes & other_writes or writes & other_reads
        }
        before = set()
        if op.lane != "update" and op.lane in last_on_lane:
            before = ended[last_on_lane[op.lane]] | {last_on_lane[op.lane]}
        waits = []
        for i in sorted(conflicts, reverse=True):
            if i not in before:
                waits.append(i)
                before = before | ended[i] | {i}
        ended.append(before)
        last_on_lane[op.lane] = j
        result.append(waits)
    return result


@st.composite
def programs(draw):
    model = draw(models())
    arena, window = draw(budgets(model))
    return training(model, arena, window, draw(st.integers(1, 2)), draw(st.integers(1, 2)), poison=draw(st.booleans()))


@st.composite
def wild_ops(draw):
    """Ops that no planner would write, over ranges that overlap in every way. Updates write their state."""
    buffers = _C.BufferTable()
    ranges = [
        buffers.intern(place, first * CELL, size * CELL, "weights", unit)
        for unit, (place, first, size) in enumerate(
            draw(
                st.lists(
                    st.tuples(
                        st.sampled_from(["device:0", "device:1", "host"]),
                        st.integers(0, 8),
                        st.integers(1, 5),
                    ),
                    min_size=1,
                    max_size=8,
                )
            )
        )
    ]
    state = [buffers.intern("file:0", unit * CELL, CELL, "optimizer_state", unit) for unit in range(3)]
    access = st.builds(_C.Access, st.sampled_from(ranges), st.just(0), st.sampled_from(["read", "write"]))
    ops = []
    lanes = st.sampled_from(["compute", "fetch", "drain", "collect", "peer", "update"])
    for index, lane in enumerate(draw(st.lists(lanes, max_size=40))):
        accesses, unit = draw(st.lists(access, max_size=4)), draw(st.integers(0, 2))
        if lane == "update":
            accesses.append(_C.Access(state[unit], 0, "write"))
        ops.append(_C.Op(index, lane, "fetch", unit, accesses=accesses))
    return ops, buffers


# ---- they suffice, and none is left that could go ----------------------------------------------------------


@settings(max_examples=100)
@given(programs(), st.integers(0, 2**32))
def test_no_read_sees_a_wrong_version_in_any_order_that_lanes_and_waits_allow(program, seed):
    ops, buffers = program.ops, program.model.buffers
    run, waits = HostileRun(ops, buffers), _C.derive(ops, buffers)
    for k in range(4):
        assert run.num_wrong_reads(waits, seed + k) == 0


@settings(max_examples=200)
@given(st.one_of(programs().map(lambda program: (program.ops, program.model.buffers)), wild_ops()))
def test_waits_are_those_of_the_obvious_twin(case):
    ops, buffers = case
    assert _C.derive(ops, buffers) == all_pairs(ops, buffers)


ROOMY = Model([(2, 1), (1, 2), (2, 2), (1, 0), (1, 1)], [[0], [1], [2], [3], [4], [0, 4]])
RING = Model([(1, 1)] * 6, [[unit] for unit in range(6)])
FROZEN = Model([(2, 0), (1, 1), (2, 0), (1, 1)], [[0], [1], [2], [3]])
SKIPPED = Model([(1, 1), (1, 1), (1, 1)], [[0], [1]])  # no layer uses the last unit; the optimizer still moves it


def updated_without_backward():
    """The optimizer moves weights (by momentum, say) right after passes that read them; no gradient is clipped."""
    program = Program(SKIPPED, 2 * CELL)
    for _ in range(3):
        program.run_pass("forward", "forward", update_between=True)
        program.update()
    return program


CASES = {
    "tight": training(ROOMY, ROOMY.smallest()[0], steps=2),
    "roomy": training(ROOMY, ROOMY.whole(), steps=2, micro_batches=2),
    "ring": training(RING, 4 * CELL, steps=2),
    "ring of two": training(RING, 2 * CELL, steps=2, micro_batches=2),
    "window": training(RING, 6 * CELL, window=2, steps=2),
    "poisoned": training(RING, 4 * CELL, steps=2, poison=True),
    "frozen": training(FROZEN, 3 * CELL, steps=2, micro_batches=2, poison=True),
    "skipped": training(SKIPPED, 4 * CELL, steps=3),
    "unclipped": training(RING, 4 * CELL, steps=2, clip=False),
    "updated without backward": updated_without_backward(),
}
# What is left when what others imply is dropped, beside the ticket of the design that it is.
KINDS = {
    "update -> fetch on working_copy (RAW)",  # sealed
    "fetch -> update on working_copy (WAR)",  # fetched
    "forward -> fetch on weights (WAR)",  # read
    "backward -> fetch on weights (WAR)",
    "fetch -> forward on weights (RAW)",  # arrived
    "fetch -> backward on weights (RAW)",
    "backward -> drain on gradient_buffer (RAW)",  # ready
    "drain -> backward on gradient_buffer (WAR)",  # taken
    "drain -> fetch on weights (WAR)",
    "drain -> backward on held_gradient (RAW)",  # landed
    "drain -> user on held_gradient (RAW)",
    "drain -> update on held_gradient (RAW)",
    "user -> update on held_gradient (RAW)",  # handed
    "update -> user on held_gradient (WAR)",  # consumed
    "update -> update on optimizer_state (RAW)",  # the chain of one unit's updates
    # of a backward that adds to held gradients
    "drain -> fetch on held_gradient (RAW)",
    "drain -> fetch on gradient_buffer (WAR)",
    "forward -> fetch on gradient_buffer (WAR)",
    "fetch -> backward on gradient_buffer (WAW)",
    # of the hostile setting, which overwrites what is given up
    "forward -> poison on weights (WAR)",
    "backward -> poison on weights (WAR)",
    "drain -> poison on gradient_buffer (WAR)",
    "poison -> backward on gradient_buffer (WAW)",
}


def kinds_of(program):
    return Counter(kind for waits in waits_with_kinds(program.ops, program.model.buffers) for _, kind in waits)


def test_the_kinds_of_wait_are_the_tickets_of_the_design():
    found = set().union(*(kinds_of(program) for program in CASES.values()))
    assert found == KINDS


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_wait_matters(name):
    """Left out, it makes some order of the same ops read a wrong version, wherever it occurs."""
    ops, buffers = CASES[name].ops, CASES[name].model.buffers
    run = HostileRun(ops, buffers)
    for kind in kinds_of(CASES[name]):
        omitted = [[on for on, _ in waits] for waits in waits_with_kinds(ops, buffers, kind)]
        full = waits_with_kinds(ops, buffers)
        assert omitted == [[on for on, other in waits if other != kind] for waits in full]
        broken = (seed for seed in range(500) if run.num_wrong_reads(omitted, seed) > 0)
        assert next(broken, None) is not None, f"{kind} could go"


# ---- check -------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(programs(), st.randoms(use_true_random=False))
def test_check_accepts_derived_waits_and_misses_each_one_that_is_removed(program, rng):
    ops, buffers = program.ops, program.model.buffers
    waits = _C.derive(ops, buffers)
    assert _C.check(ops, waits, buffers) == []
    places = [(j, i) for j, givers in enumerate(waits) for i in givers]
    for j, i in rng.sample(places, min(8, len(places))):
        cut = [[giver for giver in givers if (k, giver) != (j, i)] for k, givers in enumerate(waits)]
        assert any(f"op {i} " in fault and f"before op {j} " in fault for fault in _C.check(ops, cut, buffers))


def test_check_misses_every_single_wait():
    for program in (CASES["tight"], CASES["frozen"]):
        ops, buffers = program.ops, program.model.buffers
        waits = _C.derive(ops, buffers)
        for j, givers in enumerate(waits):
            for giver in givers:
                cut = [*waits[:j], [other for other in givers if other != giver], *waits[j + 1 :]]
                assert _C.check(ops, cut, buffers), f"op {j} may leave out its wait for op {giver}"


def chain(*lanes):
    """Ops without accesses, so that only lanes and waits say anything."""
    return [_C.Op(index, lane, "fetch", index) for index, lane in enumerate(lanes)]


@pytest.mark.parametrize(
    ("lanes", "waits", "fault"),
    [
        (["fetch"], [[0]], "waits for op 0 .*, which is queued behind it on lane fetch"),
        (["fetch", "fetch"], [[1], []], "op 0 .* waits for op 1 .*, which is queued behind it"),
        (["fetch", "drain"], [[1], [0]], "a circle: "),
        (["update", "update"], [[1], [0]], "a circle: "),
        (["update"], [[0]], "a circle: "),
        # through two lanes: the fetch waits for a drain that stands behind one that waits for the fetch
        (["fetch", "drain", "drain"], [[2], [0], []], "a circle: "),
        (["compute", "fetch", "compute", "fetch"], [[3], [], [], [2]], "a circle: "),
        (["fetch", "drain"], [[], [7]], "waits for op 7, which never ends"),
    ],
)
def test_check_finds_each_circle(lanes, waits, fault):
    faults = _C.check(chain(*lanes), waits, _C.BufferTable())
    assert len(faults) == 1
    assert re.search(fault, faults[0]), faults[0]


def test_check_wants_every_read_to_name_what_was_written_last():
    buffers = _C.BufferTable()
    low, high = (buffers.intern("device:0", first * CELL, 2 * CELL, "weights", first) for first in (0, 1))

    def faults(*accesses):
        ops = [
            _C.Op(index, "fetch", "fetch", index, accesses=[_C.Access(*access)])
            for index, access in enumerate(accesses)
        ]
        return _C.check(ops, _C.derive(ops, buffers), buffers)

    assert faults((low, 1, "write"), (low, 1, "read")) == []
    assert "expects version 1" in faults((low, 1, "write"), (low, 2, "write"), (low, 1, "read"))[0]
    assert "wrote something else over it" in faults((low, 1, "write"), (high, 1, "write"), (low, 1, "read"))[0]


# ---- streaming ---------------------------------------------------------------------------------------------


def test_a_read_of_what_was_never_written_waits_for_nothing():
    buffers = _C.BufferTable()
    fresh = buffers.intern("host", 0, CELL, "working_copy", 0)
    hazards = _C.Hazards(buffers)
    assert hazards.issue(_C.Op(0, "fetch", "fetch", 0, accesses=[_C.Access(fresh, 0, "read")])) == []
    (wait,) = hazards.issue(_C.Op(1, "update", "update", 0, accesses=[_C.Access(fresh, 1, "write")]))
    assert (wait.on, wait.rule, wait.giver, wait.purpose) == (0, "WAR", "fetch", "working_copy")


def test_steady_state_remembers_no_more_step_by_step():
    for program in (CASES["tight"], CASES["poisoned"], CASES["skipped"]):
        hazards = _C.Hazards(program.model.buffers)
        remembered = []
        for step in range(12):
            for op in program.ops:
                hazards.issue(_C.Op(step * len(program.ops) + op.id, op.lane, op.verb, op.unit, accesses=op.accesses))
            remembered.append(hazards.num_remembered)
        assert remembered[2:] == [remembered[1]] * 10


def test_updates_of_one_unit_must_conflict():
    buffers = _C.BufferTable()
    hazards = _C.Hazards(buffers)
    ranges = [buffers.intern("host", k * CELL, CELL, "optimizer_state", 0) for k in range(2)]
    hazards.issue(_C.Op(0, "update", "update", 0, accesses=[_C.Access(ranges[0], 1, "write")]))
    with pytest.raises(_C.InvariantError, match="does not conflict with the update of the same unit before it"):
        hazards.issue(_C.Op(1, "update", "update", 0, accesses=[_C.Access(ranges[1], 1, "write")]))


def test_ops_come_in_issue_order():
    hazards = _C.Hazards(_C.BufferTable())
    hazards.issue(_C.Op(3, "fetch", "fetch"))
    for late in (3, 1):
        with pytest.raises(_C.InvariantError, match="after op 3"):
            hazards.issue(_C.Op(late, "fetch", "fetch"))


def test_only_ops_that_change_the_home_wait_for_a_collect_lane_that_assists():
    buffers = _C.BufferTable()

    def ranges(place, purpose):
        return [buffers.intern(place, unit * CELL, CELL, purpose, unit) for unit in range(2)]

    device, working = ranges("device:0", "weights"), ranges("host:0", "working_copy")
    held, state = ranges("host:1", "held_gradient"), ranges("host:2", "optimizer_state")
    unreduced = ranges("host:3", "unreduced_gradient")

    def op(index, lane, verb, unit, **modes):
        accesses = [_C.Access(buffer, 0, mode) for mode, touched in modes.items() for buffer in touched]
        return _C.Op(index, lane, verb, unit, accesses=accesses)

    ops = [
        op(0, "collect", "gather", 0, write=[device[0]]),
        op(1, "fetch", "fetch", 1, read=[working[1]], write=[device[1]]),
        op(2, "drain", "drain", 1, write=[unreduced[1]]),
        op(3, "update", "sum", 1, read=[held[1]]),
        op(4, "update", "update", 0, read=[held[0]], write=[state[0], working[0]]),
        op(5, "collect", "reduce", 1, write=[device[0]]),
        op(6, "drain", "drain", 1, write=[held[1]]),
    ]
    hazards = _C.Hazards(buffers, assists=True)
    assert [[wait.on for wait in hazards.issue(op)] for op in ops] == [[], [], [], [0], [0], [], [5, 3]]
    hazards = _C.Hazards(buffers)
    assert [[wait.on for wait in hazards.issue(op)] for op in ops] == [[], [], [], [], [], [], [3]]
