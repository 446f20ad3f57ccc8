"""Gathers whole weights for a block of `noria.materialize`, if ranks share the model and each home has only a part.

Whole weights lie in memory of their own while the block is open. When it ends, each rank takes its part of the changes
into its home. All ranks must have made the same edits.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence

import torch

from noria._errors import usage_error
from noria.model.layout import SHOWN, HomeParameter, Region
from noria.runtime.context import Context
from noria.runtime.late_allocations import LateAllocations
from noria.runtime.rank_sync import RankSync

__all__ = ["GatheredWeights"]


class GatheredWeights:
    """Holds whole weights while blocks are open. Without ranks it holds none."""

    def __init__(self, context: Context, sync: RankSync, late: LateAllocations) -> None:
        self.context = context
        self.sync = sync
        self.late = late
        self._memory: dict[int, str] = {}  # by unit: the purpose of the arena that holds it whole
        self._num_taken = 0

    def value(self, slot: HomeParameter) -> torch.Tensor | None:
        """Returns the whole working copy as the block shows it; None if no block has this unit."""
        purpose = self._memory.get(slot.unit)
        if purpose is None:
            return None
        like = torch.empty_strided(slot.shape, slot.strides, device="meta")
        return self.context.home.tensor(purpose, slot.unit, slot.offset, like, slot.dtype)

    @contextlib.contextmanager
    def taken(self, units: Sequence[int]) -> Iterator[list[int]]:
        """Takes memory for a block over these units, and yields the address of each; an empty list without ranks.

        Nested blocks share memory. Collective.
        """
        if self.context.ranks is None:
            yield []
            return
        more = [unit for unit in units if unit not in self._memory]
        sizes = (unit.weights if unit.index in more else 0 for unit in self.context.units)
        region = Region.of(SHOWN if not self._num_taken else f"{SHOWN}, block {self._num_taken + 1}", sizes)
        self.late.take(region)
        self._num_taken += 1
        self._memory |= dict.fromkeys(more, region.purpose)
        try:
            for unit in more:
                self._fill(unit)
            yield [self.context.home.address(self._memory[unit], unit) for unit in units]
        finally:
            for unit in more:
                del self._memory[unit]
            self._num_taken -= 1
            self.late.give_back(region.purpose)

    def _fill(self, unit: int) -> None:
        self.context.engine.home.access_home(unit, False)
        for slot in self.context.units[unit].parameters:
            part = self.context.home.working(slot)
            self._whole(slot).copy_(self.sync.whole(slot, part, "values"))

    def settle(self, slots: Sequence[HomeParameter]) -> list[HomeParameter]:
        """Takes the changes of a block into the home, and returns the parameters that changed. Collective.

        Raises UsageError on all ranks, and takes nothing, if ranks have left different values.
        """
        if not slots:
            return []
        own: list[int] = []
        for slot in slots:
            value, part = slot.flat(self._whole(slot)), slot.flat(self.context.home.working(slot))
            changed = not torch.equal(self._part(slot).view(torch.uint8), part.view(torch.uint8))
            own += [zlib.crc32(value.view(torch.uint8).numpy().data), int(changed)]
        gathered = self.sync.numbers(f'leave noria.materialize of "{slots[0].name}"', own)
        for rank, its in enumerate(gathered):
            for slot, first, other in zip(slots, gathered[0][::2], its[::2], strict=True):
                if other != first:
                    raise usage_error(
                        "the same edits on all ranks inside of noria.materialize",
                        f'"{slot.name}" left with other values on rank {rank} than on rank 0; the edits of this block '
                        "were dropped, on all ranks",
                        "edit alike on all ranks: from the same seed, or with values that one of them has broadcast",
                    )
        written = [slot for at, slot in enumerate(slots) if any(its[2 * at + 1] for its in gathered)]
        with torch.no_grad():
            for slot in written:
                slot.flat(self.context.home.working(slot)).copy_(self._part(slot))
        return written

    def _part(self, slot: HomeParameter) -> torch.Tensor:
        return slot.part_of(self._whole(slot))

    def _whole(self, slot: HomeParameter) -> torch.Tensor:
        value = self.value(slot)
        assert value is not None
        return value
