"""Device memory beside the window's: small stretches of their own, which a wrap call takes at once."""

from __future__ import annotations

from collections.abc import Mapping

from noria import _C

__all__ = ["ASSIST_SCRATCH", "NAN_RANGE", "REDUCE_SCRATCH", "Beside"]

NAN_RANGE = "NaN range for evicted units"
REDUCE_SCRATCH = "sums over ranks in fp32"
ASSIST_SCRATCH = "parts for other ranks"


class Beside:
    """Owns them, until `close`. `taken`: bytes by purpose, as the backend counts them."""

    def __init__(self, backend: _C.Backend, planned: Mapping[str, int]) -> None:
        self._backend = backend
        self._addresses: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        try:
            for purpose, size in planned.items():
                before = backend.allocated
                self._addresses[purpose] = backend.allocate(size)
                self.taken[purpose] = backend.allocated - before
        except BaseException:
            self.close()
            raise

    def address(self, purpose: str) -> int:
        """0 where none was planned."""
        return self._addresses.get(purpose, 0)

    def close(self) -> None:
        """Once nothing runs on the device any more. The NaN range stays: tensors that the user has kept may show it."""
        for purpose in [each for each in self._addresses if each != NAN_RANGE]:
            self._backend.free(self._addresses.pop(purpose))
            del self.taken[purpose]
