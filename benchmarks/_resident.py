"""What host_bytes.py's processes share: the model, its loop, and how much memory a process has taken. Needs nothing but
torch, so that it runs in DeepSpeed's environment too."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `examples`

import torch

from examples.gpt import GPT, GPTConfig

WIDTH, TOKENS, STEPS = 2048, 16, 3


def model_of(num_layers: int) -> GPT:
    """A GPT of large Linear layers, fp32: 50 million parameters a layer, and 4 million around them."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=1024, context=TOKENS, num_layers=num_layers, num_heads=16, width=WIDTH))


def batch() -> torch.Tensor:
    return torch.randint(0, 1024, (1, TOKENS), generator=torch.Generator().manual_seed(0))


class Resident:
    """Growth of the process since this was made, in bytes."""

    def __init__(self) -> None:
        self.before = self._now("VmRSS")

    def _now(self, row: str) -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that was given back to malloc is not in use
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(row):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/self/status has no {row}")

    def grown(self) -> int:
        return self._now("VmRSS") - self.before

    def peak(self) -> int:
        """The most since the last call, or since the process began."""
        found = self._now("VmHWM") - self.before
        Path("/proc/self/clear_refs").write_text("5")
        return found


def measure(
    resident: Resident, step: Callable[[], Any], num_elements: int, device_bytes: Callable[[], dict[str, int]]
) -> None:
    """Prints the growth as JSON. `device_bytes`: of it, what would lie on a device and not on the host, if there were
    one; asked for while it is there."""
    built, peak_built = resident.grown(), resident.peak()
    seconds, losses = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    found = {
        "elements": num_elements,
        "built": built,
        "peak_until_built": peak_built,
        "steady": resident.grown(),
        "peak_in_steps": resident.peak(),
        "device": device_bytes(),
        "step_seconds": seconds,
        "losses": [float(loss) for loss in losses],
    }
    print(json.dumps(found))
