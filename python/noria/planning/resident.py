"""Chooses the units that stay on the device with their optimizer's state, and says what that takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence

import torch

from noria import _C
from noria._errors import UsageError, usage_error
from noria.dist.ranks import Grid
from noria.model.layout import TORCH_STATE, HomeUnit, Region, StatePlace, aligned
from noria.model.moment_formats import MOMENTS
from noria.planning.budgets import Budgets
from noria.planning.kernels import Kernels
from noria.planning.spread import spread_evenly
from noria.policy import format_bytes, to_bytes

__all__ = ["STATE_ARENAS", "Mirror", "all_fit", "bytes_to_stay", "choose_stays", "gradient_bytes", "mirrors_of"]

STATE_ARENAS = (*MOMENTS, TORCH_STATE)
"""The arenas of the home in which optimizers keep their state."""


@dataclasses.dataclass(frozen=True)
class Mirror:
    """Describes the arena on the device for the parts of an arena of the home that belong to units at rest.

    `parts`: by unit, then by offset at home, what is copied: its offset here, and its bytes.
    """

    region: Region
    parts: dict[int, dict[int, tuple[int, int]]]


def mirrors_of(
    units: list[HomeUnit],
    fused: Container[int],
    regions: Iterable[Region],
    states: Sequence[dict[tuple[int, str], StatePlace]],
) -> dict[str, Mirror]:
    """Returns, by purpose of an arena of the home, where its parts lie on the device if these units are at rest.

    Plain masters are those of units that torch updates. What it keeps has a place for each tensor.
    """
    found: dict[str, Mirror] = {}
    count = 1 + max((unit.index for unit in units), default=-1)
    for region in regions:
        if region.purpose == TORCH_STATE:
            ranges = _ranges_of_state(units, states)
        elif region.purpose in ("working copies", "low bits", "masters", *MOMENTS):
            is_plain = region.purpose == "masters"
            own = [unit.index for unit in units if not (is_plain and unit.index in fused)]
            ranges = {unit: [(region.offsets[unit], region.sizes[unit])] for unit in own}
        else:
            continue
        sizes = [sum(aligned(size) for _, size in ranges.get(index, ())) for index in range(count)]
        there = Region.of(f"{region.purpose} at rest", sizes)
        parts: dict[int, dict[int, tuple[int, int]]] = {}
        for unit, each in ranges.items():
            offset, parts[unit] = there.offsets[unit], {}
            for at_home, size in each:  # a tensor without elements has the offset of the next one, here too
                parts[unit][at_home] = offset, size
                offset += aligned(size)
        found[region.purpose] = Mirror(there, parts)
    return found


def _ranges_of_state(
    units: Iterable[HomeUnit], states: Sequence[dict[tuple[int, str], StatePlace]]
) -> dict[int, list[tuple[int, int]]]:
    """Returns the offset and the bytes of each tensor that torch's optimizers keep, by unit."""
    unit_of = {slot.index: unit.index for unit in units for slot in unit.parameters}
    found: dict[int, list[tuple[int, int]]] = {unit.index: [] for unit in units}
    for places in states:
        for (index, _), place in places.items():
            if index in unit_of:
                found[unit_of[index]].append((place.offset, place.num_bytes))
    return found


def bytes_to_stay(
    kernels: Kernels,
    regions: list[Region],
    states: Sequence[dict[tuple[int, str], StatePlace]],
    grid: Grid | None,
    device: torch.device,
    budgets: Budgets,
) -> dict[int, int]:
    """Returns the bytes on the device that each unit takes if it stays, by index. Units that cannot stay are missing.

    Raises UsageError if the policy asks for units that stay, and none can. With "auto" none is there then.
    """
    policy = kernels.policy
    if policy.resident == "auto" and (policy.window != "auto" or budgets.device is None):
        return {}
    if (refusal := _refusal_of_policy(kernels, grid, device)) is not None:
        if policy.resident in ("none", "auto"):
            return {}
        raise refusal
    can_stay = [unit for unit in kernels.units if _can_stay(kernels, unit)]
    mirrors = mirrors_of(can_stay, kernels.fused, regions, states).values()
    return {unit.index: sum(mirror.region.sizes[unit.index] for mirror in mirrors) for unit in can_stay}


def choose_stays(
    kernels: Kernels,
    may_stay: dict[int, int],
    budgets: Budgets,
    notes: list[str],
) -> frozenset[int]:
    """Returns the units that stay on the device, by the policy's `resident`. With "auto" none: costs come first.

    Of an amount, units are spread evenly over the model: while one that stays computes, the next that streams is
    fetched. `notes` gets a text if none stays.

    Raises UsageError if "all" is asked for and not all can stay, or if all would, and the device has no room.
    """
    policy = kernels.policy
    if policy.resident in ("none", "auto"):
        return frozenset()
    if policy.resident == "all":
        stays = frozenset(unit.index for unit in kernels.units)
        if budgets.moves_activations:
            raise usage_error(
                'resident="all" with activations="keep" or "recompute"',
                f'activations="{policy.activations}", which moves what blocks save',
                'say resident="auto" or an amount, or choose one of the two',
            )
        if strange := sorted(stays - set(may_stay)):
            raise usage_error(
                'resident="all" with kernels of noria\'s that also run on the device, or optimizer_device="device"',
                f'"{kernels.units[strange[0]].name}", which only the host updates',
                'say optimizer_device="device", or resident="auto" or an amount, which let the others stay, or choose '
                "AdamW, Adam, SGD or noria.optim.Lion on fp32 weights or masters",
            )
    else:
        stays = frozenset(spread_evenly(may_stay, to_bytes(policy.resident) or 0))
        if budgets.moves_activations and len(stays) == len(kernels.units):  # one streams, so that blocks are visited
            stays -= {min(may_stay, key=lambda unit: may_stay[unit])}
        if not stays:
            least = min(may_stay.values(), default=0)
            smallest = f"the smallest unit takes {format_bytes(least)} there"
            why = smallest if may_stay else "only the host updates them"
            notes.append(f"no unit stays on the device: {why}")
    if len(stays) == len(kernels.units) and not all_fit(kernels.units, may_stay, budgets):
        raise _refusal_of_room(kernels.units, may_stay, budgets)
    return stays


def _refusal_of_policy(kernels: Kernels, grid: Grid | None, device: torch.device) -> UsageError | None:
    policy = kernels.policy
    expected, asked = f'resident="{policy.resident}"', 'resident="none", which streams'
    if grid is not None:
        return usage_error(f"{expected} with a model that this rank has alone", "ranks that share it", f"leave {asked}")
    if policy.update == "backward":
        return usage_error(f'{expected} with update="auto" or "blocking"', 'update="backward"', "choose one of the two")
    if policy.reads == "home":
        return usage_error(f"{expected} alone, which shows weights at any time", 'reads="home" too', "leave reads out")
    if policy.state_dtype != "fp32" and kernels.optimizers:
        found = f'state_dtype="{policy.state_dtype}"'
        return usage_error(f'{expected} with state_dtype="fp32"', found, "choose one of the two")
    if device.type != "cpu" and kernels.fused and not _C.has_kernel_images():
        return usage_error(
            f"{expected} in a build of noria with kernels for devices",
            "one that was built without nvcc",
            f"build noria where there is an nvcc, or leave {asked}",
        )
    return None


def _refusal_of_room(units: list[HomeUnit], may_stay: dict[int, int], budgets: Budgets) -> UsageError:
    own, gradients = sum(may_stay.values()), gradient_bytes(units, may_stay)
    needed = budgets.shares * (own + gradients)
    return usage_error(
        f'device_memory of at least {format_bytes(needed)} ({needed} bytes) for resident="all": '
        f"{format_bytes(own)} of weights and state, {format_bytes(gradients)} of gradients"
        + (", the same again for activations" * (budgets.shares > 1)),
        format_bytes(budgets.device or 0),
        'raise device_memory, or say resident="none", which streams',
    )


def all_fit(units: list[HomeUnit], may_stay: dict[int, int], budgets: Budgets) -> bool:
    """Returns True if all units can stay, with their gradients. There is no window then, and blocks are not visited.

    So at least one unit streams if what blocks save may leave the device.
    """
    if len(may_stay) < len(units) or budgets.moves_activations:
        return False
    needed = sum(may_stay.values()) + gradient_bytes(units, may_stay)
    return budgets.device is None or budgets.shares * needed <= budgets.device


def gradient_bytes(units: list[HomeUnit], stays: Container[int]) -> int:
    """Returns the bytes of the gradients of units that stay. They lie in torch's memory."""
    return sum(unit.gradients for unit in units if unit.index in stays)


def _can_stay(kernels: Kernels, unit: HomeUnit) -> bool:
    """Returns True if an update on the device has the bits that the policy asks for, or if nothing in it is trained.

    noria's kernels have the same bits everywhere. torch's code has those of the device on which it runs.
    """
    if not any(slot.trainable for slot in unit.parameters):
        return True
    if unit.index in kernels.fused:
        return all(rule.is_elementwise for rule in kernels.fused[unit.index])
    if kernels.policy.optimizer_device == "device":
        return True
    held = set().union(*kernels.held()) if kernels.optimizers else set()
    return not any(slot.trainable and slot.parameter in held for slot in unit.parameters)
