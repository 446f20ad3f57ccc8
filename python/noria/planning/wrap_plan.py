"""Plans a wrap call before it is made: units, memory to the byte, and the fetches of each pass.

Passes are unknown before they happen. A plan assumes the usual one: each module runs once, in the order of the model,
and backward runs in reverse. The engine plans again with the passes that it sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from noria import _C
from noria._errors import usage_error
from noria.dist.groups import Line
from noria.dist.ranks import Grid, comparable
from noria.host.device_buffers import ASSIST_SCRATCH, REDUCE_SCRATCH, UPDATE_SLOTS
from noria.host.home import LATE
from noria.host.limits import Free, check_fits, min_over_ranks, probe_limits
from noria.model.file_layout import FILES, RECORDS, STATE_SLOTS, FilePlan
from noria.model.inner_tensors import tensors_in
from noria.model.kept_views import bytes_leaving
from noria.model.layout import (
    UNDO_LOGS,
    HomeUnit,
    Region,
    Ring,
    StatePlace,
    describe_units,
    travel_dtype,
)
from noria.model.partition import Partition, partition, parts_of, split_units
from noria.model.update_rules import FusedRule
from noria.planning.budgets import Budgets, resident_bytes
from noria.planning.draft_choice import choose_drafts, left_for_drafts, undo_log_needs
from noria.planning.file_plan import choose_files
from noria.planning.home_regions import gradient_rings, home_regions, state_places
from noria.planning.kernels import Kernels
from noria.planning.resident import bytes_to_stay, choose_stays, gradient_bytes
from noria.planning.streamed import (
    NUM_SLOTS,
    StreamPiece,
    choose_streamed,
    pieces_of,
    refuse_place,
    slot_bytes,
)
from noria.planning.update_flops import update_flops
from noria.policy import (
    STATE_DTYPES,
    Policy,
    compute_device,
    format_bytes,
    plural,
    to_bytes,
)

__all__ = [
    "LEAST_SAVED",
    "STAGING_RING",
    "WINDOW",
    "WrapPlan",
    "fingerprint",
    "folded",
    "forward_order",
    "make_plan",
    "masters_note",
    "passes_of_step",
    "staging_bytes",
    "with_stays",
    "with_streamed",
]

STAGING_RING = "staging ring"
WINDOW = "window and gradient buffers"

LEAST_SAVED = 64 * 1024
"""Bytes. A smaller storage that a block saves stays where it is."""

_MOST_STEPS = 4
"""How many steps are planned one after another, at most, to find one that begins as the step before it has ended."""

_MOST_NAMES = 8
"""How many names of units a line has at most."""


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
    stays: frozenset[int]
    """Indices of the units that stay on the device, with their state, once each optimizer has made its first step."""
    may_stay: dict[int, int]
    """By index of a unit that may stay: the bytes that it takes on the device."""
    drafted: frozenset[int]
    """Indices of the units that are drafted. Each has an undo log."""
    draftable: dict[int, int]
    """By index of a unit that can be drafted: the bytes of its undo log."""
    states: list[dict[tuple[int, str], StatePlace]]
    """By optimizer, then by slot index and key: the place in the arena TORCH_STATE of a tensor that torch keeps."""
    visits: dict[str, list[_C.Visit]]
    """The visits that the plan assumes, in "forward" and in "backward"."""
    passes: dict[str, _C.PassPlan]
    """The same passes as lists of ops."""
    unpredicted: list[str]
    """Notes: what the plan cannot foresee, or does otherwise than asked."""
    buffers: _C.BufferTable
    """Table of the buffers that the passes' ops name."""
    streamed: dict[int, list[StreamPiece]]
    """By index of a unit that the device updates in pieces, which go there and back. Its state lies at home.
    A unit that torch updates has them also if it stays, for updates while it is not at rest."""
    update_flops: dict[int, float]
    """By index of a unit whose update multiplies matrices: floating-point operations of these products."""
    ring: Ring | None = None
    """The gradient ring, under update="backward"."""
    files: FilePlan = dataclasses.field(default_factory=FilePlan)
    """What lies in files."""
    reduce_bytes: int = 0
    """Bytes of the scratch memory in which 16-bit gradients are summed over ranks in fp32."""
    assist_bytes: int = 0
    """Bytes of the scratch memory for one shard: of a unit that only other ranks visit, or of held gradients."""
    chooses_activations: bool = False
    """True if the planner chooses what becomes of what blocks save: with `activations="auto"`, outside of pipelines."""
    recomputed: frozenset[int] | None = frozenset()
    """Indices of the units whose block computes its forward again in backward. A block of several is its last one.
    None: the planner does not know, because that is chosen while the model runs."""
    without_masters: str = ""
    """A note if weights are updated in bfloat16."""
    least_device: int = 0
    """Bytes on the device that the largest visit needs."""

    @property
    def device_bytes(self) -> int:
        """Bytes on the device that noria takes: the arena, and what lies beside it."""
        return self.arena_bytes + sum(self.beside_the_arena().values())

    @property
    def block_units(self) -> frozenset[int]:
        """Indices of the units that stand for blocks: the last one of each."""
        return frozenset(hook.needs[-1] for hook in self.partition.hooks if hook.is_block)

    @property
    def undo_logs(self) -> dict[int, int]:
        """By index of a unit that has an undo log: its bytes."""
        regions = [region for region in self.regions if region.purpose == UNDO_LOGS]
        return {unit: size for region in regions for unit, size in enumerate(region.sizes) if size}

    @property
    def stands_still(self) -> bool:
        """True if all units stay, so that nothing moves then and there is no window."""
        return len(self.stays) == len(self.units)

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device that noria takes for what stays."""
        return sum(self.may_stay[unit] for unit in self.stays)

    @property
    def streamed_at_rest(self) -> dict[int, list[StreamPiece]]:
        """Those of `streamed` that stream also when what stays is at rest."""
        return {unit: pieces for unit, pieces in self.streamed.items() if unit not in self.stays}

    @property
    def update_slot_bytes(self) -> int:
        """Bytes on the device for one piece of a unit that is updated there; 0 if none is."""
        return slot_bytes(self.streamed)

    @property
    def saved_room(self) -> int | None:
        """Most bytes on the device for activations that blocks save through noria. None: no limit."""
        return self.budgets.activations

    @property
    def least_saved(self) -> int | None:
        """Bytes of the smallest storage that may leave the device when a block saves it. None if none leaves."""
        return LEAST_SAVED if self.budgets.moves_activations else None

    @property
    def home_bytes(self) -> int:
        """Bytes of host memory that the home takes."""
        return sum(region.bytes for region in self.regions) + self.files.memory

    def beside_the_arena(self) -> dict[str, int]:
        """Returns the bytes on the device that lie outside of the arena, by purpose.

        Example:
            >>> noria.plan(model, optimizer).beside_the_arena()
            {}
        """
        needed = {
            REDUCE_SCRATCH: self.reduce_bytes,
            ASSIST_SCRATCH: self.assist_bytes,
            UPDATE_SLOTS: self.update_slot_bytes * NUM_SLOTS,
        }
        return {purpose: amount for purpose, amount in needed.items() if amount}

    def rows(self) -> list[tuple[str, str, int]]:
        """Returns (place, purpose, bytes) for everything that noria takes. A place is "host" or a device.

        Example:
            >>> for place, purpose, num_bytes in noria.plan(model, optimizer, device="cpu").rows():
            ...     print(f"{place}: {num_bytes} bytes of {purpose}")
            host: ...
        """
        rows = [("host", region.purpose, region.bytes) for region in self.regions if region.bytes]
        if self.files.sizes:
            rows.append(("host", STATE_SLOTS, self.files.memory))
        if self.files.is_used:
            rows.append((FILES, RECORDS, self.files.file_bytes))
        rows.append((str(self.device), WINDOW, self.arena_bytes))
        rows += [(str(self.device), purpose, amount) for purpose, amount in self.beside_the_arena().items()]
        return rows

    def _names_of(self, units: Iterable[int]) -> str:
        names = [name for name, _ in folded([self.units[unit] for unit in sorted(units)])]
        return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")

    def __str__(self) -> str:
        weights = sum(unit.weights for unit in self.units)
        lines = [
            f"{len(self.units)} {plural(len(self.units), 'unit')}, "
            f"{sum(unit.is_block for unit in self.units)} of them blocks; {format_bytes(weights)} of weights; "
            f"the window holds {self.arena_bytes / max(weights, 1):.0%} of them"
        ]
        for name, alike in folded(self.units):
            weights, gradients = sum(unit.weights for unit in alike), sum(unit.gradients for unit in alike)
            what = f"gradients {format_bytes(gradients)}" if gradients else "frozen"
            lines.append(f"  {name:<40} weights {format_bytes(weights):>10}  {what}")
        lines.append("memory:")
        lines += [f"  {place:<8} {purpose:<34} {format_bytes(amount):>10}" for place, purpose, amount in self.rows()]
        for name, planned in self.passes.items():
            visits, fetches, peak = len(planned.visits), planned.num_fetches, planned.peak_units
            lines.append(
                f"{name}: {visits} {plural(visits, 'visit')}, {fetches} {plural(fetches, 'fetch')}, "
                f"{format_bytes(planned.fetched)}; at most {peak} {plural(peak, 'unit')} and "
                f"{format_bytes(planned.peak)} leased at once"
            )
        if self.stands_still:
            lines.append(
                "from the second step on all of the model stays on the device, in "
                f"{format_bytes(self.resident_bytes)} in place of the window: nothing moves, and updates run there"
            )
        elif self.stays:
            units = f"{len(self.stays)} {plural(len(self.stays), 'unit')}"
            lines.append(
                f"from the second step on {units} of these stay on the device, in {format_bytes(self.resident_bytes)} "
                "beside the window, and are updated there; the passes above are those of the others"
            )
        if streamed := self.streamed_at_rest:
            lines.append(
                f"the device updates {len(streamed)} of {len(self.units)} units; each goes there and back in pieces of "
                f"at most {format_bytes(slot_bytes(streamed))}"
            )
        if self.files.sizes:
            files = format_bytes(self.files.state_bytes)
            lines.append(
                f"moments of {len(self.files.sizes)} of {len(self.units)} units lie in files: an update of all of them "
                f"reads {files} and writes {files} ({self._names_of(self.files.sizes)})"
            )
            if text := self.files.instead_text():
                lines.append(text)
        if self.files.weights:
            files = format_bytes(self.files.weights_bytes)
            lines.append(
                f"frozen weights of {len(self.files.weights)} of {len(self.units)} units lie in files: a pass that "
                f"fetches all of them reads {files} ({self._names_of(self.files.weights)})"
            )
        if self.saved_room is not None:
            lines.append(
                f"activations: at most {format_bytes(self.saved_room)} of what blocks save stays on the device"
            )
        lines += [f"updates: {name}" for name in self.kernel_names]
        if self.drafted:
            logs = sum(self.draftable[unit] for unit in self.drafted)
            drafted = len(self.drafted)
            lines.append(f"drafts: of {drafted} {plural(drafted, 'unit')}, {format_bytes(logs)} of the above")
        lines += [f"note: {note}" for note in self.unpredicted]
        return "\n".join(lines)


def folded(units: list[HomeUnit]) -> list[tuple[str, list[HomeUnit]]]:
    """Returns the units line by line, with a name. Equal units that are numbered one after another share a line."""
    lines: list[list[HomeUnit]] = []
    for unit in units:
        if lines and _follows(unit, lines[-1][-1]):
            lines[-1].append(unit)
        else:
            lines.append([unit])
    names = [each[0].name if len(each) == 1 else f"{each[0].name}-{_number_of(each[-1])}" for each in lines]
    return list(zip(names, lines, strict=True))


def _follows(unit: HomeUnit, last: HomeUnit) -> bool:
    number, before = _number_of(unit), _number_of(last)
    is_next = number is not None and before is not None and number == before + 1
    is_alike = (unit.weights, unit.gradients) == (last.weights, last.gradients)
    return is_next and is_alike and unit.name.rpartition(".")[0] == last.name.rpartition(".")[0]


def _number_of(unit: HomeUnit) -> int | None:
    text = unit.name.rpartition(".")[2]
    return int(text) if text.isdecimal() else None


def make_plan(
    roots: list[nn.Module],
    optimizers: list[Optimizer],
    policy: Policy,
    *,
    is_carried_out: bool = True,
    values: bool = True,
    grid: Grid | None = None,
    free: Free | None = None,
    trained: Container[torch.Tensor] = (),
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
        trained: parameters that count as trainable although they are frozen now.

    Raises:
        UsageError: if the model cannot be wrapped like this, or does not fit.
    """
    device_bytes = to_bytes(policy.device_memory) if not isinstance(policy.device_memory, float) else None
    is_sized = device_bytes is not None or (free is not None and free.device is not None)
    device = compute_device(policy, is_elsewhere=not is_carried_out and is_sized)
    free = free or min_over_ranks([probe_limits(device, bytes_leaving(roots))])
    if device.type == "cuda" and free.device is None and device_bytes is not None:
        free = Free((device_bytes, device_bytes), None, None)  # of another machine: this one's limits tell nothing
    parts, units, budgets = _fine_partition(roots, policy, grid, free, trained)
    if is_carried_out:
        _refuse_without_hooks(parts)
        if values:
            _refuse_lost_buffers(roots)
    if not units:
        raise usage_error(
            "a model with parameters",
            "one without",
            "give a model with parameters: there is nothing to wrap in this one",
        )
    kernels = Kernels.of(units, optimizers, policy)
    kernels.check_states()
    refuse_place(policy)
    if policy.update == "backward":
        kernels.check_updates_in_backward()
    if grid is not None:
        kernels.check_shared()
        if policy.reads == "home":
            raise usage_error(
                'reads="passes" if ranks share the model, since no rank holds whole weights',
                'reads="home"',
                "read inside of `with noria.materialize(model):`, which all ranks enter, or from state_dict()",
            )
    kernels.mark_split()
    without_masters = masters_note(kernels, parts, grid) if kernels.updates_bfloat16() else ""
    unpredicted = [*kernels.fp32_states(), *filter(None, [without_masters])]
    states, state_bytes = state_places(kernels, unpredicted)
    first = home_regions(kernels, frozenset(), state_bytes)
    if policy.files and not optimizers:
        raise usage_error("an optimizer in the call that names files=", "none", "give it in the same call")
    room = left_for_drafts(budgets, free, 0, staging_bytes(device))
    candidates: list[tuple[Ring | None, bool]] = []
    for has_files in [False, True] if policy.files else [False]:
        rings = gradient_rings(parts, units, has_files) if policy.update == "backward" else [None]
        candidates += [(ring, has_files) for ring in rings]
    ring, files = _first_that_fits(kernels, first, candidates, room, budgets, device, free)
    if files.is_used:
        files = dataclasses.replace(files, instead=_file_bytes_instead(kernels, ring, state_bytes, room))
    elif policy.files:
        has_room = sum(region.bytes for region in _with_ring(first, ring)) <= room
        reason = "host memory has room for all" if has_room else "no unit has moments or frozen weights for them"
        unpredicted.append(f"nothing lies in files: {reason}")
    may_stay = {} if policy.files else bytes_to_stay(kernels, first, states, grid, device, budgets)
    stays = choose_stays(kernels, may_stay, budgets, unpredicted)
    streamed = choose_streamed(kernels, stays, device)
    draftable = undo_log_needs(kernels, stays | streamed | files.sizes.keys())
    needed = sum(size for _, size in _rows(files.regions(first), files, device))
    left = left_for_drafts(budgets, free, 0, needed)
    asked = budgets.drafts
    if policy.files and asked is not None:  # state fills the memory: undo logs take what is left
        asked = min(asked, left)
    drafted = choose_drafts(kernels, draftable, asked, left, device, unpredicted)
    regions = home_regions(kernels, drafted, state_bytes)
    regions = _with_ring(files.regions(regions), ring)
    table = _C.BufferTable()
    facts = _facts(units, table)
    forward, backward = _assumed_visits(parts, units)
    reduce_bytes = _reduce_bytes(units) if grid is not None and policy.reduce_dtype is not None else 0
    assist_bytes = 0 if grid is None else _assist_bytes(units, grid.num_shards)
    least_arena, _ = _C.smallest_budget(forward + backward, facts)
    result = WrapPlan(
        policy,
        budgets,
        device,
        parts,
        units,
        regions,
        0,
        0,
        kernels.by_optimizer,
        kernels.names(),
        kernels.fused,
        frozenset(),
        may_stay,
        drafted,
        draftable,
        states,
        {"forward": forward, "backward": backward},
        {},
        unpredicted,
        table,
        {unit: pieces_of(units[unit], unit in kernels.fused, regions, states) for unit in streamed},
        update_flops(units, optimizers),
        ring,
        files,
        reduce_bytes,
        assist_bytes,
        without_masters=without_masters,
    )
    if policy.activations == "recompute":
        result = dataclasses.replace(result, recomputed=result.block_units)
    elif result.saved_room is not None:
        result = dataclasses.replace(result, chooses_activations=True, recomputed=None)
    result = with_stays(result, stays)
    result = dataclasses.replace(result, least_device=least_arena + sum(result.beside_the_arena().values()))
    _check_host(result, is_carried_out, free)
    return result


def _first_that_fits(
    kernels: Kernels,
    regions: list[Region],
    candidates: Iterable[tuple[Ring | None, bool]],
    room: int,
    budgets: Budgets,
    device: torch.device,
    free: Free,
) -> tuple[Ring | None, FilePlan]:
    """Returns the first ring with which the home fits, or else the last one; and what lies in files.

    Args:
        candidates: rings, and whether something lies in files beside them. A ring with more slots than the files have
            use for is passed over: it would drive state out of memory for nothing.
        room: bytes; what does not fit there may lie in files.
    """
    ring, files = None, FilePlan()
    for ring, has_files in candidates:
        lean = _with_ring(regions, ring)
        if kernels.policy.files:
            files = choose_files(kernels, lean, room, to_bytes(kernels.policy.file_memory))
        is_too_large = ring is not None and has_files and ring.most_postponed > files.most_postponed
        if is_too_large or files.is_used != has_files:
            continue
        if check_fits(_rows(files.regions(lean), files, device), budgets.host, free, LATE) is None:
            break
    return ring, files


def _file_bytes_instead(kernels: Kernels, ring: Ring | None, state_bytes: int, room: int) -> dict[str, int]:
    """Returns, by `state_dtype` that takes less than the policy's, the bytes that would lie in files."""
    policy, found = kernels.policy, {}
    formats = list(STATE_DTYPES)
    for each in formats[formats.index(policy.state_dtype) + 1 :]:
        others = dataclasses.replace(kernels, policy=dataclasses.replace(policy, state_dtype=each))
        lean = _with_ring(home_regions(others, frozenset(), state_bytes), ring)
        found[each] = choose_files(others, lean, room, to_bytes(policy.file_memory)).file_bytes
    return found


def _with_ring(regions: list[Region], ring: Ring | None) -> list[Region]:
    if ring is None:
        return regions
    return [ring.region if region.purpose == "held gradients" else region for region in regions]


def forward_order(planned: WrapPlan) -> list[int]:
    """Returns the indices of all units, in the order in which a forward needs them."""
    order = dict.fromkeys(unit for visit in planned.visits["forward"] for unit in visit.needs)
    return list(order | dict.fromkeys(range(len(planned.units))))


def with_stays(planned: WrapPlan, stays: frozenset[int]) -> WrapPlan:
    """Returns the plan in which these units stay on the device, and the others have the window beside them.

    Raises UsageError if the device has no room for both.
    """
    streamed = {
        unit: pieces for unit, pieces in planned.streamed.items() if unit not in stays or unit not in planned.fused
    }
    planned = dataclasses.replace(planned, streamed=streamed, stays=stays)
    facts = _facts(planned.units, planned.buffers)
    forward, backward = planned.visits["forward"], planned.visits["backward"]
    beside = sum(planned.beside_the_arena().values())
    slots = planned.update_slot_bytes * NUM_SLOTS
    if not planned.stands_still:  # else there is no window then
        # Pieces of units that stay have slots until they do.
        at_rest = NUM_SLOTS * slot_bytes(planned.streamed_at_rest)
        at_rest += planned.resident_bytes + gradient_bytes(planned.units, stays)
        beside += max(at_rest - slots, 0)
    arena, window = _device_split(
        planned.policy, planned.budgets, planned.units, facts, forward + backward, beside, slots
    )
    draftable = {unit: size for unit, size in planned.draftable.items() if unit not in stays and unit not in streamed}
    result = dataclasses.replace(
        planned,
        arena_bytes=arena,
        window=window,
        passes={},
        drafted=frozenset(planned.drafted - stays - streamed.keys()),
        draftable=draftable,
    )
    return dataclasses.replace(result, passes=dict(passes_of_step(result, 1)))


def passes_of_step(planned: WrapPlan, backwards: int) -> list[tuple[str, _C.PassPlan]]:
    """Returns the passes of a step with so many backwards, each as its phase and its plan.

    Between two backwards nothing is updated, so weights that lie in the window are not fetched again. Nor are frozen
    weights that the last step has left there.
    """
    if backwards == 1 and planned.passes:  # known already
        return list(planned.passes.items())
    entry: list[tuple[int, int]] = []
    for _ in range(_MOST_STEPS):
        passes = _passes_from(planned, backwards, entry)
        left = [(unit, offset) for unit, offset in passes[-1][1].exit if not planned.units[unit].gradients]
        if left == entry:
            break
        entry = left
    return passes


def _passes_from(planned: WrapPlan, backwards: int, entry: list[tuple[int, int]]) -> list[tuple[str, _C.PassPlan]]:
    """Returns the passes of a step that finds the units of `entry` in the window, each at its offset."""
    facts = _facts(planned.units, planned.buffers)
    forward, backward = (_without(planned.stays, planned.visits[phase]) for phase in ("forward", "backward"))
    place = f"device:{planned.device.index or 0}"
    trained = frozenset(unit.index for unit in planned.units if unit.gradients)
    next_step = _without(trained, forward)  # what an update leaves as it is
    passes: list[tuple[str, _C.PassPlan]] = []
    for number in range(backwards):
        is_last = number == backwards - 1
        for phase, visits, after in (
            ("forward", forward, backward),
            ("backward", backward, next_step if is_last else forward),
        ):
            adds = phase == "backward" and number > 0
            request = _C.PlanRequest(visits, planned.arena_bytes, planned.window, after, entry, place, adds)
            passes.append((phase, _C.plan_pass(request, facts, planned.buffers)))
            entry = list(passes[-1][1].exit)
    return passes


def with_streamed(planned: WrapPlan, units: Container[int]) -> WrapPlan:
    """Returns the plan in which the device updates these units, though their state lies at home.

    Raises UsageError if the device has no room for the pieces beside the window.
    """
    pieces = {
        unit.index: pieces_of(unit, unit.index in planned.fused, planned.regions, planned.states)
        for unit in planned.units
        if unit.index in units and unit.gradients
    }
    return with_stays(dataclasses.replace(planned, streamed=pieces), planned.stays)


def _fine_partition(
    roots: list[nn.Module], policy: Policy, grid: Grid | None, free: Free, trained: Container[torch.Tensor]
) -> tuple[Partition, list[HomeUnit], Budgets]:
    """Returns the partition by `policy.units`, its units, and the budgets for them.

    Under "auto" the units of visits that do not fit are split, between modules.
    """
    split: set[nn.Module] = set()
    while True:
        parts = partition(roots, policy.units, split)
        if grid is not None:  # ranks sum one dtype at a time
            parts = split_units(parts, lambda parameter: travel_dtype(parameter, policy.dtype))
        units = _units_of(parts, policy.dtype, grid, trained)
        budgets = Budgets.of(policy, free, units)
        if budgets.device is None or not isinstance(policy.units, str):
            return parts, units, budgets
        room, facts = budgets.device // budgets.shares, _facts(units, _C.BufferTable())
        visits = [visit for visits in _assumed_visits(parts, units) for visit in visits]
        if _C.smallest_budget(visits, facts)[0] <= room:
            return parts, units, budgets
        large = {unit for visit in visits if _C.smallest_budget([visit], facts)[0] > room for unit in visit.needs}
        modules = {module for unit in large if (module := parts.units[unit].module) is not None}
        more = {module for module in modules - split if parts_of(module)}
        if not more:
            return parts, units, budgets
        split |= more


def _units_of(
    parts: Partition, dtype: torch.dtype | None, grid: Grid | None, trained: Container[torch.Tensor] = ()
) -> list[HomeUnit]:
    return describe_units(parts.units, dtype, *((grid.shard_rank, grid.num_shards) if grid else (0, 1)), trained)


def masters_note(kernels: Kernels, parts: Partition, grid: Grid | None) -> str:
    """Returns what updates in bfloat16 lose, and what masters would take."""
    policy = dataclasses.replace(kernels.policy, dtype=torch.bfloat16)
    others = Kernels.of(_units_of(parts, policy.dtype, grid), kernels.optimizers, policy)
    others.mark_split()
    without, with_masters = (
        sum(region.bytes for region in home_regions(each, frozenset(), state_places(each, [])[1]))
        for each in (kernels, others)
    )
    return (
        "bfloat16 weights are updated without fp32 masters, as in plain PyTorch, which rounds small updates away; "
        f"dtype=torch.bfloat16 keeps masters, for {format_bytes(with_masters - without)} more of host memory"
    )


def _refuse_without_hooks(parts: Partition) -> None:
    """Refuses modules that no hook can be put on, as those of torch.jit.script."""
    for module in [*parts.roots, *(hook.module for hook in parts.hooks)]:
        try:
            module.register_forward_pre_hook(lambda *_: None).remove()
            module.register_forward_hook(lambda *_: None, always_call=True).remove()
        except Exception as error:
            raise usage_error(
                "modules that take forward hooks, by which noria hears when weights are needed",
                f"{type(module).__name__}, which does not ({error})",
                "give the module itself, not a scripted one",
            ) from error


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
                        "compute it before noria.wrap, on the CPU; noria.load_pretrained(lambda: Model(config), path) "
                        "and accelerate.init_empty_weights() leave such buffers their values",
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


def fingerprint(planned: WrapPlan, optimizers: list[Optimizer]) -> list[Line]:
    """Returns what must be the same on ranks that share a model, one item a line."""
    alike = dataclasses.replace(planned.policy, device=planned.device.type, trace=None)
    options = {field.name: repr(getattr(alike, field.name)) for field in dataclasses.fields(alike)}
    lines: list[Line] = [("the policy", options)]
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
            held = [numbers[each] for each in tensors_in(group["params"])]
            whose = f"group {number} of {type(optimizer).__name__}"
            lines.append(f"{whose} holds parameters {held}")
            values = {
                key: repr(comparable(each)) for key, each in group.items() if key not in ("params", "param_names")
            }
            lines.append((whose, values))
    lines.append(f"drafts of units {sorted(planned.drafted)}")
    return lines


def _facts(units: list[HomeUnit], table: _C.BufferTable) -> list[_C.UnitFacts]:
    facts = []
    for unit in units:
        working = table.intern("host:0", unit.index, 1, "working_copy", unit.index)
        held = table.intern("host:1", unit.index, 1, "held_gradient", unit.index)
        state = table.intern("host:2", unit.index, 1, "optimizer_state", unit.index)
        facts.append(_C.UnitFacts(unit.name, unit.weights, unit.gradients, working, held, state))
    return facts


def _without(stays: frozenset[int], visits: list[_C.Visit]) -> list[_C.Visit]:
    """Returns the visits without these units, which take no place in the window then, and bring no gradients there."""
    return [
        _C.Visit(
            visit.hook,
            visit.phase,
            [unit for unit in visit.needs if unit not in stays],
            [unit for unit in visit.gradients if unit not in stays],
        )
        for visit in visits
    ]


def _assumed_visits(parts: Partition, units: list[HomeUnit]) -> tuple[list[_C.Visit], list[_C.Visit]]:
    """Returns the visits of forward and of backward, if every module runs once, in the order of the model.

    A module around others usually uses its own weights before them, so in backward it comes once, after them.
    """
    forward, backward = [], []
    order = _forward_order(parts)
    for number in order:
        forward.append(_C.Visit(number, "forward", list(parts.hooks[number].needs), []))
    for number in reversed(dict.fromkeys(order)):
        needs = parts.hooks[number].needs
        own = {slot.unit for unit in needs for slot in units[unit].parameters if slot.trainable}
        backward.append(_C.Visit(number, "backward", list(needs), sorted(own)))
    return forward, backward


def _forward_order(parts: Partition) -> list[int]:
    """Returns the hooks, by number, of the visits of a forward.

    As in the engine, a module announces its units when it is entered, and again when a module inside it is left. An
    announcement makes no visit if the open visit has all of its units.
    """
    numbers = {id(hook.module): number for number, hook in enumerate(parts.hooks)}
    order: list[int] = []
    seen: set[int] = set()

    def announce(number: int, is_open: bool) -> None:
        if not is_open or not set(parts.hooks[number].needs) <= set(parts.hooks[order[-1]].needs):
            order.append(number)

    def walk(module: nn.Module, around: int | None) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        number = numbers.get(id(module))
        if number is not None:
            announce(number, around is not None)
        for child in module.children():
            walk(child, around if number is None else number)
        if number is not None and around is not None:
            announce(around, True)

    for root in parts.roots:
        walk(root, None)
    return order


def _device_split(
    policy: Policy,
    budgets: Budgets,
    units: list[HomeUnit],
    facts: list[_C.UnitFacts],
    visits: list[_C.Visit],
    other_bytes: int,
    slots: int,
) -> tuple[int, int]:
    """Returns arena bytes and window units. Raises UsageError, with the bytes needed, if a visit does not fit.

    `other_bytes`: what noria takes beside the arena; `slots` of it are for pieces that are updated there.
    """
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
    # What is left to activations, torch's allocator takes. The ledger shows only noria's share.
    shares, budget = budgets.shares, budgets.device
    if budget is not None and isinstance(policy.device_memory, float) and shares == 1:
        budget += int(slots * policy.device_memory)  # a fraction of what the model takes there
    if budget is not None:
        needed = shares * (least_arena + other_bytes)
        if budget < needed:
            largest = max(facts, key=lambda unit: unit.weights + unit.gradients)
            raise usage_error(
                f"device_memory of at least {format_bytes(needed)} ({needed} bytes)"
                + (f', with resident="{policy.resident}"' if policy.resident not in ("none", "auto") else "")
                + (f", {format_bytes(slots)} for pieces that are updated there" if slots else "")
                + (", half of it for activations" if shares > 1 else ""),
                f"{format_bytes(budget)}; the largest unit is {largest.name}",
                "raise device_memory, or name smaller units" + (', or say optimizer_device="host"' if slots else ""),
            )
        budget //= shares
        arena = min(arena, budget - other_bytes)
    return arena // _C.TENSOR_ALIGNMENT * _C.TENSOR_ALIGNMENT, window


def staging_bytes(device: torch.device) -> int:
    """Returns the bytes of host memory that copies need if the driver refuses to pin the home."""
    return _C.STAGING_BYTES if device.type == "cuda" else 0


def _rows(regions: Iterable[Region], files: FilePlan, device: torch.device) -> list[tuple[str, int]]:
    """Returns the bytes of host memory by purpose. `regions`: what is left of the home beside files."""
    rows = [(region.purpose, region.bytes) for region in regions]
    if files.sizes:
        rows.append((STATE_SLOTS, files.memory))
    if staging_bytes(device):
        rows.append((STAGING_RING, staging_bytes(device)))
    return rows


def _check_host(planned: WrapPlan, is_carried_out: bool, free: Free) -> None:
    """Refuses a home that does not fit this machine.

    A model without memory may be planned for another machine: it gets a note instead.
    """
    rows = _rows(planned.regions, planned.files, planned.device)
    budget = planned.budgets.host
    without_memory = not is_carried_out and any(
        slot.parameter.is_meta for unit in planned.units for slot in unit.parameters
    )
    if refusal := check_fits(rows, budget, None if without_memory else free, LATE):
        raise refusal
    if without_memory and (refusal := check_fits(rows, budget, free, LATE)):
        planned.unpredicted.append(f"this machine would refuse it: {refusal}")
