"""A stage that lends or borrows may die at any moment, and stages may end in any order: the others raise or end, soon,
and nothing is left behind."""

from __future__ import annotations

import os
import random
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rounds import Ended, Rounds

GROUP_TIMEOUT_S = 400.0
BOUND_S = 100.0  # the limit for what is to happen at once, on a busy machine; far below the group's timeout
GONE = r"rank 1, which lends 192\.0 KiB to this rank, is gone"


class Pipeline:
    """Starts rounds of tests/failing_stage.py, and looks what each has left behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = f"noria-test-{uuid.uuid4()}"
        self._rounds = Rounds("tests.failing_stage", NORIA_TEST=self._mark)
        self._num_rounds = 0

    def run(self, *ranks: dict[str, Any], timeout_s: float = GROUP_TIMEOUT_S) -> list[Ended]:
        self._num_rounds += 1
        folder = self._folder / str(self._num_rounds)
        folder.mkdir()
        ended = self._rounds.run(folder, ranks, timeout_s=timeout_s, patience_s=60 + timeout_s)
        for each in ended:
            for wrong in ("terminate called", "Fatal Python error", "Exception ignored", "AssertionError"):
                assert wrong not in each.error, f"{each}"
        eventually(lambda: self._processes() == [self._rounds.pid])
        if (folder / "socket").exists():
            name = (folder / "socket").read_text()
            eventually(lambda: name not in Path("/proc/net/unix").read_text())
        return ended

    def _processes(self) -> list[int]:
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (each / "environ").read_bytes():
                    found.append(int(each.name))
            except OSError:  # it has ended, or belongs to another user
                continue
        return found

    def close(self) -> None:
        self._rounds.close()


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def shared_memory() -> set[str]:
    """But for the semaphores of Python's queues, which other tests may use meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    shared = shared_memory()
    pipeline = Pipeline(tmp_path_factory.mktemp("pipeline"))
    yield pipeline
    pipeline.close()
    eventually(lambda: shared_memory() <= shared)


def assert_is_finished(ended: Ended) -> None:
    assert ended.status == 0 and "finished" in ended.out and ended.error == "", f"{ended}"


def assert_has_raised(ended: Ended, *, soon: bool = True) -> None:
    """And the model is as it was; nor does who has waited for the end of the other hold more than before."""
    assert ended.status == 1 and "Error" in ended.error and "unwrapped" in ended.out, f"{ended}"
    assert ended.late_s < BOUND_S or not soon, f"{ended}"


# ---- deaths ------------------------------------------------------------------------------------------------------

BETWEEN = {
    "between steps": "on_step:3",
    "as a step begins": "step:3",
}
INSIDE = {
    "in a forward": "forward:40",
    "in a backward": "on_gradient:28",
    "in a step": "_begin:3",
}


@pytest.mark.parametrize("name", BETWEEN | INSIDE)
def test_borrower_whose_lender_dies_raises(pipeline, name):
    moment = (BETWEEN | INSIDE)[name]
    borrower, lender = pipeline.run({"kills": f"1:{moment}", "other": 1}, {})
    assert "failing in" in borrower.out and lender.status == -signal.SIGKILL
    assert_has_raised(borrower)
    assert re.search(f"step raised {GONE}", borrower.out), f"{borrower}"
    if name in BETWEEN:  # later torch's own receive may be who hears of it first
        assert re.search(f"noria.MachineError: {GONE}", borrower.error), f"{borrower}"


def test_stage_whose_units_another_one_keeps_misses_that_one_when_it_dies(pipeline):
    borrower, _ = pipeline.run({"kills": "1:on_step:4", "other": 1, "lacks_units": True, "steps": 5}, {"steps": 5})
    assert re.search(r"step 3 [1-9]\d* from peers", borrower.out), f"{borrower}"
    assert_has_raised(borrower)
    assert re.search(r"step raised rank 1, which lends 64\.0 KiB to this rank, is gone", borrower.out), f"{borrower}"


@pytest.mark.parametrize("name", INSIDE)
def test_lender_whose_borrower_dies_raises_and_lends_nothing(pipeline, name):
    borrower, lender = pipeline.run({"fails": f"kill:{INSIDE[name]}"}, {"other": 0})
    assert "failing in" in borrower.out and borrower.status == -signal.SIGKILL
    assert_has_raised(lender)
    assert "lends 0" in lender.out and "step raised" not in lender.out, f"{lender}"


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("moment", ["begin_step:1", "_trade:1"])
def test_stage_that_dies_while_stages_meet_is_missed(pipeline, moment, failing):
    ranks: list[dict[str, Any]] = [{"other": failing}] * 2
    ranks[failing] = {"fails": f"kill:{moment}"}
    ended = pipeline.run(*ranks)
    assert "failing in" in ended[failing].out
    other = ended[1 - failing]
    assert_has_raised(other)
    assert re.search(r"noria\.MachineError: .*all-gather of .* failed; a rank has died", other.error), f"{other}"


def test_stages_that_wait_for_one_that_never_steps_say_so(pipeline):
    ended = pipeline.run({}, {"never_steps": True}, timeout_s=3.0)
    assert_has_raised(ended[0], soon=False)
    told = (
        r"MachineError: the stages of a pipeline, ranks \[0, 1\], did not all come to their first optimizer\.step\(\)"
        r".*; let each of them step as often as the others, or wrap all without stages= \(.*Timed out waiting 3000ms"
    )
    assert re.search(told, ended[0].error), f"{ended[0]}"


def test_step_before_the_first_pass_does_not_count(pipeline):
    for each in pipeline.run({"early_step": True}, {"early_step": True}):
        assert_is_finished(each)


def test_stages_that_wait_for_one_that_is_wrapped_without_them_say_so(pipeline):
    ended = pipeline.run({}, {"alone": True}, timeout_s=3.0)
    told = (
        r"a meeting of ranks \[0, 1\] of the world failed; .* within 0:00:03.* with mesh= or stages= of the same ranks"
    )
    assert ended[0].status == 1 and re.search(told, ended[0].error), f"{ended[0]}"
    assert ended[1].status == 1 and ended[1].late_s < BOUND_S, f"{ended[1]}"


def test_lender_that_dies_is_missed_although_its_worker_lives_on(pipeline):
    borrower, _ = pipeline.run({"kills": "1:on_step:3", "other": 1, "workers": 1}, {"workers": 2})
    assert_has_raised(borrower)
    assert re.search(f"step raised {GONE}", borrower.out), f"{borrower}"


# ---- ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("of_first, of_other, after", [("unwrap", "unwrap", "end"), ("exit", "exit", "exit")])
def test_stages_end_one_after_the_other(pipeline, first, of_first, of_other, after):
    ends_in_order(pipeline, first, of_first, of_other, after)


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("of_first", ["unwrap", "drop", "exit"])
@pytest.mark.parametrize("of_other", ["unwrap", "drop", "exit"])
@pytest.mark.parametrize("after", ["", "end", "exit"])
def test_stages_end_in_any_order(pipeline, first, of_first, of_other, after):
    ends_in_order(pipeline, first, of_first, of_other, after)


def ends_in_order(pipeline: Pipeline, first: int, of_first: str, of_other: str, after: str) -> None:
    ranks: list[dict[str, Any]] = [{"ends": of_other, "after": after, "workers": 1}] * 2
    ranks[first] = {"ends": of_first}
    for each in pipeline.run(*ranks):
        assert_is_finished(each)


@pytest.mark.parametrize("failing", [0, 1])
def test_stages_end_where_one_raises_in_a_forward(pipeline, failing):
    """The process of a lender that raises closes as others do at their end: what it has lent stays."""
    ranks: list[dict[str, Any]] = [{"other": failing}] * 2
    ranks[failing] = {"fails": "raise:forward:40"}
    ended = pipeline.run(*ranks)
    assert ended[failing].status == 1 and "MishapError: of this rank's own" in ended[failing].error
    assert_has_raised(ended[1 - failing])
    assert "step raised" not in ended[1 - failing].out


def test_arena_that_a_lender_leaves_is_freed_when_it_is_wrapped_again(pipeline):
    borrower, lender = pipeline.run({"ends": "unwrap", "after": "end", "times": 3}, {"ends": "unwrap", "times": 3})
    for each in (borrower, lender):
        assert_is_finished(each)
        counts = [int(count) for count in re.findall(r"descriptors (\d+)", each.out)]
        # At the end of a round the other stage may have gone, and with it a descriptor: never more of them.
        assert len(counts) == 3 and max(counts) == counts[0], f"{each}"


# ---- what is left ------------------------------------------------------------------------------------------------


def test_five_starts_and_kills_leave_nothing(pipeline):
    for seed in range(5):
        kill_at_any_moment(pipeline, seed)


@pytest.mark.long
def test_forty_starts_and_kills_leave_nothing(pipeline):
    for seed in range(5, 45):
        kill_at_any_moment(pipeline, seed)


def kill_at_any_moment(pipeline: Pipeline, seed: int) -> None:
    draw = random.Random(seed)
    ranks: list[dict[str, Any]] = [{"workers": draw.randrange(2)} for _ in range(draw.choice([2, 2, 2, 3]))]
    failing = draw.randrange(len(ranks))
    ranks[failing]["fails"] = f"kill:any:{draw.randrange(1, MOST_CALLS)}"
    if len(ranks) == 2 and draw.randrange(2):
        ranks[1 - failing]["other"] = failing
    ended = pipeline.run(*ranks)
    assert ended[failing].status == -signal.SIGKILL and "failing in" in ended[failing].out, f"{seed}: {ended}"
    for rank, each in enumerate(ended):
        if rank != failing and each.status != 0:  # else it had nothing more to do with it
            assert_has_raised(each)


MOST_CALLS = 4000
