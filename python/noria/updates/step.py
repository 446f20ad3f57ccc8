"""`step()` and its kin of one wrapped optimizer: what is done by which part of this folder, and in which order."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from noria._errors import usage_error
from noria.custody import Wrapped
from noria.home import HomeParameter, StatePlace
from noria.modes import autocast_now, plainly
from noria.optimizer import original_class, refuse_inside_backward
from noria.updates.by_torch import ByTorch
from noria.updates.drafts import Drafts
from noria.updates.fused import Fused
from noria.updates.gradients import take_gradients
from noria.updates.home_state import HomeState
from noria.updates.inside_backward import InsideBackward
from noria.updates.members import Members
from noria.updates.norms import Norms
from noria.updates.parts import StateParts
from noria.updates.state_dicts import load_state_dict, state_dict
from noria.updates.steps import Steps
from noria.updates.whole import Whole

__all__ = ["Updates"]


class Updates:
    """Turns `step()` of one optimizer into updates of units. `kernel`: "fused", "torch", or "whole"; see kernels.py,
    Note [Who updates a unit]."""

    def __init__(
        self,
        wrapped: Wrapped,
        optimizer: Optimizer,
        kernel: str,
        state_places: dict[tuple[int, str], StatePlace],
        state_arena: Any,
    ) -> None:
        self.wrapped = wrapped
        self.optimizer = optimizer
        self.in_backward = wrapped.updates_in_backward
        self.num_steps = 0
        self.scaled_by_class = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._members = members = Members(wrapped, optimizer, kernel)
        self._state = state = HomeState(members, state_places, state_arena)
        self._by_torch = ByTorch(members, state)
        self._steps = steps = Steps(members, state)
        self._fused = fused = Fused(members, state, steps)
        self._norms = norms = Norms(members, fused)
        self._drafts = Drafts(members, steps, fused, norms)
        self._inside_backward = InsideBackward(members, state, steps, fused)
        self._parts = StateParts(members, state)
        self._whole = Whole(members, state, self._by_torch, norms)

    @property
    def max_grad_norm(self) -> float | None:
        return self._norms.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, norm: float | None) -> None:
        self._norms.max_grad_norm = norm

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """As the last `step()` found it."""
        return self._norms.grad_norm

    def slots(self) -> Iterator[HomeParameter]:
        return self._members.slots()

    def fuses(self, slot: HomeParameter) -> bool:
        return self._members.fuses(slot.unit)

    def sum_job(self, unit: int, slots: list[HomeParameter]) -> Any:
        """Of the squares of what the home holds of their gradients."""
        return self._fused.sum_job(unit, slots)

    def takes_factor(self) -> bool:
        """Unscaling and clipping reach the update as a factor; else they are done to `p.grad`."""
        return self._members.takes_factor()

    # ---- between passes ----

    def step(self, closure: Callable[[], Any] | None) -> Any:
        wrapped = self.wrapped
        refuse_inside_backward("optimizer.step()")
        wrapped.recover()
        wrapped.loaded.refuse_missing("optimizer.step()")
        wrapped.begin_step()
        self._state.follow()
        if self._members.kernel == "whole":
            result = self._whole.step(closure)
            self.num_steps += 1
            return result
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self.optimizer, "found_inf", None)  # from a GradScaler, which leaves the rest to step()
        if found_inf is not None and found_inf.item() != 0:
            self._norms.grad_norm = None if self._norms.max_grad_norm is None else torch.tensor(math.inf, device="cpu")
            return loss
        self._by_torch.autocast = autocast_now(wrapped.device.type)
        with plainly():
            if self.in_backward:
                refusal = self._inside_backward.claim()
                self.num_steps += 1
                if refusal is not None:
                    raise refusal
            else:
                self._begin()
        return loss

    def _begin(self) -> None:
        wrapped, norms = self.wrapped, self._norms
        self._members.check_options()
        self._fused.number_elements()
        if norms.max_grad_norm is not None and not self.takes_factor():
            norms.grad_norm = norms.clip_at_step(norms.max_grad_norm)
        jobs = take_gradients(self._members, self._state)
        factor, expected = norms.factor(jobs), norms.expected_factor
        ready = self._fused.ready(jobs, factor)
        wrapped.custody.begin_step()
        order = [unit for unit in wrapped.custody.next_forward_order() if unit in jobs]
        slots = [slot for groups in jobs.values() for _, members in groups for slot in members]
        updated = [slot.index for slot in slots]
        for unit in order:
            wrapped.custody.settle(unit)  # an earlier step's, if no forward came between
        for urgency, unit in enumerate(order):
            if unit in ready:
                self._fused.submit(unit, ready[unit], urgency)
            else:
                self._by_torch.defer(unit, jobs[unit])
        wrapped.custody.bump_versions(updated)
        self._members.note_step(updated)
        try:
            wrapped.custody.end_step(wrapped.policy.update == "blocking")
        finally:
            wrapped.custody.guard_gradients()  # of those that the pool still reads, where an update by torch raised
        norms.unscale(slots)
        wrapped.drafts.judge(would_hold=norms.max_grad_norm is not None and factor == expected)
        self.num_steps += 1

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        return self._norms.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def bytes_by_torch(self) -> int:
        return self._by_torch.bytes_moved()

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return self._inside_backward.accumulate()

    # ---- inside of passes ----

    def expect(self) -> None:
        """Tells the engine what `step()` would do as things are now, so that it may be done during backward."""
        self._drafts.expect()

    def expect_in_backward(self) -> list[int]:
        """Tells the engine how to update each unit in the backward that begins now. Returns the slots it spoke of."""
        return self._inside_backward.expect()

    def run(self, unit: int) -> None:
        """The real optimizer on one unit, if an update of it is waiting."""
        self._by_torch.run(unit)

    # ---- state ----

    def plain(self) -> dict[Any, Any]:
        """The state as torch's own optimizer keeps it, fp32 and whole, and the masters' low bits beside. Collective
        where ranks share the model."""
        return self._state.plain()

    def state_dict(self) -> dict[str, Any]:
        return state_dict(self._members, self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wrapped.refuse_between_steps("optimizer.load_state_dict()", mends=True)
        self._state.is_loading = True  # it may be what mends a torn home
        try:
            load_state_dict(self._members, self._state, state_dict)
            self._is_loaded()
        finally:
            self._state.is_loading = False

    def parts(self) -> dict[str, Any]:
        """As `state_dict`, for `torch.distributed.checkpoint`: by name, of what this process has at home."""
        self.wrapped.recover()
        self._state.is_loading = True  # it may be for a load
        try:
            self._state.follow()
            return self._parts.state_dict()
        finally:
            self._state.is_loading = False

    def load_parts(self, state_dict: dict[str, Any]) -> None:
        self._parts.load(state_dict)
        self._is_loaded()

    def _is_loaded(self) -> None:
        self._steps.forget_prepared()
        self.wrapped.loaded.note(self)
        for after in self.optimizer._optimizer_load_state_dict_post_hooks.values():
            after(self.optimizer)

    def add_param_group(self, group: dict[str, Any]) -> None:
        params = group.get("params") if isinstance(group, dict) else None
        if params is not None and not isinstance(params, set):
            members = group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
            parameters = [member[1] if isinstance(member, tuple) else member for member in members]
            if all(isinstance(parameter, torch.Tensor) for parameter in parameters):
                self._check_new(parameters)
        original_class(type(self.optimizer)).add_param_group(self.optimizer, group)  # what is no group, torch refuses
        self.optimizer._step_supports_amp_scaling = self.takes_factor()  # type: ignore[attr-defined]

    def _check_new(self, parameters: list[Any]) -> None:
        """Parameters that come in a new group."""
        self._members.check([{"params": parameters}])
        self._members.check_held_once(parameters)
        for slot in (self.wrapped.slot_of[parameter] for parameter in parameters):
            if slot.is_split and not self._members.fuses(slot.unit):
                raise usage_error(
                    f"a group whose masters {self._members.cls.__name__} can update: it is not noria's kernel's",
                    f'"{slot.name}", whose master is split for that kernel',
                    'wrap with kernel="torch", or give the group to the optimizer before noria.wrap',
                )
