"""Decides what stays on the device, and what is drafted: the plan whose simulated step is the shortest.

A unit that stays costs the link and the host's memory nothing, and is updated on the device. But what it takes there is
no window: a small window keeps fewer weights from the forward to the backward, so more is fetched.

A draft hides an update behind the backward. But it takes longer than an update, so where the host is the wall fewer
drafts can be better.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

from noria._errors import UsageError
from noria.model.layout import UNDO_LOGS, Region
from noria.planning.activation_choice import activation_choices, beside_stays, with_first_room
from noria.planning.local_search import FEW, PARTS, Tried, climb, is_about_as_fast, pays
from noria.planning.measured_costs import MeasuredCosts
from noria.planning.resident import all_fit, gradient_bytes
from noria.planning.saved_simulation import home_of_saved
from noria.planning.spread import spread_evenly
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.planning.wrap_plan import WrapPlan, forward_order, staging_bytes, with_stays, with_streamed

__all__ = [
    "as_costs_choose",
    "choose_again",
    "choose_by_costs",
    "room_for_stays",
    "with_best_drafts",
    "with_best_places",
    "with_best_stays",
    "without_choices",
    "without_idle_logs",
]

_PAYS = 0.05
"""By this part a step must be faster for a plan that runs to be given up."""


def room_for_stays(planned: WrapPlan) -> int:
    """Returns the bytes on the device that units may take if they stay, beside their gradients and the smallest window.

    It takes the units to have gradients as large as all of them have on average.
    """
    every = sum(planned.may_stay.values())
    if planned.budgets.device is None or all_fit(planned.units, planned.may_stay, planned.budgets):
        return every
    with_gradients = every + gradient_bytes(planned.units, planned.may_stay)
    left = max(planned.budgets.device // planned.budgets.shares - planned.least_device, 0)
    return min(left * every // max(with_gradients, 1), every)


def with_best_stays(planned: WrapPlan, step_us: Callable[[WrapPlan], float]) -> WrapPlan:
    """Returns the plan with the units that stay by which a step is the shortest. `step_us` simulates it.

    Units that stay are spread evenly over the model, or they are its first ones. Even units leave the others time to be
    fetched. The first units are needed first, when nothing has hidden their updates yet. Of a few units, each is then
    tried by itself, and in the place of each other one.

    If all fit, all stay, unless that is slower. Hooks then do nothing either, which the simulation does not know.
    """
    search = _Search(planned, step_us)
    room = room_for_stays(planned)
    amounts = [room * part // PARTS for part in range(PARTS + 1)]
    needs = {unit: planned.may_stay[unit] for unit in forward_order(planned) if unit in planned.may_stay}
    for choose in (spread_evenly, _first_that_fit):
        found = {amount: frozenset(choose(needs, amount)) for amount in amounts}
        best = min(amounts, key=lambda amount: search.look(found[amount]))
        for beside in (best - room // (2 * PARTS), best + room // (2 * PARTS)):
            if 0 <= beside <= room:
                search.look(frozenset(choose(needs, beside)))
        if len(needs) <= FEW:
            search.try_each(found[best])
    if len(needs) <= FEW:
        search.try_each(frozenset())
    if search.all_fit:
        search.prefer(frozenset(needs))
    return search.best


def with_best_places(planned: WrapPlan, step_us: Callable[[WrapPlan], float]) -> WrapPlan:
    """Returns the plan with the units that stay, and those that the device updates beside them, of the shortest step.

    It begins with no updates on the device beside those that stay, then adds some, spread evenly. It also begins with
    all of them there: pieces need memory too, which units that stay would take.
    """
    best = with_best_stays(planned, step_us)
    if planned.streamed or not planned.may_stay:
        return best
    best_us = step_us(best)
    if len(planned.units) > FEW and not _may_gain(planned, best, best_us, step_us):
        return best
    for begin in (best, _all_streamed(planned, step_us)):
        if begin is not None and not begin.stands_still:
            found, us = _with_best_streamed(planned, begin, step_us)
            if pays(us, best_us, is_more=len(found.streamed) > len(best.streamed)):
                best, best_us = found, us
    return best


def _may_gain(planned: WrapPlan, best: WrapPlan, best_us: float, step_us: Callable[[WrapPlan], float]) -> bool:
    """Returns True if one of two plans with updates on the device, beside those that stay, makes steps shorter."""
    others = [unit for unit in sorted(planned.may_stay) if unit not in best.stays]
    for begin, units in ((best, others[::PARTS]), (planned, list(planned.may_stay))):
        with contextlib.suppress(UsageError):  # no room for the pieces
            if step_us(with_streamed(begin, units)) < best_us:
                return True
    return False


def _all_streamed(planned: WrapPlan, step_us: Callable[[WrapPlan], float]) -> WrapPlan | None:
    """Returns the plan in which the device updates all that it can, and the best of these units stay."""
    try:
        return with_best_stays(with_streamed(planned, planned.may_stay), step_us)
    except UsageError:  # no room for the pieces
        return None


def _with_best_streamed(
    planned: WrapPlan, begin: WrapPlan, step_us: Callable[[WrapPlan], float]
) -> tuple[WrapPlan, float]:
    """Returns the plan with other units that the device updates beside those that stay, and the time of its step.

    `planned` knows the drafts of units that `begin` updates on the device.
    """
    same_stays = dataclasses.replace(planned, stays=begin.stays)
    may = {
        unit: begin.units[unit].gradients
        for unit in forward_order(begin)
        if unit in begin.may_stay and unit not in begin.stays and begin.units[unit].gradients
    }
    tried: Tried[frozenset[int]] = Tried(lambda chosen: with_streamed(same_stays, chosen), step_us)
    tried.add(frozenset(begin.streamed), begin)
    every = sum(may.values())
    for part in range(PARTS + 1):
        tried(frozenset(spread_evenly(may, every * part // PARTS)))
    if len(may) <= FEW:
        climb(tried.best(), frozenset(may), tried)
    best = tried.best()
    return tried.plans[best], tried.times[best]


class _Search:
    """Simulates plans, and remembers the best one."""

    def __init__(self, planned: WrapPlan, step_us: Callable[[WrapPlan], float]) -> None:
        self._planned = planned
        self.all_fit = all_fit(planned.units, planned.may_stay, planned.budgets)
        self.best = with_stays(planned, frozenset())
        self._tried: Tried[frozenset[int]] = Tried(lambda stays: with_stays(planned, stays), step_us)
        self._best_us = self._tried.add(frozenset(), self.best)

    def look(self, stays: frozenset[int]) -> float:
        """Returns the time of a step if these units stay; infinity if the device has no room for them."""
        if len(stays) == len(self._planned.units) and not self.all_fit:
            return math.inf
        is_new = stays not in self._tried.times
        us = self._tried(stays)
        if is_new and pays(us, self._best_us, is_more=self._bytes(stays) > self._bytes(self.best.stays)):
            self.best, self._best_us = self._tried.plans[stays], us
        return us

    def prefer(self, stays: frozenset[int]) -> None:
        """Takes these units if that makes the step hardly slower."""
        if is_about_as_fast(self.look(stays), self._best_us):
            self.best = self._tried.plans[stays]

    def _bytes(self, stays: frozenset[int]) -> int:
        return sum(self._planned.may_stay[unit] for unit in stays)

    def try_each(self, now: frozenset[int]) -> None:
        climb(now, frozenset(self._planned.may_stay), self.look)


def _first_that_fit(needs: dict[int, int], budget: int) -> list[int]:
    chosen = []
    for unit, need in needs.items():
        if need <= budget:
            chosen.append(unit)
            budget -= need
    return chosen


def with_best_drafts(planned: WrapPlan, step_us: Callable[[WrapPlan], float]) -> WrapPlan:
    """Returns the plan with those of its drafts that make the step the shortest. All of them, unless fewer gain 1 %."""
    drafted = [unit for unit in forward_order(planned) if unit in planned.drafted]
    if not drafted:
        return planned
    needs = {unit: planned.draftable[unit] for unit in drafted}
    tried: Tried[frozenset[int]] = Tried(lambda chosen: dataclasses.replace(planned, drafted=chosen), step_us)
    all_us = tried(planned.drafted)

    def look_at_part(part: int) -> None:
        number = len(drafted) * part // PARTS
        even = spread_evenly(needs, sum(needs.values()) * part // PARTS)
        for chosen in (even, drafted[:number], drafted[len(drafted) - number :]):
            tried(frozenset(chosen))

    tried(frozenset())
    look_at_part(PARTS // 2)
    if tried(tried.best()) < all_us or len(drafted) <= FEW:
        for part in range(1, PARTS):
            look_at_part(part)
        if len(drafted) <= FEW:
            climb(tried.best(), planned.drafted, tried)
    best = tried.best()
    return tried.plans[best] if pays(tried(best), all_us, is_more=True) else planned


def without_idle_logs(planned: WrapPlan) -> WrapPlan:
    """Returns the plan without undo logs of units that are not drafted."""

    def lean(region: Region) -> Region:
        if region.purpose != UNDO_LOGS:
            return region
        return Region.of(UNDO_LOGS, [size if unit in planned.drafted else 0 for unit, size in enumerate(region.sizes)])

    return dataclasses.replace(planned, regions=[lean(region) for region in planned.regions])


def as_costs_choose(planned: WrapPlan, costs: MeasuredCosts | None) -> WrapPlan:
    """Returns the plan with which a run begins: by the costs of an earlier run, if there are any."""
    return planned if costs is None else without_idle_logs(choose_by_costs(planned, costs))


def choose_by_costs(planned: WrapPlan, costs: MeasuredCosts) -> WrapPlan:
    """Returns the plan with the best activations (`activations="auto"`), places (`resident="auto"`) and drafts.

    Nothing stays if updates on the device were not measured. All is drafted if drafts were not.
    """

    def step_us(each: WrapPlan) -> float:
        return _step_us(each, costs)

    budgets, chooses = planned.budgets, planned.policy.resident == "auto" and costs.device_update_gib_s
    plans = activation_choices(planned, costs, step_us) if chooses or planned.chooses_activations else [planned]
    plans = [with_best_places(each, step_us) for each in plans] if chooses else plans[:1]
    best = plans[0]
    for other in plans[1:]:
        if pays(step_us(other), step_us(best), is_more=True):
            best = other
    best = beside_stays(planned, best, costs, step_us)
    planned = dataclasses.replace(best, budgets=dataclasses.replace(budgets, activations=best.budgets.activations))
    return with_best_drafts(planned, step_us) if costs.draft_gib_s else planned


def choose_again(planned: WrapPlan, costs: MeasuredCosts) -> WrapPlan | None:
    """Returns what to do in the place of a plan that runs; None if that may go on.

    It goes on if no other choice makes steps shorter by 5 %, or if all of the model stays.
    """
    if planned.stands_still:
        return None
    plain = without_choices(planned)
    has_chosen = _choice_of(plain) != _choice_of(planned) or bool(planned.recomputed)
    chosen = choose_by_costs(plain, costs)
    if _choice_of(chosen) == _choice_of(planned):
        return None
    if has_chosen and _step_us(chosen, costs) > (1 - _PAYS) * _step_us(planned, costs):
        return None
    return chosen


def _step_us(planned: WrapPlan, costs: MeasuredCosts) -> float:
    """Returns the time of a step; infinity if what blocks save does not fit into host memory."""
    simulated = PlannedStep(planned, 0, PlanSpeeds(0, 0, 0, 0), costs)
    at_home = home_of_saved(simulated.saved.most_at_home)
    needed, host = planned.home_bytes + staging_bytes(planned.device) + at_home, planned.budgets.host
    return simulated.step_us if host is None or needed <= host else math.inf


def _choice_of(planned: WrapPlan) -> tuple[object, ...]:
    return planned.stays, frozenset(planned.streamed), planned.drafted, planned.recomputed, planned.saved_room


def without_choices(planned: WrapPlan) -> WrapPlan:
    """Returns the plan in which the policy alone says which units stay, and where updates run.

    Units that have an undo log are drafted again.
    """
    planned, logs = with_first_room(planned), planned.undo_logs
    if planned.policy.resident != "auto":
        on_device = planned.stays | planned.streamed.keys()
        plain = dataclasses.replace(planned, drafted=frozenset(logs.keys() - on_device))
        return with_stays(plain, plain.stays) if planned.chooses_activations else plain
    drafts: dict[str, Any] = {"drafted": frozenset(logs), "draftable": planned.draftable | logs}
    plain = with_stays(dataclasses.replace(planned, streamed={}, **drafts), frozenset())
    if planned.policy.optimizer_device == "host":
        return plain
    return with_streamed(plain, planned.streamed.keys() | planned.stays)
