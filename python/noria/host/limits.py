"""Finds how much host memory this process may still take, and which file or command says so.

It checks every limit that could stop the process. All files are read under one root, which tests replace. If a file
does not name a limit, there is none.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from noria._errors import UsageError, usage_error
from noria.policy import format_bytes

__all__ = [
    "Found",
    "Free",
    "Limit",
    "check_fits",
    "empty_cache",
    "host_limits",
    "machine_name",
    "margin_of",
    "min_over_ranks",
    "num_numa_nodes",
    "numa_node",
    "pinning_limit",
    "probe_limits",
    "tightest",
]

ROOT = Path("/")


@dataclasses.dataclass(frozen=True)
class Limit:
    """Describes one limit on host memory.

    - `free`: bytes that may still be taken under it.
    - `source`: the file or the command that says so.
    - `is_own`: the limit is for this process alone. The other limits are shared with other processes.
    - `is_estimate`: the number is the kernel's guess, and nothing stops a process there. On machines that get memory
      on demand, the guess is far too small.
    """

    name: str
    source: str
    free: int
    is_own: bool = False
    is_estimate: bool = False

    def __str__(self) -> str:
        return f"{format_bytes(self.free)} free under {self.name} ({self.source})"


def margin_of(free: int) -> int:
    """Returns the bytes that `host_memory="auto"` leaves to torch, Python and others.

    This is 1/16 of the free memory, and at least 256 MiB.
    """
    return max(free // 16, 256 << 20)


def host_limits(root: Path = ROOT) -> list[Limit]:
    """Returns every limit on memory that applies to this process."""
    found = []
    available = _sizes(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        found.append(Limit("MemAvailable", "/proc/meminfo", available, is_estimate=True))
    found += _cgroups(root)
    status = _sizes(root / "proc/self/status")
    for name, used, command in (("Max address space", "VmSize", "ulimit -v"), ("Max data size", "VmData", "ulimit -d")):
        limit = _process_limit(root, name)
        if limit is not None:
            found.append(Limit(f"{name.lower()} of the process", command, max(limit - status.get(used, 0), 0), True))
    return found


def tightest(limits: Sequence[Limit]) -> Limit | None:
    return min(limits, key=lambda limit: limit.free, default=None)


# ---- what a plan uses -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Found:
    """Describes what one process finds on its machine.

    `host`: a name that is the same in all processes on one machine. `num_processes`: how many its launcher started
    there. `device`: free and total bytes of a CUDA device, else None. `leaving`: bytes of host memory that this process
    gives back once its weights have moved to the home.
    """

    host: str
    num_processes: int
    device: tuple[int, int] | None
    limits: tuple[Limit, ...]
    leaving: int = 0


@dataclasses.dataclass(frozen=True)
class Free:
    """Holds the least free memory over all processes that share a model, so that all of them plan alike.

    - `host`: the tightest of the limits that stop a process. An explicit `host_memory` is checked against it.
    - `share`: the tightest of all limits, divided between the processes of one machine. "auto" uses it.
    - `own`: the tightest limit on what a process maps. The whole home is mapped before anything is given back.
    - `leaving`: see `Found`.
    """

    device: tuple[int, int] | None
    host: Limit | None
    share: Limit | None
    own: Limit | None = None
    leaving: int = 0


def machine_name() -> str:
    """Returns a name that is the same in all processes on one machine."""
    boot = "".join(_lines(ROOT / "proc/sys/kernel/random/boot_id")[:1])
    return f"{platform.node()} {boot}"


def probe_limits(device: torch.device, leaving: int = 0) -> Found:
    is_launched = dist.is_available() and dist.is_initialized()
    beside = os.environ.get("LOCAL_WORLD_SIZE", "") if is_launched else ""  # torchrun's
    return Found(
        machine_name(),
        int(beside) if beside.isdigit() else 1,
        _device_memory(device) if device.type == "cuda" and torch.cuda.is_available() else None,
        tuple(host_limits()),
        leaving,
    )


def _device_memory(device: torch.device) -> tuple[int, int]:
    """Returns free and total bytes."""
    empty_cache(device)
    return torch.cuda.mem_get_info(device)


def empty_cache(device: torch.device) -> None:
    """Has torch give back what it caches of a CUDA device's memory. noria takes memory from the driver."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def min_over_ranks(gathered: Sequence[Found]) -> Free:
    """Returns the least free memory over `gathered`, which has one entry per rank."""
    beside = Counter(each.host for each in gathered)
    devices = [each.device for each in gathered if each.device is not None]
    hosts, shares = [], []
    for rank, each in enumerate(gathered):
        number = max(each.num_processes, beside[each.host])
        on = f" on rank {rank}" if len(gathered) > 1 else ""
        for limit in each.limits:
            hosts.append(dataclasses.replace(limit, name=limit.name + on))
            shares.append(hosts[-1])
            if number > 1 and not limit.is_own:
                name = f"{limit.name}{on}, divided by the {number} processes there"
                shares[-1] = dataclasses.replace(limit, name=name, free=limit.free // number)
    device = (min(free for free, _ in devices), min(total for _, total in devices)) if devices else None
    host = tightest([limit for limit in hosts if not limit.is_estimate])
    own = tightest([limit for limit in hosts if limit.is_own])
    return Free(device, host, tightest(shares), own, min((each.leaving for each in gathered), default=0))


def pinning_limit(root: Path = ROOT) -> int | None:
    """Returns RLIMIT_MEMLOCK in bytes, or None for no limit.

    Only some drivers apply it to pinned memory, so noria refuses nothing because of it. If the driver refuses to pin
    memory, noria stages that memory or raises.
    """
    return _process_limit(root, "Max locked memory")


def check_fits(
    rows: Sequence[tuple[str, int]], budget: int | None, free: Free | None, late: Collection[str] = ()
) -> UsageError | None:
    """Returns the error that says why the home does not fit, or None if it fits.

    Args:
        rows: (purpose, bytes) of each arena of the home.
        budget: `host_memory` in bytes; None for "auto".
        free: The free memory; None if it is not known.
        late: Purposes whose pages are taken after `free.leaving` has been given back.
    """
    needed = sum(size for _, size in rows)
    each = ", ".join(f"{purpose} {format_bytes(size)}" for purpose, size in rows if size)
    if budget is not None and needed > budget:
        return usage_error(
            f"host_memory of at least {format_bytes(needed)} ({needed} bytes): {each}",
            f"host_memory={format_bytes(budget)}",
            "raise host_memory, freeze parameters, or choose an optimizer with less state",
        )
    limit = None if free is None else free.share if budget is None else free.host
    if free is None or limit is None:
        return None
    margin = margin_of(limit.free) if budget is None else 0
    leaving = min(free.leaving, sum(size for purpose, size in rows if purpose in late))
    if needed + margin - (0 if limit.is_own else leaving) <= limit.free:
        if free.own is None or needed + margin <= free.own.free:
            return None
        limit = free.own
    is_allowed = free.host is None or needed <= free.host.free
    left = f' (host_memory="auto" keeps {format_bytes(margin)} of it free)' if margin else ""
    return usage_error(
        f"free host memory of at least {format_bytes(needed)} ({needed} bytes): {each}",
        f"{limit}{left}",
        "free memory or raise that limit, freeze parameters, or choose an optimizer with less state"
        + (" (host_memory=<bytes> does without margin and estimates)" if is_allowed and budget is None else ""),
    )


# ---- control groups -------------------------------------------------------------------------------------------------


def _cgroups(root: Path) -> Iterator[Limit]:
    """Yields the limits of this process's control groups and of all groups around them, in versions 1 and 2.

    Inside a container the path that /proc names may not exist. The container's own group is then mounted at the top.
    """
    base = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, group = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            tops, limit, usage, reclaimable = (
                (base, base / "unified"),
                "memory.max",
                "memory.current",
                ("inactive_file", "active_file"),
            )
        elif "memory" in controllers.split(","):
            tops, limit, usage, reclaimable = (
                (base / "memory", base),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ("total_inactive_file", "total_active_file"),
            )
        else:
            continue
        for top in tops:
            folder = top / group.strip("/")
            for each in (folder, *folder.parents):
                if not each.is_relative_to(top):
                    break
                size = _number(each / limit)
                used = _number(each / usage)
                if size is None or used is None or size >= 1 << 60:  # a size this large stands for "no limit"
                    continue
                stat = dict(line.split()[:2] for line in _lines(each / "memory.stat") if len(line.split()) == 2)
                cache = sum(int(stat.get(name, 0)) for name in reclaimable)
                source = "/" + str((each / limit).relative_to(root))
                yield Limit("the memory limit of the control group", source, max(size - max(used - cache, 0), 0))


# ---- NUMA -----------------------------------------------------------------------------------------------------------


def num_numa_nodes(root: Path = ROOT) -> int:
    return max(len(list((root / "sys/devices/system/node").glob("node[0-9]*"))), 1)


def numa_node(pci_bus_id: str, root: Path = ROOT) -> int | None:
    """Returns the NUMA node of a device. None if the machine has one node, or does not say."""
    if num_numa_nodes(root) < 2 or not pci_bus_id:
        return None
    node = _number(root / "sys/bus/pci/devices" / pci_bus_id.lower() / "numa_node")
    return node if node is not None and node >= 0 else None


# ---- files ----------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Returns the number in the file, or None if it holds none (such as "max")."""
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.removeprefix("-").isdigit() else None


def _sizes(path: Path) -> dict[str, int]:
    """Returns bytes by name, from lines such as "MemTotal:  16 kB"."""
    found = {}
    for line in _lines(path):
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _process_limit(root: Path, name: str) -> int | None:
    """Returns the soft limit from a line such as "Max address space   unlimited   unlimited   bytes".

    None if there is no such line, or if it says unlimited.
    """
    for line in _lines(root / "proc/self/limits"):
        if line.startswith(name):
            soft = line.removeprefix(name).split()[0]
            return int(soft) if soft.isdigit() else None
    return None
