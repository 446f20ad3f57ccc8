"""Frozen bases in four bits (bitsandbytes), with adapters beside them: QLoRA. The base streams as it is."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import noria
import pytest
import torch
from noria.testing import assert_same_bits, omit_wait, on_machine
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from tests.ecosystem import tiny
from tests.ecosystem.harness import POLICY, Run, Script, assert_equal, cases

LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.0}


def quantised(folder: Path, bits: int = 4, torchao: Any = None, **options: Any) -> torch.nn.Module:
    """As people load it: `from_pretrained` with a quantisation, on the CPU."""
    tiny.llama(hidden_size=64, intermediate_size=128).save_pretrained(folder / "base")
    config: Any
    if torchao is not None:
        config = TorchAoConfig(torchao, **options)
    elif bits == 8:
        config = BitsAndBytesConfig(load_in_8bit=True, **options)
    else:
        config = BitsAndBytesConfig(load_in_4bit=True, **{"bnb_4bit_compute_dtype": torch.float32, **options})
    return AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config, device_map="cpu")


def train(run: Run, model: Any, steps: int = 4, **policy: Any) -> None:
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer, **policy)
    model.train()  # in evaluation bitsandbytes packs weights anew for some CPUs
    for number in range(steps):
        loss = model(**tiny.batch(number)).loss
        loss.backward()
        run.keep(f"gradients {number}", {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        run.keep(f"loss {number}", loss)
    run.keep("adapters", {n: v for n, v in model.state_dict().items() if "lora" in n})


def qlora(run: Run, lora: dict[str, Any] | None = None, prepares: bool = False, **options: Any) -> None:
    model = quantised(run.folder, **options)
    if prepares:
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(3)
    train(run, get_peft_model(model, LoraConfig(**LORA, **(lora or {}))))


def unwrapped_and_on(run: Run, **options: Any) -> None:
    """Trains, unwraps, and trains without noria."""
    torch.manual_seed(3)
    model = get_peft_model(quantised(run.folder, **options), LoraConfig(**LORA))
    optimizer = tiny.adamw(model)
    run.wrap(model, optimizer)
    model.train()
    for number in range(4):
        if number == 2:
            run.unwrap(model, optimizer)
        loss = model(**tiny.batch(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(f"loss {number}", loss)


SCRIPTS: dict[str, Script] = {
    "NF4": functools.partial(qlora, bnb_4bit_quant_type="nf4"),
    "FP4": functools.partial(qlora, bnb_4bit_quant_type="fp4"),
    "NF4, double quantisation": functools.partial(qlora, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "NF4, computed in bfloat16": functools.partial(
        qlora, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
    "NF4, prepared for training": functools.partial(qlora, prepares=True, bnb_4bit_quant_type="nf4"),
    "NF4, DoRA": functools.partial(qlora, lora={"use_dora": True}, bnb_4bit_quant_type="nf4"),
    "NF4, rsLoRA": functools.partial(qlora, lora={"use_rslora": True}, bnb_4bit_quant_type="nf4"),
    "NF4, unwrapped and on": functools.partial(unwrapped_and_on, bnb_4bit_quant_type="nf4"),
    "torchao int8": functools.partial(qlora, torchao=Int8WeightOnlyConfig()),
    "torchao fp8": functools.partial(qlora, torchao=Float8WeightOnlyConfig()),
    "torchao int4 in int8": functools.partial(qlora, torchao=IntxWeightOnlyConfig(torch.int4, PerGroup(32))),
    "torchao int8, DoRA": functools.partial(qlora, lora={"use_dora": True}, torchao=Int8WeightOnlyConfig()),
    "torchao int8, unwrapped and on": functools.partial(unwrapped_and_on, torchao=Int8WeightOnlyConfig()),
    "int8": functools.partial(qlora, bits=8),
    "int8, with outliers in 16 bits": functools.partial(qlora, bits=8, llm_int8_threshold=1.0),
    "int8, prepared for training": functools.partial(qlora, bits=8, prepares=True),
    "int8, unwrapped and on": functools.partial(unwrapped_and_on, bits=8),
}


@cases(SCRIPTS)
def test_quantised(script: Script, tmp_path: Path):
    assert_equal(script, tmp_path)


def gradients(folder: Path, is_wrapped: bool, omitted: str = "") -> dict[str, torch.Tensor]:
    """Of all adapters in four steps, on a machine that is late and fills free memory with NaN."""
    torch.manual_seed(3)
    model = get_peft_model(quantised(folder, bnb_4bit_quant_type="nf4"), LoraConfig(**LORA))
    run = Run(is_wrapped, folder)
    with on_machine(hostility={"seed": 7, "max_delay_us": 2000, "poison": True}):
        run.wrap(model, tiny.adamw(model))
    if omitted:
        omit_wait(model, omitted)
    model.train()
    for number in range(4):
        model(**tiny.batch(number)).loss.backward()
        run.keep(f"{number}", {name: each.grad for name, each in model.named_parameters() if each.requires_grad})
        model.zero_grad()
    return run.kept


def test_adapters_have_the_gradients_of_a_resident_base_and_others_if_it_has_not_come_in_time(tmp_path: Path):
    """The control arm does not wait for weights that backward needs: then the window has other bytes. They may change
    while bitsandbytes reads them, and noria may find that."""
    resident, streamed = gradients(tmp_path / "a", False), gradients(tmp_path / "b", True)
    assert_same_bits(streamed, resident)
    try:
        late = gradients(tmp_path / "c", True, "fetch -> backward on weights (RAW)")
    except noria.UsageError as error:
        assert "in-place write" in str(error)
    else:
        assert any(not torch.equal(late[name], resident[name]) for name in resident)


def test_the_base_takes_half_a_byte_for_each_weight(tmp_path: Path):
    model = get_peft_model(quantised(tmp_path, bnb_4bit_quant_type="nf4"), LoraConfig(**LORA))
    optimizer = tiny.adamw(model)
    noria.wrap(model, optimizer, **POLICY)
    packed = sum(p.numel() for p in model.parameters() if type(p).__name__ == "Params4bit")
    taken = {row.purpose: row.taken for row in noria.report(model).ledger}
    others = sum(p.numel() * p.itemsize for p in model.parameters() if type(p).__name__ != "Params4bit")
    padding = 512 * (2 + len(list(model.parameters())))
    assert packed + others <= taken["working copies"] <= packed + others + padding


@pytest.mark.parametrize("options", [{"bits": 4}, {"bits": 8}, {"torchao": Int8WeightOnlyConfig()}])
def test_a_streamed_base_is_saved_and_copied_as_a_resident_one(options: dict[str, Any], tmp_path: Path):
    plain, streamed = (quantised(tmp_path, **options) for _ in range(2))
    # In evaluation bitsandbytes packs 4-bit weights anew for some CPUs, but not streamed ones.
    trains = options.get("bits") == 4
    plain.train(trains)
    noria.wrap(streamed.eval(), **POLICY)
    with torch.no_grad():
        wanted = plain(**tiny.batch(0)).logits
        for _ in range(2):
            assert_same_bits({"logits": streamed(**tiny.batch(0)).logits}, {"logits": wanted})
    assert_same_bits(streamed.state_dict(), plain.state_dict())
    with noria.materialize(streamed):
        copied = copy.deepcopy(streamed)
    noria.unwrap(streamed)
    for model in (copied, streamed):
        model.train(trains)
        with torch.no_grad():
            assert_same_bits({"logits": model(**tiny.batch(0)).logits}, {"logits": wanted})
        assert_same_bits(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("kind", ["int8", "int8, trained", "not quantised yet"])
def test_what_cannot_stream_is_refused_with_a_remedy(kind: str):
    if kind == "int8":
        model, words = torch.nn.Sequential(bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=False)), r"model\.to\(.cpu.\)"
    elif kind == "int8, trained":
        model, words = torch.nn.Sequential(bnb.nn.Linear8bitLt(8, 8)), "freeze it"
    else:
        model, words = torch.nn.Sequential(bnb.nn.Linear4bit(64, 64)), r"model\.to\(.cpu.\)"
    with pytest.raises(noria.UsageError, match=words):
        noria.wrap(model, **POLICY)
