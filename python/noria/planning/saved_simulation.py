"""Lists the simulated ops that move what blocks save off the device and back, in the engine's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from noria import _C
from noria.planning.simulated_op import SimulatedOp

__all__ = ["MOST_WORKING", "SavedOps", "home_of_saved", "piece_at_home"]

MOST_WORKING = 4
"""How many bundles are on the device without a room for them. As in csrc/plan/activation_plan.h, like two others."""
_LEAST_PIECE = 16 * 1024 * 1024
_LEAST_STAYING = 1
_MOST_AHEAD = 2


def piece_at_home(least: int, taken: int) -> int:
    """Returns the bytes of the next piece of host memory for what blocks save, if `taken` bytes are used up."""
    return max(least, _LEAST_PIECE, taken // 4)


def home_of_saved(num_bytes: int) -> int:
    """Returns the bytes that pieces for so many bytes take."""
    taken = 0
    while taken < num_bytes:
        taken += piece_at_home(0, taken)
    return taken


class SavedOps:
    """Moves what blocks save as csrc/engine/activation_store.h does. Each block saves one bundle in a forward.

    Parts of a bundle leave, in the simulation of any size. The engine moves whole tensors.
    """

    def __init__(self, bundles: dict[int, int], room: int | None, buffers: _C.BufferTable, *, is_prompt: bool) -> None:
        """`bundles`: bytes, by unit. `room`: for them, on the device. None: as few stay as overlap allows.

        `is_prompt`: an op that is issued when a visit has ended comes after it, as on the CPU.
        """
        self._bundles = bundles
        self._largest = max(bundles.values(), default=0)
        self._most = self._largest * MOST_WORKING if room is None else room
        fits = room is not None and sum(bundles.values()) <= room
        self._may_stay = 0 if room is None else room if fits else room - 2 * self._largest
        self._buffers = buffers
        self._is_prompt = is_prompt
        self._there: dict[int, int] = {}  # by unit: bytes on the device, without those that leave
        self._num_there = 0  # all of these
        self._at_home = 0
        self._staying: list[int] = []  # units, in the order of their forwards
        self._leaving: deque[tuple[int, int]] = deque()  # units and bytes: the first to leave comes first
        self._unused: list[int] = []  # units whose backward has not begun, in the order of their forwards
        self._leaves_now: set[int] = set()  # units that have begun to leave after the last forward
        self._used: int | None = None  # the unit whose backward began last
        self.most_at_home = 0
        """Most bytes at home so far."""

    def begin_forward(self) -> None:
        """Forgets what an earlier forward has saved."""
        self._there.clear()
        self._num_there = self._at_home = 0
        self._staying.clear()
        self._leaving.clear()
        self._unused.clear()
        self._used = None

    def enter_forward(self, unit: int) -> Iterator[SimulatedOp]:
        """A block's forward begins when there is room for what it saves."""
        if self._is_new(unit):
            yield from self._make_way(unit, self._bundles[unit])

    def leave_forward(self, unit: int) -> Iterator[SimulatedOp]:
        if not self._is_new(unit):
            return
        self._there[unit] = self._bundles[unit]
        self._num_there += self._bundles[unit]
        self._staying.append(unit)
        self._unused.append(unit)
        yield SimulatedOp("compute", "save", unit, 0, [(self._token(unit), "write")])
        self._leaves_now.clear()
        yield from self._offload_until(0, self._may_stay)

    def enter_backward(self, unit: int) -> Iterator[SimulatedOp]:
        """A block's backward needs its bundle. The next ones come ahead, if there is room."""
        if self._used is not None:
            self._num_there -= self._there.pop(self._used)  # autograd has let go of it
            self._used = None
        if unit not in self._unused:
            return
        self._unused.remove(unit)
        self._used = unit
        if unit in self._staying:
            self._staying.remove(unit)
        yield from self._reload(unit)
        for ahead in self._unused[: -_MOST_AHEAD - 1 : -1]:
            coming = self._bundles[ahead] - self._there[ahead]
            if self._num_there + coming + 2 * self._largest > self._most:
                break
            yield from self._reload(ahead)
        self._leaves_now.clear()

    def _is_new(self, unit: int) -> bool:
        """Returns False if the block saves nothing, or if its visit only goes on."""
        return unit in self._bundles and unit not in self._unused

    def reads(self, unit: int) -> list[tuple[int, str]]:
        """Returns the accesses by which the backward of a unit reads its bundle."""
        return [(self._token(unit), "read")] if unit in self._bundles else []

    def _make_way(self, unit: int, num_bytes: int) -> Iterator[SimulatedOp]:
        """Makes room for so many bytes. Compute waits for the copies that free them."""
        yield from self._offload_until(num_bytes, self._most)
        waits = []
        while self._leaving and self._on_device() + num_bytes > self._most:
            left, _ = self._leaving.popleft()
            waits.append((self._copy(left), "read"))
        if waits:
            yield SimulatedOp("compute", "save", unit, 0, waits)

    def _on_device(self) -> int:
        return self._num_there + sum(size for _, size in self._leaving)

    def _offload_until(self, more: int, room: int) -> Iterator[SimulatedOp]:
        while len(self._staying) > _LEAST_STAYING and self._num_there + more > room:
            unit = self._staying[0]  # its backward comes last
            size = min(self._there[unit], self._num_there + more - room)
            self._move(unit, -size)
            self._leaves_now.add(unit)
            self._leaving.append((unit, size))
            self.most_at_home = max(self.most_at_home, self._at_home)
            if not self._there[unit]:
                self._staying.pop(0)
            if size:
                read = {unit, self._unused[-1]} if self._is_prompt and self._unused else {unit}
                accesses = [*((self._token(each), "read") for each in sorted(read)), (self._copy(unit), "write")]
                yield SimulatedOp("drain", "offload", unit, size, accesses)

    def _reload(self, unit: int) -> Iterator[SimulatedOp]:
        coming = self._bundles[unit] - self._there[unit]
        if not coming:
            return
        if unit in self._staying:
            self._staying.remove(unit)
        if unit in self._leaves_now:  # it is still there when a backward begins at once
            self._leaving = deque(each for each in self._leaving if each[0] != unit)
            self._move(unit, coming)
            return
        yield from self._make_way(unit, coming)
        self._move(unit, coming)
        # What another tensor has used until now is written.
        yield SimulatedOp("compute", "save", unit, 0, [(self._token(unit), "write")])
        yield SimulatedOp("fetch", "reload", unit, coming, [(self._copy(unit), "read"), (self._token(unit), "write")])

    def _move(self, unit: int, num_bytes: int) -> None:
        """So many bytes of the unit's bundle come to the device; if negative, they leave."""
        self._there[unit] += num_bytes
        self._num_there += num_bytes
        self._at_home -= num_bytes

    def _token(self, unit: int) -> int:
        return self._buffers.intern("host:10", unit, 1, "saved_tensor", unit)

    def _copy(self, unit: int) -> int:
        return self._buffers.intern("host:11", unit, 1, "saved_tensor", unit)
