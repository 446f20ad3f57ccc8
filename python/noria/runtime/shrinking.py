"""Makes the window smaller once torch has found no memory on the device, so that the user's next attempt has more."""

from __future__ import annotations

from noria.policy import format_bytes
from noria.runtime.context import Context
from noria.runtime.state import RunState
from noria.runtime.window import resize_window

__all__ = ["Shrinking", "room_for"]

_FITS = 5 / 4  # times the failed request: memory is fragmented, and more requests follow


def room_for(wanted: int) -> int:
    """Returns the bytes that torch should get after a request of this size has failed."""
    return int(_FITS * wanted)


class Shrinking:
    """Hears of memory that torch did not get, and gives it that much of the window before the next forward.

    Ranks that share a model, and stages that lend each other memory, have planned with one size: there it does nothing.
    """

    def __init__(self, context: Context, run: RunState, *, has_stages: bool) -> None:
        self._context = context
        self._run = run
        self._may = context.ranks is None and not has_stages
        self._wanted = 0
        run.on_out_of_memory.append(self._note)

    def _note(self, wanted: int) -> None:
        if not any(self._context.engine.rest.has(unit) for unit in self._context.plan.stays):
            self._wanted = max(self._wanted, wanted)  # else the rest ends, which gives more

    def act(self) -> None:
        """Order: no pass is under way."""
        wanted, self._wanted = self._wanted, 0
        context = self._context
        if not wanted or not self._may:
            return
        before = context.plan.arena_bytes
        after = resize_window(context, self._run, max(before - room_for(wanted), 0))
        if after < before:
            context.notes.append(
                f"{context.device} was out of memory for {format_bytes(wanted)}: the window has shrunk from "
                f"{format_bytes(before)} to {format_bytes(after)}"
            )
