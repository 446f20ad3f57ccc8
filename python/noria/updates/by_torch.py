"""Updates by the real torch optimizer, unit by unit, on the home's tensors: when somebody needs the unit."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import nn

from noria.home import HomeParameter
from noria.modes import autocast_now, plainly
from noria.optimizer import step_of
from noria.updates.home_state import HomeState
from noria.updates.members import Groups, Jobs, Members
from noria.updates.worker import is_array, worker_of

__all__ = ["ByTorch"]


class ByTorch:
    """Of one optimizer."""

    def __init__(self, members: Members, state: HomeState) -> None:
        self.members = members
        self.wrapped = members.wrapped
        self.state = state
        # Of the last step(): its updates run under it, whenever they do.
        self.autocast = autocast_now(members.wrapped.device.type)
        self._jobs: Jobs = {}  # not run yet
        self._home_parameters: dict[int, nn.Parameter] = {}

    def home_parameter(self, slot: HomeParameter) -> nn.Parameter:
        """The tensor that the real optimizer updates: the fp32 master, or the working copy where that is the master."""
        known = self._home_parameters.get(slot.index)
        if known is None:
            values = self.wrapped.home.master(slot) if slot.has_master else self.wrapped.home.working(slot)
            with plainly():
                known = self._home_parameters[slot.index] = nn.Parameter(values, requires_grad=slot.trainable)
        return known

    def bytes_moved(self) -> int:
        """Read and written by a step of torch's: gradients are read, masters and the state that there is read and
        written; under a low dtype a gradient goes through scratch memory, and the working copy is written."""
        moved = 0
        for slot in self.members.slots():
            if self.members.fuses(slot.unit) or not slot.trainable:
                continue
            count, item = slot.like.numel(), slot.dtype.itemsize
            moved += count * (item + (8 + 8 + item if slot.has_master else 2 * item))
            if dict.__contains__(self.state.shown, slot.parameter):
                for key, value in self.state.shown.unsettled(slot.parameter).items():
                    if is_array(key, value):
                        moved += 2 * value.nbytes
        return moved

    def defer(self, unit: int, groups: Groups) -> None:
        self._jobs[unit] = groups
        self.wrapped.custody.defer_update(unit)

    def run(self, unit: int) -> None:
        """The real optimizer on one unit, if an update of it is waiting. When it raises, the step that it belongs to is
        broken off, as torch's is: updates that are still waiting are dropped, and whoever came hears of it, once."""
        groups = self._jobs.pop(unit, None)
        if groups is None:
            return
        slots = [slot for _, slots in groups for slot in slots]
        with plainly(self.autocast):
            versions = {slot.index: self.home_parameter(slot)._version for slot in slots}
            try:
                self._run(groups)
            except BaseException as error:
                self._jobs.clear()  # the engine still asks for them, and finds none
                name = self.wrapped.units[unit].name
                error.add_note(
                    f'noria: raised by the update of unit "{name}", which optimizer.step() had put off until somebody '
                    "needs the unit. The step is broken off: parameters that it had not come to keep their values, and "
                    "the call that raised this may be made again"
                )
                touched = {slot.index for slot in slots if self.home_parameter(slot)._version != versions[slot.index]}
                self._finish(slots, touched)
                raise
            self._finish(slots, versions)

    def _run(self, groups: Groups) -> None:
        members = []
        for hyper, slots in groups:
            parameters = []
            for slot in slots:
                parameter = self.home_parameter(slot)
                parameter.grad = self._gradient(slot)
                parameters.append(parameter)
            members.append({**hyper, "params": parameters})
        worker = worker_of(self.members.optimizer, members)
        slots = [slot for _, slots in groups for slot in slots]
        for slot in slots:
            if dict.__contains__(self.state.shown, slot.parameter):
                worker.state[self.home_parameter(slot)] = self.state.shown.unsettled(slot.parameter)
        step_of(type(worker))(worker)
        for slot in slots:
            if self.home_parameter(slot) in worker.state:
                dict.__setitem__(self.state.shown, slot.parameter, worker.state[self.home_parameter(slot)])

    def _finish(self, slots: Iterable[HomeParameter], updated: Container[int]) -> None:
        """After an update: gradients are let go, new state moves in, working copies follow masters."""
        for slot in slots:
            self.home_parameter(slot).grad = None
            if slot.index in updated:
                self.state.adopt(slot)
                if slot.has_master:
                    self.wrapped.values.masters.round(slot)

    def _gradient(self, slot: HomeParameter) -> torch.Tensor:
        held = self.wrapped.home.held(slot)
        for scale in self.wrapped.custody.take_scales(slot.index):
            held.mul_(scale)
        if not slot.has_master:
            return held
        scratch = self.wrapped.home.tensor("update scratch", 0, slot.home_offset * 2, slot.like, torch.float32)
        return scratch.copy_(held)
