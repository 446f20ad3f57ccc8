"""Builds update jobs of noria's own kernels for the host pool.

A job consists of pieces of one unit and the scalars of one step, for example the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from noria import _C
from noria._errors import usage_error
from noria.model.layout import HomeParameter
from noria.model.moment_formats import PURPOSE_OF, SCALES_KEY
from noria.model.update_rules import AS_IT_IS, STATELESS, FusedRule, Scaling, rule_of
from noria.step.optimizer_state import HomeState
from noria.step.param_groups import Jobs, ParamGroups
from noria.step.step_counts import StepCounts

__all__ = ["HostKernels"]

Piece = tuple[int, int, _C.UpdateScalars] | tuple[int, int, _C.UpdateScalars, int, int]
"""Offset and count in elements of the unit, then the scalars. If moments are rounded at random, the number of the
first element and the number of its block follow."""

Ready = list[tuple[HomeParameter, FusedRule, _C.UpdateScalars]]
"""The parameters of one unit that will be updated, each with its rule and its scalars."""

_NO_SCALARS = STATELESS.scalars({"lr": 0.0}, 1)


class Scalars:
    """Makes the scalars of parameter groups, once for all parameters of a group at the same step, or for Muon of one
    shape."""

    def __init__(self, factor: float, seed: int) -> None:
        self._factor = factor
        self._seed = seed
        self._made: dict[tuple[int, int, float, Scaling], _C.UpdateScalars] = {}

    def __call__(
        self,
        number: int,
        rule: FusedRule,
        hyper: dict[str, Any],
        step: int,
        slot: HomeParameter,
        scaling: Scaling = AS_IT_IS,
    ) -> _C.UpdateScalars:
        ratio = rule.ratio(hyper, slot.shape)
        key = (number, step, ratio, scaling)
        if key not in self._made:
            self._made[key] = rule.scalars(hyper, step, self._factor, self._seed, scaling, ratio)
        return self._made[key]


class HostKernels:
    """Builds the update jobs of one optimizer, and submits the jobs of a `step()`."""

    def __init__(
        self,
        members: ParamGroups,
        state: HomeState,
        steps: StepCounts,
        scaling: Callable[[HomeParameter], Scaling],
    ) -> None:
        """`scaling` returns the scaling that a pipeline's schedule will apply to a gradient before the step."""
        self._scaling = scaling
        self.members = members
        self.context = members.context
        self.state = state
        self.steps = steps
        self._numbers: dict[int, int] = {}  # by slot index: its first element's number, for random rounding

    def ready(self, jobs: Jobs, factor: float) -> dict[int, Ready]:
        """Returns the argument of `submit` for each unit.

        Order: call it for all units before the first `submit`. It raises for a state that cannot be updated, and no
        step has been counted at that point.
        """
        ready: dict[int, Ready] = {}
        for unit, groups in jobs.items():
            if not self.members.fuses(unit):
                continue
            scalars = self.scalars(factor)
            for number, (hyper, slots) in enumerate(groups):
                rule = rule_of(self.members.cls, hyper)
                for slot in slots:
                    made = scalars(number, rule, hyper, self.steps.ready(slot, rule), slot)
                    ready.setdefault(unit, []).append((slot, rule, made))
        return ready

    def submit(self, unit: int, ready: Ready, priority: int) -> None:
        """Submits one unit's update to the host pool.

        Each rule gets one job. Each parameter whose state lies outside of the home gets a job of its own.
        """
        jobs: dict[tuple[FusedRule, int], tuple[list[Piece], list[HomeParameter]]] = {}
        for slot, rule, scalars in ready:
            self.steps.count(slot, rule)
            in_home = all(self.state.is_planned(slot, key) for key in rule.keys)
            pieces, slots = jobs.setdefault((rule, -1 if in_home else slot.index), ([], []))
            pieces.append(self._piece(slot, scalars))
            slots.append(slot)
        self.context.files.note_written(unit)
        for (rule, index), (pieces, slots) in jobs.items():
            arrays = self.arrays(unit, rule, None if index < 0 else self.context.slots[index])
            held = self.context.home.address("held gradients", unit)
            scales = [self.context.engine.gradients.late_scales(slot.index) for slot in slots]
            factored = self.factored(rule, slots)
            job = _C.UpdateJob(rule.name, pieces, arrays, gradient=held, late_scales=scales, factored=factored)
            self.context.engine.updates.update_on_pool(unit, job, priority)

    def count(self, ready: Ready) -> None:
        """Counts the steps. Creates state that is not there yet."""
        for slot, rule, _ in ready:
            self.steps.count(slot, rule)

    def jobs_on_device(
        self,
        unit: int,
        ready: Ready,
        gradients: list[int],
        address: Callable[[str, int], int],
        ranges: list[tuple[int, int]] | None = None,
    ) -> list[_C.UpdateJob]:
        """Returns the updates of a unit that lies on the device, one for each rule. Steps were counted.

        `gradients`: the address of each gradient. `address` returns that of a unit's part of an arena on the device.
        `ranges`: of each parameter the first element and how many, in elements of the unit. None: the parameters are
        whole.
        """
        jobs: dict[FusedRule, tuple[list[Piece], list[int]]] = {}
        for number, (slot, rule, scalars) in enumerate(ready):
            pieces, addresses = jobs.setdefault(rule, ([], []))
            pieces.append(self._piece(slot, scalars) if ranges is None else (*ranges[number], scalars))
            addresses.append(gradients[number])
        return [
            _C.UpdateJob(rule.name, pieces, self.arrays(unit, rule, None, address), gradients=addresses)
            for rule, (pieces, addresses) in jobs.items()
        ]

    def sum_job_at_rest(self, slot: HomeParameter, gradient: int) -> _C.UpdateJob:
        """Returns a job that sums the squares of a gradient at this address."""
        arrays = self.arrays(slot.unit, STATELESS, None)
        pieces = [(0, slot.like.numel(), _NO_SCALARS)]
        return _C.UpdateJob(STATELESS.name, pieces, arrays, gradients=[gradient], task="sum")

    def expected_pieces(
        self, step_of: Callable[[int, HomeParameter, FusedRule], int | None], factor: float
    ) -> dict[int, tuple[list[HomeParameter], list[Piece]]]:
        """Returns, by unit, the parameters and the pieces of an update with the current hyperparameters.

        `step_of` takes the group's number, the parameter and its rule, and returns the step. If it returns None, the
        parameter is left out and its unit is incomplete.
        """
        self.number_elements()
        scalars = self.scalars(factor)
        expected: dict[int, tuple[list[HomeParameter], list[Piece]]] = {}
        for number, group in enumerate(self.members.optimizer.param_groups):
            rule = rule_of(self.members.cls, group)
            for parameter in group["params"]:
                slot = self.context.slot_of.get(parameter)
                step = None if slot is None else step_of(number, slot, rule)
                if slot is not None and step is not None:
                    slots, pieces = expected.setdefault(slot.unit, ([], []))
                    slots.append(slot)
                    scaling = self._scaling(slot)
                    pieces.append(self._piece(slot, scalars(number, rule, group, step, slot, scaling)))
        return expected

    def sum_job(self, unit: int, slots: Iterable[HomeParameter]) -> _C.UpdateJob:
        """Returns a job that sums the squares of the held gradients of `slots`."""
        pieces = [(slot.home_offset // slot.dtype.itemsize, slot.like.numel(), _NO_SCALARS) for slot in slots]
        held = self.context.home.address("held gradients", unit)
        return _C.UpdateJob(
            STATELESS.name, pieces, self.arrays(unit, STATELESS, None), gradient=held, task="sum", sums=True
        )

    def arrays(
        self,
        unit: int,
        rule: FusedRule,
        outside: HomeParameter | None,
        address: Callable[[str, int], int] | None = None,
    ) -> _C.UnitArrays:
        """Returns the addresses of the whole unit's arrays: at home, or where `address` says.

        `outside` is a parameter whose moments are separate tensors outside of the home. Their addresses are shifted
        back by the parameter's offset, so that the unit's offsets apply to them. Such a job touches only that
        parameter.
        """
        at = self.context.home.address if address is None else address
        addresses = {}
        state_dtype = "fp32" if outside is not None else self.state.dtype
        for name, key in zip("mv", rule.keys, strict=False):
            addresses[name] = at(PURPOSE_OF[key], unit)
            if outside is not None:
                value = self.state.shown.unsettled(outside.parameter)[key]
                addresses[name] = (
                    value.data_ptr() - outside.home_offset // outside.dtype.itemsize * value.element_size()
                )
            elif state_dtype == "8bit":
                addresses[f"{name}_scales"] = at(PURPOSE_OF[SCALES_KEY[key]], unit)
        working = at("working copies", unit)
        if self.context.policy.dtype is None:
            return _C.UnitArrays(master=working, state=state_dtype, **addresses)
        low = at("low bits", unit)
        return _C.UnitArrays(working=working, low=low, state=state_dtype, **addresses)

    def factored(self, rule: FusedRule, slots: Iterable[HomeParameter]) -> list[tuple[int, int, int, int, int]]:
        """Returns shape and factored moments of each parameter, as `_C.UpdateJob` takes them.

        Empty if the rule is elementwise.
        """
        found: list[tuple[int, int, int, int, int]] = []
        for slot in slots if not rule.is_elementwise else ():
            shape = slot.like.shape
            if not rule.is_factored:  # a matrix of Muon
                found.append((1, shape[0], shape[1], 0, 0))
                continue
            addresses = [self._factored_address(slot, key) for key in rule.state_keys(slot)]
            if len(shape) < 2:
                found.append((1, 1, slot.like.numel(), 0, addresses[0]))
            else:
                found.append((math.prod(shape[:-2]), shape[-2], shape[-1], addresses[0], addresses[1]))
        return found

    def _factored_address(self, slot: HomeParameter, key: str) -> int:
        """Returns the address of factored moments at home, or where the user's tensor of them is."""
        if self.state.is_planned(slot, key):
            return self.context.home.factored_address(slot, key)
        value = self.state.shown.unsettled(slot.parameter)[key]
        if value.dtype is not torch.float32 or value.device.type != "cpu" or not value.is_contiguous():
            raise usage_error(
                f'{key} of "{slot.name}" in optimizer.state as noria has made it',
                f"other memory in the same tensor: {value.dtype} on {value.device}",
                "put a new tensor there",
            )
        return int(value.data_ptr())

    def scalars(self, factor: float) -> Scalars:
        return Scalars(factor, self.context.policy.rounding_seed)

    def number_elements(self) -> None:
        """Numbers all elements in the order of the groups. Each parameter starts at a multiple of a block.

        Random rounding uses these numbers, so its result does not depend on the units.
        """
        if self.members.kernel != "fused" or self.state.dtype == "fp32":
            return
        number = 0
        for slot in self.members.slots():
            self._numbers[slot.index] = number
            number += -(-slot.shape.numel() // _C.STATE_BLOCK) * _C.STATE_BLOCK

    def _piece(self, slot: HomeParameter, scalars: _C.UpdateScalars) -> Piece:
        offset = slot.home_offset // slot.dtype.itemsize
        if self.state.dtype == "fp32":
            return (offset, slot.like.numel(), scalars)
        first = slot.first if slot.like.numel() else 0
        return (offset, slot.like.numel(), scalars, self._numbers[slot.index] + first, slot.first_block)
