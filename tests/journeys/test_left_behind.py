"""What a wrap call has taken is gone when it is over: engines, lanes, memory of the home, hooks on the user's modules.
At once: Python's collector does not run in these tests, but where noria calls it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import noria
import pytest
import torch
from noria import _C
from torch import nn

from tests.device import DEVICE
from tests.journeys.pairs import Net, Side, adamw, loss_of, new_side, sgd, wrap_side

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.sampled(7)]


@pytest.fixture(autouse=True)
def living() -> Iterator[dict[str, int]]:
    """What there was before the test, of whose models nothing is left after it."""
    gc.collect()
    gc.disable()
    before = _C.living()
    yield before
    gc.enable()
    gc.collect()
    assert _C.living() == before


class Chain(nn.Module):
    """Outputs of its blocks are those of a module inside of them, which announces their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(4)))
        self.embed = nn.Embedding(23, 8)
        self.head = nn.Linear(8, 23)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def hooks_on(model: nn.Module) -> int:
    """How many there are on a model's modules, of all kinds."""
    kinds = [name for name in vars(model) if name.endswith("_hooks")]
    assert "_forward_hooks" in kinds and "_load_state_dict_post_hooks" in kinds
    return sum(len(vars(module)[kind]) for module in model.modules() for kind in kinds)


def steps(side: Side) -> None:
    side.kept.clear()
    side.train(0, 3)


def raises_in_forward(side: Side) -> None:
    steps(side)
    handle = side.model.blocks[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(side.model, 7)
    handle.remove()
    steps(side)


def raises_in_backward(side: Side) -> None:
    steps(side)
    handle = next(side.model.blocks[2].parameters()).register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(side.model, 7).backward()
    handle.remove()
    side.optimizer.zero_grad()
    steps(side)


def goes_forward_only(side: Side) -> None:
    steps(side)
    loss_of(side.model, 7)
    with torch.no_grad():
        loss_of(side.model, 8)


def clips(side: Side) -> None:
    for number in range(3):
        loss_of(side.model, number).backward()
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)
        side.optimizer.step()
        side.optimizer.zero_grad()


def looks(side: Side) -> None:
    steps(side)
    side.model.state_dict()
    side.optimizer.state_dict()
    with noria.materialize(side.model):
        side.model.embed.weight.data.mul_(0.9)
    noria.report(side.model)
    steps(side)


def loads(side: Side) -> None:
    steps(side)
    side.model.load_state_dict({name: value.clone() for name, value in side.model.state_dict().items()})
    side.optimizer.load_state_dict(side.optimizer.state_dict())
    steps(side)


def accumulates(side: Side) -> None:
    for number in range(2):
        with side.optimizer.accumulate():
            loss_of(side.model, number).backward()
        steps(side)


def does_nothing(side: Side) -> None:
    pass


JOURNEYS = [steps, raises_in_forward, raises_in_backward, goes_forward_only, looks, loads, accumulates, does_nothing]
POLICIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "torch": {"kernel": "torch"},
    "drafts": {"kernel": "fused", "draft_memory": "1MiB"},
    "blocking": {"update": "blocking"},
    "backward": {"update": "backward", "kernel": "fused"},
    "offload": {"activations": "offload"},
    "recompute": {"activations": "recompute"},
    "norm": {"max_grad_norm": 0.1},
    "8bit": {"kernel": "fused", "state_dtype": "8bit"},
    "operators": {"check": "operators"},
}


def again_and_again(
    side: Side, journey: Callable[[Side], None], policy: dict[str, Any], before: dict[str, int], turns: int = 3
) -> None:
    num_hooks = hooks_on(side.model)
    left: list[dict[str, int]] = []
    for _ in range(turns):
        wrap_side(side, **policy)
        journey(side)
        noria.unwrap(side.model, side.optimizer)
        assert hooks_on(side.model) == num_hooks
        left.append(_C.living())
        assert left[-1]["bridges"] == before["bridges"]
    assert left[1:] == left[:-1]  # what weights and state lie in


@pytest.mark.parametrize("journey", JOURNEYS, ids=lambda journey: journey.__name__)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_that_is_wrapped_again_has_left_nothing_behind(policy, journey, living):
    if policy == "backward" and journey is raises_in_backward:
        pytest.skip("the home is torn")
    again_and_again(new_side(), journey, {"window": 2, **POLICIES[policy]}, living)


@pytest.mark.parametrize("policy", POLICIES)
def test_hooks_inside_of_blocks_end_with_unwrap(policy, living):
    again_and_again(new_side(model=Chain), steps, POLICIES[policy], living)


def test_what_was_clipped_is_not_left_behind(living):
    for policy in ({}, {"kernel": "torch"}, {"draft_memory": "1MiB"}):
        again_and_again(new_side(optimizer=sgd), clips, policy, living)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_that_is_kept_keeps_one_graph(policy, living):
    side = new_side(model=Chain)
    kept: list[torch.Tensor] = []

    def keeps_a_loss(side: Side) -> None:
        steps(side)
        kept[:] = [loss_of(side.model, 5)]
        kept[0].backward()
        side.optimizer.step()
        side.optimizer.zero_grad()

    left = []
    for _ in range(4):
        wrap_side(side, **POLICIES[policy])
        keeps_a_loss(side)
        noria.unwrap(side.model, side.optimizer)
        left.append(_C.living())
        assert left[-1]["bridges"] == living["bridges"]
    assert left[1:] == left[:-1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("unwraps", [True, False])
def test_a_model_that_is_dropped_makes_room_for_the_next(policy, unwraps, living):
    """With `unwrap` at once, without it when the next one is wrapped."""
    left = []
    for _ in range(3):
        side = new_side()
        wrap_side(side, window=2, **POLICIES[policy])
        left.append(_C.living())
        steps(side)
        if unwraps:
            noria.unwrap(side.model, side.optimizer)
            assert _C.living()["bridges"] == living["bridges"]
        del side
        if unwraps:
            assert _C.living() == living
    assert left[1:] == left[:-1]


class BrokenError(Exception):
    pass


def test_a_wrap_that_fails_leaves_nothing_behind(monkeypatch, living):
    """At each of the calls that take something or move something."""

    def failing(name: str, owner: Any, number: int) -> Callable[..., Any]:
        own, calls = getattr(owner, name), itertools.count()

        def call(*args: Any, **fields: Any) -> Any:
            if next(calls) == number:
                raise BrokenError
            return own(*args, **fields)

        return call

    for name, owner, number in [
        ("make_host_backend" if DEVICE == "cpu" else "make_cuda_backend", _C, 0),
        ("HostOptimizer", _C, 0),
        ("Arena", _C, 0),
        ("Arena", _C, 2),
        ("TorchBridge", _C, 0),
    ]:
        model = Net()
        optimizer = adamw(model.parameters())
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing(name, owner, number))
            with pytest.raises(BrokenError):
                noria.wrap(model, optimizer, device=DEVICE, kernel="fused")
        assert hooks_on(model) == 0
        assert _C.living() == living
        noria.wrap(model, optimizer, device=DEVICE, kernel="fused")
        noria.unwrap(model, optimizer)
        del model, optimizer
        assert _C.living() == living
