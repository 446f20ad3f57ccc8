"""What the home has of parameters, read and written: by `state_dict()`, a load, or a block of `noria.materialize`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from noria import _C
from noria._errors import usage_error
from noria.custody.masters import Masters, rounded
from noria.custody.shown import Shown
from noria.home import HomeParameter
from noria.modes import await_device, plainly

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["Values"]


class Values:
    """Of one wrap call. `masters` is what each working copy is rounded from."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self.home = wrapped.home
        self.custody = wrapped.custody
        self.masters = Masters(wrapped.home)
        self.shown = Shown(wrapped)
        self._views: dict[int, torch.Tensor] = {}  # by slot, what `state_dict()` shows
        self._written_views: set[int] = set()  # by slot: the user has had write access to its view
        self._give: Callable[[HomeParameter], torch.Tensor] | None = None
        self._before_materialize: list[dict[int, torch.Tensor]] = []  # of the blocks that are open, by slot

    @property
    def is_materialized(self) -> bool:
        """Blocks of `noria.materialize` are open."""
        return bool(self._before_materialize)

    def current(self, slot: HomeParameter) -> torch.Tensor:
        """The parameter's current value: a CPU tensor that views the home, the same object for tied names. Where ranks
        share the model: a copy, from all of them."""
        self.wrapped.check_alive()
        if self._give is not None:
            return self._give(slot)
        self.wrapped.refuse_between_steps("a look at weights")
        self.custody.access_home(slot.unit, False)
        if self.wrapped.ranks is not None:
            shown = self.shown.value(slot)
            return self.wrapped.together.values(slot) if shown is None else shown.clone()
        view = self._views.get(slot.index)
        if view is None:
            view = self._views[slot.index] = self.home.watched(slot, self._before_write(slot.index))
        _C.watch(view)
        return view

    @contextlib.contextmanager
    def giving(self, give: Callable[[HomeParameter], torch.Tensor]) -> Iterator[None]:
        """Inside, `state_dict()` has these in the place of values."""
        self._give = give
        try:
            yield
        finally:
            self._give = None

    def move_views(self, slot: HomeParameter) -> None:
        """The unit lies elsewhere now; so do the bytes that the user's tensors show."""
        for purpose, views in (("working copies", self._views), ("low bits", self.masters.low_views)):
            view = views.get(slot.index)
            if view is not None:
                _C.move_tensor(view, self.home.address(purpose, slot.unit) + slot.home_offset)

    def _before_write(self, index: int) -> Callable[[], None]:
        def note(wrapped: Wrapped) -> None:
            wrapped.refuse_between_steps("a write to weights", mends=True)
            wrapped.custody.access_home(wrapped.slots[index].unit, True)
            wrapped.values._written_views.add(index)

        return self.wrapped.while_open(note)

    def settle_writes(self) -> None:
        """Before the home is used: what was written through `state_dict()` reaches masters."""
        while self._written_views:
            slot = self.wrapped.slots[self._written_views.pop()]
            _C.watch(self._views[slot.index])
            self.masters.follow_write(slot)

    def write(self, slot: HomeParameter, value: torch.Tensor) -> None:
        """A new value into the home: the master exactly, the working copy rounded. The unit's home must be open."""
        self.write_part(slot, slot.part_of(value))
        if (shown := self.shown.value(slot)) is not None:
            dense = torch.empty_like(shown, dtype=torch.float32 if slot.has_master else slot.dtype).copy_(value)
            shown.copy_(rounded(dense) if slot.has_master else dense)

    def write_part(self, slot: HomeParameter, value: torch.Tensor) -> None:
        """As `write`, of what the home has of a value."""
        with torch.no_grad():
            if slot.has_master:
                self.masters.set(
                    slot, self.masters.with_loaded_low_bits(slot, value.to(device="cpu", dtype=torch.float32))
                )
            else:
                self.home.working(slot).copy_(value)
        for before in self._before_materialize:
            if slot.index in before:  # the master has followed already
                before[slot.index] = self.home.working(slot).clone()

    @contextlib.contextmanager
    def materialized(self, units: Sequence[int], read_only: bool) -> Iterator[None]:
        """Parameters of these units show the home itself, until the block ends; what `shown` has, where ranks share the
        model."""
        self.wrapped.recover()
        self.wrapped.refuse_between_steps("noria.materialize")
        slots = [slot for unit in units for slot in self.wrapped.units[unit].parameters]
        with self.shown.taken(units) as memory:
            with plainly():
                self.custody.open_home(list(units), not read_only, memory)
            was = {slot.index: self.home.working(slot).clone() for slot in slots if slot.has_master and not read_only}
            versions = {slot.index: slot.parameter._version for slot in slots}
            self._before_materialize.append(was)
            complaints: list[HomeParameter] = []
            try:
                yield
            finally:
                self._before_materialize.pop()  # blocks nest
                shared = self.custody.bring_home()
                await_device(self.wrapped.device)  # for what the user and `bring_home` have asked it to copy
                try:
                    written = [slot for slot in slots if slot.parameter._version != versions[slot.index]]
                    if self.wrapped.ranks is not None:
                        written = self.shown.settle(slots)
                    for index, before in was.items():
                        self.masters.follow_working_copy(self.wrapped.slots[index], before)
                    if read_only:
                        complaints = written
                        self._take_writes(slots, {slot.unit for slot in complaints})
                finally:
                    self.custody.close_home(list(units), not read_only or bool(complaints))
        if complaints:
            raise usage_error(
                "no writes inside noria.materialize(..., read_only=True)",
                f'a write to "{complaints[0].name}"',
                "leave read_only out; the write was kept",
            )
        if shared:
            raise usage_error(
                "parameters that share no memory",
                f"{shared}, given the same by `p.data = ...` inside noria.materialize",
                "tie them before noria.wrap, as one parameter; each has memory of its own now, with the same values",
            )

    def _take_writes(self, slots: Sequence[HomeParameter], units: set[int]) -> None:
        """Of these units, and of those that may have been written past every version counter (`p.data.mul_()`)."""
        for slot in slots:
            if slot.unit in units or (self.wrapped.ranks is None and self.custody.is_written(slot.unit)):
                self.custody.access_home(slot.unit, True)
                self.masters.follow_write(slot)
