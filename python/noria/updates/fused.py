"""Updates for noria's own kernels: jobs for the host pool, of pieces of a unit and the numbers of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from noria import _C
from noria.home import HomeParameter
from noria.kernels import AS_IT_IS, STATELESS, FusedRule, Scaling, rule_of
from noria.moments import PURPOSE_OF, SCALES_KEY
from noria.updates.home_state import HomeState
from noria.updates.members import Jobs, Members
from noria.updates.steps import Steps

__all__ = ["Fused"]

Piece = tuple[int, int, _C.UpdateScalars] | tuple[int, int, _C.UpdateScalars, int, int]
"""Offset and count in the unit, scalars; where moments are rounded at random, the number of the first element and of
its block."""

Ready = list[tuple[HomeParameter, FusedRule, _C.UpdateScalars]]
"""Of one unit: what will be updated, and how."""

_NO_SCALARS = STATELESS.scalars({"lr": 0.0}, 1)


class Scalars:
    """Of groups by their number, each made once for all parameters that are at the same step."""

    def __init__(self, factor: float, seed: int) -> None:
        self._factor = factor
        self._seed = seed
        self._made: dict[tuple[int, int, Scaling], _C.UpdateScalars] = {}

    def __call__(
        self, number: int, rule: FusedRule, hyper: dict[str, Any], step: int, scaling: Scaling = AS_IT_IS
    ) -> _C.UpdateScalars:
        key = (number, step, scaling)
        if key not in self._made:
            self._made[key] = rule.scalars(hyper, step, self._factor, self._seed, scaling)
        return self._made[key]


class Fused:
    """Makes the jobs of one optimizer's units, and submits those of a `step()`."""

    def __init__(self, members: Members, state: HomeState, steps: Steps) -> None:
        self.members = members
        self.wrapped = members.wrapped
        self.state = state
        self.steps = steps
        self._numbers: dict[int, int] = {}  # of the first element, by slot index; where moments are rounded at random

    def ready(self, jobs: Jobs, factor: float) -> dict[int, Ready]:
        """What `submit` is to be given, by unit. Of all units before the first is submitted, for a state that cannot be
        updated is found here, where no step has been counted yet."""
        ready: dict[int, Ready] = {}
        for unit, groups in jobs.items():
            if not self.members.fuses(unit):
                continue
            scalars = self.scalars(factor)
            for number, (hyper, slots) in enumerate(groups):
                rule = rule_of(self.members.cls, hyper)
                for slot in slots:
                    made = scalars(number, rule, hyper, self.steps.ready(slot, rule))
                    ready.setdefault(unit, []).append((slot, rule, made))
        return ready

    def submit(self, unit: int, ready: Ready, urgency: int) -> None:
        """One unit's update for the host pool: a job for each rule, and one for each parameter whose state lies outside
        of the home."""
        jobs: dict[tuple[FusedRule, int], tuple[list[Piece], list[tuple[int, int]]]] = {}
        for slot, rule, scalars in ready:
            self.steps.count(slot, rule)
            in_home = all(self.state.is_planned(slot, key) for key in rule.keys)
            pieces, scales = jobs.setdefault((rule, -1 if in_home else slot.index), ([], []))
            pieces.append(self._piece(slot, scalars))
            scales.append(self.wrapped.custody.late_scales(slot.index))
        for (rule, index), (pieces, scales) in jobs.items():
            arrays = self.arrays(unit, rule, None if index < 0 else self.wrapped.slots[index])
            held = self.wrapped.home.address("held gradients", unit)
            job = _C.UpdateJob(rule.name, pieces, arrays, gradient=held, late_scales=scales)
            if self.wrapped.custody.update_on_pool(unit, job, urgency):
                self.steps.change_places(unit)

    def expected_pieces(
        self, step_of: Callable[[int, HomeParameter, FusedRule], int | None], factor: float
    ) -> dict[int, tuple[list[HomeParameter], list[Piece]]]:
        """By unit, what is updated, and updates with the hyperparameters as they are now. `step_of`, of the group's
        number, the parameter and its rule: None leaves the parameter out, and its unit incomplete."""
        self.number_elements()
        scalars = self.scalars(factor)
        expected: dict[int, tuple[list[HomeParameter], list[Piece]]] = {}
        for number, group in enumerate(self.members.optimizer.param_groups):
            rule = rule_of(self.members.cls, group)
            for parameter in group["params"]:
                slot = self.wrapped.slot_of.get(parameter)
                step = None if slot is None else step_of(number, slot, rule)
                if slot is not None and step is not None:
                    slots, pieces = expected.setdefault(slot.unit, ([], []))
                    slots.append(slot)
                    scaling = self.wrapped.following.scaling(slot)
                    pieces.append(self._piece(slot, scalars(number, rule, group, step, scaling)))
        return expected

    def sum_job(self, unit: int, slots: Iterable[HomeParameter]) -> _C.UpdateJob:
        """Of the squares of their gradients."""
        pieces = [(slot.home_offset // slot.dtype.itemsize, slot.like.numel(), _NO_SCALARS) for slot in slots]
        held = self.wrapped.home.address("held gradients", unit)
        return _C.UpdateJob(
            STATELESS.name, pieces, self.arrays(unit, STATELESS, None), gradient=held, task="sum", sums=True
        )

    def arrays(self, unit: int, rule: FusedRule, outside: HomeParameter | None, spare: bool = False) -> _C.UnitArrays:
        """Of the whole unit. `outside`: a parameter whose moments are tensors of their own; they are given as if the
        unit's began so much earlier, and the job touches nothing but that parameter."""
        home = self.wrapped.home
        addresses = {}
        state_dtype = "fp32" if outside is not None else self.state.dtype
        for name, key in zip("mv", rule.keys, strict=False):
            addresses[name] = home.address(PURPOSE_OF[key], unit, spare)
            if outside is not None:
                value = self.state.shown.unsettled(outside.parameter)[key]
                addresses[name] = (
                    value.data_ptr() - outside.home_offset // outside.dtype.itemsize * value.element_size()
                )
            elif state_dtype == "8bit":
                addresses[f"{name}_scales"] = home.address(PURPOSE_OF[SCALES_KEY[key]], unit, spare)
        working = home.address("working copies", unit, spare)
        if self.wrapped.policy.dtype is None:
            return _C.UnitArrays(master=working, state=state_dtype, **addresses)
        low = home.address("low bits", unit, spare)
        return _C.UnitArrays(working=working, low=low, state=state_dtype, **addresses)

    def scalars(self, factor: float) -> Scalars:
        return Scalars(factor, self.wrapped.policy.rounding_seed)

    def number_elements(self) -> None:
        """Numbers all elements in the order of the groups, each parameter from a multiple of a block on: what they are
        rounded by does not depend on units."""
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
