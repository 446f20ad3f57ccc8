"""Decides if drafts pay: drafts that every step throws away are not worth their memory traffic."""

from __future__ import annotations

from noria.runtime.context import Context

__all__ = ["DraftPolicy"]

_PATIENCE = 8  # drafts stop after this many steps that lost all of them, and begin after this many that had kept all
_STOPPED = (
    f"drafts have stopped: in {_PATIENCE} steps none was kept (gradients were clipped or edited after backward, "
    "hyperparameters changed between forward and step, or weights or state were used before the step)"
)


class DraftPolicy:
    """Decides after each step whether drafts are made in the next one (`pay`)."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.pay = True
        self._counts = (0, 0)  # kept and lost, until the last step
        self._steps_in_vain = 0
        self._steps_that_would_keep = 0

    def judge(self, would_hold: bool) -> None:
        """Decides after a step. `would_hold`: the step would have kept all drafts.

        Ranks that share the model go on: their pools count at different times, and all must draft the same units.
        """
        if not self.context.plan.drafted or self.context.ranks is not None:
            return
        if not self.pay:
            self._steps_that_would_keep = self._steps_that_would_keep + 1 if would_hold else 0
            if self._steps_that_would_keep >= _PATIENCE:
                self.pay, self._steps_in_vain, self._steps_that_would_keep = True, 0, 0
                self.context.notes.remove(_STOPPED)
            return
        counts = self.context.engine.updates.draft_counts()
        kept = counts["kept"] + counts["unchanged"]
        lost = counts["changed"] + counts["redone"] + counts["undone"] + counts["dropped"]
        was_kept, was_lost = self._counts
        self._counts = (kept, lost)
        if kept > was_kept:
            self._steps_in_vain = 0
        elif lost > was_lost:
            self._steps_in_vain += 1
        if self._steps_in_vain >= _PATIENCE:
            self.pay = False
            self.context.notes.append(_STOPPED)
