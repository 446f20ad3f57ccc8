"""What integrations choose if the policy leaves it open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["with_defaults"]


def with_defaults(fields: Mapping[str, Any], model: nn.Module, device: torch.device, trains: bool) -> dict[str, Any]:
    """Returns the policy's fields, with the framework's device, and with masters for weights trained in bfloat16."""
    chosen = {"device": device, **fields}
    if trains and any(p.requires_grad and p.dtype is torch.bfloat16 for p in model.parameters()):
        chosen.setdefault("dtype", torch.bfloat16)
    return chosen
