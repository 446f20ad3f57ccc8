"""Updates units that are at rest: in place on the device, from the gradients that autograd keeps in `p.grad`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from noria import _C
from noria.model.layout import HomeParameter
from noria.model.update_rules import rule_of
from noria.planning.streamed import PIECE_ELEMENTS
from noria.runtime.masters import Masters
from noria.runtime.rest import Rest
from noria.step.collect_grads import prepare_jobs, refuse_gradient
from noria.step.host_kernels import HostKernels, Ready
from noria.step.optimizer_state import HomeState
from noria.step.param_groups import Groups, Jobs, ParamGroups
from noria.step.torch_on_device import TorchOnDevice
from noria.step.torch_step import broken_off
from noria.torch_state import plainly

__all__ = ["ResidentStep"]


class ResidentStep:
    """Makes one optimizer's updates of the units that are at rest."""

    def __init__(
        self,
        members: ParamGroups,
        state: HomeState,
        fused: HostKernels,
        by_torch: TorchOnDevice,
        masters: Masters,
        rest: Rest,
    ) -> None:
        self.members = members
        self.context = members.context
        self.rest = rest
        self._state = state
        self._fused = fused
        self._by_torch = by_torch
        self._masters = masters

    def can_update(self) -> bool:
        """Returns True if this optimizer can update all that is at rest there.

        noria's kernels need the state, which a step that streams makes. If the plan has no place for it, the rest is
        given up. It is so too if torch would update a unit there that is planned for the host.
        """
        has_all = True
        for slot, group in self._with_gradients():
            if not self.members.fuses(slot.unit):
                if slot.unit not in self.context.plan.streamed:
                    self.rest.give_up()
                    return False
                continue
            rule = rule_of(self.members.cls, group)
            if not rule.is_elementwise:  # only the host has a kernel
                self.rest.give_up()
                return False
            values = dict.get(self._state.shown, slot.parameter) or {}
            for key in rule.state_keys(slot):
                has_all = has_all and values.get(key) is not None
                if not self._state.is_planned(slot, key):
                    self.rest.give_up()
                    return False
        return has_all

    def jobs(self) -> Jobs:
        """Returns the parameters at rest that have a gradient now, by unit and group."""
        for slot, _ in self._with_gradients() if self._masters.loaded_low_bits else ():
            if slot.index in self._masters.loaded_low_bits:
                self.rest.note_written(slot.unit)  # `confirm_low_bits` may correct them at home
        return prepare_jobs(self.members, self._state, self._masters, self._has_gradient, refuse_gradient)

    def update(self, ready: dict[int, Ready]) -> None:
        """Updates these units: on the host at once, on a device in the order of the current stream."""
        gradients = {unit: [_dense_gradient(slot) for slot, _, _ in each] for unit, each in ready.items()}
        jobs = []
        try:  # from here on steps are counted
            for unit, each in ready.items():
                addresses = [gradient.data_ptr() for gradient in gradients[unit]]
                self._fused.count(each)
                jobs += self._fused.jobs_on_device(unit, each, addresses, self.rest.address)
                self.rest.note_newer(unit)
            self.context.engine.rest.update(jobs)
        except BaseException:
            self.context.engine.mark_torn("a step was interrupted")
            raise

    def update_by_torch(self, jobs: Jobs) -> None:
        """Updates these units by torch's optimizer. If it raises, the step is broken off, as in torch."""
        begun: list[int] = []
        try:
            for unit, groups in jobs.items():
                self.rest.note_newer(unit)
                for part in _in_parts(groups):
                    begun += [slot.index for _, slots in part for slot in slots]
                    self._by_torch.run(part, self.rest, _gradient_for_torch)
        except BaseException as error:
            self.context.engine.home.bump_versions(begun)
            error.add_note(broken_off(self.context.units[unit].name, "on the device, where it stays"))
            raise

    def sums(self, slots: list[HomeParameter]) -> dict[int, float]:
        """Returns the sum of the squares of each gradient, by slot. It has the bits of the sum of a held gradient."""
        gradients = [_dense_gradient(slot) for slot in slots]
        jobs = [
            self._fused.sum_job_at_rest(slot, gradient.data_ptr())
            for slot, gradient in zip(slots, gradients, strict=True)
        ]
        numbers = [_C.num_update_chunks(slot.like.numel()) for slot in slots]
        device = self.context.device
        with plainly():
            sums = torch.zeros(sum(numbers) * _C.SUM_SPAN, dtype=torch.float64, device=device)
            self.context.engine.rest.sum(jobs, sums.data_ptr())
            of_chunks = iter(sums[:: _C.SUM_SPAN].tolist())
        found = dict.fromkeys((slot.index for slot in slots), 0.0)
        for slot, number in zip(slots, numbers, strict=True):
            for each in itertools.islice(of_chunks, number):  # not `sum`, which compensates since Python 3.12
                found[slot.index] += each
        return found

    def _with_gradients(self) -> Iterator[tuple[HomeParameter, dict[str, Any]]]:
        """Yields the parameters at rest that have a gradient, each with its group."""
        for group in self.members.optimizer.param_groups:
            for parameter in group["params"]:
                slot = self.context.slot_of.get(parameter)
                if slot is not None and self._has_gradient(slot):
                    yield slot, group

    def _has_gradient(self, slot: HomeParameter) -> bool:
        return slot.parameter.grad is not None and self.rest.has(slot.unit)


def _dense_gradient(slot: HomeParameter) -> torch.Tensor:
    """Returns the gradient in the parameter's own dtype, device and strides: itself, or a copy."""
    gradient, parameter = slot.parameter.grad, slot.parameter
    assert gradient is not None
    is_alike = gradient.dtype is slot.dtype and gradient.device == parameter.device
    if is_alike and gradient.stride() == slot.strides:
        return gradient
    return torch.empty_strided(slot.shape, slot.strides, dtype=slot.dtype, device=parameter.device).copy_(gradient)


def _gradient_for_torch(slot: HomeParameter) -> torch.Tensor:
    gradient = _dense_gradient(slot)
    return gradient.to(torch.float32) if slot.has_master else gradient


def _in_parts(groups: Groups) -> Iterator[Groups]:
    """Yields the groups in parts of at most `PIECE_ELEMENTS` elements, each with at least one parameter.

    So torch's own scratch memory is as small as for pieces.
    """
    part: Groups = []
    count = 0
    for hyper, slots in groups:
        for slot in slots:
            if part and count + slot.like.numel() > PIECE_ELEMENTS:
                yield part
                part, count = [], 0
            if not part or part[-1][0] is not hyper:
                part.append((hyper, []))
            part[-1][1].append(slot)
            count += slot.like.numel()
    if part:
        yield part
