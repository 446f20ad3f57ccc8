"""Chooses the units that stay on the device with their optimizer's state, and says what that takes."""

from __future__ import annotations

from collections.abc import Container

import torch

from noria import _C
from noria._errors import UsageError, usage_error
from noria.dist.ranks import Grid
from noria.model.layout import HomeUnit, Region
from noria.model.moment_formats import MOMENTS
from noria.planning.budgets import Budgets
from noria.planning.kernels import Kernels
from noria.planning.spread import spread_evenly
from noria.policy import format_bytes, to_bytes

__all__ = ["MIRRORED", "all_fit", "bytes_to_stay", "choose_stays", "gradient_bytes", "mirror_of"]

MIRRORED = ("working copies", "low bits", *MOMENTS)
"""The arenas of the home whose parts lie on the device too, for units that stay there."""


def mirror_of(region: Region, stays: Container[int]) -> Region:
    """Returns the arena on the device for the parts of these units in an arena of the home."""
    sizes = [size if unit in stays else 0 for unit, size in enumerate(region.sizes)]
    return Region.of(f"{region.purpose} that stay", sizes)


def bytes_to_stay(
    kernels: Kernels, regions: list[Region], grid: Grid | None, device: torch.device, budgets: Budgets
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
    mirrored = [region for region in regions if region.purpose in MIRRORED]
    return {
        unit.index: sum(region.sizes[unit.index] for region in mirrored)
        for unit in kernels.units
        if _can_stay(kernels, unit)
    }


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
                'resident="all" with updates by noria\'s own kernels',
                f'"{kernels.units[strange[0]].name}", which torch updates',
                'say resident="auto" or an amount, which let the others stay, or choose AdamW, Adam, SGD or '
                "noria.optim.Lion on fp32 weights or masters",
            )
    else:
        stays = frozenset(spread_evenly(may_stay, to_bytes(policy.resident) or 0))
        if budgets.moves_activations and len(stays) == len(kernels.units):  # one streams, so that blocks are visited
            stays -= {min(may_stay, key=lambda unit: may_stay[unit])}
        if not stays:
            least = min(may_stay.values(), default=0)
            why = f"the smallest unit takes {format_bytes(least)} there" if may_stay else "torch updates all of them"
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
    if device.type != "cpu" and kernels.optimizers and not _C.has_kernel_images():
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
    """Returns True if noria's own kernels can update all that is trained in the unit, or if nothing is."""
    held = set().union(*kernels.held()) if kernels.optimizers else set()
    return unit.index in kernels.fused or not any(slot.trainable and slot.parameter in held for slot in unit.parameters)
