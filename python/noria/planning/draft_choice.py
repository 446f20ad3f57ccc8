"""Chooses the units that are drafted, and so get undo logs."""

from __future__ import annotations

from collections.abc import Container

import torch

from noria.host.limits import Free, margin_of
from noria.model.layout import HomeUnit
from noria.model.update_rules import FusedRule
from noria.planning.budgets import Budgets
from noria.planning.home_regions import undo_log_bytes
from noria.planning.kernels import Kernels
from noria.planning.spread import spread_evenly
from noria.policy import format_bytes

__all__ = ["choose_drafts", "left_for_drafts", "undo_log_needs"]


def undo_log_needs(kernels: Kernels, stays: Container[int]) -> dict[int, int]:
    """Returns, by index of a unit that can be drafted, the bytes of its undo log. `stays`: units that stay are not."""
    if kernels.policy.update != "auto":
        return {}
    held = kernels.held()
    return {
        unit.index: undo_log_bytes(unit)
        for unit in kernels.units
        if unit.index in kernels.fused
        and unit.index not in stays
        and _can_be_drafted(unit, kernels.fused[unit.index], held)
    }


def choose_drafts(
    kernels: Kernels,
    needs: dict[int, int],
    budget: int | None,
    left: int,
    device: torch.device,
    notes: list[str],
) -> frozenset[int]:
    """Chooses the units that get undo logs. `draft_memory` limits how many.

    They are spread evenly over the model: the updates left for the next forward then come evenly too.

    Args:
        kernels: Who updates.
        needs: What `undo_log_needs` returns.
        budget: The bytes of `draft_memory`. None: "auto".
        left: The bytes that "auto" may take: what `left_for_drafts` returns.
        device: Where layers compute.
        notes: Gets a text if nothing is drafted that was asked for.
    """
    has_use = device.type != "cpu"
    if budget == 0 or not kernels.fused or (budget is None and not has_use):
        return frozenset()
    if kernels.policy.update != "auto":
        if budget is not None:
            notes.append(f'there are no drafts: update="{kernels.policy.update}" runs them at another time')
        return frozenset()
    if kernels.policy.find_unused_parameters and any(unit.num_shards > 1 for unit in kernels.units):
        notes.append("there are no drafts: with find_unused_parameters=True other ranks may need the weights of before")
        return frozenset()
    is_asked_for = budget is not None
    budget = left if budget is None else budget
    chosen = spread_evenly(needs, budget)
    if needs and not chosen and is_asked_for:
        notes.append(f"there are no drafts: the smallest undo log takes {format_bytes(min(needs.values()))}")
    return frozenset(chosen)


def _can_be_drafted(unit: HomeUnit, rules: tuple[FusedRule, ...], held: list[set[torch.Tensor]]) -> bool:
    """Returns True if one update can cover all that is trained in the unit, and be undone: one rule, one optimizer."""
    own = {slot.parameter for slot in unit.parameters if slot.trainable}
    return len(rules) == 1 and rules[0].is_elementwise and any(own <= parameters for parameters in held)


def left_for_drafts(budgets: Budgets, free: Free, taken: int, more: int) -> int:
    """Returns the bytes of the host budget and of this machine that are left for undo logs.

    `taken`: bytes that the home has taken already. `more`: bytes that it will take besides undo logs. `free`: what is
    free now.
    """
    left = [budgets.host - taken - more] if budgets.host is not None else []
    if free.share is not None:
        left.append(free.share.free - margin_of(free.share.free) - more)
    return max(min(left, default=0), 0)
