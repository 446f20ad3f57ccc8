"""Computes gradient norms if ranks share the model. Each rank then holds a shard of a gradient.

`p.grad` does not show the shard. torch's own clip asks for norms of whole gradients through operators. noria
intercepts these operators (csrc/bindings/listening.h). All ranks must ask for the same norms.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch

from noria.model.layout import HomeParameter
from noria.runtime.context import Context
from noria.runtime.rank_sync import RankSync
from noria.step.driver import StepDriver
from noria.torch_state import plainly

__all__ = ["ShardedNorms"]


class ShardedNorms:
    """Answers torch's norm operators for gradients that are sharded over ranks."""

    def __init__(self, context: Context, sync: RankSync, drivers: Sequence[StepDriver]) -> None:
        self.context = context
        self.sync = sync
        self.drivers = drivers

    def norms(
        self, indices: Sequence[int], of_list: bool, order: float, dtype: torch.dtype | None
    ) -> list[torch.Tensor | None]:
        """Returns one norm for each slot index; None means that the norm is not known. Collective.

        For parameters that noria's kernels update, the norm is summed in fp64 and rounded once. For parameters that
        torch updates, the whole gradient is gathered, and the norm has the bits of torch's operator. The infinity norm
        needs only the parts.
        """
        slots = [self.context.slots[index] for index in indices]
        if order < 0:
            return [None for _ in slots]
        fusing = {slot.index: each for each in self.drivers for slot in each.slots() if each.fuses(slot)}
        with plainly():
            # The largest magnitude of the parts is that of the whole, to the bit.
            by_torch = [] if math.isinf(order) else [slot for slot in slots if slot.index not in fusing]
            fused = [slot for slot in slots if slot.index in fusing or math.isinf(order)]
            if self.context.updates_in_backward:
                found = self._of_updates(fused, order)
            else:
                for index in indices:
                    self.multiply(index)
                found = self._of_parts(fused, fusing, order)
                found |= {slot.index: self._by_torch(slot, of_list, order, dtype) for slot in by_torch}
            return [self._on_device(slot, found[slot.index], dtype) if slot.index in found else None for slot in slots]

    def multiply(self, index: int) -> None:
        """Applies the late scales of a gradient to the shard that this rank holds, and drops them."""
        slot = self.context.slots[index]
        gradients = self.context.engine.gradients
        scales = gradients.scale_values(slot.index)
        if scales:
            gradients.access_held(slot.unit)
            gradients.drop_scales(slot.index)
            for scale in scales:
                self.context.home.held(slot).mul_(scale)

    def _of_parts(
        self, slots: list[HomeParameter], fusing: dict[int, StepDriver], order: float
    ) -> dict[int, torch.Tensor]:
        if not slots:
            return {}
        sums: dict[int, float] = {}
        if order == 2.0:
            by_unit: dict[int, list[HomeParameter]] = {}
            for slot in slots:
                by_unit.setdefault(slot.unit, []).append(slot)
            jobs = [(unit, fusing[members[0].index].sum_job(unit, members)) for unit, members in by_unit.items()]
            for members, found in zip(by_unit.values(), self.context.engine.gradients.sum_gradients(jobs), strict=True):
                sums.update((slot.index, each) for slot, each in zip(members, found, strict=True))
        else:
            for slot in slots:
                self.context.engine.gradients.access_held(slot.unit)
                sums[slot.index] = _power_sum(self.context.home.held(slot), order)
        return self._roots({slot.index: sums[slot.index] for slot in slots}, order)

    def _of_updates(self, slots: list[HomeParameter], order: float) -> dict[int, torch.Tensor]:
        """Returns norms from the sums that update="backward" took when it used the gradients."""
        if order != 2.0 or not slots:
            return {}
        backward = self.context.engine.backward
        slots = [slot for slot in slots if not backward.is_held_back(slot.index)]  # those not used yet have no sum
        found = backward.sums_in_backward(sorted({slot.unit for slot in slots}))
        sums: dict[int, float] = {}
        for slot in slots:
            place = (slot.unit, slot.gradient_offset)
            if not slot.shape.numel():
                sums[slot.index] = 0.0
            elif place in found:
                sums[slot.index] = found[place]
        return self._roots(sums, order)

    def _roots(self, sums: dict[int, float], order: float) -> dict[int, torch.Tensor]:
        totals = self.sync.combine(sums, "take norms of {}", larger if math.isinf(order) else operator.add)
        if order == 0 or math.isinf(order):
            return {index: torch.tensor(total, dtype=torch.float64, device="cpu") for index, total in totals.items()}
        return {
            index: torch.tensor(total, dtype=torch.float64, device="cpu").pow(1 / order)
            for index, total in totals.items()
        }

    def _by_torch(self, slot: HomeParameter, of_list: bool, order: float, dtype: torch.dtype | None) -> torch.Tensor:
        self.context.engine.gradients.access_held(slot.unit)
        whole = self.sync.whole(slot, self.context.home.held(slot), "the gradient")
        there = whole.to(self.context.device)
        if of_list:
            return torch._foreach_norm([there], order, dtype=dtype)[0]
        norm: torch.Tensor = torch.linalg.vector_norm(there, order, dtype=dtype)
        return norm

    def _on_device(self, slot: HomeParameter, norm: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return norm.to(device=self.context.device, dtype=dtype or slot.dtype)


def larger(a: float, b: float) -> float:
    """Returns the larger number, or NaN if one of the two is NaN."""
    return a if math.isnan(a) or a > b else b


def _power_sum(part: torch.Tensor, order: float) -> float:
    """Sums the powers in fp64, one piece at a time: an fp64 copy of the whole part may not fit.

    For the infinity norm it returns the largest magnitude.
    """
    if math.isinf(order):
        ends = [each.aminmax() for each in part.split(1 << 20) if each.numel()]
        return functools.reduce(larger, (abs(float(end)) for both in ends for end in both), 0.0)
    pieces = (each.double().abs() for each in part.split(1 << 20))
    if order == 0:
        return float(sum(int((each != 0).sum()) for each in pieces))
    return sum(float(each.pow(order).sum()) for each in pieces)
