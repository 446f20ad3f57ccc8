"""What the engine is told at the end of a forward: which updates to draft during backward, and what to sum up."""

from __future__ import annotations

from noria import _C
from noria.home import HomeParameter
from noria.kernels import FusedRule
from noria.updates.fused import Fused
from noria.updates.members import Members
from noria.updates.norms import Norms
from noria.updates.steps import Steps

__all__ = ["Drafts"]


class Drafts:
    """Of one optimizer."""

    def __init__(self, members: Members, steps: Steps, fused: Fused, norms: Norms) -> None:
        self.members = members
        self.wrapped = members.wrapped
        self.steps = steps
        self.fused = fused
        self.norms = norms

    def expect(self) -> None:
        """Tells the engine what `step()` would do as things are now, so that it may be done during backward."""
        may_draft = self.members.kernel == "fused" and self.wrapped.drafts.pay
        drafted = self.wrapped.plan.drafted if may_draft else frozenset()
        told = self._expect_drafts(drafted) if drafted else set()
        if self.norms.wants_sums and self.members.takes_factor():
            self._expect_sums(told)

    def _expect_drafts(self, drafted: frozenset[int]) -> set[int]:
        """Returns the units that will be."""
        groups = self.members.optimizer.param_groups
        if any(self.members.refusal_of(number, group) is not None for number, group in enumerate(groups)):
            return set()  # step() says so, if nobody sets it right before

        def next_step(number: int, slot: HomeParameter, rule: FusedRule) -> int | None:
            return self.steps.expect(slot, rule) if slot.unit in drafted else None

        expected = self.fused.expected_pieces(next_step, self.norms.expected_factor)
        whole = {
            unit: pieces
            for unit, (slots, pieces) in expected.items()
            if len(slots) == len(self.wrapped.units[unit].parameters)
        }
        for unit, pieces in whole.items():
            rule = self.wrapped.plan.fused[unit][0]
            here, there = (self.fused.arrays(unit, rule, None, spare) for spare in (False, True))
            held = self.wrapped.home.address("held gradients", unit)
            job = _C.UpdateJob(rule.name, pieces, here, gradient=held, to=there, sums=self.norms.wants_sums)
            self.wrapped.custody.expect_update(unit, job)
        return set(whole)

    def _expect_sums(self, told: set[int]) -> None:
        by_unit: dict[int, list[HomeParameter]] = {}
        for slot in self.members.slots():
            if slot.trainable and slot.unit not in told:
                by_unit.setdefault(slot.unit, []).append(slot)
        for unit, slots in by_unit.items():
            self.wrapped.custody.expect_update(unit, self.fused.sum_job(unit, slots))
