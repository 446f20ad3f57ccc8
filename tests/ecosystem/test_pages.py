"""The snippets of pages about trainers run as they stand, with a small model in the place of the reader's."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning as L
import noria
import pytest
import torch
from accelerate import Accelerator
from diffusers import DiTTransformer2DModel
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tests.ecosystem import tiny
from tests.ecosystem.harness import Run
from tests.ecosystem.test_diffusers import dit
from tests.ecosystem.test_diffusers import step as denoise
from tests.ecosystem.test_integrations import Module
from tests.ecosystem.test_trl import arguments

ROOT = Path(__file__).resolve().parents[2]


def sections(page: str) -> dict[str, str]:
    """The first snippet of each section that has one, by the section's title."""
    found = {}
    for part in re.split(r"^## ", (ROOT / page).read_text(), flags=re.M)[1:]:
        if snippet := re.search(r"```python\n(.*?)```", part, re.S):
            found[part.partition("\n")[0]] = snippet[1]
    return found


def titled(page: str, section: str) -> dict[str, str]:
    """A section's snippets, by the comment that each begins with."""
    text = (ROOT / page).read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"```python\n# (\w+)\n(.*?)```", text, re.S))


SNIPPETS = sections("docs/trainers.md")
SHORT = titled("README.md", "In your trainer")
OTHERS = sections("docs/other_trainers.md")


def given(**more: Any) -> dict[str, Any]:
    model = tiny.llama()
    return {"noria": noria, "torch": torch, "model": model, "optimizer": tiny.adamw(model), **more}


def trainer_gets(folder: Path) -> dict[str, Any]:
    return given(args=TrainingArguments(**arguments(folder)), data=tiny.token_rows())


def trl_gets(folder: Path) -> dict[str, Any]:
    args = SFTConfig(**arguments(folder))
    return given(args=args, data=tiny.texts(), tokenizer=tiny.tokenizer(), SFTTrainer=SFTTrainer)


def accelerate_gets(folder: Path) -> dict[str, Any]:
    return given(accelerator=Accelerator(cpu=True), loader=batches())


def peft_gets(folder: Path) -> dict[str, Any]:
    return given(LoraConfig=LoraConfig, get_peft_model=get_peft_model)


def qlora_gets(folder: Path) -> dict[str, Any]:
    tiny.llama(hidden_size=64, intermediate_size=128).save_pretrained(folder / "base")
    return peft_gets(folder) | {
        "path": folder / "base",
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "BitsAndBytesConfig": BitsAndBytesConfig,
        "four_bits": BitsAndBytesConfig(load_in_4bit=True),
    }


def diffusers_gets(folder: Path) -> dict[str, Any]:
    dit().save_pretrained(folder)
    return given(DiTTransformer2DModel=DiTTransformer2DModel, path=folder)


class Watched(Module):
    """Knows after the training whether noria had it."""

    was_wrapped = False

    def training_step(self, batch: Any, index: int) -> Any:
        self.was_wrapped = noria.is_wrapped(self)
        return super().training_step(batch, index)


def lightning_gets(folder: Path) -> dict[str, Any]:
    def trainer(**options: Any) -> L.Trainer:  # with fewer steps
        return L.Trainer(**options | {"max_steps": 2, "accelerator": "cpu", "logger": False})

    return given(L=SimpleNamespace(Trainer=trainer), module=Watched(), loader=batches())


def batches() -> DataLoader[Any]:
    return DataLoader([{key: value[0] for key, value in tiny.batch(n).items()} for n in range(8)], batch_size=2)


def goes_on(names: dict[str, Any], folder: Path) -> None:
    """Trains by the loop that stands around a snippet, if it has none of its own."""
    if "module" in names:
        module = names["module"]
        if not module.losses:
            names["trainer"].fit(module, names["loader"])
        assert module.was_wrapped and not noria.is_wrapped(module)
        return
    if "trainer" in names:
        trainer = names["trainer"]
        if not noria.is_wrapped(trainer.model):
            trainer.train()
        assert noria.is_wrapped(trainer.model)
        return
    if isinstance(names["model"], DiTTransformer2DModel):
        denoise(Run(True, folder), names["model"], names["optimizer"], 0)
        return
    names["model"].train()
    for batch in names.get("loader", batches()):
        names["model"](**batch).loss.backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()


GIVEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "transformers": trainer_gets,
    "TRL": trl_gets,
    "accelerate": accelerate_gets,
    "PEFT": peft_gets,
    "QLoRA": qlora_gets,
    "diffusers": diffusers_gets,
    "Lightning": lightning_gets,
}


def test_the_pages_have_these_snippets():
    assert set(SNIPPETS) == set(GIVEN)
    assert set(SHORT) == set(GIVEN) - {"PEFT", "diffusers"}
    assert set(OTHERS) == set(STANDS_FOR)


def runs(snippet: str, section: str, folder: Path) -> None:
    names = GIVEN[section](folder)
    exec(compile(snippet, section, "exec"), names)
    goes_on(names, folder)
    if "module" in names:
        return
    model = names["trainer"].model if "trainer" in names else names["model"]
    assert noria.report(model, write_trace=False).num_steps > 0


@pytest.mark.parametrize("section", GIVEN)
def test_a_snippet_runs(section: str, tmp_path: Path):
    runs(SNIPPETS[section], section, tmp_path)


@pytest.mark.parametrize("section", SHORT)
def test_a_snippet_of_the_readme_runs(section: str, tmp_path: Path):
    runs(SHORT[section], section, tmp_path)


# ---- trainers that are not installed: classes as theirs stand for them ----


class Delegating(Trainer):
    """Makes its optimizer and leaves out empty groups, as ms-swift's."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = super().create_optimizer(model)
        self.optimizer.param_groups = [group for group in self.optimizer.param_groups if group["params"]]
        return self.optimizer


class Custom(Trainer):
    """Takes keywords alone, as LLaMA-Factory's."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        return super().create_optimizer(*args, **kwargs)


STANDS_FOR: dict[str, dict[str, dict[str, Any]]] = {
    "axolotl": {
        "axolotl.core.trainers.base": {"AxolotlTrainer": type("AxolotlTrainer", (Trainer,), {})},
        "axolotl.integrations.base": {"BasePlugin": type("BasePlugin", (), {})},
    },
    "ms-swift": {
        "swift.trainers": {"Seq2SeqTrainer": Delegating, "TrainerFactory": SimpleNamespace(TRAINER_MAPPING={})},
    },
    "LLaMA-Factory": {
        "llamafactory.train.sft": {"workflow": SimpleNamespace(CustomSeq2SeqTrainer=Custom)},
        "llamafactory.train.tuner": {"run_exp": None},
    },
}


def chosen_by(section: str, names: dict[str, Any]) -> type[Trainer]:
    """The class that the framework will use after the snippet has run."""
    if section == "axolotl":
        return names["NoriaPlugin"]().get_trainer_cls({})
    if section == "ms-swift":
        module, _, name = names["TrainerFactory"].TRAINER_MAPPING["causal_lm"].rpartition(".")
        assert module == names["__name__"]
        return names[name]
    return names["workflow"].CustomSeq2SeqTrainer


@pytest.mark.parametrize("section", STANDS_FOR)
def test_the_trainer_that_another_framework_is_given_streams(section: str, tmp_path: Path, monkeypatch):
    for path, content in STANDS_FOR[section].items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(content)
    names = {"__name__": "streaming"}
    exec(compile(OTHERS[section], section, "exec"), names)
    given = {
        "model": tiny.llama(),
        "args": TrainingArguments(**arguments(tmp_path)),
        "train_dataset": tiny.token_rows(),
    }
    trainer = chosen_by(section, names)(**given)
    trainer.train()
    assert noria.report(trainer.model, write_trace=False).num_steps == 4
