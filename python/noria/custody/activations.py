"""What forwards keep for their backwards, where the policy says that it is not to stay on the device.

"offload": tensors that autograd saves inside of a block go to the home when the block is left, and come back ahead of
its backward; the engine moves them (csrc/engine/saver.h). "auto": those that find no room on the device do.
"recompute": a block saves its inputs only, and its backward computes the rest again, by torch.utils.checkpoint. Values
and random numbers are the same either way.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from noria import _C
from noria._errors import usage_error
from noria.custody.hooks import Hook, in_backward
from noria.custody.recompute import Recomputation, is_checkpointed
from noria.home import Region

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped
    from noria.plan import WrapPlan

__all__ = ["LEAST_SAVED", "Activations", "leave"]

LEAST_SAVED = 64 * 1024
"""Bytes of a storage: smaller ones stay where they are."""

_LEAST_PIECE = 16 * 1024 * 1024


def leave(planned: WrapPlan) -> bool:
    """Some of what blocks save may have to."""
    return planned.policy.activations == "offload" or planned.saved_room is not None


class Activations:
    """Of one wrap call's blocks."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self._handles: list[Any] = []
        self._inside: list[contextlib.AbstractContextManager[Any] | None] = []  # innermost last
        self._taken = 0  # bytes at home
        self._num_pieces = 0
        self._saving = _saving_hooks(weakref.ref(wrapped.custody))
        self._recomputation: Recomputation | None = None
        if wrapped.policy.activations == "recompute" or wrapped.plan.saved_room is not None:
            self._recomputation = Recomputation(wrapped, chooses=wrapped.plan.saved_room is not None)
        if leave(wrapped.plan):
            blocks = [spec.module for spec in wrapped.partition.hooks if spec.is_block]
            wrapped.custody.set_saved_callback(_more_home(weakref.ref(wrapped)))
            for block in blocks:
                self._handles.append(block.register_forward_pre_hook(Hook(self._enter), with_kwargs=True))
                self._handles.append(block.register_forward_hook(Hook(self._leave), always_call=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._recomputation is not None:
            self._recomputation.remove()

    def recomputed(self) -> list[str]:
        """Names of the blocks that compute their activations again."""
        return [] if self._recomputation is None else self._recomputation.names()

    def begin_step(self) -> None:
        if self._recomputation is not None:
            self._recomputation.begin_step()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward() or not torch.is_grad_enabled() or is_checkpointed():
            self._inside.append(None)
            return
        saving = torch.autograd.graph.saved_tensors_hooks(*self._saving)
        saving.__enter__()
        self._inside.append(saving)
        if self._recomputation is not None:
            self._recomputation.enter(module, args, kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside and (saving := self._inside.pop()) is not None:
            saving.__exit__(None, None, None)
            if self._recomputation is not None:
                self._recomputation.leave(module)

    def abandon(self) -> None:
        """A forward that ended without its hooks."""
        while self._inside:
            if (saving := self._inside.pop()) is not None:
                saving.__exit__(None, None, None)

    def more_home(self, least: int) -> tuple[int, int]:
        """Address and bytes of more memory at home, for a storage of so many bytes that finds no room."""
        size = max(least, _LEAST_PIECE, self._taken // 4)
        name = "saved for backward" if not self._num_pieces else f"saved for backward, piece {self._num_pieces + 1}"
        units = len(self.wrapped.units)
        [address, *_] = self.wrapped.later.take(Region.of(name, [size, *[0] * (units - 1)]), together=False)
        self._num_pieces += 1
        self._taken += size
        return address, size


def _saving_hooks(custody: weakref.ref[_C.Custody]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """A graph keeps them: what it cannot use any more it must not keep."""

    def found() -> _C.Custody:
        alive = custody()
        if alive is None:
            raise usage_error(
                "a backward while its model is wrapped",
                "one after noria.unwrap, or after the model was dropped",
                "call backward() first",
            )
        return alive

    return lambda tensor: found().pack(tensor), lambda saved: found().unpack(saved)


def _more_home(wrapped: weakref.ref[Wrapped]) -> Callable[[int], tuple[int, int]]:
    def more_home(least: int) -> tuple[int, int]:
        found = wrapped()
        if found is None:
            raise RuntimeError("what a forward saves outlives the model")
        return found.activations.more_home(least)

    return more_home
