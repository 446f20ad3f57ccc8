"""Shows the device's memory as tensors."""

from __future__ import annotations

from typing import Protocol

import torch

from noria import _C
from noria.model.layout import HomeParameter, StatePlace

__all__ = ["DeviceMemory", "tensor_at"]


def tensor_at(
    address: int, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Returns a tensor over memory that it does not own."""
    count = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return _C.bytes_at(address, count * dtype.itemsize, str(device)).view(dtype).as_strided(shape, strides)


class DeviceMemory(Protocol):
    """Knows where on the device the weights and the state of some parameters lie."""

    @property
    def device(self) -> torch.device: ...

    def tensor(self, purpose: str, slot: HomeParameter, dtype: torch.dtype) -> torch.Tensor:
        """Returns a parameter's part of an arena, as a tensor of the device."""

    def state(self, slot: HomeParameter, place: StatePlace, strides: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor of torch's state on the device."""
