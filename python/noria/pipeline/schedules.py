"""Computes the order of forwards and backwards on each rank for the schedules of torch.distributed.pipelining.

torch gives its own order only to running ranks, so this file implements it again. The test
tests/python/test_schedules.py compares the two. Each rank first runs some forwards, then a forward and a backward in
turn, then the backwards that are left.
"""

from __future__ import annotations

from typing import NamedTuple

from noria._errors import usage_error

__all__ = [
    "SCHEDULES",
    "SPLIT_BACKWARDS",
    "Action",
    "Timed",
    "name_of_schedule",
    "num_virtual_stages",
    "orders",
    "timed",
]

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b")
SPLIT_BACKWARDS = ("zero-bubble", "interleaved-zero-bubble", "zbv-zero-bubble", "dualpipev")
"""Schedules that noria refuses. They run backwards of inputs alone, which do not pass through the nodes where noria
catches gradients."""


class Action(NamedTuple):
    """Names one forward or backward. `stage` counts in the whole pipeline: `rank` has rank, num_ranks + rank, ..."""

    is_forward: bool
    stage: int
    micro_batch: int


class Timed(NamedTuple):
    """Says when an action begins and ends, in units of one forward's time."""

    action: Action
    begin: int
    end: int


def name_of_schedule(text: str) -> str:
    """Returns the name in SCHEDULES for `text`, which may be torch's name, such as "Interleaved1F1B".

    Raises UsageError if the schedule is not supported.
    """
    plain = _plain(text)
    for name in SCHEDULES:
        if _plain(name) == plain:
            return name
    found = f"{text!r}"
    if plain in map(_plain, SPLIT_BACKWARDS):
        found += ", whose backwards of inputs and of weights are apart"
    raise usage_error(f"a schedule whose backwards are whole: {', '.join(SCHEDULES)}", found, "choose one of these")


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def num_virtual_stages(schedule: str, asked: int | None) -> int:
    """Returns the stages of each rank. Raises UsageError if the schedule cannot have `asked` stages."""
    if schedule == "interleaved-1f1b":
        if asked is not None and asked < 1:
            raise usage_error("1 or more stages of each rank", f"{asked}", "raise it")
        return 2 if asked is None else asked
    if asked not in (None, 1):
        raise usage_error(f"one stage of each rank under {schedule}", f"{asked}", "choose interleaved-1f1b")
    return 1


def orders(schedule: str, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> list[list[Action]]:
    """Returns the actions of each rank, in order. Raises UsageError if torch's own schedule would refuse."""
    num_rounds = max(1, num_micro_batches // num_ranks)
    if schedule == "1f1b" and num_micro_batches < num_ranks:
        raise usage_error(
            f"{num_ranks} micro-batches or more under 1f1b, as many as stages", f"{num_micro_batches}", "raise it"
        )
    if schedule == "interleaved-1f1b" and num_micro_batches % num_rounds:
        raise usage_error(
            f"micro-batches that {num_rounds} rounds of {num_ranks} ranks or more share equally",
            f"{num_micro_batches}",
            f"choose {num_micro_batches // num_ranks * num_ranks}",
        )
    in_round = num_micro_batches // num_rounds
    num_each = num_micro_batches * virtual_stages
    found = []
    for rank in range(num_ranks):
        behind = num_ranks - 1 - rank
        num_first = {
            "gpipe": num_each,
            "1f1b": behind,
            "interleaved-1f1b": (virtual_stages - 1) * in_round + 2 * behind,
        }[schedule]
        stages = [rank + num_ranks * nth for nth in range(virtual_stages)]
        forwards = _in_rounds(True, stages, num_each, in_round)
        backwards = _in_rounds(False, stages[::-1], num_each, in_round)
        own = forwards[:num_first]
        for forward, backward in zip(forwards[num_first:], backwards, strict=False):
            own += [forward, backward]
        found.append(own + backwards[max(num_each - num_first, 0) :])
    return found


def _in_rounds(is_forward: bool, stages: list[int], num_each: int, in_round: int) -> list[Action]:
    """Returns one round of micro-batches through each stage in turn, then the next round."""
    num_made = dict.fromkeys(stages, 0)
    found = []
    for nth in range(num_each):
        stage = stages[nth // in_round % len(stages)]
        found.append(Action(is_forward, stage, num_made[stage]))
        num_made[stage] += 1
    return found


def timed(orders: list[list[Action]]) -> list[list[Timed]]:
    """Returns when each action begins and ends. A forward takes one unit of time, a backward two, a transfer none."""
    last = max(action.stage for order in orders for action in order)
    ends: dict[Action, int] = {}
    found: list[list[Timed]] = [[] for _ in orders]
    num_left = sum(map(len, orders))
    while num_left:
        before = num_left
        for order, own in zip(orders, found, strict=True):
            while len(own) < len(order):
                action = order[len(own)]
                needed = _needed(action, last)
                if needed is not None and needed not in ends:
                    break
                begin = max(own[-1].end if own else 0, ends[needed] if needed is not None else 0)
                ends[action] = begin + (1 if action.is_forward else 2)
                own.append(Timed(action, begin, ends[action]))
                num_left -= 1
        assert num_left < before, "an order in which ranks wait for each other in a circle"
    return found


def _needed(action: Action, last: int) -> Action | None:
    if action.is_forward:
        return action._replace(stage=action.stage - 1) if action.stage > 0 else None
    return action._replace(stage=action.stage + 1) if action.stage < last else action._replace(is_forward=True)
