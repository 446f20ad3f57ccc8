"""With find_unused_parameters=True, ranks that share a model may visit different parts of it: they train it to the bits
of DistributedDataParallel with the same argument. Without it all ranks raise. What needs two ranks runs in the same two
processes, one journey after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
import torch.distributed as dist
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.device import DEVICE
from tests.journeys.pairs import HOSTILE, LATE_UPDATES, VOCAB, WIDTH, Block, Net, adamw, loss_of, sgd, state_tensors
from tests.ranks import asked_for, assert_fine, in_turn_on_ranks

STEPS = 6


# ---- models -----------------------------------------------------------------------------------------------------


class Dropping(Net):
    """Leaves out blocks, others on each rank and in each call: LayerDrop."""

    calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        generator = torch.Generator(DEVICE).manual_seed(100 * self.calls + dist.get_rank())
        kept = torch.rand(len(self.blocks), generator=generator) < 0.6
        x = self.embed(tokens)
        for block, is_kept in zip(self.blocks, kept.tolist(), strict=True):
            if is_kept or not self.training:
                x = block(x)
        return self.head(x)


class Branching(Net):
    """Rank 0 alone takes the middle block; the first is the others'."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if number != (0 if dist.get_rank() == 0 else 2):
                x = block(x)
        return self.head(x)


class Experts(nn.Module):
    """One block for each rank, and one between that all use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.own = nn.ModuleList(Block() for _ in range(dist.get_world_size()))
        self.shared = Block()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.shared(self.own[dist.get_rank()](self.embed(tokens))))


class Framed(Net):
    """Parameters of its own at both ends, so that its unit is visited twice in each direction; the gradients of rank 1
    end before the second visit, in some of the calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.first, self.last = (nn.Parameter(torch.rand(WIDTH)) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(tokens) * self.first
        if dist.get_rank() == 1 and self.calls % 3:
            x = x.detach()
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.last)


class Adapted(Branching):
    """Frozen blocks too."""

    def __init__(self) -> None:
        super().__init__()
        for number in (1, 2, 4):
            self.blocks[number].requires_grad_(False)


# ---- loops ------------------------------------------------------------------------------------------------------


def plain_loop(model: Any, optimizer: Any, rank: int) -> dict[str, torch.Tensor]:
    losses = {}
    for number in range(STEPS):
        loss = loss_of(model, 100 * rank + number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[f"loss {number}"] = loss.detach()
    return losses


def loop_of_micro_batches(model: Any, optimizer: Any, rank: int) -> dict[str, torch.Tensor]:
    losses = {}
    for number in range(STEPS):
        for part in range(3):
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                loss = loss_of(model, 100 * rank + 10 * number + part)
                loss.backward()
            losses[f"loss {number}.{part}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def loop_with_a_look_on_rank_0(model: Any, optimizer: Any, rank: int) -> dict[str, torch.Tensor]:
    """The other rank goes on meanwhile until it has to wait."""
    seen = {}
    for number in range(STEPS):
        loss = loss_of(model, 100 * rank + number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen[f"loss {number}"] = loss.detach()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                for look in range(2):
                    its = model.module if isinstance(model, DistributedDataParallel) else model
                    seen[f"look {number}.{look}"] = loss_of(its, look)
            model.train()
    return seen


@dataclasses.dataclass(frozen=True)
class Course:
    model: Callable[[], nn.Module] = Dropping
    policy: dict[str, Any] = dataclasses.field(default_factory=lambda: {"window": 2})
    loop: Callable[..., dict[str, torch.Tensor]] = plain_loop
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    hostility: dict[str, Any] = dataclasses.field(default_factory=lambda: HOSTILE)


DRAFTS = {"draft_memory": "64MiB"}
LATE_DRAFTS = {**HOSTILE, "hold_us": {"draft": 20_000}}
COURSES = {
    "LayerDrop": Course(),
    "LayerDrop, all resident": Course(policy={}),
    "LayerDrop, blocking updates": Course(policy={"window": 2, "update": "blocking"}),
    "LayerDrop, drafts": Course(policy=DRAFTS),
    "LayerDrop, late updates": Course(hostility=LATE_UPDATES),
    "LayerDrop, a quiet machine": Course(hostility={}),
    "LayerDrop, no_sync": Course(loop=loop_of_micro_batches),
    "LayerDrop, no_sync and drafts": Course(loop=loop_of_micro_batches, policy={**DRAFTS, "window": 2}),
    "LayerDrop in doubles, which torch updates": Course(lambda: Dropping().double()),
    "a branch": Course(Branching),
    "a branch, drafts": Course(Branching, policy=DRAFTS),
    "a branch, drafts, late updates": Course(Branching, policy={**DRAFTS, "window": 2}, hostility=LATE_UPDATES),
    "a branch with frozen blocks": Course(Adapted),
    "an expert for each rank": Course(Experts),
    "an expert for each rank, adamw": Course(Experts, optimizer=adamw),
    "gradients that end early": Course(Framed),
    "gradients that end early, drafts": Course(Framed, policy=DRAFTS),
    "gradients that end early, late drafts": Course(Framed, policy=DRAFTS, hostility=LATE_DRAFTS),
    "gradients that end early, no_sync": Course(Framed, loop=loop_of_micro_batches),
    "a look on rank 0": Course(Net, loop=loop_with_a_look_on_rank_0),
    "a look on rank 0, LayerDrop": Course(loop=loop_with_a_look_on_rank_0, policy=DRAFTS),
}


def like_ddp(rank: int, size: int, name: str) -> None:
    course = COURSES[name]
    torch.manual_seed(0)
    plain, model = course.model(), course.model()
    model.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    expected = course.loop(ddp, theirs := course.optimizer(plain.parameters()), rank)
    ours = course.optimizer(model.parameters())
    with on_machine(hostility=course.hostility):
        noria.wrap(model, ours, device=DEVICE, find_unused_parameters=True, **course.policy)
    found = course.loop(model, ours, rank)
    expected |= {**plain.state_dict(), **state_tensors(theirs)}
    found |= {**model.state_dict(), **state_tensors(ours)}
    if course.optimizer is sgd:
        assert_same_bits(found, expected)
    else:  # whose update has bits of its own
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, check_device=False)
    report = noria.report(model)
    assert report.num_fetches > 0 and report.ledger_agrees, str(report)
    if "window" in course.policy:
        assert report.peak_units <= course.policy["window"], str(report)
    if course.policy == DRAFTS and course.model is Branching:
        assert not any(report.drafts.values()), str(report)  # other ranks may need the weights of before
        assert any("there are no drafts" in note for note in report.notes), str(report)
    noria.unwrap(model, ours)


def clips(rank: int, size: int, policy: dict[str, Any]) -> None:
    """Plain torch is given the same sums, and the factor of noria's norm."""
    torch.manual_seed(0)
    plain, model = Dropping(), Dropping()
    model.load_state_dict(plain.state_dict())
    theirs, ours = sgd(plain.parameters()), sgd(model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, device=DEVICE, max_grad_norm=0.05, find_unused_parameters=True, **policy)
    for number in range(STEPS):
        for side in (plain, model):
            loss_of(side, 100 * rank + number).backward()
        ours.step()
        share_gradients(plain, size)
        gradients = [p.grad for p in plain.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        assert abs(ours.grad_norm.item() / norm - 1) < 2e-7
        for gradient in gradients:
            gradient.mul_(float(torch.clamp(0.05 / (ours.grad_norm + 1e-6), max=1.0)))
        theirs.step()
        for updater in (theirs, ours):
            updater.zero_grad()
        assert_same_bits(model.state_dict(), plain.state_dict())


def share_gradients(model: nn.Module, size: int) -> None:
    """By hand: a gradient that any rank has had is everybody's."""
    with torch.no_grad():
        for parameter in model.parameters():
            has = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(has)
            if not has:
                continue
            mine = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            mine = mine * (1.0 / size)
            dist.all_reduce(mine)
            parameter.grad = mine


def of_narrow_gradients(rank: int, size: int) -> None:
    """Summed in fp32, and those of 16 bits."""
    for options in ({}, {"reduce_dtype": torch.float32}):
        torch.manual_seed(0)
        plain, model = Branching().bfloat16(), Branching()
        model.load_state_dict(plain.state_dict())
        optimizer = sgd(model.parameters())
        noria.wrap(
            model, optimizer, device=DEVICE, window=2, dtype=torch.bfloat16, find_unused_parameters=True, **options
        )
        sums: dict[str, torch.Tensor] = {}
        for part in range(2):  # the second is added to the first
            for side in (plain, model):
                loss_of(side, 100 * rank + part).backward()
            for name, parameter in plain.named_parameters():
                mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                mine = (mine.float() if options else mine) * (1.0 / size)
                dist.all_reduce(mine)
                mine = mine.bfloat16()
                sums[name] = sums[name] + mine if name in sums else mine
                parameter.grad = None
        before = {name: value.clone() for name, value in plain.state_dict().items()}
        optimizer.step()
        plain_optimizer = sgd([value.float().requires_grad_() for value in before.values()])
        for parameter, name in zip(plain_optimizer.param_groups[0]["params"], before, strict=True):
            parameter.grad = sums[name].float()
        plain_optimizer.step()
        momenta = {
            name: plain_optimizer.state[parameter]["momentum_buffer"]
            for parameter, name in zip(plain_optimizer.param_groups[0]["params"], before, strict=True)
        }
        names = [name for name, _ in model.named_parameters()]
        state = optimizer.state_dict()["state"]
        assert_same_bits({name: state[i]["momentum_buffer"] for i, name in enumerate(names)}, momenta)
        assert noria.report(model).ledger_agrees


def refuses_ranks_out_of_step(rank: int, size: int, policy: dict[str, Any]) -> None:
    """One looks before the step, the other after it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2, **policy)
    loss_of(model, rank).backward()
    if rank == 1:
        optimizer.step()
    with pytest.raises(noria.UsageError, match="ranks that") as caught, torch.no_grad():
        loss_of(model, rank)
    for part in ("rank 0 ", "rank 1 ", "as wrap left it", "as step 1 left it"):
        assert part in str(caught.value), str(caught.value)


def refuses_another_backward_on_one_rank(rank: int, size: int, policy: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2, **policy)
    with pytest.raises(noria.UsageError, match="ranks that"):
        for number in range(3):
            loss_of(model, number).backward()
            if rank == 0 and number == 0:
                loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()


DIFFERENT: dict[str, Course] = {
    "a branch": Course(Branching),
    "a branch, drafts": Course(Branching, policy=DRAFTS),
    "a branch, all resident": Course(Branching, policy={}),
    "LayerDrop": Course(),
    "LayerDrop, updates in backward": Course(policy={"window": 2, "update": "backward"}),
    "an expert for each rank": Course(Experts),
    "gradients that end early": Course(Framed),
    "a look on rank 0": Course(Net, loop=loop_with_a_look_on_rank_0),
}


def refuses_other_modules(rank: int, size: int, name: str) -> None:
    """Units of equal size among them, whose bytes would mix without an error. No update is made of mixed bytes: what a
    rank keeps is what the last whole step left."""
    course = DIFFERENT[name]
    torch.manual_seed(0)
    plain, model = course.model(), course.model()
    model.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    optimizer, theirs = course.optimizer(model.parameters()), course.optimizer(plain.parameters())
    num_steps = 0
    with on_machine(hostility=course.hostility):
        noria.wrap(model, optimizer, device=DEVICE, **course.policy)

    def count(*_: Any) -> None:
        nonlocal num_steps
        num_steps += 1

    optimizer.register_step_post_hook(count)
    with pytest.raises(noria.UsageError, match="ranks that do the same") as caught:
        course.loop(model, optimizer, rank)
    assert "find_unused_parameters=True" in str(caught.value), str(caught.value)
    assert {"rank 0", "rank 1"} <= set(re.findall(r"rank \d", str(caught.value))), str(caught.value)
    if course.policy.get("update") == "backward" or course.loop is not plain_loop:
        return
    for number in range(num_steps):  # these were whole steps of all ranks
        loss_of(ddp, 100 * rank + number).backward()
        theirs.step()
        theirs.zero_grad()
    wrapped = wrapped_by(model)
    assert wrapped is not None
    with contextlib.suppress(noria.UsageError):  # once more
        wrapped.context.engine.idle()
    kept, expected = {}, {}
    values = dict(plain.named_parameters())
    for slot in wrapped.context.slots:  # of each, the shard of this rank
        kept[slot.name] = wrapped.context.home.working(slot)
        expected[slot.name] = slot.part_of(values[slot.name].detach())
    assert_same_bits(kept, expected)


def fail_in_backward_of(block: nn.Module) -> Any:
    """Until the handle is removed."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    return block.register_full_backward_pre_hook(fail)


def refuses_a_backward_that_raised_on_one_rank(
    rank: int, size: int, policy: dict[str, Any], places: tuple[int, int]
) -> None:
    """It has summed some of its gradients with those of the other rank, and goes on with another batch. `places`: of
    the block whose backward fails, by rank; -1: none does."""
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, **policy)
    with pytest.raises(noria.UsageError, match="a backward that raises on all ranks or on none"):
        for number in range(3):
            handle = fail_in_backward_of(model.blocks[places[rank]]) if number == 1 and places[rank] >= 0 else None
            try:
                loss_of(model, 10 * rank + number).backward()
                optimizer.step()
            except ZeroDivisionError:
                assert handle is not None
            if handle is not None:
                handle.remove()
            optimizer.zero_grad()


def goes_on_after_a_backward_that_raised_on_all_ranks(rank: int, size: int) -> None:
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(plain)
    theirs, ours = sgd(plain.parameters()), sgd(model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, device=DEVICE, window=2)
    for number in range(4):
        if number == 2:
            handle = fail_in_backward_of(model.blocks[1])
            with pytest.raises(ZeroDivisionError):
                loss_of(model, 7).backward()
            handle.remove()
            ours.zero_grad()
        for side, updater in ((ddp, theirs), (model, ours)):
            loss_of(side, 10 * rank + number).backward()
            updater.step()
            updater.zero_grad()
    assert_same_bits(dict(model.state_dict()), dict(plain.state_dict()))
    noria.unwrap(model, ours)


def two_optimizers(rank: int, size: int) -> None:
    """Fetches ahead begin between their steps."""
    torch.manual_seed(0)
    plain, model = Dropping(), Dropping()
    model.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    theirs, ours = ([sgd(side.head.parameters()), sgd(side.blocks.parameters())] for side in (plain, model))
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, ours, device=DEVICE, window=2, find_unused_parameters=True)
    for number in range(16):
        for side, updaters in ((ddp, theirs), (model, ours)):
            loss_of(side, 100 * rank + number).backward()
            for updater in updaters:
                updater.step()
            side.zero_grad()
    assert_same_bits(dict(model.state_dict()), dict(plain.state_dict()))
    noria.unwrap(model, ours)


def refuses_under_updates_in_backward(rank: int, size: int) -> None:
    """There a sum is used up before all have met."""
    torch.manual_seed(0)
    model = Experts()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2, update="backward", find_unused_parameters=True)
    with pytest.raises(Exception) as caught:
        for number in range(2):
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
    for part in ("ranks that do the same", 'reduce "own.', "rank 0", "rank 1"):
        assert part in str(caught.value), str(caught.value)


def on_more(rank: int, size: int, policy: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Of more than two terms the order is not DDP's: in doubles it is as good as any."""
    for make in (Dropping, Branching, Experts):
        torch.manual_seed(0)
        plain, model = make().double(), make().double()
        model.load_state_dict(plain.state_dict())
        theirs, ours = sgd(plain.parameters()), sgd(model.parameters())
        with on_machine(hostility=HOSTILE):
            mesh = init_device_mesh(DEVICE, shape)
            noria.wrap(model, ours, device=DEVICE, mesh=mesh, find_unused_parameters=True, **policy)
        for number in range(STEPS):
            for side in (plain, model):
                loss_of(side, 100 * rank + number).backward()
            share_gradients(plain, size)
            for updater in (theirs, ours):
                updater.step()
                updater.zero_grad()
        found, expected = dict(model.state_dict()), dict(plain.state_dict())
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8, check_device=False)
        weights = torch.cat([value.flatten() for value in found.values()])
        gathered = [torch.empty_like(weights) for _ in range(size)]
        dist.all_gather(gathered, weights)
        for its in gathered:
            assert_same_bits({"weights": its}, {"weights": weights})
        noria.unwrap(model, ours)


REPLICATED = {"LayerDrop": Dropping, "a branch": Branching}


def on_replicas(rank: int, size: int, make: Callable[[], nn.Module]) -> None:
    """Of whole models."""
    torch.manual_seed(0)
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    theirs, ours = sgd(plain.parameters()), sgd(model.parameters())
    mesh = init_device_mesh(DEVICE, (size, 1))
    noria.wrap(model, ours, device=DEVICE, window=2, mesh=mesh, find_unused_parameters=True)
    expected = plain_loop(ddp, theirs, rank) | plain.state_dict()
    assert_same_bits(plain_loop(model, ours, rank) | dict(model.state_dict()), dict(expected))
    noria.unwrap(model, ours)


# ---- tests ------------------------------------------------------------------------------------------------------

EITHER: dict[str, dict[str, Any]] = {"same modules": {}, "other modules": {"find_unused_parameters": True}}
RAISING: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "on one": ({"window": 2}, (1, -1)),
    "on one, other modules": ({"window": 2, "find_unused_parameters": True}, (1, -1)),
    "on one, drafts": (DRAFTS, (-1, 3)),
    "at two places": ({"window": 2}, (3, 0)),
}

OF_TWO: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    **{name: (like_ddp, (name,)) for name in COURSES},
    "clips": (clips, ({"window": 2},)),
    "clips, drafts": (clips, (DRAFTS,)),
    "narrow": (of_narrow_gradients, ()),
    **{f"out of step: {name}": (refuses_ranks_out_of_step, (policy,)) for name, policy in EITHER.items()},
    **{
        f"another backward: {name}": (refuses_another_backward_on_one_rank, (policy,))
        for name, policy in EITHER.items()
    },
    **{f"refuses {name}": (refuses_other_modules, (name,)) for name in DIFFERENT},
    "updates in backward": (refuses_under_updates_in_backward, ()),
    **{f"raises {name}": (refuses_a_backward_that_raised_on_one_rank, args) for name, args in RAISING.items()},
    "raises on all": (goes_on_after_a_backward_that_raised_on_all_ranks, ()),
    "two optimizers": (two_optimizers, ()),
    **{f"replicas: {name}": (on_replicas, (make,)) for name, make in REPLICATED.items()},
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    return in_turn_on_ranks(2, asked_for(request, OF_TWO))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COURSES)
def test_two_ranks_that_visit_different_units_have_the_bits_of_ddp(found, name):
    assert_fine(found, name)


@pytest.mark.parametrize("name", ["clips", "clips, drafts"])
def test_the_norm_counts_what_only_some_ranks_have(found, name):
    assert_fine(found, name)


def test_gradients_of_16_bits_that_only_some_ranks_have_are_summed_as_others_are(found):
    assert_fine(found, "narrow")


@pytest.mark.parametrize("name", EITHER)
def test_if_one_rank_has_stepped_and_the_other_has_not_both_are_told_both_steps(found, name):
    assert_fine(found, f"out of step: {name}")


@pytest.mark.parametrize("name", EITHER)
def test_a_backward_that_only_one_rank_makes_raises_on_all(found, name):
    assert_fine(found, f"another backward: {name}")


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_run_different_modules_all_raise_and_nothing_is_updated(found, name):
    assert_fine(found, f"refuses {name}")


@pytest.mark.parametrize("name", RAISING)
def test_a_backward_that_raises_on_one_rank_alone_raises_on_all_when_that_one_goes_on(found, name):
    assert_fine(found, f"raises {name}")


def test_a_batch_that_all_ranks_give_up_leaves_nothing(found):
    assert_fine(found, "raises on all")


def test_steps_of_two_optimizers_on_ranks_that_visit_different_units_have_the_bits_of_ddp(found):
    assert_fine(found, "two optimizers")


def test_updates_inside_backward_want_the_same_gradients_on_all_ranks(found):
    assert_fine(found, "updates in backward")


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_that_visit_different_units_sum_as_parts_do(found, name):
    assert_fine(found, f"replicas: {name}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("shape", "policy"), [((3,), {"window": 2}), ((2, 2), DRAFTS), ((2, 3), {"window": 2})])
def test_more_ranks_that_visit_different_units_have_the_sums_of_all(shape, policy):
    for failure in in_turn_on_ranks(math.prod(shape), {"": (on_more, (policy, shape))}).values():
        assert not failure, failure
