"""TRL's trainers, with their own losses, on the CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from noria.integrations.transformers import NoriaTrainerMixin
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from tests.ecosystem import tiny
from tests.ecosystem.harness import POLICY, Run, Script, assert_equal, assert_streamed, cases, trainer_arguments


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return trainer_arguments(folder, **{"learning_rate": 1e-3, **more})


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


LORA = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.0}


def sft_resumed(run: Run) -> None:
    """Saves, and goes on from there with a new model."""
    for steps, resumes in ((2, None), (4, str(run.folder / "checkpoint-2"))):
        model = tiny.llama()
        optimizer = tiny.adamw(model)
        run.wrap(model, optimizer)
        config = SFTConfig(**arguments(run.folder, max_length=16, max_steps=steps, save_strategy="steps", save_steps=2))
        trainer = SFTTrainer(
            model, config, train_dataset=tiny.texts(), processing_class=tiny.tokenizer(), optimizers=(optimizer, None)
        )
        trainer.train(resume_from_checkpoint=resumes)
    run.keep_model(model)


def with_adapters(model: Any) -> Any:
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(**LORA))


def sft_lora(run: Run) -> None:
    model = with_adapters(tiny.llama())
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    config = SFTConfig(**arguments(run.folder, max_length=16))
    trainer = SFTTrainer(
        model, config, train_dataset=tiny.texts(), processing_class=tiny.tokenizer(), optimizers=(optimizer, None)
    )
    train(run, trainer, model)


class StreamingDPO(NoriaTrainerMixin, DPOTrainer):
    pass


def dpo_lora(run: Run) -> None:
    """TRL copies the adapters for the reference when the trainer is made. So the trainer wraps the model, later."""
    made, more = (StreamingDPO, {"noria": POLICY}) if run.is_wrapped else (DPOTrainer, {})
    trainer = made(
        with_adapters(tiny.llama()),
        None,
        DPOConfig(**arguments(run.folder)),
        train_dataset=tiny.pairs(),
        processing_class=tiny.tokenizer(),
        **more,
    )
    train(run, trainer, trainer.model)
    if run.is_wrapped:
        assert_streamed(trainer.model)


def kto(run: Run) -> None:
    model, teacher = tiny.llama(), tiny.llama().requires_grad_(False)
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    rows = [
        {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
        for row in tiny.pairs()
        for kind in ("chosen", "rejected")
    ]
    trainer = KTOTrainer(
        model,
        teacher,
        KTOConfig(**arguments(run.folder)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(),
        optimizers=(optimizer, None),
    )
    train(run, trainer, model)


def reward(run: Run) -> None:
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**tiny.llama().config.to_dict() | {"num_labels": 1}))
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    trainer = RewardTrainer(
        model,
        RewardConfig(**arguments(run.folder)),
        train_dataset=tiny.pairs(),
        processing_class=tiny.tokenizer(),
        optimizers=(optimizer, None),
    )
    train(run, trainer, model)


def grpo(run: Run, lora: bool = False, kind: Any = (GRPOTrainer, GRPOConfig), **more: Any) -> None:
    """Generates in the loop, through the window."""
    tiny.llama().save_pretrained(run.folder / "base")  # references are loaded by name
    model = LlamaForCausalLM.from_pretrained(run.folder / "base")
    model = with_adapters(model) if lora else model
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    trainer_class, config_class = kind
    options = arguments(run.folder, num_generations=2, max_completion_length=6, max_steps=2, **more)
    trainer = trainer_class(
        model,
        reward_funcs=lambda completions, **_: [float(len(set(each))) for each in completions],
        args=config_class(**options),
        train_dataset=tiny.prompts(),
        processing_class=tiny.tokenizer(),
        optimizers=(optimizer, None),
    )
    train(run, trainer, model)


SCRIPTS: dict[str, Script] = {
    "SFT, save and resume": sft_resumed,
    "SFT, LoRA": sft_lora,
    "DPO, LoRA": dpo_lora,
    "DPO, IPO loss": functools.partial(dpo, loss_type="ipo"),
    "KTO": kto,
    "reward": reward,
    "GRPO": grpo,
    "GRPO, LoRA": functools.partial(grpo, lora=True),
    "GRPO, with a reference": functools.partial(grpo, beta=0.1),
    "RLOO": functools.partial(grpo, kind=(RLOOTrainer, RLOOConfig)),
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
