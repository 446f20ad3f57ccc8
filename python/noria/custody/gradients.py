"""Memory for gradients that is taken once training has begun, for loops that let them stay where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from noria._errors import usage_error
from noria.custody.hooks import in_backward
from noria.home import GRADIENT_RING, UNSUMMED, Region, held_region
from noria.limits import check_fits, host_limits
from noria.policy import host_budget

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["LaterGradients"]


class LaterGradients:
    """Of one wrap call."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self.num_accumulating = 0  # blocks of optimizer.accumulate() that are open
        self._num_unsynced = 0  # blocks of model.no_sync() that are open

    def hold_all(self) -> None:
        """update="backward" that accumulates: memory for all gradients, taken the first time, in place of the ring."""
        if self.wrapped.custody.holds_all():
            return
        region = held_region(self.wrapped.units)  # the ring is given back only after it
        self._take_later(region, self.wrapped.custody.hold_all)
        self.wrapped.home.give_back(GRADIENT_RING)
        self.wrapped.plan.regions = [
            region if each.purpose == GRADIENT_RING else each for each in self.wrapped.plan.regions
        ]

    def _take_later(self, region: Region, use: Callable[[list[int]], None]) -> None:
        """More memory for gradients, once training has begun."""
        budget = host_budget(self.wrapped.policy)
        more = [(region.purpose, region.bytes)]
        home = [(each.purpose, each.bytes) for each in self.wrapped.plan.regions]
        if refusal := check_fits(home + more, budget, []) or check_fits(more, budget, host_limits()):
            raise refusal
        self.wrapped.custody.idle()  # updates still read what it may replace
        held = self.wrapped.home.take_held(region, self.wrapped.backend)
        try:
            use(held)
        except BaseException:
            self.wrapped.home.give_back(region.purpose)
            raise

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """`with model.no_sync():` around each backward of a step but its last: gradients stay this rank's own, whole,
        until that one sums them up. The first time it takes memory for all of them. Which backward runs inside counts;
        on all ranks alike."""
        if in_backward():
            raise usage_error("model.no_sync() around a backward", "it inside of one", "enter it before backward()")
        self.wrapped.recover()
        if not self.wrapped.custody.holds_unsummed():
            region = Region.of(UNSUMMED, (unit.gradients for unit in self.wrapped.units))
            self._take_later(region, self.wrapped.custody.hold_unsummed)
            self.wrapped.plan.regions = [*self.wrapped.plan.regions, region]
        self._num_unsynced += 1
        self.wrapped.custody.set_unsynced(True)
        try:
            yield
        finally:
            self._num_unsynced -= 1
            self.wrapped.custody.set_unsynced(self._num_unsynced > 0)
