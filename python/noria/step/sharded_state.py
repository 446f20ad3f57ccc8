"""Gives an optimizer's state as shards to `torch.distributed.checkpoint`, and takes loaded shards.

Entries are named by parameter, as in `torch.distributed.checkpoint.state_dict.get_state_dict`. The low bits of the
masters are an additional entry.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from noria.dist.shard_tensor import ShardTensor
from noria.model.layout import HomeParameter
from noria.model.moment_formats import ROUNDING_STEP, SCALES_KEY, plain_values
from noria.model.shadow_optimizer import dtype_at_home, is_array, predict_state
from noria.model.update_rules import rule_of
from noria.runtime.masters import Masters
from noria.runtime.state import RunState
from noria.step.optimizer_state import HomeState
from noria.step.param_groups import ParamGroups

__all__ = ["UNKNOWN", "OptimizerShards"]

UNKNOWN = "state, not known before a first step"


class OptimizerShards:
    """Saves and loads the state of one optimizer as shards.

    Before the first step, state of noria's kernels is saved as zeros. State that torch has not created yet is not
    saved, because torch creates it at the first step. Shards of that state exist only to load into.
    """

    def __init__(self, members: ParamGroups, state: HomeState, run: RunState, masters: Masters) -> None:
        self.run = run
        self.masters = masters
        self.members = members
        self.context = members.context
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        self.state.settle(None)
        entries: dict[str, dict[str, Any]] = {}
        groups = []
        unknown = self._unknown_yet()
        for group in self.members.optimizer.param_groups:
            slots = [self.context.slot_of[parameter] for parameter in group["params"]]
            for slot in slots:
                if slot.trainable and (found := self._entries(slot, group, unknown)):
                    entries[slot.name] = found
            hyper = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**hyper, "params": [slot.name for slot in slots]})
        return {"state": entries, "param_groups": groups}

    def load(self, state_dict: dict[str, Any]) -> None:
        """Loads hyperparameters and entries that are not shards. Shards are written when the checkpoint loads them."""
        optimizer, shown = self.members.optimizer, self.state.shown
        for group, its in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: copy.deepcopy(value) for key, value in its.items() if key != "params"})
        for slot in self.members.slots():
            its = state_dict["state"].get(slot.name, {})
            if not its.keys() - {"low_bits"}:
                dict.pop(shown, slot.parameter, None)
                continue
            rest = {key: value for key, value in its.items() if not isinstance(value, ShardTensor)}
            shown.unsettled(slot.parameter).update(copy.deepcopy(rest))

    def _unknown_yet(self) -> dict[int, dict[str, Any]]:
        """Returns the state that torch will create for parameters that it has not updated yet."""
        by_torch = [slot for slot in self.members.slots() if slot.trainable and not self.members.fuses(slot.unit)]
        unknown = [slot for slot in by_torch if not dict.get(self.state.shown, slot.parameter)]
        if not unknown:
            return {}
        predicted = predict_state(self.members.optimizer, unknown)
        if predicted is None:  # no checkpoint has UNKNOWN, so a load is refused
            return {slot.index: {UNKNOWN: torch.empty((), device="cpu")} for slot in unknown}
        return predicted

    def _entries(
        self, slot: HomeParameter, group: dict[str, Any], unknown: dict[int, dict[str, Any]]
    ) -> dict[str, Any]:
        kept = {
            key: value
            for key, value in (dict.get(self.state.shown, slot.parameter) or {}).items()
            if value is not None and key not in SCALES_KEY.values()
        }
        entries: dict[str, Any] = {}
        if self.members.fuses(slot.unit):
            rule = rule_of(self.members.cls, group)
            for key in rule.keys:
                held = kept.pop(key, None)
                is_float = isinstance(held, torch.Tensor) and held.is_floating_point()
                narrow = torch.bfloat16 if self.state.dtype == "bf16" else torch.float32
                dtype = held.dtype if is_float and held is not None else narrow
                entries[key] = self._part(slot, key, dtype, self._fused_reader(slot, key), torch.float32)
            begun = bool(kept) or dict.__contains__(self.state.shown, slot.parameter)
            if rule.counts_steps:
                entries["step"] = torch.as_tensor(kept.pop("step", 0.0), dtype=torch.float32, device="cpu").clone()
            elif rule.keys and self.state.dtype != "fp32":
                entries[ROUNDING_STEP] = kept.pop(ROUNDING_STEP, 1 if begun else 0)
        elif not kept:
            for key, value in unknown.get(slot.index, {}).items():
                if isinstance(value, torch.Tensor):
                    entries[key] = self._not_there_yet(slot, key, value)
        for key, value in kept.items():
            if is_array(key, value) and value.shape == slot.like.shape:
                entries[key] = self._part(slot, key, value.dtype, _reader(value), value.dtype)
            else:
                entries[key] = copy.deepcopy(value)
        if slot.has_master:
            masters = self.masters
            entries["low_bits"] = self._part(
                slot, "low_bits", torch.int16, lambda: slot.flat(masters.low_bits(slot)), torch.int16
            )
        return entries

    def _fused_reader(self, slot: HomeParameter, key: str) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            kept = dict.get(self.state.shown, slot.parameter) or {}
            if kept.get(key) is None:
                return torch.zeros(slot.like.numel(), device="cpu")
            own = {name: kept[name] for name in (key, SCALES_KEY[key]) if name in kept}
            return slot.flat(plain_values(own)[key])

        return read

    def _not_there_yet(self, slot: HomeParameter, key: str, value: torch.Tensor) -> ShardTensor:
        """Returns a shard that can only be loaded. Of `value` only shape, strides and dtype are used."""
        if is_array(key, value):
            dtype = dtype_at_home(slot, value)
            return self._part(slot, key, dtype, _nothing, dtype, is_saved=False)

        def write(flat: torch.Tensor) -> None:
            self.state.shown.unsettled(slot.parameter)[key] = flat.view(value.shape)

        return ShardTensor.of(value.shape, value.stride(), value.dtype, read=_nothing, write=write, is_saved=False)

    def _part(
        self,
        slot: HomeParameter,
        key: str,
        dtype: torch.dtype,
        read: Callable[[], torch.Tensor],
        landing: torch.dtype,
        is_saved: bool = True,
    ) -> ShardTensor:
        def write(flat: torch.Tensor) -> None:
            self.run.require_loadable("a load of optimizer state")
            self.context.engine.home.access_home(slot.unit, True, frozen=False)
            value = flat.as_strided(slot.like.shape, slot.like.stride())
            with torch.no_grad():
                if key == "low_bits":
                    self.masters.set_low_bits(slot, value)
                else:
                    self.state.shown.unsettled(slot.parameter)[key] = value
                    self.state.adopt(slot)

        def before_read() -> None:
            self.run.require_consistent("a save of optimizer state", of_state=True)
            self.context.engine.home.access_home(slot.unit, False)

        return ShardTensor.of(
            slot.shape,
            slot.strides,
            dtype,
            first=slot.first,
            count=slot.like.numel(),
            read=lambda: self.context.files.copied(slot.unit, read),
            write=write,
            before_read=before_read,
            landing_dtype=landing,
            is_saved=is_saved,
        )


def _nothing() -> torch.Tensor:
    raise AssertionError("what is not saved is not read")


def _reader(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: HomeParameter.flat(value.detach().to("cpu"))
