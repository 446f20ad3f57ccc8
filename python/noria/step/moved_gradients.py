"""Moves gradients from one home to the next if ranks share a model that is wrapped again between two passes."""

from __future__ import annotations

from noria.runtime.context import Context
from noria.torch_state import plainly

__all__ = ["MovedGradients"]


class MovedGradients:
    """Keeps each rank's parts of gradients that the next step may use. Without ranks it keeps none: `p.grad` has them.

    A part views the home of before, which stays until the gradients have moved.
    """

    def __init__(self, context: Context) -> None:
        """Reads the gradients of a wrapped model. Order: between passes, before it is unwrapped."""
        self._kept = []
        if context.ranks is None or context.updates_in_backward:
            return
        engine = context.engine
        engine.updates.run_all_deferred()
        engine.idle()
        with plainly():
            for slot in context.slots:
                if engine.gradients.gradient_is(slot.index) == "held":
                    engine.gradients.apply_scales(slot.index)
                    self._kept.append((slot, context.home.held(slot)))

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
