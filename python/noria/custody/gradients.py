"""Memory for gradients that is taken once training has begun, for loops that let them stay where they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from noria._errors import usage_error
from noria.custody.hooks import in_backward
from noria.home import GRADIENT_RING, UNSUMMED, Region, held_region

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["LaterGradients"]


class _Mode:
    """A mode of the engine's that is on while blocks of it are open, and that takes its memory the first time."""

    def __init__(self, take: Callable[[], None], turn: Callable[[bool], None]) -> None:
        self._take = take
        self._turn = turn
        self._num_open = 0

    @property
    def is_open(self) -> bool:
        return self._num_open > 0

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        self._take()
        self._num_open += 1
        self._turn(True)
        try:
            yield
        finally:
            self._num_open -= 1
            self._turn(self.is_open)


class LaterGradients:
    """Of one wrap call."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self._accumulating = _Mode(self.hold_all, wrapped.custody.set_accumulating)
        self._unsynced = _Mode(self._hold_unsummed, wrapped.custody.set_unsynced)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """`with optimizer.accumulate():`, where updates are made inside backward."""
        return self._blocks(self._accumulating, "optimizer.accumulate()")

    @property
    def accumulates(self) -> bool:
        return self._accumulating.is_open

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """`with model.no_sync():` around each backward of a step but its last: gradients stay this rank's own, whole,
        until that one sums them up. The first time it takes memory for all of them. Which backward runs inside counts;
        on all ranks alike. One process sums up nothing: there backwards accumulate, as without."""
        if self.wrapped.ranks is None:
            return self.accumulate() if self.wrapped.updates_in_backward else contextlib.nullcontext()
        return self._blocks(self._unsynced, "model.no_sync()")

    @contextlib.contextmanager
    def _blocks(self, mode: _Mode, call: str) -> Iterator[None]:
        if in_backward():
            raise usage_error(f"{call} around a backward", "it inside of one", "enter it before backward()")
        self.wrapped.recover()
        with mode.block():
            yield

    def hold_all(self) -> None:
        """In place of the ring, where updates are made inside backward."""
        wrapped = self.wrapped
        if wrapped.custody.holds_all():
            return
        self._take(held_region(wrapped.units), wrapped.custody.hold_all)
        wrapped.later.give_back(GRADIENT_RING)  # only now

    def _hold_unsummed(self) -> None:
        wrapped = self.wrapped
        if wrapped.custody.holds_unsummed():
            return
        self._take(Region.of(UNSUMMED, (unit.gradients for unit in wrapped.units)), wrapped.custody.hold_unsummed)

    def _take(self, region: Region, use: Callable[[list[int]], None]) -> None:
        taken = self.wrapped.later.take(region)
        try:
            self.wrapped.custody.idle()  # updates still read what it may replace
            use(taken)
        except BaseException:
            self.wrapped.later.give_back(region.purpose)
            raise
