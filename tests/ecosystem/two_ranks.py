"""Under torchrun: `two_ranks.py FOLDER KIND ddp|noria` trains on two ranks, and writes what rank 0 has at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from noria.integrations.accelerate import prepare

from tests.ecosystem import tiny
from tests.ecosystem.harness import POLICY, Run, assert_streamed
from tests.ecosystem.test_integrations import end, lightning, trainer

OPTIONS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.1,
    "gradient_checkpointing": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
}


OTHER: dict[bool, dict[str, Any]] = {True: {}, False: {"other": "ddp"}}


def trained(run: Run, kind: str) -> None:
    if kind == "resumed":
        trainer(run, save_strategy="steps", save_steps=2).train()
        made = trainer(run, max_steps=6)
        made.train(resume_from_checkpoint=str(run.folder / "checkpoint-4"))
    else:
        made = trainer(run, **(OPTIONS if kind == "options" else {}))
        made.train()
    end(run, made)


def accelerated(run: Run) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny.llama()
    optimizer = tiny.adamw(model)
    if run.is_wrapped:
        model, optimizer = prepare(accelerator, model, optimizer, **POLICY)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    for number in range(6):
        with accelerator.accumulate(model):
            loss = model(**tiny.batch(2 * number + accelerator.process_index)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                run.keep(f"norm {number}", accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        run.keep(f"loss {number}", loss)
    accelerator.save_state(str(run.folder / "state"))
    run.keep_model(accelerator.unwrap_model(model))
    if run.is_wrapped:
        assert_streamed(accelerator.unwrap_model(model))


def main() -> None:
    folder, kind, which = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = Run(which == "noria", folder)
    if kind == "accelerate":
        accelerated(run)
    elif kind == "lightning":
        lightning(run, devices=2, accumulate_grad_batches=2, gradient_clip_val=0.1, **OTHER[run.is_wrapped])
    else:
        trained(run, kind)
    if dist.get_rank() == 0:
        torch.save(run.kept, folder / "end.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
