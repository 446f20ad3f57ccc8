"""When torch's allocator finds no memory on a device where noria has some: how much that is, and what would do.

The operator that fails is the user's and may be anywhere, in a loss above all, so torch's error cannot name noria. A
warning before it does.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from noria.policy import format_bytes

if TYPE_CHECKING:
    from noria.custody import Wrapped
    from noria.plan import WrapPlan

__all__ = ["advice", "tell_when_full"]

_FITS = 5 / 4  # times what was asked for: memory is fragmented, and it was not the last to be asked for
_WRAPPED: weakref.WeakSet[Wrapped] = weakref.WeakSet()
_is_told: list[bool] = []


def advice(planned: WrapPlan, wanted: int) -> str:
    """`wanted`: the bytes that an operator asked for in vain."""
    taken = planned.device_bytes
    left = taken - int(_FITS * wanted)
    enough = 2 * left >> 20  # MiB
    text = (
        f"{planned.device} is out of memory for {format_bytes(wanted)}. noria has {format_bytes(taken)} of it for its "
        "window and gradient buffers"
    )
    if enough << 20 >= 2 * planned.least_device:
        return f'{text}; noria.wrap(..., device_memory="{enough}MiB") leaves enough to torch'
    if planned.policy.activations == "keep":
        return f'{text}, and needs them; activations="auto" leaves more to torch, or a smaller batch'
    return f"{text}, and needs them; a smaller batch needs less of torch"


def tell_when_full(wrapped: Wrapped) -> None:
    """From now on, once; on CUDA alone."""
    if wrapped.device.type != "cuda":
        return
    _WRAPPED.add(wrapped)
    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None and not _is_told:
        attach(_observe)
        _is_told.append(True)  # there is no way to detach


def _observe(device: int, wanted: int, *_: int) -> None:
    """Called by the allocator, which raises next: nothing may be raised here."""
    try:
        for text in _texts(_WRAPPED, device, wanted):
            warnings.warn(text, stacklevel=2)
    except Exception as error:  # a filter that turns warnings into errors
        print(error, file=sys.stderr)


def _texts(wrapped: Iterable[Wrapped], device: int, wanted: int) -> list[str]:
    return [advice(each.plan, wanted) for each in wrapped if (each.device.index or 0) == device and not each.closed]
