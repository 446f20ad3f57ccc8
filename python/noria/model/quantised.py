"""Follows bitsandbytes' quantised weights, which have constants beside them, and modules that keep their bytes.

Names of classes are compared, so that noria works without bitsandbytes.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["flaw_of_quantised", "give_back_quantised", "move_constants", "take_quantised"]

_PACKS = "support_avx512bf16_for_cpu"
"""An attribute of 4-bit layers: in evaluation on such CPUs they replace their weights by packed ones."""

_PACKED_BEFORE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Layers that will pack again after `unwrap`."""


def flaw_of_quantised(parameter: Any) -> tuple[str, str] | None:
    """Returns why a weight of bitsandbytes cannot be moved, and the remedy. None if it can be moved."""
    name = type(parameter).__name__
    is_quantised = parameter.bnb_quantized if name == "Params4bit" else parameter.dtype is torch.int8
    if parameter.requires_grad:
        return f"of type {name} that is trained", "freeze it: only adapters beside it can be trained"
    if not is_quantised:
        return f"of type {name}, not quantised yet", 'call model.to("cpu") first, which quantises it'
    return None


def move_constants(weight: object, device: torch.device) -> None:
    """Moves the constants of a 4-bit weight. Other weights have none."""
    constants: Any = getattr(weight, "quant_state", None)
    if constants is not None:
        constants.to(device)


def take_quantised(roots: Iterable[nn.Module], device: torch.device) -> None:
    """Moves constants to the device, where they stay like buffers. Modules find their weights in the window.

    They leave weights as they are in evaluation, too.
    """
    for module in _modules(roots):
        for weight in module.parameters(recurse=False):
            move_constants(weight, device)
        if vars(module).get(_PACKS):
            setattr(module, _PACKS, False)
            _PACKED_BEFORE.add(module)
        if _is_8bit(module):
            if module.weight.CB is not None:
                module.init_8bit_state()
            state = module.state
            state.SCB = state.SCB.to(device)
            if isinstance(state, _FollowsWeight):  # since an earlier call
                continue
            vars(state).pop("CB")
            state.__class__ = _following(type(state))
            state.module = weakref.ref(module)


def give_back_quantised(roots: Iterable[nn.Module]) -> None:
    """Moves constants to the CPU. Modules have the bytes of their weights again."""
    for module in _modules(roots):
        for weight in module.parameters(recurse=False):
            move_constants(weight, torch.device("cpu"))
        if module in _PACKED_BEFORE:
            setattr(module, _PACKS, True)
            _PACKED_BEFORE.discard(module)
        if _is_8bit(module) and isinstance(module.state, _FollowsWeight):
            module.state = module.state.plain(module.weight.data)
            module.state.SCB = module.state.SCB.to("cpu")


def _modules(roots: Iterable[nn.Module]) -> Iterator[Any]:
    return iter({id(module): module for root in roots for module in root.modules()}.values())


def _is_8bit(module: Any) -> bool:
    return type(module._parameters.get("weight")).__name__ == "Int8Params" and hasattr(module, "init_8bit_state")


class _FollowsWeight:
    """Stands in for the state of an 8-bit layer: `CB`, its bytes, is the layer's weight, wherever that is now."""

    module: weakref.ref[Any]

    def _weight(self) -> torch.Tensor:
        module = self.module()
        assert module is not None  # it owns this state
        weight: torch.Tensor = module.weight
        return weight

    @property
    def CB(self) -> torch.Tensor:  # noqa: N802 - bitsandbytes' name
        return self._weight().data

    @CB.setter
    def CB(self, value: object) -> None:  # noqa: N802
        """The layer sets what it has got from here."""

    def plain(self, weight: torch.Tensor) -> Any:
        """Returns a state as bitsandbytes has it."""
        state = copy.copy(self)
        state.__class__ = type(self).__mro__[2]
        del vars(state)["module"]
        state.CB = weight
        return state

    def __copy__(self) -> Any:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __reduce__(self) -> Any:
        return self.plain(self._weight().data).__reduce_ex__(4)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """For a copy of the model, which has its own weights."""
        weight = self._weight()
        copied = memo.get(id(weight))
        state = self.plain(copy.deepcopy(weight.data, memo) if copied is None else copied.data)
        state.SCB = copy.deepcopy(state.SCB, memo)
        return state


_CLASSES: dict[type, type] = {}


def _following(cls: type) -> type:
    if cls not in _CLASSES:
        _CLASSES[cls] = type(cls.__name__, (_FollowsWeight, cls), {})
    return _CLASSES[cls]
