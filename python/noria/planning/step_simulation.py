"""Simulates one step of a plan in virtual time, at given speeds."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Container, Iterable

import torch
from torch import nn

from noria import _C
from noria.model.inner_tensors import tensors_in
from noria.model.layout import HomeUnit
from noria.planning.bounds import Bounds, bounds_of, times_without_files
from noria.planning.file_simulation import FileOps, FileWeightsOps
from noria.planning.measured_costs import MeasuredCosts
from noria.planning.saved_simulation import SavedOps
from noria.planning.simulated_op import SimulatedOp
from noria.planning.streamed import bytes_moved
from noria.planning.streamed_simulation import StreamedOps
from noria.planning.wrap_plan import WrapPlan, forward_order, passes_of_step

__all__ = ["PlanSpeeds", "PlannedStep", "bytes_per_copied", "saved_by_blocks"]


@dataclasses.dataclass(frozen=True)
class PlanSpeeds:
    """Holds GiB/s of the lanes, each alone, and Tflop/s of the device.

    - `draft`: GiB/s of drafts, which compute more than updates. 0: as updates.
    - `host`: GiB/s of the host's memory, which copies and updates share. 0: no limit.
    - `device`: GiB/s of updates on the device. 0: they take no time.
    - `both_ways`: GiB/s of fetches and drains together, while both run. 0: neither slows the other down.
    - `host_tflops`: Tflop/s of the host's cores, for updates that multiply matrices. 0: that takes no time.
    - `disk_read`, `disk_write`: GiB/s from files and to them, while both go on. 0: they take no time.
    - `measured`: the names of those that were measured now.
    """

    fetch: float
    drain: float
    update: float
    tflops: float
    draft: float = 0.0
    host: float = 0.0
    both_ways: float = 0.0
    device: float = 0.0
    host_tflops: float = 0.0
    measured: tuple[str, ...] = ()
    disk_read: float = 0.0
    disk_write: float = 0.0


def saved_by_blocks(planned: WrapPlan, measured: MeasuredCosts) -> dict[int, int]:
    """Returns the bytes that blocks save for their backwards, and that may leave the device, by unit.

    Of a block that computes again these are its inputs.
    """
    if planned.least_saved is None or not measured.saved:
        return {}
    again = planned.recomputed or ()
    sizes = {unit: (measured.inputs if unit in again else measured.saved)[unit] for unit in planned.block_units}
    return {unit: size for unit, size in sorted(sizes.items()) if size > 0}


def bytes_per_copied(device: torch.device) -> int:
    """Returns how often a copied byte is read or written in the host's memory."""
    return 2 if device.type == "cpu" else 1  # there the device's memory is the host's


@dataclasses.dataclass(frozen=True, slots=True)
class _PassOp:
    """Holds what is needed of an op of a pass plan: each step looks at it."""

    lane: str
    verb: str
    unit: int
    num_bytes: int
    visit: int
    accesses: list[tuple[int, str]]


def _ops_of(plan: _C.PassPlan) -> list[_PassOp]:
    return [
        _PassOp(op.lane, op.verb, op.unit, op.bytes, op.visit, [(each.buffer, each.mode) for each in op.accesses])
        for op in plan.ops
    ]


_STEPS = 4
"""How many steps are simulated one after another. The last one counts: what the first ones find is not steady yet."""
_BACKWARDS = 3
"""Most backwards of a step that are simulated: the first, the last, and one for all others."""


class PlannedStep:
    """Simulates steps of the plan, each with its updates where the update mode makes them. The last one counts.

    Compute is taken as two flops per weight and token in forward, and twice that in backward. Embeddings take none.
    This is right for models made of matrix products, and too little for attention over long sequences. With `measured`
    the costs are those, and the number of backwards too. Of `speeds` only what lanes share counts, if it was not
    measured.

    A step may have several backwards, which share its `tokens`. Of these, three are simulated. The second one counts
    for all that lie between the first and the last.
    """

    def __init__(
        self,
        planned: WrapPlan,
        tokens: int,
        speeds: PlanSpeeds,
        measured: MeasuredCosts | None = None,
        backwards: int = 1,
    ) -> None:
        self.planned, self.speeds, self.tokens, self.measured = planned, speeds, tokens, measured
        self.backwards = backwards if measured is None else measured.backwards
        self.num_simulated = min(self.backwards, _BACKWARDS)
        """How many of the backwards are simulated."""
        self._passes = [(phase, _ops_of(plan)) for phase, plan in passes_of_step(planned, self.num_simulated)]
        self._visited = {phase: [visit.needs[-1] for visit in visits] for phase, visits in planned.visits.items()}
        """By phase and visit: its last unit."""
        self._ring = planned.ring if self.backwards == 1 else None  # who accumulates holds all gradients
        self.ops: list[_C.Op] = []
        self._made: list[tuple[str, str, int, int, list[_C.Access]]] = []  # what these ops were made of
        self.phases: list[str] = []
        self._priorities: list[int] = []
        self._accesses: dict[tuple[int, str], _C.Access] = {}
        order = [planned.units[index] for index in forward_order(planned)]
        self._order = {unit.index: place for place, unit in enumerate(order)}
        trained = [unit for unit in order if planned.kernels and unit.gradients]
        self._trained = [unit for unit in trained if unit.index not in planned.stays]
        self._at_home = [unit for unit in self._trained if unit.index not in planned.streamed]
        self._streams = StreamedOps(planned.streamed, planned.buffers, self._bytes_on_device)
        self._at_rest = [unit for unit in trained if unit.index in planned.stays]
        saved = {} if measured is None else saved_by_blocks(planned, measured)
        is_prompt = planned.device.type == "cpu"
        self.saved = SavedOps(saved, planned.saved_room, planned.buffers, is_prompt=is_prompt)
        reads_ahead = planned.policy.update == "backward"
        most_postponed = planned.ring.most_postponed if planned.ring else 0
        begun = None if reads_ahead else self._loop
        self._files = FileOps(planned.files, planned.buffers, begun, most_postponed)
        self._file_weights = FileWeightsOps(planned.files, planned.buffers)
        self._first: list[int] = []  # by step: its first op
        self._middle: set[int] = set()  # ops of the second of three backwards, and of its forward
        self._takes: list[int] = []  # ops that take a slot of the gradient ring
        self._gives: list[int] = []
        # If something of a step is still under way in the next one, the first step differs from the others.
        differs = bool(saved or planned.streamed_at_rest) or planned.policy.update == "blocking"
        num_made = _STEPS if planned.files.is_used else 1 + differs  # units take other slots in each step
        for step in range(num_made):
            self._first.append(len(self.ops))
            self._middle.clear()
            self._add_step(step)
        self._repeat_last_step(_STEPS - len(self._first))
        self.waits = _C.derive(self.ops, planned.buffers)
        self._costs = self._estimated() if measured is None else self._measured(measured)
        ring = (0 if self._ring is None else self._ring.num_slots), self._takes, self._gives
        all_spans = _C.simulate(self.ops, self.waits, self._costs, self._priorities, *ring)
        spans = {span.op: span for span in all_spans}
        self.begin_us, self.end_us = (
            max((spans[op].end_us for op in range(num_ops) if op in spans and spans[op].lane == "compute"), default=0)
            for num_ops in (self._first[-1], len(self.ops))
        )
        """When the last step begins and ends: its compute, from one step's end to the next."""
        self.spans = [spans[op] for op in range(self._first[-1], len(self.ops)) if op in spans]
        """The ops of the last step."""
        self.all_spans = all_spans
        """The ops of all steps."""
        self._left_out_us = 0
        """The time of the backwards that are not simulated, with their forwards."""
        if self.backwards > self.num_simulated:
            compute = [span for span in self.spans if span.lane == "compute"]
            ends_us = max(span.end_us for span in compute if span.op in self._middle)
            begins_us = max(span.end_us for span in compute if span.op < min(self._middle))
            self._left_out_us = (self.backwards - self.num_simulated) * (ends_us - begins_us)

    def _estimated(self) -> _C.Costs:
        speeds = self.speeds
        rates = {"fetch": speeds.fetch, "drain": speeds.drain, "update": speeds.update, "compute": speeds.device}
        rates |= self._disk_rates()
        tokens = self.tokens / self.backwards
        forward_us = [2 * tokens * count / speeds.tflops / 1e6 for count in self._multiplied()]
        backward_us = self._computed_again([2 * us for us in forward_us], forward_us)
        by_visit = self._by_visit("forward", forward_us), self._by_visit("backward", backward_us)
        return _C.Costs(rates, {}, *by_visit, speeds.draft, speeds.both_ways, speeds.host, self._bytes_per_copied)

    def _measured(self, measured: MeasuredCosts) -> _C.Costs:
        backward_us = self._computed_again(measured.backward_us, measured.forward_us)
        by_visit = measured.forward_us, backward_us
        both_ways = measured.both_ways_gib_s or self.speeds.both_ways
        host = measured.host_gib_s or self.speeds.host
        shared = measured.draft_gib_s, both_ways, host, self._bytes_per_copied
        rates = self._disk_rates() | measured.gib_s | {"compute": measured.device_update_gib_s or self.speeds.device}
        return _C.Costs(rates, measured.latency_us, *by_visit, *shared)

    def _disk_rates(self) -> dict[str, float]:
        read = self.speeds.disk_read
        return {"read": read, "read_weights": read, "write": self.speeds.disk_write}

    def _computed_again(self, backward_us: list[float], forward_us: list[float]) -> list[float]:
        """Returns the times of backward visits, with the forwards that some of them compute again."""
        again = self.planned.recomputed or ()
        return [us + forward_us[unit] if unit in again else us for unit, us in enumerate(backward_us)]

    @property
    def step_us(self) -> int:
        return self.end_us - self.begin_us + self._left_out_us

    def lane_use(self, lane: str) -> tuple[int, int, int]:
        """Returns how many ops a step has on this lane, how long they take in all, and when the last one ends."""
        spans = [span for span in self.spans if span.lane == lane]
        ends_us = [span.end_us + (self._left_out_us if span.op > max(self._middle, default=0) else 0) for span in spans]
        return (
            sum(map(self._stands_for, spans)),
            sum(self._stands_for(span) * (span.end_us - span.start_us) for span in spans),
            max(ends_us, default=self.begin_us) - self.begin_us,
        )

    @property
    def file_bytes(self) -> tuple[int, int]:
        """Returns the bytes that a step reads from files, and those that it writes to them."""
        ways = (("read", "read_weights"), ("write",))
        read, written = (sum(span.bytes for span in self.spans if span.lane in lanes) for lanes in ways)
        return read, written

    def _stands_for(self, span: _C.Span) -> int:
        """Returns how many ops of a step this simulated one stands for."""
        return 1 + self.backwards - self.num_simulated if span.op in self._middle else 1

    @property
    def _bytes_per_copied(self) -> int:
        return bytes_per_copied(self.planned.device)

    def trace_json(self) -> str:
        """Returns the simulated steps as the JSON of a trace, like that of a run (`noria trace`, Perfetto)."""
        trace = _C.Trace(len(self.all_spans))
        for span in self.all_spans:
            trace.add(span)
        return trace.chrome_json([unit.name for unit in self.planned.units])

    def _add_step(self, step: int) -> None:
        mode = self.planned.policy.update
        early = {unit.index for unit in self._trained} if mode == "backward" else self.planned.drafted
        for number, (phase, each) in enumerate(self._passes):
            first, backward = len(self.ops), number // 2
            self._add_pass(
                phase,
                each,
                held_up={"fetch", "compute"} if mode == "blocking" and number == 0 and step > 0 else set(),
                completes=early if backward == self.num_simulated - 1 else set(),
                step=step,
            )
            if phase == "backward" and backward < self.num_simulated - 1 and self.planned.kernels:
                # The loop sees them, and goes on.
                self._add(phase, "compute", phase, -1, 0, [*self._landed(set()), (self._loop, "write")])
            if 0 < backward < self.num_simulated - 1:
                self._middle.update(range(first, len(self.ops)))
        self._add_ops("forward", self._streams.run_all())  # of units that no pass has fetched
        late = [unit for unit in self._at_home if unit.index not in early]
        # The loop goes on when all gradients have landed, and calls step(). Drafts have read theirs.
        self._add("step", "compute", "user", -1, 0, [*self._landed(early), (self._loop, "write")])
        for unit in late:
            self._add_update(step, "update", unit.index)
        streamed = (unit.index for unit in self._trained if unit.index in self.planned.streamed)
        self._add_ops("forward", self._streams.expect(streamed))
        if mode == "blocking":
            self._add_ops("forward", self._streams.run_all())
        for unit in self._at_rest:
            # torch's updates there are measured in pieces.
            by_torch = unit.index in self.planned.streamed
            moved = self._bytes_on_device(unit.index) if by_torch else self._update_bytes(unit, is_logged=False)
            self._add("step", "compute", "update", unit.index, int(moved), [])

    def _repeat_last_step(self, times: int) -> None:
        """Adds the ops of the last step again."""
        first, end = self._first[-1], len(self.ops)
        ops = self._made[first:]
        phases, priorities = self.phases[first:], self._priorities[first:]
        takes, gives = ([op for op in each if op >= first] for each in (self._takes, self._gives))
        middle = frozenset(self._middle)
        for number in range(1, times + 1):
            later = number * (end - first)
            self._first.append(first + later)
            self.ops += [
                _C.Op(op, lane, verb, unit, size, -1, accesses)
                for op, (lane, verb, unit, size, accesses) in enumerate(ops, first + later)
            ]
            self.phases += phases
            self._priorities += [priority + number * len(self.planned.units) for priority in priorities]
            self._takes += [op + later for op in takes]
            self._gives += [op + later for op in gives]
            self._middle = {op + later for op in middle}

    def _landed(self, read: Container[int]) -> list[tuple[int, str]]:
        """Returns what the user's loop accesses when all gradients have landed. `read`: units that it does not edit."""
        return [
            (self._buffer("host:1", "held_gradient", unit.index), "read" if unit.index in read else "write")
            for unit in (self._trained if self.planned.policy.update != "backward" else [])
        ]

    def _add_pass(
        self, phase: str, ops: list[_PassOp], *, held_up: set[str], completes: Container[int], step: int
    ) -> None:
        """Adds the ops of a pass.

        Args:
            held_up: lanes whose first op waits until `step()` has returned, and so until all is updated.
            completes: units that are updated as soon as this pass has drained their gradients.
        """
        left = Counter(op.unit for op in ops if op.verb == "drain" and op.unit in completes)
        drained = {op.accesses[0][0] for op in ops if op.verb == "drain"}
        filled: dict[int, list[int]] = defaultdict(list)  # by visit: its gradient buffers
        fetched: dict[int, list[int]] = defaultdict(list)
        is_first_fetch = phase == "forward"
        open_visit: int | None = None
        num_completed = 0  # of units whose state lies in files
        postponed: list[int] = []
        if phase == "forward":
            self.saved.begin_forward()
        for op in ops:
            if op.verb == "fetch":
                fetched[op.visit].append(op.unit)
        for op in ops:
            if open_visit is not None and op.visit > open_visit:
                self._leave(phase, open_visit)
                open_visit = None
            for needed in fetched.pop(op.visit, ()):
                self._add_ops("forward", self._streams.run(needed))
            accesses = list(op.accesses)
            if op.lane == "fetch" and is_first_fetch:
                accesses.append((self._loop, "read"))  # a forward's first fetch is issued when the loop has come so far
                is_first_fetch = False
            if op.lane in held_up:
                held_up.remove(op.lane)
                accesses += [(self._buffer("host:2", "optimizer_state", unit.index), "read") for unit in self._trained]
                accesses += self._files.written()
            is_of_weights = op.verb == "fetch" and op.accesses[-1][0] not in drained
            if is_of_weights and op.unit in self.planned.files.weights:
                self._add_ops(phase, self._file_weights.bring(op.unit))
                accesses.append(self._file_weights.access(op.unit))
            if op.verb == "drain" and self._is_in_ring(op.unit):
                self._takes.append(len(self.ops))
            number = op.unit
            buffers = [buffer for buffer, mode in accesses if mode == "write" and buffer in drained]
            if op.verb in ("forward", "backward"):
                number = self._visited[phase][op.visit]  # the op does not name a unit that stays
                filled[op.visit] = buffers
                open_visit = op.visit
                if phase == "forward":
                    self._add_ops(phase, self.saved.enter_forward(number))
                else:
                    self._add_ops(phase, self.saved.enter_backward(number))
                    accesses += self.saved.reads(number)
            elif op.lane == "fetch" and buffers and self.planned.device.type == "cpu":
                # It is issued when a visit begins. On the CPU the visit before has ended by then.
                accesses += [(buffer, "read") for buffer in filled[op.visit - 1]]
            self._add(phase, op.lane, op.verb, number, op.num_bytes, accesses)
            if op.verb == "drain" and op.unit in left:
                left[op.unit] -= 1
                if left[op.unit] > 0:
                    continue
                if op.unit in self.planned.files.sizes:
                    num_completed += 1
                    if self._files.postpones(num_completed - 1):
                        postponed.append(op.unit)
                        continue
                self._add_update(step, "update" if self.planned.policy.update == "backward" else "draft", op.unit)
        if open_visit is not None:
            self._leave(phase, open_visit)
        for unit in sorted(postponed):
            self._add_update(step, "update", unit)

    def _leave(self, phase: str, visit: int) -> None:
        if phase == "forward":
            self._add_ops(phase, self.saved.leave_forward(self._visited[phase][visit]))

    def _add_ops(self, phase: str, ops: Iterable[SimulatedOp]) -> None:
        for op in ops:
            self._add(phase, op.lane, op.verb, op.unit, op.num_bytes, op.accesses)

    def _bytes_on_device(self, unit: int) -> float:
        """Returns the bytes of an update on the device, and those of its matrix products."""
        products = self._bytes_of_products(unit, self.speeds.tflops, self.speeds.device)
        return bytes_moved(self.planned.streamed[unit]) + products

    def _host_bytes(self, span: _C.Span) -> int:
        """Returns the bytes of an op without what stands for matrix products of updates."""
        is_update = span.lane == "update"
        products = self._bytes_of_products(span.unit, self.speeds.host_tflops, self.speeds.update) if is_update else 0
        return span.bytes - products

    def _bytes_of_products(self, unit: int, tflops: float, gib_s: float) -> int:
        """Returns the bytes whose time is that of the update's matrix products. Measured rates have that time."""
        flops = self.planned.update_flops.get(unit, 0.0)
        return int(flops / tflops / 1e12 * gib_s * (1 << 30)) if tflops else 0

    def _add_update(self, step: int, verb: str, unit: int) -> None:
        accesses = [
            (self._buffer("host:1", "held_gradient", unit), "read"),
            (self._buffer("host:2", "optimizer_state", unit), "write"),
            (self._buffer("host:0", "working_copy", unit), "write"),
        ]
        is_in_file = unit in self.planned.files.sizes
        if is_in_file:
            self._add_ops("step", self._files.bring(unit))
            accesses.append(self._files.access(unit))
        if self._is_in_ring(unit):
            self._gives.append(len(self.ops))
        num_bytes = self._update_bytes(self.planned.units[unit], is_logged=verb == "draft")
        num_bytes += self._bytes_of_products(unit, self.speeds.host_tflops, self.speeds.update)
        priority = step * len(self.planned.units) + self._order[unit]
        self._add("update", "update", verb, unit, num_bytes, accesses, priority)
        if is_in_file:
            self._add_ops("step", self._files.put_back(unit))

    def _is_in_ring(self, unit: int) -> bool:
        """Returns True if the unit's gradients have a slot of the gradient ring until they are updated."""
        ring = self._ring
        return ring is not None and ring.num_slots > 0 and not ring.region.sizes[unit]

    @property
    def _loop(self) -> int:
        """The token of how far the user's loop has come."""
        return self._buffer("host:8", "update_slot", 0)

    def _buffer(self, place: str, purpose: str, unit: int) -> int:
        return self.planned.buffers.intern(place, unit, 1, purpose, unit)

    def _multiplied(self) -> list[int]:
        """Returns, by unit, the number of weights that every token is multiplied with, in each module that has them."""
        parts = self.planned.partition
        unit_of = {parameter: unit for unit, spec in enumerate(parts.units) for parameter in spec.parameters}
        counts = [0] * len(parts.units)
        for module in dict.fromkeys(module for root in parts.roots for module in root.modules()):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            for parameter in tensors_in(module.parameters(recurse=False)):
                counts[unit_of[parameter]] += parameter.numel()
        return counts

    def _by_visit(self, verb: str, us: list[float]) -> list[float]:
        """Returns, by unit, the time of one visit. All visits of one pass take `us[unit]`."""
        visits = Counter(op.unit for op in self.ops[self._first[-1] :] if op.verb == verb)
        return [self.num_simulated * time / max(visits[unit], 1) for unit, time in enumerate(us)]

    def _update_bytes(self, unit: HomeUnit, is_logged: bool) -> int:
        """Returns the bytes that the fused kernel reads and writes. It takes torch's update to be as large as AdamW."""
        count = sum(slot.parameter.numel() for slot in unit.parameters if slot.trainable)
        is_split = any(slot.has_master for slot in unit.parameters)
        rules = self.planned.fused.get(unit.index)
        fallback = 26 if is_split else 28
        state_dtype = self.planned.policy.state_dtype
        each = max(rule.bytes_per_element(is_split, state_dtype) for rule in rules) if rules else fallback
        return int(count * (each + is_logged))

    def _add(
        self,
        phase: str,
        lane: str,
        verb: str,
        unit: int,
        num_bytes: int,
        accesses: list[tuple[int, str]],
        priority: int = 0,
    ) -> None:
        """Adds an op. All versions start at 0 and are counted anew, because each pass was planned alone."""
        known = self._accesses
        made = [known.get(each) or known.setdefault(each, _C.Access(each[0], 0, each[1])) for each in accesses]
        self.ops.append(_C.Op(len(self.ops), lane, verb, unit, num_bytes, -1, made))
        self._made.append((lane, verb, unit, num_bytes, made))
        self.phases.append(phase)
        self._priorities.append(priority)

    def check(self) -> list[str]:
        """Returns what is wrong with the waits of the whole step, and of each pass with the planner's own versions.

        An empty list proves that all ops on the same data come in order.
        """
        buffers = self.planned.buffers
        faults: list[str] = _C.check(self.ops, self.waits, buffers)
        for name, each in self.planned.passes.items():
            faults += [f"{name}: {fault}" for fault in _C.check(each.ops, _C.derive(each.ops, buffers), buffers)]
        return faults

    def times(self) -> _C.StepTimes:
        """Returns the time of each kind of op if it were alone. `needs` has those of files besides."""
        return times_without_files(self.needs())

    def bounds(self) -> Bounds:
        """Returns the time that no schedule of a mode beats, by mode."""
        return bounds_of(self.needs())

    def needs(self) -> dict[str, float]:
        """Returns the time of each kind of op if it were alone, from which bounds are computed."""
        names = (
            "forward",
            "backward",
            "update",
            "forward_fetch",
            "backward_fetch",
            "drain",
            "forward_drain",
            "offload",
            "peer",
            "read",
            "write",
            "all_reads",
        )
        sums = dict.fromkeys([f"{name}_us" for name in names], 0.0)
        for span in self.spans:
            phase = self.phases[span.op]
            name = f"{phase}_fetch_us" if span.lane == "fetch" else f"{span.verb}_us"
            if span.verb == "drain_state":
                name = "forward_drain_us"
            if span.lane in ("peer", "read", "write"):
                name = f"{span.lane}_us"
            elif span.lane == "compute" and span.verb == "update":
                name = "forward_us"  # fetches of the next forward go on meanwhile
            taken_us = self._stands_for(span) * _C.duration_us(self.ops[span.op], self._costs)
            if name in sums and span.lane != "update":
                sums[name] += taken_us
            if span.lane in ("read", "read_weights"):  # from the same disks
                sums["all_reads_us"] += taken_us
        for unit in self._at_home:  # plain updates: no mode does less
            num_bytes = self._update_bytes(unit, is_logged=False)
            num_bytes += self._bytes_of_products(unit.index, self.speeds.host_tflops, self.speeds.update)
            sums["update_us"] += _C.duration_us(_C.Op(0, "update", "update", unit.index, num_bytes), self._costs)
        if host := self.speeds.host or (0.0 if self.measured is None else self.measured.host_gib_s):
            copied = self._bytes_per_copied
            for name, lanes, times in (("copies", ("fetch", "drain"), copied), ("updates", ("update",), 1)):
                moved = times * sum(
                    self._stands_for(span) * self._host_bytes(span) for span in self.spans if span.lane in lanes
                )
                sums[f"host_{name}_us"] = moved / (host * (1 << 30)) * 1e6
        return sums
