"""Checkpoints of a wrapped run in one file of plain tensors: what torch itself would save, under the original names."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from noria._errors import usage_error
from noria._lists import as_list
from noria.contents import lines_of_model, lines_of_optimizer, refuse_others
from noria.custody import Wrapped, wrapped_by
from noria.folders import describe_folder, load_folder
from noria.optimizer import WrappedOptimizer
from noria.ranks import Ranks, raised_by_all
from noria.stages import modules_of

__all__ = ["load", "save"]

_GIVE = "give what noria.save has written, or torch.save of a dict with the entries 'model' and 'optimizer'"

Models = nn.Module | Sequence[nn.Module]
Optimizers = Optimizer | Sequence[Optimizer]


def save(path: str | os.PathLike[str], model: Models, optimizer: Optimizers | None = None, **extra: Any) -> None:
    """Writes `model.state_dict()`, `optimizer.state_dict()` and whatever else is given, by `torch.save`; of lists, as
    `noria.wrap` takes them, a list of each.

    Works on wrapped and plain objects alike; a file is readable by both. It is written beside its name and moved there,
    so an interrupted save leaves the old file. Raises UsageError, and leaves the old file, for contents that `load`
    would refuse: it reads plain values and tensors, and runs no code from a file.

    Where ranks share the model, all of them call this, and rank 0 writes the file: the same as one process would, so
    any number of ranks may load it. Only rank 0 gathers all of it in host memory. When this returns the file is there,
    for all ranks; where rank 0 fails, all of them raise.
    """
    model = modules_of(model)
    shared = _shared(model, optimizer)
    with contextlib.ExitStack() as on_first:
        for wrapped, _ in shared:
            on_first.enter_context(wrapped.together.on_first())
        contents = {**extra, "model": _state_of(model)}
        if optimizer is not None:
            contents["optimizer"] = _state_of(optimizer)
    if not shared:
        _write(path, contents)
        return
    with raised_by_all([ranks for _, ranks in shared], "noria.save"):
        if shared[0][1].rank == 0:
            _write(path, contents)


def _shared(model: Models, optimizer: Optimizers | None) -> list[tuple[Wrapped, Ranks]]:
    """The wrap calls of what is saved or loaded, each once, whose models ranks share."""
    owners = [wrapped_by(each) for each in as_list(model)]
    updates = [each._noria for each in as_list(optimizer) if isinstance(each, WrappedOptimizer)]
    owners += [each.wrapped for each in updates if each is not None]
    unique = dict.fromkeys(each for each in owners if each is not None)
    return [(each, each.ranks) for each in unique if each.ranks is not None]


def _write(path: str | os.PathLike[str], contents: dict[str, Any]) -> None:
    temporary = f"{os.fspath(path)}.part"
    torch.save(contents, temporary)
    try:
        _read(temporary)
    except pickle.UnpicklingError:
        os.remove(temporary)
        name, reason = _unreadable(contents)
        raise usage_error(
            "values that torch.load(weights_only=True) reads: numbers, strings, containers and tensors",
            f"{name!r}: {reason}",
            "convert them first: float(x), x.tolist(), or torch.as_tensor(x)",
        ) from None
    os.replace(temporary, path)


def load(path: str | os.PathLike[str], model: Models, optimizer: Optimizers | None = None) -> dict[str, Any]:
    """Reads such a file into the model, then the optimizer (or the lists of them that were saved); returns what else
    was saved. The file is mapped, not read as a whole: values stream into the home.

    A folder is one that `torch.distributed.checkpoint.save` has written of `noria.sharded_state`: then model and
    optimizer must be wrapped, and each rank reads what it has at home.

    Raises UsageError for what is no checkpoint, for a file without a model, or without an optimizer where one is given,
    or with another number of them; for a folder, before anything is changed, where names or shapes are others.

    Where ranks share the model, all of them call this, with a path that all can read: where one cannot, or has another
    checkpoint there, all of them raise, before anything is changed.
    """
    model = modules_of(model)
    shared = _shared(model, optimizer)
    for wrapped, _ in shared:
        wrapped.recover()
        wrapped.together.meet("load a checkpoint")
    everybody = [ranks for _, ranks in shared]
    with raised_by_all(everybody, "noria.load"):
        contents = None if os.path.isdir(path) else _checked(path)
        pairs = [] if contents is None else _pairs(path, contents, model, optimizer)
        lines = [describe_folder(path)] if contents is None else ["a file", *_lines(pairs)] if shared else []
    refuse_others(everybody, lines)
    if contents is None:
        return load_folder(path, model, optimizer, everybody)
    for target, state in pairs:
        target.load_state_dict(state)
    return {key: value for key, value in contents.items() if key not in ("model", "optimizer")}


def _pairs(
    path: str | os.PathLike[str], contents: dict[str, Any], model: Models, optimizer: Optimizers | None
) -> list[tuple[Any, dict[str, Any]]]:
    """What is loaded, and what into it."""
    pairs: list[tuple[Any, dict[str, Any]]] = []
    for name, wanted in (("model", model), ("optimizer", optimizer)):
        if wanted is None:
            continue
        if name not in contents:
            raise usage_error(f"a checkpoint with {name!r}", f"{sorted(contents)} in {path}", "save it with noria.save")
        targets, states = as_list(wanted), as_list(contents[name])
        if len(targets) != len(states):
            raise usage_error(f"{len(states)} of {name!r}, as in {path}", str(len(targets)), "give what was saved")
        for state in states:
            if not isinstance(state, Mapping):
                raise usage_error(f"{name!r} in {path} to be a state_dict()", type(state).__qualname__, _GIVE)
        pairs += zip(targets, states, strict=True)
    return pairs


def _lines(pairs: list[tuple[Any, dict[str, Any]]]) -> list[str]:
    """Of what ranks share, as they compare it."""
    lines: list[str] = []
    for target, state in pairs:
        if isinstance(target, WrappedOptimizer) and target._noria is not None:
            names = [target._noria.wrapped.slot_of[p].name for group in target.param_groups for p in group["params"]]
            lines += lines_of_optimizer(names, state)
        elif isinstance(target, nn.Module) and wrapped_by(target) is not None:
            lines += lines_of_model(target, state)
    return lines


def _state_of(value: Any) -> Any:
    return [each.state_dict() for each in value] if isinstance(value, list | tuple) else value.state_dict()


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    contents: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return contents


def _checked(path: str | os.PathLike[str]) -> dict[str, Any]:
    """As `_read`; raises UsageError for what is no checkpoint."""
    expected = f"a checkpoint of one file in {path}"
    try:
        contents = _read(path)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise usage_error(expected, f"{type(error).__name__}: {error}", _GIVE) from error
    if not isinstance(contents, dict):
        raise usage_error(expected, f"one {type(contents).__qualname__}", _GIVE)
    return contents


def _unreadable(contents: dict[str, Any]) -> tuple[str, str]:
    """Which entry `load` would refuse, and why."""
    for name, value in contents.items():
        with contextlib.suppress(pickle.UnpicklingError):
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            torch.load(file, map_location="meta", weights_only=True)
            continue
        return name, type(value).__qualname__ if name not in ("model", "optimizer") else "an entry of its state_dict()"
    return "the whole", "each entry can be read by itself"
