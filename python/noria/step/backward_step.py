"""Implements update="backward": the engine updates units as gradients arrive, and `step()` claims the updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from noria import _C
from noria._errors import UsageError, usage_error
from noria.model.layout import HomeParameter
from noria.model.shadow_optimizer import hyper_of
from noria.model.update_rules import AS_IT_IS, FusedRule, rule_of
from noria.runtime.accumulation import Accumulation
from noria.runtime.masters import Masters
from noria.step.collect_grads import prepare_jobs
from noria.step.host_kernels import HostKernels
from noria.step.optimizer_state import HomeState
from noria.step.param_groups import Jobs, ParamGroups
from noria.step.step_counts import StepCounts
from noria.step.torch_step import TorchStep
from noria.torch_state import autocast_now, plainly

__all__ = ["BackwardStep"]


class BackwardStep:
    """Tells the engine one optimizer's updates before a backward, and claims them in `step()`."""

    def __init__(
        self,
        members: ParamGroups,
        state: HomeState,
        steps: StepCounts,
        fused: HostKernels,
        torch_step: TorchStep,
        masters: Masters,
        accumulation: Accumulation,
        expect_all: Callable[[], object],
    ) -> None:
        """Takes the parts that it uses. `expect_all` does what `expect` does, for all optimizers of the wrap call."""
        self.masters = masters
        self.accumulation = accumulation
        self._expect_all = expect_all
        self.members = members
        self.context = members.context
        self.state = state
        self.steps = steps
        self.fused = fused
        self.torch_step = torch_step
        self._by_torch: Jobs = {}  # as they were when backward began

    def expect(self) -> list[int]:
        """Tells the engine how to update each unit in the backward that begins now. Returns the trainable slots."""
        self.state.follow()

        def ready_step(number: int, slot: HomeParameter, rule: FusedRule) -> int | None:
            if not slot.trainable or not slot.shape.numel() or not self.members.fuses(slot.unit):
                return None
            if rule not in self.context.plan.fused[slot.unit]:
                raise usage_error(
                    f"{self.members.cls.__name__} with the options it was wrapped with",
                    f"group {number} turned into {rule.name}",
                    "set it before noria.wrap",
                )
            self.state.check(slot, rule)
            self.masters.confirm_low_bits(slot)
            return self.steps.prepare(slot, rule)

        with plainly():
            self.members.check_options()
            self._expect_torch()
            expected = self.fused.expected_pieces(ready_step, 1.0) if self.members.kernel == "fused" else {}
            for unit, (slots, pieces) in expected.items():
                rule = self.context.plan.fused[unit][0]
                # The gradient's address is known when the gradient arrives. Until then any non-null address is valid.
                arrays = self.fused.arrays(unit, rule, None)
                anywhere = self.context.home.address("working copies", unit)
                job = _C.UpdateJob(
                    rule.name, pieces, arrays, gradient=anywhere, factored=self.fused.factored(rule, slots)
                )
                self.context.files.note_written(unit)
                self.context.engine.backward.expect_in_backward(unit, job, [slot.gradient_offset for slot in slots])
        return [slot.index for slot in self.members.slots() if slot.trainable]

    def _expect_torch(self) -> None:
        """Tells the engine which units torch updates, and keeps the groups that it will use."""
        self.torch_step.autocast = autocast_now(self.context.device.type)

        def takes(slot: HomeParameter) -> bool:
            return slot.trainable and not self.members.fuses(slot.unit)

        self._by_torch = prepare_jobs(self.members, self.state, self.masters, takes)
        for unit in self._by_torch:
            self.context.engine.backward.expect_here(unit)

    def run(self, unit: int) -> None:
        """Runs torch's update of a unit whose gradients are complete. The engine calls this inside of a backward."""
        if unit not in self._by_torch:
            return
        used = self.context.engine.backward.used_now(unit)
        groups = [
            (hyper, [slot for slot in slots if slot.gradient_offset in used]) for hyper, slots in self._by_torch[unit]
        ]
        self.torch_step.run_now(unit, [each for each in groups if each[1]], "which backward runs")

    def claim(self) -> UsageError | None:
        """Enters the updates that backward has made into the optimizer's state. Runs in `step()`.

        Returns the error that `step()` raises, or None. An error undoes no update.
        """
        engine = self.context.engine
        gradients, backward = engine.gradients, engine.backward
        engine.updates.begin_step()
        own = list(self.members.slots())
        are_held_back = any(backward.is_held_back(slot.index) for slot in own)
        if are_held_back:  # by accumulate(): the updates of all optimizers begin now
            for slot in self.context.slots:
                if backward.is_held_back(slot.index):
                    gradients.apply_scales(slot.index)
        clipped = gradients.first_scaled([slot.index for slot in own])
        for slot in own:
            if slot.trainable:
                gradients.drop_scales(slot.index)
        if are_held_back:
            self._expect_all()
            self.context.files.release()
            backward.update_held()
        updated_now = backward.take_updated(sorted({slot.unit for slot in own}))
        used = {(unit, offset): scalars for unit, pieces in updated_now for offset, scalars in pieces}
        now = self.fused.scalars(1.0)
        by_torch = [each for groups in self._by_torch.values() for each in groups]
        hyper_used = {slot.index: hyper for hyper, slots in by_torch for slot in slots}
        updated, changed, strange, refusal = [], None, None, None
        for number, group in enumerate(self.members.optimizer.param_groups):
            is_fit = self.members.refusal_of(number, group) is None
            for parameter in group["params"]:
                slot = self.context.slot_of[parameter]
                scalars = used.get((slot.unit, slot.gradient_offset)) if parameter.numel() else None
                says = gradients.gradient_is(slot.index)
                is_used = scalars is not None or (parameter.numel() == 0 and says == "held")
                if is_used != (says == "held") or says == "foreign":
                    strange = slot
                if not is_used:
                    continue
                updated.append(slot.index)
                if not self.members.fuses(slot.unit):
                    if not _are_equal(hyper_used.get(slot.index, {}), hyper_of(group)):
                        changed = number
                    continue
                rule = self.context.plan.fused[slot.unit][0]
                if slot.has_master or rule.state_keys(slot):
                    self.state.shown.unsettled(parameter)
                try:
                    step = self.steps.ready(slot, rule)
                    self.steps.count(slot, rule)
                except UsageError as error:
                    refusal = error
                    continue
                as_it_was = is_fit and rule_of(self.members.cls, group) == rule
                # The schedule has chosen this scaling, so it counts as unchanged.
                scaling = AS_IT_IS if scalars is None else (scalars.divisor, scalars.prefactor)
                if not as_it_was or (scalars is not None and now(number, rule, group, step, slot, scaling) != scalars):
                    changed = number
        self.context.files.release()  # what the first step of a parameter has touched
        engine.home.bump_versions(updated)
        self.members.note_step(updated)
        engine.updates.end_step(False)
        if changed is not None:
            return usage_error(
                'hyperparameters under update="backward" as they were when backward began',
                f"group {changed} changed between backward() and step(); the updates were made with the former values",
                'change them after step() or before backward(), or wrap with update="auto"',
            )
        if clipped >= 0:
            return usage_error(
                'a clip that does not bite under update="backward", which has updated before the norm is known',
                f'the gradient of "{self.context.slots[clipped].name}" multiplied by another factor than 1 after '
                "backward(); the updates were made without it",
                'clip to a larger norm, or wrap with update="auto" and clip there, or with max_grad_norm',
            )
        if strange is not None:
            return usage_error(
                'p.grad under update="backward" as backward() left it, and zero_grad() after step()',
                f'that of "{strange.name}" cleared, replaced or used up before; the updates are those of backward()',
                'leave p.grad alone, or wrap with update="auto"',
            )
        return refusal

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        if not self.context.updates_in_backward:
            return contextlib.nullcontext()
        return self.accumulation.accumulate()


def _are_equal(some: dict[str, object], others: dict[str, object]) -> bool:
    def is_equal(one: object, other: object) -> bool:
        if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
            return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        if isinstance(one, tuple | list) and isinstance(other, tuple | list):
            return len(one) == len(other) and all(map(is_equal, one, other))
        return bool(one == other)

    return some.keys() == others.keys() and all(is_equal(some[key], others[key]) for key in some)
