"""Lays out what lies in files: one record for each unit, with its moments and the low bits of its masters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from noria.model.layout import Region
from noria.model.moment_formats import MOMENTS, SCALES
from noria.policy import format_bytes

__all__ = ["FILES", "FILE_ALIGNMENT", "IN_FILES", "NUM_STATE_SLOTS", "RECORDS", "STATE_SLOTS", "FilePlan"]

FILES = "files"
"""The place of what lies in files, as the ledger names it."""

RECORDS = "records"
"""The purpose of what lies in files: a record has the state of a unit."""

STATE_SLOTS = "state slots"
"""The purpose of the memory that records pass through on their way from files and back."""

IN_FILES = (*MOMENTS, *SCALES, "low bits")
"""Purposes of what a record has, in this order."""

NUM_STATE_SLOTS = 4
"""One is read, one is updated, one is written, and one waits for an update that is late."""

FILE_ALIGNMENT = 4096
"""Bytes: records are a multiple of this, as direct reads and pages are."""


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """Says what lies in files: one record for each unit. Units: bytes."""

    offsets: dict[int, dict[str, int]] = dataclasses.field(default_factory=dict)
    """By index of a unit: where each purpose begins in its record."""
    sizes: dict[int, int] = dataclasses.field(default_factory=dict)
    """By index of a unit: the size of its record."""

    folders: tuple[str, ...] = ()

    instead: dict[str, int] = dataclasses.field(default_factory=dict)
    """By smaller `state_dtype`: the bytes that would lie in files."""

    @property
    def slot_bytes(self) -> int:
        return max(self.sizes.values(), default=0)

    @property
    def num_slots(self) -> int:
        return min(NUM_STATE_SLOTS, len(self.sizes))

    @property
    def memory(self) -> int:
        """Returns the bytes of host memory that the slots take."""
        return self.num_slots * self.slot_bytes

    @property
    def file_bytes(self) -> int:
        return sum(self.sizes.values())

    def instead_text(self) -> str:
        """Returns what smaller formats of moments would put into files; empty if there is none."""
        others = [f'{format_bytes(size)} with state_dtype="{each}"' for each, size in self.instead.items()]
        return f"instead of {format_bytes(self.file_bytes)} in files: {', '.join(others)}" if others else ""

    def regions(self, regions: Sequence[Region]) -> list[Region]:
        """Returns the arenas that are left in host memory."""
        if not self.sizes:
            return list(regions)

        def left(region: Region) -> Region:
            sizes = (
                0 if region.purpose in self.offsets.get(unit, ()) else size for unit, size in enumerate(region.sizes)
            )
            return Region.of(region.purpose, sizes)

        return [left(region) if region.purpose in IN_FILES else region for region in regions]
