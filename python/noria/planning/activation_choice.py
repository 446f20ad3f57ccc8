"""Decides which blocks compute their forward again in backward, and how much of the device is for what blocks save.

A block that computes again takes one forward more. What other blocks save and has no room goes home and comes back,
over links that units need too. Room for it is missing in the window, and for units that stay.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from noria.planning.budgets import first_room
from noria.planning.local_search import FEW, PARTS, Tried, climb, pays
from noria.planning.measured_costs import MeasuredCosts
from noria.planning.saved_simulation import MOST_WORKING
from noria.planning.spread import spread_evenly
from noria.planning.step_simulation import saved_by_blocks
from noria.planning.wrap_plan import WrapPlan, with_stays

__all__ = ["activation_choices", "beside_stays", "beside_torch", "kept_by_autograd", "with_first_room"]

_TORCHS = 1.25
"""So many times what torch was seen to take is left to it."""
_Choice = tuple[frozenset[int], int | None]  # who computes again, and the room on the device for what others save


def beside_torch(planned: WrapPlan, costs: MeasuredCosts) -> WrapPlan:
    """Returns the plan with a budget that leaves torch what it was seen to take, and a quarter more.

    noria keeps its half of the device at most, and what it takes if all units stream at least. If activations are the
    planner's choice, it has what they leave, which may be too little.
    """
    budgets = planned.budgets
    if budgets.device is None or not _is_shared_with_torch(planned):
        return planned
    most = budgets.device - int(_TORCHS * (costs.workspace + kept_by_autograd(planned, costs)))
    if not planned.chooses_activations or not costs.inputs:
        most = min(max(most, planned.device_bytes), budgets.device // budgets.shares)
    return dataclasses.replace(planned, budgets=dataclasses.replace(budgets, device=budgets.shares * max(most, 0)))


def _is_shared_with_torch(planned: WrapPlan) -> bool:
    """Returns True if the device's memory is torch's too, and noria may give it more or less of that.

    Ranks that share the model keep what they were given: all must take the same.
    """
    return planned.device.type == "cuda" and all(unit.num_shards == 1 for unit in planned.units)


def kept_by_autograd(planned: WrapPlan, costs: MeasuredCosts) -> int:
    """Returns the most bytes on the device that autograd keeps, as the plan has it."""
    if not costs.saved or not planned.budgets.moves_activations:
        return sum(costs.saved)
    again = planned.recomputed or frozenset()
    outside = sum(size for unit, size in enumerate(costs.saved) if unit not in planned.block_units)
    one_block = max((costs.saved[unit] for unit in again), default=0)
    saved = saved_by_blocks(planned, costs).values()
    room = MOST_WORKING * max(saved, default=0) if planned.saved_room is None else planned.saved_room
    return outside + one_block + min(sum(saved), room)


def with_first_room(planned: WrapPlan) -> WrapPlan:
    """Returns the plan with as much of the device for activations as the policy alone says."""
    budgets = planned.budgets
    room = first_room(planned.policy, budgets.device, budgets.shares)
    return dataclasses.replace(planned, budgets=dataclasses.replace(budgets, activations=room))


def activation_choices(planned: WrapPlan, costs: MeasuredCosts, step_us: Callable[[WrapPlan], float]) -> list[WrapPlan]:
    """Returns plans to go on with: that of the shortest step while no unit stays, and that in which blocks save least.

    The second one has the most room for units that stay. Each has a budget for noria alone.
    """
    if not planned.chooses_activations or not costs.inputs:
        return [beside_torch(planned, costs)]
    search = _Search(planned, costs, step_us)
    best, found = search.best(), search.tried.plans
    plans = [found[each] for each in dict.fromkeys((best, search.least)) if each in found]
    if plans:
        return plans
    kept = beside_torch(dataclasses.replace(planned, chooses_activations=False), costs)
    return [dataclasses.replace(kept, chooses_activations=True)]


def beside_stays(
    planned: WrapPlan, chosen: WrapPlan, costs: MeasuredCosts, step_us: Callable[[WrapPlan], float]
) -> WrapPlan:
    """Returns the chosen plan, in which units stay, with other blocks that compute again if that makes steps shorter.

    `planned` has the budgets for noria and torch. Of many blocks none is looked at.
    """
    if not chosen.chooses_activations or chosen.recomputed is None:
        return chosen
    may = _bytes_freed(chosen, costs)
    if not chosen.stays or len(may) > FEW:
        return chosen
    now, every = chosen.recomputed, frozenset(may)

    def plan(again: frozenset[int]) -> WrapPlan:
        budgets = dataclasses.replace(planned.budgets, activations=chosen.saved_room)
        candidate = dataclasses.replace(chosen, recomputed=again, budgets=budgets)
        return with_stays(beside_torch(candidate, costs), chosen.stays)

    tried = Tried(plan, step_us)
    tried.add(now, chosen)
    best = min((climb(begin, every, tried) for begin in (now, frozenset(), every)), key=tried)
    return tried.plans[best] if pays(tried(best), tried(now), is_more=len(best) > len(now)) else chosen


def _bytes_freed(planned: WrapPlan, costs: MeasuredCosts) -> dict[int, int]:
    """Returns the bytes that it frees if a block computes again, by its unit. Others must not, or gain nothing."""
    saved = saved_by_blocks(dataclasses.replace(planned, recomputed=frozenset()), costs)
    return {unit: size - costs.inputs[unit] for unit, size in saved.items() if 0 <= costs.inputs[unit] < size}


class _Search:
    """Simulates choices while no unit stays, and remembers them."""

    def __init__(self, planned: WrapPlan, costs: MeasuredCosts, step_us: Callable[[WrapPlan], float]) -> None:
        self._planned = dataclasses.replace(planned, recomputed=frozenset())
        self._costs = costs
        saved = saved_by_blocks(self._planned, costs)
        self._saves = _bytes_freed(planned, costs)
        # A room for two blocks is the least. A quarter more has room for somewhat larger inputs.
        least, every = int(2 * _TORCHS * max(saved.values(), default=0)), sum(saved.values())
        chooses_room = planned.policy.activation_memory == "auto" and _is_shared_with_torch(planned)
        self._rooms = (
            [least + max(every - least, 0) * part // PARTS for part in range(PARTS + 1)]
            if chooses_room
            else [planned.saved_room]
        )
        self.least: _Choice = (frozenset(self._saves), self._rooms[0])
        self.tried = Tried(self._plan, step_us)

    def best(self) -> _Choice:
        """Returns the choice of the shortest step. Of those that are about as short, who computes less again is it."""
        for room in self._rooms:
            self.tried((frozenset(), room))
        rooms = dict.fromkeys((self._best()[1], self._rooms[0]))
        some = self._some()
        half_and_all = some[len(some) // 2 - 1 :: max(len(some) // 2, 1)]
        for sets in (half_and_all, some):
            for again, room in itertools.product(sets, rooms):
                self.tried((again, room))
            if len(self._saves) > FEW and not self._best()[0]:
                break
        if len(self._saves) <= FEW:
            again, room = self._best()
            climb(again, frozenset(self._saves), lambda each: self.tried((each, room)))
        return self._best()

    def _best(self) -> _Choice:
        times = self.tried.times
        best = min(times, key=lambda each: len(each[0]))
        for each in sorted(times, key=lambda each: (len(each[0]), times[each])):
            if pays(times[each], times[best], is_more=len(each[0]) > len(best[0])):
                best = each
        return best

    def _some(self) -> list[frozenset[int]]:
        """Returns sets of blocks: spread evenly, and those that free the most for their time."""
        every, us = sum(self._saves.values()), self._costs.forward_us
        by_price = sorted(self._saves, key=lambda unit: us[unit] / self._saves[unit])
        parts = len(by_price) if len(by_price) <= FEW else PARTS
        found = []
        for part in range(1, parts + 1):
            found.append(frozenset(spread_evenly(self._saves, every * part // parts)))
            found.append(frozenset(by_price[: len(by_price) * part // parts]))
        return found

    def _plan(self, choice: _Choice) -> WrapPlan:
        again, room = choice
        budgets = dataclasses.replace(self._planned.budgets, activations=room)
        candidate = dataclasses.replace(self._planned, recomputed=again, budgets=budgets)
        return with_stays(beside_torch(candidate, self._costs), candidate.stays)
