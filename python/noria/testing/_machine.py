"""Lets tests and benchmarks choose a machine. Training code never does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from noria import _C
from noria.host import machine

__all__ = ["Machine", "on_machine"]


def _no_hostility() -> _C.Hostility:
    return {}


@dataclasses.dataclass(frozen=True)
class Machine(machine.Machine):
    """Describes a machine with limits and hostility.

    Args:
        limits: By lane, (GiB/s, latency in us); 0 means unlimited. The lanes are "fetch", "drain", "update", "peer" for
            each link to another stage, and "peer:1" for the link to stage 1 alone. "read" and "write" move files.
        hostility: As the backends take it: `seed`, `max_delay_us`, `hold_us`, `poison`.
        update_threads: Threads of the host pool; 0 means all but one.
        file_faults: What goes wrong with requests to files; None: nothing.
        file_door: "io_uring", "threads", or "auto" for the better one that this machine has.

    Example:
        >>> slow = noria.testing.Machine(limits={"fetch": (1.0, 0)}, update_threads=1)
    """

    limits: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    hostility: _C.Hostility = dataclasses.field(default_factory=_no_hostility)
    update_threads: int = 0
    file_faults: _C.FileFaults | None = None
    file_door: str = "auto"

    def backend(self, device: torch.device, capacity: int) -> _C.Backend:
        """Returns a new backend. `wrap` calls this.

        Args:
            device: Where layers compute.
            capacity: The most bytes that the backend may take there.

        Example:
            >>> backend = noria.testing.Machine().backend(torch.device("cpu"), 2**20)
        """
        if device.type == "cuda":
            return _C.make_cuda_backend(device.index, capacity, self.pace())
        return _C.make_host_backend(capacity, self.pace())

    def pool(self, *, is_beside_device: bool, numa_node: int | None) -> _C.HostOptimizer:
        """Returns a new host pool. `wrap` calls this.

        Args:
            is_beside_device: True if layers compute on a device, so that the pool has the cores to itself.
            numa_node: The node whose cores the pool uses. None: all cores.

        Example:
            >>> pool = noria.testing.Machine(update_threads=1).pool(is_beside_device=False, numa_node=None)
        """
        return _C.HostOptimizer(
            self.update_threads,
            is_beside_device=is_beside_device,
            numa_node=-1 if numa_node is None else numa_node,
            pace=self.pace(),
        )

    def files(self, folders: Sequence[str], sizes: Sequence[int], num_slots: int) -> _C.FileHome:
        """Returns a new home in files. `wrap` calls this.

        Args:
            folders: Where the files lie.
            sizes: The bytes of each record.
            num_slots: How many records have memory at once.

        Example:
            >>> home = noria.testing.Machine().files(["files"], [1 << 20], 1)
        """
        return _C.FileHome(folders, sizes, num_slots, self.pace(), self.file_faults, self.file_door)

    def file_store(self, folders: Sequence[str]) -> _C.FileStore:
        """Returns new files for frozen weights. `wrap` calls this.

        Args:
            folders: Where the files lie.

        Example:
            >>> store = noria.testing.Machine().file_store(["files"])
        """
        return _C.FileStore(folders, self.file_door, pace=self.pace(), faults=self.file_faults)

    def pace(self) -> _C.SlowPace:
        """Returns a new pace, which holds up ops as this machine does.

        Example:
            >>> pace = noria.testing.Machine(limits={"fetch": (1.0, 100)}).pace()
        """
        return _C.SlowPace(self.limits, self.hostility)


@contextlib.contextmanager
def on_machine(**settings: Any) -> Iterator[Machine]:
    """Puts models that are wrapped inside this block on a machine with these settings.

    Args:
        **settings: Fields of `Machine`.

    Yields:
        The machine.

    Example:
        >>> with noria.testing.on_machine(hostility={"seed": 1, "max_delay_us": 500, "poison": True}):
        ...     model, optimizer = noria.wrap(model, optimizer, device="cpu")
    """
    chosen = Machine(**settings)
    with machine.on(chosen):
        yield chosen
