"""noria, by its one call and the plain PyTorch loop, in several of its ways to update."""

from __future__ import annotations

import re
from typing import Any

import noria
import torch
from noria.wrapped import wrapped_by
from torch import nn

from benchmarks.systems.task import PlainLoop, Task, mean


class Noria(PlainLoop):
    """`update="auto"`, clipped by torch's own function; gradients are held until `step()`."""

    update = "auto"
    draft_memory: int | str = "auto"
    keeps = "keep"
    state_dtype = "fp32"

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = task.make_model()
        self.optimizer = task.make_adamw(self.model.parameters())
        self.policy = {
            "device": task.device,
            "device_memory": task.device_memory or "auto",
            "dtype": torch.bfloat16 if task.dtype == "bf16" else None,
            "kernel": "fused",
            "update": self.update,
            "draft_memory": self.draft_memory,
            "activations": self.keeps,
            "state_dtype": self.state_dtype,
            "max_grad_norm": task.clip if task.clip and self.clips and not self.calls_clip else None,
        }
        self.policy |= self.home()
        noria.wrap(self.model, self.optimizer, **self.policy)

    def home(self) -> dict[str, Any]:
        """Fields of the policy: where weights, gradients and optimizer state lie."""
        return {"host_memory": self.task.host_memory or "auto"}

    def finish(self):
        wrapped_by(self.model).context.engine.idle()

    def settings(self):
        return {name: str(value) for name, value in self.policy.items()}

    def _report(self):
        """Does not measure the host's memory: that takes memory, too, and no step needs it."""
        return noria.report(self.model, write_trace=False, host_memory_gib_s=1)

    def _taken(self) -> int:
        return sum(row.taken for row in self._report().ledger if row.place not in ("host", "files"))

    def device_bytes(self):
        return self._taken()

    def own_device_bytes(self):
        return self._taken()

    def moved_bytes(self):
        lanes = {lane.lane: lane.bytes for lane in self._report().lanes}
        return {"down": lanes["fetch"], "up": lanes["drain"]}


class NoriaMaxNorm(Noria):
    """Clipping built in, which leaves drafts standing."""

    calls_clip = False


class NoriaAuto(NoriaMaxNorm):
    """Offloads what backward needs, or computes it again, if the device has no room for it."""

    keeps = "auto"
    activations = "offloaded or recomputed, where there is no room"


class NoriaLean(Noria):
    """The least host memory with gradients held: no drafts."""

    calls_clip = False
    draft_memory = 0


class NoriaBackward(Noria):
    """Updates during backward, in place; no gradient is held."""

    update = "backward"
    clips = calls_clip = False
    draft_memory = 0

    def pass_over(self, batches):
        *others, last = batches
        if not others:
            return super().pass_over(batches)
        with self.optimizer.accumulate():
            losses = [self._part(each, len(batches)) for each in others]
        return mean([*losses, self._part(last, len(batches))])

    def _part(self, batch, count):
        inputs, targets = (each.to(self.task.device) for each in batch)
        loss = self.model(inputs, targets)[1]
        (loss / count).backward()
        return loss.detach()


class NoriaBackward8Bit(NoriaBackward):
    """The least host memory: as `NoriaBackward`, with moments of 8 bits."""

    state_dtype = "8bit"


class NoriaFiles(NoriaBackward):
    """As `NoriaBackward`. All state that can lie in files does: `host_memory` is the least."""

    def home(self):
        files = self.task.files_folder
        least = least_host_memory(self.model, self.optimizer, **self.policy, files=files)
        return {"files": files, "host_memory": min(least, self.task.host_memory or least)}


def least_host_memory(model: nn.Module, optimizer: torch.optim.Optimizer, **policy: Any) -> int:
    """Returns bytes: what the refusal of less names."""
    try:
        noria.plan(model, optimizer, **policy, host_memory=1)
    except noria.UsageError as refusal:
        if found := re.search(r"host_memory of at least .*?\((\d+) bytes\)", str(refusal)):
            return int(found[1])
        raise
    raise AssertionError("a plan within one byte")
