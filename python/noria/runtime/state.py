"""Refuses reads and writes that must not happen while a wrapped model does something else."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from noria._errors import usage_error
from noria.runtime.context import Context
from noria.runtime.load_tracker import LoadTracker
from noria.torch_state import in_backward

__all__ = ["RunState", "weakly", "weakly_asked"]

Given = ParamSpec("Given")
Returned = TypeVar("Returned")

_this_process = os.getpid()  # kept: each visit compares it, and os.getpid() is a system call


def _note_fork() -> None:
    global _this_process
    _this_process = os.getpid()


os.register_at_fork(after_in_child=_note_fork)


def weakly(method: Callable[Given, None]) -> Callable[Given, None]:
    """Returns a callable that holds the method's object weakly. After the object is gone, a call does nothing."""
    reference = weakref.WeakMethod(method)

    def call(*args: Given.args, **kwargs: Given.kwargs) -> None:
        if (found := reference()) is not None:
            found(*args, **kwargs)

    return call


def weakly_asked(method: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """As `weakly`, for methods with a result. After the object is gone, a call raises RuntimeError."""
    reference = weakref.WeakMethod(method)

    def call(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        if (found := reference()) is None:
            raise RuntimeError("called after the wrapped model was freed")
        return found(*args, **kwargs)

    return call


class RunState:
    """Refuses what must not happen while a wrapped model does something else. `shutdown` ends the engine.

    It knows of open blocks and of its own end. torch tells if a backward runs, and the hooks tell if a forward does.
    The engine tells if the home is torn.

    Other parts register callbacks here: `in_forward` tells if a forward is alive. `on_recover` runs before the home is
    used after a failure, `on_settle` before any use of the home.
    """

    def __init__(self, context: Context, loads: LoadTracker) -> None:
        self.context = context
        self.loads = loads
        self.pid = _this_process
        self.closed = False
        self.in_forward: Callable[[], bool] = lambda: False
        self.on_recover: list[Callable[[], None]] = []
        self.on_settle: list[Callable[[], None]] = []
        """The callback that was registered last runs first."""
        self.on_close: list[Callable[[], None]] = []
        """Runs after the engine has ended. The callback that was registered last runs first."""
        self.on_state_write: list[Callable[[int], None]] = []
        """Runs before optimizer state of a unit is written at home, other than by an update."""
        self.on_weight_write: list[Callable[[int], None]] = []
        """Runs before a tensor that `state_dict()` has returned of a unit is written."""
        self.on_home_closed: list[Callable[[], None]] = []
        """Runs when a block of noria.materialize has closed the home."""
        self.on_out_of_memory: list[Callable[[int], None]] = []
        """Runs when torch has found no memory on the device, with the bytes that it wanted."""
        self._num_materialized = 0
        self._loading: list[object] = []
        self._is_averaged = False
        self._give_back: Callable[[], None] | None = None
        self._is_asleep = False
        self._wake: Callable[[], None] | None = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit, needed modules may be gone; atexit ran before
            self.shutdown()

    # ---- blocks ----

    @contextlib.contextmanager
    def materializing(self) -> Iterator[None]:
        """Marks a block of `noria.materialize`. Blocks nest."""
        self._num_materialized += 1
        try:
            yield
        finally:
            self._num_materialized -= 1

    @property
    def is_materialized(self) -> bool:
        """True inside a block of `noria.materialize`."""
        return self._num_materialized > 0

    @contextlib.contextmanager
    def averaging(self, give_back: Callable[[], None]) -> Iterator[None]:
        """Marks a block in which the model has averaged weights in place of its own. Blocks do not nest.

        `give_back` then gives the model its own weights. If it is interrupted, it runs again before the home is used.
        """
        self._give_back = give_back
        self._is_averaged = True
        try:
            yield
        finally:
            self._is_averaged = False
            self._take_back()

    def _take_back(self) -> None:
        if self._give_back is not None and not self._is_averaged:
            self._give_back()
            self._give_back = None

    @contextlib.contextmanager
    def sleeping(self, wake: Callable[[], None]) -> Iterator[None]:
        """Marks a block in which the device has the window's memory. `wake` then takes it again.

        If `wake` raises, the next pass or step calls it again.
        """
        self._wake = wake
        self._is_asleep = True
        try:
            yield
        finally:
            self._is_asleep = False
            if not self.closed:
                self.require_awake("a pass")

    @property
    def is_asleep(self) -> bool:
        """True inside of `sleeping`."""
        return self._is_asleep

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Calls `wake`. If it raises, the next pass or step calls it again."""
        self.wake_later(wake)
        self.require_awake("a pass")

    def wake_later(self, wake: Callable[[], None]) -> None:
        """The next pass or step calls `wake`."""
        self._wake = wake

    def refuse_asleep(self, call: str) -> None:
        if self._is_asleep:
            raise usage_error(
                "a model that has its device memory",
                f"{call} inside of `with noria.asleep(model)`",
                "call it after the block",
            )

    def require_awake(self, call: str) -> None:
        """Raises UsageError inside of `sleeping`, and MachineError if the window's memory cannot be taken again."""
        self.refuse_asleep(call)
        if self._wake is not None:
            self._wake()
            self._wake = None

    @contextlib.contextmanager
    def loading(self, part: object) -> Iterator[None]:
        """Marks a load of this part of the state. Reads of it are allowed: the load may make a torn home whole."""
        self._loading.append(part)
        try:
            yield
        finally:
            self._loading.pop()

    def is_loading(self, part: object) -> bool:
        return any(each is part for each in self._loading)

    def check_alive(self) -> None:
        if self.pid != _this_process:
            raise usage_error(
                "a wrapped model used in the process that wrapped it",
                f"it in process {_this_process}, forked from {self.pid}",
                "wrap inside the child, or let data loader workers leave the model alone",
            )
        if self.closed:
            raise usage_error("a model that is wrapped", "one whose engine was shut down", "wrap it again")

    def refuse_when_busy(self, call: str) -> None:
        if in_backward() or self.in_forward() or self._num_materialized:
            raise usage_error(
                f"{call} between passes",
                "it inside of a forward, a backward or `with noria.materialize(...)`",
                "call it after backward(), outside of the block",
            )

    def refuse_while_averaged(self, call: str) -> None:
        if self._is_averaged:
            raise usage_error(
                f"{call} of a model that has its own weights",
                "it inside of `with ema.applied()`, where the model has averages",
                "call it after the block",
            )

    def require_consistent(
        self, what: str, *, mends: bool = False, has_value: bool = False, of_state: bool = False
    ) -> None:
        """Raises UsageError if the model must not be read or written now.

        Under update="backward" a backward has updated weights before `step()` claims them: between the two, every call
        is refused. A torn home, and parameters without values, are refused too, unless the caller `mends` them with
        values of its own. So are frozen weights that a disk has lost, unless the caller is `of_state`: it reads only
        optimizer state. `has_value`: the caller reads a parameter that has one.
        """
        self._take_back()
        if self.context.updates_in_backward:
            if not in_backward():
                self.context.engine.hooks.recover()  # from a backward that raised
            self.context.engine.backward.refuse_unclaimed(what)
        if not mends and not has_value:
            self.loads.refuse_missing(what)
        if not mends and (torn := self.context.engine.torn()):
            raise usage_error(
                f"{what} of one step",
                f"weights and optimizer state of different steps: {torn}",
                "load a checkpoint of both: model.load_state_dict and optimizer.load_state_dict",
            )
        if not mends and not of_state and (lost := self.context.engine.home.lost_weights()):
            unit, _, why = lost[0]
            more = f" and of {len(lost) - 1} more units" if len(lost) > 1 else ""
            raise usage_error(
                f"{what} of weights that the disk has kept",
                f'frozen weights of "{self.context.units[unit].name}"{more} that it has lost or changed: {why}',
                "load these weights again: model.load_state_dict or noria.load",
            )

    def require_loadable(self, what: str) -> None:
        """Raises UsageError if no values may be loaded now. A load may make a torn home whole."""
        self.refuse_while_averaged(what)
        self.require_consistent(what, mends=True)

    def recover(self) -> None:
        """Forgets a pass that raised. Gradients that have landed stay."""
        self.check_alive()
        if in_backward():
            return  # the pass is alive
        for forget in self.on_recover:
            forget()
        self.context.engine.hooks.recover()
        self.settle_writes()

    def settle_writes(self) -> None:
        """Registers writes to the home, and closes what a broken load left open. Runs before the home is used."""
        self._take_back()
        for settle in reversed(self.on_settle):
            settle()

    def while_open(
        self, method: Callable[Given, None], *args: Given.args, **kwargs: Given.kwargs
    ) -> Callable[[], None]:
        """Wraps a method as a callback for tensors that may outlive the method's object, the engine or this process.

        After any of them has ended, the callback does nothing.
        """
        act, state = weakly(method), weakref.ref(self)

        def call() -> None:
            run = state()
            if run is not None and not run.closed and run.pid == _this_process:
                act(*args, **kwargs)

        return call

    def tell_weight_write(self, unit: int) -> None:
        for told in self.on_weight_write:
            told(unit)

    def tell_closed_home(self) -> None:
        for told in self.on_home_closed:
            told()

    def tell_state_write(self, unit: int) -> None:
        """Call it before a write to optimizer state of this unit at home."""
        for told in self.on_state_write:
            told(unit)

    # ---- end ----

    def shutdown(self) -> None:
        """Ends the engine's threads. In a forked child it does nothing: the child has none of these threads."""
        if self.closed or self.pid != _this_process:
            return
        self.closed = True
        context = self.context
        with contextlib.suppress(Exception):
            context.engine.idle()
        with contextlib.ExitStack() as ends:  # each callback runs even if another one raises; the last one runs first
            if context.ranks is not None:
                ends.callback(context.ranks.close)
            ends.callback(context.device_buffers.close)
            for close in self.on_close:
                ends.callback(close)
            ends.callback(context.engine.clear_callbacks)
            ends.callback(context.engine.close)
            ends.callback(context.write_trace)
