"""Ranks that share a model train it to the bits of DistributedDataParallel, and to those of one process that is
given the same gradients. What needs two ranks runs in the same two processes, one journey after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import noria
import pytest
import torch
import torch.distributed as dist
from noria.host.home import Home
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.device import DEVICE
from tests.journeys.pairs import (
    HOSTILE,
    LATE_UPDATES,
    VOCAB,
    Block,
    Net,
    adamw,
    go_on_here,
    lion,
    loss_of,
    state_tensors,
)
from tests.ranks import alone, asked_for, assert_fine, in_turn_on_ranks, on_ranks, skip_without_devices

STEPS = 4


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


# ---- models -----------------------------------------------------------------------------------------------------


def tied() -> nn.Module:
    net = Net(blocks=2)
    net.head.weight = net.embed.weight
    return net


class Adapted(nn.Module):
    """A frozen block with a small trainable one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block().requires_grad_(False)
        self.down = nn.Linear(16, 3, bias=False)
        self.up = nn.Linear(3, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    net = Net(blocks=0)
    net.embed.requires_grad_(False)
    net.blocks = nn.ModuleList([Adapted(), Block().requires_grad_(False), Adapted()])
    return net


class Twice(nn.Module):
    """One of its blocks runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(blocks=2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        first, second = self.net.blocks
        return self.net.head(first(second(first(self.net.embed(batch)))))


class Scaled(Block):
    """Sizes that nothing divides, a parameter without dimensions and one without elements."""

    def __init__(self) -> None:
        super().__init__(7)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(x) + self.nothing.sum()


def uneven() -> nn.Module:
    net = Net(blocks=0, width=7)
    net.blocks = nn.ModuleList(Scaled() for _ in range(3))
    return net


class Choosing(nn.Module):
    """Has a part that only rank 0 uses, and a part that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.extra, self.never = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(x)
        return x + self.extra(x) if dist.get_rank() == 0 else x


def choosing() -> nn.Module:
    net = Net(blocks=0)
    net.blocks = nn.ModuleList(Choosing() for _ in range(3))
    return net


class Mixed(nn.Module):
    """Trainable parameters of three dtypes, and frozen ones, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(16).double(), nn.LayerNorm(16).bfloat16()
        self.block = Block()
        self.block.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.block(self.before(x.double()).float()).bfloat16()).float()


def mixed() -> nn.Module:
    net = Net(blocks=0)
    net.blocks = nn.ModuleList(Mixed() for _ in range(3))
    return net


class Recomputed(Net):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Pictures(nn.Module):
    """Convolutions whose weights lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(3, VOCAB)
        self.to(memory_format=torch.channels_last)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(batch, VOCAB).float().unsqueeze(1).expand(-1, 3, -1, -1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.transpose(1, 3)).mean(1)


# ---- loops ------------------------------------------------------------------------------------------------------


def usual_loss(model: Any, rank: int, number: int) -> torch.Tensor:
    return loss_of(model, 100 * rank + number)


def loss_of_other_shapes(model: Any, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(100 * rank + number)
    batch = torch.randint(0, VOCAB, (1 + rank + number % 2, 4 + 3 * rank), generator=generator)
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1)


def usual_loop(
    model: Any,
    optimizer: Any,
    rank: int,
    *,
    loss_at: Callable[..., torch.Tensor] = usual_loss,
    schedule: Callable[[Any], Any] | None = None,
    thrown_away: tuple[int, ...] = (),
) -> dict[str, torch.Tensor]:
    """`thrown_away`: steps whose gradients are for nothing."""
    losses = {}
    scheduler = None if schedule is None else schedule(optimizer)
    for number in range(STEPS):
        loss = loss_at(model, rank, number)
        loss.backward()
        if number not in thrown_away:
            optimizer.step()
        (model if thrown_away else optimizer).zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses[f"loss {number}"] = loss.detach()
    return losses


def loop_with_looks(model: Any, optimizer: Any, rank: int) -> dict[str, torch.Tensor]:
    """Eval passes between steps, and between backward and step."""
    seen = {}
    for number in range(STEPS):
        loss = loss_of(model, 100 * rank + number)
        loss.backward()
        for when in ("before", "after"):
            model.eval()
            with torch.no_grad():
                seen[f"{when} step {number}"] = loss_of(model, 7 + rank)
            model.train()
            if when == "before":
                optimizer.step()
                optimizer.zero_grad()
    return seen


# ---- against DistributedDataParallel ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Course:
    model: Callable[[], nn.Module] = Net
    loop: Callable[..., dict[str, torch.Tensor]] = usual_loop
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    hostility: dict[str, Any] = dataclasses.field(default_factory=lambda: HOSTILE)
    unused: bool = False


COURSES = {
    "all resident": Course(),
    "a window": Course(policy={"window": 2}),
    "a window and blocking updates": Course(policy={"window": 2, "update": "blocking"}),
    "drafts": Course(policy={"draft_memory": "64MiB"}),
    "drafts and a window": Course(policy={"draft_memory": "64MiB", "window": 2}),
    "late updates": Course(policy={"window": 2}, hostility=LATE_UPDATES),
    "a quiet machine": Course(policy={"window": 2}, hostility={}),
    "frozen blocks": Course(adapted, policy={"window": 2}),
    "frozen blocks and drafts": Course(adapted, policy={"draft_memory": "64MiB"}),
    "uneven sizes": Course(uneven, policy={"window": 2}),
    "parameters that one rank does not use": Course(choosing, policy={"window": 2}, unused=True),
    "recomputed blocks": Course(Recomputed, policy={"window": 2}),
    "channels last": Course(Pictures, policy={"window": 2}),
    "other shapes on each rank": Course(
        loop=functools.partial(usual_loop, loss_at=loss_of_other_shapes), policy={"window": 2}
    ),
    "eval passes": Course(loop=loop_with_looks, policy={"window": 2}),
    "eval passes and drafts": Course(loop=loop_with_looks, policy={"draft_memory": "64MiB"}),
    "a schedule": Course(loop=functools.partial(usual_loop, schedule=one_cycle), policy={"window": 2}),
    "gradients thrown away": Course(
        loop=functools.partial(usual_loop, thrown_away=(1,)), policy={"draft_memory": "64MiB"}
    ),
    "doubles, which torch updates": Course(lambda: Net(blocks=2).double(), policy={"window": 2}),
    "several dtypes in each block": Course(mixed, policy={"window": 4}),
    "several dtypes in each block, all resident": Course(mixed, optimizer=adamw, policy={"kernel": "torch"}),
    "a tied head": Course(tied, policy={"window": 2}),
    "a block that runs twice": Course(Twice, policy={"window": 2}),
    **{
        f"updates on the device, {name}": Course(make, policy={"window": window, "optimizer_device": "device"}, **more)
        for name, (make, window, more) in {
            "a plain net": (Net, 2, {}),
            "uneven sizes": (uneven, 2, {}),
            "several dtypes in each block": (mixed, 4, {}),
            "channels last": (Pictures, 2, {}),
            "parameters that one rank does not use": (choosing, 2, {"unused": True}),
            "doubles, which torch updates": (lambda: Net(blocks=2).double(), 2, {}),
        }.items()
    },
    **{
        f"updates inside backward, {name}": Course(make, policy={"window": 2, "update": "backward"}, **more)
        for name, (make, more) in {
            "a plain net": (Net, {}),
            "late": (Net, {"hostility": LATE_UPDATES}),
            "on a schedule": (Net, {"loop": functools.partial(usual_loop, schedule=one_cycle)}),
            "uneven sizes": (uneven, {}),
            "frozen blocks": (adapted, {}),
            "parameters that one rank does not use": (choosing, {"unused": True}),
            "recomputed blocks": (Recomputed, {}),
            "a tied head": (tied, {}),
            "a block that runs twice": (Twice, {}),
        }.items()
    },
}


def like_ddp(rank: int, size: int, name: str) -> None:
    course = COURSES[name]
    torch.manual_seed(rank)  # rank 0's weights are everybody's
    plain, model = course.model(), course.model()
    model.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(plain, find_unused_parameters=course.unused)
    expected = course.loop(ddp, theirs := course.optimizer(plain.parameters()), rank)
    ours = course.optimizer(model.parameters())
    with on_machine(hostility=course.hostility):
        noria.wrap(model, ours, device=DEVICE, **course.policy)
    found = course.loop(model, ours, rank)
    expected |= {**plain.state_dict(), **state_tensors(theirs)}
    found |= {**model.state_dict(), **state_tensors(ours)}
    assert_same_bits(found, expected)
    report = noria.report(model)
    assert report.num_fetches > 0 and report.ledger_agrees, str(report)
    if "window" in course.policy:
        assert report.peak_units <= course.policy["window"], str(report)
    if "draft_memory" in course.policy and course.model is Net:
        assert any(report.drafts.values()), str(report)  # kept, or undone where something came before step()
    noria.unwrap(model, ours)


@pytest.fixture(scope="module")
def found_by_ddp(request: pytest.FixtureRequest) -> dict[str, str]:
    return in_turn_on_ranks(2, asked_for(request, {name: (like_ddp, (name,)) for name in COURSES}))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COURSES)
def test_two_ranks_have_the_bits_of_ddp(found_by_ddp, name):
    failure = found_by_ddp[name]
    assert not failure, failure


# ---- against one process of noria's, which is given the same gradients -------------------------------------------


def share_gradients(parameters: Any, size: int, in_fp32: bool) -> None:
    """What shared ranks do, by hand."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = (parameter.grad.float() if in_fp32 else parameter.grad) * (1.0 / size)
                dist.all_reduce(gradient)
                parameter.grad.copy_(gradient)


def by_torch(name: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: getattr(torch.optim, name)(parameters, **options)


# All that update element by element, with what makes them keep the most.
BY_TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": by_torch("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD without state": by_torch("SGD", lr=0.1),
    "Adam": by_torch("Adam", lr=0.01, amsgrad=True, weight_decay=0.01),
    "Adam, foreach": by_torch("Adam", lr=0.01, foreach=True),
    "AdamW": by_torch("AdamW", lr=0.01),
    "AdamW, fused": by_torch("AdamW", lr=0.01, fused=True),
    "NAdam": by_torch("NAdam", lr=0.01),
    "RAdam": by_torch("RAdam", lr=0.01),
    "Adamax": by_torch("Adamax", lr=0.01),
    "RMSprop": by_torch("RMSprop", lr=0.01, momentum=0.9, centered=True),
    "Adagrad": by_torch("Adagrad", lr=0.05),  # its state is there before the first step
    "Adadelta": by_torch("Adadelta", lr=1.0),
    "ASGD": by_torch("ASGD", lr=0.05, t0=1),
    "Rprop": by_torch("Rprop", lr=0.01),
    "Lion": lion,
}

TWINS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (adamw, {"window": 2}),
    "adamw, drafts": (adamw, {"draft_memory": "64MiB"}),
    "adamw, moments of 16 bits": (adamw, {"window": 2, "state_dtype": "bf16"}),
    "adamw, moments of 8 bits": (adamw, {"window": 2, "state_dtype": "8bit"}),
    "adamw, moments of 8 bits, bfloat16": (adamw, {"window": 2, "state_dtype": "8bit", "dtype": torch.bfloat16}),
    "lion": (lion, {"window": 2}),
    "adamw, inside backward": (adamw, {"window": 2, "update": "backward"}),
    "adamw, inside backward, moments of 8 bits": (adamw, {"window": 2, "update": "backward", "state_dtype": "8bit"}),
    "bfloat16, adamw, inside backward": (adamw, {"window": 2, "update": "backward", "dtype": torch.bfloat16}),
    "bfloat16": (sgd, {"window": 2, "dtype": torch.bfloat16}),
    "bfloat16, adamw": (adamw, {"window": 2, "dtype": torch.bfloat16}),
    "bfloat16, summed in fp32": (adamw, {"window": 2, "dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
    "bfloat16, adamw, drafts": (adamw, {"draft_memory": "64MiB", "dtype": torch.bfloat16}),
    "bfloat16, adamw, blocking": (adamw, {"window": 2, "dtype": torch.bfloat16, "update": "blocking"}),
    **{f"{name} by torch": (make, {"window": 2, "kernel": "torch"}) for name, make in BY_TORCH.items()},
    "bfloat16, NAdam": (BY_TORCH["NAdam"], {"window": 2, "dtype": torch.bfloat16}),
    "bfloat16, AdamW by torch": (adamw, {"dtype": torch.bfloat16, "kernel": "torch", "reduce_dtype": torch.float32}),
    "adamw, on the device": (adamw, {"window": 2, "optimizer_device": "device"}),
    "bfloat16, on the device": (sgd, {"window": 2, "dtype": torch.bfloat16, "optimizer_device": "device"}),
    "bfloat16, AdamW by torch, on the device": (
        adamw,
        {"dtype": torch.bfloat16, "kernel": "torch", "optimizer_device": "device"},
    ),
    "Adagrad, blocking": (BY_TORCH["Adagrad"], {"window": 2, "update": "blocking"}),
}


def like_twin(rank: int, size: int, name: str) -> None:
    optimizer, policy = TWINS[name]
    found = []
    for is_twin in (True, False):
        torch.manual_seed(0)
        model = Net(blocks=2, width=29)  # parameters of several blocks of codes
        updater = optimizer(model.parameters())
        with alone() if is_twin else on_machine(hostility=HOSTILE):
            # The twin's gradients are edited by hand, so its updates come after backward.
            noria.wrap(model, updater, device=DEVICE, **({**policy, "update": "auto"} if is_twin else policy))
        seen: dict[str, torch.Tensor] = {}
        for number in range(STEPS):
            loss = loss_of(model, 100 * rank + number)
            loss.backward()
            if is_twin:
                share_gradients(model.parameters(), size, in_fp32="reduce_dtype" in policy)
            updater.step()
            updater.zero_grad()
            seen[f"loss {number}"] = loss.detach()
        found.append({**seen, **model.state_dict(), **state_tensors(updater)})
    report = noria.report(model)
    assert report.ledger_agrees, str(report)
    assert_same_bits(*reversed(found))


def accumulates(rank: int, size: int, policy: dict[str, Any]) -> None:
    """Several backwards and one step: each backward's gradients are summed over the ranks, then added."""
    torch.manual_seed(0)
    plain, model = uneven(), uneven()
    model.load_state_dict(plain.state_dict())
    theirs, ours = sgd(plain.parameters()), sgd(model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, device=DEVICE, **policy)
    for number in range(STEPS):
        held: dict[Any, torch.Tensor] = {}
        for part in range(3):
            loss_of(plain, 100 * rank + 10 * number + part).backward()
            with ours.accumulate() if part < 2 else contextlib.nullcontext():
                loss_of(model, 100 * rank + 10 * number + part).backward()
            share_gradients(plain.parameters(), size, in_fp32=False)
            for p in plain.parameters():
                held[p] = held[p] + p.grad if p in held else p.grad
                p.grad = None
        for p in plain.parameters():
            p.grad = held[p]
        for updater in (theirs, ours):
            updater.step()
            updater.zero_grad()
        assert_same_bits(model.state_dict(), plain.state_dict())


# ---- norms ------------------------------------------------------------------------------------------------------


def clips(rank: int, size: int, by_call: bool, max_norm: float, kernel: str = "auto") -> None:
    torch.manual_seed(0)
    plain, model = uneven(), uneven()
    model.load_state_dict(plain.state_dict())
    theirs, ours = sgd(plain.parameters()), sgd(model.parameters())
    norm_at_step = {} if by_call else {"max_grad_norm": max_norm}
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, device=DEVICE, window=2, kernel=kernel, **norm_at_step)
    for number in range(STEPS):
        for each in (plain, model):
            loss_of(each, 100 * rank + number).backward()
        share_gradients(plain.parameters(), size, in_fp32=False)
        gradients = [p.grad for p in plain.parameters()]
        expected = torch.tensor(math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))
        if by_call:
            norm = ours.clip_grad_norm_(max_norm)
        ours.step()
        if not by_call:
            norm = ours.grad_norm
        gathered = [torch.zeros_like(norm) for _ in range(size)]
        dist.all_gather(gathered, norm)
        for its in gathered:
            assert_same_bits({"norm": its}, {"norm": gathered[0]})
        assert abs(norm.item() / expected.item() - 1) < 2e-7
        factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        for gradient in gradients:
            gradient.mul_(factor)
        theirs.step()
        for updater in (theirs, ours):
            updater.zero_grad()
        assert_same_bits(model.state_dict(), plain.state_dict())


# ---- wrap and unwrap --------------------------------------------------------------------------------------------


def wrapped_net(
    make: Callable[[], nn.Module] = Net, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, **policy: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = make()
    updater = optimizer(model.parameters())
    noria.wrap(model, updater, device=DEVICE, **policy)
    return model, updater


class Normed(Net):
    """With buffers; one of them is in no state_dict."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("shift", torch.rand(2, 1).expand(2, 16), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) + self.shift[0])


def wraps_meta(rank: int, size: int, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    with torch.device(DEVICE if rank == 0 else "meta"):
        model = make()
    torch.manual_seed(3)
    expected = make()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2)
    assert_same_bits(model.state_dict(), expected.state_dict())
    for name, buffer in expected.named_buffers():
        assert_same_bits({name: model.get_buffer(name)}, {name: buffer})
    for module in expected.modules():
        module._buffers.update((name, each.clone()) for name, each in module._buffers.items())  # DDP writes to them
    ddp = DistributedDataParallel(expected)
    theirs = sgd(expected.parameters())
    for each, updater in ((model, optimizer), (ddp, theirs)):
        loss_of(each, rank).backward()
        updater.step()
    found = dict(model.named_parameters())
    noria.unwrap(model, optimizer)
    assert_same_bits(found, dict(expected.named_parameters()))


def unwraps(rank: int, size: int) -> None:
    found = []
    for shared in (True, False):
        torch.manual_seed(0)
        model = uneven()
        optimizer = sgd(model.parameters())
        if shared:
            noria.wrap(model, optimizer, device=DEVICE, window=2)
        trained = model if shared else DistributedDataParallel(model)
        usual_loop(trained, optimizer, rank)
        if shared:
            loss_of(model, rank).backward()
            wrapped = wrapped_by(model)
            assert wrapped is not None and set(wrapped.context.device_buffers.taken) == {"parts for other ranks"}
            noria.unwrap(model, optimizer)
            assert wrapped.context.backend.allocated == wrapped.context.engine.statistics.arena_bytes
            assert type(optimizer) is torch.optim.SGD
            assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
            go_on_here(model, optimizer)
        trained = DistributedDataParallel(model) if shared else trained
        usual_loop(trained, optimizer, rank + 1)
        found.append({**model.state_dict(), **state_tensors(optimizer)})
    assert_same_bits(*found)


def keeps_its_state(rank: int, size: int, kernel: str) -> None:
    """Tensors of the state stay where they are from step to step, those of parameters too that one rank has whole."""
    model, optimizer = wrapped_net(optimizer=adamw, window=2, kernel=kernel)
    wrapped = wrapped_by(model)
    assert wrapped is not None
    usual_loop(model, optimizer, rank)
    kept = [(slot, optimizer.state[slot.parameter]["exp_avg"]) for slot in wrapped.context.slots]
    assert any(slot.like.shape == slot.shape and slot.like.numel() for slot, _ in kept)
    usual_loop(model, optimizer, rank)
    for slot, moment in kept:
        assert optimizer.state[slot.parameter]["exp_avg"] is moment, slot.name


def halves_the_home(rank: int, size: int, policy: dict[str, Any]) -> None:
    rows = []
    for shared in (False, True):
        with contextlib.nullcontext() if shared else alone():
            model, optimizer = wrapped_net(lambda: Net(width=64), adamw, **policy)
        usual_loop(model, optimizer, rank)
        report = noria.report(model)
        assert report.ledger_agrees, str(report)
        rows.append({row.purpose: row.taken for row in report.ledger if row.place == "host" and row.taken})
    whole, parts = rows
    assert whole.keys() == parts.keys() and {"working copies", "held gradients"} <= parts.keys()
    for purpose, taken in parts.items():
        num_pieces = (
            noria.report(model).num_units if purpose != "optimizer state" else 2 * len(list(model.parameters()))
        )
        assert whole[purpose] / size <= taken + 2 * 512 * num_pieces
        assert taken <= whole[purpose] / size + 2 * 512 * num_pieces, purpose
    assert sum(parts.values()) < 0.55 * sum(whole.values())


def plans_its_part(rank: int, size: int) -> None:
    net = Net(width=64)
    planned = noria.plan(net, sgd(net.parameters()), device=DEVICE, window=2)
    model, _ = wrapped_net(lambda: Net(width=64), window=2)
    found = {row.purpose: row.planned for row in noria.report(model).ledger if row.place == "host"}
    expected = {purpose: amount for place, purpose, amount in planned.rows() if place == "host"}
    for purpose in ("working copies", "held gradients"):
        assert found[purpose] == expected[purpose]


def is_interrupted(rank: int, size: int) -> None:
    """Ctrl-C on one rank, while the rest of the home is taken: there it is raised, and the model is wrapped on all."""
    left = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who was started in the background ignores it
    for meets_one in (True, False):
        torch.manual_seed(0)
        model = Net()
        optimizer = sgd(model.parameters())
        is_here = meets_one and rank == size - 1
        interrupted = mock.patch.object(Home, "take_rest", lambda home: signal.raise_signal(signal.SIGINT))
        with interrupted if is_here else contextlib.nullcontext():
            try:
                noria.wrap(model, optimizer, device=DEVICE, window=2)
            except KeyboardInterrupt:
                assert is_here
            else:
                assert not is_here
        usual_loop(model, optimizer, rank)
        left.append(values_of(model, optimizer))
    assert_same_bits(*left)


# ---- refusals ---------------------------------------------------------------------------------------------------


def message_of(act: Callable[[], Any]) -> str:
    with pytest.raises(noria.UsageError) as caught:
        act()
    return str(caught.value)


class OwnSGD(torch.optim.SGD):
    """An optimizer that noria does not know."""


def refuses(rank: int, size: int) -> None:
    def wrap(make: Callable[[], nn.Module] = Net, optimizer: Any = sgd, **policy: Any) -> str:
        return message_of(lambda: wrapped_net(make, optimizer, **policy))

    for name in ("Adafactor", "LBFGS"):
        assert f"{name}, which" in wrap(optimizer=by_torch(name))
    assert "Muon, which looks" in wrap(lambda: nn.Sequential(nn.Linear(4, 4, bias=False)), by_torch("Muon"))
    assert "OwnSGD, which may look" in wrap(optimizer=lambda parameters: OwnSGD(parameters, lr=0.1))
    assert "no rank holds whole weights" in wrap(reads="home")


def wraps_groups_that_only_look_apart(rank: int, size: int) -> None:
    """Functions and objects have an address, which is one process's; and the order of keys says nothing."""
    model = Net(blocks=1)
    more: dict[str, Any] = {"decay": lambda step: step, "made": object(), "steps": [object()], "momentum": 0.5}
    keys = sorted(more, reverse=rank > 0)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), **{key: more[key] for key in keys}}], lr=rate)
    noria.wrap(model, optimizer, device=DEVICE)
    usual_loop(model, optimizer, rank)


def other_on_last(rank: int, size: int, name: str) -> None:
    """Something of the last rank's is not as the others' is: all raise, naming it."""
    is_other = rank == size - 1

    def wrap() -> None:
        policy: dict[str, Any] = {"window": 2}
        width, blocks = 16, 3
        if is_other and name == "width":
            width = 17
        if is_other and name == "blocks":
            blocks = 2
        model: nn.Module = Net(blocks, width)
        if is_other and name == "frozen":
            model.blocks[1].norm.weight.requires_grad_(False)
        if is_other and name == "dtype":
            model.bfloat16()
        if is_other and name == "strides":
            model.blocks[1].expand.weight.data = model.blocks[1].expand.weight.data.t().contiguous().t()
        parameters: Any = list(model.parameters())
        if is_other and name == "order":
            parameters.reverse()
        if name == "groups":
            cut = 3 if is_other else 4
            parameters = [{"params": parameters[:cut]}, {"params": parameters[cut:]}]
        optimizer: Any = (adamw if is_other and name == "optimizer" else sgd)(parameters)
        if name == "rate":  # which torch prints with four digits
            optimizer.param_groups[0]["lr"] = torch.tensor(0.1000001 if is_other else 0.1)
        if is_other and name == "rate and momentum":
            optimizer.param_groups[0].update(lr=0.2, momentum=0.8)
        if is_other and name == "policy":
            policy["max_grad_norm"] = 1.0
        if is_other and name == "refused":
            policy["device_memory"] = 1
        if name == "dtype":
            policy["dtype"] = torch.bfloat16
        noria.wrap(model, optimizer, device=DEVICE, **policy)

    found = message_of(wrap)
    for part in DIFFERENCES[name]:
        assert part in found or (name == "refused" and is_other), found


DIFFERENCES = {
    "width": ('"embed.weight"', "(23, 16)", "(23, 17)", "on rank 0", "on rank 1"),
    "blocks": ('"blocks.2"', "on rank 1"),
    "frozen": ('"blocks.1.norm.weight"', "on rank 1"),
    "dtype": ('"embed.weight"', "torch.float32", "torch.bfloat16", "on rank 1"),
    "strides": ('"blocks.1.expand.weight"', "on rank 1"),
    "order": ("group 0 of SGD", "on rank 1"),
    "groups": ("group 0 of SGD", "on rank 1"),
    "optimizer": ("SGD by fused", "AdamW by fused", "on rank 1"),
    "rate": ("rank 0: group 0 of SGD has lr=0.10000000", "; on rank 1: group 0 of SGD has lr=0.10000009"),
    "rate and momentum": (
        "0: group 0 of SGD has lr=0.1, momentum=0.9; on",
        "1: group 0 of SGD has lr=0.2, momentum=0.8. ",
    ),
    "policy": ("rank 0: the policy has max_grad_norm=None; on rank 1: the policy has max_grad_norm=1.0. ",),
    "refused": ("device_memory", "on rank 1"),
}


# ---- tests ------------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    **{f"twin: {name}": (like_twin, (name,)) for name in TWINS},
    "accumulates": (accumulates, ({"window": 2},)),
    "accumulates with drafts": (accumulates, ({"draft_memory": "64MiB"},)),
    "accumulates, then updates inside backward": (accumulates, ({"window": 2, "update": "backward"},)),
    "clips in step, it bites": (clips, (False, 0.05)),
    "clips in step, it does not": (clips, (False, 1e6)),
    "clips by call, it bites": (clips, (True, 0.05)),
    "clips by call, it does not": (clips, (True, 1e6)),
    "clips in step, torch updates": (clips, (False, 0.05, "torch")),
    "clips by call, torch updates": (clips, (True, 0.05, "torch")),
    "meta": (wraps_meta, (uneven,)),
    "meta buffers": (wraps_meta, (Normed,)),
    "unwraps": (unwraps, ()),
    "home": (halves_the_home, ({"draft_memory": 0},)),
    "home in bfloat16": (halves_the_home, ({"dtype": torch.bfloat16, "state_dtype": "8bit", "draft_memory": 0},)),
    "home by torch": (halves_the_home, ({"kernel": "torch"},)),
    "keeps state, fused": (keeps_its_state, ("fused",)),
    "keeps state, torch": (keeps_its_state, ("torch",)),
    "plan": (plans_its_part, ()),
    "interrupted": (is_interrupted, ()),
    "refuses": (refuses, ()),
    "groups alike": (wraps_groups_that_only_look_apart, ()),
    **{f"other {name}": (other_on_last, (name,)) for name in DIFFERENCES},
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    return in_turn_on_ranks(2, asked_for(request, OTHERS))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TWINS)
def test_two_ranks_have_the_bits_of_one_process_that_is_given_the_same_gradients(found, name):
    assert_fine(found, f"twin: {name}")


@pytest.mark.parametrize(
    "name", ["accumulates", "accumulates with drafts", "accumulates, then updates inside backward"]
)
def test_gradients_of_several_backwards_are_summed_one_backward_after_the_other(found, name):
    assert_fine(found, name)


@pytest.mark.parametrize(
    "name", ["clips in step, it bites", "clips in step, it does not", "clips in step, torch updates"]
)
def test_max_grad_norm_is_of_the_whole_gradient_and_the_same_on_all_ranks(found, name):
    assert_fine(found, name)


def test_clip_grad_norm_of_the_optimizer_is_of_the_whole_gradient(found):
    assert_fine(found, "clips by call, it does not")


@pytest.mark.parametrize("name", ["clips by call, it bites", "clips by call, torch updates"])
def test_clip_grad_norm_of_the_optimizer_clips_where_the_norm_is_larger(found, name):
    assert_fine(found, name)


@pytest.mark.parametrize("name", ["meta", "meta buffers"])
def test_ranks_but_the_first_need_no_values_before_wrap(found, name):
    assert_fine(found, name)


def test_unwrap_gives_whole_values_and_state_to_all_ranks(found):
    assert_fine(found, "unwraps")


@pytest.mark.parametrize("name", ["home", "home in bfloat16", "home by torch"])
def test_two_ranks_have_half_of_the_home_each(found, name):
    assert_fine(found, name)


@pytest.mark.parametrize("name", ["keeps state, fused", "keeps state, torch"])
def test_a_step_leaves_the_states_tensors_where_they_are(found, name):
    assert_fine(found, name)


def test_a_plan_is_of_what_this_rank_would_take(found):
    assert_fine(found, "plan")


def test_an_interrupt_of_one_rank_while_the_rest_of_the_home_is_taken_is_raised_there_alone(found):
    assert_fine(found, "interrupted")


def test_what_ranks_cannot_share_is_refused_by_name(found):
    assert_fine(found, "refuses")


def test_groups_are_compared_by_what_they_say_and_not_by_addresses(found):
    assert_fine(found, "groups alike")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_rank_that_wraps_something_else_is_refused_on_all_ranks(found, name):
    assert_fine(found, f"other {name}")


# ---- checkpoints ------------------------------------------------------------------------------------------------

KEPT: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "momentum": (sgd, {}),
    "bfloat16": (adamw, {"dtype": torch.bfloat16}),
    "bfloat16 with moments of 16 bits": (adamw, {"dtype": torch.bfloat16, "state_dtype": "bf16"}),
    "moments of 8 bits": (adamw, {"state_dtype": "8bit"}),
    "NAdam by torch": (BY_TORCH["NAdam"], {}),
    "Adagrad by torch, bfloat16": (BY_TORCH["Adagrad"], {"dtype": torch.bfloat16}),
}


def kept_net() -> nn.Module:
    return Net(blocks=2, width=29)


def together(model: Any, optimizer: Any, ranks: Any, size: int, numbers: Any) -> None:
    """`ranks`: whose batches this process takes; all of them where it is alone, and adds up by hand."""
    for number in numbers:
        held: dict[Any, torch.Tensor] = {}
        for rank in ranks:
            loss_of(model, 100 * rank + number).backward()
            if len(ranks) > 1:
                for p in model.parameters():
                    gradient = p.grad * (1.0 / size)
                    held[p] = held[p] + gradient if p in held else gradient
                    p.grad = None
        for p, gradient in held.items():
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {**model.state_dict(), **state_tensors(optimizer)}
    return {name: value.clone() for name, value in found.items()}


def saves(rank: int, size: int, folder: str, name: str) -> None:
    optimizer, policy = KEPT[name]
    path = os.path.join(folder, name)
    model, updater = wrapped_net(kept_net, optimizer, window=2, **policy)
    together(model, updater, [rank], size, range(2))
    noria.save(path, model, updater, step=2)
    together(model, updater, [rank], size, range(2, 4))
    expected = values_of(model, updater)
    if rank == 0:
        torch.save(expected, path + ".expected")
    torch.manual_seed(rank + 5)
    other = kept_net()
    its = optimizer(other.parameters())
    noria.wrap(other, its, device=DEVICE, **policy)
    assert noria.load(path, other, its) == {"step": 2}
    together(other, its, [rank], size, range(2, 4))
    assert_same_bits(values_of(other, its), expected)


def loads_on_three(rank: int, size: int, folder: str, name: str) -> None:
    optimizer, policy = KEPT[name]
    path = os.path.join(folder, name)
    saved = torch.load(path)
    model, updater = wrapped_net(kept_net, optimizer, window=2, **policy)
    noria.load(path, model, updater)
    found = values_of(model, updater)
    expected = dict(saved["model"])
    for number, values in saved["optimizer"]["state"].items():
        expected |= {f"{number}.{key}": value for key, value in values.items()}
    assert_same_bits(found, expected)
    together(model, updater, [rank], size, range(2, 4))
    found = values_of(model, updater)
    with alone():
        twin, its = wrapped_net(kept_net, optimizer, **policy)
    noria.load(path, twin, its)
    together(twin, its, range(size), size, range(2, 4))
    if policy.get("dtype") is None and "state_dtype" not in policy:  # else a rounding may fall the other way
        torch.testing.assert_close(found, values_of(twin, its), rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, in_turn_on_ranks(2, {name: (saves, (folder, name)) for name in KEPT})


@pytest.mark.parametrize("name", KEPT)
def test_a_checkpoint_of_two_ranks_goes_on_with_the_same_bits_on_two(saved, name):
    assert not saved[1][name], saved[1][name]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", KEPT)
def test_a_checkpoint_of_two_ranks_goes_on_with_the_same_bits_on_one(saved, name):
    optimizer, policy = KEPT[name]
    path = os.path.join(saved[0], name)
    model, updater = wrapped_net(kept_net, optimizer, window=2, **policy)
    noria.load(path, model, updater)
    together(model, updater, range(2), 2, range(2, 4))
    assert_same_bits(values_of(model, updater), torch.load(path + ".expected"))


@pytest.mark.usefixtures("one_thread")
def test_a_checkpoint_of_two_ranks_goes_on_with_the_same_bits_in_plain_torch(saved):
    path = os.path.join(saved[0], "momentum")
    torch.manual_seed(9)
    model = kept_net()
    optimizer = sgd(model.parameters())
    noria.load(path, model, optimizer)
    together(model, optimizer, range(2), 2, range(2, 4))
    assert_same_bits(values_of(model, optimizer), torch.load(path + ".expected"))


def test_a_checkpoint_of_two_ranks_goes_on_with_the_same_values_on_three(saved):
    for failure in in_turn_on_ranks(3, {name: (loads_on_three, (saved[0], name)) for name in KEPT}).values():
        assert not failure, failure


# ---- ranks that fall away ---------------------------------------------------------------------------------------

DIES = """
import datetime, os, sys, time
import torch, torch.distributed as dist
import noria
from tests.device import DEVICE
from tests.journeys.pairs import Net, loss_of, sgd
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=20))
torch.manual_seed(0)
model = Net()
optimizer = sgd(model.parameters())
noria.wrap(model, optimizer, device=DEVICE, window=2)
calls = []
def count(*_):
    calls.append(0)
    if rank == 1 and len(calls) == 3:
        os._exit(7)
model.blocks[2].register_forward_hook(count)
try:
    for number in range(5):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
finally:
    print("raised at", time.time(), len(calls), flush=True)
"""


def test_a_rank_that_dies_makes_the_others_raise_and_end(tmp_path):
    skip_without_devices(2)
    root = pathlib.Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(pathlib.Path(noria.__file__).parents[1])])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DIES, str(rank), str(tmp_path / "meeting")],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        (out, error), _ = (each.communicate(timeout=60) for each in ranks)
        ended = time.time()
    finally:
        for each in ranks:
            each.kill()
    assert ranks[1].returncode == 7
    assert ranks[0].returncode == 1, error
    assert "a rank has died, raised, or hung" in error
    raised, calls = out.split()[2:]
    assert int(calls) in (3, 4) and ended - float(raised) < 10


# ---- what the optimizer brings along, and gradients of the user's own ---------------------------------------------


def state_of_before_and_gradients_of_the_users(rank: int, size: int) -> None:
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    sides = [(plain, sgd(plain.parameters())), (model, sgd(model.parameters()))]
    for side, optimizer in sides:  # alike on all ranks
        loss_of(side, 7).backward()
        optimizer.step()
        optimizer.zero_grad()
    noria.wrap(*sides[1], device=DEVICE, window=2)
    for side, optimizer in ((DistributedDataParallel(plain), sides[0][1]), sides[1]):
        loss_of(side, 100 * rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_bits(model.state_dict(), plain.state_dict())
    loss_of(model, rank).backward()
    model.head.weight.grad = torch.ones(model.head.weight.shape)
    with pytest.raises(noria.UsageError, match=r"p\.grad of the user's own if ranks share.*head\.weight"):
        sides[1][1].step()
    assert_same_bits(model.state_dict(), plain.state_dict())


def test_state_of_before_wrap_is_gone_on_with_and_gradients_of_the_users_are_refused():
    on_ranks(2, state_of_before_and_gradients_of_the_users)
