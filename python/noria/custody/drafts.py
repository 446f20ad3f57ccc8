"""Whether drafts pay: work that is thrown away at every step is not worth its memory traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["DraftJudge"]

_PATIENCE = 8  # steps in which no draft was kept, or all would have been
_STOPPED = (
    f"drafts have stopped: in {_PATIENCE} steps none was kept (gradients were clipped or edited after backward, or "
    "hyperparameters changed between forward and step)"
)


class DraftJudge:
    """Of one wrap call. `pay`: they are made."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self.pay = True
        self._counts = (0, 0)  # kept and lost, at the last step
        self._steps_in_vain = 0
        self._steps_that_would_hold = 0

    def judge(self, would_hold: bool) -> None:
        """After a step. `would_hold`: it would not have thrown away any."""
        if not self.wrapped.plan.drafted:
            return
        if not self.pay:
            self._steps_that_would_hold = self._steps_that_would_hold + 1 if would_hold else 0
            if self._steps_that_would_hold >= _PATIENCE:
                self.pay, self._steps_in_vain, self._steps_that_would_hold = True, 0, 0
                self.wrapped.plan.unpredicted.remove(_STOPPED)
            return
        counts = self.wrapped.custody.draft_counts()
        kept = counts["kept"] + counts["unchanged"]
        lost = counts["changed"] + counts["redone"] + counts["dropped"]
        was_kept, was_lost = self._counts
        self._counts = (kept, lost)
        if kept > was_kept:
            self._steps_in_vain = 0
        elif lost > was_lost:
            self._steps_in_vain += 1
        if self._steps_in_vain >= _PATIENCE and self.pay:
            self.pay = False
            self.wrapped.plan.unpredicted.append(_STOPPED)
