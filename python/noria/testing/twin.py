"""Trains the plain-PyTorch twin of a bfloat16 run with fp32 masters, and compares bits.

It is slow and obvious on purpose: noria may change memory and order, but the bits must be those of this loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from noria.model.inner_tensors import inner_tensors

__all__ = ["MasterTwin", "assert_same_bits", "first_difference", "round_to_bfloat16"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def round_to_bfloat16(master: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to bfloat16: to nearest, ties away from zero. torch's own cast differs on ties and on NaNs.

    The rule is `(u + 0x8000) >> 16` on the bits, in 32 bits with wrap-around. The result and the 16 low bits of `u`
    then rebuild the master exactly.

    Args:
        master: A float32 tensor of any shape.

    Returns:
        A new bfloat16 tensor of the same shape.

    Raises:
        TypeError: if `master` is not float32.

    Example:
        >>> noria.testing.round_to_bfloat16(torch.tensor([1.00390625]))  # between 1 and the next bfloat16, 1.0078125
        tensor([1.0078], dtype=torch.bfloat16)
    """
    if master.dtype is not torch.float32:
        raise TypeError(f"round_to_bfloat16 takes float32, not {master.dtype}")
    return ((master.detach().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


class MasterTwin:
    """Trains a bfloat16 model through fp32 masters, with an ordinary optimizer.

    `model` is converted in place as by `model.bfloat16()`. Trainable parameters are rounded as in every later step;
    frozen ones get torch's cast. The caller's loop runs forward and backward on `model`, may edit `p.grad`, and calls
    `step()`.

    Args:
        model: A float32 model, whose values are the first masters. It may be bfloat16, too.
        make_optimizer: Gets the masters as a list of nn.Parameter in the order of `model.parameters()`.

    Example:
        >>> twin = noria.testing.MasterTwin(model, lambda masters: torch.optim.AdamW(masters, lr=1e-3))
        >>> model(inputs.bfloat16()).sum().backward()
        >>> twin.step()
    """

    def __init__(self, model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.model = model
        self.masters = {
            name: nn.Parameter(p.detach().to(torch.float32, copy=True), requires_grad=p.requires_grad)
            for name, p in model.named_parameters()
        }
        model.bfloat16()
        self.optimizer = make_optimizer(list(self.masters.values()))
        self._round_masters()

    @torch.no_grad()
    def step(self) -> None:
        """Updates each master whose parameter has a gradient, rounds into the model, and clears gradients.

        Example:
            >>> twin = noria.testing.MasterTwin(model, torch.optim.AdamW)
            >>> model(inputs.bfloat16()).sum().backward()
            >>> twin.step()
        """
        for name, p in self.model.named_parameters():
            self.masters[name].grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        self._round_masters()
        self.model.zero_grad()

    @torch.no_grad()
    def _round_masters(self) -> None:
        for name, p in self.model.named_parameters():
            if self.masters[name].requires_grad:
                p.copy_(round_to_bfloat16(self.masters[name]))


def first_difference(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], names: Sequence[str]) -> str | None:
    """Returns a description of the first pair of tensors whose bits differ. NaN payloads and -0.0 count.

    Args:
        a: Tensors.
        b: As many tensors, to compare with them in this order.
        names: A name for each pair.

    Returns:
        Text, or None if all pairs have the same dtype, shape and bits.

    Example:
        >>> noria.testing.first_difference([torch.zeros(2)], [torch.ones(2)], ["bias"])
        'bias: 2 of 2 elements differ, first at (0,): 0.0 (0x00000000) against 1.0 (0x3f800000)'
    """
    for name, x, y in zip(names, a, b, strict=True):
        if x.dtype != y.dtype or x.shape != y.shape:
            return f"{name}: {x.dtype} {tuple(x.shape)} against {y.dtype} {tuple(y.shape)}"
        differs = (_bits(x) != _bits(y)).any(dim=-1)
        if differs.any():
            first = tuple(differs.nonzero()[0].tolist())
            where = f"{int(differs.sum())} of {x.numel()} elements differ, first at {first}"
            return f"{name}: {where}: {_shown(x, first)} against {_shown(y, first)}"
    return None


def assert_same_bits(
    named_a: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    named_b: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Asserts the same names, and for each name the same dtype, shape and bits. No tensors at all is an error too.

    Of a tensor that wraps others, as torchao's weights do, those inside it are compared.

    Args:
        named_a: Tensors by name, or pairs such as `model.named_parameters()` gives.
        named_b: The same of the other side.

    Raises:
        AssertionError: if something differs. It names the first difference.

    Example:
        >>> noria.testing.assert_same_bits(model.named_parameters(), copy.deepcopy(model).named_parameters())
    """
    a, b = _without_wrappers(named_a), _without_wrappers(named_b)
    assert a, "nothing to compare"
    assert a.keys() == b.keys(), f"names differ: {sorted(a.keys() ^ b.keys())}"
    difference = first_difference(list(a.values()), [b[name] for name in a], list(a))
    assert difference is None, difference


def _without_wrappers(
    named: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    return {inner: tensor for name, value in dict(named).items() for inner, tensor in inner_tensors(value, name)}


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Returns the bits of each element as integers, in a new last dimension: one, or two for complex numbers."""
    x = x.detach().cpu().resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    else:
        x = x.unsqueeze(-1)
    return x.contiguous().view(_BITS[x.element_size()])


def _shown(x: torch.Tensor, index: tuple[int, ...]) -> str:
    digits = 2 * x.element_size() // (2 if x.is_complex() else 1)
    bits = " ".join(f"{word & (1 << 4 * digits) - 1:#0{digits + 2}x}" for word in _bits(x)[index].tolist())
    return f"{x[index].item()} ({bits})"
