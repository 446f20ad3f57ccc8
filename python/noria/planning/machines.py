"""Describes machines that a step is planned for: devices by name, and the speeds of their lanes.

Peaks are those of dense bfloat16 products with sums in fp32. Sources: NVIDIA's whitepapers on GA102 (RTX 3090), Ada
(RTX 4090), RTX Blackwell (RTX 5090) and A100. For H100, H200 and HGX B200 its datasheets. The laptop has an RTX 4060:
24 of the 128 processors of an RTX 4090, at 8 lanes. Host memory is what two channels of DDR4 or DDR5 give to a desktop,
and eight or more to a server. The H200's was measured.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re

from noria._errors import usage_error
from noria.planning.step_simulation import PlanSpeeds

__all__ = ["BOTH_WAYS", "DEVICES", "DISK_READ_GIB_S", "DISK_WRITE_GIB_S", "Device", "Machine", "device_named"]


@dataclasses.dataclass(frozen=True)
class Device:
    """Describes a device.

    - `memory_gib`: as the driver counts.
    - `peak_tflops`: of dense bfloat16 products.
    - `memory_gb_s`: of its memory, in 10^9 bytes a second.
    - `pcie`: generation and lanes of its link.
    - `host_gib_s`: the memory of a host that such a device is often in.
    """

    memory_gib: float
    peak_tflops: float
    memory_gb_s: float
    pcie: tuple[int, int]
    host_gib_s: float

    @property
    def tflops(self) -> float:
        """Returns what layers reach: 0.7 of the peak. This is an assumption."""
        return 0.7 * self.peak_tflops

    @property
    def link_gib_s(self) -> float:
        """Returns what copies reach each way: 0.83 of the raw rate. An H200 was measured at 0.87."""
        generation, lanes = self.pcie
        raw_gb_s = {3: 8, 4: 16, 5: 32}[generation] * 128 / 130 / 8 * lanes
        return 0.83 * raw_gb_s * 1e9 / (1 << 30)

    @property
    def update_gib_s(self) -> float:
        """Returns what updates on the device reach: 0.8 of its memory's rate. This is an assumption."""
        return 0.8 * self.memory_gb_s * 1e9 / (1 << 30)

    @property
    def free_bytes(self) -> int:
        """Returns what the driver's context and torch's libraries leave. That they take 600 MiB is an assumption."""
        return int(self.memory_gib * (1 << 30)) - (600 << 20)


DEVICES: dict[str, Device] = {
    "RTX 3090": Device(23.7, 71.2, 936, (4, 16), 42),
    "RTX 4090": Device(23.6, 165.2, 1008, (4, 16), 65),
    "RTX 5090": Device(31.4, 209.5, 1792, (5, 16), 79),
    "A100": Device(79.3, 312, 2039, (4, 16), 130),
    "H100": Device(79.2, 989.4, 3350, (5, 16), 164),
    "H200": Device(139.8, 989.4, 4800, (5, 16), 164),
    "B200": Device(178.4, 2250, 8000, (5, 16), 300),
    "8 GB laptop": Device(7.6, 31, 256, (4, 8), 56),
}

BOTH_WAYS = 0.92
"""What each way of a link keeps of its rate while the other copies too: 50.2 and 51.3 of 55 GB/s.
(benchmarks/results/host_memory_h200_202611.json)"""

DISK_READ_GIB_S, DISK_WRITE_GIB_S = 2.5, 1.2
"""GiB/s that a disk reads and writes at once: a consumer NVMe disk on PCIe 4, once its cache is full. This is an
assumption."""

# By format of the moments: GiB/s that one core updates with if the memory gives it, and GiB/s that it drafts with.
# AdamW with split masters, by AVX2 (benchmarks/results/adamw_avx2_amd-epyc_202611.json).
_CORE_GIB_S = {"fp32": (30.9, 14.7), "bf16": (20.0, 7.2), "8bit": (8.9, 3.0)}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Describes what limits a step.

    - `fetch`, `drain`: GiB/s of the link, each way alone.
    - `tflops`: what layers reach.
    - `host`: GiB/s of the host's memory. 0: not known, so it limits nothing.
    - `device`: GiB/s of updates on the device. 0: they take no time.
    - `update`: GiB/s of updates. None: `cores` and `host` say.
    - `both_ways`: what each way of the link keeps while the other copies too.
    - `core_tflops`: Tflop/s of matrix products on one core. 0: not known.
    - `disk_read`, `disk_write`: GiB/s from files and to them, of all disks together, while both go on.
    - `measured`: the names of those that were measured now.
    """

    fetch: float
    drain: float
    tflops: float
    host: float = 0.0
    cores: int = 1
    update: float | None = None
    both_ways: float = 1.0
    device: float = 0.0
    core_tflops: float = 0.0
    measured: tuple[str, ...] = ()
    disk_read: float = DISK_READ_GIB_S
    disk_write: float = DISK_WRITE_GIB_S

    def speeds(self, state_dtype: str) -> PlanSpeeds:
        """Returns the speeds of its lanes."""
        of_cores = [self.cores * each for each in _CORE_GIB_S[state_dtype]]
        update, draft = (min(each if self.update is None else self.update, self.host or math.inf) for each in of_cores)
        both_ways = self.both_ways * (self.fetch + self.drain)
        rates = (self.fetch, self.drain, update, self.tflops, draft, self.host, both_ways, self.device)
        host_tflops = self.cores * self.core_tflops
        return PlanSpeeds(*rates, host_tflops, self.measured, self.disk_read, self.disk_write)


def device_named(name: str) -> Device:
    """Returns the device of this name, or of a name that has this part. Case and spaces do not matter.

    Raises UsageError if there is none.
    """
    known = {_plain(each): each for each in DEVICES}
    wanted = _plain(name)
    meant = [each for each in known if wanted == each] or [each for each in known if wanted and wanted in each]
    if len(meant) == 1:
        return DEVICES[known[meant[0]]]
    near = difflib.get_close_matches(wanted, known, 1)
    hint = f"did you mean {known[near[0]]}? " if near else ""
    raise usage_error(
        f"a device that noria knows ({', '.join(DEVICES)})",
        f'"{name}"',
        f"{hint}For any other leave --gpu out, and give --device-memory, --tflops, --fetch-gib-s and --drain-gib-s",
    )


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
