"""Ranks that share a model train it to the bits of DistributedDataParallel."""

from __future__ import annotations

import contextlib
import time
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


def no_sync_like_ddp(rank: int, size: int) -> None:
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(plain)
    optimizer, ours = sgd(plain.parameters()), sgd(model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, device="cpu", window=2)
    for side, updates in ((ddp, optimizer), (model, ours)):
        for number in range(3):
            for micro in range(2):
                with side.no_sync():
                    loss_of(side, 100 * rank + 10 * number + micro).backward()
            loss_of(side, 100 * rank + 10 * number + 5).backward()
            updates.step()
            updates.zero_grad()
    assert_same_bits(model.state_dict(), plain.state_dict())
    with model.no_sync():
        loss_of(model, rank).backward()
    with pytest.raises(noria.UsageError, match="outside of no_sync"):
        ours.step()


def test_micro_batches_without_sync_have_the_bits_of_ddp():
    on_ranks(2, no_sync_like_ddp)


class Shorter(Net):
    """Leaves out its last blocks when it is told to."""

    num_used = 5

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks[: self.num_used]:
            x = block(x)
        return self.head(x)


def units_that_the_last_backward_leaves_out(rank: int, size: int) -> None:
    torch.manual_seed(0)
    plain, model = Shorter(), Shorter()
    model.load_state_dict(plain.state_dict())
    optimizer, ours = sgd(plain.parameters()), sgd(model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, device="cpu", window=2)
    for number in range(3):
        for side in (plain, model):
            side.num_used = 5
            with side.no_sync() if side is model else contextlib.nullcontext():
                loss_of(side, 100 * rank + number).backward()
            side.num_used = 3
            loss_of(side, 100 * rank + 50 + number).backward()
        for parameter in plain.parameters():
            parameter.grad.mul_(1 / size)
            dist.all_reduce(parameter.grad)
        for each in (optimizer, ours):
            each.step()
            each.zero_grad()
    assert_same_bits(model.state_dict(), plain.state_dict())


def test_gradients_of_units_that_the_last_backward_leaves_out_are_summed_too():
    on_ranks(2, units_that_the_last_backward_leaves_out)


def one_hangs(rank: int, size: int) -> float:
    torch.manual_seed(0)
    model = Net()
    ours = sgd(model.parameters())
    noria.wrap(model, ours, device="cpu", window=2)
    loss_of(model, rank).backward()
    ours.step()
    ours.zero_grad()
    if rank == 1:
        time.sleep(3600)
    began = time.monotonic()
    with pytest.raises(noria._C.MachineError, match=r"rank 0 of 2.*hung for longer"):
        for number in range(3):
            loss_of(model, number).backward()
            ours.step()
            ours.zero_grad()
    return time.monotonic() - began


def test_a_rank_that_hangs_fails_the_others_within_the_groups_own_timeout():
    timeout_s = 5.0
    waited_s = on_ranks(2, one_hangs, timeout_s=timeout_s, dying=(1,))[0]
    assert waited_s < 10 * timeout_s
