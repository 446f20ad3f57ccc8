"""Runs the step of an optimizer that is not separable: whole, on the user's own object.

During the step the optimizer holds the home's parameters in place of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from noria._errors import usage_error
from noria.model.layout import HomeParameter
from noria.model.optimizer_classes import original_class, step_of
from noria.runtime.masters import Masters
from noria.step.collect_grads import take_gradients
from noria.step.grad_norm import GradNorm
from noria.step.optimizer_state import HomeState
from noria.step.param_groups import ParamGroups
from noria.step.parameter_swap import exchange, refuse_out_of_reach
from noria.step.torch_step import TorchStep
from noria.torch_state import plainly

__all__ = ["WholeStep"]


class WholeStep:
    """Runs one optimizer that is not separable; see Note [Separable]."""

    def __init__(
        self, members: ParamGroups, state: HomeState, by_torch: TorchStep, norms: GradNorm, masters: Masters
    ) -> None:
        self.masters = masters
        self.members = members
        self.context = members.context
        self.state = state
        self.by_torch = by_torch
        self.norms = norms
        self._driver: object = None  # what the optimizer's methods call; kept here during its own step
        # Filled while the optimizer has the home: slot, its version, its gradient, the gradient's version.
        self._lent: list[tuple[HomeParameter, int, torch.Tensor | None, int | None]] = []

    def step(self, closure: Callable[[], object] | None) -> object:
        optimizer = self.members.optimizer
        self.members.check(optimizer.param_groups)
        refuse_out_of_reach(optimizer, self.context.slot_of)
        if self.norms.max_grad_norm is not None:
            if closure is not None:
                raise usage_error(
                    f"{self.members.cls.__name__}.step() without a closure, for max_grad_norm clips before it",
                    "one, which brings new gradients in the middle of the step",
                    "clip inside of the closure and leave max_grad_norm out",
                )
            self.norms.grad_norm = self.norms.clip_at_step(self.norms.max_grad_norm)
        step = step_of(original_class(type(optimizer)))

        def with_the_model() -> object:
            """Runs the user's closure with the model in place.

            The model must see the new weights, and the optimizer must see the new gradients.
            """
            assert closure is not None
            self._take_home_back()
            try:
                return closure()
            finally:
                self._lend_home()

        self._driver = optimizer._noria  # type: ignore[attr-defined]
        try:
            self._lend_home()
            result = step(optimizer) if closure is None else step(optimizer, with_the_model)
        finally:
            self._take_home_back()
        self.context.engine.updates.end_step(True)
        return result

    def _lend_home(self) -> None:
        """Puts the home's parameters into the optimizer. First waits until no op reads or writes them."""
        met: dict[int, HomeParameter] = {}

        def meet(parameter: nn.Parameter) -> nn.Parameter:
            slot = self.context.slot_of.get(parameter)
            if slot is not None:
                met[slot.index] = slot
            return parameter

        exchange(self.members.optimizer, meet)
        with plainly():
            take_gradients(self.members, self.state, self.masters)
            self.context.engine.updates.begin_step()
            for unit in sorted({slot.unit for slot in met.values()}):
                self.context.engine.updates.run_deferred(unit)  # a waiting update of another optimizer
                self.context.engine.updates.defer_update(unit)
                self.context.engine.updates.run_deferred(unit)  # does the waits of an update; `run` finds no job
            for slot in met.values():
                home = self.by_torch.home_parameter(slot)
                home.__dict__ = slot.parameter.__dict__  # shares the user's attributes in both directions
                home.requires_grad_(slot.parameter.requires_grad)
                home.grad = self._lent_gradient(slot)
                written = None if home.grad is None else home.grad._version
                self._lent.append((slot, home._version, home.grad, written))
        homes = {slot.parameter: self.by_torch.home_parameter(slot) for slot in met.values()}
        exchange(self.members.optimizer, lambda parameter: homes.get(parameter, parameter))
        del self.members.optimizer._noria  # type: ignore[attr-defined]  # meanwhile its methods are its own

    def _lent_gradient(self, slot: HomeParameter) -> torch.Tensor | None:
        """Returns the gradient for the optimizer: `p.grad` itself if device and dtype match, else a copy.

        `p.grad` itself is better, because the optimizer may keep a reference to it.
        """
        gradient, home = slot.parameter.grad, self.by_torch.home_parameter(slot)
        if gradient is None or (gradient.device == home.device and gradient.dtype == home.dtype):
            return gradient
        return self.context.home.held(slot).to(home.dtype, copy=True)

    def _take_home_back(self) -> None:
        """Gives the optimizer its own parameters again, and passes on its changes to values and gradients."""
        lent, self._lent = self._lent, []
        owners = {self.by_torch.home_parameter(slot): slot.parameter for slot, _, _, _ in lent}
        exchange(self.members.optimizer, lambda parameter: owners.get(parameter, parameter))
        self.members.optimizer._noria = self._driver  # type: ignore[attr-defined]
        if self.members.optimizer.state is not self.state.shown:
            self.state.take_over()
        updated = []
        with plainly():
            for slot, version, gradient, written in lent:
                home = self.by_torch.home_parameter(slot)
                if home._version != version:
                    updated.append(slot.index)
                    if slot.has_master:
                        self.masters.round(slot)
                if home.grad is not gradient:
                    like = slot.parameter
                    like.grad = None if home.grad is None else home.grad.to(device=like.device, dtype=like.dtype)
                elif gradient is not None and gradient is not slot.parameter.grad and gradient._version != written:
                    slot.parameter.grad.copy_(gradient)  # type: ignore[union-attr]  # the optimizer had a copy
                home.grad = None
        self.context.engine.home.bump_versions(updated)
