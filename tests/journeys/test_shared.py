"""Ranks that share a model train it to the bits of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import noria
import pytest
import torch
import torch.distributed as dist
from noria.testing import assert_same_bits, on_machine
from torch.nn.parallel import DistributedDataParallel

from tests.journeys.pairs import HOSTILE, Net, loss_of
from tests.ranks import on_ranks


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def plain_loop(model: Any, optimizer: Any, rank: int, size: int) -> list[torch.Tensor]:
    losses = []
    for number in range(4):
        loss = loss_of(model, 100 * rank + number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def like_ddp(rank: int, size: int, policy: dict[str, Any]) -> None:
    torch.manual_seed(rank)  # rank 0's weights are everybody's
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(plain)
    optimizer = sgd(plain.parameters())
    expected = plain_loop(ddp, optimizer, rank, size)
    ours = sgd(model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, device="cpu", **policy)
    found = plain_loop(model, ours, rank, size)
    assert_same_bits(*({f"loss {n}": loss for n, loss in enumerate(losses)} for losses in (found, expected)))
    assert_same_bits(model.state_dict(), plain.state_dict())
    report = noria.report(model)
    assert report.ledger_agrees, str(report)


@pytest.mark.parametrize("policy", [{}, {"window": 2}, {"window": 2, "update": "blocking"}, {"draft_memory": "64MiB"}])
def test_two_ranks_have_the_bits_of_ddp(policy):
    on_ranks(2, like_ddp, policy)
