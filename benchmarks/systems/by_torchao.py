"""torchao's CPUOffloadOptimizer: weights on the device, optimizer state on the host. It cannot clip (gradients are
taken in backward), and accumulates only where gradients stay on the device."""

from __future__ import annotations

import torch
from torchao.optim import CPUOffloadOptimizer

from benchmarks.systems.task import PlainLoop


class TorchAo(PlainLoop):
    needs_cuda = True
    clips = calls_clip = False

    def __init__(self, task):
        self.task = task
        self.model = task.make_model().to(task.working_dtype).to(task.device)
        self.offloads_gradients = task.micro_batches == 1
        self.optimizer = CPUOffloadOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            offload_gradients=self.offloads_gradients,
            fused=True,
            **task.adamw,
        )

    def settings(self):
        return {"offload_gradients": self.offloads_gradients, "masters": "none: updates in the working dtype"}
