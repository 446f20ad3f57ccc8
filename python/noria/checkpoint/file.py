"""Saves and loads a wrapped run as one file of plain tensors: what torch would save, under the original names."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from noria._errors import usage_error
from noria._lists import as_list
from noria.checkpoint.dcp_load import describe_folder, load_folder
from noria.dist.load_fingerprint import lines_of_model, lines_of_optimizer, refuse_others
from noria.dist.ranks import Ranks, raised_by_all
from noria.model.moment_formats import plain_state_dict
from noria.optimizer import driver_of, for_file
from noria.pipeline.pipelining_compat import modules_of
from noria.runtime.rank_sync import RankSync
from noria.runtime.state import RunState
from noria.runtime.unread_tensors import UnreadTensors
from noria.wrapped import wrapped_by

__all__ = ["load", "save"]

_OF_THE_RUN = "noria"
"""The entry of what noria must know of the run."""
_PLACES = "updates by torch"

_GIVE = "give what noria.save has written, or torch.save of a dict with the entries 'model' and 'optimizer'"

Models = nn.Module | Sequence[nn.Module]
Optimizers = Optimizer | Sequence[Optimizer]


def save(path: str | os.PathLike[str], model: Models, optimizer: Optimizers | None = None, **extra: object) -> None:
    """Writes `model.state_dict()`, `optimizer.state_dict()` and `extra` into one file, by `torch.save`.

    For lists of models or optimizers, as `noria.wrap` takes them, it writes a list of state dicts.

    Wrapped and plain objects can both be saved, and `noria.load` loads the file into both. noria writes it under
    another name and then renames it, so an interrupted save leaves the old file.

    State that lies in files is read while the file is written, unless the optimizer has hooks of its state dict. So it
    needs memory for few units.

    An entry "noria" says where torch's code has run updates. `load` warns if they would run elsewhere.

    Moments of `state_dtype="8bit"` stay codes in the file, unless ranks share the model or the optimizer has hooks of
    its state dict. `noria.plain_state_dict` turns them into what `torch.load` and a plain optimizer expect.

    If ranks share the model, all of them call this, and rank 0 writes the same file as one process would. So any number
    of ranks may load it. Only rank 0 gathers all values in host memory. When this returns, the file exists for all
    ranks. If rank 0 fails, all ranks raise.

    Args:
        path: The file. A file beside it, with ".part" after its name, exists during the save.
        model: A model, a `PipelineStage`, or a list of them.
        optimizer: An optimizer, a list, or None to save the model alone.
        **extra: Other entries, with other names than "noria". `load` returns them.

    Raises:
        UsageError: if `load` would refuse the contents. The old file then stays. `load` reads plain values and tensors,
            and runs no code from a file. Also while weights and optimizer state are of different steps. Also if state
            lies in files, it must be whole in memory, and there is too little.

    Example:
        >>> noria.save("run.pt", model, optimizer, step=100)
    """
    if not isinstance(path, str | os.PathLike):
        raise usage_error(
            "noria.save(path, model, optimizer)", f"a first argument of {type(path).__name__}", "put the path first"
        )
    if _OF_THE_RUN in extra:
        raise usage_error("other names of entries", f'an entry "{_OF_THE_RUN}", which is noria\'s own', "rename it")
    model = modules_of(model)
    for owner in filter(None, map(wrapped_by, as_list(model))):
        owner.loads.refuse_missing("noria.save")
    shared = _shared(model, optimizer)
    with contextlib.ExitStack() as on_first:
        for _, sync, _ in shared:
            on_first.enter_context(sync.on_first())
        unread = UnreadTensors()
        contents = {**extra, "model": _state_of(model, unread)}
        if optimizer is not None:
            contents["optimizer"] = _state_of(optimizer, unread)
            if places := _places(optimizer):
                contents[_OF_THE_RUN] = {_PLACES: places}
    with unread:
        if not shared:
            _write(path, contents, unread)
            return
        with raised_by_all([ranks for _, _, ranks in shared], "noria.save"):
            if shared[0][2].rank == 0:
                _write(path, contents, unread)


def _shared(model: Models, optimizer: Optimizers | None) -> list[tuple[RunState, RankSync, Ranks]]:
    """Returns the wrap calls behind these models and optimizers, each once, if ranks share their models."""
    owners = [(owner.run, owner.sync) for each in as_list(model) if (owner := wrapped_by(each)) is not None]
    drivers = [driver for each in as_list(optimizer) if (driver := driver_of(each)) is not None]
    owners += [(driver.run, driver.services.sync) for driver in drivers]
    return [(run, sync, run.context.ranks) for run, sync in dict.fromkeys(owners) if run.context.ranks is not None]


def _write(path: str | os.PathLike[str], contents: dict[str, object], unread: UnreadTensors) -> None:
    temporary = f"{os.fspath(path)}.part"
    try:
        with unread.progress("saving optimizer state"):
            torch.save(contents, temporary)
        _read(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        if not isinstance(error, pickle.UnpicklingError):
            raise
        name, reason = _unreadable(contents)
        raise usage_error(
            "values that torch.load(weights_only=True) reads: numbers, strings, containers and tensors",
            f"{name!r}: {reason}",
            "convert them first: float(x), x.tolist(), or torch.as_tensor(x); a class of tensors needs "
            "torch.serialization.add_safe_globals([...])",
        ) from None


def load(path: str | os.PathLike[str], model: Models, optimizer: Optimizers | None = None) -> dict[str, Any]:
    """Reads a checkpoint into the model, then into the optimizer (or into lists of them, as saved).

    The file is mapped, not read as a whole: values stream into the home.

    For a folder of `save_pretrained`, or a file of weights alone, see `load_pretrained`.

    A folder must come from `torch.distributed.checkpoint.save` of `noria.sharded_state`. Then model and optimizer must
    be wrapped, and each rank reads what it has at home.

    If ranks share the model, all of them call this, with a path that all can read. If one rank cannot read it, or
    finds another checkpoint there, all ranks raise before anything is changed.

    Args:
        path: A file from `save` or `torch.save`, or a folder.
        model: A model, a `PipelineStage`, or a list of them, as saved.
        optimizer: An optimizer, a list, or None to load the model alone.

    Returns:
        The other saved entries by name.

    Raises:
        UsageError: if the path is no checkpoint, or the file has no model. Also if an optimizer is given and the file
            has none, or if the file has another number of models or optimizers. For a folder, it raises before
            anything is changed if names or shapes differ.

    Example:
        >>> noria.save("run.pt", model, optimizer, step=100)
        >>> noria.load("run.pt", model, optimizer)
        {'step': 100}
    """
    model = modules_of(model)
    shared = _shared(model, optimizer)
    for run, sync, _ in shared:
        run.recover()
        sync.meet("load a checkpoint")
    everybody = [ranks for _, _, ranks in shared]
    with raised_by_all(everybody, "noria.load"):
        contents = None if os.path.isdir(path) else _checked(path)
        pairs = [] if contents is None else _pairs(path, contents, model, optimizer)
        lines = [describe_folder(path)] if contents is None else ["a file", *_lines(pairs)] if shared else []
    refuse_others(everybody, lines)
    if contents is None:
        return load_folder(path, model, optimizer, everybody)
    for target, state in pairs:
        target.load_state_dict(state)
    _warn_of_another_place(contents.get(_OF_THE_RUN), optimizer)
    return {
        key: value
        for key, value in contents.items()
        if key not in ("model", "optimizer") and not (key == _OF_THE_RUN and _is_of_the_run(value))
    }


def _is_of_the_run(entry: object) -> bool:
    return isinstance(entry, Mapping) and _PLACES in entry


def _places(optimizer: Optimizers | None) -> list[str]:
    """Returns where torch's code runs updates: "cpu", "cuda", or both. Empty: noria's kernels run all of them."""
    drivers = [driver for each in as_list(optimizer) if (driver := driver_of(each)) is not None]
    return sorted({place for driver in drivers for place in driver.places_of_torch()})


def _warn_of_another_place(recorded: object, optimizer: Optimizers | None) -> None:
    """Warns if torch's code has run updates elsewhere until now, and so with other bits."""
    before = recorded[_PLACES] if isinstance(recorded, Mapping) and _is_of_the_run(recorded) else None
    now = _places(optimizer)
    if before and now and before != now:
        warnings.warn(
            f"noria.load: torch's code has run updates on {' and '.join(before)} until now, and will run them on "
            f"{' and '.join(now)}, which has other last bits. To go on as before, choose "
            f'optimizer_device="{"host" if before == ["cpu"] else "device"}"',
            stacklevel=3,
        )


def _pairs(
    path: str | os.PathLike[str], contents: dict[str, object], model: Models, optimizer: Optimizers | None
) -> list[tuple[nn.Module | Optimizer, dict[str, Any]]]:
    """Returns pairs: a model or optimizer, and the state dict to load into it."""
    pairs: list[tuple[nn.Module | Optimizer, dict[str, Any]]] = []
    for name, wanted in (("model", model), ("optimizer", optimizer)):
        if wanted is None:
            continue
        if name not in contents:
            raise usage_error(
                f"a checkpoint with {name!r}", f"{sorted(contents)} in {path}", f"give noria.save the {name}, too"
            )
        targets, states = as_list(wanted), as_list(contents[name])
        if len(targets) != len(states):
            raise usage_error(f"{len(states)} of {name!r}, as in {path}", str(len(targets)), "give what was saved")
        for state in states:
            if not isinstance(state, Mapping):
                raise usage_error(f"{name!r} in {path} to be a state_dict()", type(state).__qualname__, _GIVE)
        if name == "optimizer":
            states = [
                state if driver_of(target) is not None else plain_state_dict(state)
                for target, state in zip(targets, states, strict=True)
            ]
        pairs += zip(targets, states, strict=True)
    return pairs


def _lines(pairs: list[tuple[nn.Module | Optimizer, dict[str, Any]]]) -> list[str]:
    """Returns lines about what is loaded into wrapped objects, for the ranks to compare."""
    lines: list[str] = []
    for target, state in pairs:
        if isinstance(target, Optimizer) and (driver := driver_of(target)) is not None:
            slot_of = driver.context.slot_of
            names = [slot_of[p].name for group in target.param_groups for p in group["params"]]
            lines += lines_of_optimizer(names, state)
        elif isinstance(target, nn.Module) and wrapped_by(target) is not None:
            lines += lines_of_model(target, state)
    return lines


def _state_of(value: Any, unread: UnreadTensors) -> Any:
    if isinstance(value, list | tuple):
        return [_state_of(each, unread) for each in value]
    with for_file(value, unread):
        return value.state_dict()


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    contents: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return contents


def _checked(path: str | os.PathLike[str]) -> dict[str, Any]:
    """As `_read`. Raises UsageError if the file is no checkpoint."""
    expected = f"a checkpoint of one file in {path}"
    try:
        contents = _read(path)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise usage_error(expected, f"{type(error).__name__}: {error}", _GIVE) from error
    if not isinstance(contents, dict):
        raise usage_error(expected, f"one {type(contents).__qualname__}", _GIVE)
    return contents


def _unreadable(contents: dict[str, object]) -> tuple[str, str]:
    """Returns the entry that `load` would refuse, and the reason."""
    for name, value in contents.items():
        with contextlib.suppress(pickle.UnpicklingError):
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            torch.load(file, map_location="meta", weights_only=True)
            continue
        return name, type(value).__qualname__ if name not in ("model", "optimizer") else "an entry of its state_dict()"
    return "the whole", "each entry can be read by itself"
