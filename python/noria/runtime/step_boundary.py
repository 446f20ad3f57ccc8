"""Runs callbacks when an optimizer's `step()` begins and ends: some each time, some once after each forward that may
train."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["StepBoundary"]


class StepBoundary:
    """Runs `every` callback at the beginning of each optimizer's `step()`, then `once` callbacks once a step. Runs
    `after` each time that a `step()` has ended without an error."""

    def __init__(
        self, every: Sequence[Callable[[], None]], once: Sequence[Callable[[], None]], after: Callable[[], None]
    ) -> None:
        self._every = every
        self._once = once
        self.end = after
        self._has_begun = False

    def expect(self) -> None:
        """Notes that a forward begins that may train: the next `step()` begins a new step."""
        self._has_begun = False

    def begin(self) -> None:
        for each in self._every:
            each()
        if not self._has_begun:
            self._has_begun = True
            for each in self._once:
                each()
