"""Every kind of wait matters: left out, with its giver late, bits change; kept, with its giver as late, they do not.

The kinds are read off the engine itself, so a kind that is not tested here is a failure of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.python.engine.bare import (
    CELL,
    Call,
    Model,
    Slot,
    Twin,
    bare,
    differences,
    engine_outcome,
    play,
)
from tests.python.engine.test_engine import Loop, budgets, lent, programs

THREE = Model([(1, 1), (1, 1), (1, 1)], [[0], [1], [2]])
ALL = {0, 1, 2}


def training() -> Loop:
    loop = Loop(THREE)
    for _ in range(2):
        loop.plain(ALL)
    return loop


def edits_after_the_step() -> Loop:
    loop = training()
    loop.forward([0, 1, 2])
    loop.backward([0, 1, 2], loop.all_gradients([0, 1, 2]))
    loop.step(ALL)
    loop.call("clip", 1, 0)
    return loop


def a_tied_unit(kept: bool = False) -> Loop:
    """Its second gradient of the pass is added to what its first has just brought home; `kept`: by the device itself,
    for the user may write it meanwhile."""
    loop = Loop(Model([(1, 1), (1, 1)], [[0], [1], [0]]), [("keep", (0, 0))] if kept else [])
    for _ in range(2):
        loop.plain({0, 1})
    return loop


def accumulating(between: Sequence[Call] = (), edited: tuple[int, Slot] | None = None) -> Loop:
    """Two micro-batches a step; the loop does something `between` them, or a hook in the second one's backward."""
    loop = Loop(THREE)
    layers = [0, 1, 2]
    for _ in range(2):
        loop.forward(layers)
        loop.backward(layers, loop.all_gradients(layers))
        loop.calls += between
        loop.forward(layers)
        loop.backward(layers, loop.all_gradients(layers), edited=edited)
        loop.step(ALL)
        loop.call("zero_grad")
    return loop


def accumulating_onto_what_is_read_early() -> Loop:
    """The loop cannot have edited it, so nothing waits for the loop; its buffer takes the memory of the frozen unit."""
    loop = Loop(Model([(1, 0), (1, 1)], [[0], [1]]))
    loop.plain({1})
    for _ in range(2):
        loop.forward([0, 1])
        loop.call("expect_updates", 0.05)
        loop.backward([0, 1], {1: [(1, 0)]})
        loop.forward([0, 1])
        loop.backward([0, 1], {1: [(1, 0)]})
        loop.step({1})
        loop.call("zero_grad")
    return loop


def an_edit_of_what_is_on_its_way() -> Loop:
    """A hook edits what its own visit is about to add to."""
    loop = Loop(THREE)
    for _ in range(2):
        loop.forward([0, 1, 2])
        loop.backward([0, 1, 2], loop.all_gradients([0, 1, 2]))
        loop.forward([0, 1, 2])
        loop.call("begin_backward")
        for unit in (2, 1, 0):
            loop.calls += [("visit", (unit, [unit])), ("clip", (unit, 0)), ("gradient", (unit, 0))]
        loop.call("end_pass")
        loop.step(ALL)
        loop.call("zero_grad")
    return loop


def a_frozen_unit() -> Loop:
    """Nothing of it is drained: only the visit itself says when its memory is free."""
    loop = Loop(Model([(1, 1), (1, 0), (1, 1)], [[0], [1], [2]]))
    for _ in range(2):
        loop.plain({0, 2})
    return loop


def a_backward_that_raises() -> Loop:
    loop = training()
    loop.forward([0, 1, 2])
    loop.calls += [("begin_backward", ()), ("visit", (2, [2])), ("gradient", (2, 0)), ("visit", (1, [1]))]
    loop.calls += [("gradient", (1, 0)), ("reset", ()), ("zero_grad", ())]
    loop.plain(ALL)
    return loop


def a_gradient_that_no_plan_foresaw() -> Loop:
    """Its buffer takes the memory of a unit that was just being fetched."""
    loop = Loop(Model([(1, 0), (1, 1), (1, 0)], [[0], [1], [2]]))
    for gradients in ({}, {1: [(1, 0)]}):
        loop.forward([0, 1, 2])
        loop.backward([0, 1, 2], gradients)
    return loop


def a_gradient_in_place_of_another() -> Loop:
    """Another gradient was foreseen and does not come; this one's buffer takes its memory. Only the visit has waited
    for those who used that memory before."""
    loop = Loop(THREE, [("keep", (2, 0))])
    loop.backward([0, 1], {1: [(1, 0)]})
    loop.forward([0, 1, 2])
    loop.backward([0, 1, 2], {2: [(2, 0)], 1: [(1, 0)]})
    loop.backward([0, 1], {1: [(1, 0)], 0: [(0, 0)]})
    loop.forward([0, 1, 2])
    loop.backward([2], {2: [(0, 0)]})
    return loop


def a_gradient_of_a_unit_that_is_not_fetched() -> Loop:
    """No fetch has waited for the unit's last update, which still reads the gradient of before."""
    loop = Loop(Model([(2, 1), (4, 1)], [[0], [1]]))
    loop.plain({0, 1})
    loop.forward([0])
    loop.backward([0], {0: [(0, 0), (1, 0)]})
    return loop


def reads_at_home() -> Loop:
    loop = training()
    loop.call("read_home", 2)
    return loop


def writes_at_home() -> Loop:
    """Over a unit whose fetch was queued at the step."""
    loop = training()
    loop.call("write_home", 0, 0.25)
    return loop


def two_steps() -> Loop:
    """The first has queued the next forward's fetch of unit 0; the second leaves units to the launching thread, so it
    queues none."""
    loop = training()
    loop.forward([0, 1, 2])
    loop.backward([0, 1, 2], loop.all_gradients([0, 1, 2]))
    loop.step(ALL)
    loop.step({0})
    return loop


def drafting(
    end: list[Call],
    model: Model = THREE,
    rate: float = 0.05,
    pooled: set[int] | None = None,
) -> Loop:
    """The second backward is drafted; then comes `end`, and the step."""
    loop = Loop(model)
    layers = list(range(len(model.layers)))
    for last in (False, True):
        loop.forward(layers)
        loop.call("expect_updates", rate)
        loop.backward(layers, loop.all_gradients(layers))
        if not last:
            loop.step(set(range(len(model.units))))
            loop.call("zero_grad")
    loop.calls += end
    loop.step(set(range(len(model.units))) if pooled is None else pooled)
    if model is THREE:
        loop.forward(layers)
    return loop


# Until all that can be drafted has been: so what follows undoes it.
DRAFTED: Call = ("idle", ())


def evaluating() -> Loop:
    """A forward comes between backward and step."""
    loop = drafting([])
    step = max(i for i, (verb, _) in enumerate(loop.calls) if verb == "begin_step")
    evaluation = Loop(THREE)
    evaluation.forward([0, 1, 2], grad=False)
    loop.calls[step:step] = [DRAFTED, *evaluation.calls]
    return loop


def a_gradient_after_the_draft() -> Loop:
    """The last backward brings a gradient of unit 1 once more, in a visit that was not expected to."""
    loop = drafting([])
    begin = max(i for i, (verb, _) in enumerate(loop.calls) if verb == "begin_backward")
    last = next(i for i, call in enumerate(loop.calls) if i > begin and call == ("visit", (0, [0])))
    loop.calls[last + 1 : last + 1] = [DRAFTED, ("gradient", (1, 0))]
    return loop


def at_a_peer(units: Sequence[int] = (0, 1, 2), model: Model = THREE, micro_batches: int = 2) -> Loop:
    """These units are kept there."""
    loop = Loop(model, [("lend", (len(units) * CELL,)), ("keep_copies", (list(units),))])
    for _ in range(2):
        loop.plain({unit for unit in range(3) if model.trainable(unit)}, micro_batches)
    return loop


def a_fetch_that_was_for_nothing() -> Loop:
    """The step has queued fetches from home for a forward that does not come; what comes instead is at the peer."""
    loop = at_a_peer([2], Model([(1, 1), (1, 1), (1, 0)], [[0], [1], [2]]))
    loop.forward([2], grad=False)
    loop.call("idle")
    loop.forward([2], grad=False)
    return loop


def a_fetch_whose_visit_never_came() -> Loop:
    """It was on its way from the peer when the forward raised; its memory goes to a unit that comes from home."""
    loop = at_a_peer([2], Model([(1, 1), (1, 1), (1, 0)], [[0], [1], [2]]))
    loop.forward([0, 1, 2], stop=2)
    loop.forward([0, 1])
    return loop


def a_gradient_where_a_fetch_was_for_nothing() -> Loop:
    """Two are on their way from the peer when the forward raises. A held gradient comes from home, over another link,
    to where one of them was to lie."""
    loop = at_a_peer([1, 2])
    loop.forward([0, 1, 2])
    loop.backward([0, 1, 2], loop.all_gradients([0, 1, 2]))
    loop.forward([0, 1, 2], stop=1)
    loop.backward([0, 1], loop.all_gradients([0, 1]))
    loop.step(ALL)
    return loop


def a_unit_that_the_first_micro_batch_leaves_out() -> Loop:
    """It is stashed in the second one's forward; in its backward, gradients are added to in that memory."""
    loop = Loop(THREE, [("lend", (CELL,)), ("keep_copies", ([2],))])
    for _ in range(2):
        for layers in ([0, 1], [0, 1, 2], [0, 1, 2]):
            loop.forward(layers)
            loop.backward(layers, loop.all_gradients(layers))
        loop.step(ALL)
        loop.call("zero_grad")
    return loop


@dataclass
class Case:
    """A program in which a kind of wait comes up. `only_in_the_arena`: what goes wrong is the copy of a version that
    is not used any more; that it is not the version it was fetched as shows on the device only."""

    program: Loop
    cells: int = 2
    poison: bool = False
    later: str | None = None  # this verb comes later still, or the harm would be done after the last look
    only_in_the_arena: bool = False
    drafts: bool = False
    kernel_us: int = 0
    slow_peer: bool = False  # what comes from the peer comes later than what is sent for at once from home
    holds_us: tuple[int, ...] = (2_000, 8_000, 32_000, 128_000)  # later and later, should the machine be busy


CASES = {
    "update -> fetch on working_copy (RAW)": Case(training()),
    "fetch -> forward on weights (RAW)": Case(training()),
    "fetch -> backward on weights (RAW)": Case(training()),
    "forward -> fetch on weights (WAR)": Case(training()),
    "backward -> fetch on weights (WAR)": Case(training()),
    "backward -> drain on gradient_buffer (RAW)": Case(training()),
    "drain -> backward on gradient_buffer (WAR)": Case(training()),
    "drain -> user on held_gradient (WAW)": Case(training()),
    "user -> update on held_gradient (RAW)": Case(training()),
    "drain -> fetch on weights (WAR)": Case(training(), cells=3),
    "drain -> backward on held_gradient (RAW)": Case(a_tied_unit(kept=True), cells=4),
    "drain -> fetch on held_gradient (RAW)": Case(a_tied_unit(), cells=6),
    "user -> fetch on held_gradient (RAW)": Case(accumulating([("clip", (2, 0))]), kernel_us=2_000),
    "backward -> fetch on held_gradient (RAW)": Case(accumulating(edited=(2, (0, 0))), cells=5, kernel_us=2_000),
    "fetch -> user on held_gradient (WAR)": Case(an_edit_of_what_is_on_its_way(), cells=4, later="drain"),
    "drain -> fetch on gradient_buffer (WAR)": Case(accumulating()),
    "backward -> fetch on gradient_buffer (WAR)": Case(accumulating(), cells=4),
    "update -> user on held_gradient (WAR)": Case(edits_after_the_step()),
    "update -> drain on held_gradient (WAR)": Case(a_gradient_of_a_unit_that_is_not_fetched(), cells=5),
    "fetch -> backward on gradient_buffer (WAW)": Case(a_gradient_that_no_plan_foresaw(), later="drain"),
    "backward -> fetch on weights (WAW)": Case(a_backward_that_raises()),
    "backward -> fetch on gradient_buffer (WAW)": Case(a_gradient_in_place_of_another(), later="forward"),
    "update -> load on optimizer_state (WAW)": Case(reads_at_home()),
    "fetch -> load on working_copy (WAR)": Case(writes_at_home()),
    "fetch -> update on working_copy (WAR)": Case(two_steps(), only_in_the_arena=True),
    "drain -> draft on held_gradient (RAW)": Case(drafting([]), drafts=True),
    "undo -> user on held_gradient (WAR)": Case(drafting([DRAFTED, ("clip", (2, 0))]), drafts=True),
    "undo -> load on optimizer_state (WAW)": Case(drafting([DRAFTED, ("read_home", (0,))]), drafts=True),
    "undo -> fetch on working_copy (RAW)": Case(evaluating(), drafts=True),
    "undo -> drain on held_gradient (WAR)": Case(a_gradient_after_the_draft(), cells=14, drafts=True),
    "drain -> user on held_gradient (RAW)": Case(drafting([("look", (0, 0))]), drafts=True),
    "draft -> update on optimizer_state (WAW)": Case(drafting([], rate=0.04), drafts=True),
    "drain -> update on held_gradient (RAW)": Case(drafting([])),  # the sum was taken early: no write came since
    "drain -> sum on held_gradient (RAW)": Case(drafting([("sums", ())])),
    "user -> sum on held_gradient (RAW)": Case(drafting([("clip", (2, 0)), ("sums", ())]), kernel_us=2_000),
    "forward -> fetch on gradient_buffer (WAR)": Case(accumulating_onto_what_is_read_early(), kernel_us=2_000),
    # With a backend that overwrites vacated memory, it is the overwriting that waits for readers.
    "forward -> poison on weights (WAR)": Case(training(), poison=True),
    "backward -> poison on weights (WAR)": Case(a_frozen_unit(), poison=True),
    "drain -> poison on gradient_buffer (WAR)": Case(training(), poison=True),
    "backward -> poison on gradient_buffer (WAW)": Case(a_backward_that_raises(), poison=True),
    "poison -> backward on gradient_buffer (WAW)": Case(training(), cells=3, poison=True),
    "fetch -> stash on weights (RAW)": Case(at_a_peer()),
    "stash -> fetch on weights (WAR)": Case(at_a_peer()),
    "stash -> backward on gradient_buffer (WAR)": Case(at_a_peer()),
    "stash -> fetch on gradient_buffer (WAR)": Case(a_unit_that_the_first_micro_batch_leaves_out(), cells=3),
    "stash -> poison on weights (WAR)": Case(at_a_peer(), poison=True),
    "poison -> fetch on weights (WAW)": Case(at_a_peer(), poison=True),
    "fetch -> fetch on weights (WAW)": Case(a_fetch_that_was_for_nothing(), later="update"),
    "fetch -> fetch on gradient_buffer (WAW)": Case(a_gradient_where_a_fetch_was_for_nothing(), later="drain"),
    "fetch -> poison on weights (WAW)": Case(
        a_fetch_whose_visit_never_came(), poison=True, later="forward", slow_peer=True
    ),
}

# The calling thread's own access to the home is over before its next call, so it gives no ticket: no op waits for it,
# and nothing can hold it back.
GIVEN_AT_ONCE = {
    "load -> fetch on working_copy (RAW)",
    "load -> update on optimizer_state (WAW)",
    "load -> load on optimizer_state (WAW)",
    "load -> draft on optimizer_state (WAW)",
}


# The thread that asks for a sum waits for it itself; one that was taken early and written over since is taken again.
# After a draft that has begun comes its undo or its redo, unless it is over. The pool does one job after another, so
# these never come too early, and others wait for them. A draft that was recalled has touched nothing.
NEVER_LATE = {
    "draft -> undo on optimizer_state (WAW)",
    "draft -> fetch on working_copy (RAW)",
    "draft -> user on held_gradient (WAR)",
    "draft -> drain on held_gradient (WAR)",
    "draft -> load on optimizer_state (WAW)",
    "undo -> update on optimizer_state (WAW)",
    "sum -> drain on held_gradient (WAR)",
    "sum -> user on held_gradient (WAR)",
    "sum -> sum on gradient_sum (WAW)",
}


# A backward that adds to what was fetched waits for the fetch, and the drain waits for that backward. So this wait
# comes up only where nothing was added, and then what the fetch has read is not used.
FETCHED_FOR_NOTHING = {"fetch -> drain on held_gradient (WAR)"}


# A unit that is updated twice without a visit between: shown to matter by the cases of test_shared_engine.py.
SHOWN_AMONG_RANKS = {"update -> update on optimizer_state (WAW)"}


def outcome_of(
    case: Case, omitted: str, hold_us: dict[str, int], hold_peer_us: int = 0
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Every bit of a run (what was read at home and the arena included), and the kinds of wait it had."""
    model, program = case.program.model, case.program.calls
    engine = bare.BareEngine(
        model.units,
        arena=case.cells * bare.SLOT_BYTES,
        hold_us=hold_us,
        hold_peer_us=hold_peer_us,
        poison=case.poison,
        drafts=case.drafts,
        kernel_us=case.kernel_us,
    )
    engine.omit_wait(omitted)
    read = play([*program, ("idle", ())], engine)
    assert engine.num_fetches > 0
    bits = engine_outcome(engine, twin_of(model, program)[0])
    bits |= {"read at home": np.array(read, np.float64), "arena": np.array(engine.arena(), np.uint8)}
    kinds = engine.wait_kinds()
    engine.close()
    return bits, kinds


def twin_of(model: Model, program: list[Call]) -> tuple[Twin, np.ndarray]:
    twin = Twin(model.units)
    return twin, np.array(play(program, twin), np.float64)


@pytest.mark.parametrize("kind", CASES)
def test_results_are_wrong_without_this_kind_of_wait_and_right_with_it(kind):
    case = CASES[kind]
    twin, read = twin_of(case.program.model, case.program.calls)
    prompt, kinds = outcome_of(case, "", {})
    assert kind in kinds
    arena = prompt["arena"]
    assert differences(prompt, {**twin.outcome(), "read at home": read, "arena": arena}) == []
    giver = kind.split()[0]
    for hold_us in case.holds_us:
        holds = {giver: hold_us} | ({case.later: 3 * hold_us} if case.later else {})
        hold_peer_us = hold_us if case.slow_peer else 0
        held, _ = outcome_of(case, "", holds, hold_peer_us)
        assert differences(held, prompt) == []
        omitted, _ = outcome_of(case, kind, holds, hold_peer_us)
        wrong = differences(omitted, prompt)
        if wrong:
            break
    assert wrong, "nothing went wrong without it: the wait is not needed, or this program does not show why"
    assert case.only_in_the_arena == all(each.startswith("arena") for each in wrong), wrong


@settings(max_examples=120)
@given(data=st.data())
def test_no_program_has_a_kind_of_wait_that_is_not_shown_to_matter(data):
    model, program = data.draw(programs())
    arena, window = data.draw(budgets(model, program))
    program = data.draw(lent(model, program)) if data.draw(st.booleans()) else program
    engine = bare.BareEngine(
        model.units, arena=arena, window=window, poison=data.draw(st.booleans()), drafts=data.draw(st.booleans())
    )
    play([*program, ("idle", ())], engine)
    known = CASES.keys() | GIVEN_AT_ONCE | NEVER_LATE | FETCHED_FOR_NOTHING | SHOWN_AMONG_RANKS
    assert set(engine.wait_kinds()) <= known
    engine.close()


@pytest.mark.parametrize("kind", sorted(GIVEN_AT_ONCE))
def test_what_the_calling_thread_did_at_home_is_seen_without_any_ticket(kind):
    loop = drafting([])
    last = max(i for i, (verb, _) in enumerate(loop.calls) if verb == "expect_updates")
    loop.calls.insert(last, ("read_home", (0,)))
    for _ in range(2):
        loop.plain(ALL)
        for unit in (0, 2):
            loop.call("write_home", unit, 0.25)
        loop.call("read_home", 0)
    case = Case(loop, drafts=True)
    _, kinds = outcome_of(case, "", {})
    assert kind in kinds
    outcome, _ = outcome_of(case, kind, {"load": 2_000})
    twin, read = twin_of(loop.model, loop.calls)
    assert differences(outcome, {**twin.outcome(), "read at home": read, "arena": outcome["arena"]}) == []
