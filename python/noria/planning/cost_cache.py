"""Keeps measured costs in the user's cache folder: the next run of the same model on the same machine starts with them.

The folder is `$NORIA_CACHE`, else `noria` in `$XDG_CACHE_HOME` or in ~/.cache. If `NORIA_CACHE` is set to nothing,
there is none. A file is named by the model and the machine, and says which these are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from noria import _C
from noria._version import __version__
from noria.host.processor import cpu_name
from noria.planning.measured_costs import MeasuredCosts
from noria.planning.wrap_plan import WrapPlan

__all__ = ["KnownCosts", "cache_folder", "load_costs", "save_costs"]


@dataclasses.dataclass(frozen=True)
class KnownCosts:
    """Holds costs and where they are from. `note` says why a file was not used."""

    costs: MeasuredCosts | None = None
    measured: str = ""
    """The day, and the inputs of a forward, of the run that has measured them."""
    note: str = ""


def cache_folder() -> Path | None:
    """Returns the folder, which need not exist. None: costs are not kept."""
    if (given := os.environ.get("NORIA_CACHE")) is not None:
        return Path(given) if given else None
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noria"
    except RuntimeError:  # this user has no home directory
        return None


def load_costs(planned: WrapPlan) -> KnownCosts:
    """Returns the costs of this model on this machine, if a run has kept them."""
    if (folder := cache_folder()) is None:
        return KnownCosts()
    whose = _whose(planned)
    path = _path(folder, whose)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return KnownCosts()
    except (OSError, ValueError, RecursionError):
        return KnownCosts(note=f"costs in {path} cannot be read, and are not used")
    try:
        if found["of"] != whose:
            return KnownCosts(note=f"costs in {path} are those of another model or machine, and are not used")
        return KnownCosts(_checked(found["costs"], len(planned.units)), str(found["measured"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return KnownCosts(note=f"costs in {path} are damaged, and are not used")


def save_costs(planned: WrapPlan, costs: MeasuredCosts, inputs: str) -> str:
    """Keeps costs for the next run. Returns why it cannot; empty if it can.

    `inputs`: the shape that forwards had.
    """
    if (folder := cache_folder()) is None:
        return ""
    whose = _whose(planned)
    path = _path(folder, whose)
    measured = f"on {datetime.date.today()}, inputs of {inputs}"
    text = json.dumps({"of": whose, "measured": measured, "costs": dataclasses.asdict(costs)}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".costs")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)  # another process reads the old file or the new one
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        return f"costs are not kept for the next run: {path.parent}: {error.strerror}"
    return ""


def _path(folder: Path, whose: dict[str, Any]) -> Path:
    return folder / "costs" / (hashlib.sha256(json.dumps(whose, sort_keys=True).encode()).hexdigest()[:32] + ".json")


def _whose(planned: WrapPlan) -> dict[str, Any]:
    """Returns what costs depend on, but for the inputs."""
    device = planned.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else device.type
    policy = planned.policy
    names = ("activations", "dtype", "folders", "kernel", "state_dtype", "update")
    options = {each: str(getattr(policy, each)) for each in names}
    units = [
        [unit.name, [[slot.name, list(slot.shape), str(slot.dtype), slot.trainable] for slot in unit.parameters]]
        for unit in planned.units
    ]
    num_shards = max(unit.num_shards for unit in planned.units)
    threads = torch.get_num_threads()
    machine = {"cpu": cpu_name(), "cores": _C.num_usable_cpus(), "threads": threads, "device": name}
    versions = {"noria": __version__, "torch": torch.__version__}
    how = {"policy": options, "updates": planned.kernel_names, "shards": num_shards}
    return {**machine, **versions, **how, "units": units}


def _checked(found: dict[str, Any], num_units: int) -> MeasuredCosts:
    """Returns costs from a file. Raises ValueError, TypeError or KeyError if they make no sense."""
    costs = MeasuredCosts(**found)
    numbers: list[float] = [costs.draft_gib_s, costs.both_ways_gib_s, costs.host_gib_s, costs.device_update_gib_s]
    numbers += [costs.hooks_us, costs.workspace, costs.backwards, costs.forwards, costs.elements]
    for by_unit in (costs.forward_us, costs.backward_us, costs.saved or [0] * num_units):
        if len(by_unit) != num_units:
            raise ValueError(by_unit)
        numbers += by_unit
    if len(costs.inputs or [0] * num_units) != num_units:
        raise ValueError(costs.inputs)
    numbers += [size + 1 for size in costs.inputs]  # -1: there are none
    for by_name in (costs.gib_s, costs.latency_us, costs.saved_by, costs.by_threads_gib_s):
        numbers += by_name.values()
    if not all(isinstance(each, int | float) and math.isfinite(each) and each >= 0 for each in numbers):
        raise ValueError(numbers)
    return costs
