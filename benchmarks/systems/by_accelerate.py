"""accelerate's own offload of whole models (`cpu_offload`), made for inference: whether it trains is seen by trying."""

from __future__ import annotations

import torch
from accelerate import cpu_offload

from benchmarks.systems.task import System, accumulated


class Accelerate(System):
    def __init__(self, task):
        self.task = task
        self.model = task.make_model().to(task.working_dtype)
        self.parameters = list(self.model.parameters())
        cpu_offload(self.model, execution_device=torch.device(task.device), offload_buffers=True)
        self.optimizer = task.make_adamw(self.model.parameters())

    def step(self, batches):
        loss = accumulated(self.model, batches, self.task.device)
        if self.task.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
