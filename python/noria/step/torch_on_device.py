"""Runs the real torch optimizer on the device, on parameters whose weights and state lie there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from noria.model.layout import HomeParameter
from noria.model.optimizer_classes import step_of
from noria.model.shadow_optimizer import is_array, worker_of
from noria.runtime.device_memory import DeviceMemory
from noria.runtime.masters import round_there
from noria.step.optimizer_state import HomeState
from noria.step.param_groups import Groups, ParamGroups
from noria.torch_state import autocast_now, plainly

__all__ = ["TorchOnDevice"]

_Moved = dict[int, tuple[torch.Tensor, int | None, torch.Tensor]]
"""State that torch's optimizer gets, by the id of its tensor on the device: that tensor, its version, and the tensor at
home. The version is None if the tensor lies in `memory`, which the caller copies home."""


class TorchOnDevice:
    """Runs one optimizer's own class. `autocast` is the autocast state of the last `step()`."""

    def __init__(self, members: ParamGroups, state: HomeState) -> None:
        self.members = members
        self.autocast = autocast_now(members.context.device.type)
        self._state = state

    def run(self, groups: Groups, memory: DeviceMemory, gradient: Callable[[HomeParameter], torch.Tensor]) -> None:
        """Updates these parameters in `memory`, and rounds masters to working copies.

        `gradient` returns a parameter's gradient, in fp32 beside a master. If torch's optimizer raises, what it has
        updated until then is taken over.
        """
        slots = [slot for _, slots in groups for slot in slots]
        if not slots:
            return
        with plainly(self.autocast):
            parameters = {slot.index: _parameter(memory, slot, gradient(slot)) for slot in slots}
            members = [{**hyper, "params": [parameters[slot.index] for slot in each]} for hyper, each in groups if each]
            worker = worker_of(self.members.optimizer, members)
            moved: _Moved = {}
            for hyper, each in groups:
                for slot in each:
                    if dict.__contains__(self._state.shown, slot.parameter):
                        worker.state[parameters[slot.index]] = self._state_there(memory, slot, hyper, moved)
            versions = {index: parameter._version for index, parameter in parameters.items()}
            try:
                step_of(type(worker))(worker)
            except BaseException:
                touched = [slot for slot in slots if parameters[slot.index]._version != versions[slot.index]]
                self._take_back(memory, touched, parameters, worker, moved)
                raise
            self._take_back(memory, slots, parameters, worker, moved)

    def _take_back(
        self,
        memory: DeviceMemory,
        updated: list[HomeParameter],
        parameters: dict[int, nn.Parameter],
        worker: Optimizer,
        moved: _Moved,
    ) -> None:
        """Takes over what torch's optimizer has left, for the caller to copy it home."""
        for slot in updated:
            parameter = parameters[slot.index]
            if parameter in worker.state:
                self._take_state(memory, slot, worker.state[parameter], moved)
            if slot.has_master:
                round_there(parameter.detach(), memory.tensor("working copies", slot, slot.dtype))

    def _state_there(
        self, memory: DeviceMemory, slot: HomeParameter, hyper: dict[str, Any], moved: _Moved
    ) -> dict[str, Any]:
        """Returns the parameter's state for torch's optimizer. Adds to `moved` what is not the tensor at home."""
        counts_there = hyper.get("capturable") or hyper.get("fused")
        values = {}
        for key, value in self._state.shown.unsettled(slot.parameter).items():
            place = self._state.place_of(slot, key)
            at_home = self._state.placed.get((slot.index, key))
            if place is not None and at_home is not None and value is at_home:
                there = memory.state(slot, place, at_home.stride())
                moved[id(there)] = (there, None, value)
                value = there
            elif _is_dense(value) and (is_array(key, value) or counts_there) and value.device != memory.device:
                there = value.to(memory.device)
                moved[id(there)] = (there, there._version, value)
                value = there
            values[key] = value
        return values

    def _take_state(self, memory: DeviceMemory, slot: HomeParameter, values: dict[str, Any], moved: _Moved) -> None:
        """Takes over the state that torch's optimizer has left. What has no place at home gets memory of its own."""
        taken: dict[str, Any] = {}
        for key, value in values.items():
            there, version, own = moved.get(id(value), (None, 0, None))
            if own is not None and there is not None and version in (None, there._version):
                value = own  # the caller copies it home, or the optimizer has only read it
            elif _is_dense(value) and is_array(key, value):
                place, at_home = self._state.place_of(slot, key), self._state.home_tensor(slot, key, value)
                if place is None or at_home is None:
                    value = value.to("cpu")
                else:
                    there = memory.state(slot, place, at_home.stride())
                    if there.data_ptr() != value.data_ptr():
                        there.copy_(value)
                    value = at_home
            taken[key] = value
        shown = self._state.shown.unsettled(slot.parameter)  # the user may hold this dict
        shown.clear()
        shown.update(taken)


def _parameter(memory: DeviceMemory, slot: HomeParameter, gradient: torch.Tensor) -> nn.Parameter:
    """Returns what torch's optimizer updates: the master, or the working copy, with its gradient."""
    purpose, dtype = ("masters", torch.float32) if slot.has_master else ("working copies", slot.dtype)
    parameter = nn.Parameter(memory.tensor(purpose, slot, dtype))
    parameter.grad = gradient
    return parameter


def _is_dense(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
