"""Plans a wrap call before it is made: units, memory to the byte, and the fetches of each pass.

Passes are unknown before they happen. A plan assumes the usual one: each hooked module runs once, in the order of the
model, and backward runs in reverse. The engine plans again with the passes that it sees.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import torch
from torch import nn
from torch.optim import Optimizer

from noria import _C
from noria._errors import usage_error
from noria.dist.ranks import Grid, comparable
from noria.host.device_buffers import ASSIST_SCRATCH, REDUCE_SCRATCH
from noria.host.limits import Free, check_fits, margin_of, min_over_ranks, probe_limits
from noria.model.layout import (
    HomeParameter,
    HomeUnit,
    Region,
    Ring,
    StatePlace,
    describe_units,
    held_region,
    scales_region,
    travel_dtype,
)
from noria.model.moment_formats import MOMENTS, SCALES, moment_bytes, scale_bytes
from noria.model.partition import Partition, partition, split_units
from noria.model.shadow_optimizer import is_array, part_values, predict_state
from noria.model.update_rules import ELEMENTWISE, SEPARABLE, FusedRule, choose, fused_units, rule_of, why_not_fused
from noria.planning.budgets import Budgets, resident_bytes
from noria.policy import (
    Policy,
    compute_device,
    format_bytes,
)

__all__ = ["LEAST_SAVED", "STAGING_RING", "WrapPlan", "fingerprint", "make_plan"]

STAGING_RING = "staging ring"
# Slots of the gradient ring: at least 4, because one drains, one is updated, and both may be late. Otherwise a quarter
# of the units: long updates can then go on behind the next forward, and do not hold backward up.
_RING_SLOTS = 4
_RING_SHARE = 0.25


LEAST_SAVED = 64 * 1024
"""Bytes. A smaller storage that a block saves stays where it is."""


@dataclasses.dataclass(frozen=True)
class WrapPlan:
    """Holds the plan of one wrap call. `rows()` gives the ledger's planned side, `str()` a text for people."""

    policy: Policy
    budgets: Budgets
    device: torch.device
    partition: Partition
    units: list[HomeUnit]
    regions: list[Region]
    arena_bytes: int
    window: int
    kernels: list[str]
    """By optimizer: "fused", "torch" or "whole"; see update_rules.py, Note [Who updates a unit]."""
    kernel_names: list[str]
    """The same as text for people."""
    fused: dict[int, tuple[FusedRule, ...]]
    """By index of a unit that noria's kernels update: the rules that may update it."""
    drafted: frozenset[int]
    """Indices of the units that have spare buffers for drafts."""
    draftable: dict[int, int]
    """By index of a unit that can be drafted: the bytes of its spare buffers."""
    states: list[dict[tuple[int, str], StatePlace]]
    """By optimizer, then by slot index and key: the place in "optimizer state" of a tensor that torch keeps."""
    visits: dict[str, list[_C.Visit]]
    """The visits that the plan assumes, in "forward" and in "backward"."""
    passes: dict[str, _C.PassPlan]
    """The same passes as lists of ops."""
    unpredicted: list[str]
    """Notes: what the plan cannot foresee, or does otherwise than asked."""
    buffers: _C.BufferTable
    """Table of the buffers that the passes' ops name."""
    ring: Ring | None = None
    """The gradient ring, under update="backward"."""
    reduce_bytes: int = 0
    """Bytes of the scratch memory in which 16-bit gradients are summed over ranks in fp32."""
    assist_bytes: int = 0
    """Bytes of the scratch memory for one shard: of a unit that only other ranks visit, or of held gradients."""
    least_device: int = 0
    """Bytes on the device that the largest visit needs."""

    @property
    def device_bytes(self) -> int:
        """Bytes on the device that noria takes: the arena, and what lies beside it."""
        return self.arena_bytes + sum(self.beside_the_arena().values())

    @property
    def saved_room(self) -> int | None:
        """Most bytes on the device for activations that blocks save through noria. None: no limit."""
        return self.budgets.activations

    @property
    def least_saved(self) -> int | None:
        """Bytes of the smallest storage that may leave the device when a block saves it. None if none leaves."""
        leaves = self.policy.activations == "offload" or self.saved_room is not None
        return LEAST_SAVED if leaves else None

    @property
    def home_bytes(self) -> int:
        """Bytes of host memory that the home takes."""
        return sum(region.bytes for region in self.regions)

    def beside_the_arena(self) -> dict[str, int]:
        """Returns the bytes on the device that lie outside of the arena, by purpose."""
        needed = {
            REDUCE_SCRATCH: self.reduce_bytes,
            ASSIST_SCRATCH: self.assist_bytes,
        }
        return {purpose: amount for purpose, amount in needed.items() if amount}

    def rows(self) -> list[tuple[str, str, int]]:
        """Returns (place, purpose, bytes) for everything that noria takes. A place is "host" or a device."""
        rows = [("host", region.purpose, region.bytes) for region in self.regions if region.bytes]
        rows.append((str(self.device), "window and gradient buffers", self.arena_bytes))
        rows += [(str(self.device), purpose, amount) for purpose, amount in self.beside_the_arena().items()]
        return rows

    def __str__(self) -> str:
        weights = sum(unit.weights for unit in self.units)
        lines = [
            f"{len(self.units)} units, {sum(unit.is_block for unit in self.units)} of them blocks; "
            f"{format_bytes(weights)} of weights; the window holds {self.arena_bytes / max(weights, 1):.0%} of them"
        ]
        for unit in self.units:
            what = f"gradients {format_bytes(unit.gradients)}" if unit.gradients else "frozen"
            lines.append(f"  {unit.name:<40} weights {format_bytes(unit.weights):>10}  {what}")
        lines.append("memory:")
        lines += [f"  {place:<8} {purpose:<34} {format_bytes(amount):>10}" for place, purpose, amount in self.rows()]
        for name, planned in self.passes.items():
            lines.append(
                f"{name}: {len(planned.visits)} visits, {planned.num_fetches} fetches, "
                f"{format_bytes(planned.fetched)}; at most {planned.peak_units} units and {format_bytes(planned.peak)} "
                "leased at once"
            )
        if self.saved_room is not None:
            lines.append(
                f"activations: at most {format_bytes(self.saved_room)} of what blocks save stays on the device"
            )
        lines += [f"updates: {name}" for name in self.kernel_names]
        if self.drafted:
            spare = sum(region.spare_bytes for region in self.regions)
            lines.append(f"drafts: of {len(self.drafted)} units, {format_bytes(spare)} of the above")
        lines += [f"note: {note}" for note in self.unpredicted]
        return "\n".join(lines)


def make_plan(
    roots: list[nn.Module],
    optimizers: list[Optimizer],
    policy: Policy,
    *,
    is_carried_out: bool = True,
    values: bool = True,
    grid: Grid | None = None,
    free: Free | None = None,
) -> WrapPlan:
    """Makes the plan of a wrap call.

    Args:
        roots: the models.
        optimizers: the optimizers of all roots.
        policy: the options of the wrap call.
        is_carried_out: True if the plan is carried out; False if the caller only plans.
        values: True if this rank's weights and buffers are used; False if rank 0's replace them.
        grid: the grid of ranks that share the model.
        free: the free memory; None: this process finds out.

    Raises:
        UsageError: if the model cannot be wrapped like this, or does not fit.
    """
    device = compute_device(policy)
    free = free or min_over_ranks([probe_limits(device)])
    parts = partition(roots, policy.units)
    if grid is not None:  # ranks sum one dtype at a time
        parts = split_units(parts, lambda parameter: travel_dtype(parameter, policy.dtype))
    if is_carried_out and values:
        _refuse_lost_buffers(roots)
    units = describe_units(parts.units, policy.dtype, *((grid.shard_rank, grid.num_shards) if grid else (0, 1)))
    if not units:
        raise usage_error(
            "a model with parameters",
            "one without",
            "give a model with parameters: there is nothing to wrap in this one",
        )
    budgets = Budgets.of(policy, free, units)
    kernels = [choose(optimizer, policy.kernel) for optimizer in optimizers]
    fused = fused_units(units, optimizers, kernels)
    _check_states(units, optimizers, kernels, fused)
    if policy.update == "backward":
        _check_updates_in_backward(units, optimizers, kernels, fused)
    if grid is not None:
        _check_shared(optimizers)
    ring: Ring | None = None
    unpredicted: list[str] = []
    if policy.state_dtype != "fp32":
        unpredicted += _fp32_states(optimizers, units, fused, policy.state_dtype)
    draftable = _spare_needs(units, optimizers, fused, policy)
    drafted = _choose_drafts(draftable, units, optimizers, kernels, fused, policy, budgets, device, free, unpredicted)
    regions, states = _regions(units, optimizers, kernels, fused, drafted, policy, unpredicted)
    if policy.update == "backward":
        ring = _ring(parts, units)
        regions = [ring.region if region.purpose == "held gradients" else region for region in regions]
    facts, table = _facts(units)
    forward, backward = _assumed_visits(parts, units)
    reduce_bytes = _reduce_bytes(units) if grid is not None and policy.reduce_dtype is not None else 0
    assist_bytes = 0 if grid is None else _assist_bytes(units, grid.num_shards)
    other_bytes = reduce_bytes + assist_bytes
    arena, window = _device_split(policy, budgets, free, units, facts, forward + backward, other_bytes)
    least_arena, _ = _C.smallest_budget(forward + backward, facts)
    result = WrapPlan(
        policy,
        budgets,
        device,
        parts,
        units,
        regions,
        arena,
        window,
        kernels,
        [_kernel_name(o, k, policy, units, fused) for o, k in zip(optimizers, kernels, strict=True)],
        fused,
        drafted,
        draftable,
        states,
        {"forward": forward, "backward": backward},
        {},
        unpredicted,
        table,
        ring,
        reduce_bytes,
        assist_bytes,
        least_device=least_arena + other_bytes,
    )
    _check_host(result, is_carried_out, free)
    entry: list[tuple[int, int]] = []
    for name, visits, after in (("forward", forward, backward), ("backward", backward, [])):
        request = _C.PlanRequest(visits, arena, window, after, entry, f"device:{device.index or 0}")
        planned = result.passes[name] = _C.plan_pass(request, facts, table)
        entry = list(planned.exit)
    return result


_KERNELS = {
    "fused": "noria's fused kernel, on the host pool",
    "torch": "torch, unit by unit",
    "whole": "torch, all at once inside step() (not known to be separable)",
}


def _kernel_name(
    optimizer: Optimizer, kernel: str, policy: Policy, units: list[HomeUnit], fused: dict[int, tuple[FusedRule, ...]]
) -> str:
    """Returns a text: which code updates, and why not noria's own if torch does."""
    name = f"{type(optimizer).__name__.removeprefix('Noria')} by {_KERNELS[kernel]}"
    if kernel == "fused" and policy.state_dtype != "fp32":
        name += f", with moments in {policy.state_dtype}"
    if kernel == "torch" and policy.kernel != "torch":
        return f"{name} (no kernel of noria's covers it: {why_not_fused(type(optimizer), optimizer.param_groups)})"
    if kernel == "fused":
        left, num_units = _left_to_torch(optimizer, units, fused)
        if left and len(left) == num_units:
            cls = type(optimizer).__name__.removeprefix("Noria")
            return f"{cls} by {_KERNELS['torch']} (every unit is shared with another optimizer, or of another dtype)"
        if left:
            return f"{name}; {len(left)} of {num_units} units by torch, for another optimizer or their dtype: " + (
                ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
            )
    return name


def _refuse_lost_buffers(roots: list[nn.Module]) -> None:
    """Refuses buffers on the meta device that are in no checkpoint: no load could give them values."""
    for root in roots:
        for path, module in root.named_modules():
            for name in module._non_persistent_buffers_set:
                buffer = module._buffers.get(name)
                if buffer is not None and buffer.is_meta:
                    raise usage_error(
                        "values for buffers that are in no checkpoint",
                        f'"{path}.{name}" on the meta device, persistent=False'.replace('".', '"'),
                        "compute it before noria.wrap, on the CPU",
                    )


def _reduce_bytes(units: list[HomeUnit]) -> int:
    """Returns 4 bytes for each gradient element of the unit that has the most 16-bit gradients."""
    narrow = [
        unit.gradients for unit in units if any(slot.trainable and slot.dtype.itemsize == 2 for slot in unit.parameters)
    ]
    return 2 * max(narrow, default=0)


def _assist_bytes(units: list[HomeUnit], num_shards: int) -> int:
    """Returns the bytes of a rank's shard of the largest part of a unit: its trainable weights, or its frozen ones."""
    return max(max(unit.gradients, unit.weights - unit.gradients) for unit in units) // num_shards


def fingerprint(planned: WrapPlan, optimizers: list[Optimizer]) -> list[str]:
    """Returns what must be the same on ranks that share a model, one item a line."""
    alike = dataclasses.replace(planned.policy, device=planned.device.type, trace=None)
    lines = [f"policy {alike}"]
    for unit in planned.units:
        for slot in unit.parameters:
            kind = "trainable" if slot.trainable else "frozen"
            lies = f"strides {slot.strides} {slot.parameter.dtype}"
            lines.append(f'unit "{unit.name}": {kind} "{slot.name}" {tuple(slot.shape)} {lies}')
    for root in planned.partition.roots:
        lines += [f'buffer "{name}" {tuple(each.shape)} {each.dtype}' for name, each in root.named_buffers()]
    lines += [f'module "{hook.name}" needs units {list(hook.needs)}' for hook in planned.partition.hooks]
    lines.append(f"a window of {planned.window} units in {planned.arena_bytes} bytes")
    for optimizer, kernel in zip(optimizers, planned.kernels, strict=True):
        lines.append(f"{type(optimizer).__name__} by {kernel}")
        numbers = {slot.parameter: slot.index for unit in planned.units for slot in unit.parameters}
        for number, group in enumerate(optimizer.param_groups):
            held = [numbers[parameter] for parameter in group["params"]]
            hyper = comparable({key: value for key, value in group.items() if key not in ("params", "param_names")})
            lines.append(f"group {number} of {type(optimizer).__name__} holds parameters {held} with {hyper}")
    lines.append(f"drafts of units {sorted(planned.drafted)}")
    return lines


def _ring(parts: Partition, units: list[HomeUnit]) -> Ring:
    """Returns the ring that update="backward" has in place of held gradients.

    If several modules use a unit, its gradients come in parts, so it gets a place of its own.
    """
    users = Counter(
        unit for hook in parts.hooks for unit in {slot.unit for n in hook.needs for slot in units[n].parameters}
    )
    num_trainable = sum(unit.gradients > 0 for unit in units)
    num_slots = max(_RING_SLOTS, math.ceil(_RING_SHARE * num_trainable))
    return Ring.of(units, {unit for unit, count in users.items() if count > 1}, num_slots)


def _check_states(
    units: list[HomeUnit],
    optimizers: list[Optimizer],
    kernels: list[str],
    fused: dict[int, tuple[FusedRule, ...]],
) -> None:
    """Refuses optimizer state of earlier steps that noria's kernels cannot read."""
    slots = {slot.parameter: slot for unit in units if unit.index in fused for slot in unit.parameters}
    for optimizer, kernel in zip(optimizers, kernels, strict=True):
        for group in optimizer.param_groups if kernel == "fused" else ():
            for parameter in group["params"]:
                if parameter in slots and parameter in optimizer.state:
                    rule, slot = rule_of(type(optimizer), group), slots[parameter]
                    rule.refuse_broken_state(slot, part_values(slot, optimizer.state[parameter]))


def _check_updates_in_backward(
    units: list[HomeUnit],
    optimizers: list[Optimizer],
    kernels: list[str],
    fused: dict[int, tuple[FusedRule, ...]],
) -> None:
    expected = 'update="backward" with each unit updated as a whole by one kernel of noria\'s'
    remedy = 'wrap with update="auto"'
    for optimizer, kernel in zip(optimizers, kernels, strict=True):
        if kernel != "fused":
            reason = why_not_fused(type(optimizer), optimizer.param_groups) or 'kernel="torch"'
            raise usage_error(expected, f"{type(optimizer).__name__}, which torch updates ({reason})", remedy)
    held = [{p for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    for unit in units:
        own = {slot.parameter for slot in unit.parameters if slot.trainable}
        if not own:
            continue
        if unit.index not in fused or len(fused[unit.index]) > 1:
            raise usage_error(expected, f'"{unit.name}", which several rules or torch update', remedy)
        if not any(own <= parameters for parameters in held):
            most = max(held, key=lambda parameters: len(own & parameters))
            name = next(slot.name for slot in unit.parameters if slot.trainable and slot.parameter not in most)
            raise usage_error(
                expected,
                f'"{name}", which no optimizer holds, or another one than the rest of "{unit.name}"',
                f"freeze it or give it to the optimizer, or {remedy}",
            )


def _fp32_states(
    optimizers: list[Optimizer], units: list[HomeUnit], fused: dict[int, tuple[FusedRule, ...]], state_dtype: str
) -> list[str]:
    """Returns notes: state that does not have the policy's dtype, because torch makes it."""
    notes = []
    for optimizer in optimizers:
        left, num_units = _left_to_torch(optimizer, units, fused)
        if left:
            name = type(optimizer).__name__.removeprefix("Noria")
            notes.append(
                f"{name} keeps its own state, not {state_dtype}, of {len(left)} of {num_units} units: torch updates "
                "them"
            )
    return notes


def _check_shared(optimizers: list[Optimizer]) -> None:
    """Refuses optimizers that ranks cannot share."""
    for optimizer in optimizers:
        if type(optimizer) not in ELEMENTWISE:
            looks = "looks" if type(optimizer) in SEPARABLE else "may look"
            raise usage_error(
                "an optimizer that updates each element by itself, where ranks share the model",
                f"{type(optimizer).__name__}, which {looks} at whole tensors, and a rank has but a part of each",
                "use AdamW, another of torch.optim that works element by element, or noria.optim.Lion",
            )


def _left_to_torch(
    optimizer: Optimizer, units: list[HomeUnit], fused: dict[int, tuple[FusedRule, ...]]
) -> tuple[list[str], int]:
    """Returns the names of this optimizer's units that noria's kernels do not update, and how many units it has."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    own = [unit for unit in units if any(slot.trainable and slot.parameter in held for slot in unit.parameters)]
    return [unit.name for unit in own if unit.index not in fused], len(own)


def _regions(
    units: list[HomeUnit],
    optimizers: list[Optimizer],
    kernels: list[str],
    fused: dict[int, tuple[FusedRule, ...]],
    drafted: frozenset[int],
    policy: Policy,
    unpredicted: list[str],
) -> tuple[list[Region], list[dict[tuple[int, str], StatePlace]]]:
    """Returns the home's arenas, and the place in "optimizer state" of each tensor of each optimizer.

    It also sets `is_split` of all parameters, and adds notes to `unpredicted`.
    """
    regions = [
        Region.of("working copies", (unit.home_weights for unit in units), sorted(drafted)),
        held_region(units),
    ]
    if policy.update != "backward":
        regions.append(scales_region(units))
    if policy.dtype is not None:
        for unit in units:
            for slot in unit.parameters:
                slot.is_split = slot.has_master and unit.index in fused
        plain = [0 if unit.index in fused else unit.home_gradients * 2 for unit in units]
        low = [unit.home_gradients if unit.index in fused else 0 for unit in units]
        regions.append(Region.of("low bits", low, sorted(drafted)))
        regions.append(Region.of("masters", plain))
        regions.append(Region.of("update scratch", [max(plain)]))
    for number, purpose in enumerate(MOMENTS):
        needed = [any(len(rule.keys) > number for rule in fused.get(unit.index, ())) for unit in units]
        kept = [unit if need else None for unit, need in zip(units, needed, strict=True)]
        sizes = (moment_bytes(unit, policy.dtype, policy.state_dtype) if unit else 0 for unit in kept)
        regions.append(Region.of(purpose, sizes, sorted(drafted)))
        sizes = (scale_bytes(unit, policy.state_dtype) if unit else 0 for unit in kept)
        regions.append(Region.of(SCALES[number], sizes, sorted(drafted)))
    states: list[dict[tuple[int, str], StatePlace]] = []
    ends = _Ends(units)
    for optimizer, kernel in zip(optimizers, kernels, strict=True):
        places: dict[tuple[int, str], StatePlace] = {}
        states.append(places)
        slots = [slot for unit in units for slot in unit.parameters if kernel != "fused" or unit.index not in fused]
        slots_by_index = {slot.index: slot for slot in slots}
        predicted = predict_state(optimizer, slots) if slots else {}
        if predicted is None:
            unpredicted.append(f"the state of {type(optimizer).__name__} is not known before its first step")
        for index, tensors in (predicted or {}).items():
            for key, tensor in tensors.items():
                if is_array(key, tensor):
                    places[(index, key)] = ends.add(slots_by_index[index], tensor)
    regions.append(Region.of("optimizer state", [ends.most]))
    return regions, states


class _Ends:
    """Lays out the state that torch keeps, and tracks where it ends on each rank that shares the model.

    Ranks have parts of different parameters, yet all take as much memory as the rank that needs most (`most`).
    """

    def __init__(self, units: list[HomeUnit]) -> None:
        self._own = 0
        self._ends = [0] * max((unit.num_shards for unit in units), default=1)

    @property
    def most(self) -> int:
        return max(self._ends)

    def add(self, slot: HomeParameter, whole: torch.Tensor) -> StatePlace:
        is_sharded = bool(slot.shard_ends) and whole.shape == slot.shape
        shape = tuple(slot.like.shape if is_sharded else whole.shape)
        place = StatePlace(self._own, shape, whole.dtype)
        self._own += _aligned(math.prod(shape) * whole.itemsize)
        for rank in range(len(self._ends)):
            self._ends[rank] += _aligned((slot.count_on(rank) if is_sharded else whole.numel()) * whole.itemsize)
        return place


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _C.TENSOR_ALIGNMENT) * _C.TENSOR_ALIGNMENT


def _spare_needs(
    units: list[HomeUnit], optimizers: list[Optimizer], fused: dict[int, tuple[FusedRule, ...]], policy: Policy
) -> dict[int, int]:
    """Returns, by index of a unit that can be drafted, the bytes of its spare buffers."""
    if policy.update != "auto":
        return {}
    needs = {}
    for unit in units:
        if unit.index in fused and _can_be_drafted(unit, optimizers, fused[unit.index]):
            low = unit.home_gradients if policy.dtype is not None else 0
            moment = moment_bytes(unit, policy.dtype, policy.state_dtype) + scale_bytes(unit, policy.state_dtype)
            needs[unit.index] = unit.home_weights + low + len(fused[unit.index][0].keys) * moment
    return needs


def _choose_drafts(
    needs: dict[int, int],
    units: list[HomeUnit],
    optimizers: list[Optimizer],
    kernels: list[str],
    fused: dict[int, tuple[FusedRule, ...]],
    policy: Policy,
    budgets: Budgets,
    device: torch.device,
    free: Free,
    notes: list[str],
) -> frozenset[int]:
    """Chooses the units that get spare buffers: as many as `draft_memory` has room for.

    They are spread evenly over the model: the updates left for the next forward then come evenly too.
    """
    budget = budgets.drafts
    if budget == 0 or not fused or (budget is None and device.type == "cpu"):
        return frozenset()
    if policy.update != "auto":
        if budget is not None:
            notes.append(f'there are no drafts: update="{policy.update}" runs them at another time')
        return frozenset()
    if budget is None:
        budget = _left_for_drafts(units, optimizers, kernels, fused, policy, budgets, free)
    share = min(budget / max(sum(needs.values()), 1), 1.0)
    chosen, taken, seen = [], 0, 0
    for index, need in needs.items():
        seen += need
        if taken + need <= min(budget, share * seen + need / 2):
            chosen.append(index)
            taken += need
    if needs and not chosen and budgets.drafts is not None:
        notes.append(f"there are no drafts: the smallest unit's take {format_bytes(min(needs.values()))}")
    return frozenset(chosen)


def _can_be_drafted(unit: HomeUnit, optimizers: list[Optimizer], rules: tuple[FusedRule, ...]) -> bool:
    """Returns True if one update can cover the whole unit: nothing frozen, one rule, one optimizer."""
    if len(rules) > 1 or not all(slot.trainable for slot in unit.parameters):
        return False
    own = {slot.parameter for slot in unit.parameters}
    held = [{p for group in o.param_groups for p in group["params"]} for o in optimizers]
    return any(own <= parameters for parameters in held)


def _left_for_drafts(
    units: list[HomeUnit],
    optimizers: list[Optimizer],
    kernels: list[str],
    fused: dict[int, tuple[FusedRule, ...]],
    policy: Policy,
    budgets: Budgets,
    free: Free,
) -> int:
    regions, _ = _regions(units, optimizers, kernels, fused, frozenset(), policy, [])
    home = sum(region.bytes for region in regions)
    left = [budgets.host - home] if budgets.host is not None else []
    if free.share is not None:
        left.append(free.share.free - margin_of(free.share.free) - home)
    return max(min(left, default=0), 0)


def _facts(units: list[HomeUnit]) -> tuple[list[_C.UnitFacts], _C.BufferTable]:
    table = _C.BufferTable()
    facts = []
    for unit in units:
        working = table.intern("host:0", unit.index, 1, "working_copy", unit.index)
        held = table.intern("host:1", unit.index, 1, "held_gradient", unit.index)
        state = table.intern("host:2", unit.index, 1, "optimizer_state", unit.index)
        facts.append(_C.UnitFacts(unit.name, unit.weights, unit.gradients, working, held, state))
    return facts, table


def _assumed_visits(parts: Partition, units: list[HomeUnit]) -> tuple[list[_C.Visit], list[_C.Visit]]:
    forward, backward = [], []
    inside: set[int] = set()  # modules inside of a hooked one announce no visit
    for number, hook in enumerate(parts.hooks):
        if id(hook.module) in inside or not hook.needs:
            continue
        inside.update(id(module) for module in hook.module.modules())
        forward.append(_C.Visit(number, "forward", list(hook.needs), []))
        own = {slot.unit for unit in hook.needs for slot in units[unit].parameters if slot.trainable}
        backward.append(_C.Visit(number, "backward", list(hook.needs), sorted(own)))
    return forward, backward[::-1]


def _device_split(
    policy: Policy,
    budgets: Budgets,
    free: Free,
    units: list[HomeUnit],
    facts: list[_C.UnitFacts],
    visits: list[_C.Visit],
    other_bytes: int,
) -> tuple[int, int]:
    """Returns arena bytes and window units. Raises UsageError, with the bytes needed, if a visit does not fit."""
    least_arena, least_window = _C.smallest_budget(visits, facts)
    largest_gradients = sorted((unit.gradients for unit in units), reverse=True)[:2]
    window = 0 if policy.window == "auto" else int(policy.window)
    if window and window < least_window:
        raise usage_error(
            f"a window of at least {least_window} units, which one module needs at once",
            f"window={policy.window}",
            f"window={least_window} or more",
        )
    arena = resident_bytes(units)
    if window:
        leased = sorted((unit.weights for unit in units), reverse=True)[:window]
        arena = min(arena, max(sum(leased) + sum(largest_gradients), least_arena))
    # On CUDA half is left to activations, which torch's allocator takes. The ledger shows only noria's half.
    shares, budget = 1 if free.device is None else 2, budgets.device
    if budget is not None:
        needed = shares * (least_arena + other_bytes)
        if budget < needed:
            largest = max(facts, key=lambda unit: unit.weights + unit.gradients)
            raise usage_error(
                f"device_memory of at least {format_bytes(needed)} ({needed} bytes)"
                + (", half of it for activations" if shares > 1 else ""),
                f"{format_bytes(budget)}; the largest unit is {largest.name}",
                "raise device_memory, or name smaller units",
            )
        budget //= shares
        arena = min(arena, budget - other_bytes)
    return arena // _C.TENSOR_ALIGNMENT * _C.TENSOR_ALIGNMENT, window


def _check_host(planned: WrapPlan, is_carried_out: bool, free: Free) -> None:
    """Refuses a home that does not fit this machine.

    A model without memory may be planned for another machine: it gets a note instead.
    """
    rows = [(region.purpose, region.bytes) for region in planned.regions]
    if planned.device.type == "cuda":
        rows.append((STAGING_RING, _C.STAGING_BYTES))  # needed if the driver refuses to pin the home
    budget = planned.budgets.host
    without_memory = not is_carried_out and any(
        slot.parameter.is_meta for unit in planned.units for slot in unit.parameters
    )
    if refusal := check_fits(rows, budget, None if without_memory else free):
        raise refusal
    if without_memory and (refusal := check_fits(rows, budget, free)):
        planned.unpredicted.append(f"this machine would refuse it: {refusal}")
