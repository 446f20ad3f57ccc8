"""Waits matter to real models too: left out, with its giver late, a kind of wait changes a training run; kept, it does
not.

On "cuda" kernels and the loop's own operators may be late, too. On the CPU the calling thread computes: what forwards,
backwards and the loop give has ended before another op could wait for it. These kinds are left to the device. IMPLIED
lists the kinds that another wait implies. NOT_HERE lists those that no journey here has;
tests/python/engine/test_engine_waits.py shows that they matter.
"""

from __future__ import annotations

import contextlib
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
from tests.python.engine.test_engine_waits import CASES as BARE_CASES
from tests.python.engine.test_engine_waits import NEVER_LATE

pytestmark = pytest.mark.usefixtures("one_thread", "prompt_device", "keeps_plan")  # a case alone says what is late

Kept = dict[str, torch.Tensor]


class HalfFrozen(Net):
    """Of a frozen block nothing is drained: only its visit itself says when its memory is free."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1::2]:
            block.requires_grad_(False)


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


def accumulate(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(3):
        for micro_batch in range(2):
            loss_of(model, 10 * number + micro_batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulate_and_keep_views(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    """The loop may write through them meanwhile, so the device itself reads what it adds to."""
    for number in range(2):
        views = []
        for micro_batch in range(2):
            loss_of(model, 10 * number + micro_batch).backward()
            views += [each.grad.view(-1) for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()


def accumulate_and_halve_in_hooks(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    """When a parameter's second gradient comes, a hook halves what the first has left, which is on its way down."""
    halves = False

    def halve(parameter: nn.Parameter) -> None:
        if halves:
            parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_hook(lambda _, parameter=parameter: halve(parameter))
    for number in range(2):
        for halves in (False, True):
            loss_of(model, 10 * number + halves).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_and_shift_gradients(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(3):
        loss_of(model, number).backward()
        for parameter in model.parameters():
            parameter.grad.add_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def train_and_fail(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    """Some backwards raise half-way; the loop goes on with the next batch."""
    fails = False

    def fail(_: torch.Tensor) -> None:
        if fails:
            raise RuntimeError("as the journey wants it")

    model.blocks[1].norm.weight.register_hook(fail)
    for number in range(3):
        for fails in (number > 0, False):
            with pytest.raises(RuntimeError, match="as the journey") if fails else contextlib.nullcontext():
                loss_of(model, number).backward()
            if fails:
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def train_and_lower_the_rate(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    """Of each batch after backward: drafts are of the rate before, and are recalled."""
    for number in range(3):
        loss_of(model, number).backward()
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        optimizer.zero_grad()


def drafted(model: nn.Module, number: int) -> None:
    """All that can be drafted has been when this returns."""
    loss_of(model, number).backward()
    wrapped_by(model).context.engine.idle()


def draft_and_step(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(3):
        drafted(model, number)
        optimizer.step()
        optimizer.zero_grad()


def draft_and_negate(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(3):
        drafted(model, number)
        model.head.weight.grad.neg_()
        optimizer.step()
        optimizer.zero_grad()


def draft_and_look(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(3):
        drafted(model, number)
        for name, value in model.state_dict().items():
            kept[f"{name} {number}"] = value.clone()
        optimizer.step()
        optimizer.zero_grad()


def draft_and_evaluate(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(3):
        drafted(model, number)
        with torch.no_grad():
            kept[f"evaluation {number}"] = loss_of(model, 50)
        optimizer.step()
        optimizer.zero_grad()


def draft_late_and_negate(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    """The draft of the block is behind another one, which is held, when its gradient is written."""
    for number in range(3):
        loss_of(model, number).backward()
        for parameter in reversed(list(model.parameters())):
            parameter.grad.neg_()
        optimizer.step()
        optimizer.zero_grad()


def step_twice(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(2):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


def clip_and_step_twice(model: nn.Module, optimizer: Any, kept: Kept) -> None:
    for number in range(3):
        loss_of(model, number).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()


@dataclasses.dataclass(frozen=True)
class Case:
    journey: Callable[[nn.Module, Any, Kept], None] = train
    model: Callable[[], nn.Module] = Net
    poison: bool = False
    drafts: bool = False
    late: dict[str, float] | None = None  # by verb, in holds: whose lateness shows it; none: the giver's, by one
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)
    on_device: bool = False  # shown by kernels that are late


BACKWARD, NORM, STREAMED = {"update": "backward"}, {"max_grad_norm": 0.1}, {"optimizer_device": "device"}


CASES = {
    "update -> fetch on working_copy (RAW)": Case(),  # sealed
    "fetch -> forward on weights (RAW)": Case(),  # arrived
    "fetch -> backward on weights (RAW)": Case(),
    "forward -> fetch on weights (WAR)": Case(on_device=True),  # read
    "backward -> fetch on weights (WAR)": Case(on_device=True),
    "backward -> fetch on weights (WAW)": Case(train_and_fail, on_device=True),
    "backward -> drain on gradient_buffer (RAW)": Case(on_device=True),  # ready
    "drain -> backward on gradient_buffer (WAR)": Case(),  # taken
    "drain -> fetch on weights (WAR)": Case(),
    "drain -> user on held_gradient (WAW)": Case(train_and_clip),  # landed
    "user -> update on held_gradient (RAW)": Case(train_and_shift_gradients, on_device=True),  # handed
    "user -> update on gradient_scales (RAW)": Case(train_and_clip, drafts=True, on_device=True),
    "drain -> fetch on held_gradient (RAW)": Case(model=Again),  # held
    "drain -> backward on held_gradient (RAW)": Case(accumulate_and_keep_views, model=Again),
    "user -> fetch on held_gradient (RAW)": Case(train_and_edit_gradients_after_the_step, on_device=True),
    "backward -> fetch on held_gradient (RAW)": Case(accumulate_and_halve_in_hooks, on_device=True),
    "fetch -> user on held_gradient (WAR)": Case(accumulate_and_halve_in_hooks, late={"drain": 1}, on_device=True),
    "drain -> fetch on gradient_buffer (WAR)": Case(train_and_edit_gradients_after_the_step),
    "backward -> fetch on gradient_buffer (WAR)": Case(accumulate, on_device=True),
    "fetch -> backward on gradient_buffer (WAW)": Case(model=Again),
    "update -> user on held_gradient (WAR)": Case(train_and_edit_gradients_after_the_step),  # consumed
    "update -> drain on held_gradient (WAR)": Case(policy=BACKWARD),
    "drain -> update on held_gradient (RAW)": Case(policy=BACKWARD),
    "drain -> sum on held_gradient (RAW)": Case(policy=NORM),
    "user -> sum on held_gradient (RAW)": Case(train_and_shift_gradients, policy=NORM, on_device=True),
    "update -> load on optimizer_state (WAW)": Case(train_and_look),
    "fetch -> load on working_copy (WAR)": Case(train_and_edit, late={"update": 1}),  # the fetch has waited for it
    "forward -> poison on weights (WAR)": Case(poison=True, on_device=True),
    "backward -> poison on weights (WAR)": Case(model=HalfFrozen, poison=True, on_device=True),
    "backward -> poison on gradient_buffer (WAW)": Case(train_and_fail, poison=True, on_device=True),
    "drain -> poison on gradient_buffer (WAR)": Case(poison=True),
    "poison -> backward on gradient_buffer (WAW)": Case(poison=True),
    "drain -> draft on held_gradient (RAW)": Case(drafts=True),
    "drain -> user on held_gradient (RAW)": Case(train_and_read_gradients, drafts=True),
    "undo -> user on held_gradient (WAR)": Case(draft_and_negate, drafts=True),
    "undo -> load on optimizer_state (WAW)": Case(draft_and_look, drafts=True),
    "undo -> fetch on working_copy (RAW)": Case(draft_and_evaluate, drafts=True),
    # A draft that was recalled passes on what it had waited for.
    "draft -> update on optimizer_state (WAW)": Case(
        train_and_lower_the_rate, drafts=True, late={"backward": 1}, on_device=True
    ),
    "user -> fetch_state on held_gradient (RAW)": Case(train_and_shift_gradients, policy=STREAMED, on_device=True),
    "fetch_state -> update on update_slot (WAW)": Case(policy=STREAMED),
    "update -> drain_state on update_slot (RAW)": Case(policy=STREAMED, on_device=True),
    "fetch_state -> user on held_gradient (WAR)": Case(step_twice, policy=STREAMED),
    "drain_state -> fetch_state on update_slot (WAR)": Case(policy=STREAMED),
    "drain_state -> poison on update_slot (WAR)": Case(policy=STREAMED, poison=True),
    "drain_state -> fetch on working_copy (RAW)": Case(policy=STREAMED),
    "drain_state -> load on optimizer_state (WAW)": Case(train_and_look, policy=STREAMED),
}

AT_ONCE = "the calling thread's own access to the home is over before its next call"
ASKED = "the thread that asks for a sum waits for it itself; one taken early is taken again after a write"
IN_TURN = "the pool does one job after another, the undo first"
RECALLED = "a draft that was recalled has touched nothing"
IMPLIED = {
    "load -> fetch on working_copy (RAW)": (Case(train_and_edit), AT_ONCE),
    "load -> update on optimizer_state (WAW)": (Case(train_and_look), AT_ONCE),
    "load -> load on optimizer_state (WAW)": (Case(train_and_look), AT_ONCE),
    "load -> draft on optimizer_state (WAW)": (Case(train_and_look, drafts=True), AT_ONCE),
    "draft -> fetch on working_copy (RAW)": (
        Case(draft_and_step, drafts=True),
        "`step` only leaves a draft to a fetch if it is over",
    ),
    "draft -> undo on optimizer_state (WAW)": (Case(draft_and_evaluate, drafts=True), IN_TURN),
    "draft -> user on held_gradient (WAR)": (Case(draft_late_and_negate, drafts=True, late={"draft": 1}), RECALLED),
    "sum -> drain on held_gradient (WAR)": (Case(policy=NORM), ASKED),
    "sum -> user on held_gradient (WAR)": (Case(policy=NORM, drafts=True), ASKED),
    "sum -> sum on gradient_sum (WAW)": (Case(policy=NORM), ASKED),
    "load -> fetch_state on optimizer_state (RAW)": (Case(train_and_look, policy=STREAMED), AT_ONCE),
    "fetch -> update on working_copy (WAR)": (
        Case(step_twice),
        "the update makes a new version, so what the fetch brings is not used: the unit is fetched again",
    ),
    "update -> user on gradient_scales (WAR)": (
        Case(clip_and_step_twice),
        "a scale that an update may still read is written again as it was; for others the gradient was written first",
    ),
}
"""By kind: a journey that has it, and why results do not change without it."""

NOT_HERE = {
    # of units that another process keeps
    "fetch -> stash on weights (RAW)",
    "stash -> fetch on weights (WAR)",
    "stash -> fetch on gradient_buffer (WAR)",
    "stash -> backward on gradient_buffer (WAR)",
    "stash -> poison on weights (WAR)",
    "poison -> fetch on weights (WAW)",
    "fetch -> poison on weights (WAW)",
    "fetch -> fetch on weights (WAW)",
    "fetch -> fetch on gradient_buffer (WAW)",
    # of gradients that come in a visit of another unit, or not where they came before
    "forward -> fetch on gradient_buffer (WAR)",
    "backward -> fetch on gradient_buffer (WAW)",
    "undo -> drain on held_gradient (WAR)",
}


def run(case: Case, omitted: str, hold_us: dict[str, int]) -> tuple[Kept, list[str]]:
    """All that the journey kept, the weights and the optimizer's state at its end, and the kinds of wait there were."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = adamw(model.parameters())
    with on_machine(hostility={"hold_us": hold_us, "poison": case.poison}):
        policy = {"draft_memory": "64MiB" if case.drafts else 0, **case.policy}
        noria.wrap(model, optimizer, device=DEVICE, kernel="fused", window=2, **policy)
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


def holds(kind: str, case: Case, hold_us: int) -> dict[str, int]:
    late = case.late or {kind.split()[0]: 1}
    return {verb: round(share * hold_us) for verb, share in late.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [kind for kind, case in CASES.items() if DEVICE != "cpu" or not case.on_device])
def test_training_goes_wrong_without_this_kind_of_wait_and_right_with_it(kind):
    case = CASES[kind]
    prompt, kinds = run(case, "", {})
    assert kind in kinds
    for hold_us in (2_000, 10_000, 50_000, 250_000):  # later and later, should the machine be busy
        late = holds(kind, case, hold_us)
        assert not differ(run(case, "", late)[0], prompt)
        if differ(run(case, kind, late)[0], prompt):
            return
    pytest.fail("nothing went wrong without it: the wait is not needed, or this journey does not show why")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", IMPLIED)
def test_training_goes_right_without_a_kind_of_wait_that_another_implies(kind):
    case, _ = IMPLIED[kind]
    late = holds(kind, case, 10_000)
    kept, kinds = run(case, "", late)
    assert kind in kinds
    assert not differ(run(case, kind, late)[0], kept)


def test_each_kind_of_wait_that_a_journey_here_has_is_shown_to_matter_or_implied_by_another():
    cases = [*CASES.values(), *(case for case, _ in IMPLIED.values())]
    different = {repr(dataclasses.replace(each, late=None, on_device=False)): each for each in cases}
    kinds = {kind for case in different.values() for kind in run(case, "", {})[1]}
    assert kinds <= CASES.keys() | IMPLIED.keys() | NEVER_LATE


def test_each_kind_of_wait_that_matters_to_the_bare_engine_is_shown_here_or_is_known_to_be_in_no_journey():
    assert BARE_CASES.keys() - CASES.keys() - IMPLIED.keys() == NOT_HERE
