"""Computes gradient norms, and the factor by which unscaling and clipping multiply the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from noria._errors import usage_error
from noria.model.layout import HomeParameter
from noria.runtime.rank_sync import RankSync
from noria.runtime.state import RunState
from noria.step.collect_grads import take_foreign
from noria.step.host_kernels import HostKernels
from noria.step.param_groups import Jobs, ParamGroups
from noria.step.resident_step import ResidentStep
from noria.torch_state import await_device, plainly, refuse_inside_backward

__all__ = ["GradNorm"]


class GradNorm:
    """Computes norms and clips for one optimizer. `grad_norm`: the norm that the last `step()` with `max_grad_norm`
    measured."""

    def __init__(
        self, members: ParamGroups, fused: HostKernels, run: RunState, sync: RankSync, resident: ResidentStep
    ) -> None:
        self.run = run
        self.sync = sync
        self.members = members
        self.context = members.context
        self.fused = fused
        self._resident = resident
        norm = self.context.policy.max_grad_norm
        self.max_grad_norm = None if norm is None else float(norm)
        self.grad_norm: torch.Tensor | None = None
        self.wants_sums = self.max_grad_norm is not None  # sums of squares, taken when gradients land
        self.expected_factor = 1.0  # the factor that drafts assume for the next step()

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        refuse_inside_backward("optimizer.clip_grad_norm_()")
        self.run.recover()
        if self.context.updates_in_backward:
            raise usage_error(
                'optimizer.clip_grad_norm_() under update="auto" or "blocking"',
                'update="backward", which has updated before the norm is known',
                "wrap with one of the two",
            )
        slots = [slot for slot in self.members.slots() if slot.parameter.grad is not None]
        if self.context.ranks is not None and float(norm_type) != 2.0:
            raise usage_error("the 2-norm, if ranks share the model", f"norm_type={norm_type}", "clip by norm_type=2.0")
        if self.context.ranks is None and (float(norm_type) != 2.0 or not self.members.takes_factor()):
            return self._clip_by_torch(max_norm, norm_type, error_if_nonfinite)
        self.wants_sums = True
        with plainly():
            for slot in slots:
                if not self._resident.rest.has(slot.unit):
                    take_foreign(self.context, slot)
            norm = self._norm(slots, max_norm)
            if error_if_nonfinite:
                _refuse_nonfinite(norm, norm_type)
            factor = _clip_factor(norm, max_norm)
            if factor != 1.0:
                self._scale(slots, factor)
            return norm.to(slots[0].parameter.device) if slots else norm

    def _scale(self, slots: Iterable[HomeParameter], factor: float) -> None:
        if self.context.shows_gradients:
            for slot in slots:
                slot.parameter.grad.mul_(factor)  # type: ignore[union-attr]
            return
        accessed: set[int] = set()
        for slot in slots:  # `_norm` has already applied their late scales
            if slot.unit not in accessed:
                accessed.add(slot.unit)
                self.context.engine.gradients.access_held(slot.unit)
            self.context.home.held(slot).mul_(factor)

    def clip_at_step(self, max_norm: float) -> torch.Tensor:
        """Clips for an update that takes no factor: this changes the gradients themselves."""
        if self.context.ranks is None:
            return self._clip_by_torch(max_norm)
        return self.clip_grad_norm_(max_norm, 2.0, False)

    def _clip_by_torch(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Clips with torch's own functions.

        For 16-bit gradients torch would compute the norm in 16 bits; this method computes it in fp32.
        """
        parameters = [slot.parameter for slot in self.members.slots()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if all(gradient.dtype.itemsize > 2 for gradient in gradients):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        with torch.no_grad():
            norms = [
                torch.linalg.vector_norm(each, norm_type, dtype=torch.promote_types(each.dtype, torch.float32))
                for each in gradients
            ]
            norm: torch.Tensor = torch.linalg.vector_norm(
                torch.stack([each.to(norms[0].device) for each in norms]), norm_type
            )
        if error_if_nonfinite:
            _refuse_nonfinite(norm, norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def factor(self, jobs: Jobs) -> float:
        """Returns the factor for the gradients in this step: the inverse of a scaler's scale, times the clip factor."""
        scale = getattr(self.members.optimizer, "grad_scale", None)
        unscale = 1.0 if scale is None else scale.double().reciprocal().float().item()
        factor = unscale
        if self.max_grad_norm is not None and self.members.takes_factor():
            held = {slot.index for groups in jobs.values() for _, slots in groups for slot in slots}
            slots = [slot for slot in self.members.slots() if slot.index in held]
            self.grad_norm = self._norm(slots, self.max_grad_norm) * unscale
            factor *= _clip_factor(self.grad_norm, self.max_grad_norm)
        self.expected_factor = unscale  # drafts assume that the norm stays below max_grad_norm
        return factor

    def unscale(self, slots: Sequence[HomeParameter]) -> None:
        """Unscales `p.grad` after a step whose update applied `factor`. Plain PyTorch leaves it unscaled too."""
        scale = getattr(self.members.optimizer, "grad_scale", None)
        if scale is None:
            return
        gradients = self.context.engine.gradients
        inverse = scale.double().reciprocal().float().to(self.context.device)  # a scale set by hand may be anywhere
        held = {slot.index for slot in slots if gradients.gradient_is(slot.index) == "held"}
        gradients.unscale_used(list(held), inverse)
        grads = (slot.parameter.grad for slot in slots if slot.index not in held)
        others = [grad for grad in grads if grad is not None]
        if others:
            torch._amp_foreach_non_finite_check_and_unscale_(others, torch.zeros_like(inverse), inverse)

    def _norm(self, slots: Iterable[HomeParameter], max_norm: float) -> torch.Tensor:
        """Returns the norm of the gradients in the home, as an fp32 scalar tensor. Ranks compare `max_norm`.

        The sum runs in the order of the optimizer's parameters, so the result does not depend on the units.
        """
        by_unit: dict[int, list[HomeParameter]] = {}
        order = list(slots)
        resting = [slot for slot in order if self._resident.rest.has(slot.unit)]
        at_rest = self._resident.sums(resting) if resting else {}
        is_late = False  # True: the device still multiplies gradients; sum jobs wait for that themselves
        for slot in order:
            if slot.index in at_rest:
                continue
            is_late |= self.context.engine.gradients.apply_scales(slot.index)
            by_unit.setdefault(slot.unit, []).append(slot)
        sums = dict.fromkeys((slot.index for slot in order), 0.0) | at_rest  # in the same order on all ranks
        fused = {unit: members for unit, members in by_unit.items() if self.members.fuses(unit)}
        jobs = [(unit, self.fused.sum_job(unit, members)) for unit, members in fused.items()]
        for members, found in zip(fused.values(), self.context.engine.gradients.sum_gradients(jobs), strict=True):
            sums.update((slot.index, each) for slot, each in zip(members, found, strict=True))
        if is_late and len(fused) < len(by_unit):
            await_device(self.context.device)
        for unit, members in by_unit.items():
            if unit not in fused:
                self.context.engine.gradients.access_held(unit)
                sums.update((slot.index, _sum_of_squares(self.context.home.held(slot))) for slot in members)
        sums = self.sync.combine(sums, f"clip {{}} to a norm of {max_norm}")
        return _root_of_sum([sums[slot.index] for slot in order])


def _root_of_sum(sums: list[float]) -> torch.Tensor:
    return torch.tensor(math.sqrt(sum(sums)), dtype=torch.float32, device="cpu")


def _sum_of_squares(gradient: torch.Tensor) -> float:
    """Sums in fp64, one piece at a time: an fp64 copy of the whole gradient may not fit."""
    return sum(float(each.double().square().sum()) for each in gradient.split(1 << 20))


def _refuse_nonfinite(norm: torch.Tensor, norm_type: float) -> None:
    if not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite, so it cannot "
            "be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


def _clip_factor(norm: torch.Tensor, max_norm: float) -> float:
    """Returns the clip factor, with torch's arithmetic in fp32. A norm that is not finite is handled as in torch."""
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
