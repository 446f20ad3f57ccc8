"""Moves gradients from one home to the next if ranks share a model that is wrapped again between two passes."""

from __future__ import annotations

from collections.abc import Container

import torch

from noria.model.layout import HomeParameter
from noria.runtime.context import Context
from noria.torch_state import plainly

__all__ = ["MovedGradients"]


class MovedGradients:
    """Keeps each rank's parts of gradients that the next step may use. Without ranks it keeps none: `p.grad` has them.

    A part views the home of before, which stays until the gradients have moved.
    """

    def __init__(self, context: Context, parameters: Container[torch.Tensor]) -> None:
        """Reads the gradients of these parameters. Order: between passes, before the model is unwrapped."""
        self._kept: list[tuple[HomeParameter, torch.Tensor]] = []
        if context.ranks is None or context.updates_in_backward:
            return
        engine = context.engine
        engine.updates.run_all_deferred()
        engine.idle()
        with plainly():
            for slot in context.slots:
                if slot.parameter in parameters and engine.gradients.gradient_is(slot.index) == "held":
                    engine.gradients.apply_scales(slot.index)
                    self._kept.append((slot, context.home.held(slot)))

    def lines(self) -> list[str]:
        """Returns what must be the same on all ranks."""
        return [f'a gradient of "{slot.name}"' for slot, _ in self._kept]

    def give(self, made: Context) -> None:
        """Puts the gradients into the home of the model, which has been wrapped again. Collective."""
        if made.ranks is None:
            return
        with plainly():
            for before, part in self._kept:
                whole = made.ranks.whole(before, part)
                slot = made.slot_of[before.parameter]
                made.home.held(slot).copy_(slot.part_of(whole))
                made.engine.gradients.take_part(slot.index)
