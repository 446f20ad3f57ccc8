"""Micro-batches whose gradients stay on their rank: `model.no_sync()`."""

from __future__ import annotations

import contextlib

import noria
import pytest
import torch
import torch.distributed as dist
from noria.testing import assert_same_bits, on_machine
from torch.nn.parallel import DistributedDataParallel

from tests.device import DEVICE
from tests.journeys.pairs import HOSTILE, Net, Side, both, loss_of, new_side, sgd, wrap_side
from tests.ranks import on_ranks


def no_sync_like_ddp(rank: int, size: int, update: str) -> None:
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(plain)
    optimizer, ours = sgd(plain.parameters()), sgd(model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, device=DEVICE, window=2, update=update)
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
    other = Net()
    updated_by_torch = sgd(other.parameters())
    noria.wrap(other, updated_by_torch, device=DEVICE, kernel="torch")
    with other.no_sync():
        loss_of(other, rank).backward()
    for call in (updated_by_torch.step, lambda: updated_by_torch.clip_grad_norm_(1.0)):
        with pytest.raises(noria.UsageError, match="outside of no_sync"):
            call()


@pytest.mark.parametrize("update", ["auto", "backward"])
def test_micro_batches_without_sync_have_the_bits_of_ddp(update):
    on_ranks(2, no_sync_like_ddp, update)


@pytest.mark.parametrize("update", ["auto", "backward"])
@pytest.mark.usefixtures("one_thread")
def test_in_one_process_micro_batches_accumulate_as_without(update):
    def journey(side: Side) -> None:
        for number in range(3):
            for micro in range(3):
                with side.model.no_sync() if side.is_wrapped and micro < 2 else contextlib.nullcontext():
                    loss_of(side.model, 10 * number + micro).backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey, optimizer=sgd, kernel="fused", update=update)
    side = wrap_side(new_side())
    noria.unwrap(side.model, side.optimizer)
    assert not hasattr(side.model, "no_sync")


class Shorter(Net):
    """Leaves out its last blocks when it is told to."""

    num_used = 5

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks[: self.num_used]:
            x = block(x)
        return self.head(x)


def units_that_the_last_backward_leaves_out(rank: int, size: int, update: str) -> None:
    torch.manual_seed(0)
    plain, model = Shorter(), Shorter()
    model.load_state_dict(plain.state_dict())
    optimizer, ours = sgd(plain.parameters()), sgd(model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, device=DEVICE, window=2, update=update)
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


@pytest.mark.parametrize("update", ["auto", "backward"])
def test_gradients_of_units_that_the_last_backward_leaves_out_are_summed_too(update):
    on_ranks(2, units_that_the_last_backward_leaves_out, update)
