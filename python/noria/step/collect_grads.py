"""Reads `p.grad` at `step()`, and copies gradients that the user put there to the home."""

from __future__ import annotations

from collections.abc import Callable

import torch

from noria._errors import usage_error
from noria.model.layout import HomeParameter
from noria.model.shadow_optimizer import hyper_of
from noria.model.update_rules import keeps_state, rule_of
from noria.runtime.context import Context
from noria.runtime.masters import Masters
from noria.step.optimizer_state import HomeState
from noria.step.param_groups import Jobs, ParamGroups

__all__ = ["prepare_jobs", "refuse_gradient", "take_foreign", "take_gradients"]


def refuse_gradient(slot: HomeParameter) -> None:
    """Raises UsageError if noria cannot update with `p.grad`.

    The parameter was frozen when it was wrapped, or the gradient is sparse.
    """
    gradient = slot.parameter.grad
    if not slot.trainable:
        raise usage_error(
            f'no gradient on "{slot.name}", frozen when it was wrapped',
            "one in p.grad",
            "unfreeze parameters between steps, by requires_grad_(True) or optimizer.add_param_group",
        )
    if gradient is not None and gradient.layout is not torch.strided:
        raise usage_error(f'a dense gradient of "{slot.name}"', "a sparse one in p.grad", "give p.grad.to_dense()")


def take_foreign(context: Context, slot: HomeParameter) -> None:
    """Copies `p.grad` into the held gradient if the user has put a tensor there. Raises as `refuse_gradient`."""
    if context.engine.gradients.gradient_is(slot.index) != "foreign":
        return
    refuse_gradient(slot)
    context.engine.gradients.take_foreign_gradient(slot.index)


def take_gradients(members: ParamGroups, state: HomeState, masters: Masters) -> Jobs:
    """Returns the parameters that stream and have a gradient now, by unit and group.

    It also prepares what their updates read: gradients that the user put into `p.grad` move to the home.
    """

    is_at_rest = members.context.engine.rest.has

    def takes(slot: HomeParameter) -> bool:
        return slot.parameter.grad is not None and not is_at_rest(slot.unit)

    def take(slot: HomeParameter) -> None:
        take_foreign(members.context, slot)
        if members.kernel == "whole":
            members.context.engine.gradients.apply_scales(slot.index)

    return prepare_jobs(members, state, masters, takes, take)


def prepare_jobs(
    members: ParamGroups,
    state: HomeState,
    masters: Masters,
    takes: Callable[[HomeParameter], bool],
    take: Callable[[HomeParameter], None] = lambda slot: None,
) -> Jobs:
    """Returns the parameters that `takes` chooses, by unit and group, and prepares state and masters for their updates.

    `take` prepares more of each.
    """
    jobs: Jobs = {}
    for group in members.optimizer.param_groups:
        hyper = hyper_of(group)
        rule = rule_of(members.cls, group) if members.kernel == "fused" else None
        makes_state = members.kernel != "whole" and keeps_state(members.cls, group)
        by_unit: dict[int, list[HomeParameter]] = {}
        for slot in (members.context.slot_of[parameter] for parameter in group["params"]):
            if not takes(slot):
                continue
            if rule is not None:
                state.check(slot, rule)
            if makes_state or (slot.has_master and members.kernel != "whole"):
                state.shown.unsettled(slot.parameter)  # creates the state now, to keep torch's order of states
            masters.confirm_low_bits(slot)
            take(slot)
            by_unit.setdefault(slot.unit, []).append(slot)
        for unit, slots in by_unit.items():
            jobs.setdefault(unit, []).append((hyper, slots))
    return jobs
