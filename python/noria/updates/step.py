"""Updates of one optimizer of a wrap call."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from noria import _C
from noria._errors import usage_error
from noria.custody import Wrapped
from noria.home import HomeParameter
from noria.kernels import STATELESS, FusedRule, keeps_state, rule_of, why_not_fused
from noria.modes import autocast_now, plainly
from noria.moments import (
    MOMENT_OF,
    PURPOSE_OF,
    ROUNDING_STEP,
    SCALES_KEY,
    encode,
    keys_of,
    moment_dtype,
    plain_values,
)
from noria.optimizer import original_class, refuse_inside_backward, step_of
from noria.stand_ins import exchange, refuse_out_of_reach
from noria.updates.state import OptimizerState
from noria.updates.worker import hyper_of, is_array, worker_of

__all__ = ["Updates"]

_Piece = tuple[int, int, _C.UpdateScalars] | tuple[int, int, _C.UpdateScalars, int, int]
"""Offset and count in the unit, scalars; where moments are rounded at random, the number of the first element and of
its block."""


class _Scalars:
    """Of groups by their number, each made once for all parameters that are at the same step."""

    def __init__(self, factor: float, seed: int) -> None:
        self._factor = factor
        self._seed = seed
        self._made: dict[tuple[int, int], _C.UpdateScalars] = {}

    def __call__(self, number: int, rule: FusedRule, hyper: dict[str, Any], step: int) -> _C.UpdateScalars:
        if (number, step) not in self._made:
            self._made[number, step] = rule.scalars(hyper, step, self._factor, self._seed)
        return self._made[number, step]


_NO_SCALARS = STATELESS.scalars({"lr": 0.0}, 1)


class Updates:
    """Turns `step()` of one optimizer into updates of units. `kernel`: "fused", "torch", or "whole" (see the Note)."""

    def __init__(
        self,
        wrapped: Wrapped,
        optimizer: Optimizer,
        kernel: str,
        state_places: dict[tuple[int, str], int],
        state_arena: Any,
        update: str,
    ) -> None:
        self.wrapped = wrapped
        self.optimizer = optimizer
        self.kernel = kernel
        self.blocking = update == "blocking"
        self.in_backward = update == "backward"
        self._is_loading = False
        self._zeroed: set[int] = set()  # slots whose moments are zeros of which the optimizer's state does not know yet
        self.num_steps = 0
        norm = wrapped.policy.max_grad_norm
        self.max_grad_norm = None if norm is None else float(norm)
        self.grad_norm: torch.Tensor | None = None  # as the last step() found it
        self._wants_sums = self.max_grad_norm is not None  # of squares, as gradients land
        self._expected_factor = 1.0  # on the gradients, at the next step()
        self.scaled_by_class = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._autocast = autocast_now()  # of the last step(): its updates run under it, whenever they do
        self._places = state_places  # (slot index, key) -> offset in the arena
        self._arena = state_arena
        self._jobs: dict[int, list[tuple[dict[str, Any], list[HomeParameter]]]] = {}  # by unit, not run yet
        self._home_parameters: dict[int, nn.Parameter] = {}
        # Under kernel="whole", while the optimizer has the home: slot, its version, gradient, the gradient's version.
        self._lent: list[tuple[HomeParameter, int, torch.Tensor | None, int | None]] = []
        self._class = original_class(type(optimizer))
        self._adopted: dict[tuple[int, str], torch.Tensor] = {}  # (slot index, key): what the kernel writes
        self._state_dtype = wrapped.policy.state_dtype  # of fused units
        self._numbers: dict[int, int] = {}  # of the first element, by slot index; where moments are rounded at random
        self._check_members(optimizer.param_groups)
        self._take_state_over()

    def _take_state_over(self) -> None:
        """At first, and again when the user has put another dict in its place."""
        self.state: OptimizerState = OptimizerState(self._settle, self._copied, dict(self.optimizer.state))
        self.optimizer.state = self.state
        for slot in self.slots():
            low = dict.get(self.state, slot.parameter, {}).pop("low_bits", None) if slot.has_master else None
            if isinstance(low, torch.Tensor) and low.shape == slot.parameter.shape:
                self.wrapped.set_low_bits(slot, low)  # of an earlier wrap call
            self._adopt(slot)

    def slots(self) -> Iterator[HomeParameter]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield self.wrapped.slot_of[parameter]

    def _check_members(self, groups: list[dict[str, Any]]) -> None:
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter not in self.wrapped.slot_of:
                    raise usage_error(
                        "an optimizer whose parameters belong to the wrapped models",
                        f"one of shape {tuple(parameter.shape)} in group {number} that no wrapped model has",
                        "wrap all models that the optimizer updates: noria.wrap([a, b], optimizer)",
                    )

    # ---- home side ----

    def home_parameter(self, slot: HomeParameter) -> nn.Parameter:
        """The tensor that the real optimizer updates: the fp32 master, or the working copy where that is the master."""
        known = self._home_parameters.get(slot.index)
        if known is None:
            values = self.wrapped.home.master(slot) if slot.has_master else self.wrapped.home.working(slot)
            with plainly():
                known = self._home_parameters[slot.index] = nn.Parameter(values, requires_grad=slot.trainable)
        return known

    def _gradient(self, slot: HomeParameter) -> torch.Tensor:
        held = self.wrapped.home.held(slot)
        if not slot.has_master:
            return held
        scratch = self.wrapped.home.tensor("update scratch", 0, slot.offset * 2, slot.parameter, torch.float32)
        return scratch.copy_(held)

    def _fuses(self, unit: int) -> bool:
        return self.kernel == "fused" and unit in self.wrapped.plan.fused

    def _adopt(self, slot: HomeParameter) -> None:
        """Moves the state tensors that the optimizer has made into the home, where the plan has room for them."""
        if not dict.__contains__(self.state, slot.parameter):
            return
        state = self.state.unsettled(slot.parameter)
        encoded: set[str] = set()  # keys of scales that belong to codes made here
        for key, value in list(state.items()):
            if not is_array(value) or key in encoded:
                continue
            place = self._place(slot, key, value)
            if place is None or place.data_ptr() == value.data_ptr():
                continue
            scales = None if place.is_floating_point() else self._moment(slot, SCALES_KEY[key])
            if scales is not None and value.is_floating_point():
                encode(value, place, scales)
                state[SCALES_KEY[key]] = scales
                encoded.add(SCALES_KEY[key])
            else:
                place.copy_(value)
            state[key] = place

    def _place(self, slot: HomeParameter, key: str, value: torch.Tensor) -> torch.Tensor | None:
        if self._fuses(slot.unit):
            return self._moment(slot, key) if key in PURPOSE_OF else None
        offset = self._places.get((slot.index, key))
        if offset is None:
            return None
        dtype = torch.float32 if slot.has_master and value.is_floating_point() else value.dtype
        strides = torch.empty_like(value, device="meta").stride()
        with plainly():
            return _C.tensor_in(self._arena, offset, dtype, list(value.shape), list(strides))

    def _moment(self, slot: HomeParameter, key: str) -> torch.Tensor | None:
        """Where the fused kernel keeps it, or a moment's scales; None: the plan did not foresee it (momentum that was
        turned on later)."""
        if not self._is_planned(slot, key):
            return None
        told = self.wrapped.drops_draft(slot.unit) if slot.unit in self.wrapped.plan.drafted else None
        home, purpose = self.wrapped.home, PURPOSE_OF[key]
        if key not in MOMENT_OF:
            return home.scales(purpose, slot, told)
        return home.moment(purpose, slot, moment_dtype(self._state_dtype, key), told)

    def _is_planned(self, slot: HomeParameter, key: str) -> bool:
        return self.wrapped.home.has(PURPOSE_OF[key], slot.unit)

    def _keys(self, slot: HomeParameter, rule: FusedRule) -> tuple[str, ...]:
        """The state's tensors that the fused kernel writes. What lies outside of the home is fp32."""
        in_home = all(self._is_planned(slot, key) for key in rule.keys)
        return keys_of(rule.keys, self._state_dtype if in_home else "fp32")

    def plain(self, parameter: Any, values: Any) -> Any:
        """A parameter's state as torch's own optimizer keeps it: fp32, whatever the fused kernels keep."""
        slot = self.wrapped.slot_of.get(parameter) if isinstance(parameter, nn.Parameter) else None
        if slot is None or not isinstance(values, dict) or self._state_dtype == "fp32" or not self._fuses(slot.unit):
            return values
        return plain_values(values, widen=True)

    def _copied(self, parameter: Any, values: Any) -> Any:
        """As `plain`, for a copy of the optimizer, which is to know the masters as well."""
        plain = self.plain(parameter, values)
        slot = self.wrapped.slot_of.get(parameter) if isinstance(parameter, nn.Parameter) else None
        if slot is None or not slot.has_master or not isinstance(values, dict):
            return plain
        return {**plain, "low_bits": self.wrapped.low_bits(slot).clone()}

    def _settle(self, parameter: Any) -> None:
        wrapped = self.wrapped
        wrapped._check_alive()
        if not self._is_loading:
            wrapped.refuse_between_steps("a look at optimizer.state")
        if parameter is None:
            wrapped.custody.settle_all()
            if wrapped.pool is not None:
                wrapped.pool.idle()
            for unit in wrapped.plan.drafted:
                wrapped.custody.access_home(unit, False)  # it may be edited now: no draft of it may be kept
        elif isinstance(parameter, nn.Parameter) and parameter in wrapped.slot_of:
            wrapped.custody.access_home(wrapped.slot_of[parameter].unit, False)

    # ---- step ----

    def step(self, closure: Callable[[], Any] | None) -> Any:
        wrapped = self.wrapped
        refuse_inside_backward("optimizer.step()")
        wrapped.recover()
        if self.optimizer.state is not self.state:
            self._settle(None)
            self._take_state_over()
        if self.kernel == "whole":
            return self._step_whole(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self.optimizer, "found_inf", None)  # from a GradScaler, which leaves the rest to step()
        if found_inf is not None and found_inf.item() != 0:
            self.grad_norm = None if self.max_grad_norm is None else torch.tensor(math.inf)
            return loss
        self._autocast = autocast_now()
        with plainly():
            if self.in_backward:
                self._claim_updates()
            else:
                self._begin_updates()
        return loss

    def _begin_updates(self) -> None:
        wrapped = self.wrapped
        self._check_groups()
        self._number_elements()
        if self.max_grad_norm is not None and not self.takes_factor():
            self.grad_norm = self._clip_by_torch(self.max_grad_norm)
        jobs = self._take_gradients()
        factor, expected = self._factor(jobs), self._expected_factor
        wrapped.custody.begin_step()
        order = [unit for unit in wrapped.custody.next_forward_order() if unit in jobs]
        updated = [slot.index for groups in jobs.values() for _, slots in groups for slot in slots]
        for unit in order:
            wrapped.custody.settle(unit)  # an earlier step's, if no forward came between
        for urgency, unit in enumerate(order):
            if self._fuses(unit):
                self._submit(unit, jobs[unit], urgency, factor)
            else:
                self._jobs[unit] = jobs[unit]
                wrapped.custody.defer_update(unit)
        wrapped.custody.bump_versions(updated)
        wrapped.custody.end_step(self.blocking)
        wrapped.custody.guard_gradients()
        wrapped.judge_drafts(would_hold=self.max_grad_norm is not None and factor == expected)
        self.num_steps += 1

    # ---- norms ----

    def takes_factor(self) -> bool:
        """Unscaling and clipping reach the update as a factor; else they are done to `p.grad`."""
        return self.kernel == "fused" and not self.in_backward and all(self._fuses(slot.unit) for slot in self.slots())

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        refuse_inside_backward("optimizer.clip_grad_norm_()")
        self.wrapped.recover()
        slots = [slot for slot in self.slots() if slot.parameter.grad is not None]
        held = all(self.wrapped.custody.gradient_is(slot.index) == "held" for slot in slots)
        if float(norm_type) != 2.0 or not held or not self.takes_factor():
            return self._clip_by_torch(max_norm, norm_type, error_if_nonfinite)
        self._wants_sums = _C.STORAGE_CAN_REFUSE
        with plainly():
            norm = self._norm(slots)
            if error_if_nonfinite and not torch.isfinite(norm):
                raise RuntimeError(
                    "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be "
                    "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                    "`error_if_nonfinite=False`"
                )
            factor = _clip_factor(norm, max_norm)
            if factor != 1.0:
                for slot in slots:
                    slot.parameter.grad.mul_(factor)  # type: ignore[union-attr]
            return norm.to(slots[0].parameter.device) if slots else norm

    def _clip_by_torch(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        parameters = [slot.parameter for slot in self.slots()]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def _norm(self, slots: Iterable[HomeParameter]) -> torch.Tensor:
        """Of the gradients in the home: fp32, without dimensions. Summed in the order of the optimizer's parameters, so
        that units do not show."""
        by_unit: dict[int, list[HomeParameter]] = {}
        order = list(slots)
        for slot in order:
            by_unit.setdefault(slot.unit, []).append(slot)
        sums: dict[int, float] = {}
        jobs = [(unit, self._sum_job(unit, members)) for unit, members in by_unit.items()]
        for (_, members), found in zip(by_unit.items(), self.wrapped.custody.sum_gradients(jobs), strict=True):
            sums.update((slot.index, each) for slot, each in zip(members, found, strict=True))
        return torch.tensor(math.sqrt(sum(sums[slot.index] for slot in order)), dtype=torch.float32)

    def _sum_job(self, unit: int, slots: Iterable[HomeParameter]) -> _C.UpdateJob:
        pieces = [(slot.offset // slot.dtype.itemsize, slot.parameter.numel(), _NO_SCALARS) for slot in slots]
        held = self.wrapped.home.address("held gradients", unit)
        return _C.UpdateJob(
            STATELESS.name, pieces, self._arrays(unit, STATELESS, None), gradient=held, task="sum", sums=True
        )

    def _factor(self, jobs: dict[int, list[tuple[dict[str, Any], list[HomeParameter]]]]) -> float:
        """What this step multiplies the gradients by: a scaler's scale, undone, and the clip of `max_grad_norm`."""
        scale = getattr(self.optimizer, "grad_scale", None)
        unscale = 1.0 if scale is None else scale.double().reciprocal().float().item()
        factor = unscale
        if self.max_grad_norm is not None and self.takes_factor():
            held = {slot.index for groups in jobs.values() for _, slots in groups for slot in slots}
            self.grad_norm = self._norm(slot for slot in self.slots() if slot.index in held) * unscale
            factor *= _clip_factor(self.grad_norm, self.max_grad_norm)
        self._expected_factor = unscale  # drafts hope that the norm will be below
        return factor

    def _check_groups(self) -> None:
        self._check_members(self.optimizer.param_groups)
        self._check_held_once(())
        reason = why_not_fused(self._class, self.optimizer.param_groups) if self.kernel == "fused" else None
        if reason is not None:
            raise usage_error(
                f"{self._class.__name__} with the options it was wrapped with: noria's own kernel updates it",
                f"a group with {reason}, for which there is none",
                'set it before noria.wrap, or wrap with kernel="torch"',
            )

    def _check_held_once(self, more: Iterable[nn.Parameter]) -> None:
        """The fused kernels' moments lie beside the parameter, so only one optimizer can keep some."""
        if self.kernel != "fused":
            return
        groups = [group for updates in self.wrapped.optimizers for group in updates.optimizer.param_groups]
        held = Counter(chain(more, *(group["params"] for group in groups)))
        if any(number > 1 and self._fuses(self.wrapped.slot_of[each].unit) for each, number in held.items()):
            raise usage_error(
                'each parameter in one place of one optimizer under kernel="fused"',
                "one that is in two",
                'wrap with kernel="torch"',
            )

    def _take_gradients(self) -> dict[int, list[tuple[dict[str, Any], list[HomeParameter]]]]:
        """What `p.grad` says now, unit by unit and group by group; the user's own tensors are copied to the home."""
        jobs: dict[int, list[tuple[dict[str, Any], list[HomeParameter]]]] = {}
        for group in self.optimizer.param_groups:
            hyper = hyper_of(group)
            by_unit: dict[int, list[HomeParameter]] = {}
            for parameter in group["params"]:
                slot = self.wrapped.slot_of[parameter]
                if parameter.grad is None:
                    continue
                if self.kernel != "whole" and (slot.has_master or keeps_state(self._class, group)):
                    self.state.unsettled(parameter)  # made now, so that it keeps torch's order
                self.wrapped.confirm_low_bits(slot)
                if self.wrapped.custody.gradient_is(slot.index) == "foreign":
                    if not slot.trainable:
                        raise usage_error(
                            f'no gradient on "{slot.name}", frozen when it was wrapped',
                            "one in p.grad",
                            "unfreeze parameters before noria.wrap",
                        )
                    self.wrapped.custody.take_foreign_gradient(slot.index)
                by_unit.setdefault(slot.unit, []).append(slot)
            for unit, slots in by_unit.items():
                jobs.setdefault(unit, []).append((hyper, slots))
        return jobs

    def run(self, unit: int) -> None:
        """The real optimizer on one unit, if an update of it is waiting. When it raises, parameters that it has not
        touched go on waiting for theirs."""
        groups = self._jobs.get(unit)
        if groups is None:
            return
        slots = [slot for _, slots in groups for slot in slots]
        with plainly(self._autocast):
            versions = {slot.index: self.home_parameter(slot)._version for slot in slots}
            try:
                self._run(groups)
            except BaseException:
                done = {slot.index for slot in slots if self.home_parameter(slot)._version != versions[slot.index]}
                self._jobs[unit] = [
                    (hyper, [slot for slot in slots if slot.index not in done]) for hyper, slots in groups
                ]
                self._finish(slots, done)
                self.wrapped.custody.defer_update(unit)
                raise
            del self._jobs[unit]
            self._finish(slots, versions)

    def _run(self, groups: list[tuple[dict[str, Any], list[HomeParameter]]]) -> None:
        members = []
        for hyper, slots in groups:
            parameters = []
            for slot in slots:
                parameter = self.home_parameter(slot)
                parameter.grad = self._gradient(slot)
                parameters.append(parameter)
            members.append({**hyper, "params": parameters})
        worker = worker_of(self.optimizer, members)
        slots = [slot for _, slots in groups for slot in slots]
        for slot in slots:
            if dict.__contains__(self.state, slot.parameter):
                worker.state[self.home_parameter(slot)] = self.state.unsettled(slot.parameter)
        step_of(type(worker))(worker)
        for slot in slots:
            if self.home_parameter(slot) in worker.state:
                dict.__setitem__(self.state, slot.parameter, worker.state[self.home_parameter(slot)])

    def _finish(self, slots: Iterable[HomeParameter], updated: Container[int]) -> None:
        """After an update: gradients are let go, new state moves in, working copies follow masters."""
        for slot in slots:
            self.home_parameter(slot).grad = None
            if slot.index in updated:
                self._adopt(slot)
                if slot.has_master:
                    self.wrapped.round_master(slot)

    def _submit(
        self, unit: int, groups: list[tuple[dict[str, Any], list[HomeParameter]]], urgency: int, factor: float
    ) -> None:
        """One unit's update for the host pool: a job for each rule, and one for each parameter whose state lies outside
        of the home."""
        jobs: dict[tuple[FusedRule, int], list[_Piece]] = {}
        scalars = _Scalars(factor, self.wrapped.policy.rounding_seed)
        for number, (hyper, slots) in enumerate(groups):
            rule = rule_of(self._class, hyper)
            for slot in slots:
                step = self._count_step(slot, rule)
                in_home = all(self._is_planned(slot, key) for key in rule.keys)
                piece = self._piece(slot, scalars(number, rule, hyper, step))
                jobs.setdefault((rule, -1 if in_home else slot.index), []).append(piece)
        for (rule, index), pieces in jobs.items():
            arrays = self._arrays(unit, rule, None if index < 0 else self.wrapped.slots[index])
            held = self.wrapped.home.address("held gradients", unit)
            job = _C.UpdateJob(rule.name, pieces, arrays, gradient=held)
            if self.wrapped.custody.update_on_pool(unit, job, urgency):
                self._change_places(unit)

    def _piece(self, slot: HomeParameter, scalars: _C.UpdateScalars) -> _Piece:
        offset = slot.offset // slot.dtype.itemsize
        if self._state_dtype == "fp32":
            return (offset, slot.parameter.numel(), scalars)
        return (offset, slot.parameter.numel(), scalars, self._numbers[slot.index], slot.first_block)

    def _number_elements(self) -> None:
        """Numbers all elements in the order of the groups, each parameter from a multiple of a block on: what they are
        rounded by does not depend on units."""
        if self.kernel != "fused" or self._state_dtype == "fp32":
            return
        number = 0
        for slot in self.slots():
            self._numbers[slot.index] = number
            number += -(-slot.parameter.numel() // _C.STATE_BLOCK) * _C.STATE_BLOCK

    def _expected_pieces(
        self, step_of: Callable[[int, HomeParameter, FusedRule], int | None], factor: float
    ) -> dict[int, list[_Piece]]:
        """By unit, updates with the hyperparameters as they are now. `step_of`, of the group's number, the parameter
        and its rule: None leaves the parameter out, and its unit incomplete."""
        self._number_elements()
        scalars = _Scalars(factor, self.wrapped.policy.rounding_seed)
        pieces: dict[int, list[_Piece]] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            rule = rule_of(self._class, group)
            for parameter in group["params"]:
                slot = self.wrapped.slot_of.get(parameter)
                step = None if slot is None else step_of(number, slot, rule)
                if slot is not None and step is not None:
                    pieces.setdefault(slot.unit, []).append(self._piece(slot, scalars(number, rule, group, step)))
        return pieces

    # ---- inside backward ----

    def expect_in_backward(self) -> list[int]:
        """Tells the engine how to update each unit in the backward that begins now. Returns the slots it spoke of."""
        if self.optimizer.state is not self.state:
            self._settle(None)
            self._take_state_over()

        def ready_step(number: int, slot: HomeParameter, rule: FusedRule) -> int | None:
            if not slot.trainable:
                return None
            if rule not in self.wrapped.plan.fused[slot.unit]:
                raise usage_error(
                    f"{self._class.__name__} with the options it was wrapped with",
                    f"group {number} turned into {rule.name}",
                    "set it before noria.wrap",
                )
            self.wrapped.confirm_low_bits(slot)
            return self._ready_step(slot, rule)

        with plainly():
            self._check_groups()
            for unit, members in self._expected_pieces(ready_step, 1.0).items():
                rule = self.wrapped.plan.fused[unit][0]
                # Its gradient's address is known when it comes; until then any that is not null will do.
                arrays = self._arrays(unit, rule, None)
                job = _C.UpdateJob(
                    rule.name, members, arrays, gradient=self.wrapped.home.address("working copies", unit)
                )
                self.wrapped.custody.expect_in_backward(unit, job)
        return [slot.index for slot in self.slots() if slot.trainable]

    def _ready_step(self, slot: HomeParameter, rule: FusedRule) -> int:
        """The step that comes now, with its moments in the home. What the optimizer's state will say of a first one is
        said at `step()`, for the parameters that were updated."""
        if not rule.keys:
            return 1
        state = dict.get(self.state, slot.parameter) or {}
        keys = self._keys(slot, rule)
        if any(state.get(key) is None for key in rule.keys):
            if slot.index not in self._zeroed:
                self._zeroed.add(slot.index)
                for key in keys:
                    self._new_moment(slot, key)
            return 1
        self._adopt_replaced(slot, state, keys)
        return self._step_after(state, rule)

    def _claim_updates(self) -> None:
        """`step()` after updates inside backward: what they did is entered into the optimizer's state."""
        custody = self.wrapped.custody
        custody.begin_step()
        if any(custody.is_held_back(slot.index) for slot in self.slots()):  # by accumulate(): their updates begin now
            for updates in self.wrapped.optimizers:
                updates.expect_in_backward()
            custody.update_held()
        own = sorted({slot.unit for slot in self.slots()})
        used = {(unit, offset): scalars for unit, pieces in custody.take_updated(own) for offset, scalars in pieces}
        now = _Scalars(1.0, self.wrapped.policy.rounding_seed)
        updated, changed, strange = [], None, None
        for number, group in enumerate(self.optimizer.param_groups):
            rule = rule_of(self._class, group)
            for parameter in group["params"]:
                slot = self.wrapped.slot_of[parameter]
                scalars = used.get((slot.unit, slot.offset // slot.dtype.itemsize)) if parameter.numel() else None
                says = custody.gradient_is(slot.index)
                is_used = scalars is not None or (parameter.numel() == 0 and says == "held")
                if is_used != (says == "held") or says == "foreign":
                    strange = slot
                if not is_used:
                    continue
                if slot.has_master or keeps_state(self._class, group):
                    self.state.unsettled(parameter)
                step = self._count_step(slot, rule)
                updated.append(slot.index)
                if scalars is not None and now(number, rule, group, step) != scalars:
                    changed = number
        custody.bump_versions(updated)
        custody.end_step(False)
        self.num_steps += 1
        if changed is not None:
            raise usage_error(
                'hyperparameters under update="backward" as they were when backward began',
                f"group {changed} changed between backward() and step(); the updates were made with the former values",
                'change them after step() or before backward(), or wrap with update="auto"',
            )
        if strange is not None:
            raise usage_error(
                'p.grad under update="backward" as backward() left it, and zero_grad() after step()',
                f'that of "{strange.name}" cleared, replaced or used up before; the updates are those of backward()',
                'leave p.grad alone, or wrap with update="auto"',
            )

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        if not self.in_backward:
            yield
            return
        refuse_inside_backward("optimizer.accumulate()")
        self.wrapped.recover()
        wrapped = self.wrapped
        wrapped.hold_all_gradients()
        wrapped.num_accumulating += 1
        wrapped.custody.set_accumulating(True)
        try:
            yield
        finally:
            wrapped.num_accumulating -= 1
            wrapped.custody.set_accumulating(wrapped.num_accumulating > 0)

    # ---- drafts ----

    def expect(self) -> None:
        """Tells the engine what `step()` would do as things are now, so that it may be done during backward."""
        drafted = self.wrapped.plan.drafted if self.kernel == "fused" and self.wrapped.drafts_pay else frozenset()
        told = self._expect_drafts(drafted) if drafted else set()
        if self._wants_sums and _C.STORAGE_CAN_REFUSE and self.takes_factor():
            self._expect_sums(told)

    def _expect_sums(self, told: set[int]) -> None:
        by_unit: dict[int, list[HomeParameter]] = {}
        for slot in self.slots():
            if slot.trainable and slot.unit not in told:
                by_unit.setdefault(slot.unit, []).append(slot)
        for unit, slots in by_unit.items():
            self.wrapped.custody.expect_update(unit, self._sum_job(unit, slots))

    def _expect_drafts(self, drafted: frozenset[int]) -> set[int]:
        """Returns the units that will be."""

        def next_step(number: int, slot: HomeParameter, rule: FusedRule) -> int | None:
            return self._next_step(slot, rule) if slot.unit in drafted else None

        pieces = self._expected_pieces(next_step, self._expected_factor)
        whole = [unit for unit, members in pieces.items() if len(members) == len(self.wrapped.units[unit].parameters)]
        for unit in whole:
            rule = self.wrapped.plan.fused[unit][0]
            here, there = (self._arrays(unit, rule, None, spare) for spare in (False, True))
            held = self.wrapped.home.address("held gradients", unit)
            job = _C.UpdateJob(rule.name, pieces[unit], here, gradient=held, to=there, sums=self._wants_sums)
            self.wrapped.custody.expect_update(unit, job)
        return set(whole)

    def _next_step(self, slot: HomeParameter, rule: FusedRule) -> int | None:
        """As `_count_step` will, without counting. None: state will be made or moved first."""
        if rule not in self.wrapped.plan.fused[slot.unit] or slot.index in self.wrapped.loaded_low_bits:
            return None
        if not rule.keys:
            return 1
        if not dict.__contains__(self.state, slot.parameter):
            return None
        state = self.state.unsettled(slot.parameter)
        for key in self._keys(slot, rule):
            if state.get(key) is None or state[key] is not self._adopted.get((slot.index, key)):
                return None
            _C.watch(state[key])  # who edits it before the step says so
        return self._step_after(state, rule)

    def _change_places(self, unit: int) -> None:
        """A draft was committed: what views the unit's state views it where it lies now."""
        home = self.wrapped.home
        for slot in self.wrapped.units[unit].parameters:
            self.wrapped.move_views(slot)
            for key in keys_of(self.wrapped.plan.fused[unit][0].keys, self._state_dtype):
                adopted = self._adopted[(slot.index, key)]
                is_moment = key in MOMENT_OF
                offset = home.moment_offset(slot, adopted.dtype) if is_moment else home.scales_offset(slot)
                _C.move_tensor(adopted, home.address(PURPOSE_OF[key], unit) + offset)

    def _count_step(self, slot: HomeParameter, rule: FusedRule) -> int:
        """The step that comes now. State is made as torch makes it: lazily, from zeros, `step` a float."""
        if not rule.keys:
            return 1
        state = self.state.unsettled(slot.parameter)
        keys = self._keys(slot, rule)
        is_first = any(state.get(key) is None for key in rule.keys)
        if is_first:
            if rule.counts_steps:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for key in keys:
                state[key] = self._moment(slot, key) if slot.index in self._zeroed else self._new_moment(slot, key)
                self._adopted[(slot.index, key)] = state[key]
            self._zeroed.discard(slot.index)
        else:
            self._adopt_replaced(slot, state, keys)
        step = 1 if is_first else self._step_after(state, rule)
        if rule.counts_steps:
            state["step"] += 1
        elif self._state_dtype != "fp32":
            state[ROUNDING_STEP] = step
        return step

    def _step_after(self, state: dict[str, Any], rule: FusedRule) -> int:
        """The step that comes after those that the state has seen."""
        if rule.counts_steps:
            return int(state["step"]) + 1
        return state.get(ROUNDING_STEP, 1) + 1 if self._state_dtype != "fp32" else 2

    def _adopt_replaced(self, slot: HomeParameter, state: dict[str, Any], keys: tuple[str, ...]) -> None:
        """Tensors that somebody has put in the place of those in the home."""
        if all(state.get(key) is self._adopted.get((slot.index, key)) for key in keys):
            return
        self._settle(slot.parameter)
        self._adopt(slot)
        for key in keys:
            if state.get(key) is None:  # scales that somebody took away: they are where they were
                state[key] = self._moment(slot, key)
            self._adopted[(slot.index, key)] = state[key]

    def _new_moment(self, slot: HomeParameter, key: str) -> torch.Tensor:
        place = self._moment(slot, key)
        if place is not None:
            return place.zero_()
        made = torch.zeros_like(self.wrapped.home.working(slot), dtype=torch.float32)
        note = f"{self._class.__name__} makes a {key} that was not planned for, outside of the home"
        if note not in self.wrapped.plan.unpredicted:
            self.wrapped.plan.unpredicted.append(note)
        return made

    def _arrays(self, unit: int, rule: FusedRule, outside: HomeParameter | None, spare: bool = False) -> _C.UnitArrays:
        """Of the whole unit. `outside`: a parameter whose moments are tensors of their own; they are given as if the
        unit's began so much earlier, and the job touches nothing but that parameter."""
        home = self.wrapped.home
        addresses = {}
        state_dtype = "fp32" if outside is not None else self._state_dtype
        for name, key in zip("mv", rule.keys, strict=False):
            addresses[name] = home.address(PURPOSE_OF[key], unit, spare)
            if outside is not None:
                value = self.state.unsettled(outside.parameter)[key]
                addresses[name] = value.data_ptr() - outside.offset // outside.dtype.itemsize * value.element_size()
            elif state_dtype == "8bit":
                addresses[f"{name}_scales"] = home.address(PURPOSE_OF[SCALES_KEY[key]], unit, spare)
        working = home.address("working copies", unit, spare)
        if self.wrapped.policy.dtype is None:
            return _C.UnitArrays(master=working, state=state_dtype, **addresses)
        low = home.address("low bits", unit, spare)
        return _C.UnitArrays(working=working, low=low, state=state_dtype, **addresses)

    # ---- whole: optimizers that look at more than one parameter ----

    def _step_whole(self, closure: Callable[[], Any] | None) -> Any:
        optimizer = self.optimizer
        self._check_members(optimizer.param_groups)
        refuse_out_of_reach(optimizer, self.wrapped.slot_of)
        if self.max_grad_norm is not None:
            if closure is not None:
                raise usage_error(
                    f"{self._class.__name__}.step() without a closure, for max_grad_norm clips before it",
                    "one, which brings new gradients in the middle of the step",
                    "clip inside of the closure and leave max_grad_norm out",
                )
            self.grad_norm = self._clip_by_torch(self.max_grad_norm)
        step = step_of(original_class(type(optimizer)))

        def with_the_model() -> Any:
            """The user's closure: the model must see what the optimizer wrote, the optimizer the new gradients."""
            assert closure is not None
            self._take_home_back()
            try:
                return closure()
            finally:
                self._lend_home()

        self._lend_home()
        try:
            result = step(optimizer) if closure is None else step(optimizer, with_the_model)
        finally:
            self._take_home_back()
        self.wrapped.custody.end_step(True)
        self.num_steps += 1
        return result

    def _lend_home(self) -> None:
        """Waits until nobody reads or writes the home of the parameters in the optimizer, and shows them to it."""
        met: dict[int, HomeParameter] = {}

        def meet(parameter: nn.Parameter) -> nn.Parameter:
            slot = self.wrapped.slot_of.get(parameter)
            if slot is not None:
                met[slot.index] = slot
            return parameter

        exchange(self.optimizer, meet)
        with plainly():
            self._take_gradients()
            self.wrapped.custody.begin_step()
            for unit in sorted({slot.unit for slot in met.values()}):
                self.wrapped.custody.settle(unit)  # another optimizer's
                self.wrapped.custody.defer_update(unit)
                self.wrapped.custody.settle(unit)  # the waits of an update; `run` finds no job and returns
            for slot in met.values():
                home = self.home_parameter(slot)
                home.__dict__ = slot.parameter.__dict__  # attributes of the user's, both ways
                home.requires_grad_(slot.parameter.requires_grad)
                home.grad = self._lent_gradient(slot)
                written = None if home.grad is None else home.grad._version
                self._lent.append((slot, home._version, home.grad, written))
        homes = {slot.parameter: self.home_parameter(slot) for slot in met.values()}
        exchange(self.optimizer, lambda parameter: homes.get(parameter, parameter))
        del self.optimizer._noria  # type: ignore[attr-defined]  # its methods are its own meanwhile

    def _lent_gradient(self, slot: HomeParameter) -> torch.Tensor | None:
        """`p.grad` itself where it may be updated with, for the optimizer may keep it; a copy else."""
        gradient, home = slot.parameter.grad, self.home_parameter(slot)
        if gradient is None or (gradient.device == home.device and gradient.dtype == home.dtype):
            return gradient
        return self.wrapped.home.held(slot).to(home.dtype, copy=True)

    def _take_home_back(self) -> None:
        """The optimizer has its own parameters again; what it did to values and gradients is known everywhere."""
        lent, self._lent = self._lent, []
        owners = {self.home_parameter(slot): slot.parameter for slot, _, _, _ in lent}
        exchange(self.optimizer, lambda parameter: owners.get(parameter, parameter))
        self.optimizer._noria = self  # type: ignore[attr-defined]
        if self.optimizer.state is not self.state:
            self._take_state_over()
        updated = []
        with plainly():
            for slot, version, gradient, written in lent:
                home = self.home_parameter(slot)
                if home._version != version:
                    updated.append(slot.index)
                    if slot.has_master:
                        self.wrapped.round_master(slot)
                if home.grad is not gradient:
                    like = slot.parameter
                    like.grad = None if home.grad is None else home.grad.to(device=like.device, dtype=like.dtype)
                elif gradient is not None and gradient is not slot.parameter.grad and gradient._version != written:
                    slot.parameter.grad.copy_(gradient)  # type: ignore[union-attr]  # a copy of it was lent
                home.grad = None
        self.wrapped.custody.bump_versions(updated)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        self._settle(None)
        optimizer = self.optimizer
        state = optimizer.state
        if self._state_dtype == "8bit":  # hooks of the user's see floats too
            optimizer.state = defaultdict(dict, {key: self._without_codes(value) for key, value in state.items()})
        try:
            result = original_class(type(optimizer)).state_dict(optimizer)
        finally:
            optimizer.state = state
        number = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slot = self.wrapped.slot_of[parameter]
                if slot.has_master and number in result["state"]:
                    result["state"][number] = {**result["state"][number], "low_bits": self.wrapped.low_bits(slot)}
                number += 1
        return result

    @staticmethod
    def _without_codes(values: Any) -> Any:
        return plain_values(values) if isinstance(values, dict) else values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wrapped.refuse_between_steps("optimizer.load_state_dict()", mends=True)
        self._is_loading = True  # it may be what mends a torn home
        try:
            self._load_state_dict(state_dict)
        finally:
            self._is_loading = False

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        optimizer, wrapped = self.optimizer, self.wrapped
        self._settle(None)
        if optimizer.state is not self.state:
            self._take_state_over()
        for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
            changed = before(optimizer, state_dict)
            state_dict = changed if changed is not None else state_dict
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with torch.inference_mode(False), torch.no_grad():
            state_dict, low_bits = _without_low_bits(state_dict, parameters)
            loaded = self._loaded_by_torch(state_dict)
            dict.clear(self.state)
            for key, values in loaded.items():
                if values or key not in wrapped.slot_of:
                    dict.__setitem__(self.state, key, values)
            for parameter in parameters:
                slot = wrapped.slot_of[parameter]
                wrapped.custody.access_home(slot.unit, True)
                low = low_bits.get(parameter)
                if low is not None and slot.has_master:
                    wrapped.set_low_bits(slot, low)
                self._adopt(slot)
        self._zeroed.clear()
        wrapped.is_loaded(self)
        for after in optimizer._optimizer_load_state_dict_post_hooks.values():
            after(optimizer)

    def _loaded_by_torch(self, state_dict: dict[str, Any]) -> dict[Any, Any]:
        """torch's own code, or the class's, does the checks and the casts, while the optimizer holds stand-ins with the
        home's dtypes on the CPU. Gives the state by real parameters; groups are replaced as torch replaces them."""
        optimizer, slot_of = self.optimizer, self.wrapped.slot_of
        stand_ins: dict[nn.Parameter, nn.Parameter] = {}
        owners: dict[nn.Parameter, nn.Parameter] = {}

        def stand_in(parameter: nn.Parameter) -> nn.Parameter:
            if parameter in slot_of and parameter not in stand_ins:
                stand_ins[parameter] = self._stand_in(slot_of[parameter])
                owners[stand_ins[parameter]] = parameter
            return stand_ins.get(parameter, parameter)

        before = optimizer._optimizer_load_state_dict_pre_hooks
        after = optimizer._optimizer_load_state_dict_post_hooks
        exchange(optimizer, stand_in)
        del optimizer._noria  # type: ignore[attr-defined]
        try:
            _set_load_hooks(optimizer, OrderedDict(), OrderedDict())  # these saw and will see the parameters themselves
            original_class(type(optimizer)).load_state_dict(optimizer, state_dict)
        finally:
            _set_load_hooks(optimizer, before, after)
            optimizer._noria = self  # type: ignore[attr-defined]
            exchange(optimizer, lambda parameter: owners.get(parameter, parameter))
            loaded, optimizer.state = optimizer.state, self.state
        return dict(OptimizerState.unwatched.items(loaded))

    def _stand_in(self, slot: HomeParameter) -> nn.Parameter:
        """Shape and dtype of the home's tensor, no memory of its own: `low_bits` must not be cast to a float."""
        dtype = torch.float32 if slot.has_master else slot.dtype
        like = torch.empty(1, dtype=dtype).expand(slot.parameter.shape)
        return nn.Parameter(like, requires_grad=slot.trainable)

    def add_param_group(self, group: dict[str, Any]) -> None:
        members = group.get("params", [])
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        group = {**group, "params": members}
        parameters = [m[1] if isinstance(m, tuple) else m for m in members]
        self._check_members([{"params": parameters}])
        self._check_held_once(parameters)
        for slot in (self.wrapped.slot_of[parameter] for parameter in parameters):
            if slot.is_split and not self._fuses(slot.unit):
                raise usage_error(
                    f"a group whose masters {self._class.__name__} can update: it is not noria's kernel's",
                    f'"{slot.name}", whose master is split for that kernel',
                    'wrap with kernel="torch", or give the group to the optimizer before noria.wrap',
                )
        original_class(type(self.optimizer)).add_param_group(self.optimizer, group)
        self.optimizer._step_supports_amp_scaling = self.takes_factor()  # type: ignore[attr-defined]


def _clip_factor(norm: torch.Tensor, max_norm: float) -> float:
    """torch's own arithmetic, in fp32; what is not finite goes through as it does there."""
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def _set_load_hooks(optimizer: Optimizer, before: OrderedDict[Any, Any], after: OrderedDict[Any, Any]) -> None:
    optimizer._optimizer_load_state_dict_pre_hooks = before
    optimizer._optimizer_load_state_dict_post_hooks = after


def _without_low_bits(
    state_dict: dict[str, Any], parameters: list[nn.Parameter]
) -> tuple[dict[str, Any], dict[nn.Parameter, torch.Tensor]]:
    """noria's own entry apart from the rest, which torch casts to the parameter's dtype."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    rest, low_bits = dict(state_dict["state"]), {}
    for number, parameter in zip(numbers, parameters, strict=False):
        values = rest.get(number)
        if isinstance(values, dict) and "low_bits" in values:
            low_bits[parameter] = values["low_bits"]
            rest[number] = {key: value for key, value in values.items() if key != "low_bits"}
    return {**state_dict, "state": rest}, low_bits
