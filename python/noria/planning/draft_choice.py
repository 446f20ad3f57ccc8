"""Chooses the units that are drafted, and so get undo logs."""

from __future__ import annotations

import torch

from noria.host.limits import Free, margin_of
from noria.model.layout import HomeUnit
from noria.model.update_rules import FusedRule
from noria.planning.budgets import Budgets
from noria.planning.home_regions import home_regions, undo_log_bytes
from noria.planning.kernels import Kernels
from noria.policy import format_bytes

__all__ = ["choose_drafts", "undo_log_needs"]


def undo_log_needs(kernels: Kernels) -> dict[int, int]:
    """Returns, by index of a unit that can be drafted, the bytes of its undo log."""
    if kernels.policy.update != "auto":
        return {}
    held = kernels.held()
    return {
        unit.index: undo_log_bytes(unit)
        for unit in kernels.units
        if unit.index in kernels.fused and _can_be_drafted(unit, kernels.fused[unit.index], held)
    }


def choose_drafts(
    kernels: Kernels,
    needs: dict[int, int],
    state_bytes: int,
    budgets: Budgets,
    device: torch.device,
    free: Free,
    notes: list[str],
) -> frozenset[int]:
    """Chooses the units that get undo logs. `draft_memory` limits how many.

    They are spread evenly over the model: the updates left for the next forward then come evenly too. `needs`: what
    `undo_log_needs` returns; `state_bytes`: of the state that torch keeps.
    """
    budget = budgets.drafts
    if budget == 0 or not kernels.fused or (budget is None and device.type == "cpu"):
        return frozenset()
    if kernels.policy.update != "auto":
        if budget is not None:
            notes.append(f'there are no drafts: update="{kernels.policy.update}" runs them at another time')
        return frozenset()
    if kernels.policy.find_unused_parameters and any(unit.num_shards > 1 for unit in kernels.units):
        notes.append("there are no drafts: with find_unused_parameters=True other ranks may need the weights of before")
        return frozenset()
    if budget is None:
        budget = _left_for_drafts(kernels, state_bytes, budgets, free)
    share = min(budget / max(sum(needs.values()), 1), 1.0)
    chosen, taken, seen = [], 0, 0
    for index, need in needs.items():
        seen += need
        if taken + need <= min(budget, share * seen + need / 2):
            chosen.append(index)
            taken += need
    if needs and not chosen and budgets.drafts is not None:
        notes.append(f"there are no drafts: the smallest undo log takes {format_bytes(min(needs.values()))}")
    return frozenset(chosen)


def _can_be_drafted(unit: HomeUnit, rules: tuple[FusedRule, ...], held: list[set[torch.Tensor]]) -> bool:
    """Returns True if one update can cover all that is trained in the unit: one rule, one optimizer."""
    own = {slot.parameter for slot in unit.parameters if slot.trainable}
    return len(rules) == 1 and any(own <= parameters for parameters in held)


def _left_for_drafts(kernels: Kernels, state_bytes: int, budgets: Budgets, free: Free) -> int:
    """Returns the bytes of the host budget and of this machine that a home without drafts leaves."""
    home = sum(region.bytes for region in home_regions(kernels, frozenset(), state_bytes))
    left = [budgets.host - home] if budgets.host is not None else []
    if free.share is not None:
        left.append(free.share.free - margin_of(free.share.free) - home)
    return max(min(left, default=0), 0)
