"""Chooses the units that get spare buffers for drafts."""

from __future__ import annotations

import torch

from noria.host.limits import Free, margin_of
from noria.model.layout import HomeUnit
from noria.model.moment_formats import moment_bytes, scale_bytes
from noria.model.update_rules import FusedRule
from noria.planning.budgets import Budgets
from noria.planning.home_regions import home_regions
from noria.planning.kernels import Kernels
from noria.policy import format_bytes

__all__ = ["choose_drafts", "spare_needs"]


def spare_needs(kernels: Kernels) -> dict[int, int]:
    """Returns, by index of a unit that can be drafted, the bytes of its spare buffers."""
    policy = kernels.policy
    if policy.update != "auto":
        return {}
    needs, held = {}, kernels.held()
    for unit in kernels.units:
        if unit.index in kernels.fused and _can_be_drafted(unit, kernels.fused[unit.index], held):
            low = unit.home_gradients if policy.dtype is not None else 0
            moment = moment_bytes(unit, policy.dtype, policy.state_dtype) + scale_bytes(unit, policy.state_dtype)
            needs[unit.index] = unit.home_weights + low + len(kernels.fused[unit.index][0].keys) * moment
    return needs


def choose_drafts(
    kernels: Kernels,
    needs: dict[int, int],
    state_bytes: int,
    budgets: Budgets,
    device: torch.device,
    free: Free,
    notes: list[str],
) -> frozenset[int]:
    """Chooses the units that get spare buffers. `draft_memory` limits how many.

    They are spread evenly over the model: the updates left for the next forward then come evenly too. `needs`: what
    `spare_needs` returns; `state_bytes`: of the state that torch keeps.
    """
    budget = budgets.drafts
    if budget == 0 or not kernels.fused or (budget is None and device.type == "cpu"):
        return frozenset()
    if kernels.policy.update != "auto":
        if budget is not None:
            notes.append(f'there are no drafts: update="{kernels.policy.update}" runs them at another time')
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
        notes.append(f"there are no drafts: the smallest unit's take {format_bytes(min(needs.values()))}")
    return frozenset(chosen)


def _can_be_drafted(unit: HomeUnit, rules: tuple[FusedRule, ...], held: list[set[torch.Tensor]]) -> bool:
    """Returns True if one update can cover the whole unit: nothing frozen, one rule, one optimizer."""
    if len(rules) > 1 or not all(slot.trainable for slot in unit.parameters):
        return False
    own = {slot.parameter for slot in unit.parameters}
    return any(own <= parameters for parameters in held)


def _left_for_drafts(kernels: Kernels, state_bytes: int, budgets: Budgets, free: Free) -> int:
    """Returns the bytes of the host budget and of this machine that a home without drafts leaves."""
    home = sum(region.bytes for region in home_regions(kernels, frozenset(), state_bytes))
    left = [budgets.host - home] if budgets.host is not None else []
    if free.share is not None:
        left.append(free.share.free - margin_of(free.share.free) - home)
    return max(min(left, default=0), 0)
