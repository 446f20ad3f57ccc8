"""Answers `.to()`, `.cuda()`, `.half()` and their kin on modules of a wrapped model. torch sends all to `_apply`.

Frameworks call them in set-up and teardown. What would change nothing changes nothing, and reads no weight. So does a
move to the CPU: the weights have their home there. Any other move, and any cast, is refused before it is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType

import torch
from torch import nn

from noria._errors import usage_error
from noria.model.inner_tensors import is_wrapper
from noria.runtime.context import Context

__all__ = ["Moves", "answer_moves", "forget_moves"]

Change = Callable[[torch.Tensor], torch.Tensor]


class Moves:
    """Is `module._apply`. A copy of the module gets its class's own."""

    def __init__(self, module: nn.Module, context: Context) -> None:
        self._module = weakref.ref(module)
        self._context = weakref.ref(context)

    def __call__(self, fn: Change, recurse: bool = True) -> nn.Module:
        module, context = self._module(), self._context()
        assert module is not None  # its own attribute is called
        if context is None:
            return _own(module)(fn, recurse)
        modules = list(module.modules()) if recurse else [module]
        if self._leaves_the_device(fn, modules, context):
            return module
        for each in modules:
            for name, buffer in list(each.named_buffers(recurse=False)):
                each._buffers[name] = fn(buffer)
            for parameter in each.parameters(recurse=False):
                if parameter in context.slot_of:
                    continue
                with torch.no_grad():  # registered after the wrap
                    if is_wrapper(parameter):
                        moved = nn.Parameter(fn(parameter), parameter.requires_grad)
                        torch.utils.swap_tensors(parameter, moved)
                    else:
                        parameter.data = fn(parameter.data)
        return module

    def _leaves_the_device(self, fn: Change, modules: list[nn.Module], context: Context) -> bool:
        """Returns True for a move to the CPU, from another device. Raises UsageError for other changes."""
        found: dict[tuple[torch.dtype, int], str] = {}  # by dtype and number of dimensions
        for each in modules:
            for parameter in each.parameters(recurse=False):
                if parameter in context.slot_of:
                    found.setdefault((parameter.dtype, parameter.dim()), context.slot_of[parameter].name)
        goes = False
        for (dtype, num_dims), name in found.items():
            probe = torch.empty((2,) * num_dims, dtype=dtype, device=context.device)
            was_shared = probe.is_shared()
            made = fn(probe)
            if made.is_shared() and not was_shared and made.device == context.device:
                raise usage_error(
                    "a model whose weights no other process shares",
                    "share_memory() on a wrapped one",
                    "noria.unwrap it first",
                )
            if made.dtype != dtype:
                raise usage_error(
                    "no change of dtype after noria.wrap",
                    f'a cast of "{name}" from {dtype} to {made.dtype}',
                    "change dtypes before noria.wrap; dtype=torch.bfloat16 there trains in bfloat16 with fp32 masters",
                )
            if made.device not in (context.device, torch.device("cpu")):
                raise usage_error(
                    f"a model that stays on {context.device}",
                    f'a move of "{name}" to {made.device}',
                    "noria.unwrap it first, or give device= to noria.wrap",
                )
            if made.stride() != probe.stride():
                raise usage_error(
                    "weights that lie as they did at noria.wrap",
                    f'a change of the memory format of "{name}"',
                    "change memory formats before noria.wrap",
                )
            goes |= made.device != context.device
        return goes

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        module = self._module()
        assert module is not None
        return _own(memo[id(module)])  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[object, ...]:
        return (_own, (self._module(),))


def _own(module: nn.Module) -> Callable[..., nn.Module]:
    """Returns what the module's class does."""
    return MethodType(type(module)._apply, module)


def answer_moves(root: nn.Module, context: Context) -> None:
    for module in root.modules():
        own = vars(module).get("_apply")
        if own is None or getattr(own, "__func__", None) is type(module)._apply:  # that is a copy of a wrapped module
            module.__dict__["_apply"] = Moves(module, context)


def forget_moves(root: nn.Module) -> None:
    for module in root.modules():
        if isinstance(vars(module).get("_apply"), Moves):
            del module.__dict__["_apply"]
