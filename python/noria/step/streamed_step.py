"""Updates pieces of units on the device, where the engine has brought their weights, state and gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from noria import _C
from noria.model.layout import HomeParameter
from noria.model.optimizer_classes import step_of
from noria.model.shadow_optimizer import is_array, worker_of
from noria.planning.streamed import GRADIENTS_IN_FP32
from noria.runtime.streamed import PieceNow, Streamed
from noria.step.host_kernels import HostKernels, Ready
from noria.step.optimizer_state import HomeState
from noria.step.param_groups import Groups, ParamGroups
from noria.step.torch_step import PUT_OFF, broken_off
from noria.torch_state import autocast_now, plainly

__all__ = ["StreamedStep"]

_Moved = dict[int, tuple[torch.Tensor, int | None, torch.Tensor]]
"""State that torch's optimizer gets, by the id of its tensor on the device: that tensor, its version, and the tensor at
home. The version is None if the engine copies it home."""

_Scales = dict[int, tuple[int, int]]
"""By slot index: the address of its late scales at home, and how many there are."""


@dataclasses.dataclass(frozen=True)
class _Job:
    """Holds the update of one unit as `step()` has fixed it: by noria's kernels (`ready`), or by torch (`groups`)."""

    scales: _Scales
    ready: Ready = dataclasses.field(default_factory=list)
    groups: Groups = dataclasses.field(default_factory=list)


class StreamedStep:
    """Makes one optimizer's updates of units that `Streamed` has."""

    def __init__(self, members: ParamGroups, state: HomeState, fused: HostKernels, streamed: Streamed) -> None:
        self.members = members
        self.context = members.context
        self.autocast = autocast_now(members.context.device.type)
        self._state = state
        self._fused = fused
        self._streamed = streamed
        self._jobs: dict[int, _Job] = {}

    def has(self, unit: int) -> bool:
        """Returns True if a deferred update of the unit runs on the device."""
        return self._streamed.has(unit)

    def takes(self, unit: int, ready: Ready | None) -> bool:
        """Returns True if the device updates the unit. `ready`: what noria's kernels update. None: torch updates.

        State that lies outside of the home never goes there by those kernels.
        """
        if not self._streamed.has(unit):
            return False
        return all(self._state.is_planned(slot, key) for slot, rule, _ in ready or () for key in rule.keys)

    def defer(self, unit: int, groups: Groups, ready: Ready | None) -> None:
        """The engine will ask for the unit's update. `ready`: see `takes`."""
        slots = [slot for _, slots in groups for slot in slots]
        scales = {slot.index: self.context.engine.gradients.late_scales(slot.index) for slot in slots}
        if ready is None:
            self._jobs[unit] = _Job(scales, groups=groups)
        else:
            self._fused.count(ready)
            self._jobs[unit] = _Job(scales, ready=ready)
        self._state.watch(slots)  # the user may hold a tensor of it, and write to it before the update has run
        self.context.engine.updates.defer_update(unit)

    def run(self, unit: int) -> None:
        """Updates the piece that the engine updates now, if this optimizer has work in the unit.

        If that raises, the step is broken off, as in torch: all waiting updates are dropped.
        """
        job = self._jobs.get(unit)
        if job is None:
            return
        now = self._streamed.now(unit)
        try:
            with plainly(self.autocast):
                if job.ready:
                    self._run_fused(now, job)
                else:
                    self._run_torch(now, job)
        except BaseException as error:
            self._jobs.clear()  # the engine will still ask for them, and nothing runs
            error.add_note(broken_off(self.context.units[unit].name, PUT_OFF))
            raise
        if now.is_last:
            del self._jobs[unit]

    def _run_fused(self, now: PieceNow, job: _Job) -> None:
        piece = now.piece
        try:
            parts: Ready = []
            ranges, gradients = [], []
            for slot, rule, scalars in job.ready:
                item = slot.dtype.itemsize
                first = max(slot.home_offset, piece.begin)
                end = min(slot.home_offset + slot.like.numel() * item, piece.end)
                if first >= end:
                    continue
                gradient = now.flat("held gradients", first - piece.begin, slot.dtype, (end - first) // item)
                self._scale(gradient, job.scales[slot.index])
                parts.append((slot, rule, scalars))
                ranges.append(((first - piece.begin) // item, (end - first) // item))
                gradients.append(gradient.data_ptr())
            jobs = self._fused.jobs_on_device(
                piece.unit, parts, gradients, lambda purpose, unit: now.address_of(purpose), ranges
            )
            self.context.engine.rest.update(jobs)
        except BaseException:
            self.context.engine.mark_torn("a step was interrupted")
            raise

    def _run_torch(self, now: PieceNow, job: _Job) -> None:
        here = [(hyper, [slot for slot in slots if slot.index in now.piece.parameters]) for hyper, slots in job.groups]
        slots = [slot for _, slots in here for slot in slots]
        if not slots:
            return
        parameters = {slot.index: self._parameter(now, slot, job.scales[slot.index]) for slot in slots}
        members = [{**hyper, "params": [parameters[slot.index] for slot in slots]} for hyper, slots in here if slots]
        worker = worker_of(self.members.optimizer, members)
        moved: _Moved = {}
        for hyper, slots_here in here:
            for slot in slots_here:
                if dict.__contains__(self._state.shown, slot.parameter):
                    worker.state[parameters[slot.index]] = self._state_on_device(now, slot, hyper, moved)
        versions = {index: parameter._version for index, parameter in parameters.items()}
        try:
            step_of(type(worker))(worker)
        except BaseException:
            touched = [slot for slot in slots if parameters[slot.index]._version != versions[slot.index]]
            self._take_back(now, touched, parameters, worker, moved)
            raise
        self._take_back(now, slots, parameters, worker, moved)

    def _take_back(
        self,
        now: PieceNow,
        updated: list[HomeParameter],
        parameters: dict[int, nn.Parameter],
        worker: Optimizer,
        moved: _Moved,
    ) -> None:
        """Takes over what torch's optimizer has left in the slot, for the engine to copy it home."""
        for slot in updated:
            parameter = parameters[slot.index]
            if parameter in worker.state:
                self._take_state(now, slot, worker.state[parameter], moved)
            if slot.has_master:
                _round(parameter.detach(), now.tensor("working copies", slot, slot.dtype))

    def _parameter(self, now: PieceNow, slot: HomeParameter, scales: tuple[int, int]) -> nn.Parameter:
        """Returns what torch's optimizer updates: the master, or the working copy, with its gradient."""
        gradient = now.tensor("held gradients", slot, slot.dtype)
        self._scale(gradient, scales)
        if not slot.has_master:
            parameter = nn.Parameter(now.tensor("working copies", slot, slot.dtype))
            parameter.grad = gradient
        else:
            parameter = nn.Parameter(now.tensor("masters", slot, torch.float32))
            parameter.grad = now.tensor(GRADIENTS_IN_FP32, slot, torch.float32).copy_(gradient)
        return parameter

    def _scale(self, gradient: torch.Tensor, scales: tuple[int, int]) -> None:
        """Multiplies by late scales, with the bits of `p.grad.mul_(number)`."""
        address, count = scales
        for number in range(count):
            at = self.context.backend.device_address(address + number * torch.float32.itemsize)
            scale = _C.bytes_at(at, torch.float32.itemsize, str(self.context.device)).view(torch.float32).squeeze()
            if gradient.dtype is torch.float32:
                gradient.mul_(scale)
            else:
                gradient.copy_(gradient.to(torch.float32).mul_(scale))

    def _state_on_device(
        self, now: PieceNow, slot: HomeParameter, hyper: dict[str, Any], moved: _Moved
    ) -> dict[str, Any]:
        """Returns the parameter's state for torch's optimizer. Adds to `moved` what is not the tensor at home."""
        counts_there = hyper.get("capturable") or hyper.get("fused")
        values = {}
        for key, value in self._state.shown.unsettled(slot.parameter).items():
            place = self._state.place_of(slot, key)
            at_home = self._state.placed.get((slot.index, key))
            if place is not None and at_home is not None and value is at_home:
                there = now.state(place, at_home.stride())
                moved[id(there)] = (there, None, value)
                value = there
            elif _is_dense(value) and (is_array(key, value) or counts_there) and value.device != now.device:
                there = value.to(now.device)
                moved[id(there)] = (there, there._version, value)
                value = there
            values[key] = value
        return values

    def _take_state(self, now: PieceNow, slot: HomeParameter, values: dict[str, Any], moved: _Moved) -> None:
        """Takes over the state that torch's optimizer has left. What has no place at home gets memory of its own."""
        taken: dict[str, Any] = {}
        for key, value in values.items():
            there, version, own = moved.get(id(value), (None, 0, None))
            if own is not None and there is not None and version in (None, there._version):
                value = own  # the engine copies it home, or the optimizer has only read it
            elif _is_dense(value) and is_array(key, value):
                place, at_home = self._state.place_of(slot, key), self._state.home_tensor(slot, key, value)
                if place is None or at_home is None:
                    value = value.to("cpu")
                else:
                    there = now.state(place, at_home.stride())
                    if there.data_ptr() != value.data_ptr():
                        there.copy_(value)
                    value = at_home
            taken[key] = value
        shown = self._state.shown.unsettled(slot.parameter)  # the user may hold this dict
        shown.clear()
        shown.update(taken)


def _is_dense(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _round(master: torch.Tensor, working: torch.Tensor) -> None:
    """Rounds a master into its working copy: to nearest, ties away from zero, as csrc/optim/split_master.h."""
    bits = master.view(torch.int32).add(0x8000).bitwise_right_shift_(16)
    working.view(torch.int16).copy_(bits)
    working.masked_fill_(master.isnan() & ~working.isnan(), math.nan)  # a GPU's NaN has all bits, and would carry
