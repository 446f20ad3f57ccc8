"""The driver's side of serve.py: starts a system's process, tells it what to do, and looks at it from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.systems.catalogue import SYSTEMS
from benchmarks.systems.environments import ROOT, python_of, variables_of
from benchmarks.systems.task import Task


class RefusedError(Exception):
    """What the system said, in a line."""


class Client:
    """One system's live process. While it is not told anything it sleeps."""

    def __init__(self, name: str, log: Path, patience_s: float = 600.0) -> None:
        """`log`: for all that it prints. `patience_s`: for each answer. Raises OSError where its environment is not
        there."""
        self.name = name
        self.patience_s = patience_s
        entry = SYSTEMS[name]
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [str(python_of(entry.environment)), "-m", "benchmarks.systems.serve", name],
                cwd=ROOT,
                env=os.environ | {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)} | variables_of(name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        self.before = 0
        self._is_late = False
        self.group: ControlGroup | None = None

    def tell(self, **word: Any) -> dict[str, Any]:
        """Its answer. Raises RefusedError where it raises, ends, or takes too long."""
        assert self.process.stdin is not None and self.process.stdout is not None
        timer = threading.Timer(self.patience_s, self._give_up)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(word) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise RefusedError(self._end())
        answer = json.loads(line)
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer

    def _give_up(self) -> None:
        self._is_late = True
        self.process.kill()

    def _end(self) -> str:
        code = self.process.wait()
        if self._is_late:
            return f"no answer in {self.patience_s:.0f} s"
        if code < 0:
            by = " for more memory than its limit" if self.group is not None and code == -signal.SIGKILL else ""
            return f"ended by {signal.Signals(-code).name}{by}"
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"exit status {code}: {lines[-1][:300] if lines else 'it said nothing'}"

    def start(self, task: Task, host_limit: int | None = None) -> dict[str, Any]:
        """Imports, then builds; memory counts from between the two. `host_limit`: bytes that the kernel grants it from
        there on: to a control group of its own, or where there can be none by RLIMIT_DATA, which counts what is mapped.
        """
        started = self.tell(do="import")
        self.before = self.resident("VmRSS")
        word: dict[str, Any] = {"do": "build", "task": dataclasses.asdict(task)}
        if host_limit is not None:
            self.group = ControlGroup.of(self.process.pid, host_limit)
            started["host_limit_by"] = "control group" if self.group else "RLIMIT_DATA"
            if self.group is None:
                word["host_limit"] = host_limit + self.resident("VmData")
        return started | self.tell(**word)

    def resident(self, row: str) -> int:
        """Bytes by the kernel's count: pinned memory as well, and files and shared memory that are mapped; of
        processes that it has started, what they do not share. Raises RefusedError where it has ended."""
        if self.process.poll() is not None:
            raise RefusedError(self._end())
        own, *others = (_rows(pid, "status") for pid in _family(self.process.pid))
        return own.get(row, 0) + sum(max(each.get(row, 0) - each.get("RssShmem", 0), 0) for each in others)

    def peak_host_bytes(self) -> int:
        """Since its imports, the most since the last call; of several processes, the sum of what each had at most.
        A page that a process without others has mapped twice counts once."""
        found = self.resident("VmHWM") - self.before - mapped_twice(self.process.pid)
        for pid in _family(self.process.pid):
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        if self.group is not None:
            self.group.close()


def mapped_twice(pid: int) -> int:
    """Bytes of shared memory that the process's own count has more than once. 0 if it has started others: what they
    share would look the same."""
    if len(_family(pid)) > 1:
        return 0
    shared = _rows(pid, "status").get("RssShmem", 0)
    return max(shared - _rows(pid, "smaps_rollup").get("Pss_Shmem", shared), 0)


def _family(pid: int) -> list[int]:
    """It, and all that it has started."""
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def _rows(pid: int, name: str) -> dict[str, int]:
    """What the kernel tells of a process in this file, by row: bytes."""
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for line in lines if (words := line.split())[-1] == "kB"}


class ControlGroup:
    """A limit on the memory that a process takes from now on; who exceeds it is killed by the kernel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def of(pid: int, limit: int) -> ControlGroup | None:
        """Returns None if this process may not make one."""
        base = Path("/sys/fs/cgroup")
        for parent, name in ((base / "memory", "memory.limit_in_bytes"), (base, "memory.max")):
            folder = parent / f"noria_benchmark_{pid}"
            try:
                folder.mkdir()
            except OSError:
                continue
            group = ControlGroup(folder)
            try:
                (folder / name).write_text(str(limit))
                (folder / "cgroup.procs").write_text(str(pid))
                return group
            except OSError:
                group.close()
        return None

    def close(self) -> None:
        """Once the process has ended."""
        for _ in range(50):
            try:
                self.folder.rmdir()
                return
            except OSError:  # its pages are still being given back
                time.sleep(0.1)
