"""Tracks loads that must come before the model may be used: of a torn home, and of parameters without values."""

from __future__ import annotations

import contextlib

from noria import _C
from noria._errors import usage_error
from noria.runtime.context import Context

__all__ = ["LoadTracker"]


class LoadTracker:
    """Notes what has been loaded.

    `missing`: names of parameters (by slot index) and buffers (by module and name) that were built on the meta device
    and have no values yet.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._optimizers: list[object] = []
        self.missing: dict[object, str] = {}
        self._torn = ""
        self._to_load: set[object] = set()  # of a torn home: slots and optimizers still to be loaded
        self._lost: dict[tuple[int, int], set[int]] = {}  # by unit and loss: frozen slots still to be loaded

    def refuse_missing(self, what: str) -> None:
        if self.missing:
            more = f" and {len(self.missing) - 1} more" if len(self.missing) > 1 else ""
            raise usage_error(
                f"{what} of a model that has all its values",
                f'"{next(iter(self.missing.values()))}"{more}, built on the meta device and not loaded since',
                "load a checkpoint first: noria.load, model.load_state_dict (accelerate: without device_map), or "
                "torch.distributed.checkpoint.load",
            )

    def track(self, optimizer: object) -> None:
        """Adds an optimizer that must be loaded, too, before a torn home is whole again."""
        self._optimizers.append(optimizer)

    def note(self, part: object) -> None:
        """Notes that a parameter, a buffer or an optimizer has been loaded. Once all are, a torn home is whole.

        So are frozen weights that a disk has lost, once all of their unit are.
        """
        self.missing.pop(part, None)
        self._note_lost(part)
        torn = self.context.engine.torn()
        if torn and torn != self._torn and self.context.home.files is not None:
            with contextlib.suppress(_C.MachineError):  # known; more of them may be on their way
                self.context.engine.idle()
            torn = self.context.engine.torn()
        if torn != self._torn:
            self._torn = torn
            trainable = (slot.index for slot in self.context.slots if slot.trainable)
            self._to_load = {*trainable, *self._optimizers} if torn else set()
        self._to_load.discard(part)
        if torn and not self._to_load:
            self.context.engine.clear_torn()
            self._torn = ""

    def _note_lost(self, part: object) -> None:
        lost = self.context.engine.home.lost_weights()
        if not lost or not isinstance(part, int):
            return
        number = self.context.slots[part].unit
        for unit, times, _ in lost:
            if unit != number:
                continue
            if (unit, times) not in self._lost:
                frozen = (slot.index for slot in self.context.units[unit].parameters if not slot.trainable)
                self._lost[unit, times] = set(frozen)
            self._lost[unit, times].discard(part)
            if not self._lost[unit, times]:
                del self._lost[unit, times]
                self.context.engine.home.clear_lost_weights(unit)
