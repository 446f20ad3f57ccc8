"""Chooses what lies in files, because `host_memory` has no room for it: moments and low bits, then frozen weights."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Container, Mapping, Sequence

from noria.model.file_layout import FILE_ALIGNMENT, IN_FILES, NUM_STATE_SLOTS, NUM_WEIGHTS_SLOTS, WEIGHTS, FilePlan
from noria.model.layout import HomeUnit, Region, aligned
from noria.planning.kernels import Kernels
from noria.planning.spread import spread_evenly

__all__ = ["WEIGHTS_ALIGNMENT", "choose_files"]

WEIGHTS_ALIGNMENT = max(FILE_ALIGNMENT, mmap.PAGESIZE)
"""Bytes: what lies in files of the arena of weights begins and ends at a multiple of this, to be mapped."""


def choose_files(kernels: Kernels, regions: Sequence[Region], room: int, cap: int | None) -> FilePlan:
    """Chooses as few bytes as must lie in files, spread evenly over the model, so that the home fits into `room`.

    The slots are as large as the largest record, so units that are much larger than others may be left out. Frozen
    weights lie in files only if all state that can lie there is not enough. `cap`: the most bytes in files; None: any
    number. If the home cannot fit, the plan comes as close as it can.
    """
    needed = sum(region.bytes for region in regions)
    if needed <= room:
        return FilePlan()
    chosen = _choose_state(regions, kernels.fused, needed - room, cap)
    weights = {} if kernels.policy.reads == "home" else _weights_of(regions, kernels.units)
    excess = _left_over(chosen, regions, needed - room)
    if excess > 0 and weights:
        left = None if cap is None else cap - chosen.file_bytes
        chosen = dataclasses.replace(chosen, weights=_choose_weights(weights, excess, left))
    return dataclasses.replace(chosen, folders=kernels.policy.folders)


def _choose_state(regions: Sequence[Region], fused: Container[int], excess: int, cap: int | None) -> FilePlan:
    """Chooses the units whose state lies in files. `excess`: the bytes by which the home is too large."""
    whole = _plan_of(regions, fused)
    freed = _freed(whole, regions)
    best: tuple[int, int, FilePlan] | None = None  # bytes that do not fit, bytes in files
    for largest in sorted(set(whole.sizes.values())):
        candidates = {unit: freed[unit] for unit, size in whole.sizes.items() if size <= largest}
        least = excess + min(NUM_STATE_SLOTS, len(candidates)) * largest
        stay = set(spread_evenly(candidates, max(sum(candidates.values()) - least, 0)))
        chosen = _part_of(whole, [unit for unit in candidates if unit not in stay], cap)
        found = (max(_left_over(chosen, regions, excess), 0), chosen.file_bytes, chosen)
        if best is None or found[:2] < best[:2]:
            best = found
    return best[2] if best and best[0] < excess else FilePlan()  # slots may take more than they save


def _choose_weights(ranges: Mapping[int, tuple[int, int]], excess: int, cap: int | None) -> dict[int, tuple[int, int]]:
    """Chooses the units whose frozen weights lie in files."""
    sizes = {unit: end - begin for unit, (begin, end) in ranges.items()}
    best: tuple[int, int, list[int]] | None = None
    for largest in sorted(set(sizes.values())):
        candidates = {unit: size for unit, size in sizes.items() if size <= largest}
        least = excess + min(NUM_WEIGHTS_SLOTS, len(candidates)) * largest
        stay = set(spread_evenly(candidates, max(sum(candidates.values()) - least, 0)))
        chosen = {unit: size for unit, size in candidates.items() if unit not in stay}
        if cap is not None and sum(chosen.values()) > cap:
            chosen = {unit: chosen[unit] for unit in spread_evenly(chosen, cap)}
        slots = min(NUM_WEIGHTS_SLOTS, len(chosen)) * max(chosen.values(), default=0)
        in_files = sum(chosen.values())
        found = (max(excess + slots - in_files, 0), in_files, list(chosen))
        if best is None or found[:2] < best[:2]:
            best = found
    units = best[2] if best and best[0] < excess else []  # slots may take more than they save
    return {unit: ranges[unit] for unit in units}


def _freed(plan: FilePlan, regions: Sequence[Region]) -> dict[int, int]:
    """Returns, by unit, the bytes of host memory that its record frees."""
    parts = [region for region in regions if region.purpose in IN_FILES]
    return {unit: sum(region.sizes[unit] for region in parts) for unit in plan.sizes}


def _left_over(plan: FilePlan, regions: Sequence[Region], excess: int) -> int:
    """Returns the bytes by which the home is too large if the plan's state lies in files."""
    return excess + plan.memory - sum(_freed(plan, regions).values())


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


def _weights_of(regions: Sequence[Region], units: Sequence[HomeUnit]) -> dict[int, tuple[int, int]]:
    """Returns, by unit, what of its frozen weights can lie in a file: whole pages of their arena."""
    arena = next(region for region in regions if region.purpose == WEIGHTS)
    found: dict[int, tuple[int, int]] = {}
    for unit in units:
        offset = arena.offsets[unit.index]
        begin = aligned(offset + unit.home_gradients, WEIGHTS_ALIGNMENT) - offset
        end = (offset + unit.home_weights) // WEIGHTS_ALIGNMENT * WEIGHTS_ALIGNMENT - offset
        if begin < end:
            found[unit.index] = begin, end
    return found


def _part_of(plan: FilePlan, units: Sequence[int], cap: int | None) -> FilePlan:
    """Returns the plan for these units alone. If the cap is too small, drops units, evenly over the model."""
    sizes = {unit: plan.sizes[unit] for unit in units}
    if cap is not None and sum(sizes.values()) > cap:
        sizes = {unit: sizes[unit] for unit in spread_evenly(sizes, cap)}
    return FilePlan({unit: plan.offsets[unit] for unit in sizes}, sizes)
