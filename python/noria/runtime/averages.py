"""Averages weights at home, with the bits of torch.optim.swa_utils, and exchanges the model's weights for them.

Averages lie in an arena of their own, in ordinary memory. If ranks share the model, each has the averages of its part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn

from noria import _C
from noria._errors import usage_error
from noria.dist.load_fingerprint import lines_of_model, refuse_others
from noria.model.layout import AVERAGES, HomeParameter, Region, aligned
from noria.runtime.context import Context
from noria.runtime.late_allocations import LateAllocations
from noria.runtime.rank_sync import RankSync
from noria.runtime.state import RunState
from noria.runtime.weights import Weights
from noria.torch_state import plainly

__all__ = ["Averages"]

_PREFIX = "module."  # as in the state of swa_utils' AveragedModel


class Averages:
    """Holds the averages of a module's trainable floating parameters. A frozen parameter is its own average.

    A parameter with an fp32 master has the average of its masters, in fp32.
    """

    def __init__(
        self,
        context: Context,
        run: RunState,
        sync: RankSync,
        weights: Weights,
        late: LateAllocations,
        module: nn.Module,
        decay: float,
        foreach: bool,
    ) -> None:
        """Takes the memory, and begins with the weights of now. Collective if ranks share the model."""
        self._context = context
        self._run = run
        self._sync = sync
        self._weights = weights
        self._module = module
        self._multi_average = get_ema_multi_avg_fn(decay) if foreach else None
        self._average_one = get_ema_avg_fn(decay)
        self.num_updates = 0
        self._is_whole = True  # False: an update or a load has stopped half-way
        self._exchanged: frozenset[int] = frozenset()  # slots whose averages the model has; we have its own weights
        self._moving: _Moving | None = None
        self._begin("noria.ema")
        members = [context.slot_of[each] for each in module.parameters() if each in context.slot_of]
        self._slots = [slot for slot in members if slot.trainable and slot.dtype.is_floating_point]
        self._memory = _AverageMemory(context, late, self._slots)
        with plainly():
            for slots in self._by_unit():
                for slot in slots:
                    self._memory.of(slot).copy_(self._value(slot))

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    # ---- averaging ----

    def update(self) -> None:
        self._begin("ema.update()")
        self._sync.meet(f"update averaged weights after {self.num_updates} updates of them")
        self._is_whole = False
        with plainly():
            for slots in self._by_unit():
                self._average(slots)
        self._is_whole = True
        self.num_updates += 1

    def _average(self, slots: Sequence[HomeParameter]) -> None:
        pairs = [(self._memory.of(slot), self._value(slot)) for slot in slots]
        count = torch.tensor(self.num_updates, device="cpu")
        if not self.num_updates:
            for average, value in pairs:
                average.copy_(value)
        elif self._multi_average is None:
            for average, value in pairs:
                average.copy_(self._average_one(average, value, count))
        else:
            for dtype in dict.fromkeys(average.dtype for average, _ in pairs):
                alike = [pair for pair in pairs if pair[0].dtype == dtype]
                self._multi_average([average for average, _ in alike], [value for _, value in alike], count)

    def _by_unit(self) -> Iterator[list[HomeParameter]]:
        """Yields the slots of each unit when its updates are over, in the order in which these are queued."""
        engine = self._context.engine
        for unit in engine.updates.next_forward_order():
            if slots := [slot for slot in self._slots if slot.unit == unit]:
                engine.home.access_home(unit, False)
                yield slots

    def _value(self, slot: HomeParameter) -> torch.Tensor:
        return self._weights.masters.whole(slot) if slot.has_master else self._context.home.working(slot)

    # ---- the model with averages ----

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        self._begin("ema.applied()")
        self._sync.meet(f"apply averaged weights after {self.num_updates} updates of them")
        with self._run.averaging(self._give_back):
            try:
                self._exchange([slot for slot in self._slots if slot.index not in self._exchanged])
                yield
            finally:
                self._run.recover()  # a forward may have raised

    def _give_back(self) -> None:
        """Gives the model its own weights. If it is interrupted, the next call goes on."""
        if self._moving is not None:
            self._undo(self._moving)
        self._exchange([slot for slot in self._slots if slot.index in self._exchanged])

    def _exchange(self, slots: Sequence[HomeParameter]) -> None:
        """Exchanges weights and averages of these slots."""
        home = self._context.engine.home
        with plainly():
            for slot in slots:
                home.access_home(slot.unit, True, frozen=False)
                self._exchange_one(slot)
        home.bump_versions([slot.index for slot in self._slots])

    def _exchange_one(self, slot: HomeParameter) -> None:
        average = self._memory.of(slot)
        moving = _Moving(slot, self._value(slot).clone(), average.clone(), self._exchanged)
        self._moving = moving
        self._set(slot, moving.average)
        average.copy_(moving.value)
        self._exchanged ^= {slot.index}
        self._moving = None

    def _undo(self, moving: _Moving) -> None:
        with plainly():
            self._context.engine.home.access_home(moving.slot.unit, True, frozen=False)
            self._set(moving.slot, moving.value)
            self._memory.of(moving.slot).copy_(moving.average)
        self._exchanged = moving.exchanged
        self._moving = None

    def _set(self, slot: HomeParameter, value: torch.Tensor) -> None:
        """Writes a value that `_value` has given, or an average like it."""
        if slot.has_master:
            self._weights.masters.set(slot, value)
        else:
            self._context.home.working(slot).copy_(value)

    # ---- state ----

    def state_dict(self) -> dict[str, torch.Tensor]:
        self._begin("ema.state_dict()")
        self._sync.meet("read averaged weights")
        known: dict[int, torch.Tensor] = {}  # tied names have one tensor

        def give(slot: HomeParameter) -> torch.Tensor:
            if slot.index not in known:
                if self._memory.has(slot):
                    known[slot.index] = self._sync.whole(slot, self._memory.of(slot), "averages")
                else:
                    self._context.engine.home.access_home(slot.unit, False)
                    self._weights.check(slot)
                    known[slot.index] = self._sync.values(slot)
            return known[slot.index]

        with self._weights.giving(give):
            found = self._module.state_dict(prefix=_PREFIX)
        return {"n_averaged": torch.tensor(self.num_updates, device="cpu"), **found}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._begin("ema.load_state_dict()", mends=True)
        self._sync.meet("load averaged weights")
        named: dict[str, HomeParameter] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            slot = self._context.slot_of.get(parameter)
            if slot is not None and self._memory.has(slot):
                named[_PREFIX + name] = slot
        _refuse_other_state(state_dict, named)
        if self._context.ranks is not None:
            lines = [f"n_averaged={int(state_dict['n_averaged'])}", *lines_of_model(self._module, state_dict, _PREFIX)]
            refuse_others([self._context.ranks], lines)
        self._is_whole = False
        with plainly():
            for name, slot in named.items():
                average = self._memory.of(slot)
                average.copy_(slot.part_of(state_dict[name].detach().to(device="cpu", dtype=average.dtype)))
        self._is_whole = True
        self.num_updates = int(state_dict["n_averaged"])

    def _begin(self, call: str, *, mends: bool = False) -> None:
        """Raises UsageError if the averages must not be used now."""
        self._run.recover()
        self._run.refuse_when_busy(call)
        self._run.refuse_while_averaged(call)
        self._run.require_consistent(call)
        if not mends and not self._is_whole:
            raise usage_error(
                f"{call} of averages of one step",
                "an update or a load of them that was stopped half-way",
                "ema.load_state_dict, or make them anew by noria.ema",
            )


@dataclasses.dataclass(frozen=True)
class _Moving:
    """Holds what was before an exchange of one parameter, which an interrupt may stop at any line."""

    slot: HomeParameter
    value: torch.Tensor
    average: torch.Tensor
    exchanged: frozenset[int]


class _AverageMemory:
    """Owns the arena. When the averages are gone, it is left to the tensors that the caller still has."""

    def __init__(self, context: Context, late: LateAllocations, slots: Sequence[HomeParameter]) -> None:
        self._places: dict[int, tuple[int, torch.dtype]] = {}  # by slot: offset in the arena
        sizes = [0] * len(context.units)
        inside: dict[int, int] = {}
        for slot in slots:
            dtype = torch.float32 if slot.has_master else slot.dtype
            inside[slot.index] = sizes[slot.unit]
            sizes[slot.unit] += aligned(slot.like.numel() * dtype.itemsize)
        taken = {purpose for purpose in context.home.arenas if purpose.startswith(AVERAGES)}
        names = (AVERAGES if number == 1 else f"{AVERAGES}, number {number}" for number in range(1, len(taken) + 2))
        region = Region.of(next(name for name in names if name not in taken), sizes)
        for slot in slots:
            dtype = torch.float32 if slot.has_master else slot.dtype
            self._places[slot.index] = (region.offsets[slot.unit] + inside[slot.index], dtype)
        self.num_bytes = region.bytes
        self._arena: _C.Arena | None = None
        if region.bytes:
            late.take(region)
            self._arena = context.home.arenas[region.purpose]
            weakref.finalize(self, late.leave, region.purpose).atexit = False

    def has(self, slot: HomeParameter) -> bool:
        return slot.index in self._places

    def of(self, slot: HomeParameter) -> torch.Tensor:
        """Returns the average of what this rank has of the parameter: a tensor that views the memory."""
        offset, dtype = self._places[slot.index]
        assert self._arena is not None
        with plainly():
            return _C.tensor_in(self._arena, offset, dtype, list(slot.like.shape), list(slot.like.stride()))


def _refuse_other_state(state_dict: Mapping[str, Any], named: Mapping[str, HomeParameter]) -> None:
    for name in ("n_averaged", *named):
        value = state_dict.get(name)
        shape = named[name].shape if name in named else torch.Size()
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            found = f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "none"
            raise usage_error(
                f'a tensor "{name}" of shape {tuple(shape)} in the state of averages',
                found,
                "give what ema.state_dict(), or that of an AveragedModel of the same model, has returned",
            )
