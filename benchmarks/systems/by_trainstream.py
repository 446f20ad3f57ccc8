"""TrainStream, by its one call; its own `max_grad_norm`, since gradients are gone when torch's function looks."""

from __future__ import annotations

import trainstream

from benchmarks.systems.task import PlainLoop


class TrainStream(PlainLoop):
    needs_cuda = True
    activations = "offloaded, where it finds that to pay"
    calls_clip = False

    def __init__(self, task):
        self.task = task
        self.model = task.make_model().to(task.working_dtype)
        if task.device_memory is None:
            self.model.to(task.device)
        self.options = {
            "offload": True,
            "param_offload": "auto",
            "blocks": list(self.model.blocks),
            "moment_dtype": "fp32",
            "max_grad_norm": task.clip or None,
            "accumulation_steps": task.micro_batches,
            "device": task.device,
            "threads": task.threads,
            "quantize": "none",
        }
        optimizer = task.make_adamw(self.model.parameters())
        self.model, self.optimizer = trainstream.wrap(self.model, optimizer, **self.options)

    def finish(self):
        self.optimizer.synchronize()

    def moved_bytes(self):
        stats = trainstream.transfer_stats(self.task.device)
        return {"down": stats["bytes_h2d"], "up": stats["bytes_d2h"]}

    def settings(self):
        return {name: value for name, value in self.options.items() if name != "blocks"}
