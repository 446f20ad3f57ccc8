"""Measures how fast noria's kernels update: on the host with several numbers of threads, and on the device."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from noria import _C
from noria.runtime.context import Context
from noria.torch_state import await_device, plainly

__all__ = ["device_update_gib_s", "update_rates"]

_ON_HOST = 2 << 20  # elements: few caches hold their 32 MiB
_ON_DEVICE = 4 << 20  # elements: no cache of a host holds them, and few of a device do
_TRIES = 3
_LEAST_FREE = 8 * 4 * _ON_DEVICE  # bytes: twice what the test takes


class _Sample:
    """Holds the arrays of an AdamW update in fp32."""

    def __init__(self, count: int, device: torch.device) -> None:
        with plainly():
            self._arrays = [torch.full((count,), 1e-3, dtype=torch.float32, device=device) for _ in range(4)]
        self._pieces = [(0, count, _C.update_scalars("adamw", 1, lr=1e-3))]

    def job(self, *, is_at_rest: bool) -> _C.UpdateJob:
        master, m, v, gradient = (array.data_ptr() for array in self._arrays)
        arrays = _C.UnitArrays(master=master, m=m, v=v)
        if is_at_rest:
            return _C.UpdateJob("adamw", self._pieces, arrays, gradients=[gradient])
        return _C.UpdateJob("adamw", self._pieces, arrays, gradient=gradient)


def update_rates(most: int) -> dict[str, float]:
    """Returns GiB/s, read and written, of AdamW on the host by the number of threads: powers of two, and `most`.

    The threads of noria's own pool are idle meanwhile, if nothing is updated.
    """
    sample = _Sample(_ON_HOST, torch.device("cpu"))
    job = sample.job(is_at_rest=False)
    numbers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    rates = {}
    for number in [*numbers, most]:
        pool = _C.HostOptimizer(number)
        try:
            rates[str(number)] = _gib_s(job, functools.partial(_update, pool, job))
        finally:
            pool.close()
    return rates


def device_update_gib_s(context: Context) -> float:
    """Returns GiB/s, read and written, of AdamW on the device. 0: it has no kernels, or no memory left for the test."""
    if context.device.type != "cpu" and context.backend.kernels_absent():
        return 0.0
    if context.device.type == "cuda" and torch.cuda.mem_get_info(context.device)[0] < _LEAST_FREE:
        return 0.0
    try:
        sample = _Sample(_ON_DEVICE, context.device)
    except torch.OutOfMemoryError:
        return 0.0
    job = sample.job(is_at_rest=True)

    def update() -> None:
        context.engine.rest.update([job])
        await_device(context.device)

    await_device(context.device)
    return _gib_s(job, update)


def _update(pool: _C.HostOptimizer, job: _C.UpdateJob) -> None:
    pool.submit(job).wait_passed()


def _gib_s(job: _C.UpdateJob, update: Callable[[], object]) -> float:
    """Returns the rate of the best of a few tries."""
    best_s = float("inf")
    for _ in range(_TRIES):
        began = time.perf_counter()
        update()
        best_s = min(best_s, time.perf_counter() - began)
    return job.bytes / (1 << 30) / best_s
