"""Which step comes now for a parameter that noria's kernels update, and the moments that it needs."""

from __future__ import annotations

from typing import Any

import torch

from noria import _C
from noria._errors import UsageError, usage_error
from noria.home import HomeParameter
from noria.kernels import FusedRule
from noria.moments import MOMENT_OF, PURPOSE_OF, ROUNDING_STEP, keys_of
from noria.updates.home_state import HomeState
from noria.updates.members import Members

__all__ = ["Steps"]

_MOST_STEPS = 1 << 62


class Steps:
    """Counts as torch's optimizers do, in `optimizer.state`, whose tensors the kernels write."""

    def __init__(self, members: Members, state: HomeState) -> None:
        self.members = members
        self.wrapped = members.wrapped
        self.state = state
        self._zeroed: set[int] = set()  # slots whose moments are zeros of which the optimizer's state does not know yet

    def ready(self, slot: HomeParameter, rule: FusedRule) -> int:
        """The step that comes now; `count` will say the same. Moments that somebody has put in the place of the home's
        are taken there, and nothing else is changed."""
        state = dict.get(self.state.shown, slot.parameter) or {}
        if not rule.keys or any(state.get(key) is None for key in rule.keys):
            return 1
        self._adopt_replaced(slot, state, self._keys(slot, rule))
        return self._after(slot, state, rule)

    def count(self, slot: HomeParameter, rule: FusedRule) -> int:
        """The step that comes now. State is made as torch makes it: lazily, from zeros, `step` a float."""
        if not rule.keys:
            return 1
        state = self.state.shown.unsettled(slot.parameter)
        step = self.ready(slot, rule)
        if any(state.get(key) is None for key in rule.keys):
            if rule.counts_steps:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            for key in self._keys(slot, rule):
                state[key] = self.state.moment(slot, key) if slot.index in self._zeroed else self._new_moment(slot, key)
                self.state.placed[(slot.index, key)] = state[key]
            self._zeroed.discard(slot.index)
        if rule.counts_steps:
            state["step"] += 1
        elif self.state.dtype != "fp32":
            state[ROUNDING_STEP] = step
        return step

    def expect(self, slot: HomeParameter, rule: FusedRule) -> int | None:
        """As `count` will, without counting. None: state will be made or moved first."""
        if rule not in self.wrapped.plan.fused[slot.unit] or slot.index in self.wrapped.values.masters.loaded_low_bits:
            return None
        if not rule.keys:
            return 1
        if not dict.__contains__(self.state.shown, slot.parameter):
            return None
        state = self.state.shown.unsettled(slot.parameter)
        if rule.counts_steps and state.get("step") is None:
            return None
        for key in self._keys(slot, rule):
            if state.get(key) is None or state[key] is not self.state.placed.get((slot.index, key)):
                return None
            _C.watch(state[key])  # who edits it before the step says so
        try:
            return self._after(slot, state, rule)
        except UsageError:
            return None  # step() says so, if nobody sets it right before

    def prepare(self, slot: HomeParameter, rule: FusedRule) -> int:
        """The step that comes now, with its moments in the home. What the optimizer's state will say of a first one is
        said at `step()`, for the parameters that were updated."""
        state = dict.get(self.state.shown, slot.parameter) or {}
        if any(state.get(key) is None for key in rule.keys) and slot.index not in self._zeroed:
            self._zeroed.add(slot.index)
            for key in self._keys(slot, rule):
                self._new_moment(slot, key)
        return self.ready(slot, rule)

    def change_places(self, unit: int) -> None:
        """A draft was committed: what views the unit's state views it where it lies now."""
        home = self.wrapped.home
        for slot in self.wrapped.units[unit].parameters:
            self.wrapped.values.move_views(slot)
            for key in keys_of(self.wrapped.plan.fused[unit][0].keys, self.state.dtype):
                adopted = self.state.placed[(slot.index, key)]
                is_moment = key in MOMENT_OF
                offset = home.moment_offset(slot, adopted.dtype) if is_moment else home.scales_offset(slot)
                _C.move_tensor(adopted, home.address(PURPOSE_OF[key], unit) + offset)

    def forget_prepared(self) -> None:
        """State has been loaded: moments that `prepare` has made are other ones now."""
        self._zeroed.clear()

    def _after(self, slot: HomeParameter, state: dict[str, Any], rule: FusedRule) -> int:
        """The step that comes after those that the state has seen."""
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
        """The state's tensors that the fused kernel writes. What lies outside of the home is fp32."""
        in_home = all(self.state.is_planned(slot, key) for key in rule.keys)
        return keys_of(rule.keys, self.state.dtype if in_home else "fp32")

    def _adopt_replaced(self, slot: HomeParameter, state: dict[str, Any], keys: tuple[str, ...]) -> None:
        """Tensors that somebody has put in the place of those in the home."""
        if all(state.get(key) is self.state.placed.get((slot.index, key)) for key in keys):
            return
        self.state.settle(slot.parameter)
        self.state.adopt(slot)
        for key in keys:
            if state.get(key) is None:  # scales that somebody took away: they are where they were
                state[key] = self.state.moment(slot, key)
            self.state.placed[(slot.index, key)] = state[key]

    def _new_moment(self, slot: HomeParameter, key: str) -> torch.Tensor:
        place = self.state.moment(slot, key)
        if place is not None:
            return place.zero_()
        made = torch.zeros_like(self.wrapped.home.working(slot), dtype=torch.float32)
        note = f"{self.members.cls.__name__} makes a {key} that was not planned for, outside of the home"
        if note not in self.wrapped.plan.unpredicted:
            self.wrapped.plan.unpredicted.append(note)
        return made
