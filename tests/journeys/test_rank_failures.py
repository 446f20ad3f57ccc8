"""A rank that dies, hangs or raises makes the others raise, with the rank and the collective, and end by themselves."""

from __future__ import annotations

import functools
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.failing_rank import POLICIES, STEPS
from tests.rounds import Rounds

PATIENCE_S = 100.0  # beyond the group's timeout; only a rank that never ends comes to it
NAMED = r"noria\.MachineError: rank {rank} of {size}: an? .+ failed; a rank has died, raised, or hung"


@pytest.fixture(scope="module")
def rounds() -> Iterator[Rounds]:
    rounds = Rounds("tests.failing_rank")
    yield rounds
    rounds.close()


@pytest.fixture
def train(rounds: Rounds, tmp_path: Path) -> Callable[..., list[tuple[str, str]]]:
    return functools.partial(train_in, tmp_path, rounds)


def train_in(
    folder: Path, rounds: Rounds, size: int, fails: dict[int, str], *, timeout_s: float = 20.0, policy: int = 0
) -> list[tuple[str, str]]:
    """What each of `size` ranks printed, to stdout and to stderr. `fails`: by rank, how, in which function, and in
    which call of it (tests/failing_rank.py). Ranks that hang go on when the others have ended. Those that did not fail
    have raised the named error, or finished, if the failure came when there was nothing left to do together."""
    orders: list[dict[str, Any]] = [{"policy": policy} for _ in range(size)]
    for rank, described in fails.items():
        orders[rank] |= {"fails": described, "stops": described.startswith("hang")}
    ranks = rounds.run(folder, orders, timeout_s=timeout_s, patience_s=timeout_s + PATIENCE_S)
    printed = [(each.out, each.error) for each in ranks]
    some_are_late = any("failing" in out and f"step {STEPS - 1}" in out for out, _ in printed)
    if not any("failing" in out for out, _ in printed):
        for each, (out, error) in zip(ranks, printed, strict=True):
            assert "finished" in out and each.status == 0, f"{out}{error}"
        return printed
    for rank, (out, error) in enumerate(printed):
        how, status = fails.get(rank, "").split(":")[0], ranks[rank].status
        told = f"rank {rank} ended with {status}:\n{out}{error}"
        if how == "kill":
            assert status == -signal.SIGKILL, told
        elif how == "raise":
            assert status == 1 and "MishapError: of this rank's own" in error, told
        elif "finished" in out and some_are_late:
            assert status == 0, told
        else:
            assert status == 1 and re.search(NAMED.format(rank=rank, size=size), error), told
        assert "terminate called" not in error and "Fatal Python error" not in error, told
    return printed


def test_ranks_hear_of_one_that_is_killed_in_a_backward(train, tmp_path):
    printed = train(3, {1: "kill:on_gradient:3"})
    assert "failing in on_gradient" in printed[1][0]
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 1


def test_ranks_hear_of_one_that_hangs_when_the_groups_timeout_is_over(train):
    printed = train(2, {1: "hang:on_gradient:3"}, timeout_s=6.0)
    assert "failing in on_gradient" in printed[1][0] and "Timed out waiting 6000ms" in printed[0][1]


def test_ranks_hear_of_one_that_raises_in_a_hook_of_a_backward(train):
    printed = train(2, {0: "raise:on_gradient:3"})
    assert "failing in on_gradient" in printed[0][0]


MOMENTS = {
    "the first collective of wrap": "agree:1",
    "wrap, as weights come from rank 0": "from_first:5",
    "the first forward": "forward:1",
    "a forward, in a block": "forward:17",
    "the loop, between forward and backward": "on_loss:2",
    "a backward": "on_gradient:1",
    "a backward that is not synced": "on_gradient:3",
    "a step": "step:2",
    "a save, before anything is gathered": "save:2",
    "a save, as weights are gathered": "whole:5",
}


@pytest.mark.long
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", ["kill", "hang", "raise"])
@pytest.mark.parametrize("name", MOMENTS)
def test_ranks_hear_of_one_that_fails(train, tmp_path, name, how, failing):
    printed = train(2, {failing: f"{how}:{MOMENTS[name]}"}, timeout_s=8.0 if how == "hang" else 20.0)
    assert "failing in" in printed[failing][0]
    if (tmp_path / "checkpoint.pt").exists():  # the last that was whole
        assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] in range(1, STEPS + 1)


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "hang"])
def test_ranks_hear_of_the_first_that_fails_as_it_writes_the_file(train, tmp_path, how):
    printed = train(2, {0: f"{how}:_write:2"}, timeout_s=8.0 if how == "hang" else 20.0)
    assert "failing in _write" in printed[0][0]
    step = 1 if how == "kill" else 2  # it has gone on
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == step


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_ranks_hear_of_one_that_is_killed_at_any_moment(train, tmp_path, seed):
    draw = random.Random(seed)
    size = draw.choice([2, 2, 3, 4])
    failing, call, policy = draw.randrange(size), draw.randrange(1, 7000), draw.randrange(len(POLICIES))
    train(size, {failing: f"kill:any:{call}"}, policy=policy)
    if (tmp_path / "checkpoint.pt").exists():
        assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] in range(1, STEPS + 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_ranks_hear_of_one_that_hangs_at_any_moment(train, seed):
    draw = random.Random(100 + seed)
    size = draw.choice([2, 3])
    failing, call, policy = draw.randrange(size), draw.randrange(1, 7000), draw.randrange(len(POLICIES))
    train(size, {failing: f"hang:any:{call}"}, timeout_s=8.0, policy=policy)


@pytest.mark.long
def test_a_rank_that_raises_ends_though_another_one_hangs(train):
    train(3, {0: "hang:on_loss:2", 2: "raise:on_loss:2"}, timeout_s=8.0)
