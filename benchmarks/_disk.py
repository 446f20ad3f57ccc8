"""Ways to read and write files on a disk: noria's door to files, and `fio` under the same conditions.

Each way reads and writes equal numbers of bytes. All bytes are written once before the measurement. So no way waits for
a file system that looks for space.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import mmap
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any, Protocol

import _common
from noria import _C

DIRECTIONS = ("read", "write", "both")
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Traffic:
    """`file_bytes`: the bytes to read, and also the bytes to write. `record`: the bytes of one call of noria. `depth`:
    how many requests are under way at once. Each has `part` bytes."""

    file_bytes: int
    record: int = 256 * MIB
    depth: int = 16
    part: int = MIB

    def bytes_of(self, direction: str) -> int:
        return self.file_bytes * (2 if direction == "both" else 1)


class Way(Protocol):
    def seconds(self, direction: str) -> float: ...


class Memory:
    """Whole pages, to read into and to write from. What is written has no pattern that a disk could shorten."""

    def __init__(self, num_bytes: int, *, is_scattered: bool = False) -> None:
        """`num_bytes`: each way, whole pages. `is_scattered`: no two pages lie side by side in the machine. Otherwise
        memory is that of noria's slots: pages of 2 MiB, if the kernel gives them."""
        self.num_bytes = 2 * num_bytes
        if is_scattered:
            self._pages, between = mmap.mmap(-1, self.num_bytes), mmap.mmap(-1, self.num_bytes)
            for page in range(0, self.num_bytes, mmap.PAGESIZE):  # taken in turns
                self._pages[page] = between[page] = 1
            self.to_read = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        else:
            self._slots = _C.SharedPages(self.num_bytes)
            self.to_read = self._slots.address
        self.to_write = self.to_read + num_bytes
        for begin in range(0, self.num_bytes, MIB):
            piece = os.urandom(min(MIB, self.num_bytes - begin))
            ctypes.memmove(self.to_read + begin, piece, len(piece))


class Door:
    """noria's: one half of its records is read, and the other half is written."""

    def __init__(self, folder: Path, traffic: Traffic, memory: Memory, door: str = "auto") -> None:
        """`memory`: at least a record."""
        others = open_files(folder)
        self._store = _C.FileStore([str(folder)], door=door, depth=traffic.depth, part=traffic.part)
        (self.path,) = open_files(folder) - others  # its file has no name
        self._memory = memory
        self._store.expect_memory(memory.to_read, memory.num_bytes)  # as in training
        left = traffic.file_bytes
        sizes = [min(traffic.record, left - begin) for begin in range(0, left, traffic.record)]
        self._to_read, self._to_write = ([self._store.add(size) for size in sizes] for _ in range(2))
        self._store.reserve()
        for record in self._to_read:
            self._store.write(record, memory.to_write)
        self._write()

    @property
    def name(self) -> str:
        return self._store.door

    @property
    def notes(self) -> list[str]:
        return self._store.notes

    def seconds(self, direction: str) -> float:
        return _common.seconds({"read": self._read, "write": self._write, "both": self._both}[direction])

    def _read(self) -> None:
        for record in self._to_read:
            self._store.read(record, self._memory.to_read)

    def _write(self) -> None:
        for record in self._to_write:
            self._store.write(record, self._memory.to_write)

    def _both(self) -> None:
        failures: list[Exception] = []

        def write() -> None:
            try:
                self._write()
            except Exception as error:
                failures.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            self._read()
        finally:
            writer.join()
        if failures:
            raise failures[0]


def open_files(folder: Path) -> set[Path]:
    """Those of this process in the folder, by a path that other processes can open."""
    process, found = Path(f"/proc/{os.getpid()}/fd"), set[Path]()
    for each in process.iterdir():
        with contextlib.suppress(OSError):
            if Path(os.readlink(each)).parent == folder.resolve():
                found.add(each)
    return found


class Fio:
    """One half of a file is read and the other half is written, each by a job of its own. No fsync, as noria has none.
    Its memory is registered with io_uring, as noria's is, and is what the kernel gives it."""

    def __init__(self, path: Path, traffic: Traffic) -> None:
        """`path`: twice the traffic's bytes, already written. A place on a disk may be faster than another one, so it
        should be the file that is compared."""
        self._path, self._traffic = path, traffic
        self.engine, self.notes = "io_uring", list[str]()
        try:
            self._run("write")
        except RefusedError as refusal:
            self.notes.append(f"fio uses libaio: {refusal}")
            self.engine = "libaio"
            self._run("write")

    @staticmethod
    def why_missing() -> str | None:
        return None if shutil.which("fio") else "there is no fio: apt-get install fio"

    def seconds(self, direction: str) -> float:
        """By fio's own clock: from the start of its jobs to the end of the last one."""
        return self._run(*(("read", "write") if direction == "both" else (direction,)))

    def _run(self, *directions: str) -> float:
        traffic = self._traffic
        command = ["fio", "--output-format=json", f"--ioengine={self.engine}", "--direct=1", f"--bs={traffic.part}"]
        command += ["--fixedbufs=1"] if self.engine == "io_uring" else []
        command += [f"--iodepth={traffic.depth}", f"--size={traffic.file_bytes}", "--fallocate=none", "--overwrite=1"]
        command += ["--allow_file_create=0", f"--filename={self._path}"]
        for each in directions:
            begin = traffic.file_bytes if each == "write" else 0
            command += [f"--name={each}", f"--rw={each}", f"--offset={begin}"]
        done = subprocess.run(command, capture_output=True, text=True)
        jobs = jobs_in(done.stdout)
        if done.returncode != 0 or not jobs or any(job["error"] for job in jobs):
            raise RefusedError((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
        found = [job[each] for job, each in zip(jobs, directions, strict=True)]
        if any(each["io_bytes"] != traffic.file_bytes for each in found):
            raise RefusedError(f"fio moved {[each['io_bytes'] for each in found]} bytes, not {traffic.file_bytes} each")
        return max(each["runtime"] for each in found) / 1e3


class RefusedError(Exception):
    """What fio said, in a line."""


def jobs_in(printed: str) -> list[dict[str, Any]]:
    """fio may print notes before its JSON."""
    begin = printed.find("{")
    return json.loads(printed[begin:])["jobs"] if begin >= 0 else []
