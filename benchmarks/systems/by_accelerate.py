"""accelerate's own offload of whole models (`cpu_offload`), made for inference: whether it trains is seen by trying."""

from __future__ import annotations

import torch
from accelerate import cpu_offload

from benchmarks.systems.task import PlainLoop


class Accelerate(PlainLoop):
    def __init__(self, task):
        self.task = task
        self.model = task.make_model().to(task.working_dtype)
        cpu_offload(self.model, execution_device=torch.device(task.device), offload_buffers=True)
        self.optimizer = task.make_adamw(self.model.parameters())
