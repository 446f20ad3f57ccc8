"""Keeps fp32 masters beside the working copies. A master is plain, or split into the working copy and low bits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import torch

from noria import _C
from noria.host.home import Home
from noria.model.layout import HomeParameter
from noria.runtime.file_state import FileState
from noria.torch_state import plainly

__all__ = ["Masters", "follow_there", "plain_nans", "round_there", "rounded"]

_PIECE = 1 << 18
"""How many elements are converted at a time."""


def plain_nans(values: torch.Tensor) -> torch.Tensor:
    """Gives each NaN of an fp32 tensor the bits of math.nan, in place. A GPU's own has all bits, and rounded to bf16 it
    would become zero. Returns the tensor."""
    return values.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)


def rounded(master: torch.Tensor) -> torch.Tensor:
    """Returns a working copy of a dense fp32 master on the CPU: rounded to nearest, ties away from zero."""
    working = torch.empty_like(master, dtype=torch.bfloat16)
    _C.split_master(master.data_ptr(), working.data_ptr(), 0, master.numel())
    return working


def round_there(master: torch.Tensor, working: torch.Tensor) -> None:
    """Rounds a dense fp32 master on any device into its working copy, as `rounded` does. NaNs stay NaNs."""
    bits = master.view(torch.int32).add(0x8000).bitwise_right_shift_(16)
    working.view(torch.int16).copy_(bits)
    working.masked_fill_(master.isnan() & ~working.isnan(), math.nan)  # a GPU's NaN has all bits, and would carry


def follow_there(master: torch.Tensor, working: torch.Tensor) -> None:
    """Copies elements of the working copy that were written to the plain master. Both are flat, on any device."""
    for piece, shown in zip(master.split(_PIECE), working.split(_PIECE), strict=True):
        before = torch.empty_like(shown)
        round_there(piece, before)
        is_kept = shown.view(torch.int16) == before.view(torch.int16)
        piece.copy_(torch.where(is_kept, piece, shown.float()))


class Masters:
    """Reads and writes fp32 masters in the home, and in files.

    `loaded_low_bits`: slots whose low bits were loaded and that no update has used yet.
    """

    def __init__(self, home: Home, files: FileState) -> None:
        self.home = home
        self._files = files
        self.loaded_low_bits: set[int] = set()
        self._views: dict[int, torch.Tensor] = {}  # by slot: low bits at home; the user may hold them
        self._kept: dict[int, torch.Tensor] = {}  # by slot: copies that `kept_in_memory` has made

    def set(self, slot: HomeParameter, master: torch.Tensor) -> None:
        """Writes a master and rounds the working copy. `master`: fp32 on the CPU, with the parameter's shape."""
        if not slot.is_split:
            self.home.master(slot).copy_(master)
            self.round(slot)
        else:
            low = self._low(slot)
            dense = torch.empty_like(low, dtype=torch.float32)  # has the parameter's storage order
            dense.copy_(master)
            _C.split_master(dense.data_ptr(), self.home.working(slot).data_ptr(), low.data_ptr(), dense.numel())

    def load(self, slot: HomeParameter, value: torch.Tensor) -> None:
        """Writes a master from a loaded value, which is joined with low bits that were loaded before it.

        A dense value on the CPU is converted piece by piece, so that no fp32 copy of a large weight is made.
        """
        is_dense = value.device.type == "cpu" and value.stride() == slot.like.stride()
        if not is_dense or slot.index in self.loaded_low_bits:
            value = plain_nans(value.to(device="cpu", dtype=torch.float32, copy=True))
            self.set(slot, self.with_loaded_low_bits(slot, value))
            return
        working = slot.flat(self.home.working(slot))
        other = slot.flat(self._low(slot) if slot.is_split else self.home.master(slot))
        for piece, high, rest in zip(*(each.split(_PIECE) for each in (slot.flat(value), working, other)), strict=True):
            dense = torch.empty_like(piece, dtype=torch.float32).copy_(piece) if slot.is_split else rest.copy_(piece)
            plain_nans(dense)
            low = rest.data_ptr() if slot.is_split else 0
            _C.split_master(dense.data_ptr(), high.data_ptr(), low, dense.numel())

    def round(self, slot: HomeParameter) -> None:
        """Rounds the plain master into the working copy: to nearest, ties away from zero."""
        _C.split_master(self.home.master(slot).data_ptr(), self.home.working(slot).data_ptr(), 0, slot.like.numel())

    def whole(self, slot: HomeParameter) -> torch.Tensor:
        """Returns the fp32 master: a view of the home if it is plain, else a tensor rebuilt from the split one."""
        if not slot.is_split:
            return self.home.master(slot)
        with self._reading(slot) as low:
            master = torch.empty_like(low, dtype=torch.float32)
            _C.join_master(self.home.working(slot).data_ptr(), low.data_ptr(), master.data_ptr(), master.numel())
        return master

    def low_bits(self, slot: HomeParameter, *, brings: bool = True) -> torch.Tensor:
        """Returns the bits of the master that the working copy lacks. Plain and split masters give the same bits.

        Low bits that lie in a file can be read until those of another unit are asked for. If the unit's state is shown,
        they can be read for as long as that. Without `brings` they may have no memory yet.
        """
        if slot.is_split:
            return self._low(slot, brings=brings, writes=False)
        with plainly():
            return self.home.master(slot).view(torch.int32).to(torch.int16)

    def set_low_bits(self, slot: HomeParameter, low: torch.Tensor) -> None:
        """Writes low bits from a checkpoint.

        They belong to the current working copy, or to one that is loaded next. The first update decides which one
        (`confirm_low_bits`). Plain and split masters both keep them unchanged.
        """
        high = self.home.working(slot).view(torch.int16).to(torch.int32) << 16
        self.set(slot, (high + low.to(device="cpu", dtype=torch.int16)).view(torch.float32))
        self.loaded_low_bits.add(slot.index)

    def confirm_low_bits(self, slot: HomeParameter) -> None:
        """Checks loaded low bits. Runs before an update of the parameter.

        Beside a working copy of another master, low bits may turn a zero into a NaN; such elements drop them.
        """
        if slot.index not in self.loaded_low_bits:
            return
        self.loaded_low_bits.discard(slot.index)
        master, working = self.whole(slot), self.home.working(slot)
        strange = master.isnan() & ~working.isnan()
        if strange.any():
            self.set(slot, torch.where(strange, working.float(), master))

    def with_loaded_low_bits(self, slot: HomeParameter, value: torch.Tensor) -> torch.Tensor:
        """Returns a loaded value joined with low bits that were loaded before it, from the optimizer's state.

        A value with low bits of its own is returned unchanged; the loaded low bits then no longer count.
        """
        if slot.index not in self.loaded_low_bits:
            return value
        bits = value.view(torch.int32)
        if (bits & 0xFFFF).any():  # the value has low bits of its own
            self.loaded_low_bits.discard(slot.index)
            return value
        return (bits + self.low_bits(slot)).view(torch.float32)

    def follow_working_copy(self, slot: HomeParameter, before: torch.Tensor) -> None:
        """Copies elements that the caller changed from the working copy to the master; others keep their low bits."""
        with torch.no_grad():
            working = self.home.working(slot)
            changed = working.view(torch.int16) != before.view(torch.int16)
            if not changed.any():
                return
            if not slot.is_split:
                self.home.master(slot)[changed] = working[changed].float()
            else:
                self._low(slot)[changed] = 0

    @contextlib.contextmanager
    def kept_in_memory(self, slots: Iterable[HomeParameter]) -> Iterator[None]:
        """Keeps copies of low bits that lie in files. Inside the block they can be read even if the run has ended."""
        try:
            for slot in slots:
                if slot.is_split and self._files.has(slot.unit):
                    with self._reading(slot) as low:
                        self._kept[slot.index] = low.clone()
            yield
        finally:
            self._kept.clear()

    @contextlib.contextmanager
    def _reading(self, slot: HomeParameter) -> Iterator[torch.Tensor]:
        """Gives the low bits of a split master, which have memory inside the block."""
        if slot.index in self._kept:
            yield self._kept[slot.index]
            return
        with self._files.reading(slot.unit):
            yield self._low(slot, brings=False)

    def _low(self, slot: HomeParameter, *, brings: bool = True, writes: bool = True) -> torch.Tensor:
        """Returns the low bits of a split master, where they lie. With `brings` those in files have memory now."""
        if slot.index in self._kept:
            return self._kept[slot.index]
        if brings:
            self._files.touch(slot.unit, writes=writes)
        view = self._views.get(slot.index)
        if view is None:
            view = self._views[slot.index] = self.home.low_bits(slot)
            if self._files.has(slot.unit):
                self._files.track(slot.unit, view)
        return view

    def follow_write(self, slot: HomeParameter) -> None:
        """Makes a plain master follow a write to the working copy, if only the result of the write is known.

        A split master needs nothing: the working copy is part of it.
        """
        if slot.has_master and not slot.is_split:
            self.follow_working_copy(slot, rounded(self.home.master(slot)))
