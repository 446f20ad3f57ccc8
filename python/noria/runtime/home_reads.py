"""Shows weights between passes, under reads="home": parameters have the home's values until the next forward.

Shown are all weights, after `wrap` and after each `step()`. Writes to them are taken over before anything else uses the
home, as writes to the tensors of `state_dict()` are. A split master keeps the low bits that it had.
"""

from __future__ import annotations

from noria.runtime.context import Context
from noria.runtime.load_tracker import LoadTracker
from noria.runtime.state import RunState
from noria.runtime.weights import Weights

__all__ = ["HomeReads"]


class HomeReads:
    """Opens the home between passes. Does nothing under reads="passes"."""

    def __init__(self, context: Context, run: RunState, loads: LoadTracker, weights: Weights) -> None:
        self.context = context
        self.run = run
        self.loads = loads
        self.weights = weights
        self._is_wanted = context.policy.reads == "home"
        self._is_open = False
        run.on_settle.append(self._settle)

    def begin(self) -> None:
        """Shows the weights, after all updates are over. Not while some have no values, or are of different steps."""
        if not self._is_wanted or self._is_open or self.run.is_materialized:
            return
        if self.loads.missing or self.context.engine.torn():
            return
        self.weights.show()
        self._is_open = True

    def end(self) -> None:
        """Takes over what was written, before a pass or a step begins. Inside of noria.materialize nothing begins."""
        if self._is_open and not self.run.is_materialized:
            self._is_open = False
            self.weights.hide()

    def _settle(self) -> None:
        if self._is_open:
            self.weights.take_shown()
