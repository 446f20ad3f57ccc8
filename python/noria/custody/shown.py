"""Whole weights for a block of `noria.materialize`, where ranks share the model and no home has them.

They lie in memory of their own while the block is open. When it ends each rank takes its part of what has changed; all
ranks must have made the same edits.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from noria._errors import usage_error
from noria.home import SHOWN, HomeParameter, Region

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["Shown"]


class Shown:
    """Of one wrap call. Nothing is ever shown without ranks."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self._memory: dict[int, str] = {}  # by unit, the purpose of the arena in which it is whole
        self._num_taken = 0

    def value(self, slot: HomeParameter) -> torch.Tensor | None:
        """The whole working copy as the block has it; None outside of one."""
        purpose = self._memory.get(slot.unit)
        if purpose is None:
            return None
        like = torch.empty_strided(slot.shape, slot.strides, device="meta")
        return self.wrapped.home.tensor(purpose, slot.unit, slot.offset, like, slot.dtype)

    @contextlib.contextmanager
    def taken(self, units: Sequence[int]) -> Iterator[list[int]]:
        """Memory for a block over these units: where the device finds each. Blocks nest, and share it. Collective."""
        if self.wrapped.ranks is None:
            yield []
            return
        more = [unit for unit in units if unit not in self._memory]
        sizes = (unit.weights if unit.index in more else 0 for unit in self.wrapped.units)
        region = Region.of(SHOWN if not self._num_taken else f"{SHOWN}, block {self._num_taken + 1}", sizes)
        self.wrapped.later.take(region)
        self._num_taken += 1
        self._memory |= dict.fromkeys(more, region.purpose)
        try:
            for unit in more:
                self._fill(unit)
            yield [self.wrapped.home.address(self._memory[unit], unit) for unit in units]
        finally:
            for unit in more:
                del self._memory[unit]
            self._num_taken -= 1
            self.wrapped.later.give_back(region.purpose)

    def _fill(self, unit: int) -> None:
        self.wrapped.custody.access_home(unit, False)
        for slot in self.wrapped.units[unit].parameters:
            part = self.wrapped.home.working(slot)
            self._whole(slot).copy_(self.wrapped.together.whole(slot, part, "values"))

    def settle(self, slots: Sequence[HomeParameter]) -> list[HomeParameter]:
        """Takes into the home what a block has changed; which parameters that are. Raises UsageError on all ranks, and
        takes nothing, where they have left different values. Collective."""
        if not slots:
            return []
        own: list[int] = []
        for slot in slots:
            value, part = slot.flat(self._whole(slot)), slot.flat(self.wrapped.home.working(slot))
            changed = not torch.equal(self._part(slot).view(torch.uint8), part.view(torch.uint8))
            own += [zlib.crc32(value.view(torch.uint8).numpy().data), int(changed)]
        everybodys = self.wrapped.together.numbers(f'leave noria.materialize of "{slots[0].name}"', own)
        for rank, its in enumerate(everybodys):
            for slot, first, other in zip(slots, everybodys[0][::2], its[::2], strict=True):
                if other != first:
                    raise usage_error(
                        "the same edits on all ranks inside of noria.materialize",
                        f'"{slot.name}" left with other values on rank {rank} than on rank 0; the edits of this block '
                        "were dropped, on all ranks",
                        "edit alike on all ranks: from the same seed, or with values that one of them has broadcast",
                    )
        written = [slot for at, slot in enumerate(slots) if any(its[2 * at + 1] for its in everybodys)]
        with torch.no_grad():
            for slot in written:
                slot.flat(self.wrapped.home.working(slot)).copy_(self._part(slot))
        return written

    def _part(self, slot: HomeParameter) -> torch.Tensor:
        return slot.part_of(self._whole(slot))

    def _whole(self, slot: HomeParameter) -> torch.Tensor:
        value = self.value(slot)
        assert value is not None
        return value
