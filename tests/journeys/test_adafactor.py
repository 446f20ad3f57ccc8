"""torch's Adafactor by noria's kernel: on the host alone, whole parameters at a time, and its state in the home."""

from __future__ import annotations

import copy
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE
from tests.journeys.pairs import (
    HOSTILE,
    LATE_UPDATES,
    Net,
    Side,
    both,
    go_on_here,
    hand_over,
    loss_of,
    new_side,
    state_tensors,
    wrap_side,
)

pytestmark = pytest.mark.usefixtures("one_thread")

dtypes = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])


def adafactor(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, **{"lr": 1e-2, "weight_decay": 0.1, **options})


def first_block_and_rest(model: Net) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    first = list(model.blocks[0].parameters())
    return first, [each for each in model.parameters() if all(each is not other for other in first)]


def step_all(model: nn.Module, optimizers: list[torch.optim.Optimizer], number: int) -> None:
    loss_of(model, number).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def stays_of(model: nn.Module) -> frozenset[int]:
    return wrapped_by(model).context.plan.stays


def kernels_of(model: nn.Module) -> str:
    (text,) = noria.report(model).kernels
    return text


@dtypes
@pytest.mark.parametrize("update", ["auto", "backward", "blocking"])
def test_every_update_mode_has_the_same_bits(update, dtype):
    def journey(side: Side) -> None:
        before = {key: value.clone() for key, value in side.model.state_dict().items()}
        side.train(0, 4)
        for key, value in side.model.state_dict().items():
            assert not torch.equal(before[key], value), key

    both(journey, optimizer=adafactor, kernel="fused", update=update, dtype=dtype, hostility=LATE_UPDATES)


@dtypes
def test_accumulated_and_clipped_gradients_have_the_bits_of_updates_inside_step(dtype):
    def journey(side: Side) -> None:
        for number in range(3):
            for part in range(2):
                (loss_of(side.model, 2 * number + part) / 2).backward()
            side.keep(f"norm {number}", nn.utils.clip_grad_norm_(side.model.parameters(), 0.05))
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey, optimizer=adafactor, kernel="fused", dtype=dtype, hostility=LATE_UPDATES)


@dtypes
def test_home_has_factored_moments_and_no_others(dtype):
    side = wrap_side(new_side(optimizer=adafactor), window=2, dtype=dtype, update="backward")
    side.train(0, 3)
    report = noria.report(side.model)
    assert "fused kernel" in kernels_of(side.model) and report.ledger_agrees
    rows = {row.purpose: row.planned for row in report.ledger}
    assert rows["factored moments"] > 0
    assert rows.keys().isdisjoint({"first moments", "second moments", "masters", "optimizer state", "undo logs"})
    arena = wrapped_by(side.model).context.home.arenas["factored moments"]
    for values in side.optimizer.state.values():
        for key in values.keys() - {"step"}:
            assert arena.data <= values[key].data_ptr() < arena.data + arena.bytes


@pytest.mark.parametrize("draft_memory", ["auto", "64MiB"])
def test_units_of_adafactor_are_not_drafted_and_do_not_stay(draft_memory):
    side = wrap_side(new_side(optimizer=adafactor), device_memory="1GiB", draft_memory=draft_memory)
    side.train(0, 4)
    plan = wrapped_by(side.model).context.plan
    assert not plan.undo_logs and not plan.stays and not plan.streamed
    with pytest.raises(noria.UsageError, match="which only the host updates"):
        wrap_side(new_side(optimizer=adafactor), device_memory="1GiB", resident="all")


def test_stopped_and_resumed_training_has_the_bits_of_never_stopped(tmp_path):
    went_on, stopped = (wrap_side(new_side(optimizer=adafactor), window=2, dtype=torch.bfloat16) for _ in range(2))
    went_on.train(0, 5)
    stopped.train(0, 3)
    noria.save(tmp_path / "run.pt", stopped.model, stopped.optimizer)
    resumed = wrap_side(new_side(seed=1, optimizer=adafactor), window=2, dtype=torch.bfloat16)
    noria.load(tmp_path / "run.pt", resumed.model, resumed.optimizer)
    resumed.train(3, 5)
    assert_same_bits(resumed.model.state_dict(), went_on.model.state_dict())
    assert_same_bits(state_tensors(resumed.optimizer), state_tensors(went_on.optimizer))


def test_unwrapped_optimizer_goes_on_as_plain_torch():
    side = wrap_side(new_side(optimizer=adafactor), window=2)
    side.train(0, 3)
    noria.unwrap(side.model, side.optimizer)
    assert type(side.optimizer) is torch.optim.Adafactor
    model = copy.deepcopy(side.model)
    plain = adafactor(model.parameters())
    plain.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))
    for optimizer, its in ((side.optimizer, side.model), (plain, model)):
        go_on_here(its, optimizer)
        loss_of(its, 3).backward()
        optimizer.step()
    assert_same_bits(side.model.state_dict(), model.state_dict())


def test_state_that_the_user_replaces_is_what_the_next_step_reads():
    ours, other = (wrap_side(new_side(optimizer=adafactor), window=2) for _ in range(2))
    for side in (ours, other):
        side.train(0, 2)
    theirs = copy.deepcopy(ours.optimizer.state_dict())
    for values in theirs["state"].values():
        for key in values.keys() - {"step"}:
            values[key] *= 3
    parameters = [parameter for group in ours.optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for key in ours.optimizer.state[parameter].keys() - {"step"}:
            ours.optimizer.state[parameter][key] = theirs["state"][number][key].clone()
    other.optimizer.load_state_dict(theirs)
    for side in (ours, other):
        side.train(2, 4)
    assert_same_bits(ours.model.state_dict(), other.model.state_dict())
    untouched = wrap_side(new_side(optimizer=adafactor), window=2)
    untouched.train(0, 4)
    assert not torch.equal(untouched.model.state_dict()["head.weight"], ours.model.state_dict()["head.weight"])


def test_state_of_another_shape_is_refused():
    side = wrap_side(new_side(optimizer=adafactor), window=2)
    side.train(0, 1)
    state = side.optimizer.state_dict()
    state["state"][0]["row_var"] = torch.zeros(3, 1)
    with pytest.raises(noria.UsageError, match=r'row_var of "embed\.weight"'):
        side.optimizer.load_state_dict(state)


def test_moments_that_were_not_planned_for_are_fp32_outside_of_the_home():
    """A weight moves to Adafactor from an optimizer that had it when memory was planned, with state in fp64."""
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = Net()
        first, rest = first_block_and_rest(model)
        optimizers = [torch.optim.AdamW(rest, lr=1e-2), adafactor(first)]
        noria.wrap(model, optimizers, device=DEVICE, window=2)
        moved = model.blocks[2].expand.weight
        optimizers[0].param_groups[0]["params"] = [each for each in rest if each is not moved]
        optimizers[1].add_param_group({"params": [moved]})
        rows, columns = moved.shape
        optimizers[1].state[moved].update(
            step=torch.tensor(1.0),
            row_var=torch.full((rows, 1), 1e-4, dtype=dtype),
            col_var=torch.full((1, columns), 1e-4, dtype=dtype),
        )
        for number in range(2):
            step_all(model, optimizers, number)
        assert optimizers[1].state[moved]["row_var"].dtype is torch.float32
        results.append(model.state_dict() | state_tensors(optimizers[1]))
    assert_same_bits(*results)


class ChannelsLast(Net):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.filters.sum().sigmoid()


def test_parameters_that_are_not_contiguous_are_left_to_torch():
    side = wrap_side(new_side(optimizer=adafactor, model=ChannelsLast), window=2)
    side.train(0, 3)
    assert "units by torch, for another optimizer, their dtype or layout" in kernels_of(side.model)


def test_parameters_that_are_not_contiguous_cannot_join_later():
    torch.manual_seed(0)
    model = ChannelsLast()
    first, rest = first_block_and_rest(model)
    optimizers = [torch.optim.AdamW(rest, lr=1e-2), adafactor(first)]
    noria.wrap(model, optimizers, device=DEVICE, window=2)
    optimizers[0].param_groups[0]["params"] = [each for each in rest if each is not model.filters]
    optimizers[1].add_param_group({"params": [model.filters]})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loss_of(model, 0).backward()
    with pytest.raises(noria.UsageError, match=r'"filters" of shape .*with strides'):
        optimizers[1].step()
    assert_same_bits(model.state_dict(), before)


def test_a_weight_that_joins_from_a_unit_that_stays_ends_that():
    results = []
    for resident in ("none", "1GiB"):
        torch.manual_seed(0)
        model = Net()
        first, rest = first_block_and_rest(model)
        optimizers = [torch.optim.AdamW(rest, lr=1e-2), adafactor(first)]
        noria.wrap(model, optimizers, device=DEVICE, device_memory="1GiB", resident=resident)
        assert bool(stays_of(model)) == (resident != "none")
        for number in range(4):
            if number == 2:
                hand_over(model.blocks[2].expand.weight, *optimizers)
            step_all(model, optimizers, number)
        results.append(model.state_dict())
    assert_same_bits(*results)


def test_frozen_units_may_stay_beside_adafactor():
    torch.manual_seed(0)
    model = Net()
    model.blocks[:3].requires_grad_(False)
    optimizer = adafactor([each for each in model.parameters() if each.requires_grad])
    noria.wrap(model, optimizer, device=DEVICE, device_memory="1GiB", resident="1GiB")
    side = Side(model, optimizer, True)
    side.train(0, 3)
    names = {model_unit.name for model_unit in wrapped_by(model).context.units if model_unit.index in stays_of(model)}
    assert names == {"blocks.0", "blocks.1", "blocks.2"}


def test_a_state_tensor_whose_memory_the_user_exchanges_is_not_read_there():
    """`.data =` keeps the tensor, so nothing tells; the step goes on with what the home has."""
    ours, other = (wrap_side(new_side(optimizer=adafactor), window=2) for _ in range(2))
    for side in (ours, other):
        side.train(0, 2)
    for values in ours.optimizer.state.values():
        for key in values.keys() - {"step"}:
            values[key].data = values[key].data.half()
    for side in (ours, other):
        side.train(2, 4)
    assert_same_bits(ours.model.state_dict(), other.model.state_dict())


def test_on_the_device_torch_updates():
    side = wrap_side(new_side(optimizer=adafactor), window=2, optimizer_device="device")
    side.train(0, 3)
    assert "torch, unit by unit, on the device" in kernels_of(side.model)
    assert "Adafactor has none for the device" in kernels_of(side.model)


def test_eps_that_is_no_pair_is_refused_and_changes_nothing():
    side = wrap_side(new_side(optimizer=adafactor), window=2)
    side.train(0, 1)
    before = {key: value.clone() for key, value in side.model.state_dict().items()}
    loss_of(side.model, 1).backward()
    side.optimizer.param_groups[0]["eps"] = 1e-8
    with pytest.raises(noria.UsageError, match='two numbers under "eps"'):
        side.optimizer.step()
    assert_same_bits(side.model.state_dict(), before)
    side.optimizer.param_groups[0]["eps"] = (None, 1e-3)
    side.optimizer.step()
    assert not torch.equal(side.model.state_dict()["head.weight"], before["head.weight"])


def test_beside_another_optimizer_each_unit_has_its_own_moments():
    """AdamW holds the first block, Adafactor the rest; the bits are those of updates inside step()."""
    results = []
    for update, hostility in (("auto", HOSTILE), ("blocking", {})):
        torch.manual_seed(0)
        model = Net()
        first, rest = first_block_and_rest(model)
        optimizers = [torch.optim.AdamW(first, lr=1e-2), adafactor(rest)]
        with on_machine(hostility=hostility):
            noria.wrap(model, optimizers, device=DEVICE, window=2, update=update, dtype=torch.bfloat16)
        for number in range(4):
            step_all(model, optimizers, number)
        rows = {row.purpose for row in noria.report(model).ledger}
        assert {"first moments", "factored moments"} <= rows and "masters" not in rows
        results.append(model.state_dict() | state_tensors(optimizers[0]) | state_tensors(optimizers[1]))
    assert_same_bits(*results)
