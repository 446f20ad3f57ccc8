"""A run with state in files is killed at any moment. From its last checkpoint another process goes on, to the bits of a
run that was never stopped. Nothing is left of the files."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from noria.testing import assert_same_bits

from tests.journeys.file_runs import FREEZES, POLICIES, Runs, differ, runs_in, values
from tests.killed_run import KILLED_SAVE, SAVE_EVERY

MOMENTS = ["calls", "save calls", "read", "write"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with runs_in(tmp_path_factory.mktemp("killed")) as runs:
        yield runs


def kill_and_resume(runs: Runs, policy: int, moment: str, share: float, seed: int = 0) -> tuple[int, float]:
    """`share`: how far the run, or its save, has come when it is killed. Gives the step that was resumed, and how much
    of the next checkpoint lay beside it: 1.0 is all."""
    runs.prepare(policy)
    checkpoint = runs.new_folder() / "run.pt"
    runs.train(checkpoint, policy, seed=seed, kill=(moment, max(1, round(share * runs.counts[policy][moment]))))
    saved = step_of(checkpoint)
    part = checkpoint.with_name("run.pt.part")
    part_bytes = part.stat().st_size if part.exists() else 0
    resumed = runs.train(checkpoint, policy, seed=seed + 1)
    assert f"began at {saved}\n" in resumed.out
    assert_same_bits(values(runs.whole[policy]), values(checkpoint))
    assert os.listdir(checkpoint.parent) == ["run.pt"]
    return saved, part_bytes / checkpoint.stat().st_size


def step_of(checkpoint: Path) -> int:
    """The step of the last whole checkpoint; 0: there is none."""
    return torch.load(checkpoint, weights_only=True)["step"] if checkpoint.exists() else 0


@pytest.mark.parametrize(
    ("policy", "moment", "share", "least"),
    [(0, "calls", 0.5, 2), (1, "write", 0.9, 2), (2, "read", 0.2, 0), (FREEZES, "read_weights", 0.7, 2)],
)
def test_a_killed_run_is_resumed_with_the_bits_of_one_that_was_not(runs, policy, moment, share, least):
    assert kill_and_resume(runs, policy, moment, share)[0] >= least


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before(runs):
    for share in (0.4, 0.35, 0.45, 0.3, 0.5):  # which of them come while the file is written is torch's matter
        resumed, written = kill_and_resume(runs, 0, "save calls", share)
        assert resumed == KILLED_SAVE - SAVE_EVERY
        if 0 < written < 1:
            return
    pytest.fail("no kill has come while the file was written")


def test_what_is_resumed_from_another_step_differs(runs):
    """Weights and state, or state alone."""
    policy = 0
    runs.prepare(policy)
    folder = runs.new_folder()
    runs.train(folder / "two.pt", policy, kill=("save calls", 1))
    runs.train(folder / "four.pt", policy, until=KILLED_SAVE)
    two, four = (torch.load(folder / name, weights_only=True) for name in ("two.pt", "four.pt"))
    assert (two["step"], four["step"]) == (KILLED_SAVE - SAVE_EVERY, KILLED_SAVE)
    for name, contents in {"right": four, "all": two, "state": {**four, "optimizer": two["optimizer"]}}.items():
        torch.save({**contents, "step": KILLED_SAVE}, folder / name)
        runs.train(folder / name, policy)
        assert differ(folder / name, runs.whole[policy]) == (name != "right")


@pytest.mark.long
@pytest.mark.daily  # a kill takes 1.5 s
@pytest.mark.parametrize("seed", range(50))
def test_a_run_that_is_killed_at_any_moment_is_resumed_with_the_bits_of_one_that_was_not(runs, seed):
    draw = random.Random(seed)
    policy = draw.randrange(len(POLICIES))
    moments = [*MOMENTS, "read_weights"] if policy == FREEZES else MOMENTS
    kill_and_resume(runs, policy, draw.choice(moments), draw.uniform(0.0, 0.95), seed)


def test_a_kill_gives_the_space_of_the_files_back(runs):
    """Of 4 GiB, so that what others write meanwhile is little beside it."""
    size = 4 << 30
    if free(runs.disk) < 2 * size:
        pytest.skip("the disk has no room for 8 GiB")
    script = """
        import sys, time
        from noria import _C
        files = _C.FileHome([sys.argv[1]], [1 << 24] * 256, 1)
        print("taken", files.file_bytes, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(runs.disk)]
    before = free(runs.disk)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == f"taken {size}\n"
        assert before - free(runs.disk) > 0.75 * size
        child.kill()
    deadline = time.monotonic() + 60
    while before - free(runs.disk) > 0.25 * size:  # the kernel may end requests of the process first
        assert time.monotonic() < deadline
        time.sleep(0.01)


def free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
