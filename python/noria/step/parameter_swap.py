"""Temporarily replaces the parameters inside an optimizer, in every place where it keeps them.

An optimizer that is not in the list of separable classes runs its own `step` on its own object. Attributes that it
sets there stay. While it runs, all its parameters are the home's. `exchange` replaces them in groups, in keys of the
state, and in lists, dicts, tuples and sets among the attributes. It also enters other optimizers that this one holds.

`exchange` edits mutable containers in place, so other holders of a container see the same parameters. If another kind
of object holds a parameter, `refuse_out_of_reach` raises.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from noria._errors import usage_error
from noria.model.optimizer_classes import knows_modules

__all__ = ["exchange", "refuse_out_of_reach"]

_Other = Callable[[nn.Parameter], torch.Tensor]
_PLAIN = (str, bytes, int, float, complex, type(None), torch.Tensor, torch.dtype, torch.device, type)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)


def _attributes(optimizer: Optimizer) -> Iterator[tuple[str, object]]:
    return ((name, value) for name, value in list(vars(optimizer).items()) if name != "_noria")


def exchange(optimizer: Optimizer, other: _Other) -> None:
    """Puts `other(parameter)` in the place of every parameter within reach of `optimizer`."""
    _Exchange(other).inside_of(optimizer)


class _Exchange:
    """Walks through an optimizer's attributes and replaces each parameter that it meets, once in each container."""

    def __init__(self, other: _Other) -> None:
        self._other = other
        self._done: dict[int, tuple[object, object]] = {}  # by id: old value (alive, so its id stays unique) and new

    def __call__(self, value: object) -> Any:
        if isinstance(value, nn.Parameter):
            return self._other(value)
        if isinstance(value, _PLAIN):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        self._done[id(value)] = (value, value)
        if isinstance(value, Optimizer):
            self.inside_of(value)
        elif isinstance(value, dict):
            self._inside_of_dict(value)
        elif isinstance(value, list | deque):
            for index, each in enumerate(list(value)):
                value[index] = self(each)
        elif isinstance(value, set):
            members = [self(each) for each in value]
            value.clear()
            value.update(members)
        elif isinstance(value, tuple | frozenset):
            members = [self(each) for each in value]
            if any(new is not old for new, old in zip(members, value, strict=True)):
                made = type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
                self._done[id(value)] = (value, made)
        return self._done[id(value)][1]

    def inside_of(self, optimizer: Optimizer) -> None:
        self._done[id(optimizer)] = (optimizer, optimizer)
        for name, value in _attributes(optimizer):
            vars(optimizer)[name] = self(value)

    def _inside_of_dict(self, value: dict[object, object]) -> None:
        own = getattr(value, "unwatched", type(value))
        old = list(own.items(value))
        new = [(self(key), self(each)) for key, each in old]
        if all(a is c and b is d for (a, b), (c, d) in zip(new, old, strict=True)):
            return
        own.clear(value)
        for key, each in new:
            own.__setitem__(value, key, each)


def refuse_out_of_reach(optimizer: Optimizer, parameters: Container[torch.Tensor]) -> None:
    """Raises UsageError if the optimizer holds a parameter where `exchange` cannot replace it."""
    name = _out_of_reach(optimizer, parameters)
    if name is not None:
        raise usage_error(
            "a class of optimizer that keeps its parameters in its groups, its state, or lists, dicts, tuples and sets",
            f"{type(optimizer).__name__.removeprefix('Noria')}.{name}, an object that holds some of them",
            "keep them in param_groups or in a list",
        )


def _out_of_reach(optimizer: Optimizer, parameters: Container[torch.Tensor]) -> str | None:
    """Returns the attribute that holds one of `parameters` beyond the reach of `exchange`, or None.

    Such a parameter lies inside a module or an object of another class. The search goes two objects deep.
    """
    reached: dict[int, object] = {id(optimizer): optimizer}
    beyond: list[tuple[str, object]] = []
    for name, value in _attributes(optimizer):
        _reach(name, value, reached, beyond)
    for name, value in beyond:
        if _holds(value, parameters, dict(reached), depth=2):
            return name
    return None


def _members(value: object) -> Iterable[object] | None:
    if isinstance(value, dict):
        own = getattr(value, "unwatched", type(value))
        return [each for item in own.items(value) for each in item]
    if isinstance(value, list | deque | set | tuple | frozenset):
        return list(value)
    return [each for _, each in _attributes(value)] if isinstance(value, Optimizer) else None


def _reach(name: str, value: object, reached: dict[int, object], beyond: list[tuple[str, object]]) -> None:
    if isinstance(value, (*_PLAIN, *_CODE)) or id(value) in reached or knows_modules(value):
        return
    members = _members(value)
    if members is None:
        beyond.append((name, value))
        return
    reached[id(value)] = value
    for each in members:
        _reach(name, each, reached, beyond)


def _holds(value: object, parameters: Container[torch.Tensor], seen: dict[int, object], depth: int) -> bool:
    if isinstance(value, nn.Parameter):
        return value in parameters
    if isinstance(value, (*_PLAIN, *_CODE)) or id(value) in seen:
        return False
    seen[id(value)] = value
    if isinstance(value, nn.Module):
        return any(parameter in parameters for parameter in value.parameters())
    members = _members(value)
    if members is None:
        depth -= 1
        members = list(getattr(value, "__dict__", {}).values()) if depth >= 0 else []
    return any(_holds(each, parameters, seen, depth) for each in members)
