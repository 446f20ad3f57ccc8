"""Keeps units on the device between steps: weights, masters and state. Gradients lie in torch's memory.

Their parameters are ordinary tensors of the device, and `step()` updates in place. Before anything reads a unit's home,
noria copies the unit back from the device. What is written to the home is copied to the device before the next forward
or step. The other units stream. If there are none, the engine sleeps: the wheel stands still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from noria import _C
from noria.model.layout import AVERAGES, TORCH_STATE, HomeParameter, HomeUnit, StatePlace
from noria.planning.decisions import without_choices
from noria.planning.resident import STATE_ARENAS, Mirror, mirrors_of
from noria.planning.wrap_plan import WrapPlan
from noria.runtime.context import Context
from noria.runtime.device_memory import tensor_at
from noria.runtime.masters import follow_there
from noria.runtime.state import RunState, weakly
from noria.runtime.streamed import Streamed
from noria.runtime.window import give_window_back, resize_window, take_window
from noria.torch_state import await_device, empty_cache, plainly

__all__ = ["Rest"]

_WEIGHTS = "working copies"


class Rest:
    """Begins and ends the state in which `units` stay on the device: the rest.

    `_newer` holds the units that only the device has up to date. `_stale` holds those that may be up to date only at
    home.

    Order: it begins at the start of a forward, before any block has run.
    """

    def __init__(
        self,
        context: Context,
        run: RunState,
        streamed: Streamed,
        can_update: Callable[[], bool],
        watch_state: Callable[[], None],
    ) -> None:
        """`can_update` tells whether all state exists that steps update, so that they can update on the device.

        `watch_state` makes the next write to each state tensor at home call `run.tell_state_write`.
        """
        self.context = context
        self.run = run
        self.is_on = False
        self.units: list[HomeUnit] = []
        """Those that are at rest while `is_on`."""
        self._mirrors: dict[str, Mirror] = {}
        self._streamed = streamed
        self._can_update = can_update
        self._watch_state = watch_state
        self.is_given_up = False
        """True if no unit stays any more, because the device had no room."""
        self.on_plan: list[Callable[[], None]] = []
        """Runs when another plan has been taken up."""
        self._adopted: WrapPlan | None = None
        self._has_seen_pass = False
        self._newer: set[int] = set()
        self._stale: set[int] = set()
        self._stale_state: set[int] = set()  # of these the optimizer's state alone
        self._versions: dict[int, int] = {}  # by slot with a split master: its version when it was shown or updated
        self._is_fresh = False  # True: no unit is stale or hidden
        run.on_state_write.append(self._note_state_written)
        run.on_weight_write.append(self.note_written)
        run.on_home_closed.append(self._show_again)
        run.on_out_of_memory.append(self.give_up)

    @property
    def stands_still(self) -> bool:
        """True if all units are at rest, so that nothing moves."""
        return self.is_on and len(self.units) == len(self.context.units)

    def has(self, unit: int) -> bool:
        """Returns True if the unit is at rest."""
        return self.is_on and self.context.engine.rest.has(unit)

    # ---- begin and end ----

    def begin_forward(self) -> None:
        """Begins or ends the rest if it is time, and makes the units at rest ready for the forward that begins now.

        Order: no pass is under way.
        """
        plan, chooses = self.context.plan, self.context.policy.resident == "auto"
        if chooses and plan.stays and not self.is_given_up and self._has_averages():  # these keep units from staying
            self._adopted = without_choices(plan)
        if self._adopted is not None and not (self._adopted.stays and self._has_averages()):
            self._take_up(self._adopted)
        is_wanted = bool(self.context.plan.stays) and not self.is_given_up
        if self.is_on and (not is_wanted or self._has_averages()):
            self.end()
        if not is_wanted:
            return
        if not self.is_on and self._may_begin():
            try:
                self._begin()
            except _C.MachineError as error:  # the device has no room for what the plan lets stay
                if not chooses:
                    raise
                self.context.notes.append(f"all units stream: {error}")
                self._adopted = without_choices(self.context.plan)
        self._has_seen_pass = True
        if self.is_on:
            self.refresh()

    def adopt(self, plan: WrapPlan) -> None:
        """From the next forward on the units of this plan stay. The window gets its size."""
        self._adopted = plan

    def _take_up(self, plan: WrapPlan) -> None:
        self._adopted = None
        context, before = self.context, self.context.plan
        may_draft = plan.undo_logs.keys() - plan.stays - plan.streamed.keys()
        if plan.drafted not in (before.drafted, may_draft):
            drafted = f"{len(plan.drafted)} of {len(context.units)} units are drafted"
            context.notes.append(f"{drafted}: no other number is faster")
        place, place_before = ((each.stays, each.streamed.keys(), each.arena_bytes) for each in (plan, before))
        if (plan.recomputed or frozenset()) != (before.recomputed or frozenset()):
            again = f"{len(plan.recomputed or ())} of {len(plan.block_units)} blocks"
            context.notes.append(f'activations="auto": {again} compute their forward again')
        if place == place_before:
            context.settle_units()
            context.replace_plan(plan)
            self._tell_plan()
            return
        if place[:2] != place_before[:2]:
            chosen = f"{len(plan.stays)} of {len(context.units)} units stay on the device"
            others = len(plan.streamed_at_rest)
            chosen += f", which updates {others} others" if others else ""
            context.notes.append(f'resident="auto": {chosen}')
        try:
            self._change_to(plan)
        except _C.MachineError as error:  # the device has no room for it
            self.is_given_up = True
            context.notes.append(f"the plan of before goes on: {error}")
            self._change_to(before)

    def _change_to(self, plan: WrapPlan) -> None:
        """Raises MachineError if the device has no room for the window, or for pieces that are updated there."""
        context = self.context
        self.end()
        context.settle_units()  # drafts of units that stay from now on
        before = context.plan.arena_bytes
        context.replace_plan(plan)
        self._streamed.end()  # its slots may be in the way of a larger window
        if plan.arena_bytes != before:
            resize_window(context, self.run, plan.arena_bytes)
        self.run.wake_by(self._streamed.begin)
        self._tell_plan()

    def _tell_plan(self) -> None:
        for told in self.on_plan:
            told()

    def _may_begin(self) -> bool:
        return (
            self._has_seen_pass
            and self._can_update()
            and not self.run.loads.missing
            and not self._has_averages()
            and not self.context.engine.torn()
        )

    def _has_averages(self) -> bool:
        return any(purpose.startswith(AVERAGES) for purpose in self.context.home.arenas)

    def _begin(self) -> None:
        context = self.context
        self.units = [context.units[unit] for unit in sorted(context.plan.stays)]
        homes = [region for purpose, region in context.home.regions.items() if purpose in context.home.arenas]
        self._mirrors = mirrors_of(self.units, context.plan.fused, homes, context.plan.states)
        self.run.settle_writes()
        context.engine.home.raise_lost_writes()
        context.engine.updates.run_all_deferred()
        context.settle_units()  # drafts, whose undo would come over what is brought home later
        context.engine.idle()
        self._keep_gradients()
        await_device(context.device)
        self._newer.clear()
        self._forget_device()
        try:
            give_window_back(context)
            context.engine.rest.set_units([unit.index for unit in self.units])
            self._streamed.begin()  # slots for the others alone
            self._take_memory()
            if not context.plan.stands_still:
                take_window(context)
        except BaseException:
            self.is_given_up = True
            self._leave()
            raise
        context.engine.rest.set_callback(weakly(self._look))
        self.is_on = True

    def _keep_gradients(self) -> None:
        """Gives gradients that are held at home memory of their own: autograd adds to them from now on."""
        with plainly():
            for slot in (slot for unit in self.units for slot in unit.parameters):
                gradient = slot.parameter.grad
                if gradient is not None and self.context.engine.gradients.gradient_is(slot.index) == "held":
                    slot.parameter.grad = gradient.clone()

    def end(self, *, wakes: bool = True) -> None:
        """Brings everything home. Does nothing if the model is not at rest.

        `wakes`: the wheel turns again. If the device has no room for the window, it raises MachineError, and the next
        pass tries once more.
        """
        if not self.is_on:
            return
        self.suspend()
        if not self.stands_still:
            self.run.wake_later(self._stream_again)
            give_window_back(self.context)
        self.is_on = False
        self._leave(wakes=wakes)

    def suspend(self) -> None:
        """Brings everything home, and gives the device's memory back until `resume`."""
        for unit in self.units:
            self._bring_home(unit)
        await_device(self.context.device)
        self._forget_device()
        for unit in self.units:
            self.context.engine.rest.hide(unit.index)
        self._give_memory_back()

    def resume(self) -> None:
        """Takes the device's memory again, and shows the units there. Graphs of before `suspend` can go on."""
        self._take_memory()
        self._show_all()

    def give_up(self, wanted: int = 0) -> None:
        """Ends the rest for good at the next forward: the device has no room for it."""
        self.is_given_up = True
        self._adopted = None

    def _leave(self, *, wakes: bool = True) -> None:
        self._give_memory_back()
        self.context.engine.rest.set_units([])
        if wakes:
            self.run.wake_by(self._stream_again)

    def _stream_again(self) -> None:
        take_window(self.context)
        self._streamed.begin()

    def _forget_device(self) -> None:
        """What the device has does not count any more."""
        self._is_fresh = False
        self._stale = {unit.index for unit in self.units}
        self._stale_state.clear()

    def _take_memory(self) -> None:
        """Takes what is missing: an earlier try may have been interrupted."""
        context = self.context
        regions = [mirror.region for mirror in self._mirrors.values()]
        taken = context.device_buffers.taken
        missing = [region for region in regions if region.bytes and region.purpose not in taken]
        if missing:
            empty_cache(context.device)
        for region in missing:
            context.ledger.expect(str(context.device), region.purpose, region.bytes)
            context.device_buffers.take(region.purpose, region.bytes)

    def _give_memory_back(self) -> None:
        context = self.context
        for mirror in self._mirrors.values():
            if mirror.region.purpose in context.device_buffers.taken:
                context.device_buffers.free(mirror.region.purpose)
            context.ledger.expect(str(context.device), mirror.region.purpose, 0)

    # ---- home and device ----

    def refresh(self) -> None:
        """Copies to the device what has been written at home, and shows the units there.

        Raises UsageError if the home is open, or if the user has given a parameter other data.
        """
        self.context.engine.rest.check()
        self.run.require_awake("a pass")
        self.run.settle_writes()
        self.run.require_consistent("a pass")
        if not self._is_fresh:
            self._take_memory()
            self._show_all()

    def refresh_if_stale(self) -> None:
        """As `refresh`, but quick if nothing has looked at the home since: each block calls this."""
        if not self._is_fresh or self.run.is_materialized:
            self.refresh()

    def _show_all(self) -> None:
        for unit in self.units:
            if unit.index in self._stale:
                self._copy(unit, self._mirrors, to_device=True)
            elif unit.index in self._stale_state:
                self._copy(unit, [purpose for purpose in self._mirrors if purpose in STATE_ARENAS], to_device=True)
            self._stale.discard(unit.index)
            self._stale_state.discard(unit.index)
            if not self.context.engine.rest.is_shown(unit.index):
                self._show(unit)
        self._watch_state()
        self._is_fresh = True

    # ---- as DeviceMemory ----

    def address(self, purpose: str, unit: int) -> int:
        """Returns the address on the device of the unit's part of an arena, or 0 if there is no such arena."""
        mirror = self._mirrors.get(purpose)
        if mirror is None:
            return 0
        base = self.context.device_buffers.address(mirror.region.purpose)
        return base + mirror.region.offsets[unit] if base else 0

    @property
    def device(self) -> torch.device:
        return self.context.device

    def tensor(self, purpose: str, slot: HomeParameter, dtype: torch.dtype) -> torch.Tensor:
        """Returns a parameter's part of an arena, as a tensor of the device."""
        begin = slot.home_offset // slot.dtype.itemsize * dtype.itemsize
        like = slot.like
        return tensor_at(self.address(purpose, slot.unit) + begin, self.device, dtype, tuple(like.shape), like.stride())

    def state(self, slot: HomeParameter, place: StatePlace, strides: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor of torch's state on the device."""
        mirror = self._mirrors[TORCH_STATE]
        there, _ = mirror.parts[slot.unit][place.offset]
        base = self.context.device_buffers.address(mirror.region.purpose)
        return tensor_at(base + there, self.device, place.dtype, place.shape, strides)

    # ---- what is newer where ----

    def note_newer(self, unit: int) -> None:
        """A step updates the unit on the device."""
        self._newer.add(unit)

    def note_versions(self, unit: int) -> None:
        """The unit's parameters have these versions without a write of the user's."""
        split = (slot for slot in self.context.units[unit].parameters if slot.is_split)
        self._versions.update({slot.index: slot.parameter._version for slot in split})

    def take_writes(self) -> None:
        """Takes over what the user has written to parameters on the device. A split master loses its low bits."""
        for unit in self.units:
            self._take_writes(unit)

    def _look(self, unit: int, write_weights: bool, is_open: bool) -> None:
        """Brings a unit home. The engine calls this before anything uses the unit's home.

        `write_weights`: the caller changes the unit's home. Until the next forward or step, a use of its parameters
        raises. `is_open`: the parameters show the home already, so it is up to date, and they stay there.
        """
        if not is_open:
            self._bring_home(self.context.units[unit])
        self._is_fresh = False  # the caller may show the unit's home, and hide it again
        if write_weights:
            self._stale.add(unit)
            if not is_open:
                self.context.engine.rest.hide(unit)

    def note_written(self, unit: int) -> None:
        """The unit's home is about to be written, or may be. Its parameters stay as they are until the next pass."""
        self._note_stale(unit, self._stale)

    def _note_state_written(self, unit: int) -> None:
        self._note_stale(unit, self._stale_state)

    def _note_stale(self, unit: int, stale: set[int]) -> None:
        if self.has(unit):
            self._bring_home(self.context.units[unit])
            stale.add(unit)
            self._is_fresh = False

    def _show_again(self) -> None:
        """A block of noria.materialize has ended. A graph from before it may need the weights."""
        if self.is_on and not self.context.engine.home.num_open():
            self._show_all()

    def _bring_home(self, unit: HomeUnit) -> None:
        self._take_writes(unit)
        if unit.index in self._newer:
            has_state = unit.index not in self._stale_state  # else the home's state is newer
            purposes = [purpose for purpose in self._mirrors if has_state or purpose not in STATE_ARENAS]
            self._copy(unit, purposes, to_device=False)
            self._newer.discard(unit.index)

    def _take_writes(self, unit: HomeUnit) -> None:
        rest = self.context.engine.rest
        if unit.index in self._stale or not rest.is_written(unit.index):
            return
        self._newer.add(unit.index)
        split = [slot for slot in unit.parameters if slot.is_split]
        written = [slot for slot in split if slot.parameter._version != self._versions[slot.index]]
        if not written and rest.is_told(unit.index):  # `p.data.mul_()` raises no version
            written = split
        for slot in written:
            self.tensor("low bits", slot, torch.int16).zero_()
        with plainly(), torch.no_grad():
            for slot in unit.parameters:
                if slot.has_master and not slot.is_split:
                    master = self.tensor("masters", slot, torch.float32)
                    follow_there(slot.flat(master), slot.flat(self.tensor(_WEIGHTS, slot, slot.dtype)))
        self._show(unit)  # the next write is noticed anew

    def _show(self, unit: HomeUnit) -> None:
        self.context.engine.rest.show(unit.index, self.address(_WEIGHTS, unit.index))
        self.note_versions(unit.index)

    def _copy(self, unit: HomeUnit, purposes: Iterable[str], *, to_device: bool) -> None:
        with plainly(), torch.no_grad():
            for purpose in purposes:
                mirror = self._mirrors[purpose]
                home = self.context.home.arenas[purpose].data
                base = self.context.device_buffers.address(mirror.region.purpose)
                for home_offset, (offset, size) in mirror.parts.get(unit.index, {}).items():
                    if not size:
                        continue
                    at_home = _C.bytes_at(home + home_offset, size, "cpu")
                    on_device = _C.bytes_at(base + offset, size, str(self.context.device))
                    on_device.copy_(at_home) if to_device else at_home.copy_(on_device)
