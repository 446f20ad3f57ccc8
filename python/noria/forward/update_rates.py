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

_ELEMENTS = 4 << 20  # 32 to 64 MiB: few caches hold them
_TRIES = 3
_LEAST_FREE = 8 * 4 * _ELEMENTS  # bytes: twice what the test takes


class _Sample:
    """Holds the arrays of an AdamW update."""

    def __init__(self, device: torch.device, *, is_split: bool = False, state_dtype: str = "fp32") -> None:
        def array(value: float, dtype: torch.dtype, num_elements: int = _ELEMENTS) -> torch.Tensor:
            return torch.full((num_elements,), value, dtype=dtype, device=device)

        dtype = torch.bfloat16 if is_split else torch.float32
        with plainly():
            self._gradient = array(1e-3, dtype)
            self._arrays = {"working" if is_split else "master": array(1e-3, dtype)}
            if is_split:
                self._arrays["low"] = array(0, torch.int16)
            for moment in ("m", "v"):
                if state_dtype == "8bit":
                    self._arrays[moment] = array(100, torch.uint8)
                    self._arrays[f"{moment}_scales"] = array(1e-3, torch.float32, _ELEMENTS // _C.STATE_BLOCK)
                else:
                    self._arrays[moment] = array(1e-3, torch.bfloat16 if state_dtype == "bf16" else torch.float32)
        self._pieces = [(0, _ELEMENTS, _C.update_scalars("adamw", 1, lr=1e-3), 0, 0)]
        self._state_dtype = state_dtype

    def job(self, *, is_at_rest: bool) -> _C.UpdateJob:
        addresses = {name: array.data_ptr() for name, array in self._arrays.items()}
        arrays = _C.UnitArrays(**addresses, state=self._state_dtype)
        gradient = self._gradient.data_ptr()
        if is_at_rest:
            return _C.UpdateJob("adamw", self._pieces, arrays, gradients=[gradient])
        return _C.UpdateJob("adamw", self._pieces, arrays, gradient=gradient)


def update_rates(most: int, *, is_split: bool, state_dtype: str) -> dict[str, float]:
    """Returns GiB/s, read and written, of AdamW on the host by the number of threads: powers of two, and `most`.

    Formats count: moments of 8 bits gain from each thread, where fp32 fills the memory. The threads of noria's own pool
    are idle meanwhile, if nothing is updated.
    """
    sample = _Sample(torch.device("cpu"), is_split=is_split, state_dtype=state_dtype)
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
        sample = _Sample(context.device)
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
