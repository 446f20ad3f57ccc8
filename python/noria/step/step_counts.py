"""Counts the steps of parameters that noria's kernels update, and creates their moments."""

from __future__ import annotations

from typing import Any

import torch

from noria import _C
from noria._errors import UsageError, usage_error
from noria.model.layout import FACTORED, HomeParameter, factored_shapes
from noria.model.moment_formats import PURPOSE_OF, ROUNDING_STEP, keys_of
from noria.model.update_rules import FusedRule
from noria.runtime.weights import Weights
from noria.step.optimizer_state import HomeState
from noria.step.param_groups import ParamGroups

__all__ = ["StepCounts"]

_MOST_STEPS = 1 << 62
_ONE = torch.ones((), dtype=torch.float32, device="cpu")  # torch adds it faster than a number


def _lacks(state: dict[str, Any], keys: tuple[str, ...]) -> bool:
    """Returns True if one of these keys has no value."""
    for key in keys:  # noqa: SIM110  (a loop is faster, and each parameter of a step comes here)
        if state.get(key) is None:
            return True
    return False


class StepCounts:
    """Counts steps in `optimizer.state`, as torch's optimizers do. The kernels write the tensors of that state."""

    def __init__(self, members: ParamGroups, state: HomeState, weights: Weights) -> None:
        self.weights = weights
        self.members = members
        self.context = members.context
        self.state = state
        self._zeroed: set[int] = set()  # slots with zeroed moments that are not in optimizer.state yet
        self._keys_of: dict[tuple[int, FusedRule], tuple[str, ...]] = {}  # see `_keys`

    def ready(self, slot: HomeParameter, rule: FusedRule) -> int:
        """Returns the number of the next step, as `count` will.

        If the user has replaced moments, this method moves them to the home. It changes nothing else.
        """
        state = dict.get(self.state.shown, slot.parameter) or {}
        keys = rule.state_keys(slot)
        if not keys or _lacks(state, keys):
            return 1
        self._adopt_replaced(slot, state, self._keys(slot, rule))
        return self._after(slot, state, rule)

    def count(self, slot: HomeParameter, rule: FusedRule) -> None:
        """Counts the next step. State is created as in torch: lazily, with zeros, and `step` is a float tensor.

        Order: `ready` has been called for this step.
        """
        keys = rule.state_keys(slot)
        if not keys:
            return
        state = self.state.shown.unsettled(slot.parameter)
        is_first = _lacks(state, keys)
        if is_first:
            if rule.counts_steps:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            for key in self._keys(slot, rule):
                state[key] = self.state.moment(slot, key) if slot.index in self._zeroed else self._new_moment(slot, key)
                self.state.placed[(slot.index, key)] = state[key]
            self._zeroed.discard(slot.index)
        if rule.counts_steps:
            number = state["step"]
            is_usual = isinstance(number, torch.Tensor) and number.dtype is torch.float32
            state["step"] += _ONE if is_usual else 1
        elif self.state.dtype != "fp32":
            state[ROUNDING_STEP] = 1 if is_first else self._after(slot, state, rule)

    def expect(self, slot: HomeParameter, rule: FusedRule) -> int | None:
        """Returns the number of the next step without counting it.

        Returns None if no draft can be made: the state must first be created, moved or corrected.
        """
        if rule not in self.context.plan.fused[slot.unit] or slot.index in self.weights.masters.loaded_low_bits:
            return None
        if not rule.state_keys(slot):
            return 1
        if not dict.__contains__(self.state.shown, slot.parameter):
            return None
        state = self.state.shown.unsettled(slot.parameter)
        for key in self._keys(slot, rule):
            if state.get(key) is None or state[key] is not self.state.placed.get((slot.index, key)):
                return None
            _C.watch(state[key])  # reports the first write to it before the step
        try:
            return self._after(slot, state, rule)
        except UsageError:
            return None  # step() raises, unless the user corrects the state before

    def prepare(self, slot: HomeParameter, rule: FusedRule) -> int:
        """Returns the number of the next step, and zeroes the moments in the home if it is the first step.

        `step()` later enters these moments into the optimizer's state, for the parameters that were updated.
        """
        state = dict.get(self.state.shown, slot.parameter) or {}
        if _lacks(state, rule.state_keys(slot)) and slot.index not in self._zeroed:
            self._zeroed.add(slot.index)
            for key in self._keys(slot, rule):
                self._new_moment(slot, key)
        return self.ready(slot, rule)

    def forget_prepared(self) -> None:
        """Forgets the moments that `prepare` has zeroed. Called after a load, which replaces them."""
        self._zeroed.clear()

    def _after(self, slot: HomeParameter, state: dict[str, Any], rule: FusedRule) -> int:
        """Returns the number of steps in the state plus one, or 2 if the rule needs no count.

        Raises UsageError if the state has no valid number of steps.
        """
        if not rule.counts_steps and self.state.dtype == "fp32":
            return 2
        key = "step" if rule.counts_steps else ROUNDING_STEP
        found: Any = state.get(key, None if rule.counts_steps else 1)
        try:
            seen = -1 if isinstance(found, str) else int(found)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            seen = -1
        if not 0 <= seen < _MOST_STEPS:
            raise usage_error(
                f'a number of steps as "{key}" in optimizer.state of "{slot.name}"',
                repr(found),
                "set it right, or load a checkpoint",
            )
        return seen + 1

    def _keys(self, slot: HomeParameter, rule: FusedRule) -> tuple[str, ...]:
        """Returns the keys of the state tensors that the fused kernel writes. Moments outside of the home are fp32."""
        known = (slot.index, rule)
        found = self._keys_of.get(known)
        if found is None:
            keys = rule.state_keys(slot)
            in_home = all(self.state.is_planned(slot, key) for key in keys)
            found = self._keys_of[known] = keys_of(keys, self.state.dtype if in_home else "fp32")
        return found

    def _adopt_replaced(self, slot: HomeParameter, state: dict[str, Any], keys: tuple[str, ...]) -> None:
        """Moves tensors to the home if the user has replaced the home's tensors with them."""
        if self.state.has_placed(slot, keys):
            return
        self.state.settle(slot.parameter)
        self.state.adopt(slot)
        for key in keys:
            if state.get(key) is None:  # the user removed the scales; the home still has them
                state[key] = self.state.moment(slot, key)
            self.state.placed[(slot.index, key)] = state[key]

    def _new_moment(self, slot: HomeParameter, key: str) -> torch.Tensor:
        place = self.state.moment(slot, key)
        if place is not None and self.context.files.is_blank(slot.unit):
            return place
        if place is not None:
            self.context.files.touch(slot.unit)
            return place.zero_()
        if PURPOSE_OF.get(key) == FACTORED:
            made = torch.zeros(factored_shapes(slot.like.shape)[key], dtype=torch.float32, device="cpu")
        else:
            made = torch.zeros_like(self.context.home.working(slot), dtype=torch.float32)
        note = f"{self.members.cls.__name__} makes a {key} that was not planned for, outside of the home"
        if note not in self.context.notes:
            self.context.notes.append(note)
        return made
