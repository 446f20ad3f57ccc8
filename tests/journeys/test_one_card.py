"""One card for several things: weights are handed to another system."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits
from noria.wrapped import Wrapped, wrapped_by
from torch import nn

from tests.device import DEVICE
from tests.journeys.pairs import Net, Side, loss_of, new_side, state_tensors, wrap_side
from tests.ranks import alone, asked_for, assert_fine, in_turn_on_ranks


class Rich(Net):
    """Has a tied head, a frozen block, and buffers: of norms, and one that checkpoints leave out."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.head.weight = self.embed.weight
        self.blocks[1].requires_grad_(False)
        self.smooth = nn.BatchNorm1d(16)
        self.register_buffer("left_out", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.smooth(x.flatten(0, 1)).unflatten(0, x.shape[:2]))


POLICIES: dict[str, dict[str, Any]] = {
    "torch": {"kernel": "torch"},
    "fused": {},
    "blocking": {"kernel": "torch", "update": "blocking"},
    "drafts": {"draft_memory": "1GiB"},
    "backward": {"update": "backward"},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 torch": {"dtype": torch.bfloat16, "kernel": "torch"},
}


def wrapped_side(policy: str = "torch", model: Callable[[], nn.Module] = Net, **more: Any) -> Side:
    return wrap_side(new_side(model=model), window=2, **POLICIES[policy], **more)


def owner(side: Side) -> Wrapped:
    found = wrapped_by(side.model)
    assert found is not None
    return found


def values_of(side: Side) -> dict[str, torch.Tensor]:
    """Copies of all that training goes on from: weights, masters and optimizer state."""
    masters = owner(side).weights.masters
    found = {**side.model.state_dict(), **state_tensors(side.optimizer)}
    for slot in owner(side).context.slots:
        if slot.has_master:
            found[f"master of {slot.name}"] = masters.whole(slot)
    return {name: value.clone() for name, value in found.items()}


def on_cpu(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in state.items()}


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(value.cpu(), other[name].cpu()) for name, value in one.items())


def copied(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in noria.weights(model)}


# ---- weights, one after the other -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_are_handed_over_with_the_names_and_bits_of_state_dict(policy):
    side = wrapped_side(policy, Rich)
    side.train(0, 2)
    before = copied(side.model)
    side.train(2, 3)
    given = copied(side.model)
    expected = side.model.state_dict()
    assert list(given) != list(expected)  # by unit
    assert_same_bits(given, on_cpu(expected))
    assert "left_out" not in given
    assert given["head.weight"].dtype == POLICIES[policy].get("dtype", torch.float32)
    assert differ(before, given)


def test_weights_that_are_handed_over_are_those_of_plain_pytorch():
    plain, side = new_side(model=Rich), wrapped_side("torch", Rich)
    for each in (plain, side):
        each.train(0, 3)
    assert_same_bits(copied(side.model), on_cpu(plain.model.state_dict()))


def test_weights_of_a_module_have_the_names_of_its_own_state_dict():
    side = wrapped_side()
    side.train(0, 1)
    assert_same_bits(copied(side.model.blocks[2]), on_cpu(side.model.blocks[2].state_dict()))


def test_no_weight_is_copied():
    side = wrapped_side(model=Rich)
    side.train(0, 1)
    arena = owner(side).context.home.arenas["working copies"]
    buffers = {name for name, _ in side.model.named_buffers()}
    places = {name: tensor.data_ptr() for name, tensor in noria.weights(side.model) if name not in buffers}
    assert all(arena.data <= place < arena.data + arena.bytes for place in places.values())
    assert places["head.weight"] == places["embed.weight"]
    assert len(set(places.values())) == len(places) - 1
    assert noria.report(side.model).ledger_agrees


def test_units_are_handed_over_while_others_wait_for_their_update():
    side = wrapped_side("torch")
    side.train(0, 2)
    updates = owner(side).context.engine.statistics.update_stats
    before, numbers = updates()["num_ops"], []
    for _ in noria.weights(side.model):
        numbers.append(updates()["num_ops"] - before)
    assert numbers[0] < numbers[-1]
    assert sorted(numbers) == numbers


@pytest.mark.parametrize("policy", ["torch", "drafts", "bf16"])
@pytest.mark.parametrize("leaves", ["break", "exception", "kept"])
def test_a_loop_that_ends_early_leaves_all_as_it_was(policy, leaves):
    control, side = wrapped_side(policy), wrapped_side(policy)
    for each in (control, side):
        each.train(0, 2)
    kept = noria.weights(side.model)
    if leaves == "kept":
        next(kept)
    with contextlib.suppress(ZeroDivisionError):
        for number, _ in enumerate(noria.weights(side.model)):
            if number == 3 and leaves == "exception":
                raise ZeroDivisionError
            if number == 3:
                break
    for each in (control, side):
        each.train(2, 4)
    assert_same_bits(values_of(side), values_of(control))
    if leaves == "kept":
        with pytest.raises(noria.UsageError, match=r"a step, a load or an edit .* begin again"):
            list(kept)


@pytest.mark.skipif(DEVICE == "cpu", reason="no copy is late on the CPU")
@pytest.mark.parametrize("leaves", ["end", "break"])
def test_copies_that_the_device_still_makes_are_over_before_a_step_changes_the_weights(leaves):
    side = wrapped_side("fused")
    side.train(0, 2)
    loss_of(side.model, 2).backward()
    expected = {name: value.clone() for name, value in side.model.state_dict().items()}
    stream, given = torch.cuda.Stream(), {}
    for name, tensor in noria.weights(side.model):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(30_000_000)
            given[name] = tensor.to(DEVICE, non_blocking=True)
        if leaves == "break":
            break
    side.optimizer.step()
    now = side.model.state_dict()
    assert all(not torch.equal(now[name], expected[name]) for name in given)
    torch.cuda.synchronize()
    assert_same_bits(on_cpu(given), {name: expected[name] for name in given})


def test_forwards_may_run_inside_the_loop():
    control, side = wrapped_side(), wrapped_side()
    for each in (control, side):
        each.train(0, 2)
    expected, given = on_cpu(control.model.state_dict()), {}
    for number, (name, tensor) in enumerate(noria.weights(side.model)):
        given[name] = tensor.clone()
        with torch.no_grad():
            side.keep(f"inside {number}", loss_of(side.model, 7))
            control.keep(f"inside {number}", loss_of(control.model, 7))
    assert_same_bits(given, expected)
    for each in (control, side):
        each.train(2, 4)
    assert_same_bits(side.kept, control.kept)


def edited(side: Side) -> None:
    with noria.materialize(side.model), torch.no_grad():
        side.model.head.bias.add_(1.0)


CHANGES: dict[str, Callable[[Side], Any]] = {
    "a step": lambda side: side.train(2, 3),
    "a load": lambda side: side.model.load_state_dict({k: v * 2 for k, v in side.model.state_dict().items()}),
    "an edit": edited,
}


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_inside_the_loop_are_refused(change, at):
    side = wrapped_side()
    side.train(0, 2)
    names = [name for name, _ in noria.weights(side.model)]
    with pytest.raises(noria.UsageError, match=r"a step, a load or an edit .* begin again"):
        for name, _ in noria.weights(side.model):
            if name == names[at]:
                CHANGES[change](side)
    assert_same_bits(copied(side.model), on_cpu(side.model.state_dict()))


def test_weights_are_not_handed_over_inside_of_a_pass_or_a_block():
    side = wrapped_side()
    refused: list[str] = []

    def attempt(*_: Any) -> None:
        with pytest.raises(noria.UsageError, match=r"noria\.weights between passes") as caught:
            noria.weights(side.model)
        refused.append(str(caught.value))

    inside = side.model.blocks[1].register_forward_hook(attempt)
    loss = loss_of(side.model, 0)
    inside.remove()
    hook = side.model.blocks[1].norm.weight.register_hook(attempt)
    loss.backward()
    hook.remove()
    with noria.materialize(side.model):
        attempt()
    assert len(refused) == 3
    side.optimizer.step()


def test_an_iterator_that_began_between_passes_goes_on_only_there():
    side = wrapped_side()
    given = noria.weights(side.model)
    next(given)
    with pytest.raises(noria.UsageError, match="between passes"), noria.materialize(side.model, read_only=True):
        next(given)


def test_torn_and_missing_weights_are_refused():
    side = wrapped_side()
    side.train(0, 1)
    owner(side).context.engine.mark_torn("on purpose")
    with pytest.raises(noria.UsageError, match="of one step"):
        noria.weights(side.model)
    with torch.device("meta"):
        meta = Net()
    model = noria.wrap(meta, device=DEVICE)
    with pytest.raises(noria.UsageError, match="has all its values"):
        noria.weights(model)
    model.load_state_dict(Net().state_dict())
    assert len(copied(model)) == len(model.state_dict())


def test_weights_that_no_step_has_claimed_are_refused():
    side = wrapped_side("backward")
    side.train(0, 1)
    loss_of(side.model, 1).backward()
    with pytest.raises(noria.UsageError, match=r"noria\.weights"):
        noria.weights(side.model)
    side.optimizer.step()
    assert_same_bits(copied(side.model), on_cpu(side.model.state_dict()))


def test_what_is_no_single_wrapped_model_is_refused():
    one, other = Net(), Net()
    with pytest.raises(noria.UsageError, match="a wrapped model"):
        noria.weights(one)
    noria.wrap([one, other], device=DEVICE)
    with pytest.raises(noria.UsageError, match="a list of 2"):
        noria.weights([one, other])
    assert len(copied([one])) == len(one.state_dict())


# ---- ranks ----------------------------------------------------------------------------------------------------------


def one_card_journey(model: Callable[[], nn.Module], policy: str) -> dict[str, torch.Tensor]:
    side = wrapped_side(policy, model)
    found: dict[str, torch.Tensor] = {}
    for number in range(3):
        side.train(number, number + 1)
        found |= {f"given {number}: {name}": value.cpu() for name, value in copied(side.model).items()}
    for _ in itertools.islice(noria.weights(side.model), 4):
        pass
    side.train(3, 4)
    return found | {name: value.clone() for name, value in side.model.state_dict().items()}


def is_as_alone(rank: int, size: int, model: Callable[[], nn.Module], policy: str) -> None:
    shared = one_card_journey(model, policy)
    with alone():
        own = one_card_journey(model, policy)
    assert_same_bits(own, shared)


def refuses_ranks_that_part(rank: int, size: int) -> None:
    side = wrapped_side()
    side.train(0, 1)
    with pytest.raises(noria.UsageError, match="about to"):
        if rank == 0:
            list(noria.weights(side.model))
        else:
            side.model.state_dict()


ACTS: dict[str, tuple[Callable[..., Any], Any]] = {
    **{f"alone, {name}": (is_as_alone, (Net, name)) for name in POLICIES if name != "drafts"},
    "alone, rich": (is_as_alone, (Rich, "fused")),
    "parting": (refuses_ranks_that_part, ()),
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    return in_turn_on_ranks(2, asked_for(request, ACTS))


@pytest.mark.parametrize("name", [name for name in ACTS if name.startswith("alone")])
def test_ranks_hand_over_weights_as_one_process_does(found, name):
    assert_fine(found, name)


def test_ranks_that_part_are_refused(found):
    assert_fine(found, "parting")
