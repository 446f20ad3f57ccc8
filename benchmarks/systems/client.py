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
            is_limited = self.group is not None and self.group.is_limited
            by = " for more memory than its limit" if is_limited and code == -signal.SIGKILL else ""
            return f"ended by {signal.Signals(-code).name}{by}"
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"exit status {code}: {lines[-1][:300] if lines else 'it said nothing'}"

    def start(self, task: Task, host_limit: int | None = None) -> dict[str, Any]:
        """Imports, then builds; memory counts from between the two. `host_limit`: bytes that the kernel grants it from
        there on: to a control group of its own, or where there can be none by RLIMIT_DATA, which counts what is mapped.
        """
        started = self.tell(do="import")
        self.before = self.resident("VmRSS")
        self.group = ControlGroup.of(self.process.pid, host_limit)
        started["control_group"] = self.group is not None
        word: dict[str, Any] = {"do": "build", "task": dataclasses.asdict(task)}
        if host_limit is not None and self.group is None:
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
        """Since its imports, the most since the last call. The kernel counts it in two ways, neither too low, so the
        smaller one holds: by process, where a page that is mapped twice counts twice, and several processes count as if
        each had its most at once; and by control group, if it has one, where the files that it has read count. Only
        libraries that others have read before are missing there."""
        counts = [self.resident("VmHWM") - self.before]
        for pid in _family(self.process.pid):
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        if self.group is not None:
            counts.append(self.group.peak_bytes())
        return min(counts)

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
    """Counts the memory that a process takes from now on, and what it starts. May limit it: the kernel kills who takes
    more."""

    def __init__(self, folder: Path, pid: int, peak: str, limits: dict[str, int]) -> None:
        """Raises OSError if this process may not make one, or if the kernel cannot count the peak anew."""
        self._folder = folder
        self.is_limited = bool(limits)
        folder.mkdir()
        try:
            self._peak = os.open(folder / peak, os.O_RDWR)
        except OSError:
            folder.rmdir()
            raise
        try:
            for name, limit in limits.items():
                (folder / name).write_text(str(limit))
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            self.close()
            raise

    @staticmethod
    def of(pid: int, limit: int | None) -> ControlGroup | None:
        """Returns None if there can be none."""
        name, base = f"noria_benchmark_{pid}", Path("/sys/fs/cgroup")
        limits = {} if limit is None else {"memory.limit_in_bytes": limit}
        with contextlib.suppress(OSError):
            return ControlGroup(base / "memory" / name, pid, "memory.max_usage_in_bytes", limits)
        limits = {} if limit is None else {"memory.max": limit}
        with contextlib.suppress(OSError):  # "memory.peak" can be written since Linux 6.12
            return ControlGroup(base / name, pid, "memory.peak", limits)
        return None

    def peak_bytes(self) -> int:
        """The most since the last call."""
        found = int(os.pread(self._peak, 100, 0))
        os.pwrite(self._peak, b"0", 0)
        return found

    def close(self) -> None:
        """Once the process has ended."""
        os.close(self._peak)
        for _ in range(50):
            try:
                self._folder.rmdir()
                return
            except OSError:  # its pages are still being given back
                time.sleep(0.1)
