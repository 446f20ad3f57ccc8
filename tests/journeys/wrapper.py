"""A weight without bytes of its own, as torchao makes them: int8 codes and scales inside, one scale a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.journeys.pairs import WIDTH

_aten = torch.ops.aten


class Codes(torch.Tensor):
    """Is what `codes * scale` gives. `saves`: linear layers save the weight itself, and make its values again."""

    codes: torch.Tensor
    scale: torch.Tensor
    saves: bool

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, saves: bool) -> Codes:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, saves: bool) -> None:
        self.codes, self.scale, self.saves = codes, scale, saves

    @staticmethod
    def of(value: torch.Tensor, saves: bool = False) -> Codes:
        scale = value.abs().amax(1, keepdim=True) / 127
        return Codes((value / scale).round().to(torch.int8), scale, saves)

    def values(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        return ["codes", "scale"], self.saves

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], saves: bool, size: object, stride: object) -> Codes:
        return Codes(inner["codes"], inner["scale"], saves)

    def __repr__(self) -> str:
        return f"Codes(shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return SavesCodes.apply(x, weight) if weight.saves else F.linear(x, weight.values().to(x.dtype), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own, kwargs = args[0], kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
            return own.changed(lambda each: func(each, **kwargs))
        if func is _aten._to_copy.default:
            return own.changed(lambda each: each.to(kwargs.get("device", each.device), copy=True))
        if func is _aten.copy_.default:
            own.codes.copy_(args[1].codes)
            own.scale.copy_(args[1].scale)
            return own
        raise NotImplementedError(f"{func} of a quantised weight")

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Codes:
        return Codes(change(self.codes), change(self.scale), self.saves)


class SavesCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Codes) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.values().t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad @ weight.values(), None


class Adapted(nn.Module):
    """A quantised linear layer, frozen, and an adapter beside it."""

    def __init__(self, saves: bool = False, tied: nn.Parameter | None = None) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        made = nn.Parameter(Codes.of(torch.randn(WIDTH, WIDTH) * 0.3, saves), requires_grad=False)
        self.base.weight = made if tied is None else tied
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted(saves: bool = False, tied: bool = False, count: int = 5) -> nn.Sequential:
    blocks = [Adapted(saves)]
    while len(blocks) < count:
        blocks.append(Adapted(saves, blocks[0].base.weight if tied and len(blocks) == count - 1 else None))
    return nn.Sequential(*blocks)
