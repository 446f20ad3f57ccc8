"""Lets a loop keep gradients over several backwards, and takes the memory for them at the first such backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

from noria._errors import usage_error
from noria.model.layout import GRADIENT_RING, UNSUMMED, HomeUnit, Region, held_region
from noria.runtime.context import Context
from noria.runtime.late_allocations import LateAllocations
from noria.runtime.state import RunState
from noria.torch_state import in_backward

__all__ = ["Accumulation", "NoSync"]


class _Mode:
    """Turns a mode of the engine on while blocks of it are open. The first block takes the memory for it."""

    def __init__(self, take: Callable[[], None], turn: Callable[[bool], None]) -> None:
        self._take = take
        self._turn = turn
        self._num_open = 0
        self._heir: _Mode | None = None

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
            self._latest()._close()

    def _close(self) -> None:
        self._num_open -= 1
        self._turn(self.is_open)

    def _latest(self) -> _Mode:
        return self if self._heir is None else self._heir._latest()

    def pass_on(self, heir: _Mode) -> None:
        """Makes the blocks that are open now blocks of `heir`. An open block must not keep the old home alive."""
        if self.is_open:
            heir._take()
            heir._turn(True)
        self._heir, heir._num_open = heir, self._num_open
        del self._take, self._turn


class Accumulation:
    """Keeps gradients over several backwards: `accumulate` and `no_sync`."""

    def __init__(self, context: Context, run: RunState, late: LateAllocations) -> None:
        self.context = context
        self.run = run
        self.late = late
        self._accumulating = _Mode(self.hold_all, context.engine.backward.set_accumulating)
        self._unsynced = _Mode(self._hold_unreduced, context.engine.ranks.set_unsynced)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """Returns the block of `with optimizer.accumulate():`, for updates that run inside backward."""
        return self._blocks(self._accumulating, "optimizer.accumulate()")

    @property
    def accumulates(self) -> bool:
        return self._accumulating.is_open

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Returns the block of `with model.no_sync():`, to put around each backward of a step but its last.

        Inside, whole gradients stay on this rank; the backward outside sums them over the ranks. The first block takes
        memory for all of them. Only the place of the backward counts, not of the forward; all ranks must do this alike.
        A single process sums nothing. Under update="backward" the block is that of `accumulate`, else it does nothing.
        """
        if self.context.ranks is None:
            return self.accumulate() if self.context.updates_in_backward else contextlib.nullcontext()
        return self._blocks(self._unsynced, "model.no_sync()")

    @contextlib.contextmanager
    def _blocks(self, mode: _Mode, call: str) -> Iterator[None]:
        if in_backward():
            raise usage_error(f"{call} around a backward", "it inside of one", "enter it before backward()")
        self.run.recover()
        del self  # if the model is wrapped again inside of the block, the old home may go
        with mode.block():
            yield

    def open_bytes(self, units: Sequence[HomeUnit]) -> int:
        """Returns the bytes of gradients of these units that the open blocks need."""
        return sum(unit.gradients for unit in units) * (self._accumulating.is_open + self._unsynced.is_open)

    def pass_on(self, heir: Accumulation) -> None:
        """Makes the blocks that are open now blocks of `heir`: the model has been wrapped again. Collective."""
        self._accumulating.pass_on(heir._accumulating)
        self._unsynced.pass_on(heir._unsynced)

    def hold_all(self) -> None:
        """Holds all gradients, in place of the ring of updates inside backward."""
        if self.context.engine.backward.holds_all():
            return
        self._take(held_region(self.context.units), self.context.engine.backward.hold_all)
        self.late.give_back(GRADIENT_RING)  # only after the engine has left the ring

    def _hold_unreduced(self) -> None:
        if self.context.engine.ranks.holds_unreduced():
            return
        self._take(
            Region.of(UNSUMMED, (unit.gradients for unit in self.context.units)),
            self.context.engine.ranks.hold_unreduced,
        )

    def _take(self, region: Region, use: Callable[[list[int]], None]) -> None:
        taken = self.late.take(region)
        try:
            self.context.engine.idle()  # updates may still read memory that `use` replaces
            use(taken)
        except BaseException:
            self.late.give_back(region.purpose)
            raise


class NoSync:
    """Is `model.no_sync`, in a form that keeps nothing alive. Copies of the model get a block that does nothing."""

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = weakref.ref(accumulation)

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        accumulation = self._accumulation()
        return contextlib.nullcontext() if accumulation is None else accumulation.no_sync()

    def __deepcopy__(self, memo: object) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickled_no_sync, ())


def _unpickled_no_sync() -> Callable[[], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext
