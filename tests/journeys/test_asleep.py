"""noria.asleep: the device has the window's memory meanwhile, and training goes on with the same bits."""

from __future__ import annotations

import contextlib
from typing import Any

import noria
import pytest
import torch
from noria.runtime import sleep
from noria.runtime.context import Context
from noria.testing import assert_same_bits
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE, IS_PRETEND
from tests.journeys.pairs import Net, Side, adamw, both, loss_of, new_side, sgd, wrap_side
from tests.ranks import assert_fine, in_turn_on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "blocking": {"update": "blocking"},
    "fused": {"kernel": "fused"},
    "drafts": {"kernel": "fused", "draft_memory": "64MiB"},
    "offload": {"activations": "offload"},
    "recompute": {"activations": "recompute"},
    "home": {"reads": "home"},
    "device": {"optimizer_device": "device"},
    "masters": {"kernel": "fused", "dtype": torch.bfloat16},
}


def device_bytes(model: nn.Module) -> int:
    return int(wrapped_by(model).context.backend.allocated)


def free_bytes() -> int:
    """Of the device, as its driver tells."""
    return torch.cuda.mem_get_info()[0] if IS_PRETEND else 0


@contextlib.contextmanager
def maybe_asleep(side: Side) -> Any:
    """And noria gives at least 95 % of its device memory back."""
    if not side.is_wrapped:
        yield
        return
    before, free = device_bytes(side.model), free_bytes()
    assert before > 0 and noria.report(side.model).ledger_agrees
    with noria.asleep(side.model):
        assert device_bytes(side.model) <= 0.05 * before
        assert not IS_PRETEND or free_bytes() - free >= 0.95 * before  # a GPU's driver counts in steps of 2 MiB
        assert noria.report(side.model).ledger_agrees
        yield
    assert device_bytes(side.model) == before and noria.report(side.model).ledger_agrees


def rests(side: Side) -> None:
    """After `wrap`, after a step, between forward and backward, and between micro-batches."""
    with maybe_asleep(side):
        pass
    for number in range(4):
        loss = loss_of(side.model, number)
        if number == 1:
            with maybe_asleep(side):
                pass
        loss.backward()
        if number == 2:
            with maybe_asleep(side):
                pass
            loss_of(side.model, 20).backward()
        side.keep_gradients(f"step {number}")
        side.optimizer.step()
        with maybe_asleep(side):
            side.keep(f"head {number}", side.model.state_dict()["head.weight"].to(DEVICE))
        side.optimizer.zero_grad()
        side.keep(f"loss {number}", loss)


@pytest.mark.parametrize("policy", POLICIES)
def test_bits_are_those_of_a_model_that_never_sleeps(policy):
    both(rests, **POLICIES[policy])


def test_under_update_in_backward():
    """Also between its backward and its step."""
    sides = [wrap_side(new_side(), window=3, kernel="fused", update="backward") for _ in range(2)]
    for side in sides:
        for number in range(4):
            loss_of(side.model, number).backward()
            with maybe_asleep(side) if side is sides[0] and number % 2 else contextlib.nullcontext():
                pass
            side.optimizer.step()
            with maybe_asleep(side) if side is sides[0] else contextlib.nullcontext():
                pass
            side.optimizer.zero_grad()
    assert_same_bits(*(side.model.state_dict() for side in sides))


def test_what_is_written_and_loaded_inside_is_trained_with(tmp_path):
    def journey(side: Side) -> None:
        side.train(0, 2)
        with maybe_asleep(side):
            state = {name: value.clone() for name, value in side.model.state_dict().items()}
            state["head.bias"].fill_(0.5)
            side.model.load_state_dict(state)
            if side.is_wrapped:
                noria.save(tmp_path / "inside.pt", side.model, side.optimizer)
                assert_same_bits(dict(noria.weights(side.model)), side.model.state_dict())
        side.train(2, 4)

    both(journey)
    side = wrap_side(new_side(), window=2, kernel="torch")
    noria.load(tmp_path / "inside.pt", side.model, side.optimizer)
    assert (side.model.state_dict()["head.bias"] == 0.5).all()


@pytest.mark.parametrize(
    ("call", "act"),
    [
        ("a forward", lambda side: loss_of(side.model, 0)),
        ("a pass", lambda side: side.model.blocks[0](torch.zeros(2, 16))),
        ("optimizer.step", lambda side: side.optimizer.step()),
        ("noria.unwrap", lambda side: noria.unwrap(side.model, side.optimizer)),
        ("noria.asleep", lambda side: noria.asleep(side.model).__enter__()),
    ],
)
def test_what_needs_the_memory_is_refused_inside_and_training_goes_on(call, act):
    def journey(side: Side) -> None:
        side.train(0, 2)
        with maybe_asleep(side):
            if side.is_wrapped:
                with pytest.raises(noria.UsageError, match=rf"found {call}.*inside of `with noria\.asleep"):
                    act(side)
        side.train(2, 4)

    both(journey)


def test_it_is_refused_inside_of_passes_and_blocks():
    model = Net()
    with pytest.raises(noria.UsageError, match="wrapped"), noria.asleep(model):
        pass
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2)

    def refused(*_: object) -> None:
        with pytest.raises(noria.UsageError, match=r"noria\.asleep between passes"), noria.asleep(model):
            pass

    handle = model.blocks[0].register_forward_hook(refused)
    loss = loss_of(model, 0)
    handle.remove()
    handle = model.head.bias.register_hook(refused)
    loss.backward()
    handle.remove()
    with noria.materialize(model):
        refused()
    optimizer.step()


def test_an_exception_inside_wakes_it():
    side = wrap_side(new_side(), window=2)
    with pytest.raises(KeyboardInterrupt), noria.asleep(side.model):
        raise KeyboardInterrupt
    side.train(0, 1)


def test_without_room_behind_the_block_nothing_is_lost_and_the_next_pass_tries_again(monkeypatch):
    sides = [wrap_side(new_side(optimizer=sgd), window=2, kernel="torch") for _ in range(2)]
    for side in sides:
        side.train(0, 2)
    takes, is_full = sleep.take_window, True

    def take(context: Context) -> None:
        if is_full:
            raise noria.MachineError("no room")
        takes(context)

    monkeypatch.setattr(sleep, "take_window", take)
    with pytest.raises(noria.MachineError, match="no room"), noria.asleep(sides[0].model):
        pass
    for act in (lambda: loss_of(sides[0].model, 2), sides[0].optimizer.step):
        with pytest.raises(noria.MachineError, match="no room"):
            act()
    with pytest.raises(noria.UsageError, match=r"found a pass .*without room"):
        sides[0].model.blocks[0](torch.zeros(2, 16))
    assert noria.report(sides[0].model).ledger_agrees
    sides[0].model.state_dict()
    is_full = False
    for side in sides:
        side.train(2, 4)
    assert_same_bits(sides[0].kept, sides[1].kept)
    assert_same_bits(*(side.model.state_dict() for side in sides))


def sleeps_on_ranks(rank: int, size: int) -> None:
    models = []
    for sleeps in (False, True):
        side = wrap_side(new_side(optimizer=sgd), window=2, kernel="torch")
        for number in range(3):
            side.train(number, number + 1)
            with noria.asleep(side.model) if sleeps else contextlib.nullcontext():
                pass
        models.append({name: value.cpu() for name, value in side.model.state_dict().items()})
    assert_same_bits(*models)


@pytest.fixture(scope="module")
def on_two_ranks():
    return in_turn_on_ranks(2, {"sleeps": (sleeps_on_ranks, ())})


def test_ranks_that_share_a_model_sleep_together(on_two_ranks):
    assert_fine(on_two_ranks, "sleeps")
