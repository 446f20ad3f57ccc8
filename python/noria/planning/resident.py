"""Says whether all of a model can stay on the device, with its optimizer's state, and what that takes."""

from __future__ import annotations

import torch

from noria import _C
from noria._errors import UsageError, usage_error
from noria.dist.ranks import Grid
from noria.model.layout import Region
from noria.model.moment_formats import MOMENTS
from noria.planning.budgets import Budgets
from noria.planning.kernels import Kernels
from noria.policy import format_bytes

__all__ = ["MIRRORED", "purpose_on_device", "refuse_if_not_resident", "resident_rows"]

MIRRORED = ("working copies", "low bits", *MOMENTS)
"""The arenas of the home that lie on the device too, if all of the model stays there."""


def purpose_on_device(purpose: str) -> str:
    """Returns the name in the ledger of an arena's mirror on the device."""
    return f"{purpose} that stay"


def resident_rows(regions: list[Region]) -> dict[str, int]:
    """Returns the bytes that noria takes on the device if all of the model stays there, by purpose."""
    return {
        purpose_on_device(region.purpose): region.bytes
        for region in regions
        if region.purpose in MIRRORED and region.bytes
    }


def refuse_if_not_resident(
    kernels: Kernels, regions: list[Region], budgets: Budgets, grid: Grid | None, device: torch.device
) -> None:
    """Raises UsageError if not all of the model can stay on the device. On CUDA torch has half of its memory."""
    policy = kernels.policy
    expected, asked = 'resident="all"', 'resident="none", which streams'
    if grid is not None:
        raise usage_error(f"{expected} with a model that this rank has alone", "ranks that share it", f"leave {asked}")
    if policy.update == "backward":
        raise usage_error(f'{expected} with update="auto" or "blocking"', 'update="backward"', "choose one of the two")
    if policy.activations != "keep":
        found = f'activations="{policy.activations}"'
        raise usage_error(f'{expected} with activations="keep"', found, "choose one of the two")
    if policy.reads == "home":
        raise usage_error(f"{expected} alone, which shows weights at any time", 'reads="home" too', "leave reads out")
    if refusal := _refusal_of_updates(kernels, expected):
        raise refusal
    if device.type != "cpu" and kernels.optimizers and not _C.has_kernel_images():
        raise usage_error(
            f"{expected} in a build of noria with kernels for devices",
            "one that was built without nvcc",
            f"build noria where there is an nvcc, or leave {asked}",
        )
    if budgets.device is None:
        return
    shares = 1 if device.type == "cpu" else 2
    own = sum(resident_rows(regions).values())
    gradients = sum(unit.gradients for unit in kernels.units)
    needed = shares * (own + gradients)
    if budgets.device < needed:
        raise usage_error(
            f"device_memory of at least {format_bytes(needed)} ({needed} bytes) for {expected}: {format_bytes(own)} of "
            f"weights and state, {format_bytes(gradients)} of gradients"
            + (", the same again for activations" * (shares > 1)),
            format_bytes(budgets.device),
            f"raise device_memory, or say {asked}",
        )


def _refusal_of_updates(kernels: Kernels, expected: str) -> UsageError | None:
    if kernels.policy.state_dtype != "fp32" and kernels.optimizers:
        found = f'state_dtype="{kernels.policy.state_dtype}"'
        return usage_error(f'{expected} with state_dtype="fp32"', found, "choose one of the two")
    held = set().union(*kernels.held()) if kernels.optimizers else set()
    for unit in kernels.units:
        if unit.index in kernels.fused or not any(
            slot.trainable and slot.parameter in held for slot in unit.parameters
        ):
            continue
        return usage_error(
            f"{expected} with updates by noria's own kernels",
            f'"{unit.name}", which torch updates on the host',
            "choose AdamW, Adam, SGD or noria.optim.Lion on fp32 weights or masters",
        )
    return None
