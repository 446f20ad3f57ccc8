"""Checkpoint folders of `torch.distributed.checkpoint`, read by `noria.load`: what does not fit is refused first.

Entries that noria alone writes, and hyperparameters, may be missing: files of plain torch's are read as well. No code
of a file is run.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from noria._errors import UsageError, usage_error
from noria.custody import wrapped_by
from noria.moments import ROUNDING_STEP
from noria.parts import Part
from noria.sharded import sharded_state

if TYPE_CHECKING:
    from noria.ranks import Ranks

__all__ = ["load_folder"]

_NORIAS_OWN = ("low_bits", ROUNDING_STEP)


def load_folder(path: str | os.PathLike[str], model: Any, optimizer: Any) -> dict[str, Any]:
    """As `noria.load`."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

    takers = sharded_state(model, optimizer)
    wrapped = wrapped_by(model[0] if isinstance(model, list | tuple) else model)
    ranks = wrapped.ranks if wrapped is not None else None
    wanted, paths = flatten_state_dict({name: taker.state_dict() for name, taker in takers.items()})
    metadata = FileSystemReader(path).read_metadata()
    saved: dict[str, Any] = dict(metadata.state_dict_metadata)
    paths = {**paths, **(metadata.planner_data or {})}
    paths = {name: paths.get(name, (name,)) for name in {*wanted, *saved}}
    targets = {name: value for name, value in wanted.items() if name in saved}
    if optimizer is not None and all(paths[name][0] != "optimizer" for name in saved):
        raise usage_error(f"a checkpoint with an optimizer in {path}", "one without", "load the model alone")
    _refuse_missing(wanted.keys() - targets.keys(), saved, paths)
    owners = {paths[name][:-1] for name in wanted}
    for name in sorted(saved.keys() - targets.keys()):
        place = paths[name]
        if place[0] == "optimizer" and optimizer is None:
            continue
        is_own = _is_of(place, "state") and place[-1] in _NORIAS_OWN and place[:-1] in owners
        if place[0] == "model" or (_is_of(place, "state") and not is_own):
            raise usage_error("a checkpoint of this model and optimizer", f'"{name}" in {path}', "give what was saved")
        if not is_own:
            targets[name] = None
    for name, value in targets.items():
        size = getattr(saved[name], "size", None)  # None: not a tensor
        if isinstance(value, Part):
            if size != value.shape:
                found = "no tensor" if size is None else f"shape {tuple(size)}"
                raise usage_error(
                    f'"{name}" with shape {tuple(value.shape)}', f"{found} in {path}", "load it into the same model"
                )
        else:
            targets[name] = None if size is None else torch.empty(size, dtype=saved[name].properties.dtype)
    groups = [name for name in targets if _is_of(paths[name], "param_groups") and paths[name][-1] == "params"]
    for name, value in _read(path, dict.fromkeys(groups), ranks).items():
        if value != wanted.get(name):
            raise usage_error(
                f"{name} with the parameters of this optimizer", f"others in {path}", "give an optimizer as was saved"
            )
    nested = unflatten_state_dict(_read(path, targets, ranks), {name: paths[name] for name in targets})
    for name, taker in takers.items():
        taker.load_state_dict(nested.pop(name, {}))
    return nested


def _is_of(place: tuple[Any, ...], which: str) -> bool:
    """In an optimizer's "state" or "param_groups"; of several optimizers each has a number before that."""
    return place[0] == "optimizer" and place[2 if str(place[1]).isdigit() else 1] == which


def _refuse_missing(missing: Iterable[str], saved: Iterable[str], paths: dict[str, tuple[Any, ...]]) -> None:
    begun = {paths[name][:-1] for name in saved}
    for name in sorted(missing):
        place = paths[name]
        if place[0] == "optimizer" and place[-1] != "params" and not _is_of(place, "state"):
            continue  # a hyperparameter stays as it is
        if _is_of(place, "state") and (place[:-1] not in begun or place[-1] in _NORIAS_OWN):
            continue  # saved before it was made, or by plain torch
        raise usage_error(f'a checkpoint with "{name}"', "one without", "load it into the same model and optimizer")


def _read(path: str | os.PathLike[str], targets: dict[str, Any], ranks: Ranks | None) -> dict[str, Any]:
    """Each rank reads by itself, for they may be some of the world's only; what one fails with, all do."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    if not targets:
        return targets
    failure: BaseException | None = None
    try:
        planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(targets, checkpoint_id=path, planner=planner, no_dist=True)
    except (Exception, CheckpointException) as error:
        failure = error
    if ranks is not None:
        with contextlib.suppress(UsageError) if failure is not None else contextlib.nullcontext():
            ranks.agree(["noria.load" if failure is None else f"noria.load failed: {failure}"])
    if failure is not None:
        raise failure
    return targets
