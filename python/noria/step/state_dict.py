"""Makes and loads the state dict of a wrapped optimizer: torch's format plus the low bits of the masters."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from noria._errors import usage_error
from noria.dist.load_fingerprint import lines_of_optimizer, refuse_others
from noria.dist.ranks import raised_by_all
from noria.model.layout import HomeParameter
from noria.model.moment_formats import (
    MOMENT_OF,
    SCALES_KEY,
    are_low_bits,
    coded_state_dict,
    named_codes,
    plain_state_dict,
    plain_values,
)
from noria.model.optimizer_classes import original_class
from noria.model.shadow_optimizer import part_values
from noria.model.update_rules import rule_of
from noria.runtime.unread_tensors import UnreadTensors
from noria.step.optimizer_state import HomeState, whole_states
from noria.step.param_groups import ParamGroups
from noria.step.parameter_swap import exchange
from noria.step.state_view import OptimizerState

__all__ = ["load_state_dict", "state_dict"]


def state_dict(
    members: ParamGroups, home_state: HomeState, *, for_file: bool = False, unread: UnreadTensors | None = None
) -> dict[str, Any]:
    """`for_file`: moments of "8bit" stay codes. Ranks and the user's hooks get floats also then.

    `unread` makes stand-ins for state that lies in files. Ranks and the user's hooks get tensors also then.
    """
    optimizer = members.optimizer
    has_hooks = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
    is_read = bool(has_hooks) or members.context.ranks is not None
    if unread is None or is_read:
        unread = None
        home_state.refuse_copies(is_plain=False)
        home_state.look(None)
    else:
        home_state.settle(None)
    state = optimizer.state
    has_codes = home_state.dtype == "8bit"
    keeps_codes = has_codes and for_file and not is_read
    if has_codes and not keeps_codes:
        optimizer.state = defaultdict(dict, {key: _plain(value) for key, value in state.items()})
    elif unread is not None and state is home_state.shown:
        optimizer.state = defaultdict(dict, OptimizerState.unwatched.items(state))
    try:
        result = original_class(type(optimizer)).state_dict(optimizer)
    finally:
        optimizer.state = state
    slots = list(members.slots())
    states = {
        slot.index: home_state.with_low_bits(slot, result["state"][number], brings=unread is None)
        for number, slot in enumerate(slots)
        if number in result["state"]
    }
    whole = whole_states(members.context, home_state.sync, states)
    result["state"] |= {number: whole[slot.index] for number, slot in enumerate(slots) if number in result["state"]}
    if unread is not None:
        result["state"] = {key: _stood_in(home_state, values, unread) for key, values in result["state"].items()}
    return coded_state_dict(result) if keeps_codes else result


def _stood_in(home_state: HomeState, values: Any, unread: UnreadTensors) -> Any:
    return home_state.unread(values, unread) if isinstance(values, dict) else values


def _plain(values: Any) -> Any:
    return plain_values(values) if isinstance(values, dict) else values


def load_state_dict(members: ParamGroups, state: HomeState, state_dict: dict[str, Any]) -> None:
    optimizer = members.optimizer
    state.sync.meet("load the optimizer's state")
    state.settle(None)
    if optimizer.state is not state.shown:
        state.take_over()
    state_dict = _compared(members, state_dict)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.inference_mode(False), torch.no_grad():
        state_dict = _parts_of(members, state_dict, parameters)
        _refuse_broken(members, state_dict, parameters)
        state_dict, low_bits = _without(state_dict, parameters, _low_bits_key)
        state_dict, codes = _without(state_dict, parameters, _code_keys)
        loaded = _loaded_by_torch(members, state, state_dict)
        try:
            dict.clear(state.shown)
            for key, values in loaded.items():
                if values or key not in members.context.slot_of:
                    dict.__setitem__(state.shown, key, values)
            state.part()
            for parameter in parameters:
                slot = members.context.slot_of[parameter]
                members.context.engine.home.access_home(slot.unit, True, frozen=False)
                low = low_bits.get(parameter, {}).get("low_bits")
                if are_low_bits(low) and slot.has_master:
                    state.masters.set_low_bits(slot, low)
                if parameter in codes:
                    state.shown.unsettled(parameter).update(_fitting(members, state, slot, codes[parameter]))
                state.adopt(slot)
        except BaseException:
            members.context.engine.mark_torn("a load of the optimizer's state broke off")
            raise


def _compared(members: ParamGroups, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Runs the user's pre-hooks and returns the resulting state dict. Ranks and hooks get floats in place of codes.

    Raises UsageError on all ranks if the ranks have different state dicts.
    """
    optimizer, ranks = members.optimizer, members.context.ranks
    met = [] if ranks is None else [ranks]
    hooks = optimizer._optimizer_load_state_dict_pre_hooks
    wants_floats = ranks is not None or bool(hooks)
    with raised_by_all(met, "optimizer.load_state_dict"):
        state_dict = plain_state_dict(state_dict) if wants_floats else named_codes(state_dict)
        for before in hooks.values():
            changed = before(optimizer, state_dict)
            state_dict = changed if changed is not None else state_dict
        lines = lines_of_optimizer([slot.name for slot in members.slots()], state_dict) if met else []
    refuse_others(met, lines)
    return state_dict


def _parts_of(members: ParamGroups, state_dict: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Returns the parts of a whole state that this rank keeps at home."""
    if members.context.ranks is None:
        return state_dict
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    state = dict(state_dict["state"])
    for number, parameter in zip(numbers, parameters, strict=False):
        if isinstance(state.get(number), dict):
            state[number] = part_values(members.context.slot_of[parameter], state[number])
    return {**state_dict, "state": state}


def _refuse_broken(members: ParamGroups, state_dict: dict[str, Any], parameters: list[nn.Parameter]) -> None:
    """Raises UsageError if noria's kernels cannot read the state. Runs before anything is changed.

    torch itself refuses a wrong number of groups or parameters.
    """
    groups, saved = members.optimizer.param_groups, state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
        return
    numbers = iter(parameters)
    for group, its in zip(groups, saved, strict=True):
        rule = rule_of(members.cls, {**group, **its}) if members.kernel == "fused" else None
        for number in its["params"]:
            slot = members.context.slot_of[next(numbers)]
            values = state_dict["state"].get(number)
            if not isinstance(values, dict):
                continue
            low = values.get("low_bits")
            if slot.has_master and are_low_bits(low) and low.shape != slot.like.shape:
                raise usage_error(
                    f'low_bits of "{slot.name}" in the optimizer\'s state with shape {tuple(slot.like.shape)}',
                    f"shape {tuple(low.shape)}",
                    "load a state that this optimizer has made for this model",
                )
            if rule is not None and members.fuses(slot.unit):
                rule.refuse_broken_state(slot, values)


def _loaded_by_torch(members: ParamGroups, state: HomeState, state_dict: dict[str, Any]) -> dict[Any, Any]:
    """Lets the optimizer's own `load_state_dict` check and cast the state. Returns the state by real parameter.

    During that call the optimizer holds stand-ins on the CPU, with the dtypes of the home. The call replaces the
    parameter groups, as it does in plain PyTorch. If it raises, the optimizer has its old groups and state.
    """
    optimizer, slot_of = members.optimizer, members.context.slot_of
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    owners: dict[nn.Parameter, nn.Parameter] = {}

    def stand_in(parameter: nn.Parameter) -> nn.Parameter:
        if parameter in slot_of and parameter not in stand_ins:
            stand_ins[parameter] = _stand_in(slot_of[parameter])
            owners[stand_ins[parameter]] = parameter
        return stand_ins.get(parameter, parameter)

    before = optimizer._optimizer_load_state_dict_pre_hooks
    after = optimizer._optimizer_load_state_dict_post_hooks
    driver = optimizer._noria  # type: ignore[attr-defined]
    groups = optimizer.param_groups
    kept = [(group, dict(group), list(group["params"])) for group in groups]
    shown = [(stand_in(key), values) for key, values in OptimizerState.unwatched.items(state.shown)]

    def owner(parameter: nn.Parameter) -> nn.Parameter:
        return owners.get(parameter, parameter)

    try:
        optimizer.state = defaultdict(dict, shown)  # a copy, so that what fails or is interrupted leaves the real one
        exchange(optimizer, stand_in)
        del optimizer._noria  # type: ignore[attr-defined]
        _set_load_hooks(optimizer, OrderedDict(), OrderedDict())  # hooks must see real parameters, so they run outside
        original_class(type(optimizer)).load_state_dict(optimizer, state_dict)
        exchange(optimizer, owner)
        return dict(optimizer.state)
    except BaseException:
        exchange(optimizer, owner)
        optimizer.param_groups = groups
        for group, values, parameters in kept:
            group.clear()
            group.update(values)
            group["params"][:] = parameters
        raise
    finally:
        optimizer.state = state.shown
        optimizer._noria = driver  # type: ignore[attr-defined]
        _set_load_hooks(optimizer, before, after)


def _set_load_hooks(optimizer: Optimizer, before: OrderedDict[Any, Any], after: OrderedDict[Any, Any]) -> None:
    optimizer._optimizer_load_state_dict_pre_hooks = before
    optimizer._optimizer_load_state_dict_post_hooks = after


def _stand_in(slot: HomeParameter) -> nn.Parameter:
    """Returns a parameter with the shape and dtype of the home's tensor, and memory for one element only.

    torch casts loaded state to the dtype of this stand-in: fp32 if the parameter has a master.
    """
    dtype = torch.float32 if slot.has_master else slot.dtype
    like = torch.empty((), dtype=dtype, device="cpu").expand(slot.like.shape)
    return nn.Parameter(like, requires_grad=slot.trainable)


def _without(
    state_dict: dict[str, Any], parameters: list[nn.Parameter], chosen: Callable[[dict[str, Any]], set[str]]
) -> tuple[dict[str, Any], dict[nn.Parameter, dict[str, Any]]]:
    """Splits the `chosen` keys from the rest of the state, which torch casts to the parameter's dtype.

    Low bits and codes would not survive that cast.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    rest, taken = dict(state_dict["state"]), {}
    for number, parameter in zip(numbers, parameters, strict=False):
        values = rest.get(number)
        if isinstance(values, dict) and (keys := chosen(values)):
            taken[parameter] = {key: value for key, value in values.items() if key in keys}
            rest[number] = {key: value for key, value in values.items() if key not in keys}
    return {**state_dict, "state": rest}, taken


def _low_bits_key(values: dict[str, Any]) -> set[str]:
    return {"low_bits"} & values.keys()


def _code_keys(values: dict[str, Any]) -> set[str]:
    coded = [key for key in MOMENT_OF if SCALES_KEY[key] in values]
    return {*coded, *(SCALES_KEY[key] for key in coded)}


def _fitting(members: ParamGroups, state: HomeState, slot: HomeParameter, codes: dict[str, Any]) -> dict[str, Any]:
    """Returns codes if the home has codes of this parameter, or floats in the dtype that torch would cast to."""
    has_codes = members.fuses(slot.unit) and state.dtype == "8bit"
    if has_codes and all(state.is_planned(slot, key) for key in codes):
        return codes
    return {key: value.to(_stand_in(slot).dtype) for key, value in plain_values(codes).items()}
