"""A model is wrapped first and its optimizer later; groups and parameters join training after that.

Each journey is gone by a model of plain PyTorch too, or by one that was wrapped in one step, and has the same bits.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import noria
import pytest
import torch
import torch.distributed.checkpoint as dcp
from noria.host.home import Home
from noria.host.limits import Limit, probe_limits
from noria.model.layout import UNDO_LOGS
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE
from tests.journeys.pairs import (
    HOSTILE,
    OPTIMIZERS,
    Net,
    Side,
    adamw,
    assert_moved,
    loss_of,
    new_side,
    sgd,
    state_tensors,
    wrap_side,
)
from tests.ranks import on_ranks

Make = Callable[[Any], torch.optim.Optimizer]


@contextlib.contextmanager
def refused(*texts: str) -> Iterator[None]:
    with pytest.raises(noria.UsageError) as raised:
        yield
    for text in texts:
        assert text in str(raised.value), str(raised.value)


def assert_equal_sides(side: Side, twin: Side) -> None:
    assert_same_bits(side.kept, twin.kept)
    assert_same_bits(side.model.state_dict(), twin.model.state_dict())
    if state_tensors(twin.optimizer):
        assert_same_bits(state_tensors(side.optimizer), state_tensors(twin.optimizer))


def pair(optimizer: Make | None = adamw, frozen: tuple[str, ...] = (), only_trained: bool = False) -> tuple[Side, Side]:
    """Returns plain twins. `frozen`: beginnings of names. `only_trained`: the optimizer holds no frozen parameters."""
    torch.manual_seed(0)
    first = Net()
    for name, parameter in first.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    second = copy.deepcopy(first).to("cpu")
    sides = []
    for model in (first, second):
        held = [each for each in model.parameters() if each.requires_grad or not only_trained]
        sides.append(Side(model, optimizer(held) if optimizer else None, False))
    return sides[0], sides[1]


def wrap_in_two_steps(
    side: Side, make: Make, between: Callable[[Side], None] = lambda side: None, **policy: Any
) -> Side:
    with on_machine(hostility=HOSTILE):
        model = noria.wrap(side.model, device=DEVICE, **{"window": 2, **policy})
    assert model is side.model
    between(side)
    side.optimizer = make(side.model.parameters())
    model, optimizer = noria.wrap(side.model, side.optimizer)
    assert model is side.model and optimizer is side.optimizer
    side.is_wrapped = True
    return side


def unfreeze(side: Side, *names: str) -> list[nn.Parameter]:
    chosen = [each for name, each in side.model.named_parameters() if name.startswith(names)]
    assert chosen
    return [each.requires_grad_(True) for each in chosen]


def freeze(side: Side, *names: str) -> None:
    for each in unfreeze(side, *names):
        each.requires_grad_(False)


# ---- the optimizer comes later -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_comes_after_the_wrap_trains_as_in_plain_pytorch(name):
    twin, side = pair(None)
    twin.optimizer = OPTIMIZERS[name](twin.model.parameters())
    wrap_in_two_steps(side, OPTIMIZERS[name], kernel="torch")
    for each in (twin, side):
        each.train(0, 4)
    assert_equal_sides(side, twin)
    assert_moved(side.model)


CLASSES: dict[str, Make] = {
    "Adagrad, which makes its state at once": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


@pytest.mark.parametrize("name", CLASSES)
def test_so_does_an_optimizer_that_only_torch_can_run(name):
    twin, side = pair(None)
    twin.optimizer = CLASSES[name](twin.model.parameters())
    wrap_in_two_steps(side, CLASSES[name], kernel="torch")
    for each in (twin, side):
        each.train(0, 3)
    assert_equal_sides(side, twin)
    assert_moved(side.model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", ["fused", "torch"])
@pytest.mark.parametrize("name", ["adamw", "momentum", "Adafactor"])
def test_two_steps_give_the_bits_of_one(name, kernel, dtype):
    one, two = pair(None)
    make = (OPTIMIZERS | CLASSES)[name]
    one.optimizer = make(one.model.parameters())
    one.model.to("cpu")
    wrap_side(one, kernel=kernel, dtype=dtype, window=2)
    wrap_in_two_steps(two, make, kernel=kernel, dtype=dtype)
    for each in (one, two):
        each.train(0, 4)
    assert_equal_sides(two, one)
    assert noria.report(two.model).kernels == noria.report(one.model).kernels
    rows = [{(row.place, row.purpose): row.taken for row in noria.report(each.model).ledger} for each in (one, two)]
    assert rows[0] == rows[1]
    assert_moved(two.model)


def test_masters_keep_the_low_bits_of_the_first_weights():
    side = new_side()
    before = {name: value.clone() for name, value in side.model.state_dict().items()}
    wrap_in_two_steps(side, lambda parameters: adamw(parameters, lr=0.0, weight_decay=0.0), dtype=torch.bfloat16)
    side.train(0, 1)
    state, kept = side.optimizer.state, dict(side.model.named_parameters())
    plain = noria.unwrap(side.model, side.optimizer)[1].state
    assert state is not None and plain
    for name, value in before.items():
        high = kept[name].detach().cpu().view(torch.int16).to(torch.int32) << 16
        master = (high + plain[kept[name]]["low_bits"].cpu()).view(torch.float32)
        assert torch.equal(master, value.cpu()), name
        assert not torch.equal(master, value.bfloat16().float().cpu()) or value.numel() < 64, name


def low_bits_of_what_was_trained_first(rank: int, size: int) -> None:
    _, side = pair(None, frozen=HALF)
    before = {name: value.clone() for name, value in side.model.named_parameters() if not name.startswith(HALF)}
    still: Make = lambda parameters: adamw(parameters, lr=0.0, weight_decay=0.0)  # noqa: E731
    wrap_in_two_steps(side, still, lambda side: unfreeze(side, "blocks.0") and None, dtype=torch.bfloat16)
    side.train(0, 1)
    noria.unwrap(side.model, side.optimizer)
    kept = dict(side.model.named_parameters())
    for name, value in before.items():
        high = kept[name].detach().cpu().view(torch.int16).to(torch.int32) << 16
        low = side.optimizer.state[kept[name]]["low_bits"].cpu()
        assert torch.equal((high + low).view(torch.float32), value.detach().cpu()), name


def test_masters_keep_their_low_bits_if_more_is_trained_than_at_the_first_wrap():
    low_bits_of_what_was_trained_first(0, 1)


def test_so_do_masters_that_ranks_share():
    on_ranks(2, low_bits_of_what_was_trained_first)


def test_gradients_that_came_before_the_optimizer_count():
    def one_backward(side: Side) -> None:
        loss_of(side.model, 7).backward()

    twin, side = pair(None)
    one_backward(twin)
    twin.optimizer = adamw(twin.model.parameters())
    wrap_in_two_steps(side, adamw, one_backward, kernel="torch")
    for each in (twin, side):
        each.keep_gradients("before")
        each.train(0, 3)
    assert_equal_sides(side, twin)


def test_a_list_of_optimizers_may_come_later():
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [sgd(model.embed.parameters()), adamw([*model.blocks.parameters(), *model.head.parameters()])]

    twin, side = pair(None)
    both = {id(each): make(each.model) for each in (twin,)}
    with on_machine(hostility=HOSTILE):
        noria.wrap(side.model, device=DEVICE, window=2, kernel="torch")
    both[id(side)] = make(side.model)
    noria.wrap(side.model, both[id(side)])
    for each in (twin, side):
        for number in range(3):
            loss = loss_of(each.model, number)
            loss.backward()
            each.keep(f"loss {number}", loss)
            for optimizer in both[id(each)]:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_bits(side.kept, twin.kept)
    assert_same_bits(side.model.state_dict(), twin.model.state_dict())
    assert_moved(side.model)


def test_the_updates_of_a_later_optimizer_are_drafted():
    def sides(draft_memory: Any) -> Side:
        side = wrap_in_two_steps(pair(None)[1], adamw, kernel="fused", dtype=torch.bfloat16, draft_memory=draft_memory)
        side.train(0, 4)
        return side

    side, twin = sides("64MiB"), sides(0)
    assert_equal_sides(side, twin)
    assert_moved(side.model)
    report = noria.report(side.model)
    assert report.drafts["kept"] > 0 and report.ledger_agrees
    assert {row.purpose: row.taken for row in report.ledger}[UNDO_LOGS] > 0
    assert noria.report(twin.model).drafts["kept"] == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_drafts_of_a_later_optimizer_take_what_is_left_and_no_more(dtype):
    """By themselves they never make a budget too small. Masters are given back only when all else has been taken."""
    for more in (0, 4096, 65536):
        side = pair(None)[1]
        policy = {"kernel": "fused", "dtype": dtype}
        plain = noria.plan(side.model, device="cpu", **policy)
        optimizer = adamw(side.model.parameters())
        whole = noria.plan(side.model, optimizer, device="cpu", **policy)
        before = {region.purpose: region for region in plain.regions}
        new = [region.bytes for region in whole.regions if region.bytes and region != before[region.purpose]]
        staging = noria._C.STAGING_BYTES if DEVICE != "cpu" else 0
        budget = plain.home_bytes + sum(new) + more + staging
        with on_machine(hostility=HOSTILE):
            noria.wrap(side.model, device=DEVICE, window=2, host_memory=budget, **policy)
        noria.wrap(side.model, optimizer)
        logs = {row.purpose: row.taken for row in noria.report(side.model).ledger}.get(UNDO_LOGS, 0)
        assert logs <= more + staging
        loss_of(side.model, 0).backward()
        optimizer.step()


def test_memory_that_fails_late_can_be_asked_for_again(monkeypatch):
    side = pair(None)[1]
    noria.wrap(side.model, device=DEVICE, window=2, kernel="fused", draft_memory="64MiB")
    optimizer = adamw(side.model.parameters())
    map_, refusals = Home._map, [UNDO_LOGS]

    def map_once_refused(self, region, backend):
        if region.purpose in refusals:
            refusals.remove(region.purpose)
            raise noria._C.MachineError("no memory")
        return map_(self, region, backend)

    monkeypatch.setattr(Home, "_map", map_once_refused)
    with pytest.raises(noria._C.MachineError, match="no memory"):
        noria.wrap(side.model, optimizer)
    noria.wrap(side.model, optimizer)
    assert noria.report(side.model).ledger_agrees and UNDO_LOGS in {
        row.purpose for row in noria.report(side.model).ledger
    }


def test_a_later_optimizer_brings_its_state():
    twin, side = pair()
    for each in (twin, side):
        if each is side:
            each.model.to(DEVICE)
        each.train(0, 2)
    saved = copy.deepcopy(side.optimizer.state_dict())
    side.model.to("cpu")

    def resumed(parameters: Any) -> torch.optim.Optimizer:
        made = adamw(parameters)
        made.load_state_dict(saved)
        return made

    wrap_in_two_steps(side, resumed, kernel="torch")
    for each in (twin, side):
        each.train(2, 4)
    assert_equal_sides(side, twin)


def test_a_later_optimizer_that_does_not_fit_is_refused_with_the_numbers_and_nothing_changes(monkeypatch):
    monkeypatch.setattr(noria._C, "STAGING_BYTES", 0)  # of a CUDA device: more than these models take
    twin, side = pair(None)
    plan = noria.plan(side.model, device="cpu")
    budget = plan.home_bytes + 1024
    noria.wrap(side.model, device=DEVICE, window=2, kernel="torch", host_memory=budget)
    optimizer = adamw(side.model.parameters())
    rows = [(row.purpose, row.taken) for row in noria.report(side.model).ledger]
    with refused("host_memory of at least", "optimizer state", "found host_memory="):
        noria.wrap(side.model, optimizer)
    assert [(row.purpose, row.taken) for row in noria.report(side.model).ledger] == rows
    assert noria.report(side.model).ledger_agrees
    assert type(optimizer) is torch.optim.AdamW
    for each in (twin, side):  # it goes on: one that fits is taken
        loss_of(each.model, 0).backward()
    small: Make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    twin.optimizer, side.optimizer = small(twin.model.parameters()), small(side.model.parameters())
    noria.wrap(side.model, side.optimizer)
    for each in (twin, side):
        each.train(1, 3)
    assert_equal_sides(side, twin)


def test_the_call_that_brings_an_optimizer_may_repeat_options_but_not_change_them():
    side = new_side(optimizer=adamw)
    side.model.to("cpu")
    noria.wrap(side.model, device=DEVICE, window=3)
    side.optimizer = adamw(side.model.parameters())
    with refused("another window= than it was wrapped with", "give all options to the first call"):
        noria.wrap(side.model, side.optimizer, window=2)
    with refused("another kernel="):
        noria.wrap(side.model, side.optimizer, noria.Policy(device=DEVICE, window=3, kernel="torch"))
    noria.wrap(side.model, side.optimizer, window=3, device=DEVICE)
    side.train(0, 2)
    with refused("an optimizer that is not wrapped"):
        noria.wrap(side.model, side.optimizer)
    with refused("a model that is not wrapped, or one that was wrapped without an optimizer", "AdamW", "noria.unwrap"):
        noria.wrap(side.model, adamw(side.model.parameters()))


def test_it_is_refused_where_it_cannot_come():
    side = new_side()
    side.model.to("cpu")
    with refused("no optimizer", "in the same call"):
        noria.wrap(side.model, device=DEVICE, update="backward")
    noria.wrap(side.model, device=DEVICE)
    later = adamw(side.model.parameters())
    with refused("a module inside of one"):
        noria.wrap(side.model.blocks, later)
    with noria.materialize(side.model), refused("noria.wrap between passes"):
        noria.wrap(side.model, later)
    with refused("that no wrapped model has"):
        noria.wrap(side.model, adamw(nn.Linear(2, 2).parameters()))
    noria.wrap(side.model, later)
    Side(side.model, later, True).train(0, 2)


def test_after_two_steps_unwrap_gives_plain_objects_and_one_step_works():
    twin, side = pair(None)
    twin.optimizer = adamw(twin.model.parameters())
    wrap_in_two_steps(side, adamw, kernel="torch")
    for each in (twin, side):
        each.train(0, 2)
    noria.unwrap(side.model, side.optimizer)
    assert type(side.optimizer) is torch.optim.AdamW
    wrap_side(side, kernel="torch", window=2)
    for each in (twin, side):
        each.train(2, 4)
    assert_equal_sides(side, twin)


def in_one_step_and_in_two(rank: int, size: int, kernel: str, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    one, two = pair(None)
    one.model.to("cpu")
    one.optimizer = adamw(one.model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(one.model, one.optimizer, device=DEVICE, kernel=kernel, dtype=dtype, window=2)
    draft_memory = sum(wrapped_by(one.model).context.plan.draftable.values()) * 2 // 3  # of some units
    wrap_in_two_steps(two, adamw, kernel=kernel, dtype=dtype, draft_memory=draft_memory)
    for each in (one, two):
        each.train(10 * rank, 10 * rank + 3)
    assert_equal_sides(two, one)
    assert noria.report(two.model).ledger_agrees
    assert noria.report(two.model).drafts["kept"] > 0
    return {name: value.cpu() for name, value in two.kept.items()}  # the other process does not see the device


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_ranks_that_share_a_model_may_take_two_steps(dtype):
    found = on_ranks(2, in_one_step_and_in_two, "fused", dtype)
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0]), "the ranks had other batches"


# ---- more parameters are trained ---------------------------------------------------------------------------------

HALF = ("blocks.0", "blocks.1", "embed")

POLICIES: dict[str, dict[str, Any]] = {
    "torch": {"kernel": "torch"},
    "fused": {"kernel": "fused"},
    "drafts": {"kernel": "fused", "draft_memory": 1 << 30},
    "blocking": {"kernel": "fused", "update": "blocking"},
    "backward": {"kernel": "fused", "update": "backward"},
    "8 bits": {"kernel": "fused", "state_dtype": "8bit"},
    "recompute": {"kernel": "torch", "activations": "recompute"},
}


def twins(policy: dict[str, Any], **options: Any) -> tuple[Side, Side]:
    """Returns a twin and a wrapped side. The twin is plain; with other kernels it was wrapped with all trainable."""
    twin, side = pair(**options)
    if policy.get("kernel") != "torch":
        frozen = [each for each in twin.model.parameters() if not each.requires_grad]
        twin.model.requires_grad_(True).to("cpu")
        wrap_side(twin, kernel=policy["kernel"], state_dtype=policy.get("state_dtype", "fp32"))
        for each in frozen:
            each.requires_grad_(False)
    return twin, wrap_side(side, window=2, **policy)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "backward"])
def test_parameters_that_are_unfrozen_between_steps_train(name):
    twin, side = twins(POLICIES[name], frozen=HALF)
    for each in (twin, side):
        each.train(0, 3)
        unfreeze(each, "blocks.1")
        each.train(3, 6)
        unfreeze(each, "blocks.0", "embed")
        each.train(6, 9)
    assert_equal_sides(side, twin)
    assert_moved(side.model)


@pytest.mark.parametrize("how", ["in place", "around"])
def test_so_do_those_of_compiled_blocks(how):
    twin, side = twins(POLICIES["fused"], frozen=HALF)
    for each in (twin, side):
        for number, block in enumerate(each.model.blocks):
            if how == "in place":
                block.compile(backend="eager")
            else:
                each.model.blocks[number] = torch.compile(block, backend="eager")
        each.train(0, 3)
        unfreeze(each, "blocks.1", "embed")
        each.train(3, 6)
    assert_equal_sides(side, twin)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("update", ["auto", "backward"])
def test_it_is_as_if_both_were_unwrapped_and_wrapped_again(update, dtype):
    policy = {"window": 2, "update": update, "dtype": dtype}
    twin, side = pair(frozen=HALF, only_trained=True)
    twin.model.to("cpu")
    for each in (twin, side):
        wrap_side(each, **policy)
        each.train(0, 3)
    noria.unwrap(twin.model, twin.optimizer)
    for each in (twin, side):
        each.optimizer.add_param_group({"params": unfreeze(each, "blocks.1")})
    wrap_side(twin, **policy)
    for each in (twin, side):
        each.train(3, 6)
    assert_equal_sides(side, twin)
    rows = [[(row.place, row.purpose, row.taken) for row in noria.report(each.model).ledger] for each in (twin, side)]
    assert rows[0] == rows[1]
    assert_moved(side.model)


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("backward", "8 bits")])
def test_a_group_of_unfrozen_parameters_joins(name):
    twin, side = twins(POLICIES[name], frozen=HALF, only_trained=True)
    for each in (twin, side):
        each.train(0, 3)
        each.optimizer.add_param_group({"params": unfreeze(each, "blocks.1"), "lr": 1e-3})
        each.train(3, 6)
    assert_equal_sides(side, twin)
    assert_moved(side.model)


@pytest.mark.parametrize("optimizer", [adamw, CLASSES["Adafactor"]])
def test_a_closure_may_be_the_first_to_train_them(optimizer):
    twin, side = twins(POLICIES["torch"], frozen=HALF, optimizer=optimizer)
    for each in (twin, side):
        each.step_by_closure(0)
        unfreeze(each, "blocks.1")
        each.step_by_closure(1)
        each.optimizer.zero_grad()
        each.train(2, 4)
    assert_equal_sides(side, twin)
    assert_moved(side.model)


def test_not_inside_of_a_step_that_torch_runs_whole():
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)

    twin, side = twins(POLICIES["torch"], frozen=HALF, optimizer=lbfgs)
    for each in (twin, side):
        each.step_by_closure(0)
    unfreeze(side, "blocks.1")
    with refused("more parameters to train between steps", "run a forward that trains before"):
        side.step_by_closure(1)
    unfreeze(twin, "blocks.1")
    for each in (twin, side):
        loss_of(each.model, 2)
        each.step_by_closure(3)
    assert_equal_sides(side, twin)


def test_a_group_that_joins_inside_of_materialize_trains_from_the_next_forward():
    twin, side = twins(POLICIES["torch"], frozen=HALF, only_trained=True)
    for each in (twin, side):
        each.train(0, 2)
        with noria.materialize(each.model) if each is side else contextlib.nullcontext():
            each.optimizer.add_param_group({"params": unfreeze(each, "blocks.1"), "lr": 1e-3})
        each.train(2, 5)
    assert_equal_sides(side, twin)
    with noria.materialize(side.model), refused("training of more parameters between passes"):
        side.model.fresh = nn.Linear(2, 2)
        side.optimizer.add_param_group({"params": side.model.fresh.parameters()})


def test_a_module_that_was_added_later_joins():
    twin, side = twins(POLICIES["torch"])
    for each in (twin, side):
        each.train(0, 2)
        torch.manual_seed(3)
        each.model.head = nn.Sequential(each.model.head, nn.Linear(23, 23))
        if each is twin:
            each.model.to(DEVICE)
        each.optimizer.add_param_group({"params": each.model.head[1].parameters()})
        each.train(2, 5)
    assert_equal_sides(side, twin)
    assert_moved(side.model)


def test_adapters_take_turns():
    twin, side = twins(POLICIES["torch"], frozen=("blocks.1",))
    for each in (twin, side):
        each.train(0, 2)
        for number in range(2, 8, 2):
            names = ("blocks.1", "blocks.3")
            on, off = names if number % 4 else names[::-1]
            freeze(each, off)
            unfreeze(each, on)
            each.train(number, number + 2)
    assert_equal_sides(side, twin)
    assert_moved(side.model)
    assert noria.report(side.model).num_steps == 6, "only the first turn moved the home"


def test_what_was_frozen_when_it_was_wrapped_again_keeps_its_state():
    for kernel in ("torch", "fused"):
        one, two = pair()
        one.model.to("cpu")
        for each in (one, two):
            wrap_side(each, kernel=kernel)
            each.train(0, 2)
        noria.unwrap(two.model, two.optimizer)
        for each in (one, two):
            freeze(each, "blocks.0.expand.weight", "blocks.3.norm")
        wrap_side(two, kernel=kernel)
        for each in (one, two):
            each.train(2, 4)
        assert_equal_sides(two, one)


def test_gradients_that_are_there_when_more_is_trained_stay():
    twin, side = twins(POLICIES["torch"], frozen=HALF)
    for each in (twin, side):
        each.train(0, 2)
        loss_of(each.model, 5).backward()
        unfreeze(each, "blocks.0")
        loss_of(each.model, 6).backward()
        each.keep_gradients("both")
        each.optimizer.step()
        each.optimizer.zero_grad()
        each.train(7, 9)
    assert_equal_sides(side, twin)


def test_the_first_forward_that_trains_them_may_be_inside_of_accumulate():
    twin, side = twins(POLICIES["backward"], frozen=HALF)
    for each in (twin, side):
        each.train(0, 2)
        unfreeze(each, "blocks.1")
        with contextlib.nullcontext() if each is twin else side.optimizer.accumulate():
            loss_of(each.model, 2).backward()
            loss_of(each.model, 3).backward()
        loss_of(each.model, 4).backward()
        each.optimizer.step()
        each.optimizer.zero_grad()
        each.train(5, 7)
    assert_equal_sides(side, twin)


def test_a_forward_without_gradients_changes_nothing():
    side = wrap_side(pair(frozen=HALF)[1], window=2)
    side.train(0, 1)
    unfreeze(side, "blocks.0")
    steps = noria.report(side.model).num_steps
    with torch.no_grad():
        loss_of(side.model, 1)
    assert noria.report(side.model).num_steps == steps == 1
    side.train(1, 2)
    assert noria.report(side.model).num_steps == 1, "it began anew"


def test_more_that_does_not_fit_is_refused_with_the_numbers_and_training_goes_on(monkeypatch):
    monkeypatch.setattr(noria._C, "STAGING_BYTES", 0)  # of a CUDA device: more than these models take
    twin, side = pair(frozen=HALF)
    home = noria.plan(side.model, side.optimizer, device="cpu", kernel="torch").home_bytes
    wrap_side(side, window=2, kernel="torch", host_memory=home + 4096)
    for each in (twin, side):
        each.train(0, 2)
    unfreeze(side, "blocks.0")
    for _ in range(2):
        with refused("host_memory of at least"):
            loss_of(side.model, 2)
    groups = len(side.optimizer.param_groups)
    fresh = nn.Linear(16, 16)
    side.model.fresh = fresh
    with refused("host_memory of at least"):
        side.optimizer.add_param_group({"params": fresh.parameters()})
    assert len(side.optimizer.param_groups) == groups
    del side.model.fresh
    freeze(side, "blocks.0")
    for each in (twin, side):
        each.train(2, 4)
    assert_equal_sides(side, twin)
    assert_moved(side.model)


def test_in_the_middle_of_a_pass_it_is_refused():
    side = wrap_side(pair(frozen=HALF, only_trained=True)[1], window=2)
    late = unfreeze(side, "blocks.0")

    def add(module: nn.Module, args: object) -> None:
        side.optimizer.add_param_group({"params": late})

    freeze(side, "blocks.0")
    handle = side.model.blocks[3].register_forward_pre_hook(lambda *_: [p.requires_grad_() for p in late] and None)
    second = side.model.blocks[3].register_forward_pre_hook(add)
    with refused("training of more parameters between passes"):
        loss_of(side.model, 0)
    handle.remove()
    second.remove()
    assert len(side.optimizer.param_groups) == 1
    side.optimizer.add_param_group({"params": late})
    side.train(0, 2)


def test_a_graph_from_before_is_refused_not_trained_in_part():
    side = wrap_side(pair(frozen=HALF)[1], window=2)
    loss = loss_of(side.model, 0)
    unfreeze(side, "blocks.0")
    loss_of(side.model, 1)
    with pytest.raises(RuntimeError, match="noria"):
        loss.backward()


# ---- frozen between forward and backward ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("8 bits", "recompute")])
@pytest.mark.parametrize(
    "names", [("",), ("blocks.1",), ("blocks.1.expand.weight", "head")], ids=["all", "block", "two"]
)
def test_what_is_frozen_between_forward_and_backward_gets_no_gradient(names, name):
    policy = POLICIES[name]
    twin, side = pair(sgd)
    wrap_side(side, window=2, **policy)
    if policy["kernel"] != "torch":
        twin.model.to("cpu")
        wrap_side(twin, window=2, kernel="fused", update="blocking")
    for each in (twin, side):
        each.train(0, 2)
        loss = loss_of(each.model, 2)
        freeze(each, *names)
        loss.backward()
        if policy.get("update") != "backward":
            each.keep_gradients("while frozen")
        each.optimizer.step()
        each.optimizer.zero_grad()
        unfreeze(each, *names)
        each.train(3, 5)
    assert_equal_sides(side, twin)


def test_blocks_that_compute_again_refuse_it_as_torch_does():
    side = wrap_side(pair(sgd)[1], window=2, kernel="torch", activations="recompute")
    loss = loss_of(side.model, 2)
    freeze(side, "blocks.1")
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="A different number of tensors"):
        loss.backward()
    side.optimizer.zero_grad()
    side.train(0, 2)


# ---- views from before ------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[nn.Parameter], object]] = {
    "view": lambda weight: weight.view(-1),
    "transposed": lambda weight: weight.t(),
    "slice": lambda weight: weight[:2],
    "data": lambda weight: weight.data,
    "detached": lambda weight: weight.detach(),
    "numpy": lambda weight: weight.detach().numpy(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_from_before_the_wrap_is_named(name):
    side = new_side()
    side.model.to("cpu")
    kept = VIEWS[name](side.model.blocks[1].expand.weight)
    with pytest.warns(UserWarning, match=r'moves "blocks.1.expand.weight" to the home.*do(es)? not reach the model'):
        noria.wrap(side.model, side.optimizer, device=DEVICE)
    assert kept is not None


def test_without_views_there_is_no_warning():
    side = new_side()
    side.model.to("cpu")
    side.train(0, 1) if DEVICE == "cpu" else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        noria.wrap(side.model, side.optimizer, device=DEVICE)
        side.train(1, 2)
        noria.unwrap(side.model, side.optimizer)
        noria.wrap(side.model, side.optimizer, device=DEVICE)


def test_tensors_of_a_state_dict_from_before_more_is_trained_are_named():
    side = wrap_side(pair(frozen=HALF)[1], window=2)
    side.train(0, 1)
    kept = side.model.state_dict()["embed.weight"]
    unfreeze(side, "blocks.0")
    with pytest.warns(UserWarning, match='moves "embed.weight" to the home'):
        side.train(1, 2)
    del kept
    unfreeze(side, "blocks.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        side.train(2, 3)


def test_what_has_left_the_model_is_named_and_training_goes_on():
    twin, side = twins(POLICIES["fused"], frozen=HALF)
    old, new = side.model.head, nn.Linear(side.model.head.in_features, side.model.head.out_features).to(DEVICE)
    for each in (twin, side):
        each.train(0, 2)
    side.model.head = new
    unfreeze(side, "blocks.1")
    with refused('"head.weight" in their groups, which has left the model', "put it back"):
        loss_of(side.model, 2)
    freeze(side, "blocks.1")
    side.model.head = old
    for each in (twin, side):
        each.train(2, 4)
    assert_equal_sides(side, twin)


def test_it_is_refused_while_the_model_is_asleep():
    side = wrap_side(pair(frozen=HALF, only_trained=True)[1], window=2)
    side.train(0, 1)
    with noria.asleep(side.model), refused("training of more parameters inside of `with noria.asleep(model)`"):
        side.optimizer.add_param_group({"params": unfreeze(side, "blocks.1")})
    assert len(side.optimizer.param_groups) == 1
    side.optimizer.add_param_group({"params": unfreeze(side, "blocks.1")})
    side.train(1, 2)


def test_a_folder_of_what_was_unfrozen_loads_once_it_trains(tmp_path):
    """The checkpoint has state of parameters that are frozen when the next process begins."""
    sides = [wrap_side(pair(frozen=HALF)[1], window=2, kernel="fused") for _ in range(2)]
    first, second = sides
    unfreeze(first, "blocks.1")
    first.train(0, 2)
    dcp.save(noria.sharded_state(first.model, first.optimizer), checkpoint_id=tmp_path)
    with refused('"blocks.1.contract.bias" frozen, whose state is in', "run a forward that trains before the load"):
        noria.load(tmp_path, second.model, second.optimizer)
    unfreeze(second, "blocks.1")
    loss_of(second.model, 0)
    noria.load(tmp_path, second.model, second.optimizer)
    for each in sides:
        each.kept.clear()
        each.train(2, 4)
    assert_equal_sides(second, first)


def test_averages_are_not_lost_when_more_parameters_are_trained():
    model = Net()
    model.blocks[2].requires_grad_(False)
    optimizer = adamw([each for each in model.parameters() if each.requires_grad])
    noria.wrap(model, optimizer, device=DEVICE, window=2)
    average = noria.ema(model, 0.9)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update()
    model.blocks[2].requires_grad_(True)
    more = {"params": list(model.blocks[2].parameters())}
    with pytest.raises(noria.UsageError, match="delete the averages"):
        optimizer.add_param_group(more)
    assert average.state_dict()["n_averaged"] == 1
    del average
    optimizer.add_param_group(more)
    loss_of(model, 1).backward()
    assert model.blocks[2].expand.weight.grad is not None


# ---- ... on ranks that share the model -----------------------------------------------------------------------------

RANK_POLICIES: dict[str, dict[str, Any]] = {
    **{name: POLICIES[name] for name in ("torch", "fused", "drafts", "backward", "8 bits")},
    "bf16": {"kernel": "fused", "dtype": torch.bfloat16},
    "bf16, torch": {"kernel": "torch", "dtype": torch.bfloat16},
    "clip": {"kernel": "fused", "max_grad_norm": 0.1},
}


def sides_on_ranks(policy: dict[str, Any]) -> tuple[Side, Side]:
    """Returns wrapped sides. All of the twin was trainable at its wrap, so it needs no more memory for its training.

    Weights have bfloat16's values: so do masters of parameters that begin to train later.
    """
    twin, side = pair(frozen=HALF)
    with torch.no_grad():
        for each in (*twin.model.parameters(), *side.model.parameters()):
            each.copy_(each.bfloat16())
    twin.model.requires_grad_(True).to("cpu")
    for each in (twin, side):
        wrap_side(each, window=2, **policy)
    freeze(twin, *HALF)
    return twin, side


def unfrozen_on_ranks(rank: int, size: int, name: str) -> dict[str, torch.Tensor]:
    twin, side = sides_on_ranks(RANK_POLICIES[name])
    begin = 20 * rank
    for each in (twin, side):
        each.model.register_buffer("seen", torch.full((3,), float(rank), device=DEVICE))
        each.train(begin, begin + 2)
        unfreeze(each, "blocks.1")
        each.train(begin + 2, begin + 4)
        if name != "backward":  # there a backward uses its gradients up
            loss_of(each.model, begin + 5).backward()
            torch.nn.utils.clip_grad_norm_(each.model.parameters(), 0.01)
        unfreeze(each, "blocks.0", "embed")
        loss_of(each.model, begin + 6).backward()
        each.optimizer.step()
        each.optimizer.zero_grad()
        each.train(begin + 7, begin + 9)
        freeze(each, "embed")
        each.train(begin + 9, begin + 10)
        assert each.model.seen.tolist() == [rank] * 3, "buffers are each rank's own"
        del each.model.seen
    assert_equal_sides(side, twin)
    assert_moved(side.model)
    return {each: value.cpu() for each, value in side.kept.items()}


@pytest.mark.parametrize("name", RANK_POLICIES)
def test_ranks_train_parameters_that_all_of_them_have_unfrozen(name):
    found = on_ranks(2, unfrozen_on_ranks, name)
    assert any(not torch.equal(found[0][each], found[1][each]) for each in found[0]), "the ranks had other batches"


def joined_on_ranks(rank: int, size: int) -> None:
    one, two = pair(None, frozen=HALF)
    one.model.requires_grad_(True).to("cpu")
    one.optimizer = adamw(one.model.parameters())
    wrap_side(one, window=2, kernel="fused")
    freeze(one, *HALF)
    wrap_in_two_steps(two, adamw, between=lambda side: unfreeze(side, "blocks.1") and None, kernel="fused")
    unfreeze(one, "blocks.1")
    for each in (one, two):
        each.train(10 * rank, 10 * rank + 3)
    assert_equal_sides(two, one)

    third = pair(frozen=HALF, only_trained=True)[1]
    wrap_side(third, window=2, kernel="fused")
    third.train(10 * rank, 10 * rank + 2)
    before = third.model.state_dict()["blocks.1.norm.weight"].clone()
    third.optimizer.add_param_group({"params": unfreeze(third, "blocks.1"), "lr": 1e-3})
    third.train(10 * rank + 2, 10 * rank + 4)
    assert not torch.equal(before, third.model.state_dict()["blocks.1.norm.weight"])
    assert noria.report(third.model).ledger_agrees


def test_an_optimizer_or_a_group_may_bring_them_on_ranks():
    on_ranks(2, joined_on_ranks)


def refused_on_ranks(rank: int, size: int) -> None:
    twin, side = sides_on_ranks({"kernel": "fused"})
    begin = 10 * rank
    for each in (twin, side):
        each.train(begin, begin + 2)
    for each in (twin, side):
        with each.model.no_sync():
            loss_of(each.model, begin + 2).backward()
    unfreeze(side, "blocks.0")
    with refused("more parameters to train after step()", "freeze these parameters again"):
        loss_of(side.model, begin)
    freeze(side, "blocks.0")
    for each in (twin, side):
        loss_of(each.model, begin + 3).backward()
        each.optimizer.step()
        each.optimizer.zero_grad()
        each.train(begin + 4, begin + 6)
    assert_equal_sides(side, twin)


def unfrozen_in_no_sync(rank: int, size: int, policy: dict[str, Any]) -> None:
    twin, side = sides_on_ranks(policy)
    begin = 10 * rank
    for each in (twin, side):
        each.train(begin, begin + 2)
        unfreeze(each, "blocks.1")
        with each.model.no_sync(), contextlib.nullcontext() if each is twin else each.model.no_sync():
            loss_of(each.model, begin + 2).backward()
            loss_of(each.model, begin + 3).backward()
        loss_of(each.model, begin + 4).backward()
        each.optimizer.step()
        each.optimizer.zero_grad()
        each.train(begin + 5, begin + 7)
    assert_equal_sides(side, twin)
    assert noria.report(side.model).ledger_agrees


@pytest.mark.parametrize("update", ["auto", "backward"])
def test_the_first_forward_that_trains_them_may_be_inside_of_no_sync(update):
    on_ranks(2, unfrozen_in_no_sync, {"kernel": "fused", "update": update})


def test_refusals_on_ranks_change_nothing():
    on_ranks(2, refused_on_ranks)


def too_much_for_ranks(rank: int, size: int) -> None:
    """Host memory for the new home, but not for what is whole while it is filled."""
    twin, side = sides_on_ranks({"kernel": "fused", "host_memory": 1 << 30})
    home = sum(row.taken for row in noria.report(twin.model).ledger if row.place == "host")
    begin = 10 * rank
    for each in (twin, side):
        each.train(begin, begin + 2)
    unfreeze(side, "blocks.0")
    found = probe_limits(torch.device(DEVICE))
    tight = dataclasses.replace(found, limits=(Limit("a test", "of it", size * (home + 1024), is_own=False),))
    words = ("free host memory of at least", "whole weights", "moments in fp32", "divided by the 2 processes")
    with (
        mock.patch.object(sys.modules["noria.wrap"], "probe_limits", return_value=tight),
        mock.patch.object(noria._C, "STAGING_BYTES", 0),  # more than these models take
        refused(*words),
    ):
        loss_of(side.model, begin)
    freeze(side, "blocks.0")
    for each in (twin, side):
        each.train(begin + 2, begin + 3)
        unfreeze(each, "blocks.0")
        each.train(begin + 3, begin + 4)
    assert_equal_sides(side, twin)


def test_what_is_whole_for_a_while_must_fit_on_ranks():
    on_ranks(2, too_much_for_ranks)


def left_with_a_gradient(rank: int, size: int) -> None:
    """An adapter leaves the model and the optimizer while its gradient is held, and another one comes."""
    side = wrap_side(pair(frozen=HALF, only_trained=True)[1], window=2, kernel="fused")
    side.train(10 * rank, 10 * rank + 1)
    loss_of(side.model, 10 * rank).backward()
    gone = set(side.model.blocks[3].parameters())
    side.model.blocks[3] = nn.Identity()
    [group] = side.optimizer.param_groups
    group["params"] = [each for each in group["params"] if each not in gone]
    side.optimizer.add_param_group({"params": unfreeze(side, "blocks.1")})
    side.train(10 * rank + 1, 10 * rank + 3)


def test_a_gradient_of_what_has_left_the_model_goes_with_it():
    on_ranks(2, left_with_a_gradient)


def unfrozen_on_one_rank(rank: int, size: int) -> str:
    side = wrap_side(pair(frozen=HALF)[1], window=2, kernel="fused")
    side.train(10 * rank, 10 * rank + 2)
    if rank == 1:
        unfreeze(side, "blocks.0")
    with pytest.raises((noria.UsageError, noria.MachineError)) as raised:
        side.train(2, 4)
    return str(raised.value)


def test_all_ranks_raise_if_one_alone_has_unfrozen_a_parameter():
    found = on_ranks(2, unfrozen_on_one_rank)
    for each in found:
        assert "ranks that do the same" in each and "training of more parameters" in each, found
