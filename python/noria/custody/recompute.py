"""Blocks that compute their activations again in backward: all of them, or those for which it is cheaper than swapping.

activations="auto" measures: the first step tells what has no room, and what other stages lend; the third is the one
that is looked at, by the host's clock, so only where the host computes.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from noria import _C
from noria.record import tensors_of

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["Recomputation", "Recomputed"]

_LOOKED_AT = 3  # of the steps


class Recomputed:
    """The `forward` of a block that saves its inputs only, while it is on. A copy of the block has its own forward."""

    def __init__(self, module: nn.Module, is_on: bool) -> None:
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")
        self.is_on = is_on
        self.input_bytes = 0
        self._module = module
        self._forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if not self.is_on:
            self.input_bytes = max(self.input_bytes, sum(each.nbytes for each in tensors_of((args, kwargs))))
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module))
        return self.own if copied is None else types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        return (getattr, (self._module, "forward"))


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Until the beginning of a step."""

    saved: dict[str, int]
    by_hook: dict[int, tuple[int, int, int, int]]
    lanes: dict[str, tuple[int, int]]  # busy us, bytes
    compute_us: int


class Recomputation:
    """Of one wrap call's blocks."""

    def __init__(self, wrapped: Wrapped, *, chooses: bool) -> None:
        """`chooses`: which of them, once it has been measured; else all."""
        self.wrapped = wrapped
        self._forwards: dict[int, Recomputed] = {}  # by hook
        self._names: dict[int, str] = {}
        self._chooses = chooses and wrapped.device.type == "cpu"
        self._num_steps = 0
        self._before: _Seen | None = None
        for hook, spec in enumerate(wrapped.partition.hooks):
            if spec.is_block and (self._chooses or not chooses):
                forward = Recomputed(spec.module, is_on=not chooses)
                spec.module.__dict__["forward"] = forward
                self._forwards[hook] = forward
                self._names[hook] = spec.name

    def names(self) -> list[str]:
        """Of the blocks that compute again."""
        return [self._names[hook] for hook, forward in self._forwards.items() if forward.is_on]

    def begin_step(self) -> None:
        if not self._chooses:
            return
        self._num_steps += 1
        if self._num_steps == _LOOKED_AT - 1:
            self._before = self._see()
        elif self._num_steps == _LOOKED_AT and self._before is not None:
            for hook in self._choose(self._before, self._see()):
                self._forwards[hook].is_on = True

    def _see(self) -> _Seen:
        custody, stats = self.wrapped.custody, self.wrapped.backend.stats
        lanes = {lane: (stats(lane)["busy_us"], stats(lane)["bytes"]) for lane in ("drain", "fetch")}
        return _Seen(custody.saved_stats(), custody.saved_by_module(), lanes, custody.compute_us)

    def _choose(self, before: _Seen, now: _Seen) -> list[int]:
        def more(name: str) -> int:
            return now.saved[name] - before.saved[name]

        out, back = more("offloaded") - more("offloaded_to_peers"), more("reloaded") - more("reloaded_from_peers")
        if out <= 0 or back <= 0:
            return []
        compute_us = now.compute_us - before.compute_us
        speeds = []
        for lane, own in (("drain", out), ("fetch", back)):
            busy_us, moved = (a - b for a, b in zip(now.lanes[lane], before.lanes[lane], strict=True))
            us_per_byte = busy_us / max(moved, 1)
            speeds.append((us_per_byte, max(compute_us - us_per_byte * (moved - own), 0.0)))
        hooks, blocks = [], []
        for hook, forward in self._forwards.items():
            num_visits, size, forward_us, gap_us = now.by_hook.get(hook, (0, 0, 0, 0))
            num_visits -= before.by_hook.get(hook, (0,))[0]
            if num_visits:
                hooks.append(hook)
                blocks.append((size, forward.input_bytes, num_visits, forward_us, gap_us))
        (out_us, out_free_us), (back_us, back_free_us) = speeds
        chosen = _C.choose_recomputed(blocks, out, out_us, back_us, out_free_us, back_free_us)
        return [hooks[each] for each in chosen]

    def remove(self) -> None:
        for hook, forward in self._forwards.items():
            module = self.wrapped.partition.hooks[hook].module
            module.__dict__.pop("forward")
            if forward.own is not None:
                module.__dict__["forward"] = forward.own
        self._forwards.clear()
