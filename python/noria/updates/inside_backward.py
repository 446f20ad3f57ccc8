"""update="backward": updates that the engine makes as gradients arrive, and the `step()` that claims them."""

from __future__ import annotations

import contextlib

from noria import _C
from noria._errors import UsageError, usage_error
from noria.home import HomeParameter
from noria.kernels import AS_IT_IS, FusedRule, rule_of
from noria.modes import plainly
from noria.updates.fused import Fused
from noria.updates.home_state import HomeState
from noria.updates.members import Members
from noria.updates.steps import Steps

__all__ = ["InsideBackward"]


class InsideBackward:
    """Of one optimizer."""

    def __init__(self, members: Members, state: HomeState, steps: Steps, fused: Fused) -> None:
        self.members = members
        self.wrapped = members.wrapped
        self.state = state
        self.steps = steps
        self.fused = fused

    def expect(self) -> list[int]:
        """Tells the engine how to update each unit in the backward that begins now. Returns the slots it spoke of."""
        self.state.follow()

        def ready_step(number: int, slot: HomeParameter, rule: FusedRule) -> int | None:
            if not slot.trainable or not slot.shape.numel():
                return None
            if rule not in self.wrapped.plan.fused[slot.unit]:
                raise usage_error(
                    f"{self.members.cls.__name__} with the options it was wrapped with",
                    f"group {number} turned into {rule.name}",
                    "set it before noria.wrap",
                )
            self.state.check(slot, self.members.optimizer.param_groups[number])
            self.wrapped.values.masters.confirm_low_bits(slot)
            return self.steps.prepare(slot, rule)

        with plainly():
            self.members.check_options()
            for unit, (slots, pieces) in self.fused.expected_pieces(ready_step, 1.0).items():
                rule = self.wrapped.plan.fused[unit][0]
                # Its gradient's address is known when it comes; until then any that is not null will do.
                arrays = self.fused.arrays(unit, rule, None)
                anywhere = self.wrapped.home.address("working copies", unit)
                job = _C.UpdateJob(rule.name, pieces, arrays, gradient=anywhere)
                self.wrapped.custody.expect_in_backward(unit, job, [slot.gradient_offset for slot in slots])
        return [slot.index for slot in self.members.slots() if slot.trainable]

    def claim(self) -> UsageError | None:
        """`step()` after updates inside backward: what they did is entered into the optimizer's state. Gives what is
        wrong with that step, which has been made all the same."""
        custody = self.wrapped.custody
        custody.begin_step()
        own = list(self.members.slots())
        are_held_back = any(custody.is_held_back(slot.index) for slot in own)
        if are_held_back:  # by accumulate(): their updates begin now, and with them those of other optimizers
            for slot in self.wrapped.slots:
                if custody.is_held_back(slot.index):
                    custody.apply_scales(slot.index)
        clipped = custody.first_scaled([slot.index for slot in own])
        for slot in own:
            if slot.trainable:
                custody.drop_scales(slot.index)
        if are_held_back:
            for updates in self.wrapped.optimizers:
                updates.expect_in_backward()
            custody.update_held()
        updated_now = custody.take_updated(sorted({slot.unit for slot in own}))
        used = {(unit, offset): scalars for unit, pieces in updated_now for offset, scalars in pieces}
        now = self.fused.scalars(1.0)
        updated, changed, strange, refusal = [], None, None, None
        for number, group in enumerate(self.members.optimizer.param_groups):
            is_fit = self.members.refusal_of(number, group) is None
            for parameter in group["params"]:
                slot = self.wrapped.slot_of[parameter]
                scalars = used.get((slot.unit, slot.gradient_offset)) if parameter.numel() else None
                says = custody.gradient_is(slot.index)
                is_used = scalars is not None or (parameter.numel() == 0 and says == "held")
                if is_used != (says == "held") or says == "foreign":
                    strange = slot
                if not is_used:
                    continue
                updated.append(slot.index)
                rule = self.wrapped.plan.fused[slot.unit][0]
                if slot.has_master or rule.keys:
                    self.state.shown.unsettled(parameter)
                try:
                    step = self.steps.count(slot, rule)
                except UsageError as error:
                    refusal = error
                    continue
                as_it_was = is_fit and rule_of(self.members.cls, group) == rule
                # How the gradient was scaled is the schedule's.
                scaling = AS_IT_IS if scalars is None else (scalars.divisor, scalars.prefactor)
                if not as_it_was or (scalars is not None and now(number, rule, group, step, scaling) != scalars):
                    changed = number
        custody.bump_versions(updated)
        self.members.note_step(updated)
        custody.end_step(False)
        if changed is not None:
            return usage_error(
                'hyperparameters under update="backward" as they were when backward began',
                f"group {changed} changed between backward() and step(); the updates were made with the former values",
                'change them after step() or before backward(), or wrap with update="auto"',
            )
        if clipped >= 0:
            return usage_error(
                'a clip that does not bite under update="backward", which has updated before the norm is known',
                f'the gradient of "{self.wrapped.slots[clipped].name}" multiplied by another factor than 1 after '
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
        if not self.wrapped.updates_in_backward:
            return contextlib.nullcontext()
        return self.wrapped.gradients.accumulate()
