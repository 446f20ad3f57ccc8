"""Lays out what lies in files: a record for each unit with its moments and low bits, one with its frozen weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from noria import _C
from noria.model.layout import Region
from noria.model.moment_formats import MOMENTS, SCALES
from noria.policy import format_bytes

__all__ = [
    "FILES",
    "FILE_ALIGNMENT",
    "IN_FILES",
    "NUM_STATE_SLOTS",
    "NUM_WEIGHTS_SLOTS",
    "RECORDS",
    "STATE_SLOTS",
    "WEIGHTS",
    "WEIGHTS_SLOTS",
    "FilePlan",
]

FILES = "files"
"""The place of what lies in files, as the ledger names it."""

RECORDS = "records"
"""The purpose of what lies in files: a record has the state of a unit, or its frozen weights."""

STATE_SLOTS = "state slots"
"""The purpose of the memory that records pass through on their way from files and back."""

WEIGHTS = "working copies"
"""The purpose of the arena whose frozen parts may lie in files."""

WEIGHTS_SLOTS = "weights slots"
"""The purpose of the arena that frozen weights pass through on their way from files to the device."""

NUM_WEIGHTS_SLOTS = 2
"""One is read while the other is copied to the device."""

IN_FILES = (*MOMENTS, *SCALES, "low bits")
"""Purposes of what a record has, in this order."""

NUM_STATE_SLOTS = 4
"""One is read, one is updated, one is written, and one waits for an update that is late.

Under update="backward" all of them are read ahead while nothing is updated."""

FILE_ALIGNMENT = 4096
"""Bytes: records are a multiple of this, as direct reads and pages are."""


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """Says what lies in files. Units: bytes."""

    offsets: dict[int, dict[str, int]] = dataclasses.field(default_factory=dict)
    """By index of a unit: where each purpose begins in its record."""
    sizes: dict[int, int] = dataclasses.field(default_factory=dict)
    """By index of a unit: the size of its record."""

    weights: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """By index of a unit: what of its part of the arena WEIGHTS lies in a file, as (begin, end)."""

    folders: tuple[str, ...] = ()

    instead: dict[str, int] = dataclasses.field(default_factory=dict)
    """By smaller `state_dtype`: the bytes that would lie in files."""

    @property
    def is_used(self) -> bool:
        """Returns True if anything lies in files."""
        return bool(self.sizes or self.weights)

    @property
    def slot_bytes(self) -> int:
        return max(self.sizes.values(), default=0)

    @property
    def num_slots(self) -> int:
        return min(NUM_STATE_SLOTS, len(self.sizes))

    @property
    def most_postponed(self) -> int:
        """Returns how many updates can wait for the end of the backward, if the gradient ring has room."""
        count = len(self.sizes)
        return sum(_C.is_postponed(number, self.num_slots, count) for number in range(count))

    @property
    def memory(self) -> int:
        """Returns the bytes of host memory that the slots for state take."""
        return self.num_slots * self.slot_bytes

    @property
    def weights_sizes(self) -> dict[int, int]:
        """Returns, by index of a unit, the bytes of weights that lie in a file."""
        return {unit: end - begin for unit, (begin, end) in self.weights.items()}

    @property
    def weights_slot_bytes(self) -> int:
        return max(self.weights_sizes.values(), default=0)

    @property
    def num_weights_slots(self) -> int:
        return min(NUM_WEIGHTS_SLOTS, len(self.weights))

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of state in files."""
        return sum(self.sizes.values())

    @property
    def weights_bytes(self) -> int:
        """Returns the bytes of weights in files."""
        return sum(self.weights_sizes.values())

    @property
    def file_bytes(self) -> int:
        return self.state_bytes + self.weights_bytes

    def instead_text(self) -> str:
        """Returns what smaller formats of moments would put into files; empty if there is none."""
        others = [f'{format_bytes(size)} with state_dtype="{each}"' for each, size in self.instead.items()]
        return f"instead of {format_bytes(self.file_bytes)} in files: {', '.join(others)}" if others else ""

    def regions(self, regions: Sequence[Region]) -> list[Region]:
        """Returns the arenas that are left in host memory, with the slots for weights."""
        if not self.is_used:
            return list(regions)

        def left(region: Region) -> Region:
            if region.purpose == WEIGHTS:
                offsets = region.offsets
                ranges = (
                    (offsets[unit] + begin, offsets[unit] + end) for unit, (begin, end) in sorted(self.weights.items())
                )
                return dataclasses.replace(region, in_files=tuple(ranges))
            if region.purpose not in IN_FILES:
                return region
            sizes = (
                0 if region.purpose in self.offsets.get(unit, ()) else size for unit, size in enumerate(region.sizes)
            )
            return Region.of(region.purpose, sizes)

        slots = [self.weights_slot_bytes * self.num_weights_slots] if self.weights else []
        return [*map(left, regions), *(Region.of(WEIGHTS_SLOTS, [size]) for size in slots)]
