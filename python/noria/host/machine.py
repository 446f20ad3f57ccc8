"""Makes backends and update pools, for this machine or for another one that a test or benchmark puts in its place."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import torch

from noria import _C

__all__ = ["Machine", "machine", "on"]


class Machine:
    """Makes backends and pools for the real machine."""

    def backend(self, device: torch.device, capacity: int) -> _C.Backend:
        """Makes a backend. `capacity`: the most bytes that it takes on the device."""
        if device.type == "cuda":
            return _C.make_cuda_backend(device.index, capacity)
        return _C.make_host_backend(capacity)

    def pool(self, *, is_beside_device: bool, numa_node: int | None) -> _C.HostOptimizer:
        """Makes the pool of threads that update.

        It uses all but one of this process's cores. Beside a CUDA device it uses the cores of the device's node.
        """
        return _C.HostOptimizer(is_beside_device=is_beside_device, numa_node=-1 if numa_node is None else numa_node)

    def files(self, folders: Sequence[str], sizes: Sequence[int], num_slots: int) -> _C.FileHome:
        """Makes the home's part that lies in files. Takes its space, and its slots in host memory."""
        return _C.FileHome(folders, sizes, num_slots)

    def file_store(self, folders: Sequence[str]) -> _C.FileStore:
        """Makes files without records, for frozen weights."""
        return _C.FileStore(folders)


_MACHINE: contextvars.ContextVar[Machine] = contextvars.ContextVar("noria_machine")


def machine() -> Machine:
    return _MACHINE.get(_REAL)


_REAL = Machine()


@contextlib.contextmanager
def on(other: Machine) -> Iterator[None]:
    """Models that are wrapped inside the `with` block use the other machine."""
    token = _MACHINE.set(other)
    try:
        yield
    finally:
        _MACHINE.reset(token)
