"""Rounds of ranks that are forked from one process, which has imported all they need.

A process that imports torch takes seconds of a core, and some tests need hundreds of ranks that die. `Rounds` starts a
module as a script, which calls `serve`. Each line of its input asks for a round, as JSON. Its ranks are forked, and end
as any interpreter does. The answer is a line of JSON too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import noria
import pytest

from tests.device import IS_GPU

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a rank did; `status` None: it had to be killed."""

    status: int | None
    late_s: float  # after the first of the round
    out: str
    error: str


class Rounds:
    """Asks for rounds. Each needs a folder of its own."""

    def __init__(self, module: str, **environment: str) -> None:
        if IS_GPU:
            pytest.skip("ranks that are forked, and train on the CPU: a GPU changes nothing of them")
        paths = os.pathsep.join([str(ROOT), str(Path(noria.__file__).parents[1])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, folder: Path, ranks: Sequence[dict[str, Any]], *, timeout_s: float, patience_s: float) -> list[Ended]:
        """`ranks`: the orders of each. Those with `"stops": True` stop, and go on when all others have ended."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        asked = {"folder": str(folder), "ranks": ranks, "timeout_s": timeout_s, "patience_s": patience_s}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        answers = json.loads(process.stdout.readline())
        return [
            Ended(*how, (folder / f"out{rank}").read_text(), (folder / f"error{rank}").read_text())
            for rank, how in enumerate(answers)
        ]

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            pass


def serve(run: Callable[[int, int, Path, dict[str, Any], float], None]) -> None:
    """Answers each line with how its ranks have ended. A rank calls `run(rank, size, folder, orders, timeout_s)`."""
    for line in sys.stdin:
        asked = json.loads(line)
        folder, size = Path(asked["folder"]), len(asked["ranks"])
        pids = []
        for rank, orders in enumerate(asked["ranks"]):
            pids.append(os.fork())
            if pids[-1] == 0:
                for number, name in enumerate((os.devnull, folder / f"out{rank}", folder / f"error{rank}")):
                    file = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
                    os.dup2(file, number)
                    os.close(file)
                run(rank, size, folder, orders, asked["timeout_s"])
                return  # this interpreter ends
        stopping = {pid for pid, orders in zip(pids, asked["ranks"], strict=True) if orders.get("stops")}
        print(json.dumps(_wait_for(pids, stopping, asked["patience_s"])), flush=True)


def _wait_for(ranks: list[int], stopping: set[int], patience_s: float) -> list[tuple[int | None, float]]:
    """By rank: its exit code, and the seconds after the first one's end; None: it had to be killed."""
    found: dict[int, tuple[int | None, float]] = {}
    deadline = time.monotonic() + patience_s
    first = 0.0
    while len(found) < len(ranks):
        for pid in ranks:
            if pid in found or not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                continue
            _, status = os.waitpid(pid, 0)
            first = first or time.monotonic()
            found[pid] = (os.waitstatus_to_exitcode(status), time.monotonic() - first)
        if stopping and set(ranks) - stopping <= set(found):
            for pid in stopping - set(found):
                os.kill(pid, signal.SIGCONT)
            stopping = set()
            deadline = time.monotonic() + patience_s
        if time.monotonic() > deadline:
            for pid in set(ranks).difference(found):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                found[pid] = (None, patience_s)
        time.sleep(0.01)
    return [found[pid] for pid in ranks]
