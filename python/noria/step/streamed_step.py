"""Updates pieces of units on the device, where the engine has brought their weights, state and gradients."""

from __future__ import annotations

import dataclasses

import torch

from noria import _C
from noria.model.layout import HomeParameter
from noria.planning.streamed import GRADIENTS_IN_FP32
from noria.runtime.streamed import PieceNow, Streamed
from noria.step.host_kernels import HostKernels, Ready
from noria.step.optimizer_state import HomeState
from noria.step.param_groups import Groups, ParamGroups
from noria.step.torch_on_device import TorchOnDevice
from noria.step.torch_step import PUT_OFF, broken_off
from noria.torch_state import plainly

__all__ = ["StreamedStep"]

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

    def __init__(
        self, members: ParamGroups, state: HomeState, fused: HostKernels, by_torch: TorchOnDevice, streamed: Streamed
    ) -> None:
        self.members = members
        self.context = members.context
        self._state = state
        self._fused = fused
        self._by_torch = by_torch
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
        return all(
            rule.is_elementwise and all(self._state.is_planned(slot, key) for key in rule.keys)
            for slot, rule, _ in ready or ()
        )

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
            if job.ready:
                with plainly():
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
        def gradient(slot: HomeParameter) -> torch.Tensor:
            held = now.tensor("held gradients", slot, slot.dtype)
            self._scale(held, job.scales[slot.index])
            return now.tensor(GRADIENTS_IN_FP32, slot, torch.float32).copy_(held) if slot.has_master else held

        here = [(hyper, [slot for slot in slots if slot.index in now.piece.parameters]) for hyper, slots in job.groups]
        self._by_torch.run(here, now, gradient)

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
