"""Lays out the home: the arenas of host memory, and where in them the state lies that torch keeps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import torch

from noria import _C
from noria.model.layout import (
    LEAST_RING_SLOTS,
    TORCH_STATE,
    UNDO_LOGS,
    HomeParameter,
    HomeUnit,
    Region,
    Ring,
    StatePlace,
    aligned,
    factored_region,
    held_region,
    scales_region,
)
from noria.model.moment_formats import MOMENTS, SCALES, moment_bytes, scale_bytes
from noria.model.partition import Partition
from noria.model.shadow_optimizer import is_array, predict_state
from noria.planning.kernels import Kernels

__all__ = ["gradient_rings", "home_regions", "least_ring_bytes", "state_places", "undo_log_bytes"]

# Slots of the gradient ring, if host memory has room, as a share of the units. Long updates can then go on behind the
# next forward, and do not hold backward up. With files some updates are postponed, so the share is larger.
_RING_SHARE = 1 / 4
_RING_SHARE_WITH_FILES = 1 / 3


def home_regions(kernels: Kernels, drafted: frozenset[int], state_bytes: int) -> list[Region]:
    """Returns the home's arenas. `drafted`: indices of the units that have undo logs."""
    units, fused, policy = kernels.units, kernels.fused, kernels.policy
    regions = [
        Region.of("working copies", (unit.home_weights for unit in units)),
        held_region(units),
    ]
    if policy.update != "backward":
        regions.append(scales_region(units))
    if policy.dtype is not None:
        plain = [0 if unit.index in fused else unit.home_gradients * 2 for unit in units]
        low = [unit.home_gradients if unit.index in fused else 0 for unit in units]
        regions.append(Region.of("low bits", low))
        regions.append(Region.of("masters", plain))
        regions.append(Region.of("update scratch", [max(plain)]))
    for number, purpose in enumerate(MOMENTS):
        sizes = (moment_bytes(unit, number, policy.dtype, policy.state_dtype) for unit in units)
        regions.append(Region.of(purpose, sizes))
        sizes = (scale_bytes(unit, number, policy.state_dtype) for unit in units)
        regions.append(Region.of(SCALES[number], sizes))
    factored = {unit for unit, rules in fused.items() if any(rule.is_factored for rule in rules)}
    regions.append(factored_region(units, factored))
    regions.append(Region.of(TORCH_STATE, [state_bytes]))
    logged = (undo_log_bytes(unit) if unit.index in drafted else 0 for unit in units)
    regions.append(Region.of(UNDO_LOGS, logged))
    return regions


def undo_log_bytes(unit: HomeUnit) -> int:
    return aligned(_C.undo_log_bytes(*unit.undo_log))


def state_places(kernels: Kernels, notes: list[str]) -> tuple[list[dict[tuple[int, str], StatePlace]], int]:
    """Returns, by optimizer, the place in TORCH_STATE of each tensor that torch keeps, and the arena's bytes.

    Adds to `notes` what is not known before the first step.
    """
    states: list[dict[tuple[int, str], StatePlace]] = []
    ends = _Ends(kernels.units)
    for optimizer, kernel in zip(kernels.optimizers, kernels.by_optimizer, strict=True):
        places: dict[tuple[int, str], StatePlace] = {}
        states.append(places)
        slots = [
            slot
            for unit in kernels.units
            for slot in unit.parameters
            if kernel != "fused" or unit.index not in kernels.fused
        ]
        slots_by_index = {slot.index: slot for slot in slots}
        predicted = predict_state(optimizer, slots) if slots else {}
        if predicted is None:
            notes.append(f"the state of {type(optimizer).__name__} is not known before its first step")
        for index, tensors in (predicted or {}).items():
            for key, tensor in tensors.items():
                if is_array(key, tensor):
                    places[(index, key)] = ends.add(slots_by_index[index], tensor)
    return states, ends.most


def gradient_rings(parts: Partition, units: list[HomeUnit], has_files: bool) -> Iterator[Ring]:
    """Yields the rings that update="backward" may have in place of held gradients, the best and largest one first.

    If several modules use a unit, its gradients come in parts, so it gets a place of its own.
    """
    users = Counter(
        unit for hook in parts.hooks for unit in {slot.unit for n in hook.needs for slot in units[n].parameters}
    )
    in_parts = {unit for unit, count in users.items() if count > 1}
    num_trainable = sum(unit.gradients > 0 for unit in units)
    most = math.ceil((_RING_SHARE_WITH_FILES if has_files else _RING_SHARE) * num_trainable)
    for num_slots in range(max(LEAST_RING_SLOTS, most), LEAST_RING_SLOTS - 1, -1):
        yield Ring.of(units, in_parts, num_slots)


def least_ring_bytes(ring: Ring) -> int:
    """Returns the bytes of the smallest ring with slots in a model that has more of the same units."""
    return ring.in_parts + LEAST_RING_SLOTS * ring.slot_bytes


class _Ends:
    """Lays out the state that torch keeps, and tracks where it ends on each rank that shares the model.

    Ranks have parts of different parameters, yet all take as much memory as the rank that needs most (`most`).
    """

    def __init__(self, units: list[HomeUnit]) -> None:
        self._own = 0
        self._ends = [0] * max((unit.num_shards for unit in units), default=1)

    @property
    def most(self) -> int:
        return max(self._ends)

    def add(self, slot: HomeParameter, whole: torch.Tensor) -> StatePlace:
        is_sharded = bool(slot.shard_ends) and whole.shape == slot.shape
        shape = tuple(slot.like.shape if is_sharded else whole.shape)
        place = StatePlace(self._own, shape, whole.dtype)
        self._own += aligned(math.prod(shape) * whole.itemsize)
        for rank in range(len(self._ends)):
            self._ends[rank] += aligned((slot.count_on(rank) if is_sharded else whole.numel()) * whole.itemsize)
        return place
