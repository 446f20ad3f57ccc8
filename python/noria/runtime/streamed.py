"""Gives memory to updates that the device runs though state lies at home, and shows the piece that is updated now."""

from __future__ import annotations

import dataclasses

import torch

from noria.host.device_buffers import UPDATE_SLOTS
from noria.model.layout import HomeParameter, StatePlace
from noria.planning.streamed import NUM_SLOTS, StreamPiece, slot_bytes
from noria.runtime.context import Context
from noria.runtime.device_memory import tensor_at
from noria.torch_state import empty_cache

__all__ = ["PieceNow", "Streamed"]


@dataclasses.dataclass(frozen=True)
class PieceNow:
    """Shows a piece of a unit in its slot on the device."""

    piece: StreamPiece
    is_last: bool
    address: int
    device: torch.device

    def address_of(self, purpose: str, begin: int = 0) -> int:
        """Returns the address of a part of an arena, `begin` bytes behind that of the piece; 0 if there is none."""
        offset = self.piece.offsets.get(purpose)
        return 0 if offset is None else self.address + offset + begin

    def tensor(self, purpose: str, slot: HomeParameter, dtype: torch.dtype) -> torch.Tensor:
        """Returns a parameter's part of an arena, as a tensor of the device."""
        begin = (slot.home_offset - self.piece.begin) // slot.dtype.itemsize * dtype.itemsize
        shape, strides = tuple(slot.like.shape), slot.like.stride()
        return tensor_at(self.address_of(purpose, begin), self.device, dtype, shape, strides)

    def state(self, slot: HomeParameter, place: StatePlace, strides: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor of torch's state."""
        at = self.address + self.piece.offsets[place.offset]
        return tensor_at(at, self.device, place.dtype, place.shape, strides)

    def flat(self, purpose: str, begin: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        return tensor_at(self.address_of(purpose, begin), self.device, dtype, (count,), (1,))


class Streamed:
    """Tells the engine the plan's pieces, and gives it the slots.

    Order: `begin` comes when the home has its pages, and again when the plan has changed, or what is at rest.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._told: dict[int, list[StreamPiece]] = {}

    def has(self, unit: int) -> bool:
        return unit in self._told

    def begin(self) -> None:
        """Raises MachineError if the device has no room. No update runs there then; call it again later."""
        context, updates = self._context, self._context.engine.updates
        is_at_rest = context.engine.rest.has
        wanted = {unit: pieces for unit, pieces in context.plan.streamed.items() if not is_at_rest(unit)}
        if not wanted and not self._told:
            return
        copies = [copy for pieces in wanted.values() for piece in pieces for copy in piece.copies]
        context.home.pin({copy.purpose for copy in copies}, context.backend)
        size = NUM_SLOTS * slot_bytes(wanted)
        if context.device_buffers.taken.get(UPDATE_SLOTS, 0) != size:
            self.end()
        if size and UPDATE_SLOTS not in context.device_buffers.taken:
            empty_cache(context.device)
            context.ledger.expect(str(context.device), UPDATE_SLOTS, size)
            context.device_buffers.take(UPDATE_SLOTS, size)
        updates.set_slots(context.device_buffers.address(UPDATE_SLOTS), size // NUM_SLOTS, NUM_SLOTS)
        for unit in self._told.keys() | wanted.keys():
            updates.set_pieces(unit, [self._told_as(piece) for piece in wanted.get(unit, ())])
        self._told = wanted

    def end(self) -> None:
        """Runs all updates that wait, and gives the slots' memory back. No update runs on the device until `begin`."""
        context, updates = self._context, self._context.engine.updates
        for unit in self._told:
            updates.set_pieces(unit, [])
        self._told = {}
        if UPDATE_SLOTS in context.device_buffers.taken:
            updates.set_slots(0, 0, 0)
            context.device_buffers.free(UPDATE_SLOTS)
            context.ledger.expect(str(context.device), UPDATE_SLOTS, 0)

    def now(self, unit: int) -> PieceNow:
        """Returns the piece that the engine updates now. Order: inside of the update callback."""
        number, address = self._context.engine.updates.updated_now()
        pieces = self._told[unit]
        return PieceNow(pieces[number], number == len(pieces) - 1, address, self._context.device)

    def _told_as(self, piece: StreamPiece) -> tuple[int, int, list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        arenas = self._context.home.arenas
        copies = [(each, arenas[each.purpose].data + each.home_offset) for each in piece.copies]
        comes, goes = (
            [(each.slot_offset, at, each.num_bytes) for each, at in copies if getattr(each, way)]
            for way in ("comes", "goes")
        )
        return piece.begin, piece.end, comes, goes
