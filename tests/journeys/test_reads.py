"""reads="home": from `wrap` and each `step()` until the next forward, parameters read and write as in plain PyTorch."""

from __future__ import annotations

import copy
import functools
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.device import DEVICE
from tests.journeys.pairs import OPTIMIZERS, Net, Side, adamw, both, loss_of, new_side, sgd, state_tensors, wrap_side

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4
POLICIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "blocking": {"update": "blocking"},
    "drafts": {"kernel": "fused", "draft_memory": "64MiB"},
    "backward": {"kernel": "fused", "update": "backward", "window": 3},
    "offload": {"activations": "offload"},
}


def train_and(look: Any, side: Side, steps: int = STEPS) -> None:
    for number in range(steps):
        loss = loss_of(side.model, number)
        loss.backward()
        side.keep(f"loss {number}", loss)
        side.optimizer.step()
        side.optimizer.zero_grad()
        look(side, number)


def reads(side: Side, number: int) -> None:
    weights = dict(side.model.named_parameters())
    side.keep(f"norm {number}", torch.stack([each.norm() for each in weights.values()]).norm())
    side.keep(f"head {number}", weights["head.weight"])
    assert weights["head.weight"].device.type == DEVICE
    assert repr(weights["head.bias"]).startswith("Parameter containing")


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_are_read_between_steps(policy):
    if POLICIES[policy].get("kernel") != "fused":
        both(functools.partial(train_and, reads), reads="home", **POLICIES[policy])
        return
    sides = [wrap_side(new_side(), window=3, kernel="fused"), wrap_side(new_side(), reads="home", **POLICIES[policy])]
    train_and(lambda side, number: None, sides[0])
    train_and(reads, sides[1])
    assert_same_bits(sides[1].model.state_dict(), sides[0].model.state_dict())
    last = dict(sides[1].model.named_parameters())
    assert_same_bits(last, {name: each.to(DEVICE) for name, each in sides[0].model.state_dict().items()})


def test_they_are_read_after_wrap_and_a_forward_ends_that():
    side = wrap_side(new_side(), window=2, reads="home")
    assert_same_bits(dict(side.model.named_parameters()), dict(new_side().model.to(DEVICE).named_parameters()))
    loss_of(side.model, 0)
    with pytest.raises(RuntimeError, match='reads=\\"home\\"'):
        side.model.blocks[0].expand.weight.sum().item()


def writes(side: Side, number: int) -> None:
    blocks = side.model.blocks
    with torch.no_grad():
        blocks[number].expand.weight.mul_(0.5)
        blocks[0].norm.weight.add_(0.1)
        side.model.head.bias.copy_(torch.arange(side.model.head.bias.numel()))
    side.model.embed.weight.data[number] = 0.25
    blocks[1].contract.bias.data = torch.full_like(blocks[1].contract.bias, float(number))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_writes_between_steps_are_trained_with(optimizer):
    both(functools.partial(train_and, writes), optimizer=OPTIMIZERS[optimizer], kernel="torch", reads="home")


@pytest.mark.parametrize("kernel", ["fused", "torch"])
def test_writes_reach_the_masters(kernel):
    """As those to a state dict's tensors do."""
    policy: dict[str, Any] = {"window": 2, "kernel": kernel, "dtype": torch.bfloat16}
    sides = [wrap_side(new_side(), reads=reads, **policy) for reads in ("home", "passes")]

    def double(side: Side, number: int) -> None:
        with torch.no_grad():
            side.model.blocks[number].expand.weight.mul_(2)

    def double_in_state_dict(side: Side, number: int) -> None:
        side.model.state_dict()[f"blocks.{number}.expand.weight"].mul_(2)

    train_and(double, sides[0])
    train_and(double_in_state_dict, sides[1])
    assert_same_bits(sides[0].kept, sides[1].kept)
    assert_same_bits(*(side.model.state_dict() for side in sides))
    assert_same_bits(*(state_tensors(side.optimizer) for side in sides))


def copies(side: Side, number: int) -> None:
    """Of the model, of a module inside, and of a tree that has it."""
    copied = copy.deepcopy(side.model)
    inner, around = copy.deepcopy(side.model.blocks[1]), copy.deepcopy(nn.ModuleDict({"inside": side.model}))
    for name, module in {"all": copied, "inner": inner, "around": around}.items():
        assert not noria.is_wrapped(module) and not any("__deepcopy__" in vars(each) for each in module.modules())
        for key, value in module.state_dict().items():
            assert value.device.type == "cpu" or not side.is_wrapped
            side.keep(f"{number}, {name}, {key}", value.cpu())
    again = copy.deepcopy(copied).to(DEVICE)
    side.keep(f"{number}, loss of the copy", loss_of(again, number))
    with torch.no_grad():
        copied.head.weight.zero_()  # it has memory of its own


@pytest.mark.parametrize("reads", ["home", "passes"])
@pytest.mark.parametrize("policy", ["auto", "blocking", "offload"])
def test_deep_copies_are_plain_models_on_the_cpu(policy, reads):
    both(functools.partial(train_and, copies), reads=reads, **POLICIES[policy])


def test_deep_copies_share_what_their_model_shares():
    model = Net()
    model.head.weight = model.embed.weight
    model.register_buffer("count", torch.ones(3))
    noria.wrap(model, device=DEVICE, window=2)
    copied, again = copy.deepcopy([model, model])
    assert copied is again and copied.head.weight is copied.embed.weight and copied.count.device.type == "cpu"
    assert copied.head.weight.requires_grad == model.head.weight.requires_grad


def test_a_deep_copy_is_refused_inside_of_a_forward_and_made_inside_of_materialize():
    side = wrap_side(new_side(), window=2)

    def refused(*_: object) -> None:
        with pytest.raises(noria.UsageError, match=r"copy\.deepcopy between passes"):
            copy.deepcopy(side.model)

    handle = side.model.blocks[1].register_forward_hook(refused)
    loss_of(side.model, 0)
    handle.remove()
    with noria.materialize(side.model), torch.no_grad():
        side.model.head.weight.fill_(2)
        copied = copy.deepcopy(side.model)
    assert (copied.head.weight == 2).all() and copied.head.weight.device.type == "cpu"


def test_averages_of_swa_utils_have_their_bits():
    def journey(side: Side) -> None:
        average = AveragedModel(side.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        train_and(lambda side, number: average.update_parameters(side.model), side)
        for name, value in average.module.state_dict().items():
            side.keep(f"average of {name}", value)

    both(journey, reads="home")


def test_a_reference_model_follows_as_in_trl():
    def journey(side: Side) -> None:
        reference = copy.deepcopy(side.model).requires_grad_(False).to(DEVICE)  # noria's copies are on the CPU

        def follow(side: Side, number: int) -> None:
            for target, source in zip(reference.parameters(), side.model.parameters(), strict=True):
                target.data.mul_(1.0 - 0.6).add_(source.data, alpha=0.6)

        train_and(follow, side)
        side.keep("reference", nn.utils.parameters_to_vector(reference.parameters()))

    both(journey, reads="home")


def test_all_else_between_steps_goes_on():
    """A state dict, a block of materialize, a block that is called by itself, evaluation, loads."""

    def journey(side: Side) -> None:
        def look(side: Side, number: int) -> None:
            reads(side, number)
            state = {name: value.clone() for name, value in side.model.state_dict().items()}
            with torch.no_grad():
                side.model.head.weight.add_(1)
            if side.is_wrapped:
                with noria.materialize(side.model.blocks[0]), torch.no_grad():
                    side.model.blocks[0].expand.bias.add_(1)
                assert side.model.blocks[0].expand.bias.isfinite().all()
            side.model.load_state_dict(state)
            side.keep(f"loaded {number}", side.model.head.weight)
            with torch.no_grad():
                side.keep(f"evaluated {number}", loss_of(side.model, 50))
                side.keep(f"block {number}", side.model.blocks[1](torch.ones(2, 16, device=DEVICE)))
            side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))

        train_and(look, side)

    both(journey, reads="home")


def test_several_steps_and_optimizers_between_forwards():
    def journey(side: Side) -> None:
        for number in range(STEPS):
            loss_of(side.model, number).backward()
            side.optimizer.step()
            reads(side, 10 + number)
            side.optimizer.step()
            reads(side, 20 + number)
            nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)
            side.optimizer.zero_grad()

    both(journey, optimizer=sgd, reads="home")


def test_unwrap_takes_writes_over():
    side = wrap_side(new_side(), window=2, reads="home")
    with torch.no_grad():
        side.model.head.weight.fill_(3)
    noria.unwrap(side.model, side.optimizer)
    assert side.model.head.weight.eq(3).all()


def test_a_step_that_raises_leaves_them_as_they_are_told():
    side = wrap_side(new_side(), window=2, kernel="torch", reads="home")
    loss_of(side.model, 0).backward()
    with pytest.raises(ValueError, match="mine"):
        side.optimizer.step(lambda: (_ for _ in ()).throw(ValueError("mine")))
    loss_of(side.model, 1).backward()
    side.optimizer.step()
    assert side.model.head.weight.isfinite().all()


def test_other_words_are_refused():
    model = Net()
    with pytest.raises(noria.UsageError, match="reads"):
        noria.wrap(model, adamw(model.parameters()), reads="always")


def test_weights_are_read_after_a_step_that_finds_infinities():
    """A scaler leaves it to step() to skip the update, if noria's kernels unscale. Else it does not call step()."""

    def journey(side: Side) -> None:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
        for number in range(STEPS):
            loss = loss_of(side.model, number) * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(side.optimizer)
            scaler.update()
            side.optimizer.zero_grad()
            reads(side, number)

    both(journey, optimizer=sgd, kernel="fused", reads="home")
