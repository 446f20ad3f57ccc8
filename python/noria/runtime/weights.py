"""Reads and writes parameters at home: for `state_dict()`, for a load, or for a block of `noria.materialize`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from noria import _C
from noria._errors import UsageError, usage_error
from noria.dist.ranks import raised_by_all
from noria.model.inner_tensors import made_again
from noria.model.layout import HomeParameter
from noria.runtime.context import Context
from noria.runtime.gathered_weights import GatheredWeights
from noria.runtime.masters import Masters, rounded
from noria.runtime.rank_sync import RankSync
from noria.runtime.state import RunState
from noria.torch_state import await_device, plainly

__all__ = ["Weights", "without_values"]


def without_values(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns what a state dict shows of a parameter or buffer that waits for its first load."""
    with plainly():
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


class Weights:
    """Reads and writes weights at home. `masters` holds the values that working copies are rounded from."""

    def __init__(self, context: Context, run: RunState, sync: RankSync, gathered: GatheredWeights) -> None:
        self.context = context
        self.run = run
        self.sync = sync
        self.home = context.home
        self.engine = context.engine
        self.masters = Masters(context.home, context.files)
        self.gathered = gathered
        run.on_settle.append(self.settle_writes)
        self._views: dict[int, torch.Tensor] = {}  # by slot: the tensors that `state_dict()` returns
        self._written_views: set[int] = set()  # slots whose view the user may have written
        self.gives_parts = False
        """True while `state_dict()` returns the parts of tensors that this rank has."""
        self._give: Callable[[HomeParameter], torch.Tensor] | None = None
        self._shown: dict[int, tuple[int, int]] = {}  # by slot: version and storage when `show` was called
        self._before_materialize: list[dict[int, torch.Tensor]] = []  # by open block and slot: values before
        self._checked: int | None = None  # the unit whose frozen weights `check` has compared last

    def current(self, slot: HomeParameter) -> torch.Tensor:
        """Returns the parameter's current value: a CPU tensor that views the home, the same object for tied names.

        If ranks share the model, it returns a copy instead, gathered from all ranks. A parameter that waits for its
        first load is shown on the meta device, as in plain torch. Loaders look at names and shapes before they load.
        """
        self.run.check_alive()
        if self._give is not None:
            return self._give(slot)
        if slot.index in self.run.loads.missing:
            return without_values(slot.shape, slot.strides, slot.dtype)
        with self._together("a look at weights"):
            self.run.require_consistent("a look at weights", has_value=True)
            if self.context.ranks is not None:
                self.check(slot)
        if self._shown and _C.storage_of(slot.parameter) != self._shown[slot.index][1]:
            self.take_shown()  # `p.data = x`
        self.engine.home.access_home(slot.unit, False)
        self._await_edits()
        if self.context.ranks is not None:
            shown = self.gathered.value(slot)
            return self.sync.values(slot) if shown is None else shown.clone()
        view = self._views.get(slot.index)
        if view is None:
            view = self._views[slot.index] = self.home.watched(
                slot, self.run.while_open(self._before_write, slot.index)
            )
        _C.watch(view)
        return view

    def current_of(
        self, parameter: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor] = lambda value: value
    ) -> torch.Tensor:
        """As `current`, for a parameter, also for a wrapper. `change` is applied to each tensor."""
        return made_again(parameter, lambda tensor: change(self.current(self.context.slot_of[tensor])))

    def views(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that `state_dict()` has returned, by name of the parameter."""
        return {self.context.slots[index].name: view for index, view in self._views.items()}

    @contextlib.contextmanager
    def giving(self, give: Callable[[HomeParameter], torch.Tensor], parts: bool = False) -> Iterator[None]:
        """Makes `state_dict()` return what `give` returns in place of values, while the block is open.

        `parts`: these are parts of tensors.
        """
        self._give, self.gives_parts = give, parts
        try:
            yield
        finally:
            self._give, self.gives_parts = None, False

    def _await_edits(self) -> None:
        """Waits for edits that an open block of `noria.materialize` has queued on the device."""
        if self._before_materialize:
            await_device(self.context.device)

    def _before_write(self, index: int) -> None:
        self.run.require_consistent("a write to weights", mends=True)
        slot = self.context.slots[index]
        unit, rests = slot.unit, self.engine.rest.has(slot.unit)
        if not slot.trainable:
            self.engine.home.check_weights(unit, True)  # what asks to write often only reads
        self.engine.home.access_home(unit, not rests, frozen=not slot.trainable)
        if rests:
            self.run.tell_weight_write(unit)
        self._await_edits()
        self._written_views.add(index)

    def _together(self, call: str) -> contextlib.AbstractContextManager[None]:
        """A failing disk is one rank's. If others wait for it in a block, all of them raise."""
        if self.context.ranks is None or not self.context.policy.files:
            return contextlib.nullcontext()
        return raised_by_all([self.context.ranks], call)

    def check(self, slot: HomeParameter) -> None:
        """Compares frozen weights in a file with their checksums, for a reader that nothing watches.

        Once for slots of a unit that follow each other.
        """
        if not slot.trainable and slot.unit != self._checked:
            self.engine.home.check_weights(slot.unit, True)
            self._checked = slot.unit

    def begin_load(self, units: Iterable[int], frozen: bool) -> None:
        """Call it before values are loaded into these units. `frozen`: also of frozen parameters."""
        self._checked = None
        for unit in units if frozen else ():
            with contextlib.suppress(_C.MachineError):  # known from now on, until all of them are loaded
                self.engine.home.check_weights(unit, False)

    def settle_writes(self) -> None:
        """Passes writes made through `state_dict()` on to the masters. Runs before the home is used."""
        self._checked = None
        while self._written_views:
            slot = self.context.slots[self._written_views.pop()]
            _C.watch(self._views[slot.index])
            self.masters.follow_write(slot)

    def write(self, slot: HomeParameter, value: torch.Tensor) -> None:
        """Writes a new value into the home: the master exactly, the working copy rounded.

        The caller has opened the unit's home.
        """
        self._await_edits()
        self.write_part(slot, slot.part_of(value))
        if (shown := self.gathered.value(slot)) is not None:
            dense = torch.empty_like(shown, dtype=torch.float32 if slot.has_master else slot.dtype).copy_(value)
            shown.copy_(rounded(dense) if slot.has_master else dense)

    def write_part(self, slot: HomeParameter, value: torch.Tensor) -> None:
        """As `write`, for the part of a value that this rank has at home."""
        with torch.no_grad():
            if slot.has_master:
                self.masters.load(slot, value)
            else:
                self.home.working(slot).copy_(value)
        for before in self._before_materialize:
            if slot.index in before:  # the master has this value already
                before[slot.index] = self.home.working(slot).clone()

    @contextlib.contextmanager
    def materialized(self, units: Sequence[int], read_only: bool) -> Iterator[None]:
        """Points parameters of these units at the home until the block ends.

        If ranks share the model, parameters show whole weights in memory of their own (`gathered`).
        """
        self.run.recover()
        if not read_only:
            self.run.refuse_while_averaged("noria.materialize")
        self.run.require_consistent("noria.materialize")
        slots = [slot for unit in units for slot in self.context.units[unit].parameters]
        with self._together("noria.materialize"):
            for unit in units:
                if self.context.ranks is not None or not self.context.lies_apart(unit):
                    self.engine.home.check_weights(unit, True)
        with self.gathered.taken(units) as memory, self.run.materializing():
            complaints: list[HomeParameter] = []
            shared, num_open, num_before = "", self.engine.home.num_open(), len(self._before_materialize)
            try:  # from here on an interrupt at any line closes the home again
                with plainly():
                    self.engine.home.open_home(list(units), not read_only, memory)
                self._await_edits()  # of a block around this one
                masters = [slot for slot in slots if slot.has_master and not read_only]
                was = {slot.index: self.home.working(slot).clone() for slot in masters}
                versions = {slot.index: slot.parameter._version for slot in slots}
                self._before_materialize.append(was)
                try:
                    yield
                finally:
                    del self._before_materialize[num_before:]
                    # Names of parameters that the user has given the same memory.
                    shared = self.engine.home.bring_home()
                    await_device(self.context.device)  # copies that the user and `bring_home` have queued
                    written = [slot for slot in slots if slot.parameter._version != versions[slot.index]]
                    if self.context.ranks is not None:
                        written = self.gathered.settle(slots)
                    for index, before in was.items():
                        self.masters.follow_working_copy(self.context.slots[index], before)
                    if read_only:
                        complaints = written
                        self._take_writes(slots, {slot.unit for slot in complaints})
            finally:
                del self._before_materialize[num_before:]
                self.engine.home.close_home(num_open, not read_only or bool(complaints))
                self.run.tell_closed_home()
        if complaints:
            raise usage_error(
                "no writes inside noria.materialize(..., read_only=True)",
                f'a write to "{complaints[0].name}"',
                "leave read_only out; the write was kept",
            )
        if shared:
            raise _refusal_of_shared(shared, "`p.data = ...` inside noria.materialize")

    def show(self) -> None:
        """Points all parameters at the home until `hide`. Ranks must not share it."""
        slots = self.context.slots
        num_open = self.engine.home.num_open()
        try:
            with plainly():
                self.engine.home.open_home(list(range(len(self.context.units))), False, [])
        except BaseException:
            self.engine.home.close_home(num_open, False)
            raise
        self._shown = {slot.index: (slot.parameter._version, _C.storage_of(slot.parameter)) for slot in slots}

    def take_shown(self) -> bool:
        """Takes over what was written since `show`. Returns True if anything was.

        Raises UsageError if two parameters were given the same memory; each has its own then.
        """
        shared = self.engine.home.bring_home()
        await_device(self.context.device)
        slots = self.context.slots
        units = {slot.unit for slot in slots if slot.parameter._version != self._shown[slot.index][0]}
        is_written = self._take_writes(slots, units)
        if shared:
            raise _refusal_of_shared(shared, "`p.data = ...`")
        return is_written

    def hide(self) -> None:
        """Ends `show`. No block of noria.materialize is open."""
        is_written = True
        try:
            is_written = self.take_shown()
        finally:
            self._shown.clear()
            self.engine.home.close_home(0, is_written)

    def _take_writes(self, slots: Sequence[HomeParameter], units: set[int]) -> bool:
        """Makes masters follow writes to `units`, and writes that no version counter shows (`p.data.mul_()`).

        Returns True if there were any.
        """
        found = False
        for slot in slots:
            if slot.unit in units or (self.context.ranks is None and self.engine.home.is_written(slot.unit)):
                self.engine.home.access_home(slot.unit, True, frozen=not slot.trainable)
                self.masters.follow_write(slot)
                found = True
        return found


def _refusal_of_shared(names: str, way: str) -> UsageError:
    return usage_error(
        "parameters that share no memory",
        f"{names}, given the same by {way}",
        "tie them before noria.wrap, as one parameter; each has memory of its own now, with the same values",
    )
