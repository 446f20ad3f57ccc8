"""Updates by an optimizer that looks at more than one parameter: it runs whole, on its own object, which is lent the
home meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from noria._errors import usage_error
from noria.home import HomeParameter
from noria.modes import plainly
from noria.optimizer import original_class, step_of
from noria.stand_ins import exchange, refuse_out_of_reach
from noria.updates.by_torch import ByTorch
from noria.updates.gradients import take_gradients
from noria.updates.home_state import HomeState
from noria.updates.members import Members
from noria.updates.norms import Norms

__all__ = ["Whole"]


class Whole:
    """One such optimizer; see Note [Separable]."""

    def __init__(self, members: Members, state: HomeState, by_torch: ByTorch, norms: Norms) -> None:
        self.members = members
        self.wrapped = members.wrapped
        self.state = state
        self.by_torch = by_torch
        self.norms = norms
        self._updates: Any = None  # what the optimizer's facade goes to, while it is off
        # While the optimizer has the home: slot, its version, gradient, the gradient's version.
        self._lent: list[tuple[HomeParameter, int, torch.Tensor | None, int | None]] = []

    def step(self, closure: Callable[[], Any] | None) -> Any:
        optimizer = self.members.optimizer
        self.members.check(optimizer.param_groups)
        refuse_out_of_reach(optimizer, self.wrapped.slot_of)
        if self.norms.max_grad_norm is not None:
            if closure is not None:
                raise usage_error(
                    f"{self.members.cls.__name__}.step() without a closure, for max_grad_norm clips before it",
                    "one, which brings new gradients in the middle of the step",
                    "clip inside of the closure and leave max_grad_norm out",
                )
            self.norms.grad_norm = self.norms.clip_at_step(self.norms.max_grad_norm)
        step = step_of(original_class(type(optimizer)))

        def with_the_model() -> Any:
            """The user's closure: the model must see what the optimizer wrote, the optimizer the new gradients."""
            assert closure is not None
            self._take_home_back()
            try:
                return closure()
            finally:
                self._lend_home()

        self._updates = optimizer._noria  # type: ignore[attr-defined]
        self._lend_home()
        try:
            result = step(optimizer) if closure is None else step(optimizer, with_the_model)
        finally:
            self._take_home_back()
        self.wrapped.custody.end_step(True)
        return result

    def _lend_home(self) -> None:
        """Waits until nobody reads or writes the home of the parameters in the optimizer, and shows them to it."""
        met: dict[int, HomeParameter] = {}

        def meet(parameter: nn.Parameter) -> nn.Parameter:
            slot = self.wrapped.slot_of.get(parameter)
            if slot is not None:
                met[slot.index] = slot
            return parameter

        exchange(self.members.optimizer, meet)
        with plainly():
            take_gradients(self.members, self.state)
            self.wrapped.custody.begin_step()
            for unit in sorted({slot.unit for slot in met.values()}):
                self.wrapped.custody.settle(unit)  # another optimizer's
                self.wrapped.custody.defer_update(unit)
                self.wrapped.custody.settle(unit)  # the waits of an update; `run` finds no job and returns
            for slot in met.values():
                home = self.by_torch.home_parameter(slot)
                home.__dict__ = slot.parameter.__dict__  # attributes of the user's, both ways
                home.requires_grad_(slot.parameter.requires_grad)
                home.grad = self._lent_gradient(slot)
                written = None if home.grad is None else home.grad._version
                self._lent.append((slot, home._version, home.grad, written))
        homes = {slot.parameter: self.by_torch.home_parameter(slot) for slot in met.values()}
        exchange(self.members.optimizer, lambda parameter: homes.get(parameter, parameter))
        del self.members.optimizer._noria  # type: ignore[attr-defined]  # its methods are its own meanwhile

    def _lent_gradient(self, slot: HomeParameter) -> torch.Tensor | None:
        """`p.grad` itself where it may be updated with, for the optimizer may keep it; a copy else."""
        gradient, home = slot.parameter.grad, self.by_torch.home_parameter(slot)
        if gradient is None or (gradient.device == home.device and gradient.dtype == home.dtype):
            return gradient
        return self.wrapped.home.held(slot).to(home.dtype, copy=True)

    def _take_home_back(self) -> None:
        """The optimizer has its own parameters again; what it did to values and gradients is known everywhere."""
        lent, self._lent = self._lent, []
        owners = {self.by_torch.home_parameter(slot): slot.parameter for slot, _, _, _ in lent}
        exchange(self.members.optimizer, lambda parameter: owners.get(parameter, parameter))
        self.members.optimizer._noria = self._updates  # type: ignore[attr-defined]
        if self.members.optimizer.state is not self.state.shown:
            self.state.take_over()
        updated = []
        with plainly():
            for slot, version, gradient, written in lent:
                home = self.by_torch.home_parameter(slot)
                if home._version != version:
                    updated.append(slot.index)
                    if slot.has_master:
                        self.wrapped.values.masters.round(slot)
                if home.grad is not gradient:
                    like = slot.parameter
                    like.grad = None if home.grad is None else home.grad.to(device=like.device, dtype=like.dtype)
                elif gradient is not None and gradient is not slot.parameter.grad and gradient._version != written:
                    slot.parameter.grad.copy_(gradient)  # type: ignore[union-attr]  # a copy of it was lent
                home.grad = None
        self.wrapped.custody.bump_versions(updated)
