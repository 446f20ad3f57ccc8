"""Says which code updates each unit: noria's kernels or torch, and refuses what neither can do."""

from __future__ import annotations

import dataclasses

import torch
from torch.optim import Optimizer

from noria._errors import usage_error
from noria.model.layout import HomeUnit
from noria.model.shadow_optimizer import part_values
from noria.model.update_rules import ELEMENTWISE, SEPARABLE, FusedRule, choose, fused_units, rule_of, why_not_fused
from noria.policy import Policy

__all__ = ["Kernels"]

_KERNELS = {
    "fused": "noria's fused kernel",
    "torch": "torch, unit by unit",
    "whole": "torch, all at once inside step() (not known to be separable)",
}


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Holds the optimizers of one wrap call, and which code updates each unit."""

    units: list[HomeUnit]
    policy: Policy
    optimizers: list[Optimizer]
    by_optimizer: list[str]
    """"fused", "torch" or "whole"; see update_rules.py, Note [Who updates a unit]."""
    fused: dict[int, tuple[FusedRule, ...]]
    """By index of a unit that noria's kernels update: the rules that may update it."""

    @classmethod
    def of(cls, units: list[HomeUnit], optimizers: list[Optimizer], policy: Policy) -> Kernels:
        kernels = [choose(optimizer, policy.kernel, policy.optimizer_device) for optimizer in optimizers]
        return cls(units, policy, optimizers, kernels, fused_units(units, optimizers, kernels))

    def held(self) -> list[set[torch.Tensor]]:
        """Returns the parameters of each optimizer."""
        return [{p for group in optimizer.param_groups for p in group["params"]} for optimizer in self.optimizers]

    def mark_split(self) -> None:
        """Sets which parameters keep their master as a working copy and low bits."""
        for unit in self.units if self.policy.dtype is not None else ():
            for slot in unit.parameters:
                slot.is_split = slot.has_master and unit.index in self.fused

    def left_to_torch(self, optimizer: Optimizer) -> tuple[list[str], int]:
        """Returns the names of this optimizer's units that noria's kernels do not update, and how many units it has."""
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        own = [
            unit for unit in self.units if any(slot.trainable and slot.parameter in held for slot in unit.parameters)
        ]
        return [unit.name for unit in own if unit.index not in self.fused], len(own)

    # ---- texts ----

    def names(self) -> list[str]:
        """Returns texts, by optimizer: which code updates, and why not noria's own if torch does."""
        return [self._name(*each) for each in zip(self.optimizers, self.by_optimizer, strict=True)]

    def _name(self, optimizer: Optimizer, kernel: str) -> str:
        name = f"{type(optimizer).__name__} by {_KERNELS[kernel]}"
        if kernel == "fused" or self.policy.optimizer_device == "device":
            name += ", on the device" if self.policy.optimizer_device == "device" else ", on the host pool"
        if (
            kernel == "fused"
            and self.policy.state_dtype != "fp32"
            and any(rule_of(type(optimizer), group).keys for group in optimizer.param_groups)
        ):
            name += f", with moments in {self.policy.state_dtype}"
        if kernel == "torch" and self.policy.kernel != "torch":
            why = why_not_fused(type(optimizer), optimizer.param_groups, self.policy.optimizer_device)
            return f"{name} (no kernel of noria's covers it: {why})"
        if kernel == "fused":
            left, num_units = self.left_to_torch(optimizer)
            if left and len(left) == num_units:
                cls = type(optimizer).__name__
                why = "every unit is shared with another optimizer, or of another dtype or layout"
                return f"{cls} by {_KERNELS['torch']} ({why})"
            if left:
                return (
                    f"{name}; {len(left)} of {num_units} units by torch, for another optimizer, their dtype or layout: "
                    + (", ".join(left[:3]) + (", ..." if len(left) > 3 else ""))
                )
        return name

    def fp32_states(self) -> list[str]:
        """Returns notes: state that does not have the policy's dtype, because torch makes it."""
        notes: list[str] = []
        if self.policy.state_dtype == "fp32":
            return notes
        for optimizer in self.optimizers:
            left, num_units = self.left_to_torch(optimizer)
            if left:
                name = type(optimizer).__name__
                notes.append(
                    f"{name} keeps its own state, not {self.policy.state_dtype}, of {len(left)} of {num_units} units: "
                    "torch updates them"
                )
        return notes

    def updates_bfloat16(self) -> bool:
        """Returns True if weights are updated in bfloat16, without fp32 masters."""
        held: set[torch.Tensor] = set().union(*self.held())
        return self.policy.dtype is None and any(
            slot.trainable and slot.dtype is torch.bfloat16 and slot.parameter in held
            for unit in self.units
            for slot in unit.parameters
        )

    # ---- refusals ----

    def check_states(self) -> None:
        """Refuses optimizer state of earlier steps that noria's kernels cannot read."""
        slots = {slot.parameter: slot for unit in self.units if unit.index in self.fused for slot in unit.parameters}
        for optimizer, kernel in zip(self.optimizers, self.by_optimizer, strict=True):
            for group in optimizer.param_groups if kernel == "fused" else ():
                for parameter in group["params"]:
                    if parameter in slots and dict.__contains__(optimizer.state, parameter):  # a look would need memory
                        rule, slot = rule_of(type(optimizer), group), slots[parameter]
                        rule.refuse_broken_state(slot, part_values(slot, dict.__getitem__(optimizer.state, parameter)))

    def check_updates_in_backward(self) -> None:
        """Refuses units that update="backward" cannot update."""
        expected = 'update="backward" with each unit updated as a whole, by one kernel or by torch'
        remedy = 'wrap with update="auto"'
        if not self.optimizers:
            raise usage_error(expected, "no optimizer", f"give noria.wrap the optimizer in the same call, or {remedy}")
        for optimizer, kernel in zip(self.optimizers, self.by_optimizer, strict=True):
            if kernel == "whole":
                raise usage_error(expected, f"{type(optimizer).__name__}, which may look at all parameters", remedy)
        held = self.held()
        for unit in self.units:
            own = {slot.parameter for slot in unit.parameters if slot.trainable}
            if not own:
                continue
            if len(self.fused.get(unit.index, ())) > 1:
                raise usage_error(expected, f'"{unit.name}", which several rules update', remedy)
            if not any(own <= parameters for parameters in held):
                most = max(held, key=lambda parameters: len(own & parameters))
                name = next(slot.name for slot in unit.parameters if slot.trainable and slot.parameter not in most)
                raise usage_error(
                    expected,
                    f'"{name}", which no optimizer holds, or another one than the rest of "{unit.name}"',
                    f"freeze it or give it to the optimizer, or {remedy}",
                )

    def check_shared(self) -> None:
        """Refuses optimizers that ranks cannot share."""
        if self.policy.update == "backward" and any(
            unit.index not in self.fused for unit in self.units if any(slot.trainable for slot in unit.parameters)
        ):
            raise usage_error(
                'update="backward" by noria\'s own kernels, if ranks share the model',
                "units that torch updates",
                'wrap with update="auto"',
            )
        for optimizer in self.optimizers:
            if type(optimizer) not in ELEMENTWISE:
                looks = "looks" if type(optimizer) in SEPARABLE else "may look"
                raise usage_error(
                    "an optimizer that updates each element by itself, if ranks share the model",
                    f"{type(optimizer).__name__}, which {looks} at whole tensors, and a rank has but a part of each",
                    "use AdamW, another of torch.optim that works element by element, or noria.optim.Lion",
                )
