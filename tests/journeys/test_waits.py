"""Waits matter to real models too: left out, with its giver late, a kind of wait changes a training run; kept, it does
not. Here the calling thread computes, so only what the lanes and the pool give can be late; every kind, and an
asynchronous compute lane, are the business of tests/python/engine/test_engine_waits.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
from noria.testing import first_difference, omit_wait, on_machine
from noria.wrapped import wrapped_by
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.device import DEVICE
from tests.journeys.pairs import VOCAB, WIDTH, Block, Net, adamw, loss_of

pytestmark = pytest.mark.usefixtures("one_thread")

Kept = dict[str, torch.Tensor]


class Again(nn.Module):
    """A block that is used twice, a frozen one between, recomputed by reentrant checkpoints: autograd hands over the
    gradient of each use by itself, and the second is added to what the first has brought home, and is fetched again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index in (0, 1, 0):
            x = checkpoint(self.blocks[index], x, use_reentrant=True)
        return self.head(x)


def train(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(3):
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept[f"loss {number}"] = loss.detach()


def train_and_clip(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(3):
        loss = loss_of(model, number)
        loss.backward()
        kept[f"norm {number}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def train_and_edit_gradients_after_the_step(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(2):
        loss_of(model, number).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.add_(0.5)


def train_and_read_gradients(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(2):
        loss_of(model, number).backward()
        for name, parameter in model.named_parameters():
            kept[f"gradient {number}: {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()


def train_and_look(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(2):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in model.state_dict().items():
            kept[f"step {number}: {name}"] = value.clone()


def train_and_edit(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(2):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        with noria.materialize(model.embed), torch.no_grad():  # its next fetch was queued at the step
            model.embed.weight.mul_(0.5)


@dataclasses.dataclass(frozen=True)
class Case:
    journey: Callable[[nn.Module, Any, Kept], None] = train
    model: Callable[[], nn.Module] = Net
    window: int = 2
    poison: bool = False
    drafts: bool = False
    late: str | None = None  # whose lateness shows it; none: the giver's


CASES = {
    "update -> fetch on working_copy (RAW)": Case(),  # sealed
    "fetch -> forward on weights (RAW)": Case(),  # arrived
    "fetch -> backward on weights (RAW)": Case(),
    "drain -> backward on gradient_buffer (WAR)": Case(),  # taken
    "drain -> fetch on weights (WAR)": Case(),
    "drain -> user on held_gradient (WAW)": Case(train_and_clip),  # landed
    "drain -> fetch on held_gradient (RAW)": Case(model=Again),  # held
    "drain -> fetch on gradient_buffer (WAR)": Case(train_and_edit_gradients_after_the_step),
    "fetch -> backward on gradient_buffer (WAW)": Case(model=Again),
    "update -> user on held_gradient (WAR)": Case(train_and_edit_gradients_after_the_step),  # consumed
    "update -> load on optimizer_state (WAW)": Case(train_and_look),
    "fetch -> load on working_copy (WAR)": Case(train_and_edit, late="update"),  # the fetch has waited for it
    "drain -> poison on gradient_buffer (WAR)": Case(poison=True),
    "poison -> backward on gradient_buffer (WAW)": Case(poison=True),
    "drain -> draft on held_gradient (RAW)": Case(drafts=True),
    "drain -> user on held_gradient (RAW)": Case(train_and_read_gradients, drafts=True),
}


def run(case: Case, omitted: str, hold_us: dict[str, int]) -> tuple[Kept, list[str]]:
    """All that the journey kept, the weights and the optimizer's state at its end, and the kinds of wait there were."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = adamw(model.parameters())
    with on_machine(hostility={"hold_us": hold_us, "poison": case.poison}):
        drafts = "64MiB" if case.drafts else 0
        noria.wrap(model, optimizer, device=DEVICE, kernel="fused", window=case.window, draft_memory=drafts)
    omit_wait(model, omitted)
    kept: Kept = {}
    case.journey(model, optimizer, kept)
    wrapped = wrapped_by(model)
    assert wrapped is not None
    kinds = wrapped.context.engine.wait_kinds()
    kept |= {name: value.clone() for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        kept |= {f"{number}.{key}": value.clone() for key, value in state.items()}
    assert noria.report(model).num_fetches > 0
    noria.unwrap(model, optimizer)
    return kept, kinds


def differ(a: Kept, b: Kept) -> bool:
    assert a.keys() == b.keys()
    return first_difference(list(a.values()), [b[name] for name in a], list(a)) is not None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", CASES)
def test_training_goes_wrong_without_this_kind_of_wait_and_right_with_it(kind):
    case = CASES[kind]
    prompt, kinds = run(case, "", {})
    assert kind in kinds
    late = case.late or kind.split()[0]
    for hold_us in (2_000, 10_000, 50_000):  # later and later, should the machine be busy
        assert not differ(run(case, "", {late: hold_us})[0], prompt)
        if differ(run(case, kind, {late: hold_us})[0], prompt):
            return
    pytest.fail("nothing went wrong without it: the wait is not needed, or this journey does not show why")


def test_no_journey_here_has_a_kind_of_wait_that_is_not_shown_to_matter():
    """But for what the calling thread itself gives: it is over before anybody could wait for it."""
    kinds = {kind for case in {id(each): each for each in CASES.values()}.values() for kind in run(case, "", {})[1]}
    late = {kind for kind in kinds if kind.split()[0] in ("fetch", "drain", "update", "poison")}
    assert late <= CASES.keys()
