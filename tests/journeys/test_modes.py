"""An update runs when its unit is needed, which may be inside of anything: autocast, inference mode, modes of the
user's. It computes what it would have computed inside `step()`, and what it leaves is ordinary.
"""

from __future__ import annotations

import contextlib
import copy

import noria
import pytest
import torch
from noria.testing import assert_same_bits, first_difference
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import DEVICE
from tests.journeys.pairs import (
    Net,
    adamw,
    assert_moved,
    both,
    loss_of,
    new_side,
    sgd,
    state_tensors,
    wrap_side,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=0.1)


def muon(parameters):
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.1)


def one_step(side, number, around=contextlib.nullcontext):
    with around():
        loss = loss_of(side.model, number)
    loss.backward()
    side.optimizer.step()
    side.optimizer.zero_grad()
    side.keep(f"loss {len(side.kept)}", loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", [adafactor, muon, adamw])
def test_an_update_that_runs_inside_an_autocast_forward_is_not_cast(optimizer, dtype):
    def journey(side):
        for step in range(4):
            one_step(side, step, lambda: torch.autocast(DEVICE, dtype))

    both(journey, optimizer=optimizer)


def stepped_on_the_cpu(optimizer, around):
    """The weights and the optimizer's state of plain PyTorch, whose gradients come from the device."""
    side = new_side(optimizer=optimizer)
    home = copy.deepcopy(side.model).cpu()
    updates = optimizer(home.parameters())
    for number in range(4):
        loss_of(side.model, number).backward()
        for there, here in zip(side.model.parameters(), home.parameters(), strict=True):
            here.grad, there.grad = there.grad.cpu(), None
        with around:
            updates.step()
        side.model.load_state_dict(home.state_dict())
    return {**home.state_dict(), **state_tensors(updates)}


@pytest.mark.parametrize(  # Muon multiplies in bfloat16 anyway
    ("optimizer", "dtype"), [(adafactor, torch.bfloat16), (adafactor, torch.float16), (muon, torch.float16)]
)
def test_an_update_of_a_step_inside_autocast_of_the_device_is_cast_as_by_autocast_of_the_cpu(optimizer, dtype):
    side = wrap_side(new_side(optimizer=optimizer), kernel="torch", window=2)
    for number in range(4):
        loss_of(side.model, number).backward()
        with torch.autocast(DEVICE, dtype):
            side.optimizer.step()
        side.model.zero_grad()
    found = {**side.model.state_dict(), **state_tensors(side.optimizer)}
    cast = stepped_on_the_cpu(optimizer, torch.autocast("cpu", dtype))
    assert_same_bits(found, cast)
    uncast = stepped_on_the_cpu(optimizer, contextlib.nullcontext())
    assert first_difference(list(cast.values()), [uncast[name] for name in cast], list(cast)) is not None
    assert_moved(side.model)


@pytest.mark.parametrize("kernel", ["torch", "fused"])
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_a_first_update_that_runs_in_inference_mode_leaves_ordinary_state(optimizer, kernel):
    def journey(side):
        one_step(side, 0)
        with torch.inference_mode():
            side.keep("validated", loss_of(side.model, 50))
        for step in range(1, 4):
            one_step(side, step)

    both(journey, optimizer=optimizer, kernel=kernel)


def look_at_state(side):
    side.optimizer.state_dict()
    side.keep("weights seen", side.model.state_dict()["head.weight"])


def edit_weights(side):
    with noria.materialize(side.model) if side.is_wrapped else contextlib.nullcontext():
        side.model.head.weight.mul_(1.5)


def wrap_again(side):
    if side.is_wrapped:
        noria.unwrap(side.model, side.optimizer)
        noria.wrap(side.model, side.optimizer, device=DEVICE, window=2, kernel="torch")


@pytest.mark.parametrize("do", [look_at_state, edit_weights, wrap_again])
def test_what_noria_makes_in_inference_mode_is_of_use_outside(do):
    def journey(side):
        one_step(side, 0)
        with torch.inference_mode():
            do(side)
        for step in range(1, 4):
            one_step(side, step)

    both(journey)


def test_modes_of_the_user_see_their_own_operators_and_no_others():
    class Functions(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def seen_by(is_wrapped):
        torch.manual_seed(0)
        model = Net()
        optimizer = adamw(model.parameters())
        if is_wrapped:
            noria.wrap(model, optimizer, device=DEVICE, window=2)
        for step in range(2):  # passes are known, so that no operator is watched
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, 5)
        loss_of(model, 2).backward()
        optimizer.step()
        with Functions() as functions, Operators() as operators, torch.no_grad():
            loss_of(model, 3)
        return [name for name in functions.seen if not name.startswith("__")], operators.seen

    ours, plain = seen_by(True), seen_by(False)
    assert ours == plain
