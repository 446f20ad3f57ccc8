"""Scripts of transformers' Trainer, on the CPU: wrapped beforehand, or in `create_optimizer`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import noria
import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

from tests.ecosystem import tiny
from tests.ecosystem.harness import POLICY, Run, Script, assert_equal, cases, trainer_arguments

ALL = 16  # more units than any model here has
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "num_input_tokens_seen")
ROWS = tiny.token_rows()


def arguments(run: Run, **more: Any) -> dict[str, Any]:
    return trainer_arguments(run.folder / "out", **more)


def prepare(
    run: Run,
    model: Any = None,
    policy: dict[str, Any] | None = None,
    keywords: dict[str, Any] | None = None,
    trainer: Callable[..., Trainer] = Trainer,
    lr: float = 1e-3,
    **more: Any,
) -> Trainer:
    """A Trainer of a model that is wrapped before. `keywords` are Trainer's, `more` are arguments."""
    model = tiny.llama() if model is None else model
    optimizer = tiny.adamw(model, lr)
    run.wrap(model, optimizer, **(policy or {}))
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 8)
    given = {"train_dataset": ROWS, "eval_dataset": ROWS[:6], **(keywords or {})}
    return trainer(model, TrainingArguments(**arguments(run, **more)), optimizers=(optimizer, schedule), **given)


def keep(run: Run, trainer: Trainer, name: str = "") -> None:
    log = trainer.state.log_history
    run.keep(name + "log", [{key: each[key] for key in LOGGED if key in each} for each in log])
    run.keep_model(trainer.model, name + "model")


def train(run: Run, **more: Any) -> Trainer:
    trainer = prepare(run, **more)
    trainer.train()
    keep(run, trainer)
    return trainer


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}


def uneven_rows() -> list[dict[str, list[int]]]:
    """Rows of several lengths; the first tokens of each have no loss."""
    made = []
    for number, row in enumerate(ROWS):
        length = 5 + number % 7
        labels = [-100] * (number % 3) + row["labels"][number % 3 : length]
        made.append({"input_ids": row["input_ids"][:length], "labels": labels})
    return made


def dropping_llama() -> LlamaForCausalLM:
    return tiny.llama(attention_dropout=0.1)


# What is done in training


def checkpointing(run: Run, reentrant: bool) -> None:
    train(
        run,
        model=dropping_llama(),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )


def all_together(run: Run) -> None:
    train(
        run,
        model=dropping_llama(),
        gradient_accumulation_steps=2,
        bf16=True,
        gradient_checkpointing=True,
        max_grad_norm=0.5,
        eval_strategy="steps",
        eval_steps=2,
    )


def schedule_first(run: Run) -> None:
    """The schedule is made before the model is wrapped."""
    model = tiny.llama()
    optimizer = tiny.adamw(model)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 8)
    run.wrap(model, optimizer)
    settings = TrainingArguments(**arguments(run))
    trainer = Trainer(model, settings, train_dataset=ROWS, optimizers=(optimizer, schedule))
    trainer.train()
    keep(run, trainer)


def greedy_llama(tried: list[int], in_backward: bool = False) -> LlamaForCausalLM:
    """Its third block finds no memory for more than two rows. `tried` gets all numbers of rows."""

    def take(rows: int) -> None:
        tried.append(rows)
        if rows > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    class TakesInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            take(grad.shape[0])
            return grad

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> Any:
        if in_backward:
            return TakesInBackward.apply(output)
        take(output.shape[0])
        return output

    model = tiny.llama()
    model.model.layers[2].mlp.register_forward_hook(hook)
    return model


def auto_find_batch_size(run: Run, in_backward: bool = False) -> None:
    tried: list[int] = []
    model = greedy_llama(tried, in_backward)
    train(run, model=model, auto_find_batch_size=True, per_device_train_batch_size=4)
    run.keep("tried", tried)
    assert tried[0] == 4 and tried[-1] <= 2


def average_tokens(run: Run) -> None:
    """Each token counts alike in a batch of two unequal parts."""
    collator = DataCollatorForSeq2Seq(tiny.tokenizer())
    train(
        run,
        keywords={"train_dataset": uneven_rows(), "eval_dataset": None, "data_collator": collator},
        average_tokens_across_devices=True,
        gradient_accumulation_steps=2,
        include_num_input_tokens_seen="all",
    )


def train_twice(run: Run) -> None:
    trainer = prepare(run, max_steps=2)
    trainer.train()
    keep(run, trainer, "first.")
    trainer.train()
    keep(run, trainer, "second.")


def freeze_and_distil(run: Run) -> None:
    """A loss of one's own, against a frozen teacher that streams too. The student's embedding is frozen."""
    teacher = tiny.llama(num_hidden_layers=6).requires_grad_(False).eval()
    run.wrap(teacher)

    class Distils(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            outputs = model(**inputs)
            with torch.no_grad():
                wanted = teacher(**inputs).logits.softmax(-1)
            loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), wanted.flatten(0, 1))
            return (loss, outputs) if return_outputs else loss

    student = tiny.llama()
    student.get_input_embeddings().requires_grad_(False)
    train(run, model=student, trainer=Distils)


def callbacks(run: Run) -> None:
    """One callback reads gradients and weights and sets the weight decay, one ends the training early."""

    class Watches(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}
            run.keep(f"gradients.{state.global_step}", norms)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            sums = {name: value.sum() for name, value in model.state_dict().items()}
            run.keep(f"weights.{state.global_step}", sums)

        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
            optimizer.param_groups[0]["weight_decay"] = 0.1 * state.global_step

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            run.keep(f"logs.{len(state.log_history)}", {key: logs[key] for key in LOGGED if key in logs})

    trainer = train(
        run,
        lr=0.3,
        keywords={"callbacks": [Watches(), EarlyStoppingCallback(1)]},
        max_steps=8,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
    )
    assert trainer.state.global_step < 8


def compiled(run: Run) -> None:
    torch._dynamo.reset()
    train(run, torch_compile=True, torch_compile_backend="eager")
    torch._dynamo.reset()


def wrap_both(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, **policy: Any) -> None:
    """For what plain PyTorch does not have: where noria would not be, it keeps the whole model on the device."""
    if run.is_wrapped:
        run.wrap(model, optimizer, **policy)
    else:
        noria.wrap(model, optimizer, **{**POLICY, **policy, "window": ALL, "update": "auto"})


def update_in_backward(run: Run, **more: Any) -> None:
    """Trainer takes the norm of gradients that have been used already."""
    model = tiny.llama()
    optimizer = tiny.adamw(model)
    wrap_both(run, model, optimizer, kernel="fused", update="backward")
    settings = TrainingArguments(**arguments(run, **more))
    trainer = Trainer(model, settings, train_dataset=ROWS, optimizers=(optimizer, None))
    trainer.train()
    keep(run, trainer)


def masters(run: Run) -> None:
    """bf16 weights with masters. Evaluation casts nothing."""
    model = tiny.llama()
    optimizer = tiny.adamw(model)
    wrap_both(run, model, optimizer, dtype=torch.bfloat16)
    settings = TrainingArguments(**arguments(run, bf16_full_eval=True))
    trainer = Trainer(model, settings, train_dataset=ROWS, eval_dataset=ROWS[:6], optimizers=(optimizer, None))
    trainer.train()
    run.keep("evaluated", trainer.evaluate()["eval_loss"])
    keep(run, trainer)
    trainer.save_model(str(run.folder / "saved"))
    loaded = LlamaForCausalLM.from_pretrained(run.folder / "saved")
    assert loaded.dtype == torch.bfloat16
    run.keep_model(loaded, "loaded")


# Evaluation


def evaluation(run: Run) -> None:
    trainer = prepare(
        run,
        keywords={"compute_metrics": accuracy},
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
        per_device_eval_batch_size=4,
        eval_accumulation_steps=1,
    )
    trainer.train()
    run.keep("after", {key: value for key, value in trainer.evaluate(ROWS[6:]).items() if key in LOGGED})
    keep(run, trainer)


def predict(run: Run) -> None:
    """Before, between and after."""
    trainer = prepare(run, max_steps=2)
    for number in range(3):
        output = trainer.predict(ROWS[:5])
        run.keep(f"predicted.{number}", torch.from_numpy(output.predictions))
        run.keep(f"loss.{number}", output.metrics["test_loss"])
        if number < 2:
            trainer.train()
            keep(run, trainer, f"{number}.")


def generation(run: Run) -> None:
    """Seq2SeqTrainer generates with two beams in each evaluation."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=tiny.VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
        )
        model = T5ForConditionalGeneration(config)
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    settings = Seq2SeqTrainingArguments(
        **arguments(
            run,
            predict_with_generate=True,
            generation_max_length=6,
            generation_num_beams=2,
            eval_strategy="steps",
            eval_steps=2,
            label_smoothing_factor=0.1,
        )
    )
    rows = uneven_rows()
    trainer = Seq2SeqTrainer(
        model,
        settings,
        train_dataset=rows,
        eval_dataset=rows[:4],
        data_collator=DataCollatorForSeq2Seq(tiny.tokenizer(), model),
        processing_class=tiny.tokenizer(),
        compute_metrics=accuracy_of_tokens,
        optimizers=(optimizer, None),
    )
    trainer.train()
    keep(run, trainer)
    run.keep("generated", torch.from_numpy(trainer.predict(rows[:4]).predictions))


def accuracy_of_tokens(prediction: Any) -> dict[str, float]:
    width = min(prediction.predictions.shape[1], prediction.label_ids.shape[1])
    return {"accuracy": float((prediction.predictions[:, :width] == prediction.label_ids[:, :width]).mean())}


# Checkpoints


def resume(run: Run) -> None:
    """The second process, which has other weights, goes on where the first one saved."""
    first = train(run, max_steps=2, save_strategy="steps", save_steps=2)
    files = sorted(each.name for each in (run.folder / "out" / "checkpoint-2").iterdir())
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= set(files), files
    del first
    second = prepare(run, model=tiny.llama(initializer_range=0.1))
    second.train(resume_from_checkpoint=True)
    keep(run, second, "second.")


def resume_across(run: Run, wrapped_first: bool) -> None:
    """One of the two processes has noria, the other has not."""
    other = Run(False, run.folder)
    first, second = (run, other) if wrapped_first else (other, run)
    trainer = prepare(first, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    keep(run, trainer, "first.")
    trainer = prepare(second, model=tiny.llama(initializer_range=0.1))
    trainer.train(resume_from_checkpoint=str(run.folder / "out" / "checkpoint-2"))
    keep(run, trainer, "second.")


def best_model(run: Run) -> None:
    """The learning rate is so high that the last model is not the best one."""
    trainer = prepare(
        run,
        lr=0.3,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
    )
    trainer.train()
    assert trainer.state.best_global_step < 4
    run.keep("best", [trainer.state.best_metric, trainer.state.best_global_step])
    run.keep("evaluated", trainer.evaluate()["eval_loss"])
    keep(run, trainer)


def save(run: Run, tied: bool) -> None:
    """Saved by the trainer and in shards, loaded, and trained on."""
    trainer = train(run, model=tiny.llama(tied))
    trainer.save_model(str(run.folder / "whole"))
    trainer.model.save_pretrained(run.folder / "shards", max_shard_size="40KB")
    assert len(list((run.folder / "shards").glob("*.safetensors"))) > 1
    for name in ("whole", "shards"):
        loaded = LlamaForCausalLM.from_pretrained(run.folder / name)
        assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
        run.keep_model(loaded, name)
    again = prepare(run, model=loaded)
    again.train()
    keep(run, again, "again.")


def add_tokens(run: Run) -> None:
    """Unwrapped, the model gets more tokens. Then it is trained on, with a new optimizer."""
    first = prepare(run, max_steps=2)
    model, optimizer = first.model, first.optimizer
    first.train()
    run.unwrap(model, optimizer)
    model.resize_token_embeddings(tiny.VOCAB + 8)
    second = prepare(run, model=model, max_steps=2)
    second.train()
    keep(run, second)


# Wrapped in create_optimizer


class NoriaTrainer(Trainer):
    def __init__(self, run: Run, *args: Any, **more: Any) -> None:
        self.run = run
        super().__init__(*args, **more)

    def create_optimizer(self, *args: Any, **more: Any) -> torch.optim.Optimizer:
        """Trainer calls this again when it begins anew, with what it had."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **more)
        if is_new:
            self.run.wrap(self.model, optimizer)
        return optimizer


def prepare_override(
    run: Run,
    keywords: dict[str, Any] | None = None,
    trainer: type[NoriaTrainer] = NoriaTrainer,
    **more: Any,
) -> NoriaTrainer:
    given = {"train_dataset": ROWS, "eval_dataset": ROWS[:6], **(keywords or {"model": tiny.llama()})}
    settings = TrainingArguments(**arguments(run, **{"learning_rate": 1e-3, "weight_decay": 0.1, **more}))
    return trainer(run, args=settings, **given)


def override(run: Run, **more: Any) -> None:
    trainer = prepare_override(run, **more)
    trainer.train()
    keep(run, trainer)


def plateau(run: Run) -> None:
    """The loss rises, so the learning rate falls."""
    override(
        run,
        optim="sgd",
        optim_args="momentum=0.9",
        learning_rate=2.0,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="eval_loss",
    )


def model_init(run: Run) -> None:
    """Each call of train() makes a model, which is wrapped anew."""
    trainer = prepare_override(run, {"model_init": lambda: tiny.llama()}, max_steps=2)
    for number in range(2):
        trainer.train()
        keep(run, trainer, f"{number}.")


def override_resume(run: Run) -> None:
    override(run, optim="adamw_torch", max_steps=2, save_strategy="steps", save_steps=2)
    second = prepare_override(run, {"model": tiny.llama(initializer_range=0.1)})
    second.train(resume_from_checkpoint=True)
    keep(run, second, "second.")


def override_auto_find_batch_size(run: Run) -> None:
    tried: list[int] = []
    model = greedy_llama(tried)
    override(run, keywords={"model": model}, auto_find_batch_size=True, per_device_train_batch_size=4)
    run.keep("tried", tried)


def eight_bit(run: Run, name: str) -> None:
    """Weights of 4096 elements or more have moments of 8 bits, except for the embedding's."""
    manager = GlobalOptimManager.get_instance()
    manager.initialize()
    try:
        model = tiny.llama(vocab_size=128, intermediate_size=128)
        made = prepare_override(run, {"model": model}, optim=name)
        made.train()
        keep(run, made)
        state = list(made.optimizer.state_dict()["state"].values())
        run.keep("state", state)
        dtypes = {value.dtype for name, value in run.kept.items() if name.endswith("state1")}
        assert dtypes == {torch.uint8, torch.float32}
        assert len(manager.index2config) == 1
    finally:
        manager.initialize()


# Other families


def gpt2(run: Run) -> None:
    """Dropout, tied weights, and batches of like lengths."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=tiny.VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=32))
    rows = [{"input_ids": row["input_ids"]} for row in uneven_rows()]
    collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    train(
        run,
        model=model,
        keywords={"train_dataset": rows, "eval_dataset": None, "data_collator": collator},
        train_sampling_strategy="group_by_length",
    )


def bert(run: Run) -> None:
    """Classification, with dropout, two epochs, and an evaluation after each."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=tiny.VOCAB,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
            num_labels=3,
        )
        model = BertForSequenceClassification(config)
    rows = [{"input_ids": row["input_ids"], "label": number % 3} for number, row in enumerate(ROWS[:8])]
    train(
        run,
        model=model,
        keywords={"train_dataset": rows, "eval_dataset": rows[:4], "compute_metrics": accuracy},
        max_steps=-1,
        num_train_epochs=2,
        eval_strategy="epoch",
    )


SCRIPTS: dict[str, Script] = {
    "defaults": train,
    "clip that bites": functools.partial(train, max_grad_norm=0.05),
    "no clip": functools.partial(train, max_grad_norm=0),
    "accumulation": functools.partial(train, gradient_accumulation_steps=3),
    "autocast": functools.partial(train, bf16=True),
    "checkpointing, reentrant": functools.partial(checkpointing, reentrant=True),
    "checkpointing, not reentrant": functools.partial(checkpointing, reentrant=False),
    "all together": all_together,
    "label smoothing": functools.partial(train, label_smoothing_factor=0.1),
    "NEFTune": functools.partial(train, neftune_noise_alpha=5.0),
    "data loader workers": functools.partial(train, dataloader_num_workers=2, dataloader_persistent_workers=True),
    "schedule made first": schedule_first,
    "auto_find_batch_size": auto_find_batch_size,
    "auto_find_batch_size, in backward": functools.partial(auto_find_batch_size, in_backward=True),
    "average_tokens_across_devices": average_tokens,
    "train() twice": train_twice,
    "own loss, streamed teacher": freeze_and_distil,
    "callbacks": callbacks,
    "weights looked at for overflow": functools.partial(train, debug="underflow_overflow"),
    "recompute": functools.partial(train, policy={"activations": "recompute"}),
    "offload": functools.partial(train, policy={"activations": "offload"}),
    "torch_compile": compiled,
    "bf16 weights with masters": masters,
    "update in backward, no clip": functools.partial(update_in_backward, max_grad_norm=0),
    "update in backward, a clip too large to bite": functools.partial(update_in_backward, max_grad_norm=100.0),
    "evaluation": evaluation,
    "predict": predict,
    "Seq2SeqTrainer, T5 generates": generation,
    "resume": resume,
    "resume, noria's by plain": functools.partial(resume_across, wrapped_first=True),
    "resume, plain's by noria": functools.partial(resume_across, wrapped_first=False),
    "load_best_model_at_end": best_model,
    "save_model and shards": functools.partial(save, tied=False),
    "save_model and shards, tied": functools.partial(save, tied=True),
    "more tokens between two trainings": add_tokens,
    "override, adamw_torch_fused": functools.partial(override, optim="adamw_torch_fused"),
    "override, adafactor": functools.partial(override, optim="adafactor"),
    "override, sgd and ReduceLROnPlateau": plateau,
    "override, model_init": model_init,
    "override, resume": override_resume,
    "override, auto_find_batch_size": override_auto_find_batch_size,
    "override, 8-bit AdamW": functools.partial(eight_bit, name="adamw_bnb_8bit"),
    "override, paged 8-bit Lion": functools.partial(eight_bit, name="paged_lion_8bit"),
    "GPT-2": gpt2,
    "BERT": bert,
}


@cases(SCRIPTS)
def test_trainer(script: Script, tmp_path: Path):
    assert_equal(script, tmp_path)


def full_bf16_evaluation(run: Run) -> None:
    train(run, bf16_full_eval=True).evaluate()


def unknown_optimizer(run: Run) -> None:
    """Trainer makes an optimizer that noria never sees."""
    model = tiny.llama()
    run.wrap(model)
    Trainer(model, TrainingArguments(**arguments(run)), train_dataset=ROWS).train()


REFUSED: dict[str, tuple[Script, type[Exception], str]] = {
    "bf16_full_eval": (full_bf16_evaluation, noria.UsageError, "dtype=torch.bfloat16"),
    "update in backward, a clip that bites": (update_in_backward, noria.UsageError, 'update="auto"'),
    "update in backward, accumulation": (
        functools.partial(update_in_backward, max_grad_norm=0, gradient_accumulation_steps=2),
        noria.UsageError,
        "accumulate",
    ),
    "an optimizer that is not wrapped": (unknown_optimizer, noria.UsageError, "give this optimizer to noria.wrap"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path):
    """Plain, the script runs to its end. With noria it raises."""
    script, error, words = REFUSED[name]
    torch.manual_seed(0)
    script(Run(False, tmp_path / "plain"))
    with pytest.raises(error, match=words):
        script(Run(True, tmp_path / "noria"))
