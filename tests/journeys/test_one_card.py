"""One card for several things: weights are handed to another system, and averaged at home."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import noria
import pytest
import torch
from noria.runtime.averages import Averages, _AverageMemory
from noria.testing import assert_same_bits
from noria.wrapped import Wrapped, wrapped_by
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from tests.device import DEVICE, NEEDS_FULL_HOST
from tests.journeys.pairs import Net, Side, loss_of, new_side, state_tensors, tokens, wrap_side
from tests.ranks import alone, asked_for, assert_fine, in_turn_on_ranks

DECAY = 0.75


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
EXACT = ("torch", "blocking")
"""Those with the bits of plain PyTorch."""


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


def inside_of(averages: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of the model's own state."""
    return {name.removeprefix("module."): value for name, value in averages.items() if name != "n_averaged"}


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


@pytest.mark.parametrize("call", ["noria.weights", "noria.ema"])
def test_weights_are_neither_handed_over_nor_averaged_inside_of_a_pass_or_a_block(call):
    act: Callable[[Any], Any] = noria.weights if call == "noria.weights" else lambda model: noria.ema(model, DECAY)
    side = wrapped_side()
    refused: list[str] = []

    def attempt(*_: Any) -> None:
        with pytest.raises(noria.UsageError, match=rf"{call} between passes") as caught:
            act(side.model)
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
    average = noria.ema(side.model, DECAY)
    owner(side).context.engine.mark_torn("on purpose")
    acts = (lambda: noria.weights(side.model), lambda: noria.ema(side.model, DECAY), average.update, average.state_dict)
    for act in acts:
        with pytest.raises(noria.UsageError, match="of one step"):
            act()
    with pytest.raises(noria.UsageError, match="of one step"), average.applied():
        pass
    with torch.device("meta"):
        meta = Net()
    model = noria.wrap(meta, device=DEVICE)
    for act in (lambda: noria.weights(model), lambda: noria.ema(model, DECAY)):
        with pytest.raises(noria.UsageError, match="has all its values"):
            act()
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
    for act in (noria.weights, lambda model: noria.ema(model, DECAY)):
        with pytest.raises(noria.UsageError, match="a wrapped model"):
            act(one)
    noria.wrap([one, other], device=DEVICE)
    for act in (noria.weights, lambda model: noria.ema(model, DECAY)):
        with pytest.raises(noria.UsageError, match="a list of 2"):
            act([one, other])
    assert len(copied([one])) == len(one.state_dict())


# ---- averages -------------------------------------------------------------------------------------------------------


def averaged_by_torch(model: nn.Module, foreach: bool, decay: float = DECAY) -> Any:
    if foreach:
        return AveragedModel(model, device=torch.device("cpu"), multi_avg_fn=get_ema_multi_avg_fn(decay))
    return AveragedModel(model, device=torch.device("cpu"), avg_fn=get_ema_avg_fn(decay))


def train_both(plain: Side, side: Side, twin: Any, average: Any, first: int, last: int) -> None:
    for number in range(first, last):
        for each in (plain, side):
            each.train(number, number + 1)
        twin.update_parameters(plain.model)
        average.update()


def all_trainable() -> nn.Module:
    """With get_ema_avg_fn torch's average of a frozen parameter drifts."""
    return Rich().requires_grad_(True)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("policy", EXACT)
def test_averages_have_the_bits_of_swa_utils_on_a_plain_twin(policy, foreach):
    plain, side = new_side(model=all_trainable), wrapped_side(policy, all_trainable)
    twin, average = averaged_by_torch(plain.model, foreach), noria.ema(side.model, DECAY, foreach=foreach)
    others = averaged_by_torch(plain.model, not foreach), averaged_by_torch(plain.model, foreach, 0.5)
    assert_same_bits(average.state_dict(), twin.state_dict())
    for number in range(5):
        train_both(plain, side, twin, average, number, number + 1)
        for other in others:
            other.update_parameters(plain.model)
        assert_same_bits(average.state_dict(), twin.state_dict())
    assert all(differ(average.state_dict(), other.state_dict()) for other in others)
    assert differ(inside_of(average.state_dict()), side.model.state_dict())


def test_a_frozen_parameter_is_its_own_average():
    plain, side = new_side(model=Rich), wrapped_side("torch", Rich)
    twin, average = averaged_by_torch(plain.model, True), noria.ema(side.model, DECAY)
    train_both(plain, side, twin, average, 0, 3)
    assert_same_bits(average.state_dict(), twin.state_dict())
    frozen = sum(parameter.nbytes for parameter in side.model.blocks[1].parameters())
    assert 0 < average.num_bytes <= sum(p.nbytes for p in side.model.parameters()) - frozen + 512 * 30


@pytest.mark.parametrize("policy", [name for name, fields in POLICIES.items() if "dtype" in fields])
def test_masters_are_averaged_in_fp32(policy):
    side = wrapped_side(policy)
    masters, slots = owner(side).weights.masters, owner(side).context.slots
    shown = Net().cpu()

    def show() -> None:
        average.state_dict()  # all updates are over
        with torch.no_grad():
            for slot in slots:
                shown.get_parameter(slot.name).copy_(masters.whole(slot))

    average = noria.ema(side.model, DECAY)
    show()
    twin = averaged_by_torch(shown, True)
    for number in range(4):
        side.train(number, number + 1)
        average.update()
        show()
        twin.update_parameters(shown)
    assert_same_bits(average.state_dict(), twin.state_dict())
    with average.applied():
        for slot in slots:
            assert torch.equal(masters.whole(slot), inside_of(twin.state_dict())[slot.name])
        assert side.model.state_dict()["head.bias"].dtype == torch.bfloat16


@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_has_the_averages_inside_the_block_and_its_own_bits_behind_it(policy, tmp_path):
    control, side = wrapped_side(policy, Rich), wrapped_side(policy, Rich)
    average, its = noria.ema(side.model, DECAY), noria.ema(control.model, DECAY)
    for number in range(3):
        for each, averages in ((side, average), (control, its)):
            each.train(number, number + 1)
            averages.update()
    own, expected = values_of(side), {k: v.clone() for k, v in average.state_dict().items()}
    with average.applied(), torch.no_grad():
        inside = side.model.state_dict()
        wanted = {name: value.to(inside[name].dtype) for name, value in inside_of(expected).items()}
        assert_same_bits(on_cpu(inside), on_cpu(wanted))
        side.model.eval()
        losses = [loss_of(side.model, number) for number in range(3)]
        side.model.train()
        noria.save(tmp_path / "averaged.pt", side.model)
    assert differ(inside_of(expected), own)
    assert_same_bits(values_of(side), own)
    assert_same_bits(average.state_dict(), expected)
    loaded = Rich().to(POLICIES[policy].get("dtype", torch.float32)).eval()
    noria.load(tmp_path / "averaged.pt", loaded)
    assert [loss.item() for loss in losses] == [loss_of(loaded, number).item() for number in range(3)]
    for number in range(3, 5):
        for each, averages in ((side, average), (control, its)):
            each.train(number, number + 1)
            averages.update()
    assert_same_bits(values_of(side), values_of(control))
    assert_same_bits(average.state_dict(), its.state_dict())
    assert noria.report(side.model).ledger_agrees


def test_evaluation_with_averages_has_the_bits_of_the_averaged_plain_model():
    plain, side = new_side(), wrapped_side()
    twin, average = averaged_by_torch(plain.model, True), noria.ema(side.model, DECAY)
    train_both(plain, side, twin, average, 0, 3)
    with average.applied(), torch.no_grad():
        assert_same_bits({"": loss_of(side.model, 5)}, {"": loss_of(twin.module.to(DEVICE), 5)})
        own = loss_of(plain.model, 5)
    assert not torch.equal(own, loss_of(twin.module, 5))
    with torch.no_grad():
        assert_same_bits({"": loss_of(side.model, 5)}, {"": own})


def test_gradients_that_wait_for_their_step_survive_the_block():
    control, side = wrapped_side("drafts"), wrapped_side("drafts")
    average = noria.ema(side.model, DECAY)
    for each in (control, side):
        each.train(0, 2)
    average.update()
    for each in (control, side):
        loss_of(each.model, 2).backward()
    with average.applied(), torch.no_grad():
        loss_of(side.model, 3)
    for each in (control, side):
        each.optimizer.step()
        each.optimizer.zero_grad()
        each.train(3, 5)
    assert_same_bits(values_of(side), values_of(control))


def test_a_graph_from_before_the_block_is_refused_behind_it():
    side = wrapped_side()
    average = noria.ema(side.model, DECAY)
    side.train(0, 1)
    loss = loss_of(side.model, 1)
    with average.applied():
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    side.optimizer.zero_grad()


def entered(average: Any) -> None:
    with average.applied():
        pass


INSIDE: dict[str, Callable[[Side, Any], Any]] = {
    "optimizer.step()": lambda side, average: side.optimizer.step(),
    "model.load_state_dict()": lambda side, average: side.model.load_state_dict(Net().state_dict()),
    "optimizer.load_state_dict()": lambda side, average: side.optimizer.load_state_dict(side.optimizer.state_dict()),
    "noria.materialize": lambda side, average: noria.materialize(side.model).__enter__(),
    "noria.unwrap": lambda side, average: noria.unwrap(side.model, side.optimizer),
    "noria.ema": lambda side, average: noria.ema(side.model, DECAY),
    "ema.update()": lambda side, average: average.update(),
    "ema.state_dict()": lambda side, average: average.state_dict(),
    "ema.load_state_dict()": lambda side, average: average.load_state_dict({}),
    "ema.applied()": lambda side, average: entered(average),
}


@pytest.mark.parametrize("call", INSIDE)
def test_what_would_change_averages_inside_the_block_is_refused(call):
    side = wrapped_side()
    average, other = noria.ema(side.model, DECAY), noria.ema(side.model, 0.5)
    side.train(0, 2)
    average.update()
    own, averages = values_of(side), on_cpu(average.state_dict())
    averages = {name: value.clone() for name, value in averages.items()}
    with average.applied():
        for each in (average, other) if call.startswith("ema") else (average,):
            with pytest.raises(noria.UsageError, match="after the block") as caught:
                INSIDE[call](side, each)
            assert call in str(caught.value)
        with noria.materialize(side.model, read_only=True):
            assert torch.equal(side.model.head.bias.cpu(), averages["module.head.bias"])
    assert_same_bits(values_of(side), own)
    assert_same_bits(average.state_dict(), averages)
    side.train(2, 3)
    assert differ(own, values_of(side))


def test_a_backward_that_would_update_averages_is_refused():
    control, side = wrapped_side("backward"), wrapped_side("backward")
    for each in (control, side):
        each.train(0, 2)
    average = noria.ema(side.model, DECAY)
    with average.applied(), pytest.raises(noria.UsageError, match="after the block"):
        loss_of(side.model, 2).backward()
    for each in (control, side):
        each.train(2, 4)
    assert_same_bits(values_of(side), values_of(control))


@pytest.mark.parametrize("policy", ["torch", "bf16", "bf16 torch"])
@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("line", range(7))
def test_an_interrupt_at_any_line_of_the_exchange_loses_no_bit(policy, way, line, monkeypatch):
    """Ctrl-C comes at a line of the exchange of one parameter, the fifth on the way in or out."""
    side = wrapped_side(policy)
    average = noria.ema(side.model, DECAY)
    for number in range(2):
        side.train(number, number + 1)
        average.update()
    own, averages = values_of(side), {name: value.clone() for name, value in average.state_dict().items()}
    exchange, calls, lines = Averages._exchange_one, itertools.count(), itertools.count()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not exchange.__code__:
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    def interrupted(self: Averages, slot: Any) -> None:
        if next(calls) == (4 if way == "in" else 4 + len(self._slots)):
            monkeypatch.undo()
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                exchange(self, slot)
            finally:
                sys.settrace(before)
        else:
            exchange(self, slot)

    monkeypatch.setattr(Averages, "_exchange_one", interrupted)
    with pytest.raises(KeyboardInterrupt):
        entered(average)
    assert_same_bits(values_of(side), own)
    assert_same_bits(average.state_dict(), averages)
    side.train(2, 3)
    assert differ(own, values_of(side))


@pytest.mark.parametrize("act", ["update", "load"])
def test_averages_that_are_new_only_in_part_are_refused_until_they_are_loaded(act, monkeypatch):
    side = wrapped_side()
    average = noria.ema(side.model, DECAY)
    side.train(0, 2)
    average.update()
    before = {name: value.clone() for name, value in average.state_dict().items()}
    side.train(2, 3)
    of, calls = _AverageMemory.of, itertools.count()

    def fails(self: Any, slot: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return of(self, slot)

    monkeypatch.setattr(_AverageMemory, "of", fails)
    with pytest.raises(KeyboardInterrupt):
        average.update() if act == "update" else average.load_state_dict(before)
    monkeypatch.undo()
    for refused in (average.update, average.state_dict, lambda: entered(average)):
        with pytest.raises(noria.UsageError, match="stopped half-way"):
            refused()
    average.load_state_dict(before)
    assert_same_bits(average.state_dict(), before)


@pytest.mark.parametrize("policy", ["torch", "bf16"])
def test_averages_that_are_loaded_go_on_with_the_same_bits(policy):
    one, other = wrapped_side(policy, Rich), wrapped_side(policy, Rich)
    average = noria.ema(one.model, DECAY)
    for number in range(2):
        one.train(number, number + 1)
        average.update()
        other.train(number, number + 1)
    resumed = noria.ema(other.model, DECAY)
    assert differ(average.state_dict(), resumed.state_dict())
    resumed.load_state_dict({name: value.clone() for name, value in average.state_dict().items()})
    for number in range(2, 4):
        for side, averages in ((one, average), (other, resumed)):
            side.train(number, number + 1)
            averages.update()
    assert_same_bits(resumed.state_dict(), average.state_dict())


def test_averages_go_to_an_averaged_model_of_torch_and_back():
    plain, side = new_side(model=Rich), wrapped_side("torch", Rich)
    twin, average = averaged_by_torch(plain.model, True), noria.ema(side.model, DECAY)
    train_both(plain, side, twin, average, 0, 2)
    fresh = averaged_by_torch(Rich(), True)
    fresh.load_state_dict(average.state_dict())
    assert_same_bits(on_cpu(fresh.state_dict()), on_cpu(twin.state_dict()))
    train_both(plain, side, twin, average, 2, 4)
    assert differ(average.state_dict(), fresh.state_dict())
    average.load_state_dict(fresh.state_dict())
    averaged = {name: value for name, value in fresh.state_dict().items() if "smooth.running" not in name}
    averaged.pop("module.smooth.num_batches_tracked")
    given = average.state_dict()
    assert_same_bits({name: given[name] for name in averaged}, averaged)


@pytest.mark.parametrize("wrong", ["none", "shape", "count"])
def test_a_state_that_does_not_fit_is_refused_before_anything_is_changed(wrong):
    side = wrapped_side()
    average = noria.ema(side.model, DECAY)
    side.train(0, 1)
    average.update()
    before = {name: value.clone() for name, value in average.state_dict().items()}
    state = {name: torch.zeros_like(value) for name, value in before.items()}
    name = "n_averaged" if wrong == "count" else "module.head.bias"
    if wrong == "shape":
        state[name] = torch.zeros(3)
    else:
        del state[name]
    with pytest.raises(noria.UsageError, match=name):
        average.load_state_dict(state)
    assert_same_bits(average.state_dict(), before)


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan"), "0.9", True, None])
def test_a_decay_that_makes_no_sense_is_refused(decay):
    side = wrapped_side()
    with pytest.raises(noria.UsageError, match="a decay from 0 to 1"):
        noria.ema(side.model, decay)
    assert averaged_rows(side) == {}


# ---- memory ---------------------------------------------------------------------------------------------------------


def averaged_rows(side: Side) -> dict[str, tuple[int, int]]:
    rows = noria.report(side.model).ledger
    return {row.purpose: (row.planned, row.taken) for row in rows if row.purpose.startswith("averaged")}


def test_the_ledger_has_averages_as_long_as_they_live():
    side = wrapped_side()
    weights = sum(parameter.nbytes for parameter in side.model.parameters())
    first, second = noria.ema(side.model, DECAY), noria.ema(side.model, 0.5)
    assert weights <= first.num_bytes <= weights + 512 * len(list(side.model.parameters()))
    assert averaged_rows(side) == {
        "averaged weights": (first.num_bytes,) * 2,
        "averaged weights, number 2": (second.num_bytes,) * 2,
    }
    assert noria.report(side.model).ledger_agrees
    state = {name: (value, value.clone()) for name, value in first.state_dict().items()}
    del first
    gc.collect()
    assert list(averaged_rows(side)) == ["averaged weights, number 2"]
    side.train(0, 2)
    assert_same_bits(
        {name: value for name, (value, _) in state.items()}, {name: kept for name, (_, kept) in state.items()}
    )
    third = noria.ema(side.model, DECAY)
    assert averaged_rows(side)["averaged weights"] == (third.num_bytes,) * 2
    mapped = noria._C.living()["arena_bytes"]
    num_bytes = third.num_bytes
    del third
    gc.collect()
    assert noria._C.living()["arena_bytes"] <= mapped - num_bytes


@NEEDS_FULL_HOST
def test_averages_that_host_memory_has_no_room_for_are_refused():
    side = wrapped_side()
    home = sum(row.taken for row in noria.report(side.model).ledger if row.place == "host")
    size = noria.ema(side.model, DECAY).num_bytes
    gc.collect()
    tight = wrapped_side(host_memory=home + size - 1)
    with pytest.raises(noria.UsageError, match="averaged weights"):
        noria.ema(tight.model, DECAY)
    assert averaged_rows(tight) == {}
    tight.train(0, 1)
    assert noria.ema(wrapped_side(host_memory=home + size).model, DECAY).num_bytes == size


class Told(Net):
    """Returns its loss, as models of transformers do."""

    def forward(self, number: int) -> Any:
        return SimpleNamespace(loss=super().forward(tokens(number)).square().mean())


def test_the_snippets_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    side, given, evaluated = wrapped_side(model=Told), {}, []
    names = {
        "noria": noria,
        "torch": torch,
        "model": side.model,
        "optimizer": side.optimizer,
        "loader": [{"number": number} for number in range(3)],
        "engine": SimpleNamespace(
            load=lambda name, tensor: given.update({name: tensor.clone()}),
            wake_up=lambda: None,
            generate=lambda prompts: prompts,
            sleep=lambda: None,
        ),
        "prompts": ["Once"],
        "evaluate": lambda model: evaluated.append(model(7).loss.item()),
    }
    page = (Path(__file__).resolve().parents[2] / "docs" / "one_card.md").read_text()
    for snippet in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(snippet, names)
    assert given.keys() == side.model.state_dict().keys()
    loaded = Told()
    noria.load("averaged.pt", loaded)
    with torch.no_grad():
        assert evaluated == [loaded(7).loss.item()] != [side.model(7).loss.item()]


# ---- ranks ----------------------------------------------------------------------------------------------------------


def one_card_journey(model: Callable[[], nn.Module], policy: str, foreach: bool) -> dict[str, torch.Tensor]:
    side = wrapped_side(policy, model)
    average = noria.ema(side.model, DECAY, foreach=foreach)
    found: dict[str, torch.Tensor] = {}

    def keep(what: str, given: dict[str, torch.Tensor]) -> None:
        found.update({f"{what}: {name}": value.detach().cpu().clone() for name, value in given.items()})

    for number in range(3):
        side.train(number, number + 1)
        average.update()
        keep(f"given {number}", dict(noria.weights(side.model)))
    for _ in itertools.islice(noria.weights(side.model), 4):
        pass
    keep("averages", average.state_dict())
    state = {name: value.clone() for name, value in average.state_dict().items()}
    with average.applied():
        keep("inside", side.model.state_dict())
        keep("given inside", dict(noria.weights(side.model)))
        with torch.no_grad():
            keep("loss", {"": loss_of(side.model.eval(), 5)})
        side.model.train()
    side.train(3, 4)
    average.update()
    keep("later", average.state_dict())
    average.load_state_dict(state)
    keep("loaded", average.state_dict())
    side.train(4, 5)
    keep("end", {**side.model.state_dict(), **state_tensors(side.optimizer)})
    return found


def is_as_alone(rank: int, size: int, model: Callable[[], nn.Module], policy: str, foreach: bool) -> None:
    shared = one_card_journey(model, policy, foreach)
    with alone():
        own = one_card_journey(model, policy, foreach)
    assert_same_bits(own, shared)


def takes_a_part(rank: int, size: int) -> None:
    side = wrapped_side()
    with alone():
        whole = noria.ema(wrapped_side().model, DECAY)
    average = noria.ema(side.model, DECAY)
    assert average.num_bytes < 0.75 * whole.num_bytes
    assert averaged_rows(side) == {"averaged weights": (average.num_bytes,) * 2}


def refuses_ranks_that_part(rank: int, size: int) -> None:
    side = wrapped_side()
    average = noria.ema(side.model, DECAY)
    side.train(0, 1)
    average.update()
    before = {name: value.clone() for name, value in average.state_dict().items()}
    with pytest.raises(noria.UsageError, match="about to"):
        if rank == 0:
            list(noria.weights(side.model))
        else:
            side.model.state_dict()
    with pytest.raises(noria.UsageError, match="about to"):
        for number, _ in enumerate(noria.weights(side.model)):
            if number == 3 + rank:
                break
        average.update()
    with pytest.raises(noria.UsageError, match="about to"):
        average.update() if rank == 0 else entered(average)
    with pytest.raises(noria.UsageError, match="the same contents"):
        average.load_state_dict({name: value + rank for name, value in before.items()})
    assert_same_bits(average.state_dict(), before)
    with average.applied():
        inside = side.model.state_dict()
    assert_same_bits(inside, {name: before[f"module.{name}"] for name in inside})


ACTS: dict[str, tuple[Callable[..., Any], Any]] = {
    **{f"alone, {name}": (is_as_alone, (Net, name, True)) for name in POLICIES if name != "drafts"},
    "alone, one by one": (is_as_alone, (Net, "torch", False)),
    "alone, rich": (is_as_alone, (Rich, "fused", True)),
    "part": (takes_a_part, ()),
    "parting": (refuses_ranks_that_part, ()),
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    return in_turn_on_ranks(2, asked_for(request, ACTS))


@pytest.mark.parametrize("name", [name for name in ACTS if name.startswith("alone")])
def test_ranks_hand_over_and_average_as_one_process_does(found, name):
    assert_fine(found, name)


def test_each_rank_has_the_averages_of_its_part(found):
    assert_fine(found, "part")


def test_ranks_that_part_are_refused(found):
    assert_fine(found, "parting")
