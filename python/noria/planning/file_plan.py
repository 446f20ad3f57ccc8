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
    whole = _plan_of(regions, kernels.fused)
    parts = [region for region in regions if region.purpose in IN_FILES]
    freed = {unit: sum(region.sizes[unit] for region in parts) for unit in whole.sizes}
    units = _fewest(whole.sizes, freed, NUM_STATE_SLOTS, needed - room, cap)
    chosen = FilePlan({unit: whole.offsets[unit] for unit in units}, {unit: whole.sizes[unit] for unit in units})
    excess = needed + chosen.memory - room - sum(freed[unit] for unit in units)
    if excess > 0 and kernels.policy.reads != "home":
        ranges = _weights_of(regions, kernels.units)
        sizes = {unit: end - begin for unit, (begin, end) in ranges.items()}
        left = None if cap is None else cap - chosen.file_bytes
        units = _fewest(sizes, sizes, NUM_WEIGHTS_SLOTS, excess, left)
        chosen = dataclasses.replace(chosen, weights={unit: ranges[unit] for unit in units})
    return dataclasses.replace(chosen, folders=kernels.policy.folders)


def _fewest(
    sizes: Mapping[int, int], freed: Mapping[int, int], most_slots: int, excess: int, cap: int | None
) -> list[int]:
    """Returns the units whose records lie in files: as few bytes as must, so that the home shrinks by `excess`.

    Args:
        sizes: the bytes of each record, by unit.
        freed: the bytes of host memory that it frees. Slots take some of them again.
        most_slots: how many slots there are at most, each as large as the largest record.
        excess: bytes. If that cannot be, the units come as close as they can.
        cap: the most bytes in files; None: any number. If it is too small, units stay, evenly over the model.
    """
    best: tuple[int, int, list[int]] | None = None  # bytes that do not fit, bytes in files
    for largest in sorted(set(sizes.values())):
        candidates = {unit: freed[unit] for unit, size in sizes.items() if size <= largest}
        least = excess + min(most_slots, len(candidates)) * largest
        stay = set(spread_evenly(candidates, max(sum(candidates.values()) - least, 0)))
        chosen = {unit: sizes[unit] for unit in candidates if unit not in stay}
        in_files = sum(chosen.values())
        if cap is not None and in_files > cap:
            chosen = {unit: chosen[unit] for unit in spread_evenly(chosen, cap)}
            in_files = sum(chosen.values())
        slots = min(most_slots, len(chosen)) * max(chosen.values(), default=0)
        found = (max(excess + slots - sum(freed[unit] for unit in chosen), 0), in_files, list(chosen))
        if best is None or found[:2] < best[:2]:
            best = found
    return best[2] if best and best[0] < excess else []  # slots may take more than they save


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
