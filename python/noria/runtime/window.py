"""Gives the window's device memory back, takes it again, and changes its size. The ledger follows."""

from __future__ import annotations

import functools

from noria.planning.wrap_plan import WINDOW
from noria.runtime.context import Context
from noria.runtime.state import RunState
from noria.torch_state import await_device, empty_cache

__all__ = ["give_window_back", "resize_window", "take_window"]


def give_window_back(context: Context) -> None:
    """Order: between passes, when the device has finished all work."""
    context.engine.rest.set_asleep(True)
    context.ledger.expect(str(context.device), WINDOW, 0)


def take_window(context: Context) -> None:
    """Wakes the engine. Raises MachineError, and changes nothing, if the device has no room."""
    empty_cache(context.device)
    context.engine.rest.set_asleep(False)
    context.ledger.expect(str(context.device), WINDOW, context.plan.arena_bytes)


def resize_window(context: Context, run: RunState, num_bytes: int) -> int:
    """Gives the window about this size, and returns its size: all passes that are known still fit.

    If the device has no room for it, MachineError is raised, and the next pass tries again.

    Order: between passes.
    """
    await_device(context.device)  # kernels of the last pass may still read the window
    run.wake_later(functools.partial(take_window, context))
    give_window_back(context)
    size = context.engine.rest.resize(num_bytes)
    context.note_window(size)
    run.require_awake("a pass")
    return size
