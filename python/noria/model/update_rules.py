"""Chooses the code that updates each unit, and describes the rules of noria's own kernels.

A rule names the state that an optimizer keeps, and makes the scalars of a step.

Note [Who updates a unit]. For each optimizer of a wrap call, noria chooses the first of these that it can:

- noria's fused kernels, if they cover the optimizer and `Policy.kernel` is not "torch";
- the real torch optimizer unit by unit, if its class is separable;
- the real torch optimizer as a whole.

A unit is fused if its dtypes allow it, all optimizers that hold parts of it are fused, and no parameter is held twice.
For Adafactor its parameters must be contiguous, too, and for Muon contiguous matrices.
Otherwise torch updates the unit for all of its optimizers. The reason: under dtype=bfloat16 a unit's masters are either
split (fused) or plain (torch). A unit that no optimizer holds yet is treated as if all optimizers held it, because any
of them could take it up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from noria import _C
from noria._errors import usage_error
from noria.model.layout import HomeParameter, HomeUnit, factored_shapes
from noria.model.moment_formats import ROUNDING_STEP, SCALES_KEY
from noria.optim import Lion

__all__ = [
    "AS_IT_IS",
    "ELEMENTWISE",
    "NORIAS_OWN",
    "SEPARABLE",
    "STATELESS",
    "FusedRule",
    "Scaling",
    "choose",
    "fused_units",
    "keeps_moments",
    "keeps_state",
    "most_moments",
    "no_number_in",
    "num_numbers",
    "rule_of",
    "why_not_fused",
    "wrong_choice",
]

SEPARABLE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor", "Muon"),
    )
    if hasattr(torch.optim, name)
) | {Lion}
"""Classes that run unit by unit. They are compared by identity, because a subclass may read other units too."""

ELEMENTWISE = SEPARABLE - {getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)}
"""Separable classes whose update of an element depends on that element alone, so each rank can run them on its part.

Adafactor takes means over rows and columns, and Muon multiplies matrices, so these two are missing."""


Scaling = tuple[float, float]
"""The divisor of a gradient, then its multiplier, both applied before a step. See update.h, Note [Factor]."""

AS_IT_IS: Scaling = (1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class FusedRule:
    """Describes a rule of csrc/optim, and the state that torch's optimizer keeps for it."""

    name: str
    keys: tuple[str, ...]  # moments by element, in the order of moment_formats.MOMENTS
    counts_steps: bool = False  # in state["step"]
    begins_anew: bool = False  # True: an incomplete state begins anew. False: torch raises
    is_elementwise: bool = True  # False: an update needs whole parameters, and runs on the host alone
    is_factored: bool = False  # second moments are kept by row and column

    def shapes(self, slot: HomeParameter) -> dict[str, Sequence[int]]:
        """Returns the shapes of the tensors that the rule keeps of a parameter, by key."""
        if self.is_factored:
            return dict(factored_shapes(slot.like.shape))
        return dict.fromkeys(self.keys, slot.like.shape)

    def state_keys(self, slot: HomeParameter) -> tuple[str, ...]:
        return self.keys if not self.is_factored else tuple(self.shapes(slot))

    def bytes_per_element(self, is_split: bool, state_dtype: str = "fp32") -> float:
        """Returns the bytes per element that an update reads and writes."""
        if self.is_factored:  # the parameter is read twice, its gradient three times
            return 12 + 3 * (2 if is_split else 4)
        moment = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 8 / _C.STATE_BLOCK}[state_dtype]
        return 8 + (2 if is_split else 4) + moment * len(self.keys)

    def refuse_layout(self, slot: HomeParameter) -> None:
        """Raises UsageError if the kernel cannot read a parameter with these strides."""
        if self.allows(slot):
            return
        name = "Adafactor" if self.is_factored else "Muon"
        raise usage_error(
            f"contiguous {'parameters' if self.is_factored else 'matrices'} under {name}, if noria's kernel updates "
            "their unit",
            f'"{slot.name}" of shape {tuple(slot.like.shape)}, with strides {slot.like.stride()}',
            f'give it to {name} before noria.wrap, or wrap with kernel="torch"',
        )

    def allows(self, slot: HomeParameter) -> bool:
        """Returns True if the kernel can read a parameter of this shape, with these strides."""
        is_matrix = slot.like.dim() == 2 or self.is_factored
        return self.is_elementwise or (is_matrix and slot.like.is_contiguous())

    def refuse_broken_state(self, slot: HomeParameter, values: Mapping[str, object]) -> None:
        """Raises UsageError if torch's own step would raise: entries are missing, or not of the parameter's shape."""
        remedy = "give the state that this optimizer has made for this model, or none, to begin anew"
        missing = ["step"] if self.counts_steps and values.get("step") is None else []
        shapes = self.shapes(slot)
        for key, shape in shapes.items():
            value = values.get(key)
            if value is None:
                missing.append(key)
            elif not isinstance(value, torch.Tensor) or value.shape != shape:
                raise usage_error(*_of_shape(slot, key, shape, value), remedy)
            scales = values.get(SCALES_KEY[key]) if key in SCALES_KEY else None
            if scales is not None and (not isinstance(scales, torch.Tensor) or scales.shape != (slot.num_blocks,)):
                raise usage_error(*_of_shape(slot, SCALES_KEY[key], (slot.num_blocks,), scales), remedy)
        if missing and not self.begins_anew and any(key not in NORIAS_OWN for key in values):
            needed = [*shapes, *(["step"] if self.counts_steps else [])]
            present = [str(key) for key, value in values.items() if value is not None]
            raise usage_error(
                f'{_quoted(needed)} of "{slot.name}" in the optimizer\'s state, or nothing',
                f"{_quoted(present) or 'nothing'} without {_quoted(missing)}",
                remedy,
            )

    def ratio(self, hyper: dict[str, Any], shape: Sequence[int]) -> float:
        """Returns what the learning rate is multiplied by for a parameter of this shape: `adjust_lr_fn` of Muon."""
        if self.name != "muon":
            return 1.0
        rows, columns = shape
        if hyper.get("adjust_lr_fn") == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns, 1))
        return math.sqrt(max(1, rows / max(columns, 1)))

    def scalars(
        self,
        hyper: dict[str, Any],
        step: int,
        factor: float = 1.0,
        seed: int = 0,
        scaling: Scaling = AS_IT_IS,
        ratio: float = 1.0,
    ) -> _C.UpdateScalars:
        """Makes the scalars of one update.

        Args:
            hyper: The hyperparameters of a parameter group. Tensors among them are read now.
            step: The number of the step, from 1.
            factor: A multiplier of the gradient, applied after `scaling`.
            seed: The seed of the rounding.
            scaling: See `Scaling`.
            ratio: What `ratio` returns for the parameter.
        """
        divisor, prefactor = scaling
        numbers: dict[str, Any] = {key: float(hyper[key]) for key in _ANY_NUMBER if key in hyper}
        flags: dict[str, Any] = {key: bool(hyper[key]) for key in ("nesterov", "maximize") if key in hyper}
        if self.name == "muon":
            numbers["iteration"] = tuple(float(each) for each in hyper["ns_coefficients"])
            numbers["num_iterations"] = int(hyper["ns_steps"])
            numbers["lr"] *= ratio
            numbers["weight_decay"] /= ratio  # the kernel multiplies it by lr
        if self.is_factored:
            least, least_rms = hyper["eps"]
            numbers["eps"] = torch.finfo(torch.float32).eps if least is None else float(least)
            numbers |= {"least_rms": float(least_rms), "most_rms": float(hyper["d"])}
        elif "eps" in hyper:
            numbers["eps"] = float(hyper["eps"])
        if "betas" in hyper:
            numbers["beta1"], numbers["beta2"] = (float(beta) for beta in hyper["betas"])
        return _C.update_scalars(
            self.name, step, **numbers, **flags, factor=factor, divisor=divisor, prefactor=prefactor, seed=seed
        )


def _quoted(keys: Sequence[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)


def _of_shape(slot: HomeParameter, key: str, shape: Sequence[int], value: object) -> tuple[str, str]:
    """Returns what was expected and what was found, for an error about a wrong shape."""
    found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return f'{key} of "{slot.name}" in the optimizer\'s state with shape {tuple(shape)}', found


NORIAS_OWN = ("low_bits", ROUNDING_STEP)  # noria's entries in a state, beside torch's
_ANY_NUMBER = ("lr", "weight_decay", "momentum", "dampening", "beta2_decay")
_NUMBERS_OF: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("lr", "betas", "eps", "weight_decay"),
    torch.optim.Adam: ("lr", "betas", "eps", "weight_decay"),
    torch.optim.SGD: ("lr", "momentum", "dampening", "weight_decay"),
    Lion: ("lr", "betas", "weight_decay"),
    torch.optim.Adafactor: ("lr", "beta2_decay", "eps", "d", "weight_decay"),
    torch.optim.Muon: ("lr", "weight_decay", "momentum", "ns_coefficients", "eps"),
}
_NUM_NUMBERS = {"betas": 2, "ns_coefficients": 3}  # by key; others are one
_ADAMW = FusedRule("adamw", ("exp_avg", "exp_avg_sq"), counts_steps=True)
_ADAM = FusedRule("adam", ("exp_avg", "exp_avg_sq"), counts_steps=True)
_SGD = STATELESS = FusedRule("sgd", ())
_SGD_MOMENTUM = FusedRule("sgd_momentum", ("momentum_buffer",), begins_anew=True)
_LION = FusedRule("lion", ("exp_avg",))
_ADAFACTOR = FusedRule("adafactor", (), counts_steps=True, is_elementwise=False, is_factored=True)
_MUON = FusedRule("muon", ("momentum_buffer",), begins_anew=True, is_elementwise=False)


def rule_of(cls: type[Optimizer], group: dict[str, Any]) -> FusedRule:
    """Returns the rule of one parameter group. The kernels must cover the class."""
    if cls is torch.optim.SGD:
        return _SGD_MOMENTUM if float(group["momentum"]) != 0 else _SGD
    if cls is Lion:
        return _LION
    if cls is torch.optim.Adafactor:
        return _ADAFACTOR
    if cls is torch.optim.Muon:
        return _MUON
    decoupled = group.get("decoupled_weight_decay", cls is torch.optim.AdamW)
    return _ADAMW if decoupled else _ADAM


def why_not_fused(cls: type[Optimizer], groups: Iterable[dict[str, Any]], place: str = "host") -> str | None:
    """Returns in a word what noria's kernels do not cover of this optimizer. None if they cover it.

    `place` is `Policy.optimizer_device`.
    """
    if cls not in _NUMBERS_OF:
        return f"{cls.__name__} has none"
    if cls in (torch.optim.Adafactor, torch.optim.Muon) and place == "device":
        return f"{cls.__name__} has none for the device"
    for option in ("amsgrad", "capturable", "differentiable"):
        if any(group.get(option) for group in groups):
            return option
    return None


def no_number_in(cls: type[Optimizer], group: dict[str, Any]) -> str | None:
    """Returns the first key of a group whose value is not the number (or the numbers) that the kernels need.

    Returns None if all values are right. The kernels must cover the class.
    """
    for key in _NUMBERS_OF[cls]:
        count = num_numbers(cls, key)
        try:
            values = [*group[key]] if count > 1 else [group[key]]
            if key == "eps" and len(values) == 2 and values[0] is None:  # Adafactor chooses it
                values[0] = 0.0
            if any(isinstance(value, str) for value in values):
                return key
            numbers = [float(value) for value in values]
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
            return key
        if len(numbers) != count:
            return key
    return None


def wrong_choice(cls: type[Optimizer], group: dict[str, Any]) -> tuple[str, str] | None:
    """Returns what was expected and what was found if a group's value is none of those that the kernels know."""
    if cls is torch.optim.Muon:
        steps, name = group.get("ns_steps"), group.get("adjust_lr_fn")
        if not isinstance(steps, int) or not 0 <= steps < 100:
            return "ns_steps from 0 to 99", repr(steps)
        if name not in (None, "original", "match_rms_adamw"):
            return 'adjust_lr_fn that is None, "original" or "match_rms_adamw"', repr(name)
    return None


def num_numbers(cls: type[Optimizer], key: str) -> int:
    """Returns how many numbers a group has under a key."""
    return 2 if key == "eps" and cls is torch.optim.Adafactor else _NUM_NUMBERS.get(key, 1)


def most_moments(cls: type[Optimizer]) -> int:
    """Returns how many moments by element the kernels may keep of a parameter. They must cover the class."""
    return len((_SGD_MOMENTUM if cls is torch.optim.SGD else rule_of(cls, {})).keys)


def keeps_state(cls: type[Optimizer], group: dict[str, Any]) -> bool:
    """Returns False if torch makes no entry in `optimizer.state` at all."""
    return cls is not torch.optim.SGD or float(group["momentum"]) != 0


def keeps_moments(fused: Mapping[int, tuple[FusedRule, ...]]) -> bool:
    """Returns True if noria's kernels keep moments by element, whose format `Policy.state_dtype` sets."""
    return any(rule.keys for rules in fused.values() for rule in rules)


def choose(optimizer: Optimizer, wanted: str, place: str = "host") -> str:
    """Returns "fused", "torch" or "whole". See Note [Who updates a unit].

    `wanted` is `Policy.kernel`, `place` is `Policy.optimizer_device`.
    """
    if type(optimizer) not in SEPARABLE:
        return "whole"
    covered = wanted != "torch" and why_not_fused(type(optimizer), optimizer.param_groups, place) is None
    return "fused" if covered else "torch"


def fused_units(
    units: Sequence[HomeUnit], optimizers: Sequence[Optimizer], kernels: Sequence[str]
) -> dict[int, tuple[FusedRule, ...]]:
    """Returns the rules that may update each fused unit, by unit index. See Note [Who updates a unit].

    Sets how many moments the home has of each parameter. Usually these are the most that any rule of the unit keeps.
    If a rule is not elementwise, they are those of the parameter's own rule.
    """
    held: dict[torch.Tensor, list[FusedRule | None]] = {}  # None: no kernel of noria updates it
    for optimizer, kernel in zip(optimizers, kernels, strict=True):
        for group in optimizer.param_groups:
            rule = rule_of(type(optimizer), group) if kernel == "fused" else None
            for parameter in group["params"]:
                held.setdefault(parameter, []).append(rule)
    of_all = [rule for rules in held.values() for rule in rules]
    found = {}
    for unit in units:
        trainable = [slot for slot in unit.parameters if slot.trainable]
        if any(len(held.get(slot.parameter, ())) > 1 for slot in trainable):
            continue  # the home has room for the moments of one optimizer per parameter
        holders = [rule for slot in trainable for rule in held.get(slot.parameter, [])] or of_all
        rules = tuple(dict.fromkeys(rule for rule in holders if rule is not None))
        own = {slot.index: held.get(slot.parameter, []) for slot in trainable}
        if rules and None not in holders and all(_allows(slot, own[slot.index], rules) for slot in trainable):
            found[unit.index] = rules
            is_elementwise = all(rule.is_elementwise for rule in rules)
            for slot in trainable:
                counted = rules if is_elementwise or not own[slot.index] else own[slot.index]
                slot.num_moments = max(len(rule.keys) for rule in counted if rule is not None)
    return found


def _allows(slot: HomeParameter, own: Iterable[FusedRule | None], rules: Iterable[FusedRule]) -> bool:
    """Returns True if the kernels can update the parameter.

    `own`: the rule of the optimizer that holds it. `rules`: of the unit.

    A parameter that none holds only has to be contiguous beside a rule that wants that. If it is no matrix and joins
    Muon later, `FusedRule.refuse_layout` refuses it.
    """
    is_read = all(rule is None or rule.allows(slot) for rule in own)
    is_read = is_read and (slot.like.is_contiguous() or all(rule.is_elementwise for rule in rules))
    return is_read and (slot.has_master or slot.dtype is torch.float32)
