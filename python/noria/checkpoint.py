"""Checkpoints of a wrapped run in one file of plain tensors: what torch itself would save, under the original names."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from noria._errors import usage_error

__all__ = ["load", "save"]


def save(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, **extra: Any) -> None:
    """Writes `model.state_dict()`, `optimizer.state_dict()` and whatever else is given, by `torch.save`.

    Works on wrapped and plain objects alike; a file is readable by both. It is written beside its name and moved there,
    so an interrupted save leaves the old file.
    """
    contents = {**extra, "model": model.state_dict()}
    if optimizer is not None:
        contents["optimizer"] = optimizer.state_dict()
    temporary = f"{os.fspath(path)}.part"
    torch.save(contents, temporary)
    os.replace(temporary, path)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Reads such a file into the model, then the optimizer; returns what else was saved. The file is mapped, not read
    as a whole: values stream into the home.

    Raises UsageError for a file without a model, or without an optimizer where one is given.
    """
    contents: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    for name, wanted in (("model", model), ("optimizer", optimizer)):
        if wanted is not None and name not in contents:
            raise usage_error(f"a checkpoint with {name!r}", f"{sorted(contents)} in {path}", "save it with noria.save")
    model.load_state_dict(contents.pop("model"))
    state = contents.pop("optimizer", None)
    if optimizer is not None:
        optimizer.load_state_dict(state)
    return contents
