"""fp32 masters beside the working copies: plain ones, and split ones, which are the working copy and the low bits."""

from __future__ import annotations

import torch

from noria import _C
from noria.home import Home, HomeParameter
from noria.modes import plainly

__all__ = ["Masters", "rounded"]


def rounded(master: torch.Tensor) -> torch.Tensor:
    """A working copy of a dense fp32 master on the CPU: to nearest, ties away from zero."""
    working = torch.empty_like(master, dtype=torch.bfloat16)
    _C.split_master(master.data_ptr(), working.data_ptr(), 0, master.numel())
    return working


class Masters:
    """Of a home. `loaded_low_bits`: slots whose low bits were loaded, and that were not updated since."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.loaded_low_bits: set[int] = set()
        self.low_views: dict[int, torch.Tensor] = {}  # by slot, what the user has of low bits

    def set(self, slot: HomeParameter, master: torch.Tensor) -> None:
        """`master`: fp32 on the CPU, with the parameter's shape."""
        if not slot.is_split:
            self.home.master(slot).copy_(master)
            self.round(slot)
        else:
            dense = torch.empty_like(self.home.low_bits(slot), dtype=torch.float32)  # storage order of the parameter
            dense.copy_(master)
            _C.split_master(
                dense.data_ptr(), self.home.working(slot).data_ptr(), self.home.low_bits(slot).data_ptr(), dense.numel()
            )

    def round(self, slot: HomeParameter) -> None:
        """Working copy from the plain master: nearest, ties away from zero."""
        _C.split_master(self.home.master(slot).data_ptr(), self.home.working(slot).data_ptr(), 0, slot.like.numel())

    def whole(self, slot: HomeParameter) -> torch.Tensor:
        """The fp32 master as a plain tensor: the home's own where it has one, rebuilt from the split one else."""
        if not slot.is_split:
            return self.home.master(slot)
        master = torch.empty_like(self.home.low_bits(slot), dtype=torch.float32)
        _C.join_master(
            self.home.working(slot).data_ptr(),
            self.home.low_bits(slot).data_ptr(),
            master.data_ptr(),
            master.numel(),
        )
        return master

    def low_bits(self, slot: HomeParameter) -> torch.Tensor:
        """What the master has beyond the working copy, whichever way it is kept: the same bits from both kernels."""
        if slot.is_split:
            view = self.low_views.get(slot.index)
            if view is None:
                view = self.low_views[slot.index] = self.home.low_bits(slot)
            return view
        with plainly():
            return self.home.master(slot).view(torch.int32).to(torch.int16)

    def set_low_bits(self, slot: HomeParameter, low: torch.Tensor) -> None:
        """Low bits from a checkpoint. They belong to the working copy that is there, or to the one that is loaded next;
        which, the first update decides (`confirm_low_bits`). Both encodings of a master keep them as they are."""
        high = self.home.working(slot).view(torch.int16).to(torch.int32) << 16
        self.set(slot, (high + low.to(device="cpu", dtype=torch.int16)).view(torch.float32))
        self.loaded_low_bits.add(slot.index)

    def confirm_low_bits(self, slot: HomeParameter) -> None:
        """Before an update of a parameter whose low bits were loaded. With a working copy that is not theirs they may
        make a NaN of a zero: there they are dropped."""
        if slot.index not in self.loaded_low_bits:
            return
        self.loaded_low_bits.discard(slot.index)
        master, working = self.whole(slot), self.home.working(slot)
        strange = master.isnan() & ~working.isnan()
        if strange.any():
            self.set(slot, torch.where(strange, working.float(), master))

    def with_loaded_low_bits(self, slot: HomeParameter, value: torch.Tensor) -> torch.Tensor:
        """A bfloat16 value that comes after its low bits, which the optimizer's state brought, is joined with them."""
        if slot.index not in self.loaded_low_bits:
            return value
        bits = value.view(torch.int32)
        if (bits & 0xFFFF).any():  # it has low bits of its own
            self.loaded_low_bits.discard(slot.index)
            return value
        return (bits + self.low_bits(slot)).view(torch.float32)

    def follow_working_copy(self, slot: HomeParameter, before: torch.Tensor) -> None:
        """Where the caller changed the working copy, the master becomes that value; elsewhere it keeps its low bits."""
        with torch.no_grad():
            working = self.home.working(slot)
            changed = working.view(torch.int16) != before.view(torch.int16)
            if not changed.any():
                return
            if not slot.is_split:
                self.home.master(slot)[changed] = working[changed].float()
            else:
                self.home.low_bits(slot)[changed] = 0

    def follow_write(self, slot: HomeParameter) -> None:
        """After a write to the working copy, of which only its outcome is known: a plain master follows. A split one
        consists of the working copy and more."""
        if slot.has_master and not slot.is_split:
            self.follow_working_copy(slot, rounded(self.home.master(slot)))
