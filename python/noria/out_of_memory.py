"""Warns when torch's allocator runs out of memory on a device where noria has some.

The operator that fails is the user's, often in a loss, so torch's error cannot name noria. This warning comes before
that error. It says how much memory noria has, and what would help.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from noria.policy import format_bytes

if TYPE_CHECKING:
    from noria.planning.wrap_plan import WrapPlan

from noria.runtime.shrinking import room_for
from noria.runtime.state import RunState

__all__ = ["advice", "tell_when_full"]

_RUNNING: weakref.WeakSet[RunState] = weakref.WeakSet()
_is_told: list[bool] = []


def advice(planned: WrapPlan, taken: int, wanted: int) -> str:
    """Returns the text of the warning.

    `taken`: the bytes that noria has on the device. `wanted`: the bytes of the request that failed.
    """
    if planned.stays:
        text = (
            f"{planned.device} is out of memory for {format_bytes(wanted)}, with {format_bytes(taken)} of noria's on it"
        )
        return f'{text}; all units stream from the next forward on; resident="none" streams from the beginning'
    left = taken - room_for(wanted)
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


def tell_when_full(run: RunState) -> None:
    """Turns on the warning for a wrapped model on CUDA. The allocator's observer is attached only once.

    Allocators that know no observers (`PYTORCH_ALLOC_CONF=backend:cudaMallocAsync`) give no warning.
    """
    if run.context.device.type != "cuda":
        return
    _RUNNING.add(run)
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None or _is_told:
        return
    with contextlib.suppress(RuntimeError):
        attach(_observe)
        _is_told.append(True)  # there is no way to detach


def _observe(device: int, wanted: int, *_: int) -> None:
    """Warns. The allocator calls this just before it raises its own error, so nothing may be raised here."""
    try:
        for text in _texts(_RUNNING, device, wanted):
            warnings.warn(text, stacklevel=2)
        for run in _on(_RUNNING, device):
            for told in run.on_out_of_memory:
                told(wanted)
    except Exception as error:  # a filter that turns warnings into errors
        print(error, file=sys.stderr)


def _on(running: Iterable[RunState], device: int) -> list[RunState]:
    return [run for run in running if not run.closed and (run.context.device.index or 0) == device]


def _texts(running: Iterable[RunState], device: int, wanted: int) -> list[str]:
    found = [run.context for run in _on(running, device)]
    return [advice(each.plan, each.ledger.on(str(each.device)), wanted) for each in found]
