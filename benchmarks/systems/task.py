"""The task that all systems are given: one model definition, one stream of real text, one seed, one optimizer setting.

Needs nothing but torch and numpy, so that it runs in every system's environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from examples.gpt import GPT, GPTConfig

VOCABULARY = 8192

# Layers, heads, width, context. Embeddings are tied, as GPT-2's are.
MODELS = {
    "gpt-3m": (4, 4, 128, 256),
    "gpt-30m": (8, 8, 512, 256),
    "gpt2-124m": (12, 12, 768, 1024),
    "gpt2-355m": (24, 16, 1024, 1024),
    "gpt2-774m": (36, 20, 1280, 1024),
    "gpt2-1.5b": (48, 25, 1600, 1024),
    "gpt-2.8b": (32, 32, 2560, 2048),
    "gpt-6.7b": (32, 32, 4096, 2048),
    "gpt-13b": (40, 40, 5120, 2048),
}
GPT2_VOCABULARY = 50304
FAMILY = (16, 2048, 256)  # of `largest`: heads, width unless another one is named, context; any number of layers


@dataclasses.dataclass(frozen=True)
class Task:
    """`tokens`: the file of the text's token ids. `device_memory`, `host_memory`: bytes, None: as much as there is.
    `dtype`: "fp32", or "bf16": working copies of that and fp32 masters. `clip`: norm of all gradients, 0: none.
    `micro_batches`: of each step, accumulated. `files`: the folder of a system that keeps some of its state on a disk;
    None: one beside `tokens`."""

    model: str
    tokens: str
    device: str = "cpu"
    dtype: str = "fp32"
    device_memory: int | None = None
    host_memory: int | None = None
    threads: int = 1
    clip: float = 1.0
    micro_batches: int = 1
    seed: int = 0
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    files: str | None = None

    @property
    def config(self) -> GPTConfig:
        if self.model.startswith("family-"):  # family-<layers>, family-<layers>x<width>
            heads, widest, context = FAMILY
            layers, _, width = self.model.removeprefix("family-").partition("x")
            return GPTConfig(1024, context, int(layers), heads, int(width or widest))
        layers, heads, width, context = MODELS[self.model]
        vocabulary = GPT2_VOCABULARY if self.model.startswith("gpt2") else VOCABULARY
        return GPTConfig(vocabulary, context, layers, heads, width, tied=True)

    def make_model(self) -> GPT:
        """On the CPU, fp32; the same weights everywhere."""
        torch.manual_seed(self.seed)
        return GPT(self.config)

    def num_parameters(self) -> int:
        with torch.device("meta"):
            return sum(each.numel() for each in GPT(self.config).parameters())

    def make_adamw(self, parameters: Any, **options: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(parameters, **self.adamw, **options)

    @property
    def adamw(self) -> dict[str, Any]:
        return {"lr": self.learning_rate, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}

    @property
    def files_folder(self) -> str:
        return self.files or str(Path(self.tokens).with_name("files"))

    @property
    def working_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    def batches(self, tokens_per_step: int, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets of each micro-batch of a step, int64 [rows, length], on the CPU; the same everywhere."""
        text = numpy.load(self.tokens, mmap_mode="r")
        config = self.config
        length = min(config.context, tokens_per_step)
        rows = tokens_per_step // length
        if tokens_per_step % length or rows % self.micro_batches:
            raise ValueError(f"{tokens_per_step} tokens in rows of {length}, in {self.micro_batches} micro-batches")
        generator = numpy.random.default_rng((self.seed, number))
        begins = generator.integers(0, len(text) - length - 1, rows)
        drawn = torch.from_numpy(numpy.stack([text[begin : begin + length + 1] for begin in begins]).astype("int64"))
        drawn %= config.vocab_size
        return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in drawn.chunk(self.micro_batches)]


class System:
    """A way to train. `__init__` builds it, up to its first step."""

    needs_cuda = False
    clips = True
    """It clips the norm of all gradients, where the task says so."""
    accumulates = True
    is_exact = True
    """It does the same steps as plain PyTorch, up to rounding: no weights of the step before, no gradient left out, no
    masters missing."""
    activations = "kept"
    """What backward needs: kept, recomputed or offloaded."""
    is_capped = True
    """It is what is to fit the device's memory; else what all are compared with."""

    def __init__(self, task: Task) -> None:
        raise NotImplementedError

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """One step of the optimizer; returns the mean loss. It does not wait for a device, or for threads that update
        behind the next step."""
        raise NotImplementedError

    def finish(self) -> None:
        """All that its own threads and processes still do of the steps so far. What it has no call for is not in it."""

    def settings(self) -> dict[str, Any]:
        """What it was told, beyond the task."""
        return {}

    def device_bytes(self) -> int:
        """On a machine without a device: of the process's memory, what would lie on one."""
        return 0

    def own_device_bytes(self) -> int:
        """On a device, beside torch's allocator."""
        return 0

    def moved_bytes(self) -> dict[str, int] | None:
        """Over the link so far, down (to the device) and up; None: not known."""
        return None


class PlainLoop(System):
    """Trains by the plain PyTorch loop. `__init__` sets `task`, `model` and `optimizer`."""

    calls_clip = True
    """Where the task says so, torch's own function clips."""

    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        loss = self.pass_over(batches)
        if self.task.clip and self.calls_clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def pass_over(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        return accumulated(self.model, batches, self.task.device)


def mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([loss.detach().float() for loss in losses]).mean()


def on_device(batches: list[tuple[torch.Tensor, torch.Tensor]], device: str) -> Iterator[tuple[Any, Any]]:
    for inputs, targets in batches:
        yield inputs.to(device), targets.to(device)


def accumulated(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], device: str) -> torch.Tensor:
    """Forward and backward of all micro-batches by the plain loop; the mean loss."""
    losses = []
    for inputs, targets in on_device(batches, device):
        loss = model(inputs, targets)[1]
        (loss / len(batches)).backward()
        losses.append(loss)
    return mean(losses)


def bytes_of(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def text_file(folder: Path) -> Path:
    """Token ids of the standard library's sources; the first process that has `tokenizers` makes them."""
    path = folder / f"tokens_{VOCABULARY}.npy"
    if not path.exists():
        from examples.text import Tokenizer, load_text

        text = load_text(4_000_000)
        folder.mkdir(parents=True, exist_ok=True)
        numpy.save(path, Tokenizer(text, VOCABULARY).encode(text).numpy().astype("uint16"))
    return path
