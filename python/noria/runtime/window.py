"""Gives the window's device memory back, and takes it again, while the engine sleeps. The ledger follows."""

from __future__ import annotations

from noria.planning.wrap_plan import WINDOW
from noria.runtime.context import Context
from noria.torch_state import empty_cache

__all__ = ["give_window_back", "take_window"]


def give_window_back(context: Context) -> None:
    """Order: between passes, when the device has finished all work."""
    context.engine.rest.set_asleep(True)
    context.ledger.expect(str(context.device), WINDOW, 0)


def take_window(context: Context) -> None:
    """Wakes the engine. Raises MachineError, and changes nothing, if the device has no room."""
    empty_cache(context.device)
    context.engine.rest.set_asleep(False)
    context.ledger.expect(str(context.device), WINDOW, context.plan.arena_bytes)
