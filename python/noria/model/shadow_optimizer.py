"""Makes workers: objects of an optimizer's original class, whose parameters are the home's or stand-ins."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from noria.model.layout import HomeParameter
from noria.model.optimizer_classes import original_class, step_of
from noria.model.update_rules import SEPARABLE

__all__ = ["dtype_at_home", "hyper_of", "is_array", "part_values", "predict_state", "worker_of"]

_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""State keys of the separable classes whose tensors have one number for the whole parameter."""


def predict_state(optimizer: Optimizer, slots: Iterable[HomeParameter]) -> dict[int, dict[str, Any]] | None:
    """Returns the state that the optimizer will keep, as {slot index: {key: value}}. Arrays are meta tensors.

    It runs the optimizer's own code on meta tensors. Returns None if the class is not separable, because its code may
    then have other effects, or if that code fails on meta tensors.
    """
    if original_class(type(optimizer)) not in SEPARABLE:
        return None
    stand_ins: dict[int, nn.Parameter] = {}
    groups = []
    of_parameter = {slot.parameter: slot for slot in slots}
    parameters = {slot.index: parameter for parameter, slot in of_parameter.items()}
    for group in optimizer.param_groups:
        members = []
        for parameter in group["params"]:
            slot = of_parameter.get(parameter)
            if slot is None or not slot.trainable:
                continue
            dtype = torch.float32 if slot.has_master else slot.dtype
            stand_in = nn.Parameter(
                torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device="meta")
            )
            stand_in.grad = torch.zeros_like(stand_in)
            stand_ins[slot.index] = stand_in
            members.append(stand_in)
        # The one-tensor code keeps the same state as the foreach and fused code, and needs no check of the device.
        one_by_one: dict[str, bool] = {key: False for key in ("foreach", "fused") if key in group}
        groups.append({**hyper_of(group), **one_by_one, "params": members})
    worker = worker_of(optimizer, groups)
    for index, stand_in in stand_ins.items():
        existing = optimizer.state.get(parameters[index])
        if existing:
            worker.state[stand_in] = {
                key: torch.empty_like(value, device="meta", dtype=dtype_at_home(of_parameter[parameters[index]], value))
                if is_array(key, value)
                else copy.deepcopy(value)
                for key, value in existing.items()
                if key != "low_bits"
            }
    try:
        step_of(type(worker))(worker)
    except Exception:  # some optimizers read values, so their state is only known after the first step
        return None
    return {index: dict(worker.state[stand_in]) for index, stand_in in stand_ins.items()}


def is_array(key: str, value: object) -> bool:
    """Returns True for a tensor of numbers about a parameter's elements. A 0-dim parameter has such tensors too."""
    return isinstance(value, torch.Tensor) and key not in _COUNTERS


def part_values(slot: HomeParameter, values: dict[str, Any]) -> dict[str, Any]:
    """Replaces whole tensors in a parameter's state by this rank's shards, if ranks share the model.

    A tensor that has the shape of a part stays as it is.
    """
    if slot.like.shape == slot.shape:
        return values
    return {
        key: slot.part_of(value).clone() if is_array(key, value) and value.shape == slot.shape else value
        for key, value in values.items()
    }


def dtype_at_home(slot: HomeParameter, value: torch.Tensor) -> torch.dtype:
    """Returns the dtype of a state tensor at home. Beside an fp32 master, floats of any dtype become fp32."""
    return torch.float32 if slot.has_master and value.is_floating_point() else value.dtype


def hyper_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a snapshot of a group's hyperparameters on the CPU, so that later edits affect the next step only."""
    return {key: _snapshot(value) for key, value in group.items() if key not in ("params", "param_names")}


def _snapshot(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (tuple, list):  # betas may be tensors
        return type(value)(map(_snapshot, value))
    return copy.copy(value)


def worker_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Returns an object of the optimizer's original class, with these groups, an empty state and no hooks."""
    cls = original_class(type(optimizer))
    worker = object.__new__(cls)
    for name, value in vars(optimizer).items():
        if name not in ("step", "_noria") and not name.startswith("_optimizer_"):
            worker.__dict__[name] = value
    for name in (
        "step_pre",
        "step_post",
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    ):
        worker.__dict__[f"_optimizer_{name}_hooks"] = OrderedDict()
    worker.param_groups = groups
    worker.state = defaultdict(dict)
    return worker
