"""Tells the engine, at the end of a forward, which updates to draft and which squares to sum in backward."""

from __future__ import annotations

from noria import _C
from noria.model.layout import HomeParameter
from noria.model.update_rules import FusedRule
from noria.runtime.draft_policy import DraftPolicy
from noria.step.grad_norm import GradNorm
from noria.step.host_kernels import HostKernels
from noria.step.param_groups import ParamGroups
from noria.step.step_counts import StepCounts

__all__ = ["Drafts"]


class Drafts:
    """Tells the engine which updates of one optimizer it may draft, and which squares to sum."""

    def __init__(
        self,
        members: ParamGroups,
        steps: StepCounts,
        fused: HostKernels,
        norms: GradNorm,
        draft_policy: DraftPolicy,
    ) -> None:
        self.draft_policy = draft_policy
        self.members = members
        self.context = members.context
        self.steps = steps
        self.fused = fused
        self.norms = norms

    def expect(self) -> None:
        """Tells the engine which updates `step()` would make now, so that the engine can draft them during backward."""
        may_draft = self.members.kernel == "fused" and self.draft_policy.pay
        drafted = self.context.plan.drafted if may_draft else frozenset()
        told = self._expect_drafts(drafted) if drafted else set()
        if self.norms.wants_sums and self.members.takes_factor():
            self._expect_sums(told)

    def _expect_drafts(self, drafted: frozenset[int]) -> set[int]:
        """Returns the units whose updates the engine was told to draft."""
        groups = self.members.optimizer.param_groups
        if any(self.members.refusal_of(number, group) is not None for number, group in enumerate(groups)):
            return set()  # step() raises, unless the user corrects the group before

        def next_step(number: int, slot: HomeParameter, rule: FusedRule) -> int | None:
            return self.steps.expect(slot, rule) if slot.trainable and slot.unit in drafted else None

        expected = self.fused.expected_pieces(next_step, self.norms.expected_factor)
        whole = {
            unit: pieces
            for unit, (slots, pieces) in expected.items()
            if len(slots) == sum(slot.trainable for slot in self.context.units[unit].parameters)
        }
        for unit, pieces in whole.items():
            rule = self.context.plan.fused[unit][0]
            arrays = self.fused.arrays(unit, rule, None)
            held = self.context.home.address("held gradients", unit)
            job = _C.UpdateJob(rule.name, pieces, arrays, gradient=held, sums=self.norms.wants_sums)
            self.context.engine.updates.expect_update(unit, job)
        return set(whole)

    def _expect_sums(self, told: set[int]) -> None:
        by_unit: dict[int, list[HomeParameter]] = {}
        for slot in self.members.slots():
            if slot.trainable and slot.unit not in told and not self.context.engine.rest.has(slot.unit):
                by_unit.setdefault(slot.unit, []).append(slot)
        for unit, slots in by_unit.items():
            self.context.engine.updates.expect_update(unit, self.fused.sum_job(unit, slots))
