"""Finds the tensors that noria moves: parameters, and for a wrapper the tensors inside it.

A wrapper is a tensor without bytes of its own, such as a weight that torchao has quantised. `__tensor_flatten__` names
the tensors inside it, and `__tensor_unflatten__` makes another one of such tensors
(torch/utils/_python_dispatch.py, "traceable wrapper subclass"). A tensor inside may be a wrapper, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["flaw_of_wrapper", "inner_tensors", "is_wrapper", "made_again", "tensors_in", "update_wrapper_devices"]


def is_wrapper(value: object) -> bool:
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def flaw_of_wrapper(parameter: nn.Parameter) -> tuple[str, str] | None:
    """Returns why the tensors inside a wrapper cannot be moved, and the remedy. None for all other parameters."""
    if not is_wrapper(parameter):
        return None
    name = type(parameter).__qualname__
    if any(cls.__name__ == "DTensor" for cls in type(parameter).__mro__):
        return f"of type {name}", "wrap before parameters are converted or sharded"
    if parameter.requires_grad:
        return f"of type {name} that is trained", "freeze it: only adapters beside it can be trained"
    if parameter.is_meta:
        return f"of type {name} on the meta device", "give it values before noria.wrap"
    if any(isinstance(each, nn.Parameter) or each.requires_grad for each in tensors_in([parameter])):
        return f"of type {name} with a Parameter inside", "make it of plain tensors without gradients"
    return None


def inner_tensors(parameter: torch.Tensor, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors inside a wrapper with their names behind its own, such as "weight.scale".

    For another tensor: itself, with its name.
    """
    if not is_wrapper(parameter):
        return [(name, parameter)]
    return [
        pair
        for inner in _flattened(parameter)[0]
        for pair in inner_tensors(getattr(parameter, inner), f"{name}.{inner}" if name else inner)
    ]


def made_again(parameter: torch.Tensor, value_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns a wrapper like this one, with `value_of` each tensor inside. For another tensor: its value."""
    if not is_wrapper(parameter):
        return value_of(parameter)
    names, rest = _flattened(parameter)
    inner = {name: made_again(getattr(parameter, name), value_of) for name in names}
    made: torch.Tensor = type(parameter).__tensor_unflatten__(  # type: ignore[attr-defined]
        inner, rest, parameter.shape, parameter.stride()
    )
    return made


def tensors_in(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the parameters, and for a wrapper the tensors inside it."""
    for parameter in parameters:
        for _, tensor in inner_tensors(parameter):
            yield tensor


def update_wrapper_devices(roots: Iterable[nn.Module]) -> None:
    """Tells wrappers the device of the tensors inside them, which have moved."""
    for root in roots:
        for parameter in root.parameters():
            if is_wrapper(parameter):
                settled = made_again(parameter, lambda tensor: tensor)
                parameter.data = settled
                for name in _flattened(parameter)[0]:
                    setattr(parameter, name, getattr(settled, name))


def _flattened(parameter: Any) -> tuple[list[str], object]:
    names, rest = parameter.__tensor_flatten__()
    return names, rest
