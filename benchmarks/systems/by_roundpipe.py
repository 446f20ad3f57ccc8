"""RoundPipe, by its closure. Its default takes steps with weights of the step before (`is_async`); "RoundPipe exact"
waits."""

from __future__ import annotations

import torch
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, optim
from torch import nn
from torch.nn import functional as F

from benchmarks.systems.task import System

LEAST_MICRO_BATCHES = 2  # its default on one device: copies of one lie behind the other's compute


class _Front(nn.Module):
    def __init__(self, gpt):
        super().__init__()
        self.tokens, self.positions = gpt.tokens, gpt.positions

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class RoundPipeStale(System):
    needs_cuda = True
    is_exact = False
    is_async = True
    activations = "recomputed"

    def __init__(self, task):
        self.task = task
        gpt = task.make_model().to(task.working_dtype)
        layers = nn.Sequential(_Front(gpt), *gpt.blocks, nn.Sequential(gpt.norm, gpt.head))
        self.model = RoundPipe(
            layers,
            optim_dtype=torch.float32,
            pin_model="alloc",
        )
        self.optimizer = optim.Adam(self.model.optim_parameters(), **task.adamw, decoupled_weight_decay=True)

    def step(self, batches):
        inputs = torch.cat([each for each, _ in batches])
        targets = torch.cat([each for _, each in batches])

        count = max(len(batches), min(LEAST_MICRO_BATCHES, len(inputs)))

        def loss_of(logits, labels):
            return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / count

        run = RoundPipeRunConfig(num_microbatch=count, execute_plan=self.plan())
        loss = self.model.forward_backward(input_args=(inputs,), label=targets, loss_fn=loss_of, run_config=run)

        def update():
            if self.task.clip:
                torch.nn.utils.clip_grad_norm_(self.model.optim_parameters(), self.task.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

        self.model.step(update, is_async=self.is_async)
        return loss.detach()

    def plan(self):
        """Returns its own plan. It does not know the budget, so it takes its default share of the memory."""
        if self.task.device_memory is None:
            return None
        budget_gib = self.task.device_memory / 2**30
        return ModelExecutePlan.auto("fused", self.model, model_memory_limit=0.6 * budget_gib)

    def finish(self):
        self.model.optim_updated.wait()

    def settings(self):
        return {"is_async": self.is_async, "pin_model": "alloc", "optim_dtype": "float32"}


class RoundPipeExact(RoundPipeStale):
    is_exact = True
    is_async = False
