"""Ranks that share a home: any loop has the bits of one engine that has it alone; and every kind of wait that
sharing brings matters, as in test_engine_waits.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.python.engine.bare import Call, Model, Twin, differences, play
from tests.python.engine.shared import Ranks, bare, expected
from tests.python.engine.test_engine import Loop, budgets, gradients_of, models
from tests.python.engine.test_engine_waits import CASES as UNSHARED
from tests.python.engine.test_engine_waits import (
    GIVEN_AT_ONCE,
    NEVER_LATE,
    Case,
    a_gradient_that_no_plan_foresaw,
    a_tied_unit,
)


@st.composite
def programs(draw):
    """A model, and a few steps of a loop that accumulates, on its rank first or over the ranks, evaluates, branches and
    fails. It never looks at gradients, and all updates are the pool's."""
    model = draw(models())
    loop = Loop(model)
    units = range(len(model.units))
    every = list(range(len(model.layers)))
    branch = sorted(draw(st.sets(st.sampled_from(every), min_size=1)))
    rarely = st.integers(0, 5).map(lambda n: n == 0)
    for _ in range(draw(st.integers(1, 4))):
        if draw(rarely):
            loop.forward(every, root=draw(st.integers(0, 1)), grad=False)
        num_unsynced = draw(st.sampled_from([0, 0, 1, 2]))
        for number in range(num_unsynced + draw(st.integers(1, 2))):
            loop.call("set_unsynced", number < num_unsynced)
            layers = branch if draw(rarely) else every
            loop.forward(layers)
            gradients = draw(gradients_of(model, layers))
            if draw(st.booleans()):
                loop.call("expect_updates", draw(st.sampled_from([0.05, 0.05, 0.04])))
            loop.backward(layers, gradients)
        if not draw(rarely):
            loop.step(set(units), blocking=draw(rarely))
            if not draw(rarely):
                loop.call("zero_grad")
        if draw(rarely):
            loop.call("write_home", draw(st.sampled_from(units)), 0.25)
        if draw(rarely):
            loop.call("read_home", draw(st.sampled_from(units)))
    for _ in range(3):
        loop.call("zero_grad")
        loop.plain(set(units))
    return model, loop.calls


def followed(size: int, model: Model, program: list[Call], **settings_of_engines: Any) -> Ranks:
    """Ranks after the program, beside their twin."""
    twin = Twin(model.units, is_shared=True)
    ranks = Ranks(size, model.units, **settings_of_engines)
    returned = ranks.play(program)
    assert returned == play(program, twin)
    assert differences(expected(twin, size), ranks.outcome(twin)) == []
    return ranks


@settings(max_examples=60)
@given(data=st.data())
def test_any_loop_of_ranks_in_any_window_gives_the_bits_of_a_loop_that_moves_nothing(data):
    model, program = data.draw(programs())
    arena, window = data.draw(budgets(model, program))
    assists = data.draw(st.booleans())
    ranks = followed(
        data.draw(st.sampled_from([2, 4])),
        model,
        program,
        arena=arena,
        window=window,
        machine=data.draw(st.sampled_from(["host", "calling thread"])),
        prefetch_at_step=data.draw(st.booleans()),
        drafts=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 1000)),
        max_delay_us=data.draw(st.sampled_from([0, 30, 200])),
        poison=data.draw(st.booleans()),
        assists=assists,
    )
    for engine in ranks.engines:
        assert engine.num_fetches > 0 and engine.peak_bytes <= engine.arena_bytes == arena
    kinds = {kind for engine in ranks.engines for kind in engine.wait_kinds()}
    assert kinds <= CASES.keys() | UNSHARED.keys() | GIVEN_AT_ONCE | NEVER_LATE | (ASSISTANCE if assists else set())
    ranks.each("close")


# ---- waits ----------------------------------------------------------------------------------------------------------


def loop_over(*units: tuple[int, int]) -> Loop:
    """A loop over a model with a layer for each unit."""
    return Loop(Model(list(units), [[unit] for unit in range(len(units))]))


def training(*units: tuple[int, int]) -> Loop:
    loop = loop_over(*units)
    for _ in range(3):
        loop.plain(set(range(len(units))))
    return loop


def another_branch(*units: tuple[int, int]) -> Loop:
    """`step` has queued the fetches of a pass that does not come: the one that does leaves out all but the last."""
    loop = loop_over(*units)
    every, last = set(range(len(units))), [len(units) - 1]
    for _ in range(2):
        loop.plain(every)
    loop.forward(last)
    loop.backward(last, loop.all_gradients(last))
    loop.step(every)
    loop.call("zero_grad")
    loop.plain(every)
    return loop


def gradients_that_no_plan_foresaw(*units: tuple[int, int]) -> Loop:
    loop = loop_over(*units)
    layers = list(range(len(units)))
    for gradients in ({}, loop.all_gradients(layers)):
        loop.forward(layers)
        loop.backward(layers, gradients)
    return loop


def a_backward_that_raises(*units: tuple[int, int]) -> Loop:
    loop = training(*units)
    layers = list(range(len(units)))
    loop.forward(layers)
    loop.backward(layers, loop.all_gradients(layers), stop=len(layers) - 1)
    loop.plain(set(layers))
    return loop


def accumulating(loop: Loop, left_out: int | None = None) -> Loop:
    """Two micro-batches on its rank, then one over the ranks, in which the gradients of the layer `left_out` do not
    come."""
    layers = list(range(len(loop.model.layers)))
    for _ in range(3):
        for number in range(3):
            gradients = loop.all_gradients(layers)
            loop.call("set_unsynced", number < 2)
            loop.forward(layers)
            if number == 2 and left_out is not None:
                del gradients[left_out]
            loop.backward(layers, gradients)
        loop.step(set(range(len(loop.model.units))))
        loop.call("zero_grad")
    return loop


def around_a_small_unit() -> Loop:
    """The large unit is needed again, so the small one's gradients come to where the large one's are on their way."""
    return Loop(Model([(1, 1), (2, 2)], [[1], [0], [1]]))


def accumulating_after_a_backward_that_raises(*units: tuple[int, int]) -> Loop:
    """What the last unit's visit has written there is lost; the first unit's gradient is added to in its memory."""
    loop = loop_over(*units)
    layers = list(range(len(units)))
    last = layers[-1]
    for _ in range(3):
        loop.call("set_unsynced", True)
        loop.forward([0])
        loop.backward([0], loop.all_gradients([0]))
        loop.forward(layers)
        loop.calls += [("begin_backward", ()), ("visit", (last, [last])), ("gradient", (last, 0)), ("reset", ())]
        loop.forward([0])
        loop.backward([0], loop.all_gradients([0]))
        loop.call("set_unsynced", False)
        loop.forward(layers)
        loop.backward(layers, loop.all_gradients(layers))
        loop.step(set(layers))
        loop.call("zero_grad")
    return loop


def accumulating_where_no_plan_foresaw_it(*units: tuple[int, int]) -> Loop:
    """Its buffer takes the memory of the first unit, which is just being gathered for a visit to come."""
    loop = loop_over(*units)
    layers, gradients = list(range(len(units))), {1: [(1, 0)]}
    loop.call("set_unsynced", True)
    for found in (gradients, {}, gradients):
        loop.forward(layers)
        loop.backward(layers, found)
    loop.call("set_unsynced", False)
    loop.forward(layers)
    loop.backward(layers, gradients)
    loop.step({1})
    return loop


def two_steps(*units: tuple[int, int]) -> Loop:
    """With the same gradients: no rank has looked at them, or fetched a unit, in between."""
    loop = training(*units)
    layers, every = list(range(len(units))), set(range(len(units)))
    loop.forward(layers)
    loop.backward(layers, loop.all_gradients(layers))
    for _ in range(2):
        loop.step(every)
    loop.call("zero_grad")
    loop.plain(every)
    return loop


@dataclass
class SharedCase(Case):
    threads: int = 1  # of each rank's pool


# A small unit before or behind one that is larger: the part that one rank fetches lies beside the small one's memory,
# so only the gather, or the next fetch, gets there.
CASES = {
    "fetch -> gather on weights (RAW)": Case(training((1, 1), (1, 1))),
    "gather -> forward on weights (RAW)": Case(training((1, 1), (1, 1))),
    "gather -> backward on weights (RAW)": Case(training((1, 1), (1, 1))),
    "backward -> reduce on gradient_buffer (WAW)": Case(training((1, 1), (1, 1))),
    "reduce -> drain on gradient_buffer (RAW)": Case(training((1, 1), (1, 1))),
    "drain -> reduce on held_gradient (RAW)": Case(a_tied_unit(), cells=5),
    "forward -> gather on weights (WAR)": Case(training((1, 1), (2, 2)), cells=4),
    "backward -> gather on weights (WAR)": Case(another_branch((1, 1), (2, 2)), cells=4),
    "drain -> gather on weights (WAR)": Case(another_branch((1, 1), (2, 2)), cells=4),
    "reduce -> fetch on weights (WAW)": Case(gradients_that_no_plan_foresaw((1, 1), (2, 2)), cells=4),
    "reduce -> backward on gradient_buffer (WAW)": Case(gradients_that_no_plan_foresaw((1, 1), (2, 2)), cells=5),
    "backward -> gather on weights (WAW)": Case(a_backward_that_raises((1, 1), (1, 1), (2, 2)), cells=6),
    "update -> update on optimizer_state (WAW)": SharedCase(two_steps((2, 0), (1, 1)), threads=2),
    "drain -> fetch on unreduced_gradient (RAW)": Case(accumulating(loop_over((1, 1), (2, 2))), cells=6),
    "fetch -> reduce on gradient_buffer (WAW)": Case(accumulating(loop_over((1, 1), (1, 1)), left_out=1), cells=4),
    "reduce -> fetch on gradient_buffer (WAW)": Case(accumulating(around_a_small_unit()), cells=5),
    "backward -> fetch on gradient_buffer (WAW)": Case(
        accumulating_after_a_backward_that_raises((1, 1), (1, 1)), cells=4, kernel_us=2_000
    ),
    "gather -> fetch on weights (WAW)": Case(another_branch((1, 1), (2, 0))),
    "gather -> backward on gradient_buffer (WAW)": Case(a_gradient_that_no_plan_foresaw()),
    "gather -> fetch on gradient_buffer (WAW)": Case(
        accumulating_where_no_plan_foresaw_it((2, 0), (1, 1), (1, 0)), cells=3
    ),
    "gather -> poison on weights (WAW)": Case(a_gradient_that_no_plan_foresaw(), poison=True, later="poison"),
}

# If the collect lane assists (plan/hazards.h, Note [Assistance]), after any newest op of it. All ranks here play the
# same program, so no rank does assist, and nothing goes wrong without it.
ASSISTANCE = {
    f"{giver} -> {waiter}"
    for giver in ("gather", "reduce")
    for waiter in (
        "drain on held_gradient (WAW)",
        "sum on held_gradient (RAW)",
        "update on held_gradient (RAW)",
        "update on working_copy (WAR)",
        "user on held_gradient (WAW)",
        "load on working_copy (WAR)",
    )
}

# All ranks together, or one that is later than the other: they wait for each other in every gather.
WHO_IS_LATE = [(0, 1), (0,), (1,)]


def outcome_of(case: Case, omitted: str, holds: Sequence[dict[str, int]]) -> tuple[dict[str, Any], set[str]]:
    """Every bit of a run of two ranks, and the kinds of wait it had."""
    model, program = case.program.model, case.program.calls
    arena = case.cells * bare.SLOT_BYTES
    threads = case.threads if isinstance(case, SharedCase) else 1
    ranks = Ranks(
        2, model.units, arena=arena, poison=case.poison, holds=holds, threads=threads, kernel_us=case.kernel_us
    )
    ranks.each("omit_wait", omitted)
    ranks.play(program)
    twin = Twin(model.units, is_shared=True)
    play(program, twin)
    bits = ranks.outcome(twin)
    if not omitted:
        assert differences(expected(twin, 2), bits) == []
    kinds = {kind for engine in ranks.engines for kind in engine.wait_kinds()}
    assert all(engine.num_fetches > 0 for engine in ranks.engines)
    ranks.each("close")
    return bits, kinds


@pytest.mark.parametrize("kind", CASES)
def test_ranks_go_wrong_without_this_kind_of_wait_and_right_with_it(kind):
    case, giver = CASES[kind], kind.split()[0]
    prompt, kinds = outcome_of(case, "", ())
    assert kind in kinds
    for hold_us in case.holds_us:
        late = {giver: hold_us} | ({case.later: 3 * hold_us} if case.later else {})
        for who in WHO_IS_LATE:
            holds = [late if rank in who else {} for rank in range(2)]
            outcome_of(case, "", holds)
            if differences(outcome_of(case, kind, holds)[0], prompt):
                return
    pytest.fail("nothing went wrong without it: the wait is not needed, or this program does not show why")
