"""Which parameters an optimizer holds, as its groups say now, and by what their units are updated."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer

from noria._errors import UsageError, usage_error
from noria.custody import Wrapped
from noria.home import HomeParameter
from noria.kernels import no_number_in, why_not_fused
from noria.optimizer import original_class
from noria.ranks import comparable

__all__ = ["Groups", "Jobs", "Members"]

Groups = list[tuple[dict[str, Any], list[HomeParameter]]]
"""Of one unit: hyperparameters as they were at `step()`, and the parameters that are updated with them."""

Jobs = dict[int, Groups]
"""By unit."""


class Members:
    """Of one optimizer of a wrap call. `kernel`: as of `Updates`."""

    def __init__(self, wrapped: Wrapped, optimizer: Optimizer, kernel: str) -> None:
        self.wrapped = wrapped
        self.optimizer = optimizer
        self.kernel = kernel
        self.cls = original_class(type(optimizer))
        self.check(optimizer.param_groups)

    def slots(self) -> Iterator[HomeParameter]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield self.wrapped.slot_of[parameter]

    def fuses(self, unit: int) -> bool:
        return self.kernel == "fused" and unit in self.wrapped.plan.fused

    def takes_factor(self) -> bool:
        """Unscaling and clipping reach the update as a factor; else they are done to `p.grad`."""
        return (
            self.kernel == "fused"
            and not self.wrapped.updates_in_backward
            and all(self.fuses(slot.unit) for slot in self.slots())
        )

    def note_step(self, updated: Sequence[int]) -> None:
        """For ranks that share the model to compare: slots that a step updates, and what torch's class steps by."""
        if self.wrapped.ranks is None or not updated:
            return
        defaults = self.optimizer.defaults
        hyper = [comparable({key: group.get(key) for key in defaults}) for group in self.optimizer.param_groups]
        self.wrapped.custody.note_step(updated, zlib.crc32(repr(hyper).encode()))

    def check(self, groups: list[dict[str, Any]]) -> None:
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter not in self.wrapped.slot_of:
                    raise usage_error(
                        "an optimizer whose parameters belong to the wrapped models",
                        f"one of shape {tuple(parameter.shape)} in group {number} that no wrapped model has",
                        "wrap all models that the optimizer updates: noria.wrap([a, b], optimizer)",
                    )

    def check_options(self) -> None:
        """The groups may have been edited since the optimizer was wrapped."""
        self.check(self.optimizer.param_groups)
        self.check_held_once(())
        if self.kernel != "fused":
            return
        for number, group in enumerate(self.optimizer.param_groups):
            refusal = self.refusal_of(number, group)
            if refusal is not None:
                raise refusal

    def refusal_of(self, number: int, group: dict[str, Any]) -> UsageError | None:
        """What of a parameter group noria's own kernels cannot update with."""
        reason = why_not_fused(self.cls, [group])
        if reason is not None:
            return usage_error(
                f"{self.cls.__name__} with the options it was wrapped with: noria's own kernel updates it",
                f"group {number} with {reason}, for which there is none",
                'set it before noria.wrap, or wrap with kernel="torch"',
            )
        key = no_number_in(self.cls, group)
        if key is not None and group["params"]:
            return usage_error(
                f'{"two numbers" if key == "betas" else "a number"} under "{key}" in every parameter group',
                f"{group[key]!r} in group {number}" if key in group else f"none in group {number}",
                'set it before step(), under update="backward" before backward()',
            )
        return None

    def check_held_once(self, more: Iterable[nn.Parameter]) -> None:
        """The fused kernels' moments lie beside the parameter, so only one optimizer can keep some."""
        if self.kernel != "fused":
            return
        groups = [group for updates in self.wrapped.optimizers for group in updates.optimizer.param_groups]
        held = Counter(chain(more, *(group["params"] for group in groups)))
        if any(number > 1 and self.fuses(self.wrapped.slot_of[each].unit) for each, number in held.items()):
            raise usage_error(
                'each parameter in one place of one optimizer under kernel="fused"',
                "one that is in two",
                'wrap with kernel="torch"',
            )
