"""Implements `step()` and the related calls of one wrapped optimizer.

This file only decides the order of the work. The other files of this folder do it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from noria import _C
from noria._errors import usage_error
from noria.model.layout import HomeParameter, StatePlace
from noria.model.optimizer_classes import original_class
from noria.pipeline.stage_adapter import StageAdapters
from noria.runtime.accumulation import Accumulation
from noria.runtime.context import Context
from noria.runtime.draft_policy import DraftPolicy
from noria.runtime.home_reads import HomeReads
from noria.runtime.load_tracker import LoadTracker
from noria.runtime.rank_sync import RankSync
from noria.runtime.rest import Rest
from noria.runtime.state import RunState
from noria.runtime.step_boundary import StepBoundary
from noria.runtime.streamed import Streamed
from noria.runtime.unread_tensors import UnreadTensors
from noria.runtime.weights import Weights
from noria.step.backward_step import BackwardStep
from noria.step.collect_grads import take_gradients
from noria.step.drafts import Drafts
from noria.step.grad_norm import GradNorm
from noria.step.host_kernels import HostKernels
from noria.step.optimizer_state import HomeState
from noria.step.param_groups import Jobs, ParamGroups, refuse_strangers, wants_more
from noria.step.resident_step import ResidentStep
from noria.step.sharded_state import OptimizerShards
from noria.step.state_dict import load_state_dict, state_dict
from noria.step.step_counts import StepCounts
from noria.step.streamed_step import StreamedStep
from noria.step.torch_on_device import TorchOnDevice
from noria.step.torch_step import TorchStep
from noria.step.whole_step import WholeStep
from noria.torch_state import autocast_now, plainly, refuse_inside_backward

__all__ = ["StepDriver"]


@dataclasses.dataclass(frozen=True)
class StepServices:
    """Holds the parts that all optimizers of one wrap call share in `step()`."""

    run: RunState
    sync: RankSync
    weights: Weights
    reads: HomeReads
    loads: LoadTracker
    accumulation: Accumulation
    draft_policy: DraftPolicy
    stages: StageAdapters
    boundary: StepBoundary
    rest: Rest
    streamed: Streamed
    wrap_anew: Callable[[], None]
    """Plans again, for parameters of a new group that had no memory for gradients and updates."""


class StepDrivers(list["StepDriver"]):
    """Holds the drivers of all optimizers of one wrap call."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context

    def groups(self) -> list[dict[str, Any]]:
        return [group for driver in self for group in driver.optimizer.param_groups]

    def have_stepped(self) -> bool:
        """Returns True if each optimizer has made a step, so that its state is there."""
        return all(driver.num_steps > 0 for driver in self)

    def watch_state(self) -> None:
        """Has the next write to each state tensor at home told to `run`."""
        for driver in self:
            driver.watch_state()

    def run_update(self, unit: int) -> None:
        """Runs the deferred updates of a unit. The engine calls this when the unit is needed.

        Threads: the launching thread, to which these updates were deferred.
        """
        for driver in self:
            driver.run_update(unit)

    def expect(self) -> None:
        """Tells the engine which updates to draft. Runs after a forward that may train."""
        for driver in self:
            driver.expect()

    def expect_in_backward(self) -> set[int]:
        """Tells the engine all updates that it makes inside backward. Returns the slots that they update."""
        return {index for driver in self for index in driver.expect_in_backward()}

    def begin_backward(self) -> None:
        """Runs when a backward begins under update="backward": tells the engine all of its updates.

        Raises UsageError if a trainable parameter is in no optimizer any more.
        """
        for driver in self:
            driver.run.refuse_while_averaged('backward() under update="backward"')
        expected = self.expect_in_backward()
        self.context.files.release()
        for slot in self.context.slots:
            if slot.trainable and slot.parameter.requires_grad and slot.index not in expected:
                raise usage_error(
                    'every trainable parameter in an optimizer under update="backward"',
                    f'"{slot.name}", which none holds any more',
                    'freeze it, or wrap with update="auto"',
                )


class StepDriver:
    """Turns `step()` of one optimizer into updates of units.

    `kernel` is "fused", "torch" or "whole" (update_rules.py, Note [Who updates a unit]).
    """

    def __init__(
        self,
        context: Context,
        services: StepServices,
        drivers: StepDrivers,
        optimizer: Optimizer,
        kernel: str,
        state_places: dict[tuple[int, str], StatePlace],
        state_arena: _C.Arena | None,
    ) -> None:
        run, weights = services.run, services.weights
        self.context = context
        self.services = services
        self.run = run
        self.drivers = drivers
        self.optimizer = optimizer
        self.in_backward = context.updates_in_backward
        self.num_steps = 0
        self.writes_file = False  # True while `state_dict()` is for a file, where moments may be codes
        self.unread: UnreadTensors | None = None  # makes stand-ins in `state_dict()` for state that lies in files
        self.steps_whole = False  # True inside a `step()` of torch's code, which holds other parameters meanwhile
        self.scaled_by_class = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._members = members = ParamGroups(context, optimizer, kernel, drivers.groups)
        self._state = state = HomeState(members, run, services.sync, weights.masters, state_places, state_arena)
        self._torch_step = TorchStep(members, state, weights.masters)
        self._steps = steps = StepCounts(members, state, weights)
        self._fused = fused = HostKernels(members, state, steps, services.stages.scaling)
        self._on_device = there = TorchOnDevice(members, state)
        self._resident = ResidentStep(members, state, fused, there, weights.masters, services.rest)
        self._streamed = StreamedStep(members, state, fused, there, services.streamed)
        self._norms = norms = GradNorm(members, fused, run, services.sync, self._resident)
        self._drafts = Drafts(members, steps, fused, norms, services.draft_policy)
        self._backward_step = BackwardStep(
            members,
            state,
            steps,
            fused,
            self._torch_step,
            weights.masters,
            services.accumulation,
            drivers.expect_in_backward,
        )
        self._shards = OptimizerShards(members, state, run, weights.masters)
        self._whole = WholeStep(members, state, self._torch_step, norms, weights.masters)
        services.loads.track(self)

    @property
    def max_grad_norm(self) -> float | None:
        return self._norms.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, norm: float | None) -> None:
        self._norms.max_grad_norm = norm

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Returns the norm that the last `step()` measured."""
        return self._norms.grad_norm

    def slots(self) -> Iterator[HomeParameter]:
        return self._members.slots()

    def fuses(self, slot: HomeParameter) -> bool:
        return self._members.fuses(slot.unit)

    def sum_job(self, unit: int, slots: list[HomeParameter]) -> _C.UpdateJob:
        """Returns a job that sums the squares of the held gradients of these parameters."""
        return self._fused.sum_job(unit, slots)

    def takes_factor(self) -> bool:
        """Returns True if the update applies unscaling and clipping as a factor. Otherwise they change `p.grad`."""
        return self._members.takes_factor()

    # ---- between passes ----

    def step(self, closure: Callable[[], object] | None) -> object:
        refuse_inside_backward("optimizer.step()")
        self.run.recover()
        self.run.refuse_while_averaged("optimizer.step()")
        self.run.require_awake("optimizer.step()")
        self.services.loads.refuse_missing("optimizer.step()")
        self.services.boundary.begin()
        self._state.follow()
        if self._members.kernel == "whole":
            self.steps_whole = True
            try:
                result = self._whole.step(closure)
            finally:
                self.steps_whole = False
            self.num_steps += 1
            return result
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            now: StepDriver = self.optimizer._noria  # type: ignore[attr-defined]
            if now is not self:  # the closure's forward has wrapped anew
                return now.step(lambda: loss)
        found_inf = getattr(self.optimizer, "found_inf", None)  # a GradScaler sets it and leaves the rest to step()
        if found_inf is not None and found_inf.item() != 0:
            self._norms.grad_norm = None if self._norms.max_grad_norm is None else torch.tensor(math.inf, device="cpu")
            return loss
        self._torch_step.autocast = self._on_device.autocast = autocast_now(self.context.device.type)
        with plainly():
            if self.in_backward:
                refusal = self._backward_step.claim()
                self.num_steps += 1
                if refusal is not None:
                    raise refusal
            else:
                self._begin()
        return loss

    def end_step(self) -> None:
        """Runs after each `step()` that has not raised, also one that a scaler has skipped."""
        self.services.boundary.end()

    def _begin(self) -> None:
        norms, rest, updates = self._norms, self.services.rest, self.context.engine.updates
        if rest.is_on and not self._resident.can_update():
            rest.end()  # a step at home makes what is missing
        self._members.check_options()
        self._fused.number_elements()
        if norms.max_grad_norm is not None and not self.takes_factor():
            norms.grad_norm = norms.clip_at_step(norms.max_grad_norm)
        jobs = take_gradients(self._members, self._state, self.services.weights.masters)
        at_rest = self._resident.jobs() if rest.is_on else {}
        factor, expected = norms.factor(jobs | at_rest), norms.expected_factor
        ready = self._fused.ready(jobs | at_rest, factor)  # puts state that the user has given into the home
        if at_rest:
            rest.refresh()
            rest.take_writes()
            self._resident.update_by_torch({unit: groups for unit, groups in at_rest.items() if unit not in ready})
        self.context.files.release()
        streams = not rest.stands_still
        order = self._begin_updates(jobs) if streams else []
        if at_rest:
            self._resident.update({unit: ready.pop(unit) for unit in at_rest if unit in ready})
        for priority, unit in enumerate(order):
            if self._streamed.takes(unit, ready.get(unit)):
                self._streamed.defer(unit, jobs[unit], ready.get(unit))
            elif unit in ready:
                self._fused.submit(unit, ready[unit], priority)
            else:
                self._torch_step.defer(unit, jobs[unit])
        slots = [slot for groups in (jobs | at_rest).values() for _, members in groups for slot in members]
        updated = [slot.index for slot in slots]
        self.context.engine.home.bump_versions(updated)
        self._members.note_step(updated)
        for unit in at_rest:
            rest.note_versions(unit)
        self.context.files.release()  # what the first step of a parameter has touched
        if streams:
            try:
                updates.end_step(self.context.policy.update == "blocking")
            finally:
                self.context.engine.gradients.guard_gradients()  # the pool still reads some, also after an error
        norms.unscale(slots)
        self.services.draft_policy.judge(would_hold=norms.max_grad_norm is not None and factor == expected)
        self.num_steps += 1

    def _begin_updates(self, jobs: Jobs) -> list[int]:
        """Tells the engine that updates begin. Returns the units in the order in which the next forward needs them."""
        updates = self.context.engine.updates
        updates.begin_step()
        order = [unit for unit in updates.next_forward_order() if unit in jobs]
        for unit in order:
            updates.run_deferred(unit)  # an update of an earlier step, if no forward has run since
        return order

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        self.services.reads.end()
        return self._norms.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def places_of_torch(self) -> set[str]:
        """Returns the types of the devices on which torch's code runs updates of this optimizer.

        Muon's matrix products count: they are torch's in noria's kernel, too.
        """
        units = {slot.unit for slot in self.slots() if slot.trainable}
        by_torch = {unit for unit in units if not self._members.fuses(unit)}
        streamed = self.context.plan.streamed
        places = {self.context.device.type if unit in streamed else "cpu" for unit in by_torch}
        return places | ({"cpu"} if self._members.cls is torch.optim.Muon and units - by_torch else set())

    def bytes_by_torch(self) -> int:
        return self._torch_step.bytes_moved()

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return self._backward_step.accumulate()

    # ---- inside of passes ----

    def expect(self) -> None:
        """Tells the engine which updates `step()` would make now, so that the engine can draft them during backward."""
        self._drafts.expect()

    def expect_in_backward(self) -> list[int]:
        """Tells the engine how to update each unit in the backward that begins now. Returns the trainable slots."""
        return self._backward_step.expect()

    def run_update(self, unit: int) -> None:
        """Runs the real torch optimizer on one unit, if its update has to run now."""
        if self.in_backward:
            self._backward_step.run(unit)
        elif self._streamed.has(unit):
            self._streamed.run(unit)
        else:
            self._torch_step.run(unit)

    # ---- state ----

    def watch_state(self) -> None:
        self._state.watch()

    def plain_bytes(self) -> int:
        """Returns the bytes that `plain` takes, once all updates are finished."""
        return self._state.copy_bytes(is_plain=True)

    def plain(self) -> dict[Any, Any]:
        """Returns the state as torch's optimizer keeps it: whole tensors in fp32, plus the low bits of the masters.

        Order: updates are finished, and memory has room for `plain_bytes`. Collective if ranks share the model.
        """
        return self._state.plain()

    def state_dict(self) -> dict[str, Any]:
        return state_dict(self._members, self._state, for_file=self.writes_file, unread=self.unread)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.run.require_loadable("optimizer.load_state_dict()")
        with self.run.loading(self._state):
            load_state_dict(self._members, self._state, state_dict)
            self._is_loaded()

    def parts(self) -> dict[str, Any]:
        """Returns this process's part of the state, by parameter name, for `torch.distributed.checkpoint`."""
        self.run.recover()
        with self.run.loading(self._state):  # the caller may want to load into these parts
            self._state.follow()
            return self._shards.state_dict()

    def load_parts(self, state_dict: dict[str, Any]) -> None:
        self._shards.load(state_dict)
        self._is_loaded()

    def _is_loaded(self) -> None:
        self._steps.forget_prepared()
        self.context.files.note_loaded()
        self.services.loads.note(self)
        for after in self.optimizer._optimizer_load_state_dict_post_hooks.values():
            after(self.optimizer)

    def add_param_group(self, group: dict[str, Any]) -> None:
        is_anew = False
        params = group.get("params") if isinstance(group, dict) else None
        if params is not None and not isinstance(params, set):
            members = group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
            parameters = [member[1] if isinstance(member, tuple) else member for member in members]
            if all(isinstance(parameter, torch.Tensor) for parameter in parameters):
                refuse_strangers([{"params": parameters}], self.context.parameters_now())
                is_anew = wants_more([{"params": parameters}], self.context.slot_of)
                if self.run.is_materialized and all(each in self.context.slot_of for each in parameters):
                    is_anew = False  # the next forward finds them unfrozen
                self._check_new([each for each in parameters if each in self.context.slot_of])
        original_class(type(self.optimizer)).add_param_group(self.optimizer, group)  # torch refuses invalid groups
        if is_anew:
            try:
                self.services.wrap_anew()
            except BaseException:
                self.optimizer.param_groups.pop()
                raise
            return
        self.optimizer._step_supports_amp_scaling = self.takes_factor()  # type: ignore[attr-defined]

    def _check_new(self, parameters: list[nn.Parameter]) -> None:
        """Raises UsageError if the parameters of a new group cannot be updated."""
        self._members.check([{"params": parameters}])
        self._members.check_held_once(parameters)
        for slot in (self.context.slot_of[parameter] for parameter in parameters):
            if slot.is_split and not self._members.fuses(slot.unit):
                raise usage_error(
                    f"a group whose masters {self._members.cls.__name__} can update without noria's kernel",
                    f'"{slot.name}", whose master is split for that kernel',
                    'wrap with kernel="torch", or give the group to the optimizer before noria.wrap',
                )
