"""Working copies of evicted units at other stages, where the host's link is what holds up the step.

Whether they pay is measured. The steps after the loans tell what fetches take, and for how long compute waits for them;
where it does, two more, with copies at other stages, what the way there takes. Then the choice stands, and where
nothing is kept the room goes back.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING

from noria import _C

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["PeerCopies", "stalled_us"]

_SUBSTANTIAL = 0.05
"""Of a step: what compute waits for fetches at least."""

_LOOKED_AT = 2
"""Steps at most before copies are tried, and while they are: one alone may have been held up by something else."""


def stalled_us(backend: _C.Backend, *givers: str) -> int:
    """What compute has waited for ops of these verbs."""
    stalls = backend.stats("compute")["stalled_us"]
    return sum(us for (giver, _), us in stalls.items() if giver in givers)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Until the beginning of a step; or from there to the next."""

    times_fetched: list[int]  # by unit
    wall_us: float
    stalled_us: float  # what compute has waited for fetches
    home_us: float  # of the lane that fetches from there
    home_bytes: int
    peer_us: float
    peer_bytes: int
    stashed: int  # bytes
    fetched: int  # from peers

    def since(self, before: _Seen) -> _Seen:
        return _Seen(
            [a - b for a, b in zip(self.times_fetched, before.times_fetched, strict=True)],
            self.wall_us - before.wall_us,
            self.stalled_us - before.stalled_us,
            self.home_us - before.home_us,
            self.home_bytes - before.home_bytes,
            self.peer_us - before.peer_us,
            self.peer_bytes - before.peer_bytes,
            self.stashed - before.stashed,
            self.fetched - before.fetched,
        )


class PeerCopies:
    """Of one wrap call's units."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self._before: _Seen | None = None
        self._home_us_per_byte = self._peer_us_per_byte = math.inf
        """The least of all steps."""
        self._num_steps = 0  # looked at, with what is kept
        self._kept: list[int] = []
        self._is_done = False

    def wanted(self) -> int:
        """Bytes of all that has been fetched more than once, in the first step. Ranks that share units gather them
        together: of those nothing is wanted."""
        if self.wrapped.ranks is not None:
            return 0
        times = self.wrapped.custody.times_fetched()
        return sum(unit.weights for unit, count in zip(self.wrapped.units, times, strict=True) if count > 1)

    @property
    def is_settled(self) -> bool:
        """The links carry from now on what they carry now."""
        return self._is_done or not self._room()

    def begin_step(self) -> None:
        """After the stages have agreed, or have given back."""
        if self._is_done or not self._room():
            return
        before, self._before = self._before, self._see()
        if before is None:
            return
        step = self._before.since(before)
        if not any(step.times_fetched):
            return
        self._num_steps += 1
        if step.home_bytes:
            self._home_us_per_byte = min(self._home_us_per_byte, step.home_us / step.home_bytes)
        if step.peer_bytes:
            self._peer_us_per_byte = min(self._peer_us_per_byte, step.peer_us / step.peer_bytes)
        is_last = self._num_steps == _LOOKED_AT
        if self._kept:
            if is_last:
                self._keep(self._choose(step))
                self._is_done = True
        elif self._is_held_up(step):
            self._keep(self._choose(step))
            self._num_steps = 0
        elif is_last:
            self._keep([])

    def _keep(self, units: list[int]) -> None:
        if units != self._kept:
            self.wrapped.custody.keep_copies(units)
        self._kept = units
        if not units:
            self._is_done = True
            self.wrapped.lending.stop_wanting()

    def _is_held_up(self, step: _Seen) -> bool:
        return step.stalled_us >= _SUBSTANTIAL * step.wall_us

    def _choose(self, step: _Seen) -> list[int]:
        units = [(unit.weights, count) for unit, count in zip(self.wrapped.units, step.times_fetched, strict=True)]
        from_home = sum(size * count for size, count in units) - step.fetched
        # Where the way there is not in use yet, it is tried.
        peer_us_per_byte = 0.0 if math.isinf(self._peer_us_per_byte) else self._peer_us_per_byte
        return _C.choose_copies(
            units,
            self._home_us_per_byte,
            peer_us_per_byte,
            self._home_us_per_byte * max(step.home_bytes - from_home, 0),
            peer_us_per_byte * max(step.peer_bytes - step.stashed - step.fetched, 0),
            self._room(),
        )

    def _room(self) -> int:
        return sum(loan.for_units for loan in self.wrapped.lending.borrowed)

    def _see(self) -> _Seen:
        custody, stats = self.wrapped.custody, self.wrapped.backend.stats
        home, peer, copies = stats("fetch"), stats("peer"), custody.copy_stats()
        return _Seen(
            custody.times_fetched(),
            time.perf_counter() * 1e6,
            stalled_us(self.wrapped.backend, "fetch"),
            home["busy_us"],
            home["bytes"],
            peer["busy_us"],
            peer["bytes"],
            copies["stashed"],
            copies["fetched"],
        )
