"""Searches sets of units by small changes."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["FEW", "GAIN", "PARTS", "climb"]

PARTS = 4
"""Into how many parts an amount is divided at first: a plan is simulated for each."""
GAIN = 0.01
"""By this part of a step a plan must be faster than one that takes less memory, or computes less again."""

FEW = 12
"""Of so many units each is looked at by itself. Of more units, one makes little difference."""


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
