"""Pipelines whose stages lend each other memory: what each stage is told, and what must then hold on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from typing import Any
from unittest import mock

import noria
import torch
import torch.distributed as dist
from noria import _C
from noria.forward.recompute import Recomputation
from noria.pipeline.schedules import name_of_schedule, orders
from noria.planning import wrap_plan
from noria.testing import assert_same_bits
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE
from tests.journeys.pairs import HOSTILE, Block, adamw, sgd
from tests.journeys.test_pipelines import STEPS, trained, unpipelined

LENGTH = 128
BUNDLE = 100_352  # what a block saves of a micro-batch of 2 x 128 x 16
BLOCKS = 3
CHOSEN = 6  # steps: in the last ones it is chosen what becomes of blocks, also where units were tried at other stages
WAYS = ("peers", "host", "recompute")


class Stage(nn.Module):
    """Its blocks save what it makes itself: no view of the whole batch."""

    def __init__(self, num_blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for block in self.blocks:
            x = block(x)
        return x


@dataclasses.dataclass(frozen=True)
class Case:
    schedule: str
    num_stages: int
    num_micro_batches: int
    activations: tuple[str, ...]
    """By rank; "auto 5" has room for what five blocks save of a micro-batch."""
    update: str = "auto"
    replicas: int = 1
    delays: tuple[tuple[str, Any], ...] = tuple(HOSTILE.items())
    lends: bool = False
    """At least one stage must."""
    steps: int = STEPS
    ways: tuple[str, ...] = ()
    """Chosen for the blocks, in turn; none: by what is measured."""

    def __str__(self) -> str:
        shape = f"{self.num_stages}x{self.replicas} m{self.num_micro_batches}"
        told = "/".join(self.activations)
        chosen = f"{self.steps} steps {'/'.join(self.ways) or 'measured'}"
        return f"{self.schedule} {shape} {told} {self.update} {chosen} seed {dict(self.delays)['seed']}"

    def room(self, stage: int) -> int | None:
        name, _, bundles = self.activations[stage].partition(" ")
        return int(bundles) * BUNDLE if name == "auto" else None

    def policy(self, stage: int) -> dict[str, Any]:
        policy: dict[str, Any] = {"activations": self.activations[stage].partition(" ")[0], "kernel": "torch"}
        if (room := self.room(stage)) is not None:
            policy["activation_memory"] = room
        if self.update == "drafts":
            return policy | {"kernel": "fused", "draft_memory": "64MiB"}
        return policy | {"update": self.update}

    def ways_of(self, blocks: list[Any]) -> list[str]:
        return list(itertools.islice(itertools.cycle(self.ways), len(blocks)))


def train_as_told(rank: int, size: int, case: Case) -> None:
    """To the bits of the whole model on one device, and each stage within its budget, at every step."""
    wrap_plan.LEAST_SAVED = 64
    stage, replica = rank // case.replicas, rank % case.replicas
    lent, faults = [0], []

    def check(step: int, models: list[nn.Module]) -> None:
        """Says nothing yet: the other ranks go on, and would wait."""
        for model in models:
            report = noria.report(model)
            lent[0] = sum(loan.bytes for loan in report.loans if loan.lender == stage)
            found = broken(case, stage, step, model, report)
            faults.extend(f"step {step}: {each}\n{report}" for each in found)

    made: dict[str, Any] = {"length": [LENGTH] * case.steps, "make_stage": Stage}
    made |= {"num_micro_batches": case.num_micro_batches, "replicas": case.replicas}
    make_optimizer = sgd if case.update == "drafts" else adamw
    with contextlib.ExitStack() as patches:
        if case.ways:
            patches.enter_context(mock.patch.object(_C, "choose_ways", lambda blocks, *_: case.ways_of(blocks)))
            patches.enter_context(mock.patch.object(Recomputation, "_look_again"))
        ours = trained(
            case.schedule, case.policy(stage), make_optimizer, hostility=dict(case.delays), after_step=check, **made
        )
    twin = unpipelined(case.schedule, make_optimizer, stage, case.num_stages, replica=replica, **made)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, lent[0])
    assert_same_bits(ours, twin)
    assert not faults, faults[0]
    if case.lends:
        assert sum(gathered) > 0


def broken(case: Case, stage: int, step: int, model: nn.Module, report: noria.Report) -> list[str]:
    """Promises of memory, to the byte."""
    wrapped, room, saved = wrapped_by(model), case.room(stage), report.saved
    assert wrapped is not None
    lent = sum(loan.bytes for loan in report.loans if loan.lender == stage)
    borrowed = sum(loan.for_saved for loan in report.loans if loan.borrower == stage)
    taken = {row.purpose: row.taken for row in report.ledger if row.place == report.device}
    arena = taken.get("lent to other stages", 0)
    holds = {
        "the ledger agrees with the plan": report.ledger_agrees,
        # A device has an arena back as a whole: it is taken until the last loan in it has ended.
        "what is lent is taken": arena == lent or (DEVICE == "cuda" and 0 < lent < arena),
        "all that is taken is in the ledger": wrapped.context.backend.allocated == sum(taken.values()),
        "the device has as much as planned": sum(taken.values()) <= wrapped.context.plan.device_bytes + arena,
        "no more lies at other stages than they lend": saved["most_at_peers"] <= borrowed,
        "who borrows uses it": not borrowed or step == 0 or saved["offloaded_to_peers"] > 0,
    }
    if room is not None:
        holds["blocks and loans have their room"] = saved["most_there"] + arena <= room
        holds["what has no room leaves"] = saved["most_saved"] <= room or saved["num_offloaded"] > 0
    if room is not None and case.ways and step == CHOSEN - 1:
        # A device's blocks are not timed: there none is chosen.
        names = [hook.name for hook in wrapped.context.partition.hooks if hook.is_block]
        again = [name for name, way in zip(names, case.ways_of(names), strict=True) if way == "recompute"]
        holds["who leaves computes again as chosen"] = report.recomputed == (
            again if saved["num_offloaded"] and DEVICE == "cpu" else []
        )
    return [promise for promise, is_kept in holds.items() if not is_kept]


def most_in_flight(schedule: str, num_ranks: int, num_micro_batches: int, of_rank: int) -> list[int]:
    """By rank, of all of its stages together."""
    found = []
    for order in orders(name_of_schedule(schedule.replace(" ", "")), num_ranks, num_micro_batches, of_rank):
        in_flight = itertools.accumulate(1 if action.is_forward else -1 for action in order)
        found.append(max(in_flight))
    return found


def drawn(seed: int, num_ranks: int, replicas: int) -> Case:
    draw = random.Random(seed)
    num = num_ranks // replicas
    schedule = draw.choice(("GPipe", "1F1B", "1F1B", "1F1B", "interleaved 1F1B", "interleaved 1F1B"))
    num_micro_batches = draw.choice((num, 2 * num, num + 1 + num % 2))
    of_rank = 2 if schedule == "interleaved 1F1B" else 1
    peaks = [BLOCKS * most for most in most_in_flight(schedule, num, num_micro_batches, of_rank)]
    # Of the average rank, or little more: who has less to save has some to spare.
    tight = [f"auto {max(sum(peaks) // num + draw.randint(0, 2), 2)}"] * num
    small = [f"auto {draw.randint(2, 4) * of_rank}" for _ in range(num)]
    roomy = ["auto 1000"] * num
    kinds = draw.choice(("tight", "tight", "tight", "unequal", "last roomy", "last roomy", "roomy", "mixed", "mixed"))
    each = {"tight": tight, "roomy": roomy, "last roomy": [*small[:-1], "auto 1000"]}.get(kinds)
    if kinds == "unequal":
        each = [f"auto {max(peak + draw.randint(-4, 8), 2)}" for peak in peaks]
    if each is None:
        each = [draw.choice((tight[0], small[0], "auto 1000", "offload", "recompute", "keep")) for _ in range(num)]
    delays: dict[str, Any] = {"seed": seed + 1, "max_delay_us": draw.choice((50, 300)), "poison": True}
    if draw.random() < 0.5:
        verb = draw.choice(("offload", "reload", "fetch", "drain", "update"))
        delays["hold_us"] = {verb: draw.choice((500, 3000))}
    update = draw.choice(("auto", "auto", "blocking", "drafts"))
    # Half of them until it is chosen what becomes of blocks; half of these by what is measured.
    steps = draw.choice((STEPS, CHOSEN))
    ways = tuple(draw.choice(WAYS) for _ in range(BLOCKS * of_rank)) if steps == CHOSEN and draw.random() < 0.5 else ()
    return Case(
        schedule,
        num,
        num_micro_batches,
        tuple(each),
        update,
        replicas,
        tuple(delays.items()),
        steps=steps,
        ways=ways,
    )
