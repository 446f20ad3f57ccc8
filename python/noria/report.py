"""`report`: what a wrapped model's engine did, in numbers that can be compared with its plan."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from noria import _C
from noria.custody import Wrapped, wrapped_together
from noria.doctor import host_memory_gib_s as measured_gib_s
from noria.lending import Loan
from noria.plan import STAGING_RING
from noria.policy import format_bytes

__all__ = ["Bound", "HostMemory", "LaneReport", "LedgerRow", "PassReport", "Report", "UpdateTime", "report"]

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class LaneReport:
    """Microseconds since the wrap call. `stalled_us`: by "giver -> waiter", time that ops of this lane lost waiting.

    `collect` is there where ranks share the model. Its `bytes` are what this rank got from the others at least, and
    so what it sent; it is busy from when all ranks are ready for an op until the op is over. `peer` is there where
    other stages lend memory: both ways.

    On a device the times are its own: of events in the streams. What it has not yet done is not in them.
    """

    lane: str
    busy_us: int
    num_ops: int
    bytes: int
    stalled_us: dict[str, int]


@dataclasses.dataclass(frozen=True)
class LedgerRow:
    """Bytes that noria takes: as planned, and as taken."""

    place: str
    purpose: str
    planned: int
    taken: int


@dataclasses.dataclass(frozen=True)
class PassReport:
    """A kind of pass. `planned_fetches` and `fetches` are of its last occurrence; None: it had no plan, or left it."""

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
    """Bytes of an average step that go through the host's memory, which updates, fetches and drains share.

    `updated`: read and written by updates (of AdamW with fp32 moments and a bfloat16 model 26 for each parameter).
    `copied`: between home and device, both ways; twice as many where the device is the host, which reads and writes
    them. What layers read and write themselves on "cpu" is not in it, nor what ranks send each other.
    """

    updated: float
    copied: float
    gib_s: float

    @property
    def updated_us(self) -> float:
        """What `updated` takes at the pace of the memory alone."""
        return self.updated / (self.gib_s * _GIB) * 1e6

    @property
    def copied_us(self) -> float:
        return self.copied / (self.gib_s * _GIB) * 1e6

    @property
    def us(self) -> float:
        return self.copied_us + self.updated_us


@dataclasses.dataclass(frozen=True)
class Bound:
    """Microseconds of an average step, and what no schedule of the mode can beat (docs/journey.md, "The bound").

    `limit`: what would raise the bound of the mode in use if it took longer, "host memory" for example, or "updates,
    compute" where updates take longest in the forward and compute in the backward.
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
        """Measured step over the bound of the mode in use."""
        return self.step_us / self.bound_us if self.bound_us else float("nan")

    @property
    def bound_us(self) -> float:
        if self.mode in ("drafts", "backward"):
            return self.drafting_us
        return self.blocking_us if self.mode == "blocking" else self.deferred_us


@dataclasses.dataclass(frozen=True)
class UpdateTime:
    """Microseconds of an average step in which the host updated, by what the compute lane did meanwhile.

    Counted from the pool's busy time (drafts, looks at gradients and their norms included, and the share of a job that
    runs). The three sum to the total; the first step, which is unlike the others, is left out.

    - `behind_forward_us`, `behind_backward_us`: the compute lane was at a visit of such a pass.
    - `exposed_us`: it was not. It waited (for a fetch, and so for the update before it; for drains at the end of
      backward; for the home), or no pass was open: inside `step()`, and in what the loop does between passes, a loss
      outside of the model included. On "cpu" the lane is the launching thread, so what that updates by itself
      (`kernel="torch"`) is exposed; a device computes on meanwhile.

    What a device did is known from its own clock, once it has done it: of the last steps a report may miss some.
    """

    total_us: float
    behind_forward_us: float
    behind_backward_us: float
    exposed_us: float


@dataclasses.dataclass(frozen=True)
class Report:
    """Prints well; `to_dict()` for programs."""

    device: str
    num_units: int
    kernels: list[str]
    num_steps: int
    lanes: list[LaneReport]
    passes: list[PassReport]
    forgotten_passes: int  # of kinds that are no longer told apart: only so many are
    ledger: list[LedgerRow]
    num_fetches: int
    drafts: dict[str, int]  # kept, looked_at (of these by now unchanged, changed), redone, dropped; docs/drafts.md
    saved: dict[str, int]  # by blocks: storages and bytes that left, of these to peers, came back, and were there
    recomputed: list[str]  # blocks that compute their activations again, in backward
    loans: list[Loan]  # between the stages of a pipeline: memory of one's device for what has no room on another one's
    row_name: str  # what lenders and borrowers are called: "stage", or "rank" where this one has several stages
    copies: dict[str, int]  # of units at other stages: how many are kept there, were stashed and fetched, and bytes
    unclaimed_fetches: int  # of those: made by `step()` for a forward that did not come next
    peak_lease_bytes: int
    peak_units: int
    resident: list[str]
    bound: Bound | None
    updates: UpdateTime | None  # None: no step yet
    advice: str | None  # what would hide updates that hold up the step
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"noria on {self.device}: {self.num_units} units, {self.num_steps} steps, {self.num_fetches} fetches"]
        lines += [f"updates: {kernel}" for kernel in self.kernels]
        if any(self.drafts.values()):
            d = self.drafts
            lines.append(
                f"drafts: {d['kept']} kept, {d['looked_at']} kept or redone after a look at the gradient "
                f"({d['changed']} had changed), {d['redone']} redone with other hyperparameters, {d['dropped']} dropped"
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
                f"{copies['num_units']} units at other stages: {format_bytes(copies['stashed'])} stashed, "
                f"{copies['num_fetched']} fetches of {format_bytes(copies['fetched'])} from there"
            )
        lines.append("passes (last occurrence):")
        for each in self.passes:
            kind = f"{each.phase}{'' if each.training else ', eval'}{', accumulating' if each.accumulating else ''}"
            planned = "no plan" if each.planned_fetches is None else f"planned {each.planned_fetches}"
            lines.append(
                f"  {kind:<24} {each.num_visits:>4} visits, {each.times:>5} times, {each.fetches} fetches ({planned}), "
                f"{each.unplanned_visits} unplanned visits in all"
            )
        if self.forgotten_passes:
            lines.append(f"  and {self.forgotten_passes} passes of kinds that have not been seen again for long")
        if self.unclaimed_fetches:
            lines.append(f"  {self.unclaimed_fetches} fetches for a forward pass that did not come next")
        lines.append("memory (planned = taken):" if self.ledger_agrees else "memory (PLAN AND LEDGER DIFFER):")
        for row in self.ledger:
            lines.append(
                f"  {row.place:<8} {row.purpose:<34} {format_bytes(row.planned):>10} {format_bytes(row.taken):>10}"
            )
        lines.append(f"leases: at most {self.peak_units} units, {format_bytes(self.peak_lease_bytes)}")
        if self.bound is not None:
            b = self.bound
            lines.append(
                f"step {b.step_us / 1e3:.1f} ms, {b.ratio:.2f} x the bound of its mode ({b.mode}: {b.limit}); bounds: "
                f"blocking {b.blocking_us / 1e3:.1f} ms, deferred {b.deferred_us / 1e3:.1f} ms, "
                f"all units drafted {b.drafting_us / 1e3:.1f} ms"
            )
            h = b.host_memory
            lines.append(
                f"host memory: {format_bytes(round(h.updated + h.copied))} a step, {format_bytes(round(h.updated))} by "
                f"updates and {format_bytes(round(h.copied))} by fetches and drains, take {h.us / 1e3:.1f} ms at "
                f"{h.gib_s:.1f} GiB/s, which they share"
            )
        if self.updates is not None:
            u = self.updates
            lines.append(
                f"updates {u.total_us / 1e3:.1f} ms a step: {u.behind_backward_us / 1e3:.1f} behind backward, "
                f"{u.behind_forward_us / 1e3:.1f} behind forward, {u.exposed_us / 1e3:.1f} exposed"
            )
        if self.advice is not None:
            lines.append(f"advice: {self.advice}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    @property
    def ledger_agrees(self) -> bool:
        return all(row.planned == row.taken for row in self.ledger)


def report(model: nn.Module, *, write_trace: bool = True, host_memory_gib_s: float | None = None) -> Report:
    """What has happened since `model` was wrapped. Waits for nothing; also writes the trace, if the policy asks for one
    (`write_trace=False` leaves that out, for who asks many times a second).

    `host_memory_gib_s`: what the host's memory reads and writes, which bounds updates, fetches and drains together.
    None: what it is measured to be, once in a process, in the first report after a step. That takes some tenths of a
    second, and 64 MiB for that time, or twice what the caches hold.
    `model`: also what else `wrap` was given, as a list of stages. Raises UsageError for a model that is not wrapped.
    """
    wrapped = wrapped_together(model)
    if write_trace:
        wrapped.write_trace()
    custody, sums = wrapped.custody, wrapped.custody.step_sums()
    bound, updates = _bound(wrapped, sums, host_memory_gib_s), _update_time(sums)
    return Report(
        device=str(wrapped.device),
        num_units=len(wrapped.units),
        kernels=list(wrapped.plan.kernel_names),
        num_steps=max((updates.num_steps for updates in wrapped.optimizers), default=0),
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
            for each in custody.passes()
        ],
        forgotten_passes=custody.num_forgotten_passes,
        ledger=_ledger(wrapped),
        num_fetches=custody.num_fetches,
        drafts=custody.draft_counts(),
        saved=custody.saved_stats(),
        recomputed=wrapped.activations.recomputed(),
        loans=[loan for loan in wrapped.lending.loans if loan.bytes],
        row_name=wrapped.lending.row_name,
        copies=custody.copy_stats(),
        unclaimed_fetches=custody.num_unclaimed_fetches,
        peak_lease_bytes=custody.peak_bytes,
        peak_units=custody.peak_units,
        resident=[wrapped.units[unit].name for unit in custody.resident_units()],
        bound=bound,
        updates=updates,
        advice=_advice(wrapped, sums, bound, updates) if bound and updates else None,
        notes=[*wrapped.plan.unpredicted, *wrapped.home.notes, *wrapped.lending.notes],
    )


def _lanes(wrapped: Wrapped) -> list[LaneReport]:
    lanes = []
    names = ["compute", "fetch", "drain", "collect", "peer", "update"]
    if wrapped.ranks is None:
        names.remove("collect")
    if not wrapped.lending.borrowed:
        names.remove("peer")
    for lane in names:
        stats = wrapped.custody.update_stats() if lane == "update" else wrapped.backend.stats(lane)
        busy = wrapped.custody.compute_us if lane == "compute" else stats["busy_us"]
        stalled = {" -> ".join(kind): us for kind, us in stats["stalled_us"].items()}
        lanes.append(LaneReport(lane, busy, stats["num_ops"], stats["bytes"], stalled))
    return lanes


def _ledger(wrapped: Wrapped) -> list[LedgerRow]:
    taken = {("host", purpose): arena.bytes for purpose, arena in wrapped.home.arenas.items()}
    if wrapped.backend.staging_bytes:
        taken[("host", STAGING_RING)] = wrapped.backend.staging_bytes
    device = str(wrapped.device)
    taken[(device, "window and gradient buffers")] = wrapped.custody.arena_bytes
    taken |= {(device, purpose): amount for purpose, amount in wrapped.beside.taken.items()}
    if rest := wrapped.backend.allocated - wrapped.custody.arena_bytes - sum(wrapped.beside.taken.values()):
        taken[(device, "what no plan has")] = rest
    rows = [
        LedgerRow(place, purpose, planned, taken.pop((place, purpose), 0))
        for place, purpose, planned in wrapped.plan.rows()
    ]
    rows += [LedgerRow(place, purpose, 0, amount) for (place, purpose), amount in taken.items()]
    return rows


def _bound(wrapped: Wrapped, sums: dict[str, int], gib_s: float | None) -> Bound | None:
    steps = sums["num_steps"]
    if steps == 0:
        return None
    per_step = {name: value / steps for name, value in sums.items() if name.endswith("_us")}
    host = HostMemory(
        sums["updated"] / steps + sum(updates.bytes_by_torch() for updates in wrapped.optimizers),
        sums["copied"] / steps * (2 if wrapped.device.type == "cpu" else 1),
        measured_gib_s() if gib_s is None else gib_s,
    )
    measured = per_step | {"host_copies_us": host.copied_us, "host_updates_us": host.updated_us}
    times = {name: measured[name] for names in _LIMITS.values() for name in names}
    all_drafted = len(wrapped.plan.drafted) == len([unit for unit in wrapped.units if unit.gradients])
    mode = wrapped.policy.update
    if mode == "auto":
        mode = "drafts" if all_drafted else "deferred"

    def bound_of(times: dict[str, float]) -> Bound:
        step = _C.StepTimes(**times)
        bounds = _C.blocking_bound_us(step), _C.deferred_bound_us(step), _C.drafting_bound_us(step)
        return Bound(per_step["wall_us"], *bounds, mode, "", host)

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
    "drains": ["drain_us", "offload_us"],
    "what ranks send": ["forward_collect_us", "backward_collect_us"],
    "copies between stages": ["peer_us"],
    "host memory": ["host_copies_us", "host_updates_us"],
}
"""What may limit a step, and its times in `StepTimes`."""


def _update_time(sums: dict[str, int]) -> UpdateTime | None:
    steps = sums["num_steps"]
    if steps == 0:
        return None
    shares = [sums[f"update_{where}_us"] / steps for where in ("behind_forward", "behind_backward", "exposed")]
    return UpdateTime(sum(shares), *shares)


_SUBSTANTIAL = 0.1  # of a step: what is less is not worth anybody's memory or hyperparameters


def _advice(wrapped: Wrapped, sums: dict[str, int], bound: Bound, updates: UpdateTime) -> str | None:
    """Where updates hold up the step: what would hide them. None: they do not, or nothing that a policy can change."""
    if updates.exposed_us < _SUBSTANTIAL * bound.step_us:
        return None
    found = f"updates are exposed for {updates.exposed_us / 1e3:.1f} of {bound.step_us / 1e3:.1f} ms"
    plan = wrapped.plan
    if wrapped.policy.update == "blocking":
        return f'{found}: update="auto" lets them run behind the next forward'
    compute_us = (sums["forward_us"] + sums["backward_us"]) / sums["num_steps"]
    remedies = []
    if set(plan.draftable) > plan.drafted and wrapped.drafts.pay:
        needed = sum(plan.draftable.values())
        remedies.append(
            f"draft_memory={needed} ({format_bytes(needed)}) lets all {len(plan.draftable)} units be updated behind "
            f"backward as well, not {len(plan.drafted)}"
        )
    if plan.fused and wrapped.policy.state_dtype == "fp32":
        remedies.append('state_dtype="bf16" makes an update move a third less memory')
    if updates.total_us > compute_us:
        remedies.append("a larger batch, or more micro-batches for each step, gives them more to hide behind")
    return f"{found}: {', and '.join(remedies)}" if remedies else None
