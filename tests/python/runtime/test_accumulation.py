"""Accumulation alone takes memory for kept gradients, and tells the engine, at the right time."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from types import SimpleNamespace
from typing import Any

import noria
import pytest
import torch
from noria.model.layout import Region
from noria.runtime.accumulation import Accumulation, NoSync


class Engine:
    """Is engine, run state and late memory, and keeps what it was told, in order."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.refuses = False
        self.held = self.unreduced = False
        self.backward = self.ranks = self  # parts of the engine

    def take(self, region: Region) -> list[int]:
        self.heard.append(("take", region.purpose, region.sizes))
        return [64, 128]

    def give_back(self, purpose: str) -> None:
        self.heard.append(("give back", purpose))

    def holds_all(self) -> bool:
        return self.held

    def holds_unreduced(self) -> bool:
        return self.unreduced

    def hold_all(self, addresses: list[int]) -> None:
        self.heard.append(("hold all", addresses))
        if self.refuses:
            raise noria.UsageError("on purpose")
        self.held = True

    def hold_unreduced(self, addresses: list[int]) -> None:
        self.heard.append(("hold unreduced", addresses))
        self.unreduced = True

    def set_accumulating(self, accumulating: bool) -> None:
        self.heard.append(("accumulating", accumulating))

    def set_unsynced(self, unsynced: bool) -> None:
        self.heard.append(("unsynced", unsynced))

    def idle(self) -> None:
        self.heard.append("idle")

    def recover(self) -> None:
        self.heard.append("recover")


def made(*, updates_in_backward: bool = True, shared: bool = False) -> tuple[Accumulation, Engine]:
    engine = Engine()
    units = [SimpleNamespace(gradients=40, home_gradients=20), SimpleNamespace(gradients=80, home_gradients=40)]
    ranks = object() if shared else None
    context: Any = SimpleNamespace(engine=engine, units=units, ranks=ranks, updates_in_backward=updates_in_backward)
    run: Any = engine
    late: Any = engine
    return Accumulation(context, run, late), engine


HELD = [
    ("take", "held gradients", (20, 40)),
    "idle",
    ("hold all", [64, 128]),
    ("give back", "gradient ring"),
]
UNSUMMED = [("take", "unsummed gradients", (40, 80)), "idle", ("hold unreduced", [64, 128])]


def test_the_first_block_takes_memory_for_all_and_gives_the_ring_back_after_the_engine_has_left_it():
    accumulation, engine = made()
    with accumulation.accumulate():
        assert engine.heard == ["recover", *HELD, ("accumulating", True)]
    engine.heard.clear()
    with accumulation.accumulate():
        pass
    assert engine.heard == ["recover", ("accumulating", True), ("accumulating", False)]


def test_blocks_nest_and_the_outermost_ends_it_even_if_it_raises():
    accumulation, engine = made()
    engine.held = True
    with contextlib.suppress(KeyError), accumulation.accumulate():
        with accumulation.accumulate():
            assert accumulation.accumulates
        assert accumulation.accumulates
        assert ("accumulating", False) not in engine.heard
        raise KeyError
    assert not accumulation.accumulates
    assert engine.heard[-1] == ("accumulating", False)


def test_memory_that_the_engine_refuses_is_given_back_and_the_ring_kept():
    accumulation, engine = made()
    engine.refuses = True
    with pytest.raises(noria.UsageError, match="on purpose"), accumulation.accumulate():
        raise AssertionError("the block is not entered")
    assert engine.heard == ["recover", *HELD[:3], ("give back", "held gradients")]
    assert not accumulation.accumulates


def test_a_block_is_refused_inside_a_backward_before_anything_is_done():
    accumulation, engine = made()

    def enter(_: torch.Tensor) -> None:
        with (
            pytest.raises(noria.UsageError, match=r"optimizer\.accumulate\(\) around a backward"),
            accumulation.accumulate(),
        ):
            raise AssertionError("the block is not entered")

    value = torch.ones((), requires_grad=True)
    value.register_hook(enter)
    value.backward()
    assert not engine.heard and value.grad is not None


def test_without_ranks_no_sync_accumulates_if_updates_run_inside_backward_and_else_does_nothing():
    for updates_in_backward in (False, True):
        accumulation, engine = made(updates_in_backward=updates_in_backward)
        with accumulation.no_sync():
            assert accumulation.accumulates == updates_in_backward
        assert bool(engine.heard) == updates_in_backward


def test_with_ranks_no_sync_takes_memory_for_whole_gradients_once():
    accumulation, engine = made(updates_in_backward=False, shared=True)
    for _ in range(2):
        with accumulation.no_sync():
            assert engine.heard[-1] == ("unsynced", True)
    block = [("unsynced", True), ("unsynced", False)]
    assert engine.heard == ["recover", *UNSUMMED, *block, "recover", *block]
    assert not accumulation.accumulates


def test_a_model_keeps_no_sync_but_no_sync_keeps_nothing():
    accumulation, engine = made(shared=True)
    no_sync = NoSync(accumulation)
    with no_sync():
        assert engine.heard[-1] == ("unsynced", True)
    engine.heard.clear()
    with copy.deepcopy(no_sync)(), pickle.loads(pickle.dumps(no_sync))():
        assert not engine.heard, "a copy of the model is not wrapped"
    del accumulation
    gc.collect()
    with no_sync():
        assert not engine.heard
