"""Plain PyTorch: all of it on the device, what every other system is compared with.

bf16: working copies, and fp32 masters on the device as well, updated by torch's fused AdamW.
"""

from __future__ import annotations

import torch

from benchmarks.systems.task import System, Task, accumulated, bytes_of


class Plain(System):
    is_capped = False

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = task.make_model().to(task.device)
        self.parameters = list(self.model.parameters())
        self.masters = self.parameters
        if task.dtype == "bf16":
            self.masters = [torch.nn.Parameter(each.detach().clone()) for each in self.parameters]
            for parameter in self.parameters:
                parameter.data = parameter.data.bfloat16()
        self.optimizer = task.make_adamw(self.masters, fused=True)

    def step(self, batches):
        loss = accumulated(self.model, batches, self.task.device)
        if self.task.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.task.clip)
        if self.masters is not self.parameters:
            for master in self.masters:
                master.grad = torch.empty_like(master)
            torch._foreach_copy_([each.grad for each in self.masters], [each.grad for each in self.parameters])
        self.optimizer.step()
        if self.masters is not self.parameters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        for each in (*self.parameters, *self.masters):
            each.grad = None
        return loss

    def settings(self):
        return {"optimizer": "torch.optim.AdamW(fused=True)"}

    def device_bytes(self):
        state = (value for each in self.optimizer.state.values() for value in each.values())
        return bytes_of({id(each): each for each in (*self.parameters, *self.masters)}.values()) + bytes_of(state)
