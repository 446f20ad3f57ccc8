"""Adapters of PEFT over a base that streams, on the CPU: their kinds, and what people do with them around training."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import noria
import pytest
import torch
from peft import (
    AdaLoraConfig,
    CPTConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    load_peft_weights,
    prepare_model_for_kbit_training,
    set_peft_model_state_dict,
)
from transformers import Trainer, TrainingArguments

from tests.ecosystem import tiny
from tests.ecosystem.harness import POLICY, Run, Script, assert_equal, cases

ATTENTION = ["q_proj", "v_proj"]


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ATTENTION, **more})


def losses(run: Run, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss = model(**tiny.batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(f"loss {step}", loss)


def real(run: Run, model: Any, **more: Any) -> contextlib.AbstractContextManager[Any]:
    """Where a user of noria enters `noria.materialize`."""
    return noria.materialize(model, **more) if run.is_wrapped else contextlib.nullcontext()


def adapted(run: Run, config: PeftConfig, **base: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = get_peft_model(tiny.llama(**base), copy.deepcopy(config))  # PEFT writes into it
    optimizer = tiny.adamw(model, lr=1e-2)
    run.wrap(model, optimizer)
    return model, optimizer


def adapter(run: Run, config: PeftConfig, **base: Any) -> None:
    """An adapter of some kind, trained in a loop of one's own, with an evaluation at the end."""
    model, optimizer = adapted(run, config, **base)
    losses(run, model, optimizer, range(4))
    model.eval()
    with torch.no_grad():
        run.keep("logits", model(**tiny.batch(9)).logits)
    run.keep_model(model)


def taking_turns(run: Run) -> None:
    """Two adapters train in turn; the optimizer has both from the start."""
    model = get_peft_model(tiny.llama(), lora())
    model.add_adapter("second", lora())
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if "lora_" in name], lr=1e-2)
    run.wrap(model, optimizer)
    for number, name in enumerate(("default", "second", "default", "second")):
        model.set_adapter(name)
        losses(run, model, optimizer, range(2 * number, 2 * number + 2))
    run.keep_model(model)


def under_trainer(run: Run, use_reentrant: bool) -> None:
    """Checkpoints in each block; Trainer makes the inputs require gradients where PEFT wants it."""
    model, optimizer = adapted(run, lora(lora_dropout=0.1))
    arguments = TrainingArguments(
        output_dir=str(run.folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        seed=1,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=tiny.token_rows(), optimizers=(optimizer, None))
    trainer.train()
    wanted = ("loss", "grad_norm")
    run.keep("log", [{key: each[key] for key in wanted if key in each} for each in trainer.state.log_history])
    run.keep_model(model)


def mixed_dtypes(run: Run) -> None:
    """A bf16 base, and adapters that PEFT makes in fp32, under autocast."""
    model, optimizer = adapted(run, lora(lora_dropout=0.1), dtype=torch.bfloat16)
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}, {p.dtype for p in model.parameters()}
    assert kinds == ({torch.float32}, {torch.float32, torch.bfloat16})
    for step in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**tiny.batch(step)).loss
        loss.backward()
        run.keep(f"norm {step}", torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        run.keep(f"loss {step}", loss)
    run.keep_model(model)


def saved_and_loaded(run: Run) -> None:
    """The adapter goes to files, and from there over a new base, which trains on."""
    model, optimizer = adapted(run, lora(modules_to_save=["lm_head"]))
    losses(run, model, optimizer, range(2))
    model.save_pretrained(run.folder)
    run.keep("file", load_peft_weights(str(run.folder), device="cpu"))
    fresh = PeftModel.from_pretrained(tiny.llama(), str(run.folder), is_trainable=True)
    optimizer = tiny.adamw(fresh, lr=1e-2)
    run.wrap(fresh, optimizer)
    losses(run, fresh, optimizer, range(2, 5))
    run.keep_model(fresh)


def loaded_while_wrapped(run: Run) -> None:
    """An adapter is put back to a file's values in the middle of training."""
    model, optimizer = adapted(run, lora())
    losses(run, model, optimizer, range(2))
    model.save_pretrained(run.folder)
    losses(run, model, optimizer, range(2, 4))
    set_peft_model_state_dict(model, load_peft_weights(str(run.folder), device="cpu"))
    losses(run, model, optimizer, range(4, 6))
    run.keep_model(model)


def disabled_as_reference(run: Run) -> None:
    """The base alone is the reference of the model, as in DPO with one set of weights."""
    model, optimizer = adapted(run, lora(lora_dropout=0.1))
    for step in range(4):
        batch = tiny.batch(step)
        with torch.no_grad(), model.disable_adapter():
            reference = model(**batch).logits.log_softmax(-1)
        ours = model(**batch)
        distance = torch.nn.functional.kl_div(ours.logits.log_softmax(-1), reference, log_target=True)
        (ours.loss + distance).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(f"loss {step}", ours.loss)
        run.keep(f"distance {step}", distance)
    run.keep_model(model)


def merged_for_a_while(run: Run) -> None:
    """Adapters are merged into the base for an evaluation, taken out again, and trained on."""
    model, optimizer = adapted(run, lora(target_modules="all-linear"))
    losses(run, model, optimizer, range(2))
    with real(run, model):
        model.merge_adapter()
    with torch.no_grad():
        run.keep("merged", model(**tiny.batch(9)).logits)
    with real(run, model):
        model.unmerge_adapter()
    losses(run, model, optimizer, range(2, 4))
    run.keep_model(model)


def merged_inside_materialize(run: Run) -> None:
    """merge_and_unload in place: noria goes on streaming the base, which has no adapters any more."""
    model, optimizer = adapted(run, lora())
    losses(run, model, optimizer, range(3))
    with real(run, model):
        base = model.merge_and_unload()
    base.eval()
    for step in range(2):
        with torch.no_grad():
            run.keep(f"logits {step}", base(**tiny.batch(step)).logits)
    run.keep_model(base)


def merged_after_unwrap(run: Run) -> None:
    """What is merged is saved as an ordinary model, and trained in full, with noria again."""
    model, optimizer = adapted(run, lora(use_dora=True))
    losses(run, model, optimizer, range(3))
    run.unwrap(model, optimizer)
    base = model.merge_and_unload()
    base.save_pretrained(run.folder)
    again = type(base).from_pretrained(run.folder)
    optimizer = tiny.adamw(again)
    run.wrap(again, optimizer)
    losses(run, again, optimizer, range(3, 6))
    run.keep_model(again)


def prepared_for_kbit(run: Run) -> None:
    """The usual first lines of a QLoRA script, here over a bf16 base: they cast it to fp32."""
    base = prepare_model_for_kbit_training(tiny.llama(dtype=torch.bfloat16))
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    model = get_peft_model(base, lora(lora_dropout=0.1))
    optimizer = tiny.adamw(model, lr=1e-2)
    run.wrap(model, optimizer)
    model.train()
    losses(run, model, optimizer, range(4))
    run.keep_model(model)


def over_a_wrapped_base(run: Run) -> None:
    """The frozen base streams already; the adapters and their optimizer stay outside of noria."""
    base = run.wrap(tiny.llama().requires_grad_(False))
    model = get_peft_model(base, lora(lora_dropout=0.1))
    optimizer = tiny.adamw(model, lr=1e-2)
    losses(run, model, optimizer, range(4))
    run.keep_model(model)


def two_adapters(run: Run) -> Any:
    model = get_peft_model(tiny.llama(), lora())
    model.add_adapter("second", lora(r=2, init_lora_weights=False))
    return model


def second_without_gradients(run: Run) -> None:
    """Another adapter is compared with, in no_grad; set_adapter makes its parameters trainable meanwhile."""
    model = two_adapters(run)
    optimizer = tiny.adamw(model, lr=1e-2)
    run.wrap(model, optimizer)
    for step in range(4):
        with torch.no_grad():
            model.set_adapter("second")
            run.keep(f"second {step}", model(**tiny.batch(step)).loss)
            model.set_adapter("default")
        losses(run, model, optimizer, range(step, step + 1))
    run.keep_model(model)


def adapters_in_turn(run: Run) -> None:
    """Each adapter has an optimizer of its own, and is wrapped with the base while it trains."""
    model = two_adapters(run)
    for number, name in enumerate(["default", "second", "default"]):
        model.set_adapter(name)
        optimizer = tiny.adamw(model, lr=1e-2)
        run.wrap(model, optimizer)
        losses(run, model, optimizer, range(3 * number, 3 * number + 3))
        run.unwrap(model, optimizer)
    run.keep_model(model)


def added_while_wrapped(run: Run) -> None:
    """A late adapter is no part of what was wrapped: it stays outside, with an optimizer of its own, till deleted."""
    model, optimizer = adapted(run, lora())
    losses(run, model, optimizer, range(2))
    model.add_adapter("late", lora(init_lora_weights=False))
    model.set_adapter("late")
    losses(run, model, tiny.adamw(model, lr=1e-2), range(2, 4))
    model.set_adapter("default")
    losses(run, model, optimizer, range(4, 6))
    run.keep_model(model)
    model.delete_adapter("late")
    losses(run, model, optimizer, range(6, 8))
    run.keep_model(model, "without the late one")


def profiled(run: Run) -> None:
    """With stacks, so that torch's tracer meets all modules."""
    model, optimizer = adapted(run, lora())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True):
        losses(run, model, optimizer, range(3))
    run.keep_model(model)


def mixed_in_a_batch(run: Run) -> None:
    """Each row of a batch has its adapter, or none, as where adapters are served."""
    model = two_adapters(run)
    optimizer = tiny.adamw(model, lr=1e-2)
    run.wrap(model, optimizer)
    for step in range(3):
        losses(run, model, optimizer, range(step, step + 1))
        model.eval()
        with torch.no_grad():
            run.keep(
                f"logits {step}", model(**tiny.batch(step, 3), adapter_names=["second", "__base__", "default"]).logits
            )
        model.train()
    run.keep_model(model)


def averaged(run: Run) -> None:
    """Two adapters become a third one inside materialize."""
    model = two_adapters(run)
    optimizer = tiny.adamw(model, lr=1e-2)
    run.wrap(model, optimizer)
    losses(run, model, optimizer, range(3))
    with real(run, model):
        model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "mean", combination_type="cat")
    with torch.no_grad():
        model.set_adapter("mean")
        run.keep("mean", model(**tiny.batch(3)).loss)
        model.set_adapter("default")
    losses(run, model, optimizer, range(4, 6))
    run.keep_model(model)


def adaptive_ranks(run: Run) -> None:
    """AdaLoRA's loss has all adapters in it, and after a step it reads them and their gradients, and prunes."""
    ranks = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "total_step": 8, "deltaT": 1}
    model, optimizer = adapted(run, AdaLoraConfig(task_type="CAUSAL_LM", target_modules=ATTENTION, **ranks))
    for step in range(6):
        loss = model(**tiny.batch(step)).loss
        loss.backward()
        optimizer.step()
        with real(run, model):
            model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        run.keep(f"loss {step}", loss)
    run.keep_model(model)


def trained_embeddings(run: Run) -> None:
    """Few rows of a tied embedding are trained; decoding then uses them as the head's, too."""
    config = lora(trainable_token_indices={"embed_tokens": [3, 5, 8]})
    adapter(run, config, tied=True)


SCRIPTS: dict[str, Script] = {
    "LoRA, two adapters in turn": taking_turns,
    "LoRA, dropout": functools.partial(adapter, config=lora(lora_dropout=0.1)),
    "LoRA, all linear layers": functools.partial(adapter, config=lora(target_modules="all-linear", bias="all")),
    "LoRA, modules_to_save": functools.partial(adapter, config=lora(modules_to_save=["lm_head", "norm"])),
    "LoRA, the embedding": functools.partial(adapter, config=lora(target_modules=["embed_tokens", "q_proj"])),
    "LoRA, trainable tokens": trained_embeddings,
    "LoRA, a subset of layers": functools.partial(adapter, config=lora(layers_to_transform=[0, 2])),
    "DoRA": functools.partial(adapter, config=lora(use_dora=True, lora_dropout=0.1)),
    "rsLoRA, ranks by pattern": functools.partial(
        adapter, config=lora(use_rslora=True, rank_pattern={"q_proj": 2}, init_lora_weights="gaussian")
    ),
    "IA3": functools.partial(adapter, config=IA3Config(task_type="CAUSAL_LM")),
    "prefix tuning": functools.partial(
        adapter, config=PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, prefix_projection=True)
    ),
    "prompt tuning": functools.partial(adapter, config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    "LoHa": functools.partial(
        adapter, config=LoHaConfig(task_type="CAUSAL_LM", r=2, target_modules=ATTENTION, rank_dropout=0.2)
    ),
    "OFT": functools.partial(
        adapter, config=OFTConfig(task_type="CAUSAL_LM", oft_block_size=8, target_modules=ATTENTION)
    ),
    "VeRA": functools.partial(adapter, config=VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=ATTENTION)),
    "Trainer, checkpointing": functools.partial(under_trainer, use_reentrant=False),
    "Trainer, reentrant checkpointing": functools.partial(under_trainer, use_reentrant=True),
    "a bf16 base, fp32 adapters": mixed_dtypes,
    "saved, and loaded anew": saved_and_loaded,
    "loaded while wrapped": loaded_while_wrapped,
    "disable_adapter as reference": disabled_as_reference,
    "merge_adapter, unmerge_adapter": merged_for_a_while,
    "merge_and_unload while wrapped": merged_inside_materialize,
    "merge_and_unload after unwrap": merged_after_unwrap,
    "prepare_model_for_kbit_training": prepared_for_kbit,
    "over a wrapped base": over_a_wrapped_base,
    "set_adapter in no_grad": second_without_gradients,
    "profiler, with_stack": profiled,
    "two adapters in turn": adapters_in_turn,
    "add_adapter and delete_adapter while wrapped": added_while_wrapped,
    "adapters mixed in a batch": mixed_in_a_batch,
    "add_weighted_adapter": averaged,
    "AdaLoRA": adaptive_ranks,
    "LoRA, target_parameters": functools.partial(
        adapter, config=lora(target_modules=["q_proj"], target_parameters=["self_attn.v_proj.weight"])
    ),
}


@cases(SCRIPTS)
def test_peft(script: Script, tmp_path: Path):
    assert_equal(script, tmp_path)


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(noria.UsageError) as caught:
        yield
    for word in words:
        assert word in str(caught.value)


def test_an_adapter_that_writes_its_weights_in_forward():
    """CPT projects what it trains in each forward, by p.data = ..."""
    tokens = {"cpt_token_ids": [3, 4, 5], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]}
    model = get_peft_model(tiny.llama(), CPTConfig(task_type="CAUSAL_LM", **tokens))
    noria.wrap(model, tiny.adamw(model), **POLICY)
    with refused("delta_embedding.weight", "its data replaced", "noria.materialize"):
        model(**tiny.batch(0))


def test_merging_outside_of_materialize():
    model = get_peft_model(tiny.llama(), lora(init_lora_weights=False))
    optimizer = tiny.adamw(model)
    noria.wrap(model, optimizer, **POLICY)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"noria\.materialize"):
        model.merge_adapter()
    noria.testing.assert_same_bits(dict(model.state_dict()), before)
