"""Follows the schedule of pipeline stages that were given to `noria.wrap`, and reports its actions to the engine.

The adapter overrides the methods that a schedule calls, on the stage object itself, until `noria.unwrap`. No class of
torch is changed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from noria._errors import UsageError, usage_error
from noria.model.inner_tensors import tensors_in
from noria.model.update_rules import AS_IT_IS, Scaling
from noria.pipeline.microbatch_buffers import MicrobatchBuffers
from noria.pipeline.pipelining_compat import FOLLOWED, schedule_that_calls, waits_for_sends
from noria.runtime.accumulation import Accumulation
from noria.runtime.context import Context
from noria.runtime.state import RunState
from noria.torch_state import await_device

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.pipelining.stage import _PipelineStageBase

    from noria.model.layout import HomeParameter

__all__ = ["StageAdapters"]


class StageAdapters:
    """Follows all stages of one wrap call.

    It knows which backward of a stage is the last one before a step, and how the schedule scales gradients.
    """

    def __init__(self, context: Context, run: RunState, accumulation: Accumulation) -> None:
        self.context = context
        self.run = run
        self.accumulation = accumulation
        self.stages: list[_StageAdapter] = []
        self._by_slot: dict[int, _StageAdapter] = {}
        self._awaited: set[_StageAdapter] = set()  # stages whose last backward of this step is still to come
        self._finished: set[_StageAdapter] = set()  # stages whose last backward has ended since the last step
        self._ending: _StageAdapter | None = None  # the stage whose last backward of this step runs now

    def follow(self, stages: list[_PipelineStageBase]) -> None:
        self.stages = [_StageAdapter(self, stage) for stage in stages]
        for stage in self.stages:
            for slot in stage.slots:
                self._by_slot[slot.index] = stage

    def remove(self) -> None:
        for stage in self.stages:
            stage.restore()
        self.stages.clear()
        self._by_slot.clear()

    def begin_step(self) -> None:
        """Begins a step, before each optimizer's `step()`.

        Marks the weights as torn if a schedule broke off after the last backward of some stages. Raises UsageError if
        updates inside backward used another scaling than the schedule did.
        """
        if (
            self.context.updates_in_backward
            and self._awaited
            and self._finished
            and self.context.engine.backward.has_unclaimed
        ):
            self.context.engine.mark_torn("a schedule broke off after the last backward of some of its stages")
        self._awaited.clear()
        self._finished.clear()
        refusals = [refusal for stage in self.stages if (refusal := stage.begin_step()) is not None]
        if refusals and not self.context.engine.torn():  # torn weights raise their own error
            raise refusals[0]

    def begin_schedule(self, stage: _StageAdapter) -> None:
        self.run.check_alive()
        self.run.recover()
        self.context.engine.backward.refuse_unclaimed("another step of a schedule")
        self._finished.discard(stage)
        if stage.stage.has_backward:
            self._awaited.add(stage)

    def scaling(self, slot: HomeParameter) -> Scaling:
        """Returns the scaling that the schedule will apply to this gradient before the step, if that is known."""
        if self.context.updates_in_backward:
            stage = self._ending  # other gradients: their own schedule has divided them
            if stage is None or slot.index not in stage.indices:
                return AS_IT_IS
        else:
            stage = self._by_slot.get(slot.index)
            if stage is None:
                return AS_IT_IS
        return AS_IT_IS if stage.divisor == 1 else self.scaling_by(stage.divisor)

    def scaling_by(self, divisor: int) -> Scaling:
        # torch multiplies by the inverse on CUDA.
        inverse = torch.tensor(1.0 / divisor, dtype=torch.float32, device="cpu").item()
        return (float(divisor), 1.0) if self.context.device.type == "cpu" else (1.0, inverse)

    @contextlib.contextmanager
    def more_to_come(self) -> Iterator[None]:
        """Tells the engine that no backward inside the block brings the last gradients before a step."""
        self.context.engine.backward.set_last_of([])
        try:
            yield
        finally:
            self.context.engine.backward.set_last_of(None)

    @contextlib.contextmanager
    def backward(self, stage: _StageAdapter, is_last: bool, is_step_next: bool) -> Iterator[None]:
        if is_last:
            self._awaited.discard(stage)
        elif self.context.updates_in_backward:
            self.accumulation.hold_all()
        units = self._finished_by(stage) if is_last and (is_step_next or self.context.updates_in_backward) else []
        self.context.engine.backward.set_last_of(units)
        self._ending = stage if is_last else None
        try:
            yield
            if is_last:
                self._finished.add(stage)
        finally:
            self._ending = None
            self.context.engine.backward.set_last_of(None)

    def _finished_by(self, stage: _StageAdapter) -> list[int]:
        """Returns the units whose last gradients come with the last backward of this stage.

        Units of no stage, such as a loss, have their last gradients when all stages are finished.
        """
        others = {unit for other in self._awaited for unit in other.units}
        if self._awaited:
            return sorted(stage.units - others)
        elsewhere = {unit for other in self.stages if other is not stage for unit in other.units}
        own_and_unstaged = set(range(len(self.context.units))) - elsewhere
        return sorted(own_and_unstaged | stage.units)


class _StageAdapter:
    """Follows one stage: overrides its methods, and reports what the schedule does with it."""

    def __init__(self, adapters: StageAdapters, stage: _PipelineStageBase) -> None:
        self.adapters = adapters
        self.context = adapters.context
        self.accumulation = adapters.accumulation
        self.stage = stage
        slot_of = self.context.slot_of
        known = [each for each in tensors_in(stage.submod.parameters()) if each in slot_of]
        self.slots = [slot_of[each] for each in dict.fromkeys(known)]
        self.indices = {slot.index for slot in self.slots}
        self.units = {slot.unit for slot in self.slots}
        self.divisor = 1  # the schedule will divide gradients by it; 1 if unknown
        self._divided_by: int | None = None  # by updates inside the last backward; None: no updates
        self._scaled_by = 1  # by the schedule, since that backward
        self.in_flight = MicrobatchBuffers(stage) if self.context.policy.activations != "keep" else None
        self._schedule: _PipelineSchedule | None = None
        self._chunk: int | None = None  # the micro-batch whose forward runs now
        self._num_schedules = 0  # last backwards since the last step
        self._schedules_per_step = 1  # what the last step had; a loop may accumulate over several
        self._own: dict[str, object] = {}  # overridden methods that the object itself had
        self._overridden: list[str] = []
        optional = ("_prepare_forward_infra", "_prepare_backward_infra", "get_bwd_recv_ops", "set_local_bwd_input")
        for name in (*FOLLOWED, *optional):
            if hasattr(stage, name):
                self._override(name, getattr(self, f"_{name.lstrip('_')}"))

    def _override(self, name: str, act: Callable[..., object]) -> None:
        own = getattr(self.stage, name)
        signature = inspect.signature(own)
        if name in self.stage.__dict__:
            self._own[name] = own

        def call(*args: object, **kwargs: object) -> object:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return act(bound.arguments, lambda: own(*args, **kwargs))

        setattr(self.stage, name, act(own) if name == "forward_maybe_with_nosync" else call)
        self._overridden.append(name)

    def restore(self) -> None:
        for name in self._overridden:
            del self.stage.__dict__[name]
        self.stage.__dict__.update(self._own)
        self._overridden.clear()
        if self.in_flight is not None:
            self.in_flight.refill()

    def begin_step(self) -> UsageError | None:
        """Begins an optimizer's step. Returns the error of this stage's updates, or None."""
        if self._num_schedules:
            self._schedules_per_step, self._num_schedules = self._num_schedules, 0
        expected, found = self._divided_by, self._scaled_by
        self.divisor, self._divided_by = 1, None
        return None if expected in (None, found) else _scaled_otherwise(expected, found)

    # ---- overrides of the stage's methods: `given` has the arguments by name, `own` calls the original method ----

    def _clear_runtime_states(self, given: object, own: Callable[[], object]) -> object:
        self.adapters.begin_schedule(self)
        if self.in_flight is not None:
            self.in_flight.clear()
        return own()

    def _prepare_forward_infra(self, given: object, own: Callable[[], object]) -> object:
        return self._prepare(own)

    def _prepare_backward_infra(self, given: object, own: Callable[[], object]) -> object:
        return self._prepare(own)

    def _prepare(self, own: Callable[[], object]) -> object:
        """Follows torch's first run of the module, which only learns shapes."""
        with self.adapters.more_to_come():
            result = own()
        if self.in_flight is not None:
            self.in_flight.prepared()
        return result

    def _get_fwd_recv_ops(self, given: dict[str, Any], own: Callable[[], object]) -> object:
        if self.in_flight is not None:
            self.in_flight.fill(self.stage.args_recv_info[given["fwd_chunk_id"]])
        return own()

    def _forward_one_chunk(self, given: dict[str, Any], own: Callable[[], object]) -> object:
        chunk = given["fwd_chunk_id"]
        self._look_at_schedule()
        self._chunk = chunk
        try:
            with self.adapters.more_to_come():
                output = own()
        finally:
            self._chunk = None
        if self.in_flight is None:
            return output
        self.in_flight.forwarded(chunk, is_next_here=self._hands_on_here())
        is_seen = self.stage.is_last or not waits_for_sends(self._schedule)
        return output if is_seen else self.in_flight.instead_of(output)

    def _forward_maybe_with_nosync(self, own: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if self.in_flight is not None and self._chunk is not None:
                args = self.in_flight.views(self._chunk, args)
            return own(*args, **kwargs)

        return call

    def _get_fwd_send_ops(self, given: dict[str, Any], own: Callable[[], list[dist.P2POp]]) -> list[dist.P2POp]:
        ops = own()
        if self.in_flight is not None:
            self.in_flight.sends(given["fwd_chunk_id"], ops)
        return ops

    def _get_bwd_recv_ops(self, given: dict[str, Any], own: Callable[[], object]) -> object:
        if self.stage.has_backward:
            self._fill_gradients(next(iter(given.values())))
        return own()

    def _set_local_bwd_input(self, given: dict[str, Any], own: Callable[[], object]) -> object:
        self._fill_gradients(given.get("mb_index"))  # torch makes zeros of a missing gradient
        return own()

    def _fill_gradients(self, chunk: int | None) -> None:
        if self.in_flight is not None:
            self.in_flight.fill(getattr(self.stage, "grad_recv_info", {}).get(chunk, ()))

    def _backward_one_chunk(self, given: dict[str, Any], own: Callable[[], object]) -> object:
        if not self.stage.has_backward:
            if self.in_flight is not None and waits_for_sends(self._schedule):
                self.in_flight.let_sent_go()
            return own()
        if not given["full_backward"]:
            raise usage_error(
                "a schedule whose backwards are whole, such as GPipe, 1F1B or interleaved 1F1B",
                "one whose backwards of inputs and of weights are apart",
                "choose another schedule",
            )
        chunk = given["bwd_chunk_id"]
        self._look_at_schedule()
        if self.in_flight is not None:
            self.in_flight.let_sent_go(None if waits_for_sends(self._schedule) else chunk)
        is_last = bool(given["last_backward"])
        if is_last and self.context.updates_in_backward and not self.accumulation.accumulates:
            self._divided_by, self._scaled_by = self.divisor, 1
        self._num_schedules += is_last
        is_step_next = self._num_schedules >= self._schedules_per_step
        with self.adapters.backward(self, is_last, is_step_next):
            result = own()
        if self.in_flight is not None:
            self.in_flight.end_backward(chunk)
        return result

    def _scale_grads(self, given: dict[str, Any], own: Callable[[], object]) -> object:
        """Divides each gradient once and rounds it to its dtype, as torch does. Also divides gradients held at home."""
        divisor = self._scaled_by = given["grad_scale_factor"]
        if divisor == 1:
            return own()
        gradients, backward = self.context.engine.gradients, self.context.engine.backward
        by_unit: dict[int, list[HomeParameter]] = {}
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is None:
                continue
            if gradients.gradient_is(slot.index) != "held":
                gradient.div_(divisor)
            elif not self.context.updates_in_backward or backward.is_held_back(slot.index):
                by_unit.setdefault(slot.unit, []).append(slot)
            elif divisor != self.divisor:
                self._divided_by = divisor  # begin_step must not raise it again
                raise _scaled_otherwise(self.divisor, divisor)
        scaling = self.adapters.scaling_by(divisor)
        num_late = sum(gradients.apply_scales(slot.index) for slots in by_unit.values() for slot in slots)
        if num_late > 0:
            await_device(self.context.device)
        for unit, slots in by_unit.items():
            # If some gradients of a unit are not scaled, its draft cannot foresee that.
            trained = [slot for slot in self.context.units[unit].parameters if slot.trainable]
            is_whole = len(slots) == len(trained)
            if is_whole:
                gradients.begin_scaling(unit, *scaling)
            else:
                gradients.access_held(unit)
            for slot in slots:
                held = self.context.home.held(slot)
                if self.context.device.type == "cpu":
                    held.div_(divisor)
                else:
                    held.mul_(scaling[1])
            if is_whole:
                gradients.end_scaling(unit)
        return None

    # ---- helpers ----

    def _look_at_schedule(self) -> None:
        self._schedule = schedule_that_calls()
        if self._schedule is not None:
            self.divisor = self._schedule._n_microbatches if self._schedule.scale_grads else 1

    def _hands_on_here(self) -> bool:
        """Returns True if this rank also has the next stage, and the schedule hands outputs on in memory."""
        if self.stage.is_last or not hasattr(self._schedule, "pipeline_order_with_comms"):
            return False
        mapping = self.stage.stage_index_to_group_rank
        return bool(mapping.get(self.stage.stage_index + 1) == self.stage.group_rank)


def _scaled_otherwise(expected: int, found: int) -> UsageError:
    return usage_error(
        f'scale_grads({expected}) after a backward under update="backward", which has divided by that already',
        f"scale_grads({found})" if found != 1 else "none",
        "let a schedule of torch.distributed.pipelining that scales as its scale_grads= says call the stage, or divide "
        "the loss; the next step() takes the updates as they are",
    )
