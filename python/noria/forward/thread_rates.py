"""Measures how fast the host updates with several numbers of threads."""

from __future__ import annotations

import time

import torch

from noria import _C
from noria.torch_state import plainly

__all__ = ["update_rates"]

_COUNT = 2 << 20  # elements: few caches hold their 32 MiB
_TRIES = 3


def update_rates(most: int) -> dict[str, float]:
    """Returns GiB/s, read and written, of AdamW in fp32 by the number of threads: powers of two, and `most`.

    The threads of noria's own pool are idle meanwhile, if nothing is updated.
    """
    with plainly():
        arrays = [torch.full((_COUNT,), 1e-3, dtype=torch.float32, device="cpu") for _ in range(4)]
    master, m, v, gradient = (array.data_ptr() for array in arrays)
    pieces = [(0, _COUNT, _C.update_scalars("adamw", 1, lr=1e-3))]
    job = _C.UpdateJob("adamw", pieces, _C.UnitArrays(master=master, m=m, v=v), gradient=gradient)
    numbers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return {str(number): _rate(job, number) for number in [*numbers, most]}


def _rate(job: _C.UpdateJob, num_threads: int) -> float:
    pool = _C.HostOptimizer(num_threads)
    try:
        best_s = float("inf")
        for _ in range(_TRIES):
            began = time.perf_counter()
            pool.submit(job).wait_passed()
            best_s = min(best_s, time.perf_counter() - began)
    finally:
        pool.close()
    return job.bytes / (1 << 30) / best_s
