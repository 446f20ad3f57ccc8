"""Builds the parts of one `wrap` call from its context, and gives each part the others that it uses."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from noria._errors import usage_error
from noria._lists import as_list
from noria.dist.stage_group import StageGroup
from noria.forward.activations import Activations
from noria.forward.cost_recorder import CostRecorder
from noria.forward.module_hooks import ModuleHooks
from noria.host.limits import Free
from noria.host.machine import machine
from noria.model.layout import TORCH_STATE, UNDO_LOGS, StatePlace
from noria.model.optimizer_classes import look_up_overrides
from noria.optimizer import facade
from noria.pipeline.peer_cache import PeerCache
from noria.pipeline.peer_memory import PeerMemory
from noria.pipeline.pipelining_compat import module_of
from noria.pipeline.stage_adapter import StageAdapters
from noria.planning.cost_cache import KnownCosts
from noria.planning.decisions import choose_again
from noria.planning.late_optimizers import new_regions
from noria.planning.measured_costs import MeasuredCosts
from noria.planning.wrap_plan import WrapPlan
from noria.runtime.accumulation import Accumulation, NoSync
from noria.runtime.context import Context
from noria.runtime.copies import answer_copies, forget_copies
from noria.runtime.draft_policy import DraftPolicy
from noria.runtime.gathered_weights import GatheredWeights
from noria.runtime.home_reads import HomeReads
from noria.runtime.late_allocations import LateAllocations
from noria.runtime.load_tracker import LoadTracker
from noria.runtime.module_state_dict import ModuleStateDicts
from noria.runtime.moves import answer_moves, forget_moves
from noria.runtime.no_parallel import allow_parallel, refuse_parallel
from noria.runtime.rank_sync import RankSync
from noria.runtime.rest import Rest
from noria.runtime.shrinking import Shrinking
from noria.runtime.state import RunState, weakly, weakly_asked
from noria.runtime.step_boundary import StepBoundary
from noria.runtime.streamed import Streamed
from noria.runtime.weights import Weights
from noria.runtime.window import resize_window
from noria.step.driver import StepDriver, StepDrivers, StepServices
from noria.step.sharded_norms import ShardedNorms

__all__ = ["Wrapped", "wrapped_by", "wrapped_together"]

# The wrap call of every module of a wrapped model. Weak on both sides: a wrap call lives as long as its models.
_WRAPPED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Wrapped]] = weakref.WeakKeyDictionary()


def wrapped_by(module: object) -> Wrapped | None:
    """Returns the wrap call of a model, a stage, or a module inside one. None if it is not wrapped."""
    module = module_of(module)
    found = _WRAPPED.get(module) if isinstance(module, nn.Module) else None
    return found() if found is not None else None


def wrapped_together(given: object) -> Wrapped:
    """Returns the one wrap call of a model, a stage, a module inside one, or a list of these.

    Raises UsageError if one of them is not wrapped, or if they belong to several wrap calls.
    """
    owners = {}
    for each in as_list(given) or [given]:
        owner = wrapped_by(each)
        if owner is None:
            kind = type(each).__qualname__
            raise usage_error("a wrapped model, or a module inside of one", kind, "noria.wrap it first")
        owners[id(owner)] = owner
    if len(owners) > 1:
        raise usage_error(
            "models of one noria.wrap call", f"models of {len(owners)} calls", "give those of one call at a time"
        )
    [wrapped] = owners.values()
    return wrapped


class Wrapped:
    """Builds the parts of one wrap call in the right order, and holds them.

    Ownership: the hooks of its models keep it alive.
    """

    def __init__(
        self, context: Context, stages: StageGroup | None, known: KnownCosts, anew: Callable[[Wrapped], object]
    ) -> None:
        """`known`: costs that an earlier run has kept. `anew` wraps the same models and optimizers again, because more
        parameters are trained now."""
        self.context = context
        self._anew = anew
        self.machine = machine()  # for a home that is taken later
        self.loads = LoadTracker(context)
        self.run = run = RunState(context, self.loads)
        self.sync = RankSync(context)
        self.late = late = LateAllocations(context, self.sync)
        self.weights = Weights(context, run, self.sync, GatheredWeights(context, self.sync, late))
        self.reads = HomeReads(context, run, self.loads, self.weights)
        self.accumulation = Accumulation(context, run, late)
        self.draft_policy = DraftPolicy(context)
        self.peer_memory = PeerMemory(context, run, stages)
        self.stages = StageAdapters(context, run, self.accumulation)
        peer_cache = PeerCache(context, self.peer_memory)
        self.activations = Activations(context, late, peer_cache, weakly_asked(self._own_costs))
        self.recorder = CostRecorder(context, self.sync, known, self.activations, weakly(self._decide))
        self.boundary = StepBoundary(
            every=[self.reads.end, self.stages.begin_step, self.peer_memory.begin_step],
            once=[peer_cache.begin_step, self.activations.begin_step, self.recorder.begin_step],
            after=self.reads.begin,
        )
        self.drivers = StepDrivers(context)
        self.streamed = Streamed(context)
        self.rest = Rest(context, run, self.streamed, self.drivers.have_stepped, self.drivers.watch_state)
        self.rest.on_plan.append(weakly(self.activations.follow_plan))
        # Built after the activations' hooks, so that a block's saved tensors are known when its visit ends.
        try:
            self.hooks = ModuleHooks(
                context,
                run,
                self.loads,
                self.reads,
                self.boundary,
                self.activations,
                self.rest,
                self.recorder.leave,
                Shrinking(context, run, has_stages=stages is not None).act,
                self.peer_memory.check,
                self.drivers.expect,
                weakly(self.wrap_anew),
            )
        except BaseException:
            self.activations.remove()
            raise
        self.hooks.keeps_alive = self
        run.on_out_of_memory.append(weakly(self.recorder.note_out_of_memory))
        self.state_dicts = ModuleStateDicts(context, run, self.sync, self.weights, self.loads)
        self._connect_engine()
        for root in context.partition.roots:
            if context.ranks is not None or not hasattr(root, "no_sync"):  # one loop works with and without ranks
                root.__dict__["no_sync"] = NoSync(self.accumulation)
            answer_moves(root, context)
            answer_copies(root, context, run, self.weights)
            for module in root.modules():
                refuse_parallel(module)
                _WRAPPED[module] = weakref.ref(self)

    def _connect_engine(self) -> None:
        """Sets the engine's callbacks, by weak references: the engine must not keep alive what it calls."""
        context, engine = self.context, self.context.engine
        engine.updates.set_update_callback(weakly(self.drivers.run_update))
        if context.ranks is not None:
            self.norms = ShardedNorms(context, self.sync, self.drivers)
            engine.ranks.set_parts_callbacks(weakly_asked(self.norms.norms), weakly(self.norms.multiply))
        if context.updates_in_backward:
            engine.backward.set_backward_callback(weakly(self.drivers.begin_backward))
        if context.trace is not None:
            engine.set_trace(context.trace)
        self._give_undo_logs()

    def _own_costs(self) -> MeasuredCosts | None:
        """Returns the costs that this run has measured."""
        return self.recorder.known.costs if self.recorder.has_measured else None

    def _decide(self) -> None:
        """Costs are known, or others than before: chooses what stays and what is drafted, perhaps anew."""
        plan, costs = self.context.plan, self.recorder.known.costs
        if costs is None or (self.rest.is_given_up and self.context.ranks is None):  # of ranks no unit stays
            return
        if plan.chooses_activations:
            # What the clocks of ranks have chosen may differ.
            now = plan.recomputed if self.context.ranks is not None else self.activations.recomputed_units()
            plan = dataclasses.replace(plan, recomputed=now or frozenset())
            self.context.replace_plan(plan)
            self.activations.follow_plan()
        if (chosen := choose_again(plan, costs)) is not None:
            self.rest.adopt(chosen)

    def _give_undo_logs(self) -> None:
        context = self.context
        for unit in context.plan.drafted:
            address = context.home.address(UNDO_LOGS, unit)
            context.engine.updates.give_undo_log(unit, address, *context.units[unit].undo_log)

    def take_optimizer(self, optimizer: Optimizer, kernel: str, places: dict[tuple[int, str], StatePlace]) -> None:
        """Makes the optimizer's `step()` noria's from now on. `places`: the places of its state in the home."""
        look_up_overrides(optimizer)
        services = StepServices(
            self.run,
            self.sync,
            self.weights,
            self.reads,
            self.loads,
            self.accumulation,
            self.draft_policy,
            self.stages,
            self.boundary,
            self.rest,
            self.streamed,
            weakly(self.wrap_anew),
        )
        arena = self.context.home.arenas.get(TORCH_STATE)
        driver = StepDriver(self.context, services, self.drivers, optimizer, kernel, places, arena)
        self.drivers.append(driver)
        facade(optimizer, driver)

    def wrap_anew(self) -> None:
        self._anew(self)

    def add_optimizers(self, planned: WrapPlan, optimizers: list[Optimizer], free: Free) -> None:
        """Takes optimizers that were made after the model was wrapped. `planned`: by `plan_optimizers`, from `free`.

        Order: the memory comes first. If that raises, nothing has changed. Collective if ranks share the model.
        """
        context, home = self.context, self.context.home
        self.rest.end()
        self.late.take_all(new_regions(context.plan, planned.regions), free)
        arena_before = context.plan.arena_bytes
        context.add_to_plan(planned)
        if planned.arena_bytes != arena_before:  # other units stay: their state has come
            resize_window(context, self.run, planned.arena_bytes)
        for slot in context.slots:
            if slot.has_master and slot.unit in planned.fused:
                master = self.weights.masters.whole(slot)
                slot.is_split = True
                self.weights.masters.set(slot, master)
        for region in planned.regions:
            if not region.bytes and region.purpose in home.arenas:
                self.late.give_back(region.purpose)  # plain masters, which are split now
        self._give_undo_logs()
        for optimizer, kernel, places in zip(optimizers, planned.kernels, planned.states, strict=True):
            self.take_optimizer(optimizer, kernel, places)
        if not self.run.is_asleep:  # else its end does so
            self.run.wake_by(self.streamed.begin)

    def remove_hooks(self) -> None:
        self.stages.remove()
        self.hooks.remove()
        self.activations.remove()
        self.state_dicts.remove()
        for root in self.context.partition.roots:
            if isinstance(root.__dict__.get("no_sync"), NoSync):
                del root.__dict__["no_sync"]
            forget_moves(root)
            forget_copies(root)
            for module in root.modules():
                allow_parallel(module)
                _WRAPPED.pop(module, None)
