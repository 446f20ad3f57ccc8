"""Gives the window's device memory away while a block is open, and takes it again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from noria._errors import usage_error
from noria.runtime.context import Context
from noria.runtime.rank_sync import RankSync
from noria.runtime.rest import Rest
from noria.runtime.state import RunState
from noria.runtime.streamed import Streamed
from noria.runtime.window import give_window_back, take_window
from noria.torch_state import await_device, empty_cache

__all__ = ["Sleep"]


class Sleep:
    """Puts the engine of one wrap call to sleep, and wakes it."""

    def __init__(
        self, context: Context, run: RunState, sync: RankSync, rest: Rest, streamed: Streamed, *, has_stages: bool
    ) -> None:
        self._sync = sync
        self._rest = rest
        self._streamed = streamed
        self._has_stages = has_stages
        self._context = context
        self._run = run

    @contextlib.contextmanager
    def asleep(self) -> Iterator[None]:
        context, run = self._context, self._run
        run.recover()
        run.refuse_when_busy("noria.asleep")
        run.require_awake("noria.asleep")
        if self._has_stages:
            raise usage_error(
                "a model without stages= for noria.asleep",
                "one whose stages may have lent each other its device memory",
                "unwrap it, and wrap it again afterwards",
            )
        self._sync.meet("give device memory away")  # units that were gathered ahead are gathered again, on all ranks
        await_device(context.device)  # kernels of the last pass may still read the window
        with run.sleeping(self._wake):
            self._streamed.end()
            if self._rest.is_on:
                self._rest.suspend()
            if not self._rest.stands_still:
                give_window_back(context)
            empty_cache(context.device)
            yield

    def _wake(self) -> None:
        if not self._rest.stands_still:
            take_window(self._context)
        self._streamed.begin()
        if self._rest.is_on:
            self._rest.resume()
