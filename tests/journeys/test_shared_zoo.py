"""Models of transformers, whole, half frozen and with adapters, shared by ranks: a whole training loop with the bits of
DistributedDataParallel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits, on_machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.device import DEVICE
from tests.journeys.models import ZOO, adapt, batch_for, build, freeze_half
from tests.journeys.pairs import HOSTILE, LATE_UPDATES, state_tensors
from tests.ranks import in_turn_on_ranks

STEPS, MICRO_BATCHES, MAX_NORM = 3, 2, 0.005
POLICIES: dict[str, dict[str, Any]] = {
    "a window": {"window": 2},
    "drafts": {"window": 2, "draft_memory": "64MiB"},
    "blocking": {"window": 2, "update": "blocking"},
}
PARTS = ("whole", "half frozen", "adapters")


def made(name: str, part: str, seed: int) -> nn.Module:
    model = build(name, seed=seed)
    if part == "half frozen":
        freeze_half(model)
    return adapt(model, name, seed) if part == "adapters" else model


def trained_like_ddp(rank: int, size: int, name: str, part: str, policy: str, hostility: dict[str, Any]) -> None:
    """Two micro-batches a step, the first in no_sync(); clipped to a norm that bites; a schedule; after each step an
    eval pass and a generation, which all ranks take part in."""
    species = ZOO[name]
    plain, model = made(name, part, 0), made(name, part, rank)  # rank 0's values are everybody's
    ddp = DistributedDataParallel(plain, find_unused_parameters=name == "moe")
    optimizers, schedules = [], []
    for each in (plain, model):
        trainable = [parameter for parameter in each.parameters() if parameter.requires_grad]
        optimizers.append(torch.optim.SGD(trainable, lr=0.1, momentum=0.9, weight_decay=0.01))
        schedules.append(torch.optim.lr_scheduler.OneCycleLR(optimizers[-1], max_lr=0.5, total_steps=STEPS + 1))
    theirs, ours = optimizers
    with on_machine(hostility=hostility):
        noria.wrap(model, ours, device=DEVICE, max_grad_norm=MAX_NORM, **POLICIES[policy])
    begun = {key: value.clone() for key, value in plain.state_dict().items()}
    for number in range(STEPS):
        losses = []
        for side in (ddp, model):
            side.train()
            for micro in range(MICRO_BATCHES):
                loss = functools.partial(species.loss, side, batch_for(name, 100 * rank + 10 * number + micro))
                if micro < MICRO_BATCHES - 1:
                    with side.no_sync():
                        losses.append(loss())
                        losses[-1].backward()
                else:
                    losses.append(loss())
                    losses[-1].backward()
        assert_same_bits({"loss": torch.stack(losses[:MICRO_BATCHES])}, {"loss": torch.stack(losses[MICRO_BATCHES:])})
        ours.step()
        factor = float(torch.clamp(MAX_NORM / (ours.grad_norm + 1e-6), max=1.0))
        assert factor < 1.0
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        theirs.step()
        seen = []
        for side, updater, schedule in ((plain, theirs, schedules[0]), (model, ours, schedules[1])):
            schedule.step()
            updater.zero_grad()
            side.eval()
            with torch.no_grad():
                batch = batch_for(name, 7 + rank)
                seen.append({"held out": species.loss(side, batch), "made": species.generate(side, batch)})
        assert_same_bits(seen[1], seen[0])
    ended = plain.state_dict()
    assert_same_bits({**model.state_dict(), **state_tensors(ours)}, {**ended, **state_tensors(theirs)})
    assert any(not torch.equal(ended[key], value) for key, value in begun.items())
    report = noria.report(model)
    assert report.peak_units <= 2 and report.ledger_agrees, str(report)


Acts = dict[str, tuple[Callable[..., None], tuple[Any, ...]]]
FEW: Acts = {
    "gpt2, whole": (trained_like_ddp, ("gpt2", "whole", "a window", HOSTILE)),
    "gpt2, half frozen": (trained_like_ddp, ("gpt2", "half frozen", "drafts", HOSTILE)),
    "llama, whole": (trained_like_ddp, ("llama", "whole", "drafts", HOSTILE)),
    "llama, adapters": (trained_like_ddp, ("llama", "adapters", "a window", LATE_UPDATES)),
}


@pytest.fixture(scope="module")
def few() -> dict[str, str]:
    return in_turn_on_ranks(2, FEW)


@pytest.mark.parametrize("name", FEW)
def test_two_ranks_train_a_model_of_transformers_to_the_bits_of_ddp(few, name):
    assert not few[name], few[name]


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("model", ZOO)
def test_two_ranks_train_every_model_in_every_mode_to_the_bits_of_ddp(model, part):
    acts: Acts = {policy: (trained_like_ddp, (model, part, policy, HOSTILE)) for policy in POLICIES}
    for policy, failure in in_turn_on_ranks(2, acts).items():
        assert not failure, f"{policy}: {failure}"
