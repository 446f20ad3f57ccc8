"""Each script here trains as people train with a framework. It runs twice: plain, and with one more line, which wraps
its model. Both must give the same bits, and with noria the model must really stream through a window of two units.

A script is a function of a `Run`. It calls `run.wrap` where a user would call `noria.wrap`, and keeps what is compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import noria
import numpy as np
import pytest
import torch
from noria.testing import assert_same_bits
from torch import nn

__all__ = ["Run", "Script", "assert_equal", "assert_streamed", "cases", "trainer_arguments"]

POLICY: dict[str, Any] = {"device": "cpu", "window": 2, "kernel": "torch"}


class Run:
    """One run of a script: plain, or with noria. `folder` is its own, and empty."""

    def __init__(self, is_wrapped: bool, folder: Path) -> None:
        self.is_wrapped = is_wrapped
        self.folder = folder
        self.kept: dict[str, torch.Tensor] = {}
        self._wrapped: list[Any] = []

    def wrap(self, model: Any, optimizer: Any = None, **policy: Any) -> Any:
        """As `noria.wrap`, in the run that has it."""
        if self.is_wrapped:
            noria.wrap(model, optimizer, **{**POLICY, **policy})
            self._wrapped.append(model)
        return (model, optimizer) if optimizer is not None else model

    def unwrap(self, model: Any, optimizer: Any = None) -> Any:
        if self.is_wrapped:
            assert_streamed(model)
            self._wrapped = [each for each in self._wrapped if each is not model]
            noria.unwrap(model, optimizer)
        return (model, optimizer) if optimizer is not None else model

    def keep(self, name: str, value: Any) -> None:
        """Keeps a copy of a tensor, a number, or a dict or list of these."""
        if isinstance(value, dict):
            for key, each in value.items():
                self.keep(f"{name}.{key}", each)
        elif isinstance(value, list | tuple):
            for number, each in enumerate(value):
                self.keep(f"{name}.{number}", each)
        elif isinstance(value, torch.Tensor | float | int) and not isinstance(value, bool):
            assert name not in self.kept, f"{name} is kept twice"
            self.kept[name] = torch.as_tensor(value).detach().cpu().clone()

    def keep_model(self, model: nn.Module, name: str = "model") -> None:
        self.keep(name, model.state_dict())

    def end(self) -> None:
        for model in self._wrapped:
            assert_streamed(model)


def assert_streamed(model: Any) -> None:
    report = noria.report(model, write_trace=False)
    assert report.num_fetches > report.num_units and report.peak_units <= POLICY["window"], str(report)
    assert report.ledger_agrees, str(report)


Script = Callable[[Run], None]


def trainer_arguments(folder: Path, **more: Any) -> dict[str, Any]:
    """Arguments of transformers' Trainer, and of those made from it: four quiet steps on the CPU."""
    return {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 1,
        "disable_tqdm": True,
        **more,
    }


def cases(scripts: dict[str, Script], not_equal: dict[str, str] | None = None) -> pytest.MarkDecorator:
    """Parametrizes a test with `script`. `not_equal`: the reasons why some scripts do not end equal."""
    reasons = not_equal or {}
    assert set(reasons) <= set(scripts)
    return pytest.mark.parametrize(
        "script",
        [
            pytest.param(script, id=name, marks=pytest.mark.xfail(reason=reasons[name], strict=True))
            if name in reasons
            else pytest.param(script, id=name)
            for name, script in scripts.items()
        ],
    )


def assert_equal(script: Script, folder: Path) -> None:
    """Runs the script plain and with noria, and compares all bits."""
    kept = []
    for is_wrapped in (False, True):
        own = folder / ("noria" if is_wrapped else "plain")
        own.mkdir()
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        run = Run(is_wrapped, own)
        script(run)
        run.end()
        assert run.kept, "the script keeps nothing"
        kept.append(run.kept)
    assert_same_bits(kept[1], kept[0])
