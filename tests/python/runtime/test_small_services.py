"""Services with a rule of their own, alone: what is loaded, whether drafts pay, where a step begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import noria
import pytest
from noria.runtime.draft_policy import DraftPolicy
from noria.runtime.load_tracker import LoadTracker
from noria.runtime.step_boundary import StepBoundary

# ---- what must be loaded ----


class TornEngine:
    def __init__(self) -> None:
        self.why = ""
        self.lost: dict[int, int] = {}  # by unit: how many times
        self.home = self

    def lost_weights(self) -> list[tuple[int, int, str]]:
        return [(unit, times, "EIO") for unit, times in self.lost.items()]

    def clear_lost_weights(self, unit: int) -> None:
        del self.lost[unit]

    def torn(self) -> str:
        return self.why

    def clear_torn(self) -> None:
        self.why = ""


def tracker() -> tuple[LoadTracker, TornEngine]:
    engine = TornEngine()
    trainable = [True, False, True, False]
    slots = [SimpleNamespace(index=index, trainable=each, unit=0) for index, each in enumerate(trainable)]
    home, units = SimpleNamespace(files=None), [SimpleNamespace(parameters=slots)]
    context: Any = SimpleNamespace(engine=engine, home=home, slots=slots, units=units)
    return LoadTracker(context), engine


def test_what_has_no_values_is_refused_by_name_until_it_is_loaded():
    loads, _ = tracker()
    loads.missing = {0: "head.weight", 2: "head.bias"}
    with pytest.raises(noria.UsageError, match=r'"head.weight" and 1 more, built on the meta device'):
        loads.refuse_missing("a forward")
    loads.note(0)
    with pytest.raises(noria.UsageError, match=r'"head.bias", built on the meta device'):
        loads.refuse_missing("a forward")
    loads.note(2)
    loads.refuse_missing("a forward")


def test_a_torn_home_is_whole_once_every_trained_weight_and_optimizer_has_been_loaded():
    loads, engine = tracker()
    optimizer = object()
    loads.track(optimizer)
    loads.note(0)  # before it was torn: does not count
    engine.why = "step 3 broke off"
    loads.note(0)
    loads.note(optimizer)
    assert engine.why, "slot 2 is still as it was"
    loads.note(2)
    assert not engine.why


def test_a_home_that_is_torn_again_wants_all_again():
    loads, engine = tracker()
    engine.why = "step 3 broke off"
    loads.note(0)
    engine.why = "step 4 broke off"
    loads.note(2)
    assert engine.why
    loads.note(0)
    assert not engine.why


def test_lost_frozen_weights_are_whole_once_all_of_their_unit_were_loaded_since():
    loads, engine = tracker()
    loads.note(1)  # before they were lost: does not count
    engine.lost = {0: 1}
    for slot in (0, 2, 3):
        loads.note(slot)
    assert engine.lost
    engine.lost = {0: 2}  # again: all of them, again
    loads.note(1)
    assert engine.lost
    loads.note(3)
    assert not engine.lost


# ---- whether drafts pay ----


class Drafting:
    """A run whose drafts are all kept, or all lost, as a test says step by step."""

    def __init__(self, drafted: bool = True) -> None:
        self.counts = dict.fromkeys(("kept", "unchanged", "changed", "redone", "undone", "dropped"), 0)
        self.notes: list[str] = []
        plan = SimpleNamespace(drafted=frozenset({0} if drafted else ()))
        engine = SimpleNamespace(updates=SimpleNamespace(draft_counts=lambda: dict(self.counts)))
        context: Any = SimpleNamespace(plan=plan, engine=engine, notes=self.notes, ranks=None)
        self.policy = DraftPolicy(context)

    def step(self, kind: str, would_hold: bool = False) -> bool:
        if self.policy.pay:
            self.counts[kind] += 1
        self.policy.judge(would_hold)
        return self.policy.pay


def test_drafts_stop_after_eight_steps_in_which_none_was_kept():
    run = Drafting()
    assert all(run.step("redone") for _ in range(7))
    assert not run.step("redone")
    assert len(run.notes) == 1 and "drafts have stopped" in run.notes[0]


def test_one_kept_draft_begins_the_count_again():
    run = Drafting()
    assert all(run.step("redone") for _ in range(7)) and run.step("unchanged")
    assert all(run.step("dropped") for _ in range(7)) and not run.step("changed")


def test_drafts_begin_again_after_eight_steps_that_would_have_kept_all():
    run = Drafting()
    for _ in range(8):
        run.step("redone")
    assert not any(run.step("redone", would_hold=True) for _ in range(7))
    assert not run.step("redone", would_hold=False)
    assert not any(run.step("redone", would_hold=True) for _ in range(7))
    assert run.step("redone", would_hold=True)
    assert not run.notes


def test_without_drafts_nothing_is_judged():
    run = Drafting(drafted=False)
    assert all(run.step("redone") for _ in range(20)) and not run.notes


# ---- where a step begins ----


def test_a_step_begins_once_however_many_optimizers_it_has():
    heard: list[str] = []
    step = StepBoundary([lambda: heard.append("each")], [lambda: heard.append("once")], lambda: heard.append("after"))
    step.begin()
    step.begin()
    assert heard == ["each", "once", "each"]
    step.expect()
    step.begin()
    assert heard[3:] == ["each", "once"]
    step.end()
    assert heard[5:] == ["after"]
