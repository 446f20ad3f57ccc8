"""Shows state that lies in files: a unit's state has memory while it is shown, and only then."""

from __future__ import annotations

import weakref

import torch

from noria import _C
from noria._errors import usage_error
from noria.host.home import Home
from noria.host.limits import host_limits, margin_of, tightest
from noria.model.file_layout import STATE_SLOTS
from noria.policy import format_bytes
from noria.runtime.ledger import Ledger

__all__ = ["FileState"]


class FileState:
    """Knows the tensors that view state in files, and refuses access to them while that state has no memory.

    Order: `show` or `touch` before the state of a unit is read or written outside of updates; `release` before updates.
    """

    def __init__(self, home: Home, engine: _C.TorchBridge, ledger: Ledger) -> None:
        self._home = home
        self._ledger = ledger
        self._engine = engine
        self._tensors: dict[int, list[tuple[weakref.ref[torch.Tensor], int]]] = {}  # by unit; each with its address
        self._shown: set[int] = set()
        self._touched: int | None = None
        self._blank = set(home.file_plan.sizes)

    def has(self, unit: int) -> bool:
        return self._home.record(unit) >= 0

    def is_blank(self, unit: int) -> bool:
        """Returns True if the unit's state has only zeros, because nothing has used it."""
        return unit in self._blank

    def track(self, unit: int, tensor: torch.Tensor) -> torch.Tensor:
        """Adds a tensor that views the state of a unit. An access raises until `show` or `touch`."""
        known = self._tensors.setdefault(unit, [])
        known[:] = [each for each in known if each[0]() is not None]
        known.append((weakref.ref(tensor), tensor.data_ptr()))
        if unit not in self._shown and unit != self._touched:
            _C.refuse_access(tensor, _REFUSAL)
        return tensor

    def touch(self, unit: int) -> None:
        """Gives the unit's state memory until another unit is touched. What is written there counts."""
        if not self.has(unit):
            return
        self._engine.home.access_home(unit, False)
        self._blank.discard(unit)
        if self._touched != unit:
            self._end_touch()
            self._touched = unit
            self._allow(unit)

    def show(self, units: list[int]) -> None:
        """Gives the state of these units memory until `release`, for the user.

        Raises UsageError if the machine has not enough for all of them.
        """
        new = [unit for unit in units if self.has(unit) and unit not in self._shown]
        self._refuse_too_much(new)
        for unit in new:
            self._engine.home.access_home(unit, False)
            self._engine.home.hold_state(unit)
            self._blank.discard(unit)
            self._shown.add(unit)
            self._allow(unit)
        self._expect_slots()

    def release(self) -> None:
        """Ends all that was shown and touched. What the user has written there counts."""
        self._end_touch()
        if not self._shown:
            return
        for unit in self._shown:
            self._refuse(unit)
        self._shown.clear()
        self._engine.home.release_states()
        self._expect_slots()

    def note_updated(self, unit: int) -> None:
        self._blank.discard(unit)

    def _expect_slots(self) -> None:
        if (files := self._home.files) is not None:
            self._ledger.expect("host", STATE_SLOTS, files.num_slots * files.slot_bytes)

    def _end_touch(self) -> None:
        if self._touched is not None and self._touched not in self._shown:
            self._refuse(self._touched)
        self._touched = None

    def _allow(self, unit: int) -> None:
        for reference, address in self._tensors.get(unit, ()):
            if (tensor := reference()) is not None:
                _C.move_tensor(tensor, address)
                _C.allow_access(tensor)

    def _refuse(self, unit: int) -> None:
        for reference, _ in self._tensors.get(unit, ()):
            if (tensor := reference()) is not None:
                _C.refuse_access(tensor, _REFUSAL)

    def _refuse_too_much(self, units: list[int]) -> None:
        plan = self._home.file_plan
        more = (len(units) + len(self._shown) - plan.num_slots) * plan.slot_bytes
        least = tightest(host_limits()) if more > 0 else None
        if least is None or more <= least.free - margin_of(least.free):
            return
        raise usage_error(
            f"free host memory of at least {format_bytes(more)}, to show the moments of {len(units)} units that lie in "
            "files at once",
            str(least),
            "look at optimizer.state[parameter] for one parameter after the other, or save with noria.save",
        )


_REFUSAL = (
    "this moment lies in a file now. Remedy: take it from optimizer.state[parameter] again; what you take is there "
    "until the next step()"
)
