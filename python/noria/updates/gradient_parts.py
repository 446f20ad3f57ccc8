"""What `p.grad` answers where ranks share the model: each rank has a part of the sum, and shows none of it.

torch's own clip asks for norms of whole gradients by its operators, which noria answers (csrc/bindings/listening.h).
All ranks ask alike.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from noria.home import HomeParameter
from noria.modes import plainly

if TYPE_CHECKING:
    from noria.custody import Wrapped
    from noria.updates.step import Updates

__all__ = ["GradientParts"]


class GradientParts:
    """Of one wrap call."""

    def __init__(self, wrapped: Wrapped) -> None:
        self._reference = weakref.ref(wrapped)  # the engine keeps this object

    @property
    def wrapped(self) -> Wrapped:
        wrapped = self._reference()
        assert wrapped is not None, "who asks for a norm has the model"
        return wrapped

    def norms(
        self, indices: Sequence[int], of_list: bool, order: float, dtype: torch.dtype | None
    ) -> list[torch.Tensor | None]:
        """By slot index; None: not known. Collective. What noria's kernels update has the exact norm, summed in fp64
        and rounded once; what torch updates has the bits of torch's operator, on the whole gradient, which is gathered
        for it."""
        slots = [self.wrapped.slots[index] for index in indices]
        if order < 0:
            return [None for _ in slots]
        fusing = {slot.index: each for each in self.wrapped.optimizers for slot in each.slots() if each.fuses(slot)}
        with plainly():
            by_torch = [slot for slot in slots if slot.index not in fusing]
            fused = [slot for slot in slots if slot.index in fusing]
            if self.wrapped.updates_in_backward:
                found = self._of_updates(fused, order)
            else:
                for index in indices:
                    self.multiply(index)
                found = self._of_parts(fused, fusing, order)
                found |= {slot.index: self._by_torch(slot, of_list, order, dtype) for slot in by_torch}
            return [self._on_device(slot, found[slot.index], dtype) if slot.index in found else None for slot in slots]

    def multiply(self, index: int) -> None:
        """What `p.grad` was multiplied by is in what this rank holds from now on."""
        slot = self.wrapped.slots[index]
        scales = self.wrapped.custody.scale_values(slot.index)
        if scales:
            self.wrapped.custody.access_held(slot.unit)
            self.wrapped.custody.drop_scales(slot.index)
            for scale in scales:
                self.wrapped.home.held(slot).mul_(scale)

    def _of_parts(
        self, slots: list[HomeParameter], fusing: dict[int, Updates], order: float
    ) -> dict[int, torch.Tensor]:
        if not slots:
            return {}
        sums: dict[int, float] = {}
        if order == 2.0:
            by_unit: dict[int, list[HomeParameter]] = {}
            for slot in slots:
                by_unit.setdefault(slot.unit, []).append(slot)
            jobs = [(unit, fusing[members[0].index].sum_job(unit, members)) for unit, members in by_unit.items()]
            for members, found in zip(by_unit.values(), self.wrapped.custody.sum_gradients(jobs), strict=True):
                sums.update((slot.index, each) for slot, each in zip(members, found, strict=True))
        else:
            for slot in slots:
                self.wrapped.custody.access_held(slot.unit)
                sums[slot.index] = _power_sum(self.wrapped.home.held(slot), order)
        return self._roots({slot.index: sums[slot.index] for slot in slots}, order)

    def _of_updates(self, slots: list[HomeParameter], order: float) -> dict[int, torch.Tensor]:
        """update="backward" has used the gradients up, and has summed their squares."""
        if order != 2.0 or not slots:
            return {}
        custody = self.wrapped.custody
        slots = [slot for slot in slots if not custody.is_held_back(slot.index)]  # not used up yet: no sum is theirs
        found = custody.sums_in_backward(sorted({slot.unit for slot in slots}))
        sums: dict[int, float] = {}
        for slot in slots:
            place = (slot.unit, slot.gradient_offset)
            if not slot.shape.numel():
                sums[slot.index] = 0.0
            elif place in found:
                sums[slot.index] = found[place]
        return self._roots(sums, order)

    def _roots(self, sums: dict[int, float], order: float) -> dict[int, torch.Tensor]:
        totals = self.wrapped.together.combine(sums, "take norms of {}", larger if math.isinf(order) else operator.add)
        if order == 0 or math.isinf(order):
            return {index: torch.tensor(total, dtype=torch.float64, device="cpu") for index, total in totals.items()}
        return {
            index: torch.tensor(total, dtype=torch.float64, device="cpu").pow(1 / order)
            for index, total in totals.items()
        }

    def _by_torch(self, slot: HomeParameter, of_list: bool, order: float, dtype: torch.dtype | None) -> torch.Tensor:
        self.wrapped.custody.access_held(slot.unit)
        whole = self.wrapped.together.whole(slot, self.wrapped.home.held(slot), "the gradient")
        there = whole.to(self.wrapped.device)
        if of_list:
            return torch._foreach_norm([there], order, dtype=dtype)[0]
        return torch.linalg.vector_norm(there, order, dtype=dtype)

    def _on_device(self, slot: HomeParameter, norm: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return norm.to(device=self.wrapped.device, dtype=dtype or slot.dtype)


def larger(a: float, b: float) -> float:
    """Not a number, if one of them is none."""
    return a if math.isnan(a) or a > b else b


def _power_sum(part: torch.Tensor, order: float) -> float:
    """In fp64, a stretch at a time: a copy in fp64 of all of it may not fit. Of the largest norm, the largest."""
    stretches = [each.double().abs() for each in part.split(1 << 20)]
    if math.isinf(order):
        return functools.reduce(larger, (float(each.max()) for each in stretches if each.numel()), 0.0)
    if order == 0:
        return float(sum(int((each != 0).sum()) for each in stretches))
    return sum(float(each.pow(order).sum()) for each in stretches)
