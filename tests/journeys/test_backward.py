"""update="backward": the bits of update="blocking", without held gradients; who breaks its promise hears of it."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import noria
import pytest
import torch
from noria import _C
from noria.host import machine
from noria.host.limits import Found, Limit
from noria.planning import wrap_plan
from noria.planning.wrap_plan import WrapPlan
from noria.testing import Machine, assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.device import DEVICE, NEEDS_FULL_HOST
from tests.journeys.pairs import (
    BLOCKS,
    HOSTILE,
    OPTIMIZERS,
    VOCAB,
    WIDTH,
    Block,
    Net,
    Side,
    adamw,
    both,
    loss_of,
    new_side,
    sgd,
    state_tensors,
    tokens,
    wrap_side,
)

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = OPTIMIZERS | {"momentum": lambda parameters: sgd(parameters, dampening=0.3)}
STEPS = 5


def plain(side: Side) -> None:
    side.train(0, STEPS)


def both_in_backward(journey=plain, **options) -> None:
    both(journey, update="backward", kernel="fused", window=options.pop("window", 3), **options)


def wrapped(optimizer=adamw, model=Net, **policy):
    torch.manual_seed(0)
    made = model()
    return noria.wrap(made, optimizer(made.parameters()), device=DEVICE, **{"update": "backward", **policy})


def train_on(model, optimizer, *numbers: int) -> None:
    """The plain loop, over these batches."""
    for number in numbers:
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_torn_until_loaded(model, optimizer, weights: dict[str, torch.Tensor]) -> None:
    """Weights of different steps are refused. Afterwards these are loaded, and a state that is new."""
    with pytest.raises(noria.UsageError, match="different steps"):
        model.state_dict()
    model.load_state_dict(weights)
    optimizer.load_state_dict(adamw(Net().parameters()).state_dict())


# ---- the same bits ----


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("optimizer", RULES)
def test_every_rule_and_format_has_the_bits_of_updates_inside_step(optimizer, dtype):
    both_in_backward(optimizer=RULES[optimizer], dtype=dtype)


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "lion"])
def test_moments_in_fewer_bits_are_rounded_as_inside_step(optimizer, state_dtype):
    both_in_backward(optimizer=RULES[optimizer], dtype=torch.bfloat16, state_dtype=state_dtype)


@pytest.mark.parametrize("late", ["update", "drain", "fetch"])
@pytest.mark.parametrize("window", [2, None])
def test_a_late_lane_or_pool_changes_nothing(window, late):
    both_in_backward(window=window, hostility={**HOSTILE, "hold_us": {late: 3_000}})


@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_accumulation_adds_up_and_updates_once(dtype, micro_batches):
    def journey(side: Side) -> None:
        for number in range(4):
            for micro in range(micro_batches):
                last = micro == micro_batches - 1
                with contextlib.nullcontext() if last else side.optimizer.accumulate():
                    loss = loss_of(side.model, 10 * number + micro)
                    loss.backward()
                side.keep(f"loss {number} {micro}", loss)
            side.optimizer.step()
            side.optimizer.zero_grad()

    both_in_backward(journey, dtype=dtype)


def test_gradients_that_are_cleared_while_accumulating_are_not_used():
    def journey(side: Side) -> None:
        for number in range(4):
            with side.optimizer.accumulate():
                loss_of(side.model, number).backward()
                if number % 2:
                    side.optimizer.zero_grad()
                else:
                    side.model.blocks[1].expand.weight.grad = None
            loss_of(side.model, 20 + number).backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    both_in_backward(journey)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Checkpointed(Net):
    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Reentrant(Checkpointed):
    reentrant = True


class Twice(Net):
    """The first block is used twice."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Frozen(Net):
    """As with adapters: what is frozen is needed by gradients that go on."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.expand.requires_grad_(False)
        self.embed.requires_grad_(False)


class Sometimes(Net):
    """Experts: which parameters of a block get a gradient changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.number = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.number += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.more[self.number % 3](x))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return x + self.choices[self.number % 3](x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Expert() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    forward = Net.forward


class Heads(nn.Module):
    """One unit. Each use needs another part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, VOCAB) for _ in range(2))

    def forward(self, x: torch.Tensor, part: int) -> torch.Tensor:
        return self.parts[part](x)


class Auxiliary(nn.Module):
    """A loss in the middle, which counts in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.heads = Heads()

    def through(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.blocks[0](x)
        early = self.heads(x, 0)
        for block in self.blocks[1:]:
            x = block(x)
        return early, self.heads(x, 1)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.through(self.embed(tokens))


class CheckpointedAuxiliary(Auxiliary):
    reentrant = False

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return checkpoint(self.through, self.embed(tokens), use_reentrant=self.reentrant)


class ReentrantAuxiliary(CheckpointedAuxiliary):
    reentrant = True


MODELS = {each.__name__: each for each in (Tied, Checkpointed, Reentrant, Twice, Frozen, Sometimes, Experts)}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_shape_have_the_same_bits(name):
    both_in_backward(
        model=MODELS[name], window=None if name in ("Sometimes", "Experts") else 3, moved=name != "Experts"
    )


@pytest.mark.parametrize("model", [Auxiliary, CheckpointedAuxiliary, ReentrantAuxiliary])
@pytest.mark.parametrize("counts", [(0, 1, 0, 0, 1, 1), (1, 1, 0, 1)])
def test_a_unit_is_updated_after_its_last_visit_though_the_loss_takes_another_way_now_and_then(model, counts):
    def journey(side: Side) -> None:
        for number, early_counts in enumerate(counts):
            early, late = side.model(tokens(number))
            (late.square().mean() + (early.square().mean() if early_counts else 0)).backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    both_in_backward(journey, model=model, units=[Block, Heads], window=None, moved=False)


def test_schedules_evaluations_and_closures_are_those_of_the_plain_loop():
    def journey(side: Side) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(side.optimizer, 0.7)
        for number in range(STEPS):
            side.step_by_closure(number)
            scheduler.step()
            with torch.no_grad():
                side.keep(f"eval {number}", loss_of(side.model, 50))
        side.optimizer.zero_grad()

    both_in_backward(journey)


def test_a_branch_that_is_left_out_keeps_its_state_as_it_is():
    def journey(side: Side) -> None:
        for number in range(6):
            x = side.model.embed(tokens(number))
            for block in side.model.blocks[: 2 + number % 3]:
                x = block(x)
            side.model.head(x).square().mean().backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    both_in_backward(journey, window=None, moved=False)


def test_a_run_goes_on_in_another_mode_from_its_checkpoint():
    def trained(update: str, steps: range, model: nn.Module, optimizer) -> None:
        noria.wrap(model, optimizer, device=DEVICE, update=update, dtype=torch.bfloat16)
        train_on(model, optimizer, *steps)

    def pair():
        torch.manual_seed(0)
        model = Net()
        return model, adamw(model.parameters())

    whole, first, second = pair(), pair(), pair()
    trained("blocking", range(6), *whole)
    trained("backward", range(3), *first)
    noria.wrap(*second, device=DEVICE, update="backward", dtype=torch.bfloat16)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    train_on(*second, 3, 4, 5)
    assert_same_bits(second[0].state_dict(), whole[0].state_dict())
    assert_same_bits(state_tensors(second[1]), state_tensors(whole[1]))
    noria.unwrap(*second)
    assert all(parameter.grad is None for parameter in second[0].parameters())
    assert_same_bits(second[0].state_dict(), whole[0].state_dict())


# ---- memory ----


def test_the_home_has_no_held_gradients_until_something_accumulates():
    model, optimizer = wrapped()
    rows = {row.purpose: row for row in noria.report(model).ledger}
    largest = max(unit.gradients for unit in wrapped_by(model).context.units)
    assert "held gradients" not in rows and rows["gradient ring"].taken == 4 * largest
    held = sum(unit.gradients for unit in wrapped_by(model).context.units)
    assert rows["gradient ring"].taken < held
    with optimizer.accumulate():
        loss_of(model, 0).backward()
    rows = {row.purpose: row for row in noria.report(model).ledger}
    assert "gradient ring" not in rows and rows["held gradients"].taken == rows["held gradients"].planned == held


def chain() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(24)))


@NEEDS_FULL_HOST
def test_the_ring_is_small_if_host_memory_is_short_and_the_bits_are_the_same():
    def planned(host_memory: Any) -> WrapPlan:
        model = chain()
        policy = {"device": DEVICE, "update": "backward", "host_memory": host_memory}
        return noria.plan(model, adamw(model.parameters()), **policy)

    large = planned("1GiB")
    assert large.ring is not None and large.ring.num_slots == 6
    slot, most = large.ring.slot_bytes, large.home_bytes
    for lack, num_slots in {0: 6, 1: 5, slot: 5, slot + 1: 4, 2 * slot: 4}.items():
        small = planned(most - lack)
        assert small.ring is not None and small.ring.num_slots == num_slots and small.home_bytes <= most - lack
    with pytest.raises(noria.UsageError, match=rf"host_memory of at least .*\({most - 2 * slot} bytes\)"):
        planned(most - 2 * slot - 1)

    def trained(host_memory: int) -> nn.Module:
        model, optimizer = wrapped(model=chain, host_memory=host_memory)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.full((4, 32), step + 1.0, device=DEVICE)).square().sum().backward()
            optimizer.step()
        return noria.unwrap(model, optimizer)[0]

    assert_same_bits(trained(most).state_dict(), trained(most - 2 * slot).state_dict())


def test_the_ring_counts_on_the_memory_that_weights_give_back(monkeypatch):
    model, leaving = chain(), 10_000  # less than the moments, which come later

    def num_slots(free: int, host_memory: Any = "auto") -> int:
        limit = Limit("MemAvailable", "/proc/meminfo", free, is_estimate=True)
        monkeypatch.setattr(wrap_plan, "probe_limits", lambda *_: Found("here", 1, None, (limit,), leaving))
        policy = {"device": "cpu", "update": "backward", "host_memory": host_memory}
        ring = noria.plan(model, adamw(model.parameters()), **policy).ring
        assert ring is not None
        return ring.num_slots

    most = noria.plan(model, adamw(model.parameters()), device="cpu", update="backward", host_memory="1GiB").home_bytes
    least = most - leaving + (256 << 20)  # the margin
    assert num_slots(least) == 6
    assert num_slots(least - 1) == 5
    assert num_slots(1, most) == 6  # what is free now is an estimate, and does not count against an explicit limit


@NEEDS_FULL_HOST
def test_accumulation_that_does_not_fit_host_memory_is_refused_before_anything_changes():
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model.parameters())
    home = noria.plan(model, optimizer, device=DEVICE, update="backward").home_bytes
    noria.wrap(model, optimizer, device=DEVICE, update="backward", host_memory=home)
    with pytest.raises(noria.UsageError, match="host_memory"), optimizer.accumulate():
        pass
    loss_of(model, 0).backward()
    optimizer.step()
    assert noria.report(model).ledger_agrees


# ---- promises that are broken ----


def test_a_gradient_that_is_gone_is_not_seen():
    model, optimizer = wrapped()
    loss_of(model, 0).backward()
    parameter = model.head.weight
    assert parameter.grad.shape == parameter.shape
    for look in (
        lambda: parameter.grad.sum(),
        lambda: parameter.grad.norm(3.0),
        lambda: parameter.grad.cpu().numpy(),
        lambda: parameter.grad.add_(0.5),
        lambda: optimizer.clip_grad_norm_(1.0),
    ):
        with pytest.raises(RuntimeError, match=r"update=.backward"):
            look()
    scaler = torch.amp.GradScaler(DEVICE)
    with pytest.raises(RuntimeError, match=r"update=.backward"):
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
    with pytest.raises(noria.UsageError, match="set_to_none"):
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    optimizer.zero_grad()
    assert parameter.grad is None


def test_a_scaler_passes_whose_scale_is_one():
    def journey(side: Side) -> None:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=1.0, growth_interval=1000)
        for number in range(3):
            scaler.scale(loss_of(side.model, number)).backward()
            if number == 1:
                scaler.unscale_(side.optimizer)
                side.keep("norm", torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1e6))
            scaler.step(side.optimizer)
            scaler.update()
            side.keep(f"scale {number}", scaler.get_scale())
            side.optimizer.zero_grad()

    both_in_backward(journey)


def test_a_scaler_is_refused_that_would_skip_an_update_that_is_made():
    model, optimizer = wrapped()
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1.0)
    scaler.scale(loss_of(model, 0) * float("inf")).backward()
    with pytest.raises(RuntimeError, match=r"update=.backward"):
        scaler.step(optimizer)


def clipped_steps(model, optimizer, max_norm: float, by=torch.nn.utils.clip_grad_norm_) -> list[torch.Tensor]:
    norms = []
    for number in range(4):
        loss_of(model, number).backward()
        norms.append(by(model.parameters(), max_norm).clone())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_torchs_clip_passes_where_it_does_not_bite(dtype, foreach):
    def journey(side: Side) -> None:
        def clip(parameters, max_norm):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=foreach)

        for number, norm in enumerate(clipped_steps(side.model, side.optimizer, 1e6, clip)):
            side.keep(f"norm {number}", norm)

    both_in_backward(journey, dtype=dtype)


def test_a_clip_that_bites_is_refused_by_the_step():
    model, optimizer = wrapped()
    loss_of(model, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert norm > 0.01
    with pytest.raises(noria.UsageError, match=r"clip that does not bite.*update=\"auto\""):
        optimizer.step()
    optimizer.zero_grad()
    train_on(model, optimizer, 1)


@pytest.mark.parametrize(
    "act",
    [
        lambda model, optimizer: loss_of(model, 1),
        lambda model, optimizer: model.blocks[0](torch.zeros(2, WIDTH)),
        lambda model, optimizer: model.state_dict(),
        lambda model, optimizer: optimizer.state_dict(),
        lambda model, optimizer: optimizer.state[model.head.weight],
        lambda model, optimizer: noria.materialize(model).__enter__(),
    ],
)
def test_between_backward_and_step_weights_are_not_shown_or_used(act):
    model, optimizer = wrapped()
    loss_of(model, 0).backward()
    with pytest.raises(noria.UsageError, match=r"step\(\) after each backward"):
        act(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    train_on(model, optimizer, 1)


def test_a_second_backward_before_the_step_is_refused():
    model, optimizer = wrapped()
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    with pytest.raises(noria.UsageError, match=r"accumulate\(\)"):
        loss.backward(retain_graph=True)
    with optimizer.accumulate(), pytest.raises(noria.UsageError, match=r"step\(\) after each backward"):
        loss.backward()


def test_a_gradient_that_was_used_up_and_not_cleared_is_not_accumulated_into():
    model, optimizer = wrapped()
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(noria.UsageError, match="zero_grad"):
        loss_of(model, 1).backward()
    optimizer.zero_grad()
    train_on(model, optimizer, 1)


def test_a_gradient_of_the_user_s_is_refused():
    model, _ = wrapped()
    loss = loss_of(model, 0)
    model.head.weight.grad = torch.ones_like(model.head.weight, device=DEVICE)
    with pytest.raises(noria.UsageError, match="of the user's own"):
        loss.backward()


def test_hyperparameters_that_change_between_backward_and_step_are_told():
    model, optimizer = wrapped()
    loss = loss_of(model, 0)
    optimizer.param_groups[0]["lr"] = 0.5  # in time
    loss.backward()
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(noria.UsageError, match="group 0 changed between"):
        optimizer.step()
    optimizer.zero_grad()
    train_on(model, optimizer, 1)  # the step has been counted


@pytest.mark.parametrize("change", [{"lr": None}, {"betas": (0.9,)}, {"weight_decay": "x"}, {"amsgrad": True}])
def test_hyperparameters_that_become_nonsense_are_told_before_the_update_or_counted_with_it(change):
    def steps(optimizer):
        return {float(values["step"]) for values in optimizer.state_dict()["state"].values()}

    model, optimizer = wrapped(model=lambda: Net(2))
    train_on(model, optimizer, 1)
    group = optimizer.param_groups[0]
    good = {key: group[key] for key in change}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    group.update(change)
    with pytest.raises(noria.UsageError, match=next(iter(change))):
        loss_of(model, 1).backward()
    assert_same_bits(model.state_dict(), before)
    assert steps(optimizer) == {1.0}
    group.update(good)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    group.update(change)
    with pytest.raises(noria.UsageError, match="group 0 changed between"):
        optimizer.step()
    group.update(good)
    assert steps(optimizer) == {2.0}
    assert not torch.equal(model.state_dict()["head.bias"], before["head.bias"])
    optimizer.zero_grad()
    train_on(model, optimizer, 2)
    assert steps(optimizer) == {3.0}


@pytest.mark.cpu_only("no device raises for an index out of range: it asserts, and is of no use after that")
def test_a_forward_that_raises_harms_nothing():
    model, optimizer = wrapped()
    train_on(model, optimizer, 0)
    with pytest.raises(IndexError):
        model(torch.full((2, 6), VOCAB))
    loss_of(model, 1).backward()
    optimizer.step()
    model.state_dict()


def cleared(model, optimizer):
    optimizer.zero_grad()


def taken_away(model, optimizer):
    model.head.weight.grad = None


def replaced(model, optimizer):
    model.head.weight.grad = torch.ones_like(model.head.weight, device=DEVICE)


def stepped(model, optimizer):
    optimizer.step()


@pytest.mark.parametrize("act", [cleared, taken_away, replaced, stepped])
def test_a_step_after_which_p_grad_says_something_else_than_what_was_updated_raises(act):
    model, optimizer = wrapped()
    loss_of(model, 0).backward()
    act(model, optimizer)
    with pytest.raises(noria.UsageError, match="as backward"):
        optimizer.step()
    optimizer.zero_grad()
    train_on(model, optimizer, 1)  # the updates were counted


def test_gradients_of_the_user_s_alone_are_not_passed_over():
    model, optimizer = wrapped()
    model.head.weight.grad = torch.ones_like(model.head.weight, device=DEVICE)
    with pytest.raises(noria.UsageError, match="as backward"):
        optimizer.step()


def test_what_was_only_accumulated_is_updated_at_step():
    def journey(side: Side) -> None:
        for number in range(4):
            for micro in range(2):
                with side.optimizer.accumulate(), side.optimizer.accumulate():  # blocks nest
                    loss_of(side.model, 10 * number + micro).backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    both_in_backward(journey)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_what_was_only_accumulated_can_be_clipped(num_micro_batches):
    def journey(side: Side) -> None:
        for number in range(4):
            with side.optimizer.accumulate():
                for micro in range(num_micro_batches):
                    loss_of(side.model, 10 * number + micro).backward()
            norm = torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1e-2)
            assert norm > 1e-2
            side.keep(f"norm {number}", norm)
            side.optimizer.step()
            side.optimizer.zero_grad()

    both_in_backward(journey)


def test_what_was_only_accumulated_is_clipped_for_all_optimizers_whichever_steps_first():
    found = []
    for update in ("backward", "blocking"):
        torch.manual_seed(0)
        model = Net()
        around = [*model.embed.parameters(), *model.head.parameters()]
        optimizers = [adamw(model.blocks.parameters()), sgd(around)]
        noria.wrap(model, optimizers, device=DEVICE, update=update, kernel="fused")
        for number in range(3):
            with contextlib.ExitStack() as stack:
                for each in optimizers:
                    stack.enter_context(each.accumulate())
                loss_of(model, number).backward()
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2) > 1e-2
            for each in optimizers:
                each.step()
            for each in optimizers:
                each.zero_grad()
        found.append(weights_of(model))
    assert_same_bits(*found)


def test_what_was_only_accumulated_is_handed_back_as_it_was_multiplied():
    handed_back = []
    for update in ("backward", "auto"):
        torch.manual_seed(0)
        model = Net()
        optimizer = adamw(model.parameters())
        noria.wrap(model, optimizer, device=DEVICE, update=update)
        with optimizer.accumulate():
            loss_of(model, 0).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.3)
        noria.unwrap(model, optimizer)
        handed_back.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_same_bits(*handed_back)


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_accumulated_and_cleared_is_not_used_by_a_step_that_comes_at_once(whole):
    def journey(side: Side) -> None:
        for number in range(4):
            with side.optimizer.accumulate():
                loss_of(side.model, number).backward()
            if number % 2 and whole:
                side.optimizer.zero_grad()
            elif number % 2:
                side.model.blocks[1].expand.weight.grad = None
            side.optimizer.step()
            side.optimizer.zero_grad()

    both_in_backward(journey)


def test_what_a_backward_that_raised_did_not_bring_home_is_not_used():
    model, optimizer = wrapped()
    with optimizer.accumulate():
        loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = weights_of(model)
    first = model.blocks[2].contract  # of its block; what follows it in backward raises
    handle = first.weight.register_hook(lambda gradient: 1 / 0)
    with optimizer.accumulate(), pytest.raises(ZeroDivisionError):
        loss_of(model, 1).backward()
    handle.remove()
    optimizer.step()
    assert_same_bits(model.state_dict(), before)


class TwiceOverTwo(nn.Module):
    """A block used twice; its losses are two."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Twice()

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.net(tokens)
        return out.square().mean(), out.mean()


def test_two_losses_of_one_forward_and_two_forwards_before_their_backwards():
    def journey(side: Side) -> None:
        for number in range(3):
            first, second = side.model(tokens(number))
            with side.optimizer.accumulate():
                first.backward(retain_graph=True)
            second.backward()
            side.optimizer.step()
            side.optimizer.zero_grad()
            losses = [side.model(tokens(10 + number + each))[0] for each in range(2)]
            with side.optimizer.accumulate():
                losses[0].backward()
            losses[1].backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    both_in_backward(journey, model=TwiceOverTwo, moved=False)


def test_hooks_that_see_p_grad_see_what_was_accumulated_however_late_it_lands():
    def journey(side: Side) -> None:
        seen = []
        side.model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for number in range(3):
            for micro in range(3):
                with side.optimizer.accumulate() if micro < 2 else contextlib.nullcontext():
                    loss_of(side.model, 10 * number + micro).backward()
            side.optimizer.step()
            side.optimizer.zero_grad()
        for number, each in enumerate(seen):
            side.keep(f"seen {number}", each)

    both_in_backward(journey, hostility={**HOSTILE, "hold_us": {"drain": 10_000}})


def test_a_part_of_the_model_whose_pass_is_open_may_be_the_first_to_accumulate():
    model, optimizer = wrapped()
    loss = model.blocks[1](torch.ones(2, WIDTH)).sum()
    with optimizer.accumulate():
        loss.backward()
    optimizer.step()
    assert noria.report(model).ledger_agrees


def test_empty_and_frozen_parameters_are_no_obstacle():
    class Hollow(Net):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(0, 4))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + self.nothing.sum()

    both_in_backward(model=Hollow)
    model = Net()
    optimizer = adamw(model.parameters())
    model.requires_grad_(False)
    noria.wrap(model, optimizer, device=DEVICE, update="backward")
    with torch.no_grad():
        loss_of(model, 0)
    optimizer.step()


@pytest.mark.parametrize("when", ["updated", "torn"])
def test_nothing_is_unwrapped_or_written_where_weights_are_not_those_of_one_step(when):
    model, optimizer = wrapped()
    saved = weights_of(model)
    if when == "updated":
        loss_of(model, 0).backward()
    else:
        model.embed.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, 0).backward()
    with pytest.raises(noria.UsageError, match=r"step\(\) after each|different steps"):
        noria.unwrap(model, optimizer)
    with pytest.raises(noria.UsageError, match=r"step\(\) after each|different steps"):
        noria.materialize(model).__enter__()
    if when == "updated":
        with pytest.raises(noria.UsageError, match=r"step\(\) after each"):
            model.load_state_dict(saved)
        with pytest.raises(noria.UsageError, match=r"step\(\) after each"):
            optimizer.load_state_dict(adamw(Net().parameters()).state_dict())
        optimizer.step()
    else:
        optimizer.load_state_dict(adamw(Net().parameters()).state_dict())  # in any order
        model.load_state_dict(saved)
    noria.unwrap(model, optimizer)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_unwrapping_keeps_what_was_accumulated():
    model, optimizer = wrapped()
    twin = copy.deepcopy(Net())
    twin.load_state_dict(model.state_dict())
    with optimizer.accumulate():
        loss_of(model, 0).backward()
    loss_of(twin, 0).backward()
    noria.unwrap(model, optimizer)
    assert_same_bits(
        {name: p.grad for name, p in model.named_parameters()}, {name: p.grad for name, p in twin.named_parameters()}
    )


def test_a_state_that_the_user_has_put_in_place_is_what_the_next_backward_updates():
    def journey(side: Side) -> None:
        side.train(0, 2)
        values = {key: dict(value) for key, value in side.optimizer.state.items()}
        for value in values.values():
            value["exp_avg"] = value["exp_avg"] * 0.5
        side.optimizer.state = values
        side.train(2, 4)

    both_in_backward(journey)


def test_a_parameter_that_has_left_the_optimizer_is_named_before_anything_is_updated():
    model, optimizer = wrapped()
    loss = loss_of(model, 0)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(noria.UsageError, match="which none holds any more"):
        loss.backward()


def test_a_step_without_a_backward_does_nothing():
    model, optimizer = wrapped()
    before = weights_of(model)
    optimizer.step()
    assert_same_bits(model.state_dict(), before)
    assert not optimizer.state


class Wild(Net):
    """A hook uses the head once more when its backward is over."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x.register_hook(lambda g: self.again(g))
        return self.head(x)

    def again(self, gradient: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            detached = gradient.detach().requires_grad_()
            self.head(detached).sum().backward()
        return gradient


def test_a_gradient_after_the_update_of_its_unit_raises_and_leaves_the_home_torn_until_it_is_loaded():
    model, optimizer = wrapped(model=Wild)
    saved = weights_of(model)
    with pytest.raises(noria.UsageError, match="as often in backward as in forward"):
        loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="different steps"):
        loss_of(model, 0)
    assert_torn_until_loaded(model, optimizer, saved)
    assert_same_bits(model.state_dict(), saved)


def test_a_backward_that_raises_after_updates_leaves_the_home_torn_until_all_is_loaded():
    model, optimizer = wrapped()
    train_on(model, optimizer, 0)
    saved = weights_of(model)
    state = copy.deepcopy(optimizer.state_dict())

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("a hook of the user's")

    handle = model.blocks[0].expand.weight.register_hook(fail)
    with pytest.raises(ValueError, match="a hook of the user's"):
        loss_of(model, 1).backward()
    handle.remove()
    with pytest.raises(RuntimeError, match="different steps"):
        loss_of(model, 1)
    with pytest.raises(RuntimeError, match="different steps"):
        optimizer.step()
    model.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="different steps"):
        loss_of(model, 1)
    optimizer.load_state_dict(copy.deepcopy(state))
    optimizer.zero_grad()

    twin = Net()
    twin.load_state_dict(saved)
    twin_optimizer = adamw(twin.parameters())
    twin_optimizer.load_state_dict(copy.deepcopy(state))  # torch keeps what it is given
    noria.wrap(twin, twin_optimizer, device=DEVICE, update="blocking")
    for each, its in ((model, optimizer), (twin, twin_optimizer)):
        train_on(each, its, 2)
    assert_same_bits(model.state_dict(), twin.state_dict())
    assert_same_bits(state_tensors(optimizer), state_tensors(twin_optimizer))


def test_a_backward_that_raises_before_any_update_harms_nothing():
    model, optimizer = wrapped()
    handle = model.head.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0).backward()
    handle.remove()
    train_on(model, optimizer, 0)


# ---- what cannot be updated inside backward ----


@pytest.mark.parametrize(
    ("optimizer", "policy", "found"),
    [
        (lambda ps: torch.optim.LBFGS(ps), {}, "LBFGS, which may look at all"),
        (lambda ps: adamw(list(ps)[:-1]), {}, "no optimizer holds"),
        (lambda ps: torch.optim.SGD([{"params": [p], "momentum": n % 2} for n, p in enumerate(ps)], lr=1), {}, "rules"),
        (adamw, {"max_grad_norm": 1.0}, "max_grad_norm"),
    ],
)
def test_what_cannot_be_updated_inside_backward_is_refused_by_name(optimizer, policy, found):
    model = Net()
    with pytest.raises(noria.UsageError, match=found):
        noria.wrap(model, optimizer(model.parameters()), device=DEVICE, update="backward", **policy)
    assert wrapped_by(model) is None


def test_a_unit_that_two_optimizers_share_is_refused_by_name():
    model = Net()
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    with pytest.raises(noria.UsageError, match=r"or another one than the rest of \"blocks\.0\""):
        noria.wrap(model, [adamw(weights), adamw(biases)], device=DEVICE, update="backward")
    assert wrapped_by(model) is None


def test_two_optimizers_update_their_own_units():
    def halves(model: nn.Module):
        early = [*model.embed.parameters(), *model.blocks[:2].parameters()]
        late = [p for p in model.parameters() if all(p is not q for q in early)]
        return [adamw(early), sgd(late)]

    sides = []
    for update in ("blocking", "backward"):
        torch.manual_seed(0)
        model = Net()
        optimizers = halves(model)
        with on_machine(hostility=HOSTILE):
            noria.wrap(model, optimizers, device=DEVICE, update=update)
        for number in range(4):
            loss_of(model, number).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        sides.append(
            {
                **model.state_dict(),
                **{f"{n}.{k}": v for n, o in enumerate(optimizers) for k, v in state_tensors(o).items()},
            }
        )
    assert_same_bits(*sides)


# ---- updates by torch, at once ----

BY_TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "momentum": sgd,
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "rate in a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
    **{
        name: functools.partial(getattr(torch.optim, name), lr=1e-2)
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor")
    },
    "groups": lambda parameters: torch.optim.RMSprop(
        [{"params": [each], "lr": 1e-3 * (number % 3 + 1)} for number, each in enumerate(parameters)]
    ),
}


@pytest.mark.parametrize("optimizer", BY_TORCH)
def test_optimizers_without_a_kernel_have_the_bits_of_plain_torch(optimizer):
    both(plain, update="backward", optimizer=BY_TORCH[optimizer], kernel="torch", window=3)


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_they_have_them_if_gradients_accumulate(micro_batches):
    def journey(side: Side) -> None:
        for number in range(STEPS):
            for part in range(micro_batches):
                accumulates = side.is_wrapped and part < micro_batches - 1
                with side.optimizer.accumulate() if accumulates else contextlib.nullcontext():
                    loss_of(side.model, 10 * number + part).backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey, update="backward", optimizer=BY_TORCH["RMSprop"], window=3)


@pytest.mark.parametrize("optimizer", ["adamw", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("name", MODELS)
def test_they_have_them_in_models_of_every_shape(name, optimizer):
    window = None if name in ("Sometimes", "Experts") else 3
    both(
        plain,
        update="backward",
        model=MODELS[name],
        optimizer=BY_TORCH[optimizer],
        kernel="torch",
        window=window,
        moved=name != "Experts",
    )


def test_they_update_masters():
    sides = [
        wrap_side(new_side(optimizer=BY_TORCH["RMSprop"]), window=3, dtype=torch.bfloat16, update=update)
        for update in ("backward", "blocking")
    ]
    for side in sides:
        plain(side)
    assert_same_bits(sides[0].kept, sides[1].kept)
    assert_same_bits(*(side.model.state_dict() for side in sides))
    assert_same_bits(*(state_tensors(side.optimizer) for side in sides))


def test_schedules_change_their_rate_between_steps_and_not_between_backward_and_step():
    def journey(side: Side) -> None:
        schedule = torch.optim.lr_scheduler.ExponentialLR(side.optimizer, 0.5)
        for number in range(STEPS):
            side.train(number, number + 1)
            schedule.step()

    both(journey, update="backward", optimizer=BY_TORCH["Adagrad"], window=3)
    model, optimizer = wrapped(optimizer=BY_TORCH["rate in a tensor"])
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    with pytest.raises(noria.UsageError, match="group 0 changed between"):
        optimizer.step()


class Repeating(Net):
    """Runs its first block a second time in vain. So its update waits for the end of the backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        self.blocks[0](self.embed(tokens))
        return logits


@pytest.mark.parametrize("last", [False, True])
def test_an_update_by_torch_that_raises_leaves_the_home_torn(monkeypatch, last):
    model, optimizer = wrapped(optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2), model=Repeating)
    saved = weights_of(model)
    functional = sys.modules["torch.optim.adagrad"]
    calls, own = itertools.count(), functional.adagrad
    broken = BLOCKS + 1 if last else 2

    def breaks(*args: Any, **kwargs: Any) -> None:
        if next(calls) == broken:
            raise ValueError("an update broke")
        own(*args, **kwargs)

    monkeypatch.setattr(functional, "adagrad", breaks)
    with pytest.raises(ValueError, match="an update broke"):
        loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="different steps"):
        loss_of(model, 0)
    with pytest.raises(noria.UsageError, match="different steps"):
        model.state_dict()
    model.load_state_dict(saved)
    optimizer.load_state_dict(torch.optim.Adagrad(Net().parameters()).state_dict())
    optimizer.zero_grad()
    train_on(model, optimizer, 1)


def test_each_unit_is_updated_before_the_backward_has_ended():
    """The home never holds the gradients of all units."""
    model, optimizer = wrapped(optimizer=BY_TORCH["RMSprop"])
    loss_of(model, 0).backward()
    assert wrapped_by(model).context.engine.backward.has_unclaimed
    assert not any("held gradients" in entry.purpose and entry.taken for entry in noria.report(model).ledger)
    optimizer.step()


# ---- updates that break off ----


@contextlib.contextmanager
def breakable(**settings: Any) -> Iterator[Callable[[], None]]:
    """As `on_machine`. Gives a function that makes the next update break off half-way, as if the machine had failed."""
    paces = []

    class Breakable(Machine):
        def pace(self) -> _C.SlowPace:
            paces.append(super().pace())
            return paces[-1]

    def break_next_update() -> None:
        for pace in paces:  # the pool asks one of them
            pace.break_next_update()

    with machine.on(Breakable(**settings)):
        yield break_next_update


@pytest.mark.parametrize("update", ["auto", "blocking", "backward"])
def test_an_update_that_breaks_off_reaches_the_caller_and_its_unit_is_known_as_torn(update):
    with breakable() as break_next_update:
        model, optimizer = wrapped(update=update, draft_memory=0)
    train_on(model, optimizer, 0)
    saved = weights_of(model)
    break_next_update()
    with pytest.raises(RuntimeError, match="told to break off"):
        train_on(model, optimizer, 1, 2, 3)
    said: list[str] = []  # other calls that wait for it raise it too, each once, before or after weights are refused
    refused = re.compile(r"different steps.*told to break off")
    while [refused.search(each) is not None for each in said[-3:]] != [True] * 3:
        assert len(said) < 20, said
        with pytest.raises(RuntimeError, match="told to break off") as raised:
            train_on(model, optimizer, 4)
        said.append(str(raised.value))
    assert_torn_until_loaded(model, optimizer, saved)
    optimizer.zero_grad()
    train_on(model, optimizer, 5)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@pytest.mark.parametrize("broken", ["draft", "undo", "redo"])
def test_a_draft_that_breaks_off_is_known_as_torn_and_so_is_one_whose_undo_or_redo_breaks_off(broken):
    with breakable() as break_next_update:
        model, optimizer = wrapped(update="auto", draft_memory="64MiB")
    train_on(model, optimizer, *range(3))
    saved = weights_of(model)
    if broken == "draft":
        break_next_update()
    loss_of(model, 3).backward()
    with contextlib.suppress(RuntimeError):
        wrapped_by(model).context.engine.idle()
    if broken != "draft":
        break_next_update()
    with contextlib.suppress(RuntimeError):  # the first call that waits for it raises
        if broken == "undo":
            weights_of(model)
        for group in optimizer.param_groups if broken == "redo" else ():
            group["lr"] *= 0.5
        optimizer.step()
        wrapped_by(model).context.engine.idle()
    optimizer.zero_grad()
    for _ in range(8):
        with pytest.raises(RuntimeError, match="told to break off"):
            train_on(model, optimizer, 4)
    assert_torn_until_loaded(model, optimizer, saved)
    optimizer.zero_grad()
    train_on(model, optimizer, 5)
