"""Measures how fast noria's kernels update on the device."""

from __future__ import annotations

import time

import torch

from noria import _C
from noria.runtime.context import Context
from noria.torch_state import await_device, plainly

__all__ = ["device_update_gib_s"]

_COUNT = 4 << 20  # elements: no cache of a host holds them, and few of a device do
_TRIES = 3
_LEAST_FREE = 8 * 4 * _COUNT  # bytes: twice what the test takes


def device_update_gib_s(context: Context) -> float:
    """Returns GiB/s, read and written, of AdamW on the device. 0: it has no kernels, or no memory left for the test."""
    if context.device.type != "cpu" and context.backend.kernels_absent():
        return 0.0
    if context.device.type == "cuda" and torch.cuda.mem_get_info(context.device)[0] < _LEAST_FREE:
        return 0.0
    try:
        with plainly():
            arrays = [torch.full((_COUNT,), 1e-3, dtype=torch.float32, device=context.device) for _ in range(4)]
    except torch.OutOfMemoryError:
        return 0.0
    master, m, v, gradient = (array.data_ptr() for array in arrays)
    scalars = _C.update_scalars("adamw", 1, lr=1e-3)
    pieces = [(0, _COUNT, scalars)]
    job = _C.UpdateJob("adamw", pieces, _C.UnitArrays(master=master, m=m, v=v), gradients=[gradient])
    best_s = float("inf")
    for _ in range(_TRIES):
        await_device(context.device)
        began = time.perf_counter()
        context.engine.rest.update([job])
        await_device(context.device)
        best_s = min(best_s, time.perf_counter() - began)
    return job.bytes / (1 << 30) / best_s
