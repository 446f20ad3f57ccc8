"""Runs the real torch optimizer on the home's tensors, one unit at a time, when the unit is needed."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import nn

from noria.model.layout import HomeParameter
from noria.model.optimizer_classes import step_of
from noria.model.shadow_optimizer import is_array, worker_of
from noria.runtime.masters import Masters
from noria.step.optimizer_state import HomeState
from noria.step.param_groups import Groups, Jobs, ParamGroups
from noria.torch_state import autocast_now, plainly

__all__ = ["PUT_OFF", "TorchStep", "broken_off"]


PUT_OFF = "which optimizer.step() had put off until the unit is needed"


def broken_off(unit: str, when: str) -> str:
    """Returns what is added to an error that torch's optimizer raises. `when`: what it says of the update."""
    return (
        f'noria: raised by the update of unit "{unit}", {when}. The step is broken off: parameters that it had not '
        "come to keep their values, and the call that raised this may be made again"
    )


class TorchStep:
    """Runs one optimizer's own class on units whose updates were deferred."""

    def __init__(self, members: ParamGroups, state: HomeState, masters: Masters) -> None:
        self.masters = masters
        self.members = members
        self.context = members.context
        self.state = state
        # The autocast state of the last step(). Its updates run under this state, also if they run later.
        self.autocast = autocast_now(members.context.device.type)
        self._jobs: Jobs = {}  # updates that have not run yet
        self._home_parameters: dict[int, nn.Parameter] = {}

    def home_parameter(self, slot: HomeParameter) -> nn.Parameter:
        """Returns the tensor that torch's optimizer updates: the fp32 master if there is one, else the working copy."""
        known = self._home_parameters.get(slot.index)
        if known is None:
            values = self.context.home.master(slot) if slot.has_master else self.context.home.working(slot)
            with plainly():
                known = self._home_parameters[slot.index] = nn.Parameter(values, requires_grad=slot.trainable)
        return known

    def bytes_moved(self) -> int:
        """Returns the bytes that a step by torch reads and writes.

        torch reads the gradients, and reads and writes the masters and the state. With fp32 masters, the gradient also
        goes through scratch memory, and the working copy is written.
        """
        moved = 0
        for slot in self.members.slots():
            if self.members.fuses(slot.unit) or not slot.trainable or slot.unit in self.context.plan.streamed:
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
        self.context.engine.updates.defer_update(unit)

    def run(self, unit: int) -> None:
        """Runs the real optimizer on one unit if an update of that unit is waiting.

        If it raises, the step is broken off, as in torch: all waiting updates are dropped. The call that needed the
        unit raises the error, once.
        """
        groups = self._jobs.pop(unit, None)
        if groups is not None:
            self.run_now(unit, groups, PUT_OFF)

    def run_now(self, unit: int, groups: Groups, when: str) -> None:
        """Runs the real optimizer on these parameters of a unit. `when`: what an error says of the update."""
        slots = [slot for _, slots in groups for slot in slots]
        with plainly(self.autocast):
            versions = {slot.index: self.home_parameter(slot)._version for slot in slots}
            try:
                self._run(groups)
            except BaseException as error:
                self._jobs.clear()  # the engine will still ask for them, and nothing runs
                name = self.context.units[unit].name
                error.add_note(broken_off(name, when))
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
        """Releases the gradients after an update, moves new state to the home, and rounds masters to working copies."""
        for slot in slots:
            self.home_parameter(slot).grad = None
            if slot.index in updated:
                self.state.adopt(slot)
                if slot.has_master:
                    self.masters.round(slot)

    def _gradient(self, slot: HomeParameter) -> torch.Tensor:
        if self.context.updates_in_backward:
            held = self.context.engine.backward.gradient_now(slot.unit, slot.home_offset, slot.like, slot.dtype)
        else:
            held = self.context.home.held(slot)
            for scale in self.context.engine.gradients.take_scales(slot.index):
                held.mul_(scale)
        if not slot.has_master:
            return held
        scratch = self.context.home.tensor("update scratch", 0, slot.home_offset * 2, slot.like, torch.float32)
        return scratch.copy_(held)
