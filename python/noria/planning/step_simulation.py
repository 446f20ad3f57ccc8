"""Simulates one step of a plan in virtual time, at given speeds."""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch import nn

from noria import _C
from noria.model.layout import HomeUnit
from noria.planning.wrap_plan import WrapPlan

__all__ = ["PlanSpeeds", "PlannedStep"]


@dataclasses.dataclass(frozen=True)
class PlanSpeeds:
    """Holds GiB/s of the lanes and Tflop/s of the device. `measured`: the names of those that were measured now."""

    fetch: float
    drain: float
    update: float
    tflops: float
    measured: tuple[str, ...]


class PlannedStep:
    """Simulates a step in a steady state: the updates of the step before, then forward and backward as planned.

    Compute is taken as two flops per weight and token in forward, and twice that in backward. Embeddings take none.
    This is right for models made of matrix products, and too little for attention over long sequences.
    """

    def __init__(self, planned: WrapPlan, tokens: int, speeds: PlanSpeeds) -> None:
        self.planned, self.speeds, self.tokens = planned, speeds, tokens
        self.ops: list[_C.Op] = []
        self.phases: list[str] = []
        buffers = planned.buffers
        trains = bool(planned.kernels)
        for unit in self._forward_order():
            if trains and unit.gradients:
                accesses = [
                    (buffers.intern("host:1", unit.index, 1, "held_gradient", unit.index), "read"),
                    (buffers.intern("host:2", unit.index, 1, "optimizer_state", unit.index), "write"),
                    (buffers.intern("host:0", unit.index, 1, "working_copy", unit.index), "write"),
                ]
                self._add("update", "update", "update", unit.index, self._update_bytes(unit), accesses)
        for phase, each in planned.passes.items():
            for op in each.ops:
                accesses = [(access.buffer, access.mode) for access in op.accesses]
                self._add(phase, op.lane, op.verb, op.unit, op.bytes, accesses)
        self.waits = _C.derive(self.ops, buffers)
        rates = {"fetch": speeds.fetch, "drain": speeds.drain, "update": speeds.update}
        forward_us = [2 * tokens * count / speeds.tflops / 1e6 for count in self._multiplied()]
        backward_us = [2 * us for us in forward_us]
        costs = _C.Costs(rates, {}, self._by_visit("forward", forward_us), self._by_visit("backward", backward_us))
        self.spans = _C.simulate(self.ops, self.waits, costs)

    def _multiplied(self) -> list[int]:
        """Returns, by unit, the number of weights that every token is multiplied with."""
        return [
            0 if isinstance(spec.module, nn.Embedding | nn.EmbeddingBag) else sum(p.numel() for p in spec.parameters)
            for spec in self.planned.partition.units
        ]

    def _by_visit(self, verb: str, us: list[float]) -> list[float]:
        """Returns, by unit, the time of one visit.

        Each module that uses the unit needs `us[unit]` in a pass. It may be visited several times, for a part of that.
        """
        visits = Counter(op.unit for op in self.ops if op.verb == verb)
        users = Counter(unit for hook in self.planned.partition.hooks for unit in hook.needs)
        return [time * users[unit] / max(visits[unit], 1) for unit, time in enumerate(us)]

    def _forward_order(self) -> list[HomeUnit]:
        order = dict.fromkeys(unit for visit in self.planned.visits["forward"] for unit in visit.needs)
        order |= dict.fromkeys(range(len(self.planned.units)))
        return [self.planned.units[index] for index in order]

    def _update_bytes(self, unit: HomeUnit) -> int:
        """Returns the bytes that the fused kernel reads and writes. It takes torch's update to be as large as AdamW."""
        count = sum(slot.parameter.numel() for slot in unit.parameters if slot.trainable)
        is_split = any(slot.has_master for slot in unit.parameters)
        rules = self.planned.fused.get(unit.index)
        fallback = 26 if is_split else 28
        state_dtype = self.planned.policy.state_dtype
        each = max(rule.bytes_per_element(is_split, state_dtype) for rule in rules) if rules else fallback
        return int(count * each)

    def _add(
        self, phase: str, lane: str, verb: str, unit: int, num_bytes: int, accesses: list[tuple[int, str]]
    ) -> None:
        """Adds an op. All versions start at 0 and are counted anew, because each pass was planned alone."""
        made = [_C.Access(buffer, 0, mode) for buffer, mode in accesses]
        self.ops.append(_C.Op(len(self.ops), lane, verb, unit, num_bytes, -1, made))
        self.phases.append(phase)

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
        """Returns the time of each kind of op, from which bounds are computed."""
        names = ("forward", "backward", "update", "forward_fetch", "backward_fetch", "drain", "offload", "peer")
        sums = dict.fromkeys([f"{name}_us" for name in names], 0.0)
        for span in self.spans:
            phase = self.phases[span.op]
            name = f"{phase}_fetch_us" if span.verb in ("fetch", "reload") else f"{span.verb}_us"
            if span.lane == "peer":
                name = "peer_us"
            if name in sums:
                sums[name] += span.end_us - span.start_us
        # Updates run at the pace of the host's memory, and copies use that memory too. If it is the device's memory as
        # well, each copy is both read and written there, so it counts twice.
        times = 2 if self.planned.device.type == "cpu" else 1
        copied = sum(span.bytes for span in self.spans if span.lane in ("fetch", "drain"))
        sums["host_copies_us"] = times * copied / (self.speeds.update * (1 << 30)) * 1e6
        sums["host_updates_us"] = sums["update_us"]
        return _C.StepTimes(**sums)
