"""Lists the ops of simulated updates that the device runs though state lies at home, in the engine's order."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from noria import _C
from noria.planning.simulated_op import SimulatedOp
from noria.planning.streamed import NUM_SLOTS, StreamPiece

__all__ = ["StreamedOps"]


_MOST = 4


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Holds sizes in bytes: of the gradients, and of what comes and goes."""

    unit: int
    gradients: int
    comes: int
    goes: int


class StreamedOps:
    """Orders pieces as csrc/engine/streamed_updates.h does: each free slot gets the next piece ahead of time.

    A unit has at most 4 pieces here, so that large models are simulated fast. They are as large as several real ones.
    """

    def __init__(
        self,
        pieces: dict[int, list[StreamPiece]],
        buffers: _C.BufferTable,
        update_bytes: Callable[[int], float],
    ) -> None:
        """`update_bytes` returns what an update of a unit reads and writes, in bytes at the device's rate."""
        self._pieces = {unit: _joined(each) for unit, each in pieces.items()}
        self._update_bytes = update_bytes
        self._buffers = buffers
        self._free = deque(range(NUM_SLOTS))
        self._expected: deque[_Piece] = deque()
        self._ahead: list[tuple[_Piece, int]] = []

    def expect(self, units: Iterable[int]) -> Iterator[SimulatedOp]:
        """The next step updates these units, in this order."""
        if not self._ahead:  # so that all steps are alike
            self._free = deque(range(NUM_SLOTS))
        self._expected.extend(piece for unit in units for piece in self._pieces[unit])
        yield from self._fetch_ahead()

    def run(self, unit: int) -> Iterator[SimulatedOp]:
        """Updates the unit, if its update is expected. Units are run in the order of `expect`."""
        while self._ahead and self._ahead[0][0].unit == unit:
            piece, slot = self._ahead.pop(0)
            yield from self._fetch_ahead()
            share = piece.gradients / sum(each.gradients for each in self._pieces[unit])
            at = self._slot(slot)
            yield SimulatedOp("compute", "update", unit, int(self._update_bytes(unit) * share), [(at, "write")])
            home = [(self._home(place, purpose, unit), "write") for place, purpose in _WRITTEN]
            yield SimulatedOp("drain", "drain_state", unit, piece.goes, [*home, (at, "read")])
            self._free.append(slot)
        yield from self._fetch_ahead()

    def run_all(self) -> Iterator[SimulatedOp]:
        while self._ahead:
            yield from self.run(self._ahead[0][0].unit)

    def _fetch_ahead(self) -> Iterator[SimulatedOp]:
        while self._free and self._expected:
            piece, slot = self._expected.popleft(), self._free.popleft()
            self._ahead.append((piece, slot))
            # Not the state: a piece has bytes of its own there, and the table has one token for the unit.
            read = self._home("host:1", "held_gradient", piece.unit)
            yield SimulatedOp(
                "fetch", "fetch_state", piece.unit, piece.comes, [(read, "read"), (self._slot(slot), "write")]
            )

    def _home(self, place: str, purpose: str, unit: int) -> int:
        return self._buffers.intern(place, unit, 1, purpose, unit)

    def _slot(self, slot: int) -> int:
        return self._buffers.intern("host:9", slot, 1, "update_slot", -1)


def _joined(pieces: list[StreamPiece]) -> list[_Piece]:
    """Joins neighbours, so that at most `_MOST` pieces are left."""
    size = math.ceil(len(pieces) / _MOST)
    parts = [pieces[first : first + size] for first in range(0, len(pieces), size)]
    return [
        _Piece(
            part[0].unit,
            part[-1].end - part[0].begin,
            sum(copy.num_bytes for piece in part for copy in piece.copies if copy.comes),
            sum(copy.num_bytes for piece in part for copy in piece.copies if copy.goes),
        )
        for part in parts
    ]


_WRITTEN = (("host:2", "optimizer_state"), ("host:0", "working_copy"))
