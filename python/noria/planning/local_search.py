"""Searches choices by small changes, and remembers what each would take."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Generic, TypeVar

from noria._errors import UsageError
from noria.planning.wrap_plan import WrapPlan

__all__ = ["FEW", "PARTS", "Tried", "climb", "is_about_as_fast", "pays"]

PARTS = 4
"""Into how many parts an amount is divided at first: a plan is simulated for each."""

FEW = 12
"""Of so many units each is looked at by itself. Of more units, one makes little difference."""

_GAIN = 0.01
"""By this part of a step a plan must be faster than one that takes less memory, or computes less again."""

Choice = TypeVar("Choice")


class Tried(Generic[Choice]):
    """Plans and simulates each choice once, and returns the time of its step: infinity if there is no room for it."""

    def __init__(self, plan: Callable[[Choice], WrapPlan], step_us: Callable[[WrapPlan], float]) -> None:
        self._plan = plan
        self._step_us = step_us
        self.plans: dict[Choice, WrapPlan] = {}
        """Of the choices for which there is room."""
        self.times: dict[Choice, float] = {}

    def __call__(self, choice: Choice) -> float:
        if choice not in self.times:
            self.times[choice] = math.inf
            with contextlib.suppress(UsageError):
                self.add(choice, self._plan(choice))
        return self.times[choice]

    def add(self, choice: Choice, planned: WrapPlan) -> float:
        """Takes the plan of a choice, and returns the time of its step."""
        self.times[choice], self.plans[choice] = self._step_us(planned), planned
        return self.times[choice]

    def best(self) -> Choice:
        return min(self.times, key=lambda each: self.times[each])


def pays(us: float, than_us: float, *, is_more: bool) -> bool:
    """Returns True if a step of the first time is worth it. `is_more`: it takes more memory, or computes more again."""
    return us < than_us * (1 - _GAIN if is_more else 1)


def is_about_as_fast(us: float, than_us: float) -> bool:
    return us <= than_us * (1 + _GAIN)


def climb(now: frozenset[int], units: frozenset[int], look: Callable[[frozenset[int]], float]) -> frozenset[int]:
    """Adds a unit, leaves one out, or takes one for another, as long as that makes the step shorter.

    `look` returns the time of a step. Returns the set that no such change makes shorter.
    """
    while True:
        others = sorted(units - now)
        near = [now | {unit} for unit in others] + [now - {unit} for unit in sorted(now)]
        near += [now - {one} | {other} for one in sorted(now) for other in others]
        next_one = min(near, key=look, default=now)
        if look(next_one) >= look(now):
            return now
        now = next_one
