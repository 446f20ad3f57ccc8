"""Resolves a policy's amounts of memory to bytes, once for each wrap call."""

from __future__ import annotations

import dataclasses

from noria.host.limits import Free
from noria.model.layout import HomeUnit
from noria.policy import Policy, to_bytes

__all__ = ["Budgets", "first_room", "resident_bytes", "room_on_device"]


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Holds amounts in bytes. None: the policy sets no limit."""

    device: int | None
    """For noria and, on CUDA, for activations."""
    host: int | None
    """For the home."""
    drafts: int | None
    """For undo logs."""
    activations: int | None
    """For activations that blocks save and that stay on the device."""
    moves_activations: bool = False
    """True if what blocks save may leave the device."""
    shares: int = 1
    """How many shares of `device` there are; noria has one. On CUDA torch has another one, for activations."""

    @staticmethod
    def of(policy: Policy, free: Free, units: list[HomeUnit]) -> Budgets:
        """Returns the amounts on a machine with this memory free."""
        if free.device is None:
            device = to_bytes(policy.device_memory, resident_bytes(units))
        else:
            device = room_on_device(policy, free.device, units)
        shares = 1 if free.device is None else 2
        activations = first_room(policy, device, shares)
        moves = policy.activations == "offload" or activations is not None
        return Budgets(device, to_bytes(policy.host_memory), to_bytes(policy.draft_memory), activations, moves, shares)


def first_room(policy: Policy, device: int | None, shares: int) -> int | None:
    """Returns the bytes on the device for activations that stay there, before the planner chooses. None: no limit.

    `device`, `shares`: see `Budgets`.
    """
    asked = to_bytes(policy.activation_memory)
    if asked is None and policy.activations == "auto" and shares > 1 and device is not None:
        return device // 4
    return asked


def resident_bytes(units: list[HomeUnit]) -> int:
    """Returns the bytes on the device that keep all units there, with the gradient buffers of the two largest."""
    return sum(unit.weights for unit in units) + sum(sorted((unit.gradients for unit in units), reverse=True)[:2])


# A loss holds logits, log-probabilities and the gradient of the logits, each in fp32.
_LOSS_BYTES_PER_LOGIT = 3 * 4
_LOSS_TOKENS = 16 << 10


def room_on_device(policy: Policy, device: tuple[int, int], units: list[HomeUnit]) -> int:
    """Returns the bytes on the device for noria and activations. The window takes half of them.

    `device`: bytes free, and total. "auto" leaves room for the loss, at most a quarter of the free bytes. The tokens of
    a batch are not known yet, so it assumes a batch that hides the traffic.
    """
    free, total = device
    asked = to_bytes(policy.device_memory, total)
    if asked is not None:
        return asked
    widths = [slot.shape[0] for unit in units if not unit.is_block for slot in unit.parameters if len(slot.shape) == 2]
    return free - min(_LOSS_TOKENS * max(widths, default=0) * _LOSS_BYTES_PER_LOGIT, free // 4)
