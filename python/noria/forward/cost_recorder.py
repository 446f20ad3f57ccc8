"""Measures what ops cost in some of the first steps, and keeps that for the next run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import torch

from noria import _C
from noria.forward.activations import Activations
from noria.forward.link_paces import LinkPaces
from noria.forward.operator_watch import tensors_of
from noria.forward.saved_bytes import SavedBytes
from noria.forward.update_rates import device_update_gib_s, update_rates
from noria.model.partition import HookSpec
from noria.planning.activation_choice import kept_by_autograd
from noria.planning.cost_cache import KnownCosts, load_costs, save_costs
from noria.planning.measured_costs import MeasuredCosts, measured_costs, slowest
from noria.planning.resident import gradient_bytes
from noria.planning.step_simulation import bytes_per_copied
from noria.planning.streamed import bytes_of_ops
from noria.runtime.context import Context
from noria.runtime.rank_sync import RankSync
from noria.torch_state import in_backward

__all__ = ["CostRecorder"]

_SKIPPED = 2
"""The first steps are unlike the others: passes are learned, and memory is taken."""
_TRACED = 5
_LOOKED_AT = 20
"""After so many steps they are compared with those that costs are of."""
_ALIKE = 1.25
"""Costs are scaled if forwards are larger, smaller, more or fewer than those that were measured, by this ratio."""
_SPANS = 1 << 16


class CostRecorder:
    """Traces some of the first steps. `known` has what it has measured; before that, what an earlier run had.

    If later steps have other inputs, or a link is slower or faster then, `known` has the costs scaled to that.

    Ranks that share the model tell each other what they have measured, so all have the same costs.
    """

    def __init__(
        self,
        context: Context,
        sync: RankSync,
        known: KnownCosts,
        activations: Activations,
        on_measured: Callable[[], None],
    ) -> None:
        """`on_measured` runs when `known` has changed: at the beginning of a `step()`."""
        self.context = context
        self._activations = activations
        self._on_measured = on_measured
        self.known = known
        self.began_with_costs = known.costs is not None
        self.has_measured = False
        """True once `known` is of this run."""
        self._sync = sync
        self._num_steps = 0
        self._since_us = 0
        self._trace: _C.Trace | None = None
        self._saved: SavedBytes | None = None  # while a step's forwards are counted
        self._counted = SavedBytes(slot.parameter for slot in context.slots)
        self._inputs = ""
        # Most bytes on the device of what the engine moves. It is kept here: an allocator may ask inside of the engine.
        self._most_there = 0
        self._at_rest = 0  # what torch keeps from one step to the next, in bytes
        hooks = context.partition.hooks
        self._gauge = next((spec for spec in hooks if spec.is_block), hooks[0])
        self._forwards = self._elements = 0  # how often it has run in this step, and what it has put out
        self._seen: list[tuple[int, int]] = []  # the same, by step since the last look
        self._last_look = 0  # the step
        self._links = LinkPaces(context.backend.stats)
        if known.note:
            context.notes.append(known.note)

    def begin_step(self) -> None:
        """A `step()` begins, the first one after a forward that may train."""
        self._num_steps += 1
        if self.context.plan.least_saved is not None:
            self._most_there = int(self.context.engine.saved.saved_stats()["most_there"])
        if self._forwards:  # else the step of another model, or of another optimizer
            self._seen.append((self._forwards, self._elements))
            self._forwards = self._elements = 0
        if self._trace is None and self._num_steps - self._last_look >= _LOOKED_AT:
            self._look_again()
        if self._num_steps == _SKIPPED + 1:
            self._begin()
        elif self._trace is not None:
            self._saved = None
            if self._num_steps == _SKIPPED + 1 + _TRACED:
                self._end()

    def note_out_of_memory(self, wanted: int) -> None:
        """torch has found no memory on the device: it needs more than was measured. The next run leaves it that much.

        Nothing is kept before costs are known.
        """
        context, costs = self.context, self.known.costs
        if costs is None or context.ranks is not None:
            return
        if self._forwards and not _are_alike(self._elements / self._forwards, costs):
            return  # of other inputs
        had = torch.cuda.memory_allocated(context.device) if context.device.type == "cuda" else 0
        of_stays = gradient_bytes(context.units, context.plan.stays)
        saved = self._most_saved if self._counted.by_unit else kept_by_autograd(context.plan, costs)
        workspace = had + wanted - max(self._at_rest, of_stays) - saved
        if workspace > costs.workspace:
            self.known = dataclasses.replace(self.known, costs=dataclasses.replace(costs, workspace=workspace))
        kept = load_costs(context.plan)
        if kept.costs is not None and workspace > kept.costs.workspace:
            inputs = kept.measured.partition("inputs of ")[2]
            save_costs(context.plan, dataclasses.replace(kept.costs, workspace=workspace), inputs)

    def stop(self) -> None:
        """Stops measuring for good."""
        self._num_steps = max(self._num_steps, _SKIPPED + 1)
        self._saved = None
        if self._trace is not None:
            self._trace = None
            self.context.engine.set_trace(self.context.trace)

    def leave(self, spec: HookSpec, args: object, outputs: list[torch.Tensor]) -> None:
        """Runs when a forward of a module has ended."""
        if spec is self._gauge and outputs and torch.is_grad_enabled() and not in_backward():
            self._forwards += 1
            self._elements += outputs[0].numel()
        if self._saved is None or in_backward() or not torch.is_grad_enabled():
            return
        if not self._inputs:
            self._inputs = ", ".join(str(list(each.shape)) for each in tensors_of(args)[:1])
        try:
            self._saved.count(spec.needs[-1], outputs)
        except Exception:  # a measurement must not end a training
            self._saved = None

    def _begin(self) -> None:
        context = self.context
        chosen = context.plan.streamed and context.policy.optimizer_device == "host"
        if context.plan.stays or chosen:  # visits name no unit that stays; the host updates no unit that streams so
            self.stop()
            return
        self._seen.clear()
        self._trace = context.trace or _C.Trace(_SPANS)
        if context.trace is None:
            context.engine.set_trace(self._trace)
        self._since_us = self._trace.now_us
        self._saved = self._counted

    def _end(self) -> None:
        context, trace = self.context, self._trace
        assert trace is not None
        context.backend.stats("fetch")  # adds to the trace what the device has done by now
        spans = [span for span in trace.spans() if span.start_us >= self._since_us]
        self.stop()
        on_device = bytes_of_ops(context.plan.streamed)
        costs = measured_costs(spans, len(context.units), bytes_per_copied(context.device), on_device)
        forwards, elements = self._sizes()
        costs = self.with_activations(dataclasses.replace(costs, forwards=forwards, elements=elements))
        if not on_device:
            costs = dataclasses.replace(costs, device_update_gib_s=self._device_update_gib_s())
        before = self.known.costs
        if before is not None and _are_alike(elements, before):
            costs = dataclasses.replace(costs, workspace=max(costs.workspace, before.workspace))  # perhaps by an error
        if context.pool is not None:
            context.pool.idle()
            with contextlib.suppress(Exception):  # a measurement must not end a training
                is_split = any(slot.is_split for unit in context.units for slot in unit.parameters)
                state_dtype = context.policy.state_dtype
                rates = update_rates(context.pool.num_threads, is_split=is_split, state_dtype=state_dtype)
                costs = dataclasses.replace(costs, by_threads_gib_s=rates)
        if not costs.draft_gib_s and self.known.costs is not None:  # an earlier run has chosen to draft nothing
            costs = dataclasses.replace(costs, draft_gib_s=self.known.costs.draft_gib_s)
        if context.ranks is not None:
            self._sync.meet("tell what ops cost")
            costs = slowest(context.ranks.host.gather_objects(costs))
        self.known = KnownCosts(costs, f"in this run, inputs of {self._inputs}")
        self.has_measured = True
        is_first = context.ranks is None or context.ranks.rank == 0
        if is_first and (note := save_costs(context.plan, costs, self._inputs)):
            context.notes.append(note)
        self._on_measured()

    def _sizes(self) -> tuple[float, float]:
        """Returns how often the gauge runs in a step, and what it puts out each time: the means since the last call."""
        seen, self._seen, self._last_look = self._seen, [], self._num_steps
        forwards = sum(each for each, _ in seen)
        return forwards / max(len(seen), 1), sum(each for _, each in seen) / max(forwards, 1)

    def _look_again(self) -> None:
        """Scales costs if forwards have become larger, smaller, more or fewer than those that were measured.

        So it does if a link has become slower or faster. Ranks that share the model count on the largest forwards and
        the slowest links of all.
        """
        costs, (forwards, elements) = self.known.costs, self._sizes()
        ranks, plan = self.context.ranks, self.context.plan
        has_choice = self._may_choose_stays or plan.undo_logs or plan.chooses_activations
        if costs is None or not has_choice:
            return
        links = self._links.changes(costs, plan)
        if ranks is not None:
            self._sync.meet("tell how steps have changed")
            found = ranks.host.gather_objects((forwards, elements, links))
            forwards, elements = max(each for each, _, _ in found), max(each for _, each, _ in found)
            lanes = {lane for *_, changes in found for lane in changes}
            slowest_links = {lane: max(changes.get(lane, 1.0) for *_, changes in found) for lane in sorted(lanes)}
            links = {lane: ratio for lane, ratio in slowest_links.items() if ratio != 1.0}
        measured, *scaled = self.known.measured.split("; ")
        if costs.elements and costs.forwards and elements:
            ratios = elements / costs.elements, forwards / costs.forwards
            if not all(map(_is_alike, ratios)):
                costs, links = costs.scaled(ratios[0], forwards), {}
                scaled.append("scaled to inputs of now")
                self._links.begin_anew()
        if links:
            costs = costs.with_links(links)
            scaled.append("scaled to links of now")
        if costs is not self.known.costs:
            self.known = KnownCosts(costs, "; ".join(dict.fromkeys([measured, *scaled])))
            self._on_measured()

    @property
    def _may_choose_stays(self) -> bool:
        return self.context.policy.resident == "auto" and bool(self.context.plan.may_stay)

    def _device_update_gib_s(self) -> float:
        if self._may_choose_stays:
            return device_update_gib_s(self.context)
        return 0.0 if self.known.costs is None else self.known.costs.device_update_gib_s

    def with_activations(self, costs: MeasuredCosts) -> MeasuredCosts:
        """Returns the costs of a trace with what is known of activations and of torch's own memory.

        Blocks that compute again since the run began have not shown what they save. It is as much as in an earlier run,
        for inputs of the same size.
        """
        context, again = self.context, self._activations.recomputed_units()
        num_units, saved = len(context.units), self._saved_by_unit()
        inputs = [self._activations.inputs().get(unit, -1) for unit in range(num_units)]
        known = self.known.costs
        if max(inputs) < 0 and known is not None and known.inputs:
            alike = known.scaled(costs.elements / known.elements, known.forwards) if known.elements else known
            writers = self._activations.writers()
            inputs = [-1 if unit in writers else size for unit, size in enumerate(alike.inputs)]
            saved |= {unit: alike.saved[unit] for unit in again}
        peak = 0
        if context.device.type == "cuda":
            now = self._at_rest = torch.cuda.memory_allocated(context.device)
            one_block = max((saved.get(unit, 0) for unit in again), default=0)
            peak = max(torch.cuda.max_memory_allocated(context.device) - now - self._most_saved - one_block, 0)
        return dataclasses.replace(
            costs.without_again(again),
            saved=[saved.get(unit, 0) for unit in range(num_units)] if saved else [],
            saved_by=dict(self._counted.by_operator.most_common()),
            inputs=inputs if max(inputs) >= 0 else [],
            workspace=peak,
        )

    def _saved_by_unit(self) -> dict[int, int]:
        saved = dict(self._counted.by_unit)
        if self.context.plan.least_saved is not None:  # what the engine moves is not in a graph
            hooks = self.context.partition.hooks
            for hook, (_, num_bytes, _, _) in self.context.engine.saved.saved_by_module().items():
                if hook < len(hooks) and hooks[hook].needs:
                    saved[hooks[hook].needs[-1]] = num_bytes
        return saved

    @property
    def _most_saved(self) -> int:
        """The most bytes that autograd has kept on the device at once, of those that were counted."""
        return sum(self._counted.by_unit.values()) + self._most_there


def _is_alike(ratio: float) -> bool:
    return 1 / _ALIKE <= ratio <= _ALIKE


def _are_alike(elements: float, costs: MeasuredCosts) -> bool:
    """Returns True if forwards are about as large as those that costs are of."""
    return bool(costs.elements) and _is_alike(elements / costs.elements)
