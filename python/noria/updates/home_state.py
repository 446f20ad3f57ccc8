"""An optimizer's state in the home: what it shows, what torch would have in its place, and what moves in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from noria import _C
from noria.custody import Wrapped
from noria.home import HomeParameter, StatePlace
from noria.kernels import rule_of
from noria.modes import plainly
from noria.moments import MOMENT_OF, PURPOSE_OF, SCALES_KEY, are_low_bits, encode, moment_dtype, plain_values
from noria.updates.members import Members
from noria.updates.state import OptimizerState
from noria.updates.worker import dtype_at_home, is_array, part_values

__all__ = ["HomeState", "whole_states"]


def whole_states(wrapped: Wrapped, states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Parameters' states, by slot index, with all of their tensors, where ranks share the model; collective then. In
    the order of slots and names: that of the dicts is each rank's own, for a load makes entries as parts arrive."""
    slots = [slot for slot in wrapped.slots if slot.index in states]
    arrays = [
        (slot, key) for slot in slots for key, value in sorted(states[slot.index].items()) if is_array(key, value)
    ]
    wrapped.together.agree(
        "gather the optimizer's state",
        [f'"{key}" of "{slot.name}"' for slot, key in arrays],
        expected="tensors in optimizer.state that all ranks have",
        remedy="change optimizer.state alike on all ranks",
    )
    whole = {slot.index: dict(states[slot.index]) for slot in slots}
    for slot, key in arrays:
        whole[slot.index][key] = wrapped.together.whole(slot, whole[slot.index][key], key)
    return whole


class HomeState:
    """`shown`: what `optimizer.state` is. `places`, in `arena`: by slot index and key, of what torch keeps."""

    def __init__(self, members: Members, places: dict[tuple[int, str], StatePlace], arena: Any) -> None:
        self.members = members
        self.wrapped = members.wrapped
        self.is_loading = False
        self.dtype = self.wrapped.policy.state_dtype  # of fused units
        self.placed: dict[tuple[int, str], torch.Tensor] = {}  # by slot index and key: what updates write
        self._places = places
        self._arena = arena
        self.take_over()

    def follow(self) -> None:
        """Before a step: the user may have put another dict in the place of `shown`, or other tensors into it."""
        if self.members.optimizer.state is not self.shown:
            self.settle(None)
            self.take_over()
        self.part()

    def part(self) -> None:
        """Tensors that were put into other parameters' state, which is exchanged say, leave the places where they lie:
        those are about to be written."""
        strayed = [
            (slot, values, key)
            for parameter, values in dict.items(self.shown)
            if (slot := self.wrapped.slot_of.get(parameter)) is not None and isinstance(values, dict)
            for key, value in values.items()
            if value is not self.placed.get((slot.index, key)) and is_array(key, value)
        ]
        if not strayed or not self.placed:
            return
        owners = {_C.storage_of(value): at for at, value in self.placed.items()}
        for slot, values, key in strayed:
            owner = owners.get(_C.storage_of(values[key]))
            if owner is not None and owner != (slot.index, key):
                self.wrapped.custody.access_home(self.wrapped.slots[owner[0]].unit, False)
                values[key] = values[key].clone()

    def take_over(self) -> None:
        """At first, and again when the user has put another dict in its place."""
        self.shown: OptimizerState = OptimizerState(self.settle, self.plain, dict(self.members.optimizer.state))
        self.members.optimizer.state = self.shown
        for slot in self.members.slots():
            low = dict.get(self.shown, slot.parameter, {}).pop("low_bits", None) if slot.has_master else None
            if are_low_bits(low) and low.shape == slot.shape:
                self.wrapped.values.masters.set_low_bits(slot, slot.part_of(low))  # of an earlier wrap call
        self.part()
        for slot in self.members.slots():
            self.adopt(slot)

    def settle(self, parameter: Any) -> None:
        """Before a look at a parameter's state, or at all of it: None."""
        wrapped = self.wrapped
        wrapped.check_alive()
        if not self.is_loading:
            wrapped.refuse_between_steps("a look at optimizer.state")
        if parameter is None:
            wrapped.custody.settle_all()
            if wrapped.pool is not None:
                wrapped.pool.idle()
            for unit in wrapped.plan.drafted:
                wrapped.custody.access_home(unit, False)  # it may be edited now: no draft of it may be kept
        elif isinstance(parameter, nn.Parameter) and parameter in wrapped.slot_of:
            wrapped.custody.access_home(wrapped.slot_of[parameter].unit, False)

    def adopt(self, slot: HomeParameter) -> None:
        """Moves the state tensors that the optimizer has made into the home, where the plan has room for them."""
        if not dict.__contains__(self.shown, slot.parameter):
            return
        state = self.shown.unsettled(slot.parameter)
        state.update(part_values(slot, state))
        encoded: set[str] = set()  # keys of scales that belong to codes made here
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
                value = value.clone()  # another view of the same bytes
            scales = None if place.is_floating_point() else self.moment(slot, SCALES_KEY[key])
            if scales is not None and value.is_floating_point():
                encode(value, place, scales)
                state[SCALES_KEY[key]] = self.placed[(slot.index, SCALES_KEY[key])] = scales
                encoded.add(SCALES_KEY[key])
            else:
                place.copy_(value)
            state[key] = self.placed[(slot.index, key)] = place

    def check(self, slot: HomeParameter, group: dict[str, Any]) -> None:
        """Before an update: refuses what the user, or a checkpoint, has put there and no kernel can read."""
        values = dict.get(self.shown, slot.parameter)
        if values and self.members.fuses(slot.unit):
            rule_of(self.members.cls, group).refuse_broken_state(slot, values)

    def _place(self, slot: HomeParameter, key: str, value: torch.Tensor) -> torch.Tensor | None:
        """Where it moves to; None: it stays where it is."""
        if self.members.fuses(slot.unit):
            if key not in PURPOSE_OF:
                return None
            if not self.is_planned(slot, key):
                return self._outside(slot, key, value)
            place = self.moment(slot, key)
            return place if place is not None and place.shape == value.shape else None  # `check` will say so
        planned = self._places.get((slot.index, key))
        if planned is None:
            return None
        if planned.shape != value.shape or planned.dtype != dtype_at_home(slot, value):
            self._note_outside(key)
            return None
        strides = torch.empty_like(value, device="meta").stride()
        with plainly():
            return _C.tensor_in(self._arena, planned.offset, planned.dtype, list(planned.shape), list(strides))

    def _outside(self, slot: HomeParameter, key: str, value: torch.Tensor) -> torch.Tensor | None:
        """The fused kernel writes a moment outside of the home too, and takes it for what it would be there."""
        is_alike = value.dtype is torch.float32 and value.device.type == "cpu" and value.stride() == slot.like.stride()
        if key not in MOMENT_OF or value.shape != slot.like.shape or is_alike:
            return None
        return torch.empty_like(slot.like, dtype=torch.float32, device="cpu")

    def _note_outside(self, key: str) -> None:
        """It stays an ordinary tensor, about which torch says what it has to say at its next step."""
        note = f"{self.members.cls.__name__} has {key} of another shape or dtype than planned for, outside of the home"
        if note not in self.wrapped.plan.unpredicted:
            self.wrapped.plan.unpredicted.append(note)

    def moment(self, slot: HomeParameter, key: str) -> torch.Tensor | None:
        """Where the fused kernel keeps it, or a moment's scales; None: the plan did not foresee it (momentum that was
        turned on later)."""
        if not self.is_planned(slot, key):
            return None
        told = self.wrapped.drops_draft(slot.unit) if slot.unit in self.wrapped.plan.drafted else None
        home, purpose = self.wrapped.home, PURPOSE_OF[key]
        if key not in MOMENT_OF:
            return home.scales(purpose, slot, told)
        return home.moment(purpose, slot, moment_dtype(self.dtype, key), told)

    def is_planned(self, slot: HomeParameter, key: str) -> bool:
        return self.wrapped.home.has(PURPOSE_OF[key], slot.unit)

    def plain(self) -> dict[Any, Any]:
        """`shown` as torch's own optimizer keeps it, fp32 and whole, and the masters' low bits beside. Collective
        where ranks share the model."""
        shown = dict(self.shown.items())
        slots = [slot for slot in self.wrapped.slots if isinstance(shown.get(slot.parameter), dict)]
        states = {slot.index: shown[slot.parameter] for slot in slots}
        for slot in slots:
            values = states[slot.index]
            if self.dtype != "fp32" and self.members.fuses(slot.unit):
                values = plain_values(values, widen=True)
            states[slot.index] = self.with_low_bits(slot, values)
        whole = whole_states(self.wrapped, states)
        return shown | {slot.parameter: whole[slot.index] for slot in slots}

    def with_low_bits(self, slot: HomeParameter, values: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state and what it is of. None of an empty one, which a look may have made on one rank alone."""
        if not slot.has_master or not values:
            return values
        return {**values, "low_bits": self.wrapped.values.masters.low_bits(slot)}
