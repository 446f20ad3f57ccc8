"""Reports what a wrapped model's engine did, in numbers that can be compared with its plan."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from noria.doctor import host_memory_gib_s as measured_gib_s
from noria.model.file_layout import FILES, RECORDS, STATE_SLOTS
from noria.model.update_rules import keeps_moments
from noria.pipeline.peer_memory import Loan
from noria.planning.bounds import READS, WRITES, bounds_of
from noria.planning.cost_table import COLUMNS, aligned, cost_rows, rates_text
from noria.planning.endurance import endurance_text
from noria.planning.measured_costs import MeasuredCosts
from noria.planning.wrap_plan import STAGING_RING, WINDOW
from noria.policy import format_bytes, plural
from noria.wrapped import Wrapped, wrapped_together

__all__ = ["Bound", "FileUse", "HostMemory", "LaneReport", "LedgerRow", "PassReport", "Report", "UpdateTime", "report"]

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class LaneReport:
    """Counts the work of one lane since the wrap call.

    `stalled_us` holds the time that ops of this lane lost by waiting, by "giver -> waiter".

    The lane `collect` exists if ranks share the model. Its `bytes` are the least that this rank got from the others,
    and it sent as many. It is busy from the moment when all ranks are ready for an op until the op is over. The lane
    `peer` exists if other stages lend memory, and counts both directions.

    Units: microseconds. On a device they come from events in its streams, so unfinished work is not counted yet.
    """

    lane: str
    busy_us: int
    num_ops: int
    bytes: int
    stalled_us: dict[str, int]


@dataclasses.dataclass(frozen=True)
class LedgerRow:
    """Compares the bytes that noria planned for one purpose with the bytes that it took."""

    place: str
    purpose: str
    planned: int
    taken: int


@dataclasses.dataclass(frozen=True)
class PassReport:
    """Counts the passes of one kind.

    `planned_fetches` and `fetches` are of the last such pass. `planned_fetches` is None if that pass had no plan, or
    left it.
    """

    phase: str
    training: bool
    accumulating: bool
    num_visits: int
    times: int
    planned_fetches: int | None
    fetches: int
    unplanned_visits: int


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Counts the bytes of an average step that go through host memory. All of them share its bandwidth.

    `updated`: bytes that updates read and write. For AdamW with fp32 moments and a bfloat16 model these are 26 for each
    parameter. `copied`: bytes between home and device, in both directions. On "cpu" they count twice, because the host
    both reads and writes them. Neither counts traffic between ranks, nor the memory that layers use on "cpu".
    `parameters`: how many trained elements have their home on this rank. `state_in_files`: bytes of state that the disk
    writes to memory, for updates, and that it reads there behind them. `weights_in_files`: those that it writes there
    for fetches. Checksums do not count: a cache holds the part that they read.
    """

    updated: float
    copied: float
    gib_s: float
    parameters: int
    state_in_files: float = 0.0
    weights_in_files: float = 0.0

    @property
    def in_files(self) -> float:
        return self.state_in_files + self.weights_in_files

    @property
    def bytes(self) -> float:
        return self.updated + self.copied + self.in_files

    @property
    def bytes_per_parameter(self) -> float:
        """Returns the bytes of a step for each trained parameter.

        AdamW with a bfloat16 model and a device that is not the CPU moves at most 32. The update moves 26, and each of
        two fetches and a drain moves 2. With `state_dtype="8bit"` the update moves 14.06. Drafts add 1. Frozen weights
        and accumulation add more. Two fp32 moments in files add 16.
        """
        return self.bytes / max(self.parameters, 1)

    @property
    def updated_us(self) -> float:
        """Returns the time of updates and of their state in files, if only the memory limits it."""
        return (self.updated + self.state_in_files) / (self.gib_s * _GIB) * 1e6

    @property
    def copied_us(self) -> float:
        """Returns the time of copies and of their weights in files, likewise."""
        return (self.copied + self.weights_in_files) / (self.gib_s * _GIB) * 1e6

    @property
    def us(self) -> float:
        return self.copied_us + self.updated_us


@dataclasses.dataclass(frozen=True)
class FileUse:
    """Counts what an average step reads from files and writes to them, with what your own looks at moments take.

    Units: bytes and microseconds. The times are those in which the lane had an op under way. `read` counts state and
    frozen weights, `read_us` only state, `read_weights` only weights.
    """

    read: float
    read_weights: float
    written: float
    read_us: float
    read_weights_us: float
    write_us: float
    num_folders: int


@dataclasses.dataclass(frozen=True)
class Bound:
    """Compares an average step with the lower bound of each update mode (docs/journey.md, "The bound").

    No schedule of a mode is faster than its bound. `limit` names the resources that set the bound of the mode in use:
    if one of them took longer, the bound would rise. For example, it is "host memory". It is "updates, compute" if
    updates take longest in the forward and compute takes longest in the backward.

    Units: microseconds.
    """

    step_us: float
    blocking_us: float
    deferred_us: float
    drafting_us: float
    mode: str
    limit: str
    host_memory: HostMemory

    @property
    def ratio(self) -> float:
        """Returns the measured step divided by the bound of the mode in use."""
        return self.step_us / self.bound_us if self.bound_us else float("nan")

    @property
    def bound_us(self) -> float:
        if self.mode in ("drafts", "backward"):
            return self.drafting_us
        return self.blocking_us if self.mode == "blocking" else self.deferred_us


@dataclasses.dataclass(frozen=True)
class UpdateTime:
    """Splits the update time of an average step by what the compute lane did meanwhile.

    The time is the pool's busy time. It includes drafts, comparisons of gradients, norms, and the finished part of a
    running job. The three parts add up to the total. The first step is left out, because it is unlike the others.

    - `behind_forward_us`, `behind_backward_us`: the compute lane was at a visit of a forward or a backward.
    - `exposed_us`: the compute lane waited, or no pass was open.
    - `on_device_us`: updates that the device runs, which are not in the total.

    The compute lane waits for a fetch (and so for the update before it), for drains at the end of backward, or for the
    home. No pass is open inside `step()` and between passes, for example in a loss outside the model. On "cpu" the
    compute lane is the launching thread, so the updates that this thread runs itself (`kernel="torch"`) are exposed.
    A device continues to compute during them.

    Units: microseconds. A device's work is timed by its own clock once it is done, so a report may miss some of the
    last steps.
    """

    total_us: float
    behind_forward_us: float
    behind_backward_us: float
    exposed_us: float
    on_device_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Report:
    """Holds all numbers of a wrapped model. `print` shows them as text; `to_dict()` is for programs."""

    device: str
    num_units: int
    kernels: list[str]
    num_steps: int
    lanes: list[LaneReport]
    passes: list[PassReport]
    forgotten_passes: int  # passes of kinds that noria has forgotten: it remembers a limited number of kinds
    ledger: list[LedgerRow]
    num_fetches: int
    drafts: dict[str, int]
    """kept, looked_at (split into unchanged and changed so far), redone, undone, dropped; docs/drafts.md"""
    saved: dict[str, int]  # saved by blocks: storages and bytes offloaded, put at peers, reloaded, kept on the device
    recomputed: list[str]  # blocks that compute their activations again in backward
    loans: list[Loan]  # device memory that one stage of a pipeline lends to another one, which has no room
    row_name: str  # the word for lenders and borrowers: "stage", or "rank" if this one has several stages
    copies: dict[str, int]  # copies of units at other stages: number kept there, stashed, fetched, and bytes
    unclaimed_fetches: int  # fetches that `step()` issued for a forward that did not come next
    peak_lease_bytes: int
    peak_units: int
    resident: list[str]
    at_rest: list[str]
    """The units that stay on the device with their optimizer's state (`resident`)."""
    files: FileUse | None
    """None: nothing lies in files, or no step yet."""
    bound: Bound | None
    updates: UpdateTime | None  # None: no step yet
    advice: str | None  # options that would hide the updates which delay the step
    costs: MeasuredCosts | None
    """What ops take, measured in some of the first steps of this run, or kept by an earlier one. None: not yet."""
    costs_measured: str
    """When that was, and with which inputs."""
    cost_rows: list[list[str]]
    """The costs of units as a table; see planning/cost_table.py."""
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, and theirs, as plain dicts and lists.

        Example:
            >>> model, optimizer = noria.wrap(model, optimizer)
            >>> noria.report(model).to_dict()["num_units"]
            5
        """
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        told = [(self.num_units, "unit"), (self.num_steps, "step"), (self.num_fetches, "fetch")]
        counts = ", ".join(f"{number} {plural(number, noun)}" for number, noun in told)
        lines = [f"noria on {self.device}: {counts}"]
        lines += [f"updates: {kernel}" for kernel in self.kernels]
        if any(self.drafts.values()):
            d = self.drafts
            lines.append(
                f"drafts: {d['kept']} kept, {d['looked_at']} kept or redone when the clip was known "
                f"({d['changed']} had changed), {d['redone']} redone with other hyperparameters, "
                f"{d['undone']} undone, {d['dropped']} dropped before they began"
            )
        if self.at_rest:
            lines.append(
                "at rest: all of the model is on the device, and nothing moves; what follows is of before"
                if len(self.at_rest) == self.num_units
                else f"at rest: {len(self.at_rest)} of these units are on the device, and do not move"
            )
        lines.append("lanes:")
        for lane in self.lanes:
            stalls = ", ".join(f"{kind} {us / 1e3:.1f} ms" for kind, us in sorted(lane.stalled_us.items()))
            lines.append(
                f"  {lane.lane:<8} busy {lane.busy_us / 1e3:>10.1f} ms  {lane.num_ops:>7} ops  "
                f"{format_bytes(lane.bytes):>10}" + (f"  waited: {stalls}" if stalls else "")
            )
        if (saved := self.saved)["num_offloaded"]:
            lines.append(
                f"saved for backward: {format_bytes(saved['offloaded'])} offloaded, {format_bytes(saved['reloaded'])} "
                f"reloaded ({saved['num_unforeseen']} storages unforeseen), at most "
                f"{format_bytes(saved['most_there'])} of {format_bytes(saved['most_saved'])} on the device"
                + (f", {format_bytes(saved['most_at_peers'])} at other stages" if saved["most_at_peers"] else "")
            )
        if self.recomputed:
            lines.append(f"computed again in backward: {', '.join(self.recomputed)}")
        lines += [loan.told(self.row_name) for loan in self.loans]
        if (copies := self.copies)["num_stashed"]:
            lines.append(
                f"{copies['num_units']} {plural(copies['num_units'], 'unit')} at other stages: "
                f"{format_bytes(copies['stashed'])} stashed, {copies['num_fetched']} "
                f"{plural(copies['num_fetched'], 'fetch')} of {format_bytes(copies['fetched'])} from there"
            )
        lines.append("passes (last occurrence):")
        for each in self.passes:
            kind = f"{each.phase}{'' if each.training else ', eval'}{', accumulating' if each.accumulating else ''}"
            planned = "no plan" if each.planned_fetches is None else f"planned {each.planned_fetches}"
            lines.append(
                f"  {kind:<24} {each.num_visits:>4} {plural(each.num_visits, 'visit')}, "
                f"{each.times:>5} {plural(each.times, 'time')}, {each.fetches} {plural(each.fetches, 'fetch')} "
                f"({planned}), {each.unplanned_visits} unplanned {plural(each.unplanned_visits, 'visit')} in all"
            )
        if self.forgotten_passes:
            others = f"{self.forgotten_passes} {plural(self.forgotten_passes, 'pass')}"
            lines.append(f"  and {others} of kinds that have not been seen again for long")
        if self.unclaimed_fetches:
            fetches = f"{self.unclaimed_fetches} {plural(self.unclaimed_fetches, 'fetch')}"
            lines.append(f"  {fetches} for a forward pass that did not come next")
        lines.append("memory (planned = taken):" if self.ledger_agrees else "memory (PLAN AND LEDGER DIFFER):")
        for row in self.ledger:
            lines.append(
                f"  {row.place:<8} {row.purpose:<34} {format_bytes(row.planned):>10} {format_bytes(row.taken):>10}"
            )
        lines.append(
            f"leases: at most {self.peak_units} {plural(self.peak_units, 'unit')}, "
            f"{format_bytes(self.peak_lease_bytes)}"
        )
        if self.bound is not None:
            b = self.bound
            lines.append(
                f"step {b.step_us / 1e3:.1f} ms, {b.ratio:.2f} x the bound of its mode ({b.mode}: {b.limit}); bounds: "
                f"blocking {b.blocking_us / 1e3:.1f} ms, deferred {b.deferred_us / 1e3:.1f} ms, "
                f"all units drafted {b.drafting_us / 1e3:.1f} ms"
            )
            h = b.host_memory
            lines.append(
                f"host memory: {format_bytes(round(h.bytes))} a step, {h.bytes_per_parameter:.1f} bytes "
                f"for each trained parameter; {format_bytes(round(h.updated))} by updates"
                + (f", {format_bytes(round(h.in_files))} by reads and writes of files" if h.in_files else "")
                + f" and {format_bytes(round(h.copied))} by fetches and drains take {h.us / 1e3:.1f} ms at "
                f"{h.gib_s:.1f} GiB/s, which they share"
            )
            if (f := self.files) and (line := endurance_text(f.read, f.written, b.step_us, f.num_folders)):
                lines.append(f"files: {line}")
        if self.updates is not None:
            u = self.updates
            if u.on_device_us:
                lines.append(f"updates on the device {u.on_device_us / 1e3:.1f} ms a step")
            if u.total_us or not u.on_device_us:
                lines.append(
                    f"updates {u.total_us / 1e3:.1f} ms a step: {u.behind_backward_us / 1e3:.1f} behind backward, "
                    f"{u.behind_forward_us / 1e3:.1f} behind forward, {u.exposed_us / 1e3:.1f} exposed"
                )
        if self.costs is not None:
            lines.append(f"costs, measured {self.costs_measured}:")
            lines += aligned(COLUMNS, self.cost_rows)
            lines += [f"  {line}" for line in rates_text(self.costs)]
        if self.advice is not None:
            lines.append(f"advice: {self.advice}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    @property
    def ledger_agrees(self) -> bool:
        """True if noria has taken exactly the bytes that it planned, in every row of the ledger."""
        return all(row.planned == row.taken for row in self.ledger)


def report(model: nn.Module, *, write_trace: bool = True, host_memory_gib_s: float | None = None) -> Report:
    """Returns a report of what has happened since `model` was wrapped. It waits for nothing.

    Args:
        model: The wrapped model, or anything else that `wrap` was given, such as a list of stages.
        write_trace: False does not write the trace file, for callers that report many times a second. True writes it
            if the policy asks for one.
        host_memory_gib_s: GiB/s that host memory reads and writes. Updates, copies and the disk share it. None: the
            first report after a step measures it, once per process. That takes some tenths of a second. Meanwhile it
            takes 64 MiB, or twice the size of the caches if that is more. Beyond 64 MiB it takes a quarter of the free
            memory at most.

    Returns:
        A `Report`. Times are in microseconds and amounts of memory in bytes, if their names say nothing else.

    Raises:
        UsageError: if the model is not wrapped.

    Example:
        >>> model, optimizer = noria.wrap(model, optimizer)
        >>> print(noria.report(model))
        noria on ...: 5 units, 0 steps, 0 fetches...
    """
    wrapped = wrapped_together(model)
    if write_trace:
        wrapped.context.write_trace()
    engine, sums = wrapped.context.engine, wrapped.context.engine.statistics.step_sums()
    files = _file_use(wrapped, sums)
    bound, updates = _bound(wrapped, sums, host_memory_gib_s, files), _update_time(sums)
    return Report(
        device=str(wrapped.context.device),
        num_units=len(wrapped.context.units),
        kernels=list(wrapped.context.plan.kernel_names),
        num_steps=max((driver.num_steps for driver in wrapped.drivers), default=0),
        lanes=_lanes(wrapped),
        passes=[
            PassReport(
                each["phase"],
                each["training"],
                each["accumulating"],
                each["num_visits"],
                each["times"],
                each["planned_fetches"],
                each["fetches"],
                each["unplanned_visits"],
            )
            for each in engine.statistics.passes()
        ],
        forgotten_passes=engine.statistics.num_forgotten_passes,
        ledger=_ledger(wrapped),
        num_fetches=engine.statistics.num_fetches,
        drafts=engine.updates.draft_counts(),
        saved=engine.saved.saved_stats(),
        recomputed=wrapped.activations.recomputed(),
        loans=[loan for loan in wrapped.peer_memory.loans if loan.bytes],
        row_name=wrapped.peer_memory.row_name,
        copies=engine.copies.copy_stats(),
        unclaimed_fetches=engine.statistics.num_unclaimed_fetches,
        peak_lease_bytes=engine.statistics.peak_bytes,
        peak_units=engine.statistics.peak_units,
        resident=[
            unit.name
            for unit in wrapped.context.units
            if wrapped.rest.has(unit.index) or unit.index in engine.statistics.resident_units()
        ],
        at_rest=[unit.name for unit in wrapped.rest.units if wrapped.rest.is_on],
        files=files,
        bound=bound,
        updates=updates,
        advice=_advice(wrapped, sums, bound, updates) if bound and updates else None,
        costs=(known := wrapped.recorder.known).costs,
        costs_measured=known.measured,
        cost_rows=cost_rows(wrapped.context.units, known.costs) if known.costs is not None else [],
        notes=[*wrapped.context.notes, *wrapped.context.home.notes, *wrapped.peer_memory.notes],
    )


def _lanes(wrapped: Wrapped) -> list[LaneReport]:
    lanes = []
    names = ["compute", "fetch", "drain", "collect", "peer", "update"]
    if wrapped.context.home.files is not None:
        names += ["read", "write"]
    if wrapped.context.home.weight_files is not None:
        names.append("read_weights")
    if wrapped.context.ranks is None:
        names.remove("collect")
    if not wrapped.peer_memory.borrowed:
        names.remove("peer")
    for lane in names:
        stats = (
            wrapped.context.engine.statistics.update_stats()
            if lane == "update"
            else wrapped.context.engine.statistics.file_stats(lane)
            if lane in ("read", "write", "read_weights")
            else wrapped.context.backend.stats(lane)
        )
        busy = wrapped.context.engine.statistics.compute_us if lane == "compute" else stats["busy_us"]
        stalled = {" -> ".join(kind): us for kind, us in stats["stalled_us"].items()}
        lanes.append(LaneReport(lane, busy, stats["num_ops"], stats["bytes"], stalled))
    return lanes


def _ledger(wrapped: Wrapped) -> list[LedgerRow]:
    context = wrapped.context
    backend, arena_bytes, beside = context.backend, context.engine.statistics.arena_bytes, context.device_buffers.taken
    taken = {("host", purpose): arena.bytes for purpose, arena in context.home.arenas.items()}
    if (files := context.home.files) is not None:
        taken[("host", STATE_SLOTS)] = files.num_slots * files.slot_bytes
    in_files = [each.file_bytes for each in (files, context.home.weight_files) if each is not None]
    if in_files:
        taken[(FILES, RECORDS)] = sum(in_files)
    if backend.staging_bytes:
        taken[("host", STAGING_RING)] = backend.staging_bytes
    device = str(context.device)
    taken[(device, WINDOW)] = arena_bytes
    taken |= {(device, purpose): amount for purpose, amount in beside.items()}
    if rest := backend.allocated - arena_bytes - sum(beside.values()):
        taken[(device, "what no plan has")] = rest
    rows = [
        LedgerRow(place, purpose, planned, taken.pop((place, purpose), 0))
        for place, purpose, planned in context.ledger.rows()
    ]
    rows += [LedgerRow(place, purpose, 0, amount) for (place, purpose), amount in taken.items()]
    return rows


def _file_use(wrapped: Wrapped, sums: dict[str, int]) -> FileUse | None:
    if not wrapped.context.plan.files.is_used or sums["num_steps"] == 0:
        return None
    steps = sums["num_steps"] + 1  # the lanes have counted the first one too
    lanes = ("read", "read_weights", "write")
    read, weights, write = (wrapped.context.engine.statistics.file_stats(lane) for lane in lanes)
    return FileUse(
        read=(read["bytes"] + weights["bytes"]) / steps,
        read_weights=weights["bytes"] / steps,
        written=write["bytes"] / steps,
        read_us=read["busy_us"] / steps,
        read_weights_us=weights["busy_us"] / steps,
        write_us=write["busy_us"] / steps,
        num_folders=len(wrapped.context.plan.files.folders),
    )


def _bound(wrapped: Wrapped, sums: dict[str, int], gib_s: float | None, files: FileUse | None) -> Bound | None:
    steps = sums["num_steps"]
    if steps == 0:
        return None
    per_step = {name: value / steps for name, value in sums.items() if name.endswith("_us")}
    host = HostMemory(
        sums["updated"] / steps + sum(driver.bytes_by_torch() for driver in wrapped.drivers),
        sums["copied"] / steps * (2 if wrapped.context.device.type == "cpu" else 1),
        measured_gib_s() if gib_s is None else gib_s,
        sum(slot.like.numel() for unit in wrapped.context.units for slot in unit.parameters if slot.trainable),
        0.0 if files is None else files.read - files.read_weights + files.written,
        0.0 if files is None else files.read_weights,
    )
    measured = per_step | {"host_copies_us": host.copied_us, "host_updates_us": host.updated_us}
    measured |= dict.fromkeys(("read_us", "write_us", "all_reads_us"), 0.0)
    if files is not None:  # the lanes that read may be busy at once
        most_us = max(files.read_us, files.read_weights_us)
        measured |= {"read_us": files.read_us, "write_us": files.write_us, "all_reads_us": most_us}
    measured["forward_us"] += measured["device_update_us"]  # they run ahead of its visits, on the same lane
    times = {name: measured[name] for names in _LIMITS.values() for name in names}
    streaming = [unit for unit in wrapped.context.units if unit.gradients and not wrapped.rest.has(unit.index)]
    all_drafted = len(wrapped.context.plan.drafted) == len(streaming)
    mode = wrapped.context.policy.update
    if mode == "auto":
        mode = "drafts" if all_drafted else "deferred"

    def bound_of(times: dict[str, float]) -> Bound:
        bounds = bounds_of(times)
        each = bounds.blocking_us, bounds.deferred_us, bounds.drafting_us
        return Bound(per_step["wall_us"], *each, mode, "", host)

    found = bound_of(times)
    limits = [
        limit
        for limit, names in _LIMITS.items()
        if bound_of(times | {name: 1.001 * times[name] for name in names}).bound_us > found.bound_us
    ]
    return dataclasses.replace(found, limit=", ".join(limits))


_LIMITS = {
    "updates": ["update_us"],
    "compute": ["forward_us", "backward_us"],
    "fetches": ["forward_fetch_us", "backward_fetch_us"],
    "drains": ["drain_us", "offload_us", "forward_drain_us"],
    "what ranks send": ["forward_collect_us", "backward_collect_us"],
    "copies between stages": ["peer_us"],
    "host memory": ["host_copies_us", "host_updates_us"],
    READS: ["read_us", "all_reads_us"],
    WRITES: ["write_us"],
}
"""The resources that may limit a step, and the names of their times; see `bounds_of`."""


def _update_time(sums: dict[str, int]) -> UpdateTime | None:
    steps = sums["num_steps"]
    if steps == 0:
        return None
    forward, backward, exposed = (sums[f"update_{where}_us"] / steps for where in _WHERE)
    return UpdateTime(forward + backward + exposed, forward, backward, exposed, sums["device_update_us"] / steps)


_WHERE = ("behind_forward", "behind_backward", "exposed")


_SUBSTANTIAL = 0.1  # share of a step: less is not worth more memory or other hyperparameters


def _advice(wrapped: Wrapped, sums: dict[str, int], bound: Bound, updates: UpdateTime) -> str | None:
    """Returns what would relieve the disk if it limits the step, or else what would hide updates that delay it.

    None if neither is so, or if no option would help.
    """
    if {READS, WRITES} & set(bound.limit.split(", ")) and (text := wrapped.context.plan.files.instead_text()):
        return f"the disk limits the step: {text}"
    if updates.exposed_us < _SUBSTANTIAL * bound.step_us:
        return None
    found = f"updates are exposed for {updates.exposed_us / 1e3:.1f} of {bound.step_us / 1e3:.1f} ms"
    plan = wrapped.context.plan
    if wrapped.context.policy.update == "blocking":
        return f'{found}: update="auto" lets them run behind the next forward'
    compute_us = (sums["forward_us"] + sums["backward_us"]) / sums["num_steps"]
    remedies = []
    may_draft = plan.undo_logs.keys() - plan.stays - plan.streamed.keys()
    has_chosen = wrapped.recorder.began_with_costs or plan.drafted < may_draft  # fewer drafts were faster
    if set(plan.draftable) > set(plan.undo_logs) and wrapped.draft_policy.pay and not has_chosen:
        needed = sum(plan.draftable.values())
        remedies.append(
            f"draft_memory={needed} ({format_bytes(needed)}) lets all {len(plan.draftable)} units be updated behind "
            f"backward as well, not {len(plan.drafted)}"
        )
    if keeps_moments(plan.fused) and wrapped.context.policy.state_dtype == "fp32":
        remedies.append('state_dtype="bf16" makes an update move a third less memory')
    if updates.total_us > compute_us:
        remedies.append("a larger batch, or more micro-batches for each step, gives them more to hide behind")
    return f"{found}: {', and '.join(remedies)}" if remedies else None
