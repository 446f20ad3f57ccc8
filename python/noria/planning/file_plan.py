"""Chooses the units whose moments lie in files, because `host_memory` has no room for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

from noria.model.file_layout import FILE_ALIGNMENT, IN_FILES, NUM_STATE_SLOTS, FilePlan
from noria.model.layout import Region, aligned
from noria.planning.kernels import Kernels
from noria.planning.spread import spread_evenly

__all__ = ["choose_files"]


def choose_files(kernels: Kernels, regions: Sequence[Region], room: int, cap: int | None) -> FilePlan:
    """Chooses as few bytes as must lie in files, spread evenly over the model, so that the home fits into `room`.

    The slots are as large as the largest record, so units that are much larger than others may be left out. `cap`: the
    most bytes in files; None: any number. If the home cannot fit, the plan comes as close as it can.
    """
    needed = sum(region.bytes for region in regions)
    if needed <= room:
        return FilePlan()
    whole = _plan_of(regions, kernels.fused)
    parts = [region for region in regions if region.purpose in IN_FILES]
    freed = {unit: sum(region.sizes[unit] for region in parts) for unit in whole.sizes}
    best: tuple[int, int, FilePlan] | None = None  # bytes that do not fit, bytes in files
    for largest in sorted(set(whole.sizes.values())):
        candidates = {unit: freed[unit] for unit, size in whole.sizes.items() if size <= largest}
        excess = needed + min(NUM_STATE_SLOTS, len(candidates)) * largest - room
        stay = set(spread_evenly(candidates, max(sum(candidates.values()) - excess, 0)))
        chosen = _part_of(whole, [unit for unit in candidates if unit not in stay], cap)
        left = needed + chosen.memory - room - sum(freed[unit] for unit in chosen.sizes)
        found = (max(left, 0), chosen.file_bytes, chosen)
        if best is None or found[:2] < best[:2]:
            best = found
    return dataclasses.replace(best[2] if best else FilePlan(), folders=kernels.policy.folders)


def _plan_of(regions: Sequence[Region], fused: Container[int]) -> FilePlan:
    """Returns the plan in which all moments of these units lie in files."""
    offsets: dict[int, dict[str, int]] = {}
    sizes: dict[int, int] = {}
    by_purpose = {region.purpose: region for region in regions}
    for purpose in IN_FILES:
        region = by_purpose.get(purpose)
        for unit, size in enumerate(region.sizes if region else ()):
            if size and unit in fused:
                begin = sizes.get(unit, 0)
                offsets.setdefault(unit, {})[purpose] = begin
                sizes[unit] = aligned(begin + size)
    return FilePlan(offsets, {unit: aligned(size, FILE_ALIGNMENT) for unit, size in sorted(sizes.items())})


def _part_of(plan: FilePlan, units: Sequence[int], cap: int | None) -> FilePlan:
    """Returns the plan for these units alone. If the cap is too small, drops units, evenly over the model."""
    sizes = {unit: plan.sizes[unit] for unit in units}
    if cap is not None and sum(sizes.values()) > cap:
        sizes = {unit: sizes[unit] for unit in spread_evenly(sizes, cap)}
    return FilePlan({unit: plan.offsets[unit] for unit in sizes}, sizes)
