"""The snippets of docs/trainers.md run as they stand, with a small model in the place of the reader's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import noria
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from trl import SFTConfig

from tests.ecosystem import tiny
from tests.ecosystem.test_integrations import Module
from tests.ecosystem.test_trl import arguments

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"
SNIPPETS = dict(re.findall(r"^## (\w+)\n+```python\n(.*?)```", PAGE.read_text(), re.M | re.S))


def given(**more: Any) -> dict[str, Any]:
    model = tiny.llama()
    return {"noria": noria, "torch": torch, "model": model, "optimizer": tiny.adamw(model), **more}


def trainer_gets(folder: Path) -> dict[str, Any]:
    return given(args=TrainingArguments(**arguments(folder)), data=tiny.token_rows())


def trl_gets(folder: Path) -> dict[str, Any]:
    return given(args=SFTConfig(**arguments(folder)), data=tiny.texts(), tokenizer=tiny.tokenizer())


def accelerate_gets(folder: Path) -> dict[str, Any]:
    return given(accelerator=Accelerator(cpu=True), loader=batches())


def peft_gets(folder: Path) -> dict[str, Any]:
    return given(LoraConfig=LoraConfig, get_peft_model=get_peft_model)


def lightning_gets(folder: Path) -> dict[str, Any]:
    def trainer(**options: Any) -> L.Trainer:  # with fewer steps
        return L.Trainer(**options | {"max_steps": 2, "accelerator": "cpu", "logger": False})

    return given(L=SimpleNamespace(Trainer=trainer), module=Module(), loader=batches())


def batches() -> DataLoader[Any]:
    return DataLoader([{key: value[0] for key, value in tiny.batch(n).items()} for n in range(8)], batch_size=2)


def goes_on(names: dict[str, Any]) -> None:
    """Trains by the loop that stands around a snippet, if it has none of its own."""
    if "module" in names:
        assert names["module"].losses and not noria.is_wrapped(names["module"])
        return
    if "trainer" in names:
        assert noria.is_wrapped(names["trainer"].model)
        return
    for batch in names.get("loader", batches()):
        names["model"](**batch).loss.backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()


GIVEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "transformers": trainer_gets,
    "TRL": trl_gets,
    "accelerate": accelerate_gets,
    "PEFT": peft_gets,
    "Lightning": lightning_gets,
}


def test_the_page_has_these_snippets():
    assert set(SNIPPETS) == set(GIVEN)


@pytest.mark.parametrize("section", GIVEN)
def test_a_snippet_runs(section: str, tmp_path: Path):
    names = GIVEN[section](tmp_path)
    exec(compile(SNIPPETS[section], section, "exec"), names)
    goes_on(names)
    if "module" in names:
        return
    model = names["trainer"].model if "trainer" in names else names["model"]
    assert noria.report(model, write_trace=False).num_steps > 0
