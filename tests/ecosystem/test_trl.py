"""TRL's trainers, with their own losses, on the CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.ecosystem import tiny
from tests.ecosystem.harness import Run, Script, assert_equal, cases


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 4,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 1,
        "disable_tqdm": True,
        **more,
    }


def train(run: Run, trainer: Any, model: Any) -> None:
    trainer.train()
    wanted = ("loss", "grad_norm")
    run.keep("log", [{key: each[key] for key in wanted if key in each} for each in trainer.state.log_history])
    run.keep_model(model)


def sft(run: Run, tied: bool = False, dtype: torch.dtype = torch.float32, **more: Any) -> None:
    model = tiny.llama(tied, dtype)
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    config = SFTConfig(**arguments(run.folder, max_length=16, **more))
    trainer = SFTTrainer(
        model, config, train_dataset=tiny.texts(), processing_class=tiny.tokenizer(), optimizers=(optimizer, None)
    )
    train(run, trainer, model)


def dpo(run: Run, reference: str = "resident", **more: Any) -> None:
    model, teacher = tiny.llama(), tiny.llama().requires_grad_(False)
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    if reference == "streamed":
        run.wrap(teacher)
    config = DPOConfig(**arguments(run.folder, **more))
    trainer = DPOTrainer(
        model,
        teacher,
        config,
        train_dataset=tiny.pairs(),
        processing_class=tiny.tokenizer(),
        optimizers=(optimizer, None),
    )
    train(run, trainer, model)


SCRIPTS: dict[str, Script] = {
    "SFT": sft,
    "SFT, tied weights": functools.partial(sft, tied=True),
    "SFT, packing": functools.partial(sft, packing=True),
    "SFT, accumulation": functools.partial(sft, gradient_accumulation_steps=2),
    "SFT, autocast": functools.partial(sft, bf16=True),
    "SFT, checkpointing": functools.partial(sft, gradient_checkpointing=True),
    "DPO": dpo,
    "DPO, a streamed reference": functools.partial(dpo, reference="streamed"),
    "DPO, reference computed before": functools.partial(dpo, precompute_ref_log_probs=True),
}


@cases(SCRIPTS)
def test_trl(script: Script, tmp_path: Path):
    assert_equal(script, tmp_path)
