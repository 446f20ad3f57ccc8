"""Reads an optimizer's parameter groups: which parameters it holds now, and which kernel updates their units."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from noria._errors import UsageError, usage_error
from noria.dist.ranks import comparable
from noria.model.layout import HomeParameter
from noria.model.optimizer_classes import original_class
from noria.model.update_rules import no_number_in, num_numbers, why_not_fused, wrong_choice
from noria.runtime.context import Context

__all__ = ["Groups", "Jobs", "ParamGroups", "refuse_strangers", "wants_more"]

Groups = list[tuple[dict[str, Any], list[HomeParameter]]]
"""For one unit: the hyperparameters at `step()`, and the parameters that are updated with them."""

Jobs = dict[int, Groups]
"""Groups by unit."""


class ParamGroups:
    """Reads and checks one optimizer's groups. `kernel` has the values of `StepDriver`."""

    def __init__(
        self,
        context: Context,
        optimizer: Optimizer,
        kernel: str,
        all_groups: Callable[[], Iterable[dict[str, Any]]],
    ) -> None:
        """`all_groups` returns the groups of all optimizers of the wrap call."""
        self.context = context
        self._all_groups = all_groups
        self.optimizer = optimizer
        self.kernel = kernel
        self.cls = original_class(type(optimizer))
        self.check(optimizer.param_groups)

    def slots(self) -> Iterator[HomeParameter]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield self.context.slot_of[parameter]

    def fuses(self, unit: int) -> bool:
        return self.kernel == "fused" and unit in self.context.plan.fused

    def takes_factor(self) -> bool:
        """Returns True if the update applies unscaling and clipping as a factor. Otherwise they change `p.grad`."""
        return (
            self.kernel == "fused"
            and not self.context.updates_in_backward
            and all(self.fuses(slot.unit) for slot in self.slots())
        )

    def note_step(self, updated: Sequence[int]) -> None:
        """Notes the slots that a step updates, and a checksum of the hyperparameters.

        Ranks that share the model compare these notes.
        """
        if self.context.ranks is None or not updated:
            return
        defaults = self.optimizer.defaults
        hyper = [comparable({key: group.get(key) for key in defaults}) for group in self.optimizer.param_groups]
        self.context.engine.ranks.note_step(updated, zlib.crc32(repr(hyper).encode()))

    def check(self, groups: list[dict[str, Any]]) -> None:
        refuse_strangers(groups, self.context.slot_of)

    def check_options(self) -> None:
        """Checks the groups again, because the user may have edited them since `noria.wrap`.

        Raises UsageError if they can no longer be updated.
        """
        self.check(self.optimizer.param_groups)
        self.check_held_once(())
        if self.kernel != "fused":
            return
        for number, group in enumerate(self.optimizer.param_groups):
            refusal = self.refusal_of(number, group)
            if refusal is not None:
                raise refusal

    def refusal_of(self, number: int, group: dict[str, Any]) -> UsageError | None:
        """Returns the error if noria's own kernels cannot update with the options of this group, else None."""
        reason = why_not_fused(self.cls, [group])
        if reason is not None:
            return usage_error(
                f"{self.cls.__name__} with the options it was wrapped with, because noria's own kernel updates it",
                f"group {number} with {reason}, for which there is none",
                'set it before noria.wrap, or wrap with kernel="torch"',
            )
        remedy = 'set it before step(), under update="backward" before backward()'
        key = no_number_in(self.cls, group)
        if key is not None and group["params"]:
            numbers = ("a number", "two numbers", "three numbers")[num_numbers(self.cls, key) - 1]
            return usage_error(
                f'{numbers} under "{key}" in every parameter group',
                f"{group[key]!r} in group {number}" if key in group else f"none in group {number}",
                remedy,
            )
        choice = wrong_choice(self.cls, group)
        if choice is not None and group["params"]:
            return usage_error(f"in every parameter group {choice[0]}", f"{choice[1]} in group {number}", remedy)
        return None

    def check_held_once(self, more: Iterable[nn.Parameter]) -> None:
        """Raises UsageError if a fused parameter is in two places.

        The fused kernels keep one set of moments for each parameter, so only one optimizer can use them.
        """
        if self.kernel != "fused":
            return
        held = Counter(chain(more, *(group["params"] for group in self._all_groups())))
        if any(number > 1 and self.fuses(self.context.slot_of[each].unit) for each, number in held.items()):
            raise usage_error(
                'each parameter in one place of one optimizer under kernel="fused"',
                "one that is in two",
                'wrap with kernel="torch"',
            )


def wants_more(groups: list[dict[str, Any]], slot_of: Mapping[torch.Tensor, HomeParameter]) -> bool:
    """Returns True if a group trains parameters that were frozen or not there when noria planned their memory."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return any(each not in slot_of or (each.requires_grad and not slot_of[each].trainable) for each in parameters)


def refuse_strangers(groups: list[dict[str, Any]], known: Container[torch.Tensor]) -> None:
    """Raises UsageError if a group has a parameter that is not in `known`, the wrapped models' own."""
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter not in known:
                raise usage_error(
                    "an optimizer whose parameters belong to the wrapped models",
                    f"one of shape {tuple(parameter.shape)} in group {number} that no wrapped model has",
                    "wrap all models that the optimizer updates: noria.wrap([a, b], optimizer). If you have added a "
                    "module to a wrapped model, unwrap it first, and wrap it again with the module",
                )
