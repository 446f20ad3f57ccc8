"""Lists the ops of simulated steps that bring moments and frozen weights from files, in the engine's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from noria import _C
from noria.model.file_layout import FilePlan
from noria.planning.simulated_op import SimulatedOp

__all__ = ["FileOps", "FileWeightsOps"]


class FileOps:
    """Gives units slots as csrc/engine/file_states.h does.

    The unit whose last use is longest ago loses its slot. If all have been brought ahead, the one that was brought last
    does.

    A read is issued when the op that writes `begun` has ended, and not before. None, as under update="backward": reads
    come ahead of their units. `most_postponed`: updates that wait for the end of the backward.
    """

    def __init__(self, files: FilePlan, buffers: _C.BufferTable, begun: int | None, most_postponed: int) -> None:
        self._files = files
        self._buffers = buffers
        self._begun = [] if begun is None else [(begun, "read")]
        self._free = deque(range(files.num_slots))
        self._slots: dict[int, int] = {}
        """By unit: its slot. The unit whose last use is longest ago comes first."""
        units = sorted(files.sizes, reverse=True)
        self._most_postponed = most_postponed
        postponed = [unit for number, unit in enumerate(units) if self.postpones(number)]
        self._expected = deque([*(unit for unit in units if unit not in postponed), *reversed(postponed)])
        """Units that are not brought ahead. The one that is expected next comes first."""
        self._ahead: set[int] = set()

    def postpones(self, number: int) -> bool:
        """Returns True if an update waits for the end of the backward. `number`: see csrc/plan/postponed.h."""
        return _C.is_postponed(number, self._files.num_slots, self._most_postponed)

    def bring(self, unit: int) -> Iterator[SimulatedOp]:
        """Gives the unit a slot, and reads its moments, unless they are there."""
        if unit in self._slots:
            self._slots[unit] = self._slots.pop(unit)
            return
        self._slots[unit] = slot = self._free.popleft() if self._free else self._slots.pop(self._leave())
        accesses = [(self._record(unit), "read"), (self._slot(slot), "write"), *self._begun]
        yield SimulatedOp("read", "read_state", unit, self._files.sizes[unit], accesses)

    def access(self, unit: int) -> tuple[int, str]:
        """Returns the access of an update of the unit. Its moments have been brought."""
        return self._slot(self._slots[unit]), "write"

    def put_back(self, unit: int) -> Iterator[SimulatedOp]:
        """Writes what an update has made, and brings ahead what comes next if reads come ahead."""
        accesses = [(self._slot(self._slots[unit]), "read"), (self._record(unit), "write")]
        yield SimulatedOp("write", "write_state", unit, self._files.sizes[unit], accesses)
        if not self._begun:
            yield from self._bring_ahead_behind(unit)

    def _bring_ahead_behind(self, unit: int) -> Iterator[SimulatedOp]:
        """Brings ahead what comes next, once the unit has been updated."""
        was_ahead = unit in self._ahead
        (self._ahead if was_ahead else self._expected).remove(unit)
        self._expected.append(unit)
        while self._expected and len(self._ahead) < self._files.num_slots - (not was_ahead):
            self._ahead.add(following := self._expected.popleft())
            yield from self.bring(following)

    def written(self) -> list[tuple[int, str]]:
        """Returns the accesses of an op that waits until all is written."""
        return [(self._record(unit), "read") for unit in self._files.sizes]

    def _leave(self) -> int:
        """Returns the unit that loses its slot."""
        leaving = next((unit for unit in self._slots if unit not in self._ahead), next(reversed(self._slots)))
        if leaving in self._ahead:
            self._ahead.remove(leaving)
            self._expected.appendleft(leaving)
        return leaving

    def _record(self, unit: int) -> int:
        return self._buffers.intern("file:0", unit, 1, "record", unit)

    def _slot(self, slot: int) -> int:
        return self._buffers.intern("host:10", slot, 1, "state_slot", -1)


class FileWeightsOps:
    """Gives units slots as csrc/engine/file_weights.h does: the one that was brought longest ago loses its slot."""

    def __init__(self, files: FilePlan, buffers: _C.BufferTable) -> None:
        self._sizes = files.weights_sizes
        self._buffers = buffers
        self._slots: deque[int | None] = deque([None] * files.num_weights_slots)
        """By slot, the one that was given longest ago first: its unit."""
        self._first = 0  # the number of that slot

    def bring(self, unit: int) -> Iterator[SimulatedOp]:
        """Reads the unit's frozen weights into a slot, unless they are there."""
        if unit in self._slots:
            return
        self._slots.popleft()
        self._slots.append(unit)
        self._first = (self._first + 1) % len(self._slots)
        yield SimulatedOp("read_weights", "read_weights", unit, self._sizes[unit], [(self._slot(unit), "write")])

    def access(self, unit: int) -> tuple[int, str]:
        """Returns the access of a fetch of the unit. Its frozen weights have been brought."""
        return self._slot(unit), "read"

    def _slot(self, unit: int) -> int:
        number = (self._first + self._slots.index(unit)) % len(self._slots)
        return self._buffers.intern("host:11", number, 1, "weights_slot", -1)
