"""The engine, driven by its verbs. With any program, budget and delays, the bits are those of a loop that has no
memory to move."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

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

HOSTS = ["host", "calling thread"]
MACHINES = [*HOSTS, "fake cuda"]


# ---- programs -------------------------------------------------------------------------------------------------------


@dataclass
class Loop:
    """Writes programs: the loop that a user would have, step by step."""

    model: Model
    calls: list[Call] = field(default_factory=list)

    def call(self, verb: str, *arguments: Any) -> None:
        self.calls.append((verb, arguments))

    def forward(self, layers: list[int], root: int = 0, grad: bool = True, stop: int | None = None) -> None:
        """One forward pass; `stop`: it raises before this many layers."""
        self.call("begin_forward", root, grad, grad)
        for number, layer in enumerate(layers):
            if number == stop:
                return  # the engine is not told: the next pass finds it open
            self.call("visit", layer, self.model.layers[layer])
            if layer % 2:
                self.call("leave")
        self.call("end_pass")

    def backward(
        self,
        layers: list[int],
        gradients: dict[int, list[Slot]],
        stop: int | None = None,
        edited: tuple[int, Slot] | None = None,
    ) -> None:
        """One backward pass. A frozen layer that no gradient passes is visited all the same, as in LoRA. `edited`: in
        this layer a gradient hook writes to that gradient, which has not arrived in this pass."""
        arrived: set[Slot] = set()
        self.call("begin_backward")
        for number, layer in enumerate(reversed(layers)):
            if number == stop:
                self.call("reset")
                self.call("zero_grad")
                return
            self.call("visit", layer, self.model.layers[layer])
            for unit, slot in gradients.get(layer, []):
                self.call("gradient", unit, slot)
            arrived |= set(gradients.get(layer, []))
            if edited and edited[0] == layer and edited[1] not in arrived:
                self.call("clip", *edited[1])
        self.call("end_pass")

    def all_gradients(self, layers: list[int]) -> dict[int, list[Slot]]:
        return {layer: self.model.slots(self.model.layers[layer]) for layer in layers}

    def step(self, pooled: set[int], blocking: bool = False) -> None:
        self.call("begin_step")
        for unit in range(len(self.model.units)):
            self.call("update", unit, unit in pooled)
        self.call("end_step", blocking)

    def plain(self, pooled: set[int], micro_batches: int = 1) -> None:
        layers = list(range(len(self.model.layers)))
        for _ in range(micro_batches):
            self.forward(layers)
            self.backward(layers, self.all_gradients(layers))
        self.step(pooled)
        self.call("zero_grad")


@st.composite
def models(draw):
    """Unequal units, some frozen or half frozen; layers that share units, and that need several."""
    num_units = draw(st.integers(1, 5))
    sizes = st.integers(1, 4).flatmap(lambda slots: st.tuples(st.just(slots), st.integers(0, slots)))
    units = draw(st.lists(sizes, min_size=num_units, max_size=num_units))
    need = st.sets(st.integers(0, num_units - 1), min_size=1, max_size=min(3, num_units)).map(sorted)
    layers = draw(st.permutations([[unit] for unit in range(num_units)] + draw(st.lists(need, max_size=3))))
    return Model(units, layers)


@st.composite
def gradients_of(draw, model, layers):
    """Which gradients arrive in which layer's backward: mostly all of its units', sometimes some, or another unit's."""
    gradients = Loop(model).all_gradients(layers)
    if draw(st.booleans()):
        return gradients
    anything = model.slots(list(range(len(model.units))))
    odd = draw(st.sampled_from(layers))
    if anything:
        gradients[odd] = draw(st.lists(st.sampled_from(anything), max_size=4))
    return gradients


@st.composite
def programs(draw):
    """A model, and a few steps of a loop that accumulates, evaluates, branches, clips, edits and fails."""
    model = draw(models())
    loop = Loop(model)
    units = range(len(model.units))
    every = list(range(len(model.layers)))
    branch = sorted(draw(st.sets(st.sampled_from(every), min_size=1)))
    slots = model.slots(list(units))
    some_slots = st.lists(st.sampled_from(slots), max_size=2) if slots else st.just([])
    pooled = draw(st.sets(st.sampled_from(list(units))))
    rarely = st.integers(0, 5).map(lambda n: n == 0)
    for unit, slot in draw(some_slots):
        loop.call("keep", unit, slot)
    for _ in range(draw(st.integers(1, 4))):
        if draw(rarely):
            loop.forward(every, root=draw(st.integers(0, 1)), grad=False)
        for _ in range(draw(st.integers(1, 2))):
            layers = branch if draw(rarely) else every
            if draw(rarely):
                loop.forward(layers, stop=draw(st.integers(0, len(layers) - 1)))
            loop.forward(layers)
            gradients = draw(gradients_of(model, layers))
            if draw(st.booleans()):
                loop.call("expect_updates", draw(st.sampled_from([0.05, 0.05, 0.04])))
            if draw(rarely):
                loop.backward(layers, gradients, stop=draw(st.integers(0, len(layers) - 1)))
                loop.forward(layers)
            edit = st.tuples(st.sampled_from(layers), st.sampled_from(slots)) if slots else st.none()
            loop.backward(layers, gradients, edited=draw(edit) if draw(rarely) else None)
            for unit, slot in draw(some_slots) if draw(rarely) else []:
                loop.call("clip", unit, slot)
        if draw(st.booleans()):
            loop.call("sums")
        for unit, slot in draw(some_slots):
            loop.call("clip", unit, slot)
        if draw(st.booleans()):
            loop.call("sums")
        if draw(rarely):
            for unit, slot in draw(some_slots):
                loop.call("look", unit, slot)
        if not draw(rarely):
            loop.step(pooled, blocking=draw(rarely))
            for unit, slot in draw(some_slots):
                loop.call("clip", unit, slot)
            if not draw(rarely):
                loop.call("zero_grad")
        if draw(rarely):
            loop.call("write_home", draw(st.sampled_from(units)), 0.25)
        if draw(rarely):
            loop.call("read_home", draw(st.sampled_from(units)))
    for _ in range(3):  # by the third time nothing is new
        loop.call("zero_grad")
        loop.plain(pooled)
    return model, loop.calls


@st.composite
def budgets(draw, model, program):
    arena, window = model.smallest(program)
    more = draw(st.integers(0, max(0, model.whole() - arena) // bare.SLOT_BYTES))
    return arena + more * bare.SLOT_BYTES, draw(st.sampled_from([0, window, window + 1]))


@st.composite
def settings_of_engines(draw, model, program):
    """For `run`: a budget that suffices for the program, and a machine with its delays."""
    arena, window = draw(budgets(model, program))
    return {
        "arena": arena,
        "window": window,
        "machine": draw(st.sampled_from(MACHINES)),
        "seed": draw(st.integers(0, 1000)),
        "max_delay_us": draw(st.sampled_from([0, 30, 200])),
        "poison": draw(st.booleans()),
    }


def run(model, program, twin=None, **settings_of_engine):
    """The engine, idle after the program, beside its twin."""
    twin = twin or Twin(model.units)
    engine = bare.BareEngine(model.units, **settings_of_engine)
    returned = play([*program, ("idle", ())], engine)
    assert returned == play(program, twin)
    assert differences(twin.outcome(), engine_outcome(engine, twin)) == []
    return engine


# ---- exactness ------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(data=st.data())
def test_any_loop_in_any_window_gives_the_bits_of_a_loop_that_moves_nothing(data):
    model, program = data.draw(programs())
    drawn = data.draw(settings_of_engines(model, program))
    arena, window = drawn["arena"], drawn["window"]
    engine = run(model, program, prefetch_at_step=data.draw(st.booleans()), drafts=data.draw(st.booleans()), **drawn)
    # Something moved, and within bounds.
    num_visited = len({unit for verb, arguments in program if verb == "visit" for unit in arguments[1]})
    assert engine.num_fetches >= num_visited
    assert engine.peak_bytes <= engine.arena_bytes == arena
    assert window == 0 or engine.peak_units <= window
    passes = engine.passes()
    followed = [each for each in passes if each["planned_fetches"] is not None]
    assert all(each["fetches"] == each["planned_fetches"] for each in followed), passes
    assert sum(each["times"] >= 3 for each in followed) >= 2, "the loop at the end was not known by its third time"
    engine.close()


def test_a_gradient_of_a_unit_that_the_pass_never_fetches_waits_for_its_deferred_update():
    model = Model([(2, 1), (4, 1)], [[0], [1]])
    loop = Loop(model)
    for _ in range(2):
        loop.plain(pooled=set())
    loop.forward([0])
    loop.backward([0], {0: [(0, 0), (1, 0)]})  # unit 1 has no room beside unit 0: its update is still to be done
    engine = run(model, loop.calls, arena=model.smallest(loop.calls)[0], prefetch_at_step=False)
    assert engine.passes()[-1]["fetches"] == 0 and engine.num_fetches > 0


@pytest.mark.parametrize("num_slots", [4, 6, 8])
def test_another_pass_may_come_than_the_backward_that_followed_a_step_before(num_slots):
    """A step once lay between two backwards of one forward. The engine may have prepared the second one."""
    model = Model([(1, 1)] * 4, [[0], [1], [2], [3]])
    loop, layers = Loop(model), [0, 1, 2, 3]
    for number in range(4):
        loop.forward(layers)
        loop.backward([2, 3], loop.all_gradients([2, 3]))
        loop.step(set(layers))
        if number < 3:
            loop.backward([0, 1], loop.all_gradients([0, 1]))
            loop.step(set(layers))
        loop.call("zero_grad")
    loop.plain(set(layers))
    run(model, loop.calls, arena=num_slots * bare.SLOT_BYTES)


@pytest.mark.parametrize("machine", ["host", "fake cuda"])
def test_a_gradient_that_is_edited_inside_a_visit_does_not_hide_the_rest_of_the_visit(machine):
    """The edit is an op of the compute lane too; what the visit does after it must still be waited for."""
    model = Model([(2, 1), (4, 2)], [[0], [1]])
    loop = Loop(model)
    loop.plain({0, 1})
    loop.forward([0, 1])
    loop.backward([0, 1], loop.all_gradients([0, 1]))
    loop.step({0, 1})
    loop.forward([0, 1])
    loop.calls += [("begin_backward", ()), ("visit", (1, [1])), ("gradient", (1, 1)), ("clip", (1, 0))]
    loop.calls += [("gradient", (1, 0)), ("visit", (0, [0])), ("gradient", (0, 0)), ("end_pass", ())]
    run(model, loop.calls, arena=2 * model.whole(), machine=machine, kernel_us=3000)


@pytest.mark.parametrize("machine", ["host", "fake cuda"])
def test_a_model_may_change_its_stream_at_any_moment(machine):
    """Autograd computes on the streams of the forward, and users switch streams: the compute lane stays one queue."""
    model = Model([(2, 2), (3, 1), (1, 0), (4, 4)], [[0], [1], [2], [3], [0, 2], [1]])
    loop = Loop(model)
    for _ in range(3):
        loop.plain({0, 1, 3}, micro_batches=2)
    moves = ("visit", "gradient", "end_pass", "begin_step", "begin_forward", "begin_backward")
    calls = [each for call in loop.calls for each in ([("change_stream", ())] if call[0] in moves else []) + [call]]
    run(model, calls, arena=8 * bare.SLOT_BYTES, machine=machine, kernel_us=200, poison=True)


# ---- copies at peers ------------------------------------------------------------------------------------------------


@st.composite
def lent(draw, model, program):
    """The program of a loop to which a peer lends memory for some units' copies. It may take some of it back."""
    room = draw(st.integers(1, model.whole() // bare.SLOT_BYTES))
    calls = [("lend", (room * bare.SLOT_BYTES,))]
    units = st.permutations(range(len(model.units))).flatmap(
        lambda order: st.integers(0, len(order)).map(lambda count: order[:count])
    )
    calls.append(("keep_copies", (draw(units),)))
    for call in program:
        calls.append(call)
        if call[0] not in ("end_step", "claim"):
            continue
        if draw(st.booleans()):
            calls.append(("keep_copies", (draw(units),)))
        if draw(st.integers(0, 5)) == 0:
            room = draw(st.integers(0, room))
            calls.append(("shrink_copies", (room * bare.SLOT_BYTES,)))
    return calls


@settings(max_examples=60)
@given(data=st.data())
def test_any_loop_has_the_same_bits_with_units_at_a_peer(data):
    model, program = data.draw(programs())
    drawn = data.draw(settings_of_engines(model, program)) | {"machine": data.draw(st.sampled_from(HOSTS))}
    program = data.draw(lent(model, program))
    engine = run(model, program, prefetch_at_step=data.draw(st.booleans()), drafts=data.draw(st.booleans()), **drawn)
    assert engine.copy_stats()[2] <= engine.num_fetches
    engine.close()


@pytest.mark.parametrize("machine", HOSTS)
@pytest.mark.parametrize("room", [3, 2])
def test_a_unit_comes_from_home_once_of_each_version_and_from_the_peer_then(machine, room):
    model = Model([(1, 1), (1, 1), (1, 1)], [[0], [1], [2]])
    loop = Loop(model)
    steps, micro_batches = 3, 3
    for _ in range(steps):
        loop.plain({0, 1, 2}, micro_batches)
    settings_of_engine = {"arena": 2 * CELL, "machine": machine, "seed": 5, "max_delay_us": 100}
    settings_of_engine["prefetch_at_step"] = False
    alone = run(model, loop.calls, **settings_of_engine)
    lends = [("lend", (room * bare.SLOT_BYTES,)), ("keep_copies", ([0, 1, 2],))]
    engine = run(model, lends + loop.calls, **settings_of_engine)
    num_units, num_stashed, num_fetched = engine.copy_stats()
    assert (num_units, num_stashed) == (room, room * steps)
    assert engine.num_fetches == alone.num_fetches
    if room == 3:
        assert engine.num_fetches - num_fetched == 3 * steps  # from home
    assert num_fetched > 0


def test_a_frozen_unit_is_put_at_the_peer_once():
    model = Model([(1, 0), (1, 1), (1, 0)], [[0], [1], [2]])
    loop = Loop(model)
    for _ in range(4):
        loop.plain({1})
    engine = run(
        model, [("lend", (3 * CELL,)), ("keep_copies", ([0, 2],)), *loop.calls], arena=2 * CELL, machine="host"
    )
    assert engine.copy_stats()[:2] == (2, 2)
    assert engine.copy_stats()[2] > 6


def test_what_was_written_at_home_is_not_fetched_from_the_peer():
    model = Model([(1, 1), (1, 1), (1, 1)], [[0], [1], [2]])
    loop = Loop(model)
    loop.calls += [("lend", (3 * CELL,)), ("keep_copies", ([0, 1, 2],))]
    loop.plain({0, 1, 2})
    for _ in range(3):
        loop.forward([0, 1, 2], grad=False)
    for unit in range(3):
        loop.call("write_home", unit, 0.5)
    for _ in range(2):
        loop.forward([0, 1, 2], grad=False)
    assert run(model, loop.calls, arena=2 * CELL).copy_stats()[1] == 9  # versions of all of them


def test_what_the_model_has_overwritten_is_not_fetched_from_the_peer():
    """The copy may have been made after that."""
    model = Model([(1, 1), (1, 1), (1, 1)], [[0], [1], [2]])
    loop = Loop(model)
    loop.calls += [("lend", (3 * CELL,)), ("keep_copies", ([0, 1, 2],))]
    loop.forward([0, 1, 2], grad=False)
    loop.call("lose", 0)
    for _ in range(2):
        loop.forward([0, 1, 2], grad=False)
    assert run(model, loop.calls, arena=2 * CELL).copy_stats()[1] == 3 + 1


def test_a_peer_that_takes_memory_back_keeps_fewer_copies():
    model = Model([(1, 1), (1, 1), (1, 1)], [[0], [1], [2]])
    loop = Loop(model)
    loop.calls += [("lend", (3 * CELL,)), ("keep_copies", ([0, 1, 2],))]
    for room in (3, 1, 0):
        loop.plain({0, 1, 2}, 2)
        loop.call("shrink_copies", room * CELL)
    loop.plain({0, 1, 2}, 2)
    engine = run(model, loop.calls, arena=2 * CELL, seed=3, max_delay_us=100)
    assert engine.copy_stats()[:2] == (0, 3 + 3 + 1)


# ---- drafts ---------------------------------------------------------------------------------------------------------


def drafting(edit=lambda loop: None, rate=0.05, steps=5, micro_batches=1):
    """A loop whose updates may be drafted; `edit` writes calls between the last backward and the step."""
    model = Model([(2, 2), (3, 3), (1, 0), (4, 4), (1, 1)], [[0], [1], [2], [3], [0, 4], [1]])
    loop = Loop(model)
    layers = list(range(len(model.layers)))
    for _ in range(steps):
        for _ in range(micro_batches):
            loop.forward(layers)
            loop.call("expect_updates", rate)
            loop.backward(layers, loop.all_gradients(layers))
        edit(loop)
        loop.step({0, 1, 3, 4})
        loop.call("zero_grad")
    return model, loop.calls


def clip(loop, late=False):
    if late:
        loop.call("idle")  # until everything that can be drafted has been
    for unit in (0, 1, 3, 4):
        loop.call("clip", unit, 0)


EDITS = {
    "nothing": (lambda loop: None, 0.05, "kept"),
    "a clip at once": (clip, 0.05, None),
    "a clip of what was drafted": (lambda loop: clip(loop, late=True), 0.05, "undone"),
    "another rate": (lambda loop: loop.call("idle"), 0.04, "redone"),
    "a look at the home": (lambda loop: [loop.call("read_home", unit) for unit in (0, 1, 3, 4)], 0.05, "thrown away"),
    "a write to the home": (
        lambda loop: [loop.call("write_home", unit, 0.5) for unit in (0, 1, 3, 4)],
        0.05,
        "thrown away",
    ),
    "another forward": (lambda loop: loop.forward([0, 1, 3], grad=False), 0.05, "thrown away"),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("hold_us", [{}, {"draft": 3000}])
def test_updates_that_are_drafted_have_the_bits_of_those_that_are_not(machine, edit, micro_batches, hold_us):
    calls_of, rate, fate = EDITS[edit]
    model, calls = drafting(calls_of, rate, micro_batches=micro_batches)
    engine = run(model, calls, arena=8 * bare.SLOT_BYTES, machine=machine, poison=True, drafts=True, hold_us=hold_us)
    counts = dict(zip(("kept", "looked at", "redone", "undone", "dropped"), engine.draft_counts(), strict=True))
    assert sum(counts.values()) > 0
    if fate is None:
        return  # a draft that has not begun is recalled by the first write to what it would read
    if fate == "thrown away":  # undone, or dropped before it began
        assert counts["undone"] + counts["dropped"] > 0, counts
        return
    assert counts[fate] > 0, counts
    assert counts[fate] == sum(counts.values())


# ---- updates inside backward ----------------------------------------------------------------------------------------


@st.composite
def loops_with_a_ring(draw):
    """Models whose units are used several times and in part; forwards and backwards over changing layers."""
    model = draw(models())
    every = list(range(len(model.layers)))
    loop = Loop(model)
    for _ in range(draw(st.integers(2, 6))):
        layers = every if draw(st.booleans()) else sorted(draw(st.sets(st.sampled_from(every), min_size=1)))
        if draw(st.booleans()):
            loop.forward(layers, grad=False)
        loop.forward(layers)
        loop.call("expect_in_backward")
        gradients = loop.all_gradients(layers)
        if draw(st.booleans()):
            gradients = {
                layer: draw(st.lists(st.sampled_from(slots))) if slots else [] for layer, slots in gradients.items()
            }
        loop.backward(layers, gradients)
        loop.call("claim")
        if draw(st.booleans()):
            loop.call("read_home", draw(st.integers(0, len(model.units) - 1)))
    return model, loop.calls


@settings(max_examples=80)
@given(data=st.data())
def test_updates_inside_backward_give_the_bits_of_updates_after_it(data):
    model, program = data.draw(loops_with_a_ring())
    drawn = data.draw(settings_of_engines(model, program))
    if drawn["machine"] in HOSTS and data.draw(st.booleans()):
        program = data.draw(lent(model, program))
    run(model, program, ring_slots=len(model.units), **drawn).close()


@pytest.mark.parametrize("late", ["update", "drain", "fetch"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_ring_of_two_units_serves_many_if_a_lane_or_the_pool_is_late(machine, late):
    model = Model([(2, 2)] * 6, [[unit] for unit in range(6)])
    loop = Loop(model)
    for _ in range(4):
        loop.forward(list(range(6)))
        loop.call("expect_in_backward")
        loop.backward(list(range(6)), loop.all_gradients(list(range(6))))
        loop.call("claim")
    run(
        model,
        loop.calls,
        arena=8 * bare.SLOT_BYTES,
        machine=machine,
        ring_slots=2,
        hold_us={late: 2_000},
        poison=True,
        kernel_us=200,
    )


# ---- a steady state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("machine", MACHINES)
def test_in_a_steady_state_nothing_is_allocated_and_nothing_more_is_remembered(machine, pooled):
    model = Model([(2, 2), (3, 1), (1, 0), (4, 4)], [[0], [1], [2], [3], [0, 2], [1]])
    loop = Loop(model)
    loop.forward(list(range(6)), grad=False)
    loop.plain({0, 1, 3} if pooled else set(), micro_batches=2)
    engine = bare.BareEngine(model.units, arena=8 * bare.SLOT_BYTES, window=3, machine=machine, poison=True)
    twin = Twin(model.units)

    def once():
        play([*loop.calls, ("idle", ())], engine)
        play(loop.calls, twin)
        # How many tickets live at once, and with them events (a ticket's own, and two that tell the op's time), depends
        # on who is late; never more than a few loops'.
        assert engine.num_remembered <= len(loop.calls)
        assert engine.num_events <= 3 * 4 * len(loop.calls)
        return engine.num_allocations, engine.num_buffers

    for _ in range(3):
        steady = once()
    fetched = engine.num_fetches
    for _ in range(5):
        assert once() == steady
    assert differences(twin.outcome(), engine_outcome(engine, twin)) == []
    planned = sum(each["planned_fetches"] for each in engine.passes() if each["times"] >= 5)
    passes = {each["itinerary"]: each for each in engine.passes()}
    assert all(each["fetches"] == each["planned_fetches"] for each in passes.values() if each["times"] >= 5)
    assert (engine.num_fetches - fetched) % 5 == 0 and engine.num_fetches - fetched >= 5 * planned


# ---- failures -------------------------------------------------------------------------------------------------------


def trained_once(machine="host", **settings_of_engine):
    """An engine that knows its loop and is idle, and the loop."""
    model = Model([(1, 1), (2, 2), (1, 1)], [[0], [1], [2]])
    loop = Loop(model)
    loop.plain({0, 1, 2})
    engine = bare.BareEngine(model.units, arena=4 * bare.SLOT_BYTES, machine=machine, **settings_of_engine)
    play([*loop.calls, ("idle", ())], engine)
    return engine, loop.calls


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("blocking", [True, False])
def test_an_update_that_throws_is_heard_of_and_releases_everybody(machine, blocking):
    engine, calls = trained_once(machine)
    with pytest.raises(_C.MachineError, match="the update of"):
        for verb, arguments in calls * 2:
            if verb == "update":
                engine.fail_next_update()
                arguments = (arguments[0], False)
            if verb == "end_step":
                arguments = (blocking,)
            getattr(engine, verb)(*arguments)
    engine.close()  # returns: no lane waits for a ticket that will never be given


def test_a_kernel_that_fails_fails_the_updates_behind_it_and_raises_in_calls_that_wait():
    engine, calls = trained_once()
    step = next(i for i, (verb, _) in enumerate(calls) if verb == "begin_step")
    engine.hold_stream()
    engine.break_stream()  # queued, like a kernel whose failure is not known yet
    play(calls[:step], engine)
    play(calls[step:], engine)  # updates wait for what is on the stream
    weights = [engine.array("weights", unit) for unit in range(3)]
    engine.release_stream()
    with pytest.raises(_C.MachineError, match="a kernel failed"):
        engine.idle()
    engine.close()
    assert weights == [engine.array("weights", unit) for unit in range(3)], "an update ran on gradients that never came"


def test_closing_in_the_middle_of_everything_returns():
    engine, calls = trained_once(hold_us={"update": 3000, "drain": 3000, "fetch": 1000})
    play(calls[: len(calls) // 2 + 2], engine)
    engine.close()
    engine.close()


def test_an_engine_that_is_dropped_while_its_lanes_run_takes_its_memory_along_only_when_they_are_done():
    for _ in range(5):
        engine, calls = trained_once(hold_us={"fetch": 3000})
        play(calls[:2], engine)
        del engine
