"""torchao's CPUOffloadOptimizer: weights on the device, optimizer state on the host, updates in the weights' dtype. It
cannot clip (gradients are taken in backward), and accumulates only where gradients stay on the device."""

from __future__ import annotations

import torch
from torchao.optim import CPUOffloadOptimizer

from benchmarks.systems.task import PlainLoop


class TorchAo(PlainLoop):
    needs_cuda = True
    clips = calls_clip = False
    autocasts = False

    def __init__(self, task):
        self.task = task
        self.dtype = torch.float32 if self.autocasts else task.working_dtype  # of the weights
        self.is_exact = self.dtype == torch.float32
        self.model = task.make_model().to(self.dtype).to(task.device)
        self.offloads_gradients = task.micro_batches == 1
        self.optimizer = CPUOffloadOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            offload_gradients=self.offloads_gradients,
            fused=True,
            **task.adamw,
        )

    def settings(self):
        return {"offload_gradients": self.offloads_gradients, "weights": str(self.dtype)}


class TorchAoAutocast(TorchAo):
    """With masters: weights on the device are fp32, and autocast computes in bf16."""

    autocasts = True

    def pass_over(self, batches):
        with torch.autocast(self.task.device, torch.bfloat16, enabled=self.task.dtype == "bf16"):
            return super().pass_over(batches)
