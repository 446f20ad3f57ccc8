"""Runs a function on several ranks, each a process of its own, over gloo. With the pretend GPU they share its devices
in turn, over what stands for NCCL.

A process that imports torch takes two seconds of a core to start. So ranks are forked from a server that has imported
it, and what a first optimizer would import. They have one hash seed, and iterate over sets in one order. With
RANKS=spawn in the environment, as for some tests in `make test-all`, each starts anew and has its own. On the pretend
GPU each always starts anew: its threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.device import IS_GPU, settle, use_device

TIMEOUT_S = 240.0


def _done(act: Callable[..., Any], *args: Any) -> Any:
    """What `act` returns, when all that it has launched is over too."""
    import tests.roomy_logs  # noqa: F401  here: the server that ranks are forked from does not import noria

    answer = act(*args)
    settle()
    return answer


def _context(fresh: bool) -> Any:
    if fresh or torch.cuda.is_available() or os.environ.get("RANKS") == "spawn":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch.distributed.checkpoint",
            "torch.distributed.device_mesh",
            "torch._dynamo",
            "pytest",
            "noria",
        ]
    )
    return context


def _run(
    environment: dict[str, str],
    rank: int,
    size: int,
    device: str,
    meeting: str,
    timeout_s: float,
    answers: Any,
    all_done: Any,
    act: Callable[..., Any],
    args: Any,
) -> None:
    os.environ.clear()  # the server has the environment of its own start
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()  # what modules have made, as in the process of the tests
    if device == "cuda":
        if size % torch.cuda.device_count():  # torch makes no mesh of them
            mock.patch.object(torch.cuda, "device_count", return_value=1).start()
        use_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        answers.put((rank, _done(act, rank, size, *args), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    answers.close()
    answers.join_thread()
    all_done.wait(TIMEOUT_S)  # a rank that goes breaks what others still receive
    os._exit(0)  # a group whose other ranks are gone may hang when it is torn down


def skip_without_devices(size: int) -> None:
    if IS_GPU and torch.cuda.device_count() < size:
        pytest.skip(f"NCCL wants a device for each of {size} ranks; there are {torch.cuda.device_count()}")


def on_ranks(
    size: int,
    act: Callable[..., Any],
    *args: Any,
    timeout_s: float = 30.0,
    dying: tuple[int, ...] = (),
    fresh: bool = False,
) -> Any:
    """What `act(rank, size, *args)` returns, by rank. `dying`: ranks that end without an answer: None. `timeout_s` is
    the group's own. `fresh`: the ranks start anew, for variables that malloc, for example, reads at the start.

    Raises AssertionError with the traceback of the first rank that raised."""
    skip_without_devices(size)
    context = _context(fresh)
    environment = dict(os.environ)
    answers, all_done = context.Queue(), context.Event()
    device = torch.get_default_device().type
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        ranks = [
            context.Process(
                target=_run,
                args=(environment, rank, size, device, meeting, timeout_s, answers, all_done, act, args),
                daemon=True,
            )
            for rank in range(size)
        ]
        for each in ranks:
            each.start()
        found = {}
        failures = []
        deadline = time.monotonic() + TIMEOUT_S + timeout_s
        while not set(range(size)) - set(dying) <= set(found):
            try:
                rank, answer, failure = answers.get(timeout=1.0)
            except queue.Empty:
                crashed = [r for r, each in enumerate(ranks) if r not in dying and r not in found and each.exitcode]
                failures += [f"rank {r} ended with {ranks[r].exitcode}" for r in crashed]
                if time.monotonic() > deadline:
                    failures.append("no answer in time")
                if failures:
                    break
                continue
            found[rank] = answer
            if failure is not None:
                failures.append(f"rank {rank}:\n{failure}")
                break  # the others may be waiting for it
        all_done.set()
        for rank, each in enumerate(ranks):
            if failures or rank in dying:
                each.kill()
            each.join(TIMEOUT_S)
    assert not failures, "\n".join(failures)
    return [found.get(rank) for rank in range(size)]


def _in_turn(rank: int, size: int, acts: dict[str, tuple[Callable[..., Any], Any]]) -> dict[str, str]:
    found = {}
    for name, (act, args) in acts.items():
        failure = ""
        try:
            _done(act, rank, size, *args)
        except Exception:
            failure = f"rank {rank}:\n{traceback.format_exc()}"
        gathered = [""] * size
        try:
            dist.all_gather_object(gathered, failure)
        except Exception as error:
            raise AssertionError(f"ranks parted in {name!r}; {failure or 'no failure here'}") from error
        found[name] = "\n".join(filter(None, gathered))
    return found


def in_turn_on_ranks(
    size: int, acts: dict[str, tuple[Callable[..., Any], Any]], *, fresh: bool = False
) -> dict[str, str]:
    """Several acts, each with its arguments, one after the other in the same processes. By name, the tracebacks of the
    ranks that raised, or nothing."""
    return on_ranks(size, _in_turn, acts, fresh=fresh)[0] if acts else {}


LEFT_OUT = pytest.StashKey[list[pytest.Item]]()
"""Tests that were collected and will not run."""


def asked_for(request: pytest.FixtureRequest, acts: dict[str, Any], always: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns `acts` of a module, without those that only skipped tests ask for. A test asks for an act by a parameter
    that is its name, or the end of it. `always`: those that others go on from."""

    def names(items: list[pytest.Item]) -> set[str]:
        parameters = [item.callspec.params for item in items if item.path == request.path and hasattr(item, "callspec")]
        words = {word for each in parameters for word in each.values() if isinstance(word, str)}
        return {name for name in acts for word in words if name == word or name.endswith(f" {word}")}

    run, skipped = [], []
    for item in request.session.items:
        (skipped if item.get_closest_marker("skip") is not None else run).append(item)
    left_out = names(request.config.stash[LEFT_OUT] + skipped) - names(run)
    return {name: act for name, act in acts.items() if name in always or name not in left_out}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Models wrapped here belong to this rank."""
    with mock.patch("noria.dist.ranks.num_ranks", return_value=1):
        yield


def assert_fine(found: dict[str, str], name: str) -> None:
    """Asserts that `in_turn_on_ranks` has found no failure."""
    assert not found[name], found[name]
