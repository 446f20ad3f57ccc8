"""Plans optimizers that are made after `noria.wrap(model)`: the home grows by what they need, and the rest stays.

Units, window and held gradients were planned with the model. The optimizers add their state, and undo logs. Under a
bfloat16 policy the masters, plain until then, become split where noria's kernels update.
"""

from __future__ import annotations

import dataclasses

from torch.optim import Optimizer

from noria.dist.ranks import Grid
from noria.host.limits import Free
from noria.model.layout import Region
from noria.planning.draft_choice import choose_drafts, left_for_drafts, undo_log_needs
from noria.planning.home_regions import home_regions, state_places
from noria.planning.kernels import Kernels
from noria.planning.resident import bytes_to_stay, choose_stays
from noria.planning.streamed import choose_streamed, pieces_of
from noria.planning.update_flops import update_flops
from noria.planning.wrap_plan import WrapPlan, masters_note, with_stays

__all__ = ["new_regions", "plan_optimizers"]


def plan_optimizers(
    planned: WrapPlan, optimizers: list[Optimizer], grid: Grid | None, free: Free, taken: int
) -> WrapPlan:
    """Returns the plan of the wrapped models with these optimizers. It changes nothing.

    Args:
        planned: The plan of the wrap call, which had no optimizer.
        optimizers: The optimizers that came later.
        grid: The grid of ranks that share the model.
        free: The memory that is free now.
        taken: The bytes that the home has taken already.

    Returns:
        A plan with the same units. A region that differs from the one in `planned` took nothing before, or takes
        nothing any more.

    Raises:
        UsageError: if noria cannot update with these optimizers.
    """
    policy, units = planned.policy, planned.units
    kernels = Kernels.of(units, optimizers, policy)
    kernels.check_states()
    if grid is not None:
        kernels.check_shared()
    without_masters = masters_note(kernels, planned.partition, grid) if kernels.updates_bfloat16() else ""
    notes = [*kernels.fp32_states(), *filter(None, [without_masters])]
    states, state_bytes = state_places(kernels, notes)
    budgets, first = planned.budgets, _regions(planned, kernels, frozenset(), state_bytes)
    may_stay = bytes_to_stay(kernels, first, states, grid, planned.device, budgets)
    stays = choose_stays(kernels, may_stay, budgets, notes)
    streamed = choose_streamed(kernels, stays, planned.device)
    draftable = undo_log_needs(kernels, stays | streamed)
    more = sum(region.bytes for region in new_regions(planned, first))
    left = left_for_drafts(budgets, free, taken, more)
    drafted = choose_drafts(kernels, draftable, budgets.drafts, left, planned.device, notes)
    regions = _regions(planned, kernels, drafted, state_bytes)
    grown = dataclasses.replace(
        planned,
        regions=regions,
        kernels=kernels.by_optimizer,
        kernel_names=kernels.names(),
        fused=kernels.fused,
        may_stay=may_stay,
        drafted=drafted,
        draftable=draftable,
        states=states,
        streamed={unit: pieces_of(units[unit], unit in kernels.fused, regions, states) for unit in streamed},
        update_flops=update_flops(units, optimizers),
        unpredicted=notes,
        without_masters=without_masters,
    )
    return with_stays(grown, stays) if stays or planned.stays or streamed else grown


def new_regions(planned: WrapPlan, regions: list[Region]) -> list[Region]:
    """Returns those that are yet to be taken."""
    before = {region.purpose: region for region in planned.regions}
    return [region for region in regions if region.bytes and region != before[region.purpose]]


def _regions(planned: WrapPlan, kernels: Kernels, drafted: frozenset[int], state_bytes: int) -> list[Region]:
    """Returns the arenas of the home. Plain masters stay where they are as long as torch updates some of them."""
    before = {region.purpose: region for region in planned.regions}
    wanted = {region.purpose: region for region in home_regions(kernels, drafted, state_bytes)}
    if "masters" in wanted and wanted["masters"].bytes:
        for purpose in ("masters", "update scratch"):
            wanted[purpose] = before[purpose]
    return list(wanted.values())
