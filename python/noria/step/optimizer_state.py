"""Keeps an optimizer's state in the home, and converts it to and from the form that torch uses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from noria import _C
from noria.model.layout import FACTORED, HomeParameter, StatePlace, factored_shapes
from noria.model.moment_formats import (
    MOMENT_OF,
    NUMBER_OF,
    PURPOSE_OF,
    SCALES_KEY,
    are_low_bits,
    encode,
    moment_dtype,
    plain_values,
)
from noria.model.shadow_optimizer import dtype_at_home, is_array, part_values
from noria.model.update_rules import FusedRule, most_moments
from noria.runtime.context import Context
from noria.runtime.masters import Masters, plain_nans
from noria.runtime.rank_sync import RankSync
from noria.runtime.state import RunState
from noria.runtime.unread_tensors import UnreadTensors
from noria.step.param_groups import ParamGroups
from noria.step.state_view import OptimizerState
from noria.torch_state import plainly

__all__ = ["HomeState", "whole_states"]


def whole_states(context: Context, sync: RankSync, states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns the given states, by slot index, with each tensor gathered whole. Collective if ranks share the model.

    Order: the ranks gather in the order of slots and names. The order of the dicts may differ between ranks, because a
    load creates entries as parts arrive.
    """
    slots = [slot for slot in context.slots if slot.index in states]
    arrays = [
        (slot, key) for slot in slots for key, value in sorted(states[slot.index].items()) if is_array(key, value)
    ]
    sync.agree(
        "gather the optimizer's state",
        [f'"{key}" of "{slot.name}"' for slot, key in arrays],
        expected="tensors in optimizer.state that all ranks have",
        remedy="change optimizer.state alike on all ranks",
    )
    whole = {slot.index: dict(states[slot.index]) for slot in slots}
    for slot, key in arrays:
        whole[slot.index][key] = sync.whole(slot, whole[slot.index][key], key)
    return whole


class HomeState:
    """Keeps one optimizer's state in the home. `shown` is the object that the user sees as `optimizer.state`.

    `places`: by slot index and key, the place in `arena` of each tensor that torch's optimizer keeps.
    """

    def __init__(
        self,
        members: ParamGroups,
        run: RunState,
        sync: RankSync,
        masters: Masters,
        places: dict[tuple[int, str], StatePlace],
        arena: _C.Arena | None,
    ) -> None:
        self.members = members
        self.run = run
        self.sync = sync
        self.masters = masters
        self.context = members.context
        self.dtype = self.context.policy.state_dtype  # for fused units only
        self._num_moments = most_moments(members.cls) if members.kernel == "fused" else 0
        self.placed: dict[tuple[int, str], torch.Tensor] = {}  # by slot index and key: the tensors that updates write
        self._places = places
        self._arena = arena
        self.take_over()

    def follow(self) -> None:
        """Adopts the user's changes before a step: another dict in place of `shown`, or other tensors in it."""
        if self.members.optimizer.state is not self.shown:
            self.settle(None)
            self.take_over()
        self.part()

    def part(self) -> None:
        """Clones tensors that the user has moved to the state of another parameter, for example to swap two states.

        The next update overwrites the memory that these tensors use now.
        """
        strayed = [
            (slot, values, key)
            for parameter, values in dict.items(self.shown)
            if (slot := self.context.slot_of.get(parameter)) is not None and isinstance(values, dict)
            for key, value in values.items()
            if value is not self.placed.get((slot.index, key)) and is_array(key, value)
        ]
        if not strayed or not self.placed:
            return
        owners = {_C.storage_of(value): at for at, value in self.placed.items()}
        for slot, values, key in strayed:
            owner = owners.get(_C.storage_of(values[key]))
            if owner is not None and owner != (slot.index, key):
                self.context.engine.home.access_home(self.context.slots[owner[0]].unit, False)
                values[key] = values[key].clone()

    def take_over(self) -> None:
        """Makes `optimizer.state` a settling dict. Runs once at first, and again if the user has replaced the dict."""
        self.shown: OptimizerState = OptimizerState(
            self.settle, self.look, self._plain_if_it_fits, dict(self.members.optimizer.state)
        )
        self.members.optimizer.state = self.shown
        for slot in self.members.slots():
            low = dict.get(self.shown, slot.parameter, {}).pop("low_bits", None) if slot.has_master else None
            if are_low_bits(low) and low.shape == slot.shape:
                self.masters.set_low_bits(slot, slot.part_of(low))  # from an earlier wrap call
        self.part()
        for slot in self.members.slots():
            self.adopt(slot)

    def look(self, parameter: object) -> None:
        """Finishes updates as `settle` does. State that lies in files then has memory until the next step."""
        self.settle(parameter)
        looked_at = [parameter]
        if parameter is None:  # the user may have replaced the state since
            looked_at = [*dict.keys(self.shown), *dict.keys(self.members.optimizer.state)]
        # What a step has in place of the parameters has no slot, and no state in files.
        slots = [self.context.slot_of.get(each) for each in looked_at if isinstance(each, nn.Parameter)]
        self.context.files.show(list(dict.fromkeys(slot.unit for slot in slots if slot is not None)))
        if not self.run.is_loading(self):
            # A write to a file may have failed since.
            self.run.require_consistent("a look at optimizer.state", of_state=True)

    def settle(self, parameter: object) -> None:
        """Finishes the updates of one parameter before its state is read. None means all parameters."""
        self.run.check_alive()
        if not self.run.is_loading(self):
            self.run.require_consistent("a look at optimizer.state", of_state=True)
        if parameter is None:
            self.context.engine.updates.run_all_deferred()
            self.context.settle_units()
            if self.context.pool is not None:
                self.context.pool.idle()
        elif isinstance(parameter, nn.Parameter) and parameter in self.context.slot_of:
            self.context.engine.home.access_home(self.context.slot_of[parameter].unit, False)

    def adopt(self, slot: HomeParameter) -> None:
        """Moves the state tensors that the optimizer has made into the home, if the plan has room for them."""
        if not dict.__contains__(self.shown, slot.parameter):
            return
        state = self.shown.unsettled(slot.parameter)
        if any(is_array(key, value) for key, value in state.items()):
            self.context.files.touch(slot.unit)
            self.context.files.note_written(slot.unit)
        state.update(part_values(slot, state))
        if not slot.trainable:  # the home has no room for it, and the memory that it lies in may be an old home's
            state.update({key: value.clone() for key, value in state.items() if is_array(key, value)})
            return
        encoded: set[str] = set()  # keys of the scales that this call has written with their codes
        for key, value in list(state.items()):
            if not is_array(key, value) or key in encoded:
                continue
            place = self._place(slot, key, value)
            if place is None:
                continue
            if place.data_ptr() == value.data_ptr():
                if place.dtype == value.dtype and place.stride() == value.stride():
                    self.placed[(slot.index, key)] = value
                    continue
                value = value.clone()  # it views the same bytes in another way
            self.run.tell_state_write(slot.unit)
            scales = None if place.is_floating_point() else self.moment(slot, SCALES_KEY[key])
            if scales is not None and value.is_floating_point():
                encode(value, place, scales)
                state[SCALES_KEY[key]] = self.placed[(slot.index, SCALES_KEY[key])] = scales
                encoded.add(SCALES_KEY[key])
            else:
                place.copy_(value)
                if place.dtype is torch.float32:
                    plain_nans(place)  # weights may take a moment's NaN
            state[key] = self.placed[(slot.index, key)] = place

    def check(self, slot: HomeParameter, rule: FusedRule) -> None:
        """Raises UsageError if the kernel cannot read the parameter, or state of the user's or of a checkpoint."""
        if not self.members.fuses(slot.unit):
            return
        rule.refuse_layout(slot)
        if values := dict.get(self.shown, slot.parameter):
            rule.refuse_broken_state(slot, values)

    def has_placed(self, slot: HomeParameter, keys: Iterable[str]) -> bool:
        """Returns True if the parameter's state has the tensors that updates write, and no others."""
        values = dict.get(self.shown, slot.parameter) or {}
        for key in keys:  # noqa: SIM110  (a loop is faster, and each parameter of a step comes here)
            if values.get(key) is not self.placed.get((slot.index, key)):
                return False
        return True

    def _place(self, slot: HomeParameter, key: str, value: torch.Tensor) -> torch.Tensor | None:
        """Returns the tensor in the home to which `value` moves, or None if `value` stays where it is."""
        if self.members.fuses(slot.unit):
            if key not in PURPOSE_OF:
                return None
            if not self.is_planned(slot, key):
                return self._outside(slot, key, value)
            place = self.moment(slot, key)
            return place if place is not None and place.shape == value.shape else None  # `check` will refuse it
        planned = self._places.get((slot.index, key))
        if planned is None or self._arena is None:
            return None
        if planned.shape != value.shape or planned.dtype != dtype_at_home(slot, value):
            self._note_outside(key)
            return None
        like = torch.empty_like(value, device="meta")
        told = self._told(slot)
        with plainly():
            if told is not None:
                return _C.watched_tensor_in(self._arena, planned.offset, like, planned.dtype, told)
            return _C.tensor_in(self._arena, planned.offset, planned.dtype, list(planned.shape), list(like.stride()))

    def home_tensor(self, slot: HomeParameter, key: str, value: torch.Tensor) -> torch.Tensor | None:
        """Returns the tensor in the home for a tensor that torch's optimizer has made elsewhere, without its value.

        Returns None if the plan has no place for it.
        """
        place = self._place(slot, key, value)
        if place is not None:
            place = self.placed.setdefault((slot.index, key), place)
        return place

    def place_of(self, slot: HomeParameter, key: str) -> StatePlace | None:
        """Returns where the plan puts a tensor that torch's optimizer keeps."""
        return self._places.get((slot.index, key))

    def _outside(self, slot: HomeParameter, key: str, value: torch.Tensor) -> torch.Tensor | None:
        """Returns a new CPU tensor for a moment outside of the home, or None if `value` is fit already.

        The fused kernel expects the layout of the home there too: fp32, with the strides of the home's tensor.
        """
        like = slot.like
        if PURPOSE_OF[key] == FACTORED:
            like = torch.empty(factored_shapes(like.shape)[key], device="meta")
        elif key not in MOMENT_OF:
            return None
        is_alike = value.dtype is torch.float32 and value.device.type == "cpu" and value.stride() == like.stride()
        if value.shape != like.shape or is_alike:
            return None
        return torch.empty_like(like, dtype=torch.float32, device="cpu")

    def _note_outside(self, key: str) -> None:
        """Adds a note that this tensor stays outside of the home.

        torch sees it at its next step, and raises if it cannot use it.
        """
        note = f"{self.members.cls.__name__} has {key} of another shape or dtype than planned for, outside of the home"
        if note not in self.context.notes:
            self.context.notes.append(note)

    def moment(self, slot: HomeParameter, key: str) -> torch.Tensor | None:
        """Returns the home's tensor for a moment, for the scales of one, or for factored moments.

        Returns None if the plan has no room for it, for example if momentum was turned on after `noria.wrap`.
        """
        if not self.is_planned(slot, key):
            return None
        told = self._told(slot)
        home, purpose = self.context.home, PURPOSE_OF[key]
        if purpose == FACTORED:
            return home.factored(slot, key, told)
        if key not in MOMENT_OF:
            found = home.scales(purpose, slot, told)
        else:
            found = home.moment(purpose, slot, moment_dtype(self.dtype, key), told)
        return self.context.files.track(slot.unit, found) if home.in_file(purpose, slot.unit) else found

    def _told(self, slot: HomeParameter) -> Callable[[], None] | None:
        """Returns what the first write to a tensor of the parameter's state calls. None: nothing has to know of it."""
        plan = self.context.plan
        may_stay = plan.stays if plan.policy.resident != "auto" else plan.may_stay
        is_told = slot.unit in plan.undo_logs or slot.unit in may_stay or slot.unit in plan.streamed
        return self.run.while_open(self._before_write, slot.unit) if is_told else None

    def _before_write(self, unit: int) -> None:
        """Drops the unit's draft, which was computed before this edit. Called at the first write to a tensor that views
        the unit's state.
        """
        self.context.engine.home.access_home(unit, False)
        self.run.tell_state_write(unit)

    def watch(self, slots: Iterable[HomeParameter] | None = None) -> None:
        """Has the next write to each tensor of these parameters' state at home told to `run`. None: of all."""
        if slots is None:
            found = list(self.placed.values())
        else:
            keys = [(slot.index, key) for slot in slots for key in dict.get(self.shown, slot.parameter) or ()]
            found = [self.placed[key] for key in keys if key in self.placed]
        for value in found:
            _C.watch(value)

    def is_planned(self, slot: HomeParameter, key: str) -> bool:
        """Returns True if the home has this tensor of noria's kernels for the parameter.

        The home has all moments of a parameter or none, because an update takes all of them in one format.
        """
        if key in NUMBER_OF and slot.num_moments < self._num_moments:
            return False
        return self.context.home.has(PURPOSE_OF[key], slot.unit)

    def plain(self) -> dict[Any, Any]:
        """Returns `shown` as torch's optimizer keeps it: whole tensors in fp32, plus the low bits of the masters.

        Order: updates are finished, and memory has room for `copy_bytes`. Collective if ranks share the model.
        """
        shown = dict(dict.items(self.shown))
        slots = [slot for slot in self.context.slots if isinstance(shown.get(slot.parameter), dict)]
        states: dict[int, dict[str, Any]] = {}
        for slot in slots:
            with self.context.files.reading(slot.unit):
                values = self.with_low_bits(slot, shown[slot.parameter])
                if self.context.files.has(slot.unit):
                    values = {key: value.clone() if is_array(key, value) else value for key, value in values.items()}
            if self.dtype != "fp32" and self.members.fuses(slot.unit):
                values = plain_values(values, widen=True)
            states[slot.index] = values
        # A write to a file may have failed since.
        self.run.require_consistent("a look at optimizer.state", of_state=True)
        whole = whole_states(self.context, self.sync, states)
        return shown | {slot.parameter: whole[slot.index] for slot in slots}

    def _plain_if_it_fits(self) -> dict[Any, Any]:
        self.refuse_copies(is_plain=True)
        return self.plain()

    def refuse_copies(self, *, is_plain: bool) -> None:
        """Raises UsageError if state lies in files, and memory has no room for what `copy_bytes` counts.

        Finishes all updates first. Collective if ranks share the model.
        """
        self.settle(None)
        if self.context.plan.files.is_used:
            self.sync.refuse_copies(self.copy_bytes(is_plain=is_plain), "copy the optimizer's state")

    def copy_bytes(self, *, is_plain: bool) -> int:
        """Returns the bytes of host memory that a copy of the state takes, beside the state itself.

        Order: updates are finished, for the first one creates state.

        Args:
            is_plain: the copy is what `plain` returns. Else it is a state dict: state in files is shown, not copied,
                and moments in bf16 stay as they are.
        """
        found = largest = 0
        units: set[int] = set()
        for parameter, values in dict.items(self.shown if is_plain else self.members.optimizer.state):
            slot = self.context.slot_of.get(parameter)
            if slot is None or not isinstance(values, dict):
                continue
            is_read = is_plain and self.context.files.has(slot.unit)
            if self.context.files.has(slot.unit):
                units.add(slot.unit)
            sizes = [(2, slot.like.numel(), is_read or not slot.is_split)] if slot.has_master and values else []
            for key, value in values.items():
                if is_array(key, value) and key not in SCALES_KEY.values():
                    widens = not value.is_floating_point() or (is_plain and value.dtype is torch.bfloat16)
                    widens = widens and key in MOMENT_OF and self.dtype != "fp32"
                    sizes.append((4 if widens else value.element_size(), value.numel(), widens or is_read))
            for itemsize, count, is_copied in sizes:
                whole = self.sync.whole_bytes(slot, itemsize)
                found += whole + (itemsize * count if is_copied else 0)
                largest = max(largest, whole)  # while a tensor is gathered, it is there twice
        return found + largest + (0 if is_plain else self.context.files.bytes_to_show(len(units)))

    def with_low_bits(self, slot: HomeParameter, values: dict[str, Any], *, brings: bool = True) -> dict[str, Any]:
        """Returns a parameter's state plus the low bits of its master, if it has one. `brings` is as in `Masters`.

        An empty state stays empty: a read may have created it on one rank only.
        """
        if not slot.has_master or not values:
            return values
        return {**values, "low_bits": self.masters.low_bits(slot, brings=brings)}

    def unread(self, values: dict[str, Any], unread: UnreadTensors) -> dict[str, Any]:
        """Returns a parameter's state with stand-ins for the tensors that lie in files."""

        def stand_in(value: Any) -> Any:
            unit = self.context.files.unit_of(value) if isinstance(value, torch.Tensor) else None
            if unit is None:
                return value
            return unread.stand_in(value, functools.partial(self._read, unit, value), self.context.files.end_touch)

        return {key: stand_in(value) for key, value in values.items()}

    def _read(self, unit: int, value: torch.Tensor) -> torch.UntypedStorage:
        self.context.files.touch(unit, writes=False)
        self.run.require_consistent("noria.save")  # if a write has failed, a touch may give zeros
        return value.untyped_storage()
