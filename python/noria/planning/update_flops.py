"""Counts the arithmetic of updates that multiply matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from noria.model.layout import HomeUnit
from noria.model.optimizer_classes import original_class

__all__ = ["update_flops"]


def update_flops(units: Sequence[HomeUnit], optimizers: Iterable[Optimizer]) -> dict[int, float]:
    """Returns the floating-point operations of matrix products in an update, by index of a unit that has some.

    Muon's Newton-Schulz iteration of an m x n matrix, m <= n, multiplies three times: 4 m² n + 2 m³ operations.
    (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024)
    """
    slot_of = {slot.parameter: slot for unit in units for slot in unit.parameters if slot.trainable}
    found: dict[int, float] = {}
    muon = getattr(torch.optim, "Muon", None)
    for optimizer in optimizers:
        if muon is None or original_class(type(optimizer)) is not muon:
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slot = slot_of.get(parameter)
                if slot is not None and len(slot.shape) == 2:
                    m, n = sorted(slot.shape)
                    each = group.get("ns_steps", 5) * (4 * m * m * n + 2 * m**3)
                    found[slot.unit] = found.get(slot.unit, 0.0) + each
    return found
