"""Answers `copy.deepcopy` of a wrapped model, or of a module inside one: a plain model on the CPU."""

from __future__ import annotations

import copy
import weakref

import torch
from torch import nn

from noria.model.quantised import move_constants
from noria.runtime.context import Context
from noria.runtime.state import RunState
from noria.runtime.weights import Weights
from noria.torch_state import plainly

__all__ = ["Copies", "answer_copies", "forget_copies"]


class Copies:
    """Is `module.__deepcopy__`. A copy of the module has none."""

    def __init__(self, module: nn.Module, context: Context, run: RunState, weights: Weights) -> None:
        self._module = weakref.ref(module)
        self._context = weakref.ref(context)
        self._run = weakref.ref(run)
        self._weights = weakref.ref(weights)

    def __call__(self, memo: dict[int, object]) -> object:
        module = self._module()
        assert module is not None  # its own attribute is called
        context, run, weights = self._context(), self._run(), self._weights()
        if context is not None and run is not None and weights is not None:
            _copy_tensors(module, context, run, weights, memo)
        own = getattr(type(module), "__deepcopy__", None)
        if own is not None:
            copied = own(module, memo)
        else:
            copied = copy._reconstruct(module, memo, *module.__reduce_ex__(4))  # type: ignore[attr-defined]
        vars(copied).pop("__deepcopy__", None)
        return copied

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[object, ...]:
        return (_nothing, ())


def _nothing() -> None:
    """Stands for the attribute in a pickled module: copy.deepcopy then finds none."""


def _copy_tensors(
    module: nn.Module, context: Context, run: RunState, weights: Weights, memo: dict[int, object]
) -> None:
    """Puts copies of parameters and buffers into `memo`, on the CPU. Collective if ranks share the model."""
    wanted = [each for each in module.parameters() if id(each) not in memo and each in context.slot_of]
    if wanted and not run.is_materialized:
        run.recover()
        run.refuse_when_busy("copy.deepcopy")
    for parameter in wanted:
        with plainly():
            value = weights.current_of(parameter, torch.clone)
        copied = memo[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
        if type(parameter) is not type(copied):  # bitsandbytes'
            copied.__class__ = type(parameter)
            copied.__dict__.update(copy.deepcopy(vars(parameter), memo))
            move_constants(copied, torch.device("cpu"))
    for buffer in module.buffers():
        if id(buffer) not in memo and buffer.device == context.device:
            memo[id(buffer)] = buffer.detach().to("cpu", copy=True)


def answer_copies(root: nn.Module, context: Context, run: RunState, weights: Weights) -> None:
    for module in root.modules():
        module.__dict__.setdefault("__deepcopy__", Copies(module, context, run, weights))


def forget_copies(root: nn.Module) -> None:
    for module in root.modules():
        if isinstance(vars(module).get("__deepcopy__"), Copies):
            del module.__dict__["__deepcopy__"]
