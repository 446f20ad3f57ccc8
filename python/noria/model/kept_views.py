"""Finds tensors of the caller's that share memory with weights, and warns: noria moves the weights away from them.

torch counts who holds a storage. A view, `p.data`, an entry of `state_dict()` and a numpy array each count.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

__all__ = ["bytes_leaving", "kept_beside", "kept_of", "warn_of_kept"]


def _num_holders(tensor: torch.Tensor) -> int:
    """Returns how many hold the tensor's storage. This call's own reference is not counted."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1


def _are_kept(own: Sequence[torch.Tensor]) -> list[bool]:
    """Returns for each tensor if others hold its storage, besides all of these tensors."""
    sharing = Counter(each.untyped_storage()._cdata for each in own)
    return [_num_holders(each) > sharing[each.untyped_storage()._cdata] for each in own]


def kept_beside(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Returns the names of the tensors whose storage others hold too, besides the tensors themselves.

    Order: nothing may have taken `.data` of them that is still there.
    """
    own = [(name, each) for name, each in named if each.layout is torch.strided and not each.is_meta]
    kept = _are_kept([each for _, each in own])
    return [name for (name, _), is_kept in zip(own, kept, strict=True) if is_kept]


_SURELY_GIVEN_BACK = 32 << 20
"""Blocks of this size are mapped one by one. Smaller ones may stay in the C library's heap when they are freed."""


def bytes_leaving(roots: Iterable[nn.Module]) -> int:
    """Returns the bytes of host memory that the process gives back once noria has moved the weights of these models.

    Counts large storages that only these weights hold. Those that view a file do not count, because it keeps the pages.
    """
    # No subclass: a lazy one has no storage yet.
    plain = {each for root in roots for each in root.parameters() if type(each) is nn.Parameter}
    own = [each for each in plain if each.layout is torch.strided and each.device.type == "cpu"]
    sizes = {  # by address
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each, is_kept in zip(own, _are_kept(own), strict=True)
        if not is_kept
    }
    files = _mapped_files()
    return sum(
        size
        for address, size in sizes.items()
        if size >= _SURELY_GIVEN_BACK and not any(begin <= address < end for begin, end in files)
    )


def _mapped_files() -> list[tuple[int, int]]:
    """Returns the ranges of addresses that view files."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        for line in lines:
            words = line.split()
            if len(words) > 4 and words[4] != "0":  # an inode
                begin, end = words[0].split("-")
                found.append((int(begin, 16), int(end, 16)))
    return found


def kept_of(named: dict[str, torch.Tensor]) -> list[str]:
    """Returns the names of the tensors that others hold: the tensors themselves, or their storages.

    `named` is a copy of the dict in which their owner keeps them.
    """
    kept = []
    for name in named:
        each = named[name]
        # References of noria: the owner's dict and this one, `each`, and the argument of the call.
        if sys.getrefcount(each) > 4 or _num_holders(each) > 1:
            kept.append(name)
    return kept


def warn_of_kept(kept: list[str], stacklevel: int) -> None:
    """Warns that tensors which share memory with these weights will not follow them."""
    if not kept:
        return
    names = ", ".join(f'"{name}"' for name in kept[:3]) + (f" and {len(kept) - 3} others" if len(kept) > 3 else "")
    warnings.warn(
        f"noria.wrap moves {names} to the home, but tensors that were taken before share their old memory (a view, "
        "p.data, state_dict(), a numpy array). These keep the values of now, and what is written to them does not "
        "reach the model. Remedy: drop them before, and take new ones by state_dict() or inside noria.materialize",
        stacklevel=stacklevel + 1,
    )
