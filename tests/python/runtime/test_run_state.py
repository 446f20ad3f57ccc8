"""What a wrapped model may be asked while it does something else; without a model, an engine or a home."""

from __future__ import annotations

import gc
import os
import weakref
from types import SimpleNamespace
from typing import Any

import noria
import pytest
import torch
from noria.runtime.load_tracker import LoadTracker
from noria.runtime.state import RunState, weakly, weakly_asked


class Engine:
    """Says what a test lets it say, and keeps what it was told."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.is_torn = ""
        self.unclaimed = ""
        self.lost: list[tuple[int, int, str]] = []
        self.hooks = self.backward = self.home = self  # parts of the engine

    def torn(self) -> str:
        return self.is_torn

    def lost_weights(self) -> list[tuple[int, int, str]]:
        return self.lost

    def refuse_unclaimed(self, what: str) -> None:
        if self.unclaimed:
            raise noria.UsageError(f"{what}: {self.unclaimed}")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.heard.append(name)


def made(*, updates_in_backward: bool = False, **more: Any) -> tuple[RunState, Engine]:
    engine = Engine()
    context: Any = SimpleNamespace(
        engine=engine,
        ranks=None,
        device_buffers=SimpleNamespace(close=lambda: engine.heard.append("buffers closed")),
        write_trace=lambda: engine.heard.append("trace written"),
        updates_in_backward=updates_in_backward,
        slots=[],
        **more,
    )
    return RunState(context, LoadTracker(context)), engine


def test_a_load_is_known_by_its_part_until_its_block_ends():
    run, _ = made()
    one, other = object(), object()
    with run.loading(one):
        assert run.is_loading(one) and not run.is_loading(other)
    assert not run.is_loading(one)


def test_calls_between_passes_are_refused_inside_of_one():
    run, _ = made()

    def refused(*_: object) -> None:
        with pytest.raises(noria.UsageError, match=r"noria\.unwrap between passes"):
            run.refuse_when_busy("noria.unwrap")

    run.refuse_when_busy("noria.unwrap")
    with run.materializing():
        with run.materializing():
            refused()
        refused()
    run.in_forward = lambda: True
    refused()
    run.in_forward = lambda: False
    value = torch.ones((), requires_grad=True)
    value.register_hook(refused)
    value.backward()
    run.refuse_when_busy("noria.unwrap")


def test_a_torn_home_is_refused_to_all_but_who_mends_it():
    run, engine = made()
    run.require_consistent("a look")
    engine.is_torn = "step 3 broke off"
    with pytest.raises(noria.UsageError, match="weights and optimizer state of different steps: step 3 broke off"):
        run.require_consistent("a look")
    run.require_consistent("a load", mends=True)


def test_lost_frozen_weights_are_refused_to_all_but_who_mends_them_or_reads_state():
    run, engine = made(units=[SimpleNamespace(name="block"), SimpleNamespace(name="head")])
    engine.lost = [(1, 1, "checksum differs"), (0, 1, "EIO")]
    with pytest.raises(noria.UsageError, match=r'frozen weights of "head" and of 1 more units .*: checksum differs'):
        run.require_consistent("a look", has_value=True)
    run.require_consistent("a load", mends=True)
    run.require_consistent("a look at state", of_state=True)


def test_updates_that_no_step_has_claimed_are_refused_under_update_backward_alone():
    for updates_in_backward in (False, True):
        run, engine = made(updates_in_backward=updates_in_backward)
        engine.unclaimed = "updated already"
        if updates_in_backward:
            with pytest.raises(noria.UsageError, match="a look: updated already"):
                run.require_consistent("a look")
            assert engine.heard == ["recover"], "a backward that raised is over first"
        else:
            run.require_consistent("a look")


def test_recovery_forgets_forwards_then_asks_the_engine_then_settles_newest_first():
    run, engine = made()
    run.on_recover.append(lambda: engine.heard.append("forward forgotten"))
    run.on_settle += [lambda: engine.heard.append("writes"), lambda: engine.heard.append("loads")]
    run.recover()
    assert engine.heard == ["forward forgotten", "recover", "loads", "writes"]


def test_the_end_comes_once_and_also_if_a_callback_raises():
    run, engine = made()

    def close() -> None:
        engine.heard.append("peers closed")
        raise RuntimeError("on purpose")

    run.on_close.append(close)
    with pytest.raises(RuntimeError, match="on purpose"):
        run.shutdown()
    assert engine.heard == ["idle", "trace written", "close", "clear_callbacks", "peers closed", "buffers closed"]
    run.shutdown()
    assert engine.heard.count("close") == 1
    with pytest.raises(noria.UsageError, match="one whose engine was shut down"):
        run.check_alive()


def test_a_forked_child_neither_uses_nor_ends_it():
    run, engine = made()
    run.pid = os.getpid() + 1
    with pytest.raises(noria.UsageError, match=f"forked from {run.pid}"):
        run.recover()
    run.shutdown()
    assert not run.closed and not engine.heard


class Counted:
    def __init__(self) -> None:
        self.calls: list[int] = []

    def count(self, number: int) -> None:
        self.calls.append(number)

    def double(self, number: int) -> int:
        return 2 * number


def test_callbacks_of_tensors_act_while_all_is_there_and_keep_nothing_alive():
    run, _ = made()
    counted = Counted()
    call = run.while_open(counted.count, 3)
    call()
    assert counted.calls == [3]
    run.shutdown()
    call()
    assert counted.calls == [3], "the engine is gone"
    told, asked = weakly(counted.count), weakly_asked(counted.double)
    told(4)
    assert counted.calls == [3, 4] and asked(4) == 8
    gone = weakref.ref(counted)
    del counted
    gc.collect()
    assert gone() is None
    told(5)
    with pytest.raises(RuntimeError, match="after the wrapped model was freed"):
        asked(5)
