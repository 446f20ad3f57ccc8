"""Finds what this machine has and lacks for noria, and measures how fast it moves bytes (`noria doctor`).

Every measurement is small: all of them together take a second or two. It is the best of a few tries, so it says what
the machine can do, not what it does under load.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from noria import _C
from noria._version import __version__
from noria.host.limits import Limit, host_limits, margin_of, num_numa_nodes, pinning_limit, probe_limits, tightest
from noria.host.processor import cpu_name
from noria.model.file_layout import FILE_ALIGNMENT
from noria.policy import format_bytes
from noria.torch_state import await_device

__all__ = [
    "Doctor",
    "Speeds",
    "diagnose",
    "host_memory_gib_s",
    "measure_matmul_tflops",
    "measure_speeds",
    "versions",
]

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Holds measured speeds.

    Units: GiB/s. For `copy`, `fetch` and `drain`, each copied byte counts once, although it is read and written. For
    `update`, bytes read and bytes written both count. All update threads run, so this is the speed of host memory.
    """

    copy: float
    fetch: float
    drain: float
    update: float


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Describes this machine. `missing`: the things that noria could use and that are not there, with remedies."""

    versions: dict[str, str]
    backends: dict[str, str]
    cpu: str
    cores: int
    instruction_sets: list[str]
    memory_total: int | None
    memory_available: int | None
    memory_limits: list[Limit]
    home_budget: int | None
    huge_pages: str
    numa_nodes: int
    lockable: int | None
    files: dict[str, str]
    """How files are read and written: at all, and in each folder that was asked for."""
    speeds: Speeds
    missing: list[str]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        def amount(num_bytes: int | None, none: str) -> str:
            return none if num_bytes is None else format_bytes(num_bytes)

        found = [(name, version) for name, version in self.versions.items()]
        found += [(f"backend {name}", state) for name, state in self.backends.items()]
        found += [
            ("processor", f"{self.cpu}, {self.cores} cores for this process"),
            ("update kernels", ", ".join(self.instruction_sets)),
            ("memory", f"{amount(self.memory_total, 'unknown')}, {amount(self.memory_available, 'unknown')} available"),
        ]
        found += [("memory limit", str(limit)) for limit in self.memory_limits]
        found += [
            ("memory for a home", f'{amount(self.home_budget, "unknown")} with host_memory="auto"'),
            ("memory nodes", str(self.numa_nodes)),
            ("huge pages", self.huge_pages),
            ("lockable memory (ulimit -l)", f"{amount(self.lockable, 'unlimited')}; not every driver asks"),
            *self.files.items(),
            ("copy", f"{self.speeds.copy:.1f} GiB/s, one thread"),
            ("fetch, drain", f"{self.speeds.fetch:.1f}, {self.speeds.drain:.1f} GiB/s through the host backend"),
            ("update", f"{self.speeds.update:.1f} GiB/s read and written by the fused AdamW"),
            ("host memory", _what_it_allows(self.speeds.update)),
        ]
        return found


def _what_it_allows(gib_s: float) -> str:
    # One parameter with AdamW, fp32 states and dtype=torch.bfloat16. Its update moves 26 bytes, each of two fetches 2,
    # the drain of its gradient 2.
    seconds = (26 + 2 * 2 + 2) * 1e9 / (gib_s * GIB)
    return (
        f"updates, fetches and drains share these {gib_s:.1f} GiB/s: a step of AdamW in bfloat16 takes at least "
        f"{seconds:.2f} s for a billion parameters (26 B each to update, 2 to fetch, twice, 2 to drain)"
    )


# ---- facts --------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    record = json.loads((Path(__file__).parent / "_built_with.json").read_text())
    return {
        "noria": f"{__version__}, built against torch {record['torch']}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tbb": _installed("tbb") or "not found as a package",
        "system": platform.platform(),
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return next((word.strip("[]") for word in text.split() if word.startswith("[")), text.strip())


def _backends() -> dict[str, str]:
    reason = _C.cuda_absent_reason()
    found = {"host": "ready"}
    runtime = _C.find_cuda_runtime()
    if not reason and torch.cuda.is_available():
        devices = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        found["cuda"] = f"{devices}; runtime {runtime.version} in {runtime.path}" if runtime else devices
    else:
        found["cuda"] = f"absent: {reason or f'torch {torch.__version__} reaches no CUDA device'}"
    return found


def _files(folders: Sequence[str]) -> dict[str, str]:
    """Returns how noria reads and writes files, and whether `files=` can use each of these folders."""
    reason = _C.uring_absent_reason()
    found = {"files": f"read and written by threads: {reason}" if reason else "read and written by io_uring"}
    return found | {f"files in {folder}": _folder_state(folder) for folder in folders}


def _folder_state(folder: str) -> str:
    if not os.path.isdir(folder):
        return "no such folder"
    try:
        home = _C.FileHome([os.path.abspath(folder)], [FILE_ALIGNMENT], 1)
    except (_C.UsageError, _C.MachineError) as error:
        return f"not possible: {error}"
    told = [note for note in home.notes if "page cache" in note]  # the others are no news of the folder
    return told[0] if told else "bypass the page cache (O_DIRECT)"


# ---- speeds -------------------------------------------------------------------------------------------------------


def _best_s(work: Callable[[], object], tries: int) -> float:
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def measure_speeds(num_bytes: int = 64 << 20, tries: int = 4) -> Speeds:
    """Measures copies of `num_bytes`, and AdamW on four arrays.

    The four arrays together have `2 * num_bytes`. If the caches are large, they have more (`_beside_caches`).
    """
    num_bytes = -(-num_bytes // 4096) * 4096
    backend = _C.make_host_backend(num_bytes)
    home = _C.Arena(num_bytes)
    try:
        device = backend.allocate(num_bytes)
        ctypes.memset(home.data, 1, num_bytes)
        ctypes.memset(device, 1, num_bytes)
        ways: dict[str, Callable[[], object]] = {
            "copy": lambda: ctypes.memmove(device, home.data, num_bytes),
            "fetch": lambda: backend.submit("fetch", [(device, home.data, num_bytes)]).wait_passed(),
            "drain": lambda: backend.submit("drain", [(home.data, device, num_bytes)]).wait_passed(),
        }
        best_s = dict.fromkeys(ways, float("inf"))
        for _ in range(tries):  # in turns, so that a busy moment affects all of them
            for name, work in ways.items():
                best_s[name] = min(best_s[name], _best_s(work, 1))
        backend.free(device)
    finally:
        backend.close()
        home.close()
    gib_s = {name: num_bytes / GIB / best for name, best in best_s.items()}
    return Speeds(**gib_s, update=_measure_update(_beside_caches(2 * num_bytes) // 16, tries))


@functools.cache
def host_memory_gib_s() -> float:
    """Measures the speed of host memory, which updates, fetches and drains share.

    It counts bytes read plus written by the fused AdamW, on arrays that no cache holds if there is room for them. It
    measures once per process. This takes some tenths of a second, and the memory of the arrays for that time.
    """
    return _measure_update(_beside_caches(64 << 20) // 16, 3)


def _beside_caches(least: int) -> int:
    """Returns the bytes of arrays that no cache holds: twice the caches, but at most a quarter of the free memory.

    A virtual machine may see all caches of a large host. Ranks on one machine may measure at once, so they share that
    quarter. `least`: bytes, if neither is more.
    """
    found = probe_limits(torch.device("cpu"))
    limit, most = tightest(found.limits), 2 * _cache_bytes()
    if limit is not None:
        most = min(most, limit.free // 4 // found.num_processes)
    return max(most // 4096 * 4096, least)


def _cache_bytes() -> int:
    """Returns the bytes of all last-level caches of this process's cores. 0 means unknown."""
    found = {}
    for core in os.sched_getaffinity(0):
        place = Path(f"/sys/devices/system/cpu/cpu{core}/cache/index3")
        try:
            size, shared_by = ((place / name).read_text().strip() for name in ("size", "shared_cpu_list"))
            found[shared_by] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return min(sum(found.values()), GIB)


def _measure_update(count: int, tries: int) -> float:
    # All arrays are written: unwritten pages would all be one page of zeros, which a cache would hold.
    arrays = [torch.full((count,), 1e-3, device="cpu") for _ in range(4)]
    master, m, v, gradient = (array.data_ptr() for array in arrays)
    scalars = _C.update_scalars("adamw", 1, lr=1e-3)
    pool = _C.HostOptimizer(is_beside_device=torch.cuda.is_available())
    try:
        unit = _C.UnitArrays(master=master, m=m, v=v)
        job = _C.UpdateJob("adamw", [(0, count, scalars)], unit, gradient=gradient)
        best_s = _best_s(lambda: pool.submit(job).wait_passed(), tries)
    finally:
        pool.close()
    return job.bytes / GIB / best_s


def measure_matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Measures one product of square matrices, large enough to be limited by arithmetic."""
    size = 8192 if device.type == "cuda" else 768
    a = torch.randn(size, size, device=device, dtype=dtype)

    def work() -> None:
        a @ a
        await_device(device)

    work()
    return 2 * size**3 / _best_s(work, 3) / 1e12


# ---- diagnosis ----------------------------------------------------------------------------------------------------


def diagnose(folders: Sequence[str] = ()) -> Doctor:
    """Looks at this machine, and at folders for `files=`."""
    memory = _meminfo()
    lockable, limits = pinning_limit(), host_limits()
    least = tightest(limits)
    backends = _backends()
    return Doctor(
        versions=versions(),
        backends=backends,
        cpu=cpu_name(),
        cores=_C.num_usable_cpus(),
        instruction_sets=_C.instruction_sets(),
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        memory_limits=limits,
        home_budget=None if least is None else max(least.free - margin_of(least.free), 0),
        huge_pages=_huge_pages(),
        numa_nodes=num_numa_nodes(),
        lockable=lockable,
        files=_files(folders),
        speeds=measure_speeds(),
        missing=_missing(backends, lockable),
    )


def _missing(backends: dict[str, str], lockable: int | None) -> list[str]:
    missing = []
    if backends["cuda"].startswith("absent") and torch.cuda.is_available():
        missing.append(
            "NO CUDA FOR NORIA, though torch reaches a device: noria needs the runtime library that torch was built "
            f"with, libcudart.so.{(torch.version.cuda or '13').partition('.')[0]}; pip install nvidia-cuda-runtime, or "
            f"put the library where the system's linker looks. Found: {backends['cuda']}"
        )
    elif backends["cuda"].startswith("absent"):
        remedy = "install a CUDA build of torch (https://pytorch.org/get-started/locally) and a driver that it supports"
        missing.append(f'no CUDA device, so device="cpu" computes: {remedy}')
    elif lockable is not None and lockable < GIB:
        missing.append(
            "little lockable memory: if the driver refuses to pin the home, weights go through a staging ring and "
            "gradients cannot be held at all; raise it with `ulimit -l unlimited`"
        )
    if not backends["cuda"].startswith("absent") and not _C.has_kernel_images():
        missing.append(
            "kernels for devices, so no unit can stay on one: build noria where there is an nvcc, 12.8 or newer"
        )
    if _huge_pages() == "never":
        missing.append(
            "huge pages are off, so updates and copies walk more page tables: "
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        )
    if reason := _C.uring_absent_reason():
        missing.append(
            f"no io_uring, so threads read and write files ({reason}): apt-get install liburing-dev, and build noria "
            "again; in a container, allow io_uring in its seccomp rules"
        )
    if _installed("transformers") is None:
        missing.append("noria plan --hf-config reads models of transformers: pip install transformers")
    return missing
