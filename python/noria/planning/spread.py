"""Spreads a choice of units evenly over the model."""

from __future__ import annotations

__all__ = ["spread_evenly"]


def spread_evenly(needs: dict[int, int], budget: int) -> list[int]:
    """Returns units that together need at most `budget` bytes, each as far from the last one as the others.

    `needs`: the bytes of each unit that may be chosen, in the order of the model.
    """
    share = min(budget / max(sum(needs.values()), 1), 1.0)
    chosen, taken, seen = [], 0, 0
    for unit, need in needs.items():
        seen += need
        if taken + need <= min(budget, share * seen + need / 2):
            chosen.append(unit)
            taken += need
    return chosen
