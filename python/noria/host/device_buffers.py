"""Takes the small device buffers that a wrap call needs beside its window."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from noria import _C

__all__ = ["ASSIST_SCRATCH", "LENT", "REDUCE_SCRATCH", "UPDATE_SLOTS", "DeviceBuffers"]

REDUCE_SCRATCH = "sums over ranks in fp32"
ASSIST_SCRATCH = "parts for other ranks"
LENT = "lent to other stages"
UPDATE_SLOTS = "pieces that are updated"


class DeviceBuffers:
    """Owns these buffers until `close`. `taken`: bytes by purpose, as the backend counts them."""

    def __init__(self, backend: _C.Backend, planned: Mapping[str, int]) -> None:
        self._backend = backend
        self._addresses: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        try:
            for purpose, size in planned.items():
                self.take(purpose, size)
        except BaseException:
            self.close()
            raise

    def take(self, purpose: str, size: int) -> None:
        self._take(purpose, lambda: self._backend.allocate(size))

    def take_shared(self, purpose: str, size: int) -> int:
        """Takes memory that other processes may open. Returns its address."""
        self._take(purpose, lambda: self._backend.allocate_shared(size))
        return self.address(purpose)

    def discard(self, purpose: str, offset: int, size: int) -> None:
        """Discards a range of shared memory that no process uses any more.

        `taken` then no longer counts the bytes that the device got back.
        """
        self.taken[purpose] -= self._backend.discard_shared(self._addresses[purpose], offset, size)

    def give_up(self, purpose: str) -> int:
        """Gives up ownership of a buffer. Returns its address, which the caller frees."""
        del self.taken[purpose]
        return self._addresses.pop(purpose)

    def free(self, purpose: str) -> None:
        self._backend.free(self.give_up(purpose))

    def _take(self, purpose: str, allocate: Callable[[], int]) -> None:
        before = self._backend.allocated
        self._addresses[purpose] = allocate()
        self.taken[purpose] = self._backend.allocated - before

    def address(self, purpose: str) -> int:
        """Returns the address of a buffer, or 0 if none was planned."""
        return self._addresses.get(purpose, 0)

    def close(self) -> None:
        """Frees all buffers. Order: only after all work on the device has ended."""
        for purpose in list(self._addresses):
            self.free(purpose)
