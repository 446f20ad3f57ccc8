"""Gives the window's device memory away while a block is open, and takes it again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from noria._errors import usage_error
from noria.planning.wrap_plan import WINDOW
from noria.runtime.context import Context
from noria.runtime.rank_sync import RankSync
from noria.runtime.rest import Rest
from noria.runtime.state import RunState
from noria.torch_state import await_device

__all__ = ["Sleep"]


class Sleep:
    """Puts the engine of one wrap call to sleep, and wakes it."""

    def __init__(self, context: Context, run: RunState, sync: RankSync, rest: Rest, *, has_stages: bool) -> None:
        self._sync = sync
        self._rest = rest
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
        if self._rest.is_on:
            with run.sleeping(self._rest.resume):
                self._rest.suspend()
                self._empty_cache()
                yield
            return
        self._sync.meet("give device memory away")  # units that were gathered ahead are gathered again, on all ranks
        await_device(context.device)  # kernels of the last pass may still read the window
        with run.sleeping(self._wake):
            context.engine.rest.set_asleep(True)
            context.ledger.expect(str(context.device), WINDOW, 0)
            self._empty_cache()
            yield

    def _wake(self) -> None:
        self._empty_cache()
        self._context.engine.rest.set_asleep(False)
        self._context.ledger.expect(str(self._context.device), WINDOW, self._context.plan.arena_bytes)

    def _empty_cache(self) -> None:
        """Has torch give back device memory that no tensor uses: of activations, or of what ran inside of the block."""
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()
