"""Computes the bounds of docs/journey.md, with reads from files and writes to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from noria import _C

__all__ = ["READS", "WRITES", "Bounds", "bounds_of", "times_without_files"]

READS, WRITES = "reads from disk", "writes to disk"
"""The names of what the disk is the wall for."""

_OF_FILES = ("read_us", "write_us", "all_reads_us")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Holds the time that no schedule of a mode beats, by mode. Units: microseconds."""

    blocking_us: float
    deferred_us: float
    drafting_us: float


def times_without_files(times: Mapping[str, float]) -> _C.StepTimes:
    """Returns the times of a step without those of files."""
    return _C.StepTimes(**{name: us for name, us in times.items() if name not in _OF_FILES})


def bounds_of(times: Mapping[str, float]) -> Bounds:
    """Returns the bounds of a step.

    Args:
        times: the fields of `StepTimes`, and beside them those of files, each alone: `read_us` and `write_us` for
            state, and `all_reads_us` for state and weights. A missing one takes no time.
    """
    update_us, read_us, write_us, all_us = (times.get(name, 0.0) for name in ("update_us", *_OF_FILES))

    def step(*during_updates: float) -> _C.StepTimes:
        return times_without_files({**times, "update_us": max(update_us, *during_updates)})

    # A mode reads while it updates. "blocking" writes then too. In the others writes may go on until the next ones.
    return Bounds(
        max(_C.blocking_bound_us(step(read_us, write_us)), all_us),
        max(_C.deferred_bound_us(step(read_us)), write_us, all_us),
        max(_C.drafting_bound_us(step(read_us)), write_us, all_us),
    )
