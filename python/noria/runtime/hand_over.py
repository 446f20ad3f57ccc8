"""Hands weights to another system, one tensor after the other, in the order of units.

Between two tensors nothing is held: no home is open, and no call is refused. So a loop that ends early leaves all as it
was. The iterator compares version counters instead, and raises if weights have changed since it began.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from noria._errors import usage_error
from noria.model.inner_tensors import tensors_in
from noria.runtime.context import Context
from noria.runtime.rank_sync import RankSync
from noria.runtime.state import RunState
from noria.runtime.weights import Weights
from noria.torch_state import await_device, plainly

__all__ = ["HandOver"]


class HandOver:
    """Iterates over (name, tensor): parameters at home by unit, then what lies elsewhere, as buffers do.

    Names are those of `state_dict()`. Tied names follow each other, and share one tensor.
    """

    def __init__(self, context: Context, run: RunState, sync: RankSync, weights: Weights, module: nn.Module) -> None:
        """Raises UsageError if weights cannot be read now."""
        self._context = context
        self._run = run
        self._sync = sync
        self._weights = weights
        self._names: dict[nn.Parameter, list[str]] = {}
        self._others: list[tuple[str, torch.Tensor]] = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in context.slot_of:
                self._names.setdefault(parameter, []).append(name)
            else:  # registered after the wrap
                self._others.append((name, parameter))
        self._others += _kept_buffers(module)
        self._parameters = sorted(
            self._names, key=lambda each: (context.slot_of[each].unit, context.slot_of[each].index)
        )
        self._check()
        self._versions = self._count_changes()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        unit = -1
        try:
            self._sync.meet("hand over weights by noria.weights")
            for parameter in self._parameters:
                self._check()
                if self._context.slot_of[parameter].unit != unit:
                    self._refuse_changes()
                    unit = self._context.slot_of[parameter].unit
                with plainly():
                    value = self._weights.current_of(parameter)
                for name in self._names[parameter]:
                    yield name, value
                del value  # ranks have memory for no more than one
                await_device(self._context.device)  # copies that the caller has queued
            self._refuse_changes()
            for name, other in self._others:
                self._check()
                yield name, other.detach().cpu()
        finally:
            await_device(self._context.device)

    def _check(self) -> None:
        self._run.recover()
        self._run.refuse_when_busy("noria.weights")
        self._run.require_consistent("noria.weights")

    def _count_changes(self) -> int:
        return sum(each._version for each in tensors_in(self._parameters))

    def _refuse_changes(self) -> None:
        if self._count_changes() != self._versions:
            raise usage_error(
                "weights that stay as they are until noria.weights has given all of them",
                "a step, a load or an edit since its first one",
                "begin again: for name, tensor in noria.weights(model)",
            )


def _kept_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers that `state_dict()` has."""
    for path, each in module.named_modules(remove_duplicate=False):
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer
