"""How much host memory this process may still take, by every limit that could stop it, and from where that is known.

All of it is read from files under one root, which tests replace. What a file does not say is not a limit.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
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
    "find",
    "host_limits",
    "least",
    "margin_of",
    "num_numa_nodes",
    "numa_node",
    "pinning_limit",
    "tightest",
]

ROOT = Path("/")


@dataclasses.dataclass(frozen=True)
class Limit:
    """`free`: bytes that may still be taken under it. `source`: the file, or the command, that says so. `is_own`: of
    this process alone; the others are shared with those beside it. `is_estimate`: the kernel's guess, which on machines
    that are lent memory as they need it is far too small; nothing stops a process there."""

    name: str
    source: str
    free: int
    is_own: bool = False
    is_estimate: bool = False

    def __str__(self) -> str:
        return f"{format_bytes(self.free)} free under {self.name} ({self.source})"


def margin_of(free: int) -> int:
    """What `host_memory="auto"` leaves to torch, to Python and to others: 1/16 of what is free, at least 256 MiB."""
    return max(free // 16, 256 << 20)


def host_limits(root: Path = ROOT) -> list[Limit]:
    """Every limit on taking memory that this process is under."""
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


# ---- what a plan goes by ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Found:
    """What a process finds where it runs. `host`: a name that processes on one machine have alike; its launcher has
    started `num_processes` there. `device`: free and total bytes, where it is CUDA's."""

    host: str
    num_processes: int
    device: tuple[int, int] | None
    limits: tuple[Limit, ...]


@dataclasses.dataclass(frozen=True)
class Free:
    """The least that any process finds of those that share a model, so that all plan alike. `host`: of what stops a
    process; an explicit `host_memory` goes by it. `share`: of all, where several processes of one machine take as much:
    what "auto" goes by."""

    device: tuple[int, int] | None
    host: Limit | None
    share: Limit | None


def find(device: torch.device) -> Found:
    boot = "".join(_lines(ROOT / "proc/sys/kernel/random/boot_id")[:1])
    is_launched = dist.is_available() and dist.is_initialized()
    beside = os.environ.get("LOCAL_WORLD_SIZE", "") if is_launched else ""  # torchrun's
    return Found(
        f"{platform.node()} {boot}",
        int(beside) if beside.isdigit() else 1,
        _device_memory(device) if device.type == "cuda" else None,
        tuple(host_limits()),
    )


def _device_memory(device: torch.device) -> tuple[int, int]:
    """Free and total. What torch keeps for later is free: noria's memory is the driver's, which has to have it back."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def least(everybodys: Sequence[Found]) -> Free:
    """By rank."""
    beside = Counter(each.host for each in everybodys)
    devices = [each.device for each in everybodys if each.device is not None]
    hosts, shares = [], []
    for rank, each in enumerate(everybodys):
        number = max(each.num_processes, beside[each.host])
        on = f" on rank {rank}" if len(everybodys) > 1 else ""
        for limit in each.limits:
            hosts.append(dataclasses.replace(limit, name=limit.name + on))
            shares.append(hosts[-1])
            if number > 1 and not limit.is_own:
                name = f"{limit.name}{on}, divided by the {number} processes there"
                shares[-1] = dataclasses.replace(limit, name=name, free=limit.free // number)
    device = (min(free for free, _ in devices), min(total for _, total in devices)) if devices else None
    return Free(device, tightest([limit for limit in hosts if not limit.is_estimate]), tightest(shares))


def pinning_limit(root: Path = ROOT) -> int | None:
    """RLIMIT_MEMLOCK in bytes, None for no limit. Only some drivers hold pinned memory to it, so nothing is refused
    because of it: what the driver refuses is staged, or says so."""
    return _process_limit(root, "Max locked memory")


def check_fits(rows: Sequence[tuple[str, int]], budget: int | None, free: Free | None) -> UsageError | None:
    """Why (purpose, bytes) of the home do not fit, or None. `budget`: what `host_memory` says; None for "auto".
    `free` None: nothing is known."""
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
    if needed + margin <= limit.free:
        return None
    is_allowed = free.host is None or needed <= free.host.free
    left = f', of which host_memory="auto" leaves {format_bytes(margin)}' if margin else ""
    return usage_error(
        f"free host memory of at least {format_bytes(needed)} ({needed} bytes): {each}",
        f"{limit}{left}",
        "free memory or raise that limit, freeze parameters, or choose an optimizer with less state"
        + (" (host_memory=<bytes> does without margin and estimates)" if is_allowed and budget is None else ""),
    )


# ---- control groups -------------------------------------------------------------------------------------------------


def _cgroups(root: Path) -> Iterator[Limit]:
    """The limits of this process's groups and of all groups around them, in both versions.

    Inside a container the path that /proc names may not exist: its own group is then what is mounted at the top.
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
                if size is None or used is None or size >= 1 << 60:  # above: what stands for "no limit"
                    continue
                stat = dict(line.split()[:2] for line in _lines(each / "memory.stat") if len(line.split()) == 2)
                cache = sum(int(stat.get(name, 0)) for name in reclaimable)
                source = "/" + str((each / limit).relative_to(root))
                yield Limit("the memory limit of the control group", source, max(size - max(used - cache, 0), 0))


# ---- NUMA -----------------------------------------------------------------------------------------------------------


def num_numa_nodes(root: Path = ROOT) -> int:
    return max(len(list((root / "sys/devices/system/node").glob("node[0-9]*"))), 1)


def numa_node(pci_bus_id: str, root: Path = ROOT) -> int | None:
    """The memory node next to a device; None on a machine with one node, or where the machine does not say."""
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
    """What the file holds, when it is a number ("max" is none)."""
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.removeprefix("-").isdigit() else None


def _sizes(path: Path) -> dict[str, int]:
    """ "MemTotal:  16 kB" as bytes, by name."""
    found = {}
    for line in _lines(path):
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _process_limit(root: Path, name: str) -> int | None:
    """The soft limit, out of "Max address space   unlimited   unlimited   bytes"."""
    for line in _lines(root / "proc/self/limits"):
        if line.startswith(name):
            soft = line.removeprefix(name).split()[0]
            return int(soft) if soft.isdigit() else None
    return None
