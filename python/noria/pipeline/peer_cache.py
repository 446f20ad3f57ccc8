"""Keeps working copies of evicted units at other stages, if the host's link slows the step.

The benefit is measured. The steps after the loans show how long fetches take, and how long compute waits for them. If
compute waits, two more steps run with copies at other stages and show how fast that link is. Then the choice is final.
If nothing is kept, the room goes back to the lender.
"""

from __future__ import annotations

import dataclasses
import math
import time

from noria import _C
from noria.pipeline.peer_memory import PeerMemory
from noria.runtime.context import Context

__all__ = ["PeerCache", "stalled_us"]

_SUBSTANTIAL = 0.05
"""The part of a step that compute must wait for fetches before copies are tried."""

_LOOKED_AT = 2
"""Most steps to look at without copies, and steps to look at with them. A single step may be slow for other reasons."""


def stalled_us(backend: _C.Backend, *givers: str) -> int:
    """Returns the microseconds that compute has waited for ops of these verbs."""
    stalls = backend.stats("compute")["stalled_us"]
    return sum(us for (giver, _), us in stalls.items() if giver in givers)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Holds counters at the beginning of a step, or their differences between two steps."""

    times_fetched: list[int]  # by unit
    wall_us: float
    stalled_us: float  # compute waited for fetches
    home_us: float  # busy time of the lane that fetches from home
    home_bytes: int
    peer_us: float
    peer_bytes: int
    stashed: int  # bytes
    fetched: int  # bytes from peers

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


class PeerCache:
    """Chooses the units whose weights are kept at other stages, and tells the engine."""

    def __init__(self, context: Context, peer_memory: PeerMemory) -> None:
        self.context = context
        self.peer_memory = peer_memory
        self._before: _Seen | None = None
        self._home_us_per_byte = self._peer_us_per_byte = math.inf
        """Microseconds per byte of the two links: the least of all steps."""
        self._num_steps = 0  # steps looked at with the current choice
        self._kept: list[int] = []
        self._is_done = False

    @property
    def is_settled(self) -> bool:
        """True if the choice is final, so the load of the links will not change."""
        return self._is_done or not self._room()

    def begin_step(self) -> None:
        """Looks at the step before, and chooses units.

        Order: call it after `PeerMemory.begin_step`, which makes and changes loans.
        """
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
            self.context.engine.copies.keep_copies(units)
        self._kept = units
        if not units:
            self._is_done = True
            self.peer_memory.stop_wanting()

    def _is_held_up(self, step: _Seen) -> bool:
        return step.stalled_us >= _SUBSTANTIAL * step.wall_us

    def _choose(self, step: _Seen) -> list[int]:
        units = [(unit.weights, count) for unit, count in zip(self.context.units, step.times_fetched, strict=True)]
        from_home = sum(size * count for size, count in units) - step.fetched
        # 0 if the link was not used yet: then the choice tries it.
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
        return sum(loan.for_units for loan in self.peer_memory.borrowed)

    def _see(self) -> _Seen:
        engine, stats = self.context.engine, self.context.backend.stats
        home, peer, copies = stats("fetch"), stats("peer"), engine.copies.copy_stats()
        return _Seen(
            engine.copies.times_fetched(),
            time.perf_counter() * 1e6,
            stalled_us(self.context.backend, "fetch"),
            home["busy_us"],
            home["bytes"],
            peer["busy_us"],
            peer["bytes"],
            copies["stashed"],
            copies["fetched"],
        )
