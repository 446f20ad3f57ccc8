"""Under torchrun: `two_ranks.py FOLDER KIND ddp|noria` trains on two ranks, and writes what rank 0 has at the end."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ecosystem.harness import Run, Script
from tests.ecosystem.test_integrations import accelerated, lightning, resumed, train

OPTIONS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.1,
    "gradient_checkpointing": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
}

KINDS: dict[str, Script] = {
    "plain": train,
    "options": functools.partial(train, **OPTIONS),
    "resumed": resumed,
    "accelerate": functools.partial(accelerated, steps=6, saves=True, gradient_accumulation_steps=2),
    "lightning": functools.partial(lightning, other="ddp", devices=2, accumulate_grad_batches=2, gradient_clip_val=0.1),
}


def main() -> None:
    folder, kind, which = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = Run(which == "noria", folder)
    KINDS[kind](run)
    if dist.get_rank() == 0:
        torch.save(run.kept, folder / "end.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
