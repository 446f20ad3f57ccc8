"""A call that raises or is interrupted half-way leaves the model and the optimizer as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import noria
import pytest
import torch
from noria import _C
from noria.runtime import weights
from noria.step import state_dict, whole_step
from noria.testing import assert_same_bits
from torch import nn

from tests.device import DEVICE
from tests.journeys.pairs import Net, adamw, loss_of, state_tensors


def made(optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, **policy: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Net(blocks=2)
    updater = optimizer(model.parameters())
    noria.wrap(model, updater, device=DEVICE, window=2, **policy)
    return model, updater


def steps(model: nn.Module, updater: Any, numbers: range) -> None:
    for number in numbers:
        loss_of(model, number).backward()
        updater.step()
        updater.zero_grad()


def go_on_alike(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    """Both have the bits of each other after two more steps."""
    for model, updater in (one, other):
        steps(model, updater, range(3, 5))
    assert_same_bits(one[0].state_dict(), other[0].state_dict())
    assert_same_bits(state_tensors(one[1]), state_tensors(other[1]))


def without_a_step(state: dict[str, Any]) -> None:
    del state["state"][3]["step"]


def without_values(state: dict[str, Any]) -> None:
    state["state"][3] = None


def of_sgd(state: dict[str, Any]) -> None:
    state["state"] = {number: {"momentum_buffer": each["exp_avg"]} for number, each in state["state"].items()}


@pytest.mark.parametrize("damage", [without_a_step, without_values, of_sgd])
@pytest.mark.parametrize("kernel", ["torch", "fused"])
def test_a_state_that_cannot_be_loaded_leaves_the_one_there_is(one_thread, kernel, damage):
    loaded, never = made(kernel=kernel), made(kernel=kernel)
    for each in (loaded, never):
        steps(*each, range(3))
    damaged = copy.deepcopy(loaded[1].state_dict())
    damaged["param_groups"][0]["lr"] = 5.0
    damage(damaged)
    parameters = loaded[1].param_groups[0]["params"]
    with pytest.raises((KeyError, TypeError, AttributeError, noria.UsageError)):
        loaded[1].load_state_dict(damaged)
    assert loaded[1].param_groups[0]["params"] is parameters and loaded[1].param_groups[0]["lr"] != 5.0
    go_on_alike(loaded, never)


def interrupted(act: Callable[..., Any], nth: int, *, before: bool = False) -> Callable[..., Any]:
    """Does what `act` does, and is interrupted behind the nth call, or before it."""
    count = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == nth and before:
            raise KeyboardInterrupt
        result = act(*args, **kwargs)
        if count[0] == nth:
            raise KeyboardInterrupt
        return result

    return call


@pytest.mark.parametrize("nth", [1, 2])
def test_an_interrupted_load_of_an_optimizer_leaves_the_state_there_is(one_thread, nth):
    loaded, never = made(kernel="torch"), made(kernel="torch")
    for each in (loaded, never):
        steps(*each, range(3))
    other = copy.deepcopy(loaded[1].state_dict())
    other["param_groups"][0]["lr"] = 5.0
    exchange = interrupted(state_dict.exchange, nth)
    with mock.patch.object(state_dict, "exchange", exchange), pytest.raises(KeyboardInterrupt):
        loaded[1].load_state_dict(other)
    go_on_alike(loaded, never)


def test_an_interrupted_step_of_a_whole_optimizer_gives_the_parameters_back(one_thread):
    model, updater = made(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1))

    def closure() -> torch.Tensor:
        updater.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    updater.step(closure)
    exchange = interrupted(whole_step.exchange, 2)
    with mock.patch.object(whole_step, "exchange", exchange), pytest.raises(KeyboardInterrupt):
        updater.step(closure)
    assert {id(p) for p in updater.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    before = copy.deepcopy(model.state_dict())
    updater.step(closure)
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    ("owner", "name"), [(weights, "await_device"), (_C.EngineHome, "open_home"), (_C.EngineHome, "bring_home")]
)
def test_an_interrupted_materialize_closes_the_home_again(one_thread, owner, name, nth):
    model, updater = made(kernel="torch", dtype=None)
    steps(model, updater, range(1))
    with mock.patch.object(owner, name, interrupted(getattr(owner, name), nth)), pytest.raises(KeyboardInterrupt):
        for _ in range(nth):
            with noria.materialize(model):
                pass
    steps(model, updater, range(1, 3))


@pytest.mark.parametrize("nth", [1, 3])
def test_an_interrupted_load_of_weights_closes_the_home_again(one_thread, nth):
    model, updater = made(kernel="torch", dtype=None)
    steps(model, updater, range(1))
    values = copy.deepcopy(model.state_dict())
    opened = interrupted(_C.EngineHome.open_home, nth)
    with mock.patch.object(_C.EngineHome, "open_home", opened), pytest.raises(KeyboardInterrupt):
        model.load_state_dict(values)
    steps(model, updater, range(1, 3))


class TakesNoHooks(nn.Linear):
    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no hooks here")


@pytest.mark.parametrize("make", [lambda: torch.jit.script(nn.Linear(4, 4)), lambda: TakesNoHooks(4, 4)])
def test_a_module_that_takes_no_hooks_is_refused_before_anything_is_changed(make):
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 4))
    before = copy.deepcopy({name: p.detach() for name, p in model.named_parameters()})
    with pytest.raises(noria.UsageError, match="modules that take forward hooks"):
        noria.wrap(model, device=DEVICE)
    assert_same_bits({name: p.detach() for name, p in model.named_parameters()}, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class TakesNoAttributes(torch.optim.SGD):
    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_noria"):
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_an_optimizer_that_takes_no_attribute_is_refused_before_anything_is_changed():
    model = Net(blocks=2)
    updater = TakesNoAttributes(model.parameters(), lr=0.1)
    with pytest.raises(noria.UsageError, match="an optimizer that takes an attribute"):
        noria.wrap(model, updater, device=DEVICE)
    loss_of(model, 0).backward()
    updater.step()


def test_a_wrap_that_fails_after_it_has_the_weights_gives_them_back():
    model = Net(blocks=2)
    updater = adamw(model.parameters())
    before = copy.deepcopy(model.state_dict())
    register = interrupted(nn.Module.register_forward_hook, 8, before=True)
    with mock.patch.object(nn.Module, "register_forward_hook", register), pytest.raises(KeyboardInterrupt):
        noria.wrap(model, updater, device=DEVICE)
    assert_same_bits(model.state_dict(), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    noria.wrap(model, updater, device=DEVICE, window=2)
    steps(model, updater, range(1))
