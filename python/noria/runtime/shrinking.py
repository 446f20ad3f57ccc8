"""Makes the window smaller once torch has found no memory on the device, so that the user's next attempt has more."""

from __future__ import annotations

from noria.policy import format_bytes
from noria.runtime.context import Context
from noria.runtime.state import RunState
from noria.runtime.window import give_window_back, take_window
from noria.torch_state import await_device

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
        self._may = context.ranks is None and not has_stages
        self._wanted = 0
        run.on_out_of_memory.append(self._note)

    def _note(self, wanted: int) -> None:
        self._wanted = max(self._wanted, wanted)

    def act(self) -> None:
        """Order: no pass is under way."""
        wanted, self._wanted = self._wanted, 0
        context, rest = self._context, self._context.engine.rest
        if not wanted or not self._may or rest.is_on:  # at rest there is no window: the rest ends first
            return
        before = context.plan.arena_bytes
        await_device(context.device)  # kernels of the last pass may still read the window
        give_window_back(context)
        after = rest.resize(max(before - room_for(wanted), 0))
        context.note_window(after)
        take_window(context)
        if after < before:
            context.notes.append(
                f"{context.device} was out of memory for {format_bytes(wanted)}: the window has shrunk from "
                f"{format_bytes(before)} to {format_bytes(after)}"
            )
