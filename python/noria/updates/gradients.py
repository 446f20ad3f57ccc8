"""What `p.grad` says at `step()`."""

from __future__ import annotations

import torch

from noria._errors import usage_error
from noria.custody import Wrapped
from noria.home import HomeParameter
from noria.kernels import keeps_state
from noria.updates.home_state import HomeState
from noria.updates.members import Jobs, Members
from noria.updates.worker import hyper_of

__all__ = ["take_foreign", "take_gradients"]


def take_foreign(wrapped: Wrapped, slot: HomeParameter) -> None:
    """Where `p.grad` is a tensor of the user's own, the held gradient becomes a copy of it."""
    if wrapped.custody.gradient_is(slot.index) != "foreign":
        return
    if not slot.trainable:
        raise usage_error(
            f'no gradient on "{slot.name}", frozen when it was wrapped',
            "one in p.grad",
            "unfreeze parameters before noria.wrap",
        )
    gradient = slot.parameter.grad
    if gradient is not None and gradient.layout is not torch.strided:
        raise usage_error(f'a dense gradient of "{slot.name}"', "a sparse one in p.grad", "give p.grad.to_dense()")
    wrapped.custody.take_foreign_gradient(slot.index)


def take_gradients(members: Members, state: HomeState) -> Jobs:
    """What `p.grad` says now, unit by unit and group by group; the user's own tensors are copied to the home."""
    jobs: Jobs = {}
    for group in members.optimizer.param_groups:
        hyper = hyper_of(group)
        by_unit: dict[int, list[HomeParameter]] = {}
        for parameter in group["params"]:
            slot = members.wrapped.slot_of[parameter]
            if parameter.grad is None:
                continue
            state.check(slot, group)
            if members.kernel != "whole" and (slot.has_master or keeps_state(members.cls, group)):
                state.shown.unsettled(parameter)  # made now, so that it keeps torch's order
            members.wrapped.values.masters.confirm_low_bits(slot)
            take_foreign(members.wrapped, slot)
            if members.kernel == "whole":
                members.wrapped.custody.apply_scales(slot.index)
            by_unit.setdefault(slot.unit, []).append(slot)
        for unit, slots in by_unit.items():
            jobs.setdefault(unit, []).append((hyper, slots))
    return jobs
