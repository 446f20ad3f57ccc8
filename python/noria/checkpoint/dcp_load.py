"""Reads checkpoint folders of `torch.distributed.checkpoint` for `noria.load`, and refuses unfit ones first.

Hyperparameters, and entries that only noria writes, may be missing: checkpoints of plain torch can be read as well. No
code from a file is run.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from noria._errors import usage_error
from noria.checkpoint.dcp_state import parts_of
from noria.dist.ranks import Ranks, raised_by_all
from noria.dist.shard_tensor import ShardTensor
from noria.model.update_rules import NORIAS_OWN
from noria.step.sharded_state import UNKNOWN

if TYPE_CHECKING:
    import io

    from torch.distributed.checkpoint.planner import ReadItem
    from torch.distributed.checkpoint.stateful import Stateful

__all__ = ["describe_folder", "load_folder"]


def describe_folder(path: str | os.PathLike[str]) -> str:
    """Returns a line about the folder that ranks compare: it differs for each save.

    Raises UsageError if the folder is no checkpoint.
    """
    try:
        with open(os.path.join(path, ".metadata"), "rb") as file:
            return f"a folder whose .metadata has checksum {zlib.crc32(file.read()):08x}"
    except FileNotFoundError:
        raise usage_error(
            f"a folder that torch.distributed.checkpoint.save has written in {path}",
            "one without .metadata",
            "give the folder of one checkpoint, whose save has ended on all ranks",
        ) from None


def load_folder(
    path: str | os.PathLike[str], model: object, optimizer: object, everybody: Sequence[Ranks]
) -> dict[str, Any]:
    """As `noria.load`, for a folder.

    `everybody`: the ranks that share what is loaded; they have met. Each rank reads by itself, because these ranks may
    be only some of the world.
    """
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    with raised_by_all(everybody, "noria.load"):
        takers = parts_of(model, optimizer)
        targets, paths = _targets(path, takers, optimizer is not None)
    with raised_by_all(everybody, "noria.load"):
        nested = unflatten_state_dict(_read(path, targets), {name: paths[name] for name in targets})
        for name, taker in takers.items():
            taker.load_state_dict(nested.pop(name, {}))
    return nested


def _targets(
    path: str | os.PathLike[str], takers: Mapping[str, Stateful], has_optimizer: bool
) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Returns the values to read, by name in the folder, and the place in the nested dict of each name.

    Raises UsageError if something does not fit.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    wanted, paths = flatten_state_dict({name: taker.state_dict() for name, taker in takers.items()})
    metadata = FileSystemReader(path).read_metadata()
    saved: dict[str, Any] = dict(metadata.state_dict_metadata)
    paths = {**paths, **(metadata.planner_data or {})}
    paths = {name: paths.get(name, (name,)) for name in {*wanted, *saved}}
    targets = {name: value for name, value in wanted.items() if name in saved}
    if has_optimizer and all(paths[name][0] != "optimizer" for name in saved):
        raise usage_error(f"a checkpoint with an optimizer in {path}", "one without", "load the model alone")
    _refuse_missing(wanted.keys() - targets.keys(), saved, paths)
    owners = {paths[name][:-1] for name in wanted}
    for name in sorted(saved.keys() - targets.keys()):
        place = paths[name]
        if place[0] == "optimizer" and not has_optimizer:
            continue
        is_own = _is_of(place, "state") and place[-1] in NORIAS_OWN and place[:-1] in owners
        if _is_of(place, "state") and not is_own and any(paths[each] == ("model", place[-2]) for each in wanted):
            raise usage_error(
                "a model that trains the same parameters as the one that was saved",
                f'"{place[-2]}" frozen, whose state is in {path}',
                "unfreeze it, and run a forward that trains before the load",
            )
        if place[0] == "model" or (_is_of(place, "state") and not is_own):
            raise usage_error("a checkpoint of this model and optimizer", f'"{name}" in {path}', "give what was saved")
        if not is_own:
            targets[name] = None
    for name, value in targets.items():
        size = getattr(saved[name], "size", None)  # None: no tensor
        if isinstance(value, ShardTensor):
            if size != value.shape:
                found = "no tensor" if size is None else f"shape {tuple(size)}"
                raise usage_error(
                    f'"{name}" with shape {tuple(value.shape)}', f"{found} in {path}", "load it into the same model"
                )
        else:
            targets[name] = (
                None if size is None else torch.empty(size, dtype=saved[name].properties.dtype, device="cpu")
            )
    groups = [name for name in targets if _is_of(paths[name], "param_groups") and paths[name][-1] == "params"]
    for name, value in _read(path, dict.fromkeys(groups)).items():
        if value != wanted.get(name):
            raise usage_error(
                f"{name} with the parameters of this optimizer", f"others in {path}", "give an optimizer as was saved"
            )
    return targets, paths


def _is_of(place: tuple[str | int, ...], which: str) -> bool:
    """Returns True if the place is in `which`, an optimizer's "state" or "param_groups".

    If there are several optimizers, the number of one stands before it.
    """
    return bool(place[0] == "optimizer" and place[2 if str(place[1]).isdigit() else 1] == which)


def _refuse_missing(missing: Iterable[str], saved: Iterable[str], paths: dict[str, tuple[str | int, ...]]) -> None:
    """Raises UsageError if something that is not in the folder must be."""
    begun = {paths[name][:-1] for name in saved if paths[name][-1] not in NORIAS_OWN}
    for name in sorted(missing):
        place = paths[name]
        if place[0] == "optimizer" and place[-1] != "params" and not _is_of(place, "state"):
            continue  # a hyperparameter that is missing keeps its value
        if _is_of(place, "state") and (place[:-1] not in begun or place[-1] in NORIAS_OWN):
            continue  # saved before the state was made, or by plain torch
        if place[-1] == UNKNOWN:
            raise usage_error(
                "an optimizer that has made its state", f'"{name}" not made yet', "take a step first, and load then"
            )
        raise usage_error(f'a checkpoint with "{name}"', "one without", "load it into the same model and optimizer")


def _read(path: str | os.PathLike[str], targets: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    class Planner(dcp.DefaultLoadPlanner):
        """Loads values that are no tensors as `torch.load` does with `weights_only`."""

        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    if not targets:
        return targets
    planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(targets, checkpoint_id=path, planner=planner, no_dist=True)
    except CheckpointException as error:  # it does not derive from Exception
        raise next(iter(error.failures.values()))[0] from None
    return targets
