"""Plans optimizers that are made after `noria.wrap(model)`: the home grows by what they need, and the rest stays.

Units, window and held gradients were planned with the model. The optimizers add their moments and other state. Under a
bfloat16 policy the masters, plain until then, become split where noria's kernels update.
"""

from __future__ import annotations

import dataclasses

from torch.optim import Optimizer

from noria.dist.ranks import Grid
from noria.host.limits import Free
from noria.model.layout import Region
from noria.planning.draft_choice import choose_drafts, undo_log_needs
from noria.planning.home_regions import home_regions, state_places
from noria.planning.kernels import Kernels
from noria.planning.wrap_plan import WrapPlan, masters_note

__all__ = ["plan_optimizers"]


def plan_optimizers(planned: WrapPlan, optimizers: list[Optimizer], grid: Grid | None, free: Free) -> WrapPlan:
    """Returns the plan of the wrapped models with these optimizers. It changes nothing.

    Args:
        planned: The plan of the wrap call, which had no optimizer.
        optimizers: The optimizers that came later.
        grid: The grid of ranks that share the model.
        free: The memory that is free now, beside the home.

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
    if free.share is not None:  # without a home, as drafts are chosen
        share = dataclasses.replace(free.share, free=free.share.free + planned.home_bytes)
        free = dataclasses.replace(free, share=share)
    draftable = undo_log_needs(kernels)
    drafted = choose_drafts(kernels, draftable, state_bytes, planned.budgets, planned.device, free, notes)
    return dataclasses.replace(
        planned,
        regions=_regions(planned, kernels, drafted, state_bytes),
        kernels=kernels.by_optimizer,
        kernel_names=kernels.names(),
        fused=kernels.fused,
        drafted=drafted,
        draftable=draftable,
        states=states,
        unpredicted=notes,
        without_masters=without_masters,
    )


def _regions(planned: WrapPlan, kernels: Kernels, drafted: frozenset[int], state_bytes: int) -> list[Region]:
    """Returns the arenas of the home. Plain masters stay where they are as long as torch updates some of them."""
    before = {region.purpose: region for region in planned.regions}
    wanted = {region.purpose: region for region in home_regions(kernels, drafted, state_bytes)}
    if "masters" in wanted and wanted["masters"].bytes:
        for purpose in ("masters", "update scratch"):
            wanted[purpose] = before[purpose]
    return list(wanted.values())
