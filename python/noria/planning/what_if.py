"""Says what limits a planned step, and what would change it: simulates the same step on other machines and settings."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

from noria._errors import UsageError
from noria.model.file_layout import IN_FILES, WEIGHTS
from noria.model.layout import GRADIENT_RING, TORCH_STATE, UNDO_LOGS, HomeUnit, Region
from noria.model.update_rules import keeps_moments
from noria.planning.bounds import READS, WRITES
from noria.planning.decisions import room_for_stays
from noria.planning.file_plan import WEIGHTS_ALIGNMENT
from noria.planning.home_regions import least_ring_bytes
from noria.planning.machines import Machine
from noria.planning.step_simulation import PlannedStep
from noria.planning.wrap_plan import WrapPlan, staging_bytes
from noria.policy import to_bytes

__all__ = ["Change", "Largest", "break_even_tokens", "changes", "compute_us", "largest_model", "simulated", "wall"]

_HIDDEN = 1.05
"""A step that takes this many times its compute hides all else."""
_MOST_TOKENS = 1 << 22


@dataclasses.dataclass(frozen=True)
class Change:
    """Describes the step after one change. `gain`: tokens per second over those of before."""

    what: str
    step_us: int
    tokens: int
    gain: float


@dataclasses.dataclass(frozen=True)
class Largest:
    """Describes the largest model of this shape that host memory holds. Only its number of blocks differs."""

    num_parameters: int
    num_blocks: int
    block: str


def simulated(planned: WrapPlan, machine: Machine, tokens: int, backwards: int = 1) -> PlannedStep:
    """Simulates steps of the plan on a machine. The backwards of a step share its tokens."""
    return PlannedStep(planned, tokens, machine.speeds(planned.policy.state_dtype), backwards=backwards)


def wall(step: PlannedStep) -> tuple[str, float]:
    """Returns the resource that the step needs longest, and for which share of the step."""
    of = step.needs()
    needs = {
        "compute of the device": compute_us(step),
        "fetches over the link": of["forward_fetch_us"] + of["backward_fetch_us"],
        "drains over the link": of["drain_us"] + of["forward_drain_us"],
        "updates on the host": of["update_us"],
        "memory of the host": of.get("host_copies_us", 0.0) + of.get("host_updates_us", 0.0),
        READS: of["all_reads_us"],
        WRITES: of["write_us"],
    }
    name = max(needs, key=lambda each: needs[each])
    return name, needs[name] / max(step.step_us, 1)


def compute_us(step: PlannedStep) -> float:
    """Returns the time of the layers alone, as if all of the model lay on the device."""
    times = step.times()
    return times.forward_us + times.backward_us


def changes(step: PlannedStep, machine: Machine, plan_again: Callable[[dict[str, object]], WrapPlan]) -> list[Change]:
    """Returns what single changes of `step` on `machine` would give, the best first.

    `plan_again`: plans the same model with these fields of the policy besides. It may raise UsageError.
    """
    planned, policy, tokens, backwards = step.planned, step.planned.policy, step.tokens, step.backwards

    def with_parts(**parts: Any) -> PlannedStep:
        return simulated(planned, dataclasses.replace(machine, **parts), tokens, backwards)

    found = {
        "twice the tokens a step": simulated(planned, machine, 2 * tokens, backwards),
        "a link twice as fast": with_parts(fetch=2 * machine.fetch, drain=2 * machine.drain),
        "a device twice as fast": with_parts(tflops=2 * machine.tflops),
    }
    if machine.update is None:  # else these say nothing about updates
        found["host memory twice as fast"] = with_parts(host=2 * machine.host)
        found["twice the cores"] = with_parts(cores=2 * machine.cores)
    if planned.files.is_used:
        found["disks twice as fast"] = with_parts(disk_read=2 * machine.disk_read, disk_write=2 * machine.disk_write)
    others: dict[str, dict[str, object]] = {}
    if keeps_moments(planned.fused):
        others |= {f'state_dtype="{each}"': {"state_dtype": each} for each in ("bf16", "8bit")}
    if planned.fused:
        others |= {f'update="{each}"': {"update": each} for each in ("auto", "backward")}
    others = {what: fields for what, fields in others.items() if not fields.items() <= vars(policy).items()}
    if policy.resident == "none" and (room_for_stays(planned) >> 30):
        others['resident="auto"'] = {"resident": "auto"}
    if policy.optimizer_device == "host" and planned.kernels and policy.state_dtype == "fp32":
        others['optimizer_device="device"'] = {"optimizer_device": "device"}
    if policy.host_memory != "auto" and set(planned.draftable) > planned.drafted:
        missing = sum(size for unit, size in planned.draftable.items() if unit not in planned.drafted)
        needed = planned.home_bytes + missing + staging_bytes(planned.device)
        others["host memory for drafts of all units"] = {"host_memory": needed}
    for what, fields in others.items():
        try:
            found[what] = simulated(plan_again(fields), machine, tokens, backwards)
        except UsageError:  # it does not fit, or noria cannot
            continue
    before = tokens / max(step.step_us, 1)
    each = [
        Change(what, after.step_us, after.tokens, after.tokens / max(after.step_us, 1) / before)
        for what, after in found.items()
    ]
    return sorted(each, key=lambda change: -change.gain)


def break_even_tokens(planned: WrapPlan, machine: Machine, backwards: int = 1) -> int | None:
    """Returns from how many tokens a step on its compute hides all else, within 5 %. None if no number does."""

    def hides(tokens: int) -> bool:
        step = simulated(planned, machine, tokens, backwards)
        return step.step_us <= _HIDDEN * compute_us(step)

    too_few, enough = 1, 64
    while not hides(enough):
        too_few, enough = enough, 2 * enough
        if enough > _MOST_TOKENS:
            return None
    while enough - too_few > max(1, enough // 100):
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if hides(middle) else (middle, enough)
    return enough


def largest_model(planned: WrapPlan, host_bytes: int) -> Largest | None:
    """Returns the largest model of this shape whose home, without drafts, fits into these bytes of host memory.

    The device does not limit it: the window holds some blocks, however many there are. None if no block repeats.
    """
    alike = Counter((unit.weights, unit.gradients) for unit in planned.units if unit.is_block)
    if not alike:
        return None
    (weights, gradients), num_blocks = alike.most_common(1)[0]
    block = next(u for u in planned.units if u.is_block and (u.weights, u.gradients) == (weights, gradients))
    regions = _in_memory(planned)
    trained = sum(unit.gradients for unit in planned.units)
    own = 0
    for region in regions:
        if len(region.sizes) == len(planned.units):
            own += region.sizes[block.index]
        elif region.purpose == TORCH_STATE and trained:  # not by unit
            own += region.bytes * block.gradients // trained
    of_all = sum(region.bytes for region in regions if region.purpose != GRADIENT_RING)
    rest = of_all - num_blocks * own + planned.files.memory
    room = host_bytes - staging_bytes(planned.device) - rest
    most = room // own
    if planned.ring is not None:  # it has slots, or a place for each unit if that takes less
        gradients = block.home_gradients
        others = sum(unit.home_gradients for unit in planned.units) - num_blocks * gradients
        most = max((room - least_ring_bytes(planned.ring)) // own, (room - others) // (own + gradients))
    if planned.files.is_used and (cap := to_bytes(planned.policy.file_memory)) is not None:
        most = min(most, cap // (planned.files.slot_bytes + planned.files.weights_slot_bytes))
    if most < 1:
        return Largest(0, 0, block.name)
    of_block = sum(slot.parameter.numel() for slot in block.parameters)
    others = sum(slot.parameter.numel() for unit in planned.units for slot in unit.parameters) - num_blocks * of_block
    return Largest(others + most * of_block, most, block.name)


def _in_memory(planned: WrapPlan) -> list[Region]:
    """Returns the arenas without drafts. If slots are large enough for a unit's moments, those lie in files.

    Likewise its frozen weights: at most two pages of them stay in memory.
    """
    moments: Counter[int] = Counter()
    for region in planned.regions:
        if region.purpose in IN_FILES:
            moments.update(dict(enumerate(region.sizes)))
    files = planned.files

    def weights_left(unit: HomeUnit) -> int:
        in_file = max(unit.home_weights - unit.home_gradients - 2 * WEIGHTS_ALIGNMENT, 0)
        return unit.home_weights - (in_file if in_file <= files.weights_slot_bytes else 0)

    regions = [region for region in planned.regions if region.purpose != UNDO_LOGS]
    if files.weights:
        left = Region.of(WEIGHTS, map(weights_left, planned.units))
        regions = [left if region.purpose == WEIGHTS else region for region in regions]
    return [
        Region.of(
            region.purpose,
            (0 if moments[unit] <= planned.files.slot_bytes else size for unit, size in enumerate(region.sizes)),
        )
        if region.purpose in IN_FILES
        else region
        for region in regions
    ]
