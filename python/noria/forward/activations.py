"""Handles what forwards save for their backwards, if the policy says that it must not stay on the device.

- "offload": tensors that autograd saves inside of a block go to the home when the block is left, and come back ahead of
  its backward. The engine moves them (csrc/engine/activation_store.h).
- "auto": only tensors for which the device has no room are moved.
- "recompute": a block saves its inputs only, and its backward computes the rest again, by torch.utils.checkpoint.

Values and random numbers are the same in each case.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from noria import _C
from noria._errors import usage_error
from noria.forward.recompute import Recomputation, is_checkpointed
from noria.model.layout import Region
from noria.pipeline.peer_cache import PeerCache
from noria.planning.measured_costs import MeasuredCosts
from noria.planning.saved_simulation import piece_at_home
from noria.runtime.context import Context
from noria.runtime.hooks import Hook, remove_hooks
from noria.runtime.late_allocations import LateAllocations
from noria.runtime.state import weakly_asked
from noria.torch_state import in_backward

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Activations"]


@dataclasses.dataclass(frozen=True)
class _Entered:
    """Describes a call of a block that has not returned. `saving` is None if the call saves nothing."""

    module: nn.Module
    thread: int
    saving: torch.autograd.graph.saved_tensors_hooks | None


class Activations:
    """Moves what blocks save, or makes their backward compute it again."""

    def __init__(
        self,
        context: Context,
        late: LateAllocations,
        peer_cache: PeerCache,
        costs: Callable[[], MeasuredCosts | None],
    ) -> None:
        """`costs` returns what this run has measured, or None."""
        self.context = context
        self.late = late
        self._handles: list[RemovableHandle] = []
        self._inside: list[_Entered] = []  # innermost last
        self._taken = 0  # bytes at home
        self._num_pieces = 0
        self._saved = context.engine.saved
        self._saving = _saving_hooks(weakref.ref(self._saved))
        self._recomputation: Recomputation | None = None
        if self.context.policy.activations == "recompute" or self.context.plan.saved_room is not None:
            self._recomputation = Recomputation(context, peer_cache, costs, context.plan.recomputed)
        if context.plan.least_saved is not None:
            blocks = [spec.module for spec in self.context.partition.hooks if spec.is_block]
            self._saved.set_saved_callback(weakly_asked(self.more_home))
            for block in blocks:
                self._handles.append(block.register_forward_pre_hook(Hook(self._enter), with_kwargs=True))
                self._handles.append(block.register_forward_hook(Hook(self._leave), always_call=True))
            self._resize_room()

    def remove(self) -> None:
        remove_hooks(self._handles)
        if self._recomputation is not None:
            self._recomputation.remove()

    def recomputed(self) -> list[str]:
        """Returns the names of the blocks that compute their activations again."""
        return [] if self._recomputation is None else self._recomputation.names()

    def follow_plan(self) -> None:
        """Does what the plan says, which may be another one than before. Order: no pass is under way."""
        plan = self.context.plan
        if self._recomputation is None or not plan.chooses_activations:
            return
        if plan.recomputed is not None:
            self._recomputation.take(plan.recomputed)
        self._resize_room()

    def _resize_room(self) -> None:
        plan = self.context.plan
        if plan.chooses_activations and plan.saved_room is not None:
            self._saved.resize_saved_room(plan.saved_room)

    def inputs(self) -> dict[int, int]:
        """Returns the bytes of inputs, by unit, of blocks that may compute their forward again."""
        return {} if self._recomputation is None else self._recomputation.inputs()

    def writers(self) -> frozenset[int]:
        """Returns the units of blocks that were to compute again, but write buffers."""
        return frozenset() if self._recomputation is None else self._recomputation.writers()

    def recomputed_units(self) -> frozenset[int]:
        """Returns the units of the blocks that compute their activations again: of each block the last one."""
        return frozenset() if self._recomputation is None else self._recomputation.units()

    def follow(self, module: nn.Module, now: nn.Module) -> None:
        """Notes that a block is called by another module from now on: torch.compile's, or no longer torch.compile's."""
        if self._recomputation is not None:
            self._recomputation.follow(module, now)

    def follow_compiled_forwards(self) -> None:
        """Notes blocks whose forward was compiled."""
        if self._recomputation is not None:
            self._recomputation.follow_compiled_forwards()

    def begin_step(self) -> None:
        if self._recomputation is not None:
            self._recomputation.begin_step()

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        if in_backward() or not torch.is_grad_enabled() or is_checkpointed():
            self._inside.append(_Entered(module, threading.get_ident(), None))
            return
        saving = torch.autograd.graph.saved_tensors_hooks(*self._saving)
        saving.__enter__()
        self._inside.append(_Entered(module, threading.get_ident(), saving))
        if self._recomputation is not None:
            self._recomputation.enter(module, args, kwargs)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        entered = self._inside[-1] if self._inside else None
        if entered is None or entered.module is not module or entered.thread != threading.get_ident():
            return  # this call was refused before it came to `_enter`
        self._inside.pop()
        if entered.saving is not None:
            entered.saving.__exit__(None, None, None)
            if self._recomputation is not None:
                self._recomputation.leave(module)

    def abandon(self) -> None:
        """Cleans up after a forward that ended without calling its hooks.

        If it ran on another thread, its saving hooks are that thread's.
        """
        while self._inside:
            entered = self._inside.pop()
            if entered.saving is not None and entered.thread == threading.get_ident():
                entered.saving.__exit__(None, None, None)

    def more_home(self, least: int) -> tuple[int, int]:
        """Takes more memory at home for a storage of `least` bytes that finds no room. Returns address and bytes."""
        size = piece_at_home(least, self._taken)
        name = "saved for backward" if not self._num_pieces else f"saved for backward, piece {self._num_pieces + 1}"
        units = len(self.context.units)
        [address, *_] = self.late.take(Region.of(name, [size, *[0] * (units - 1)]), together=False)
        self._num_pieces += 1
        self._taken += size
        return address, size


def _saving_hooks(
    saved: weakref.ref[_C.EngineSaved],
) -> tuple[Callable[[torch.Tensor], _C.SavedTensor], Callable[[_C.SavedTensor], torch.Tensor]]:
    """Returns hooks that autograd graphs keep. They hold the engine weakly: a graph may outlive it."""

    def found() -> _C.EngineSaved:
        alive = saved()
        if alive is None:
            raise usage_error(
                "a backward while its model is wrapped",
                "one after noria.unwrap, or after the model was dropped",
                "call backward() first",
            )
        return alive

    return lambda tensor: found().pack(tensor), lambda packed: found().unpack(packed)
