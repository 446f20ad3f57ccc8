"""Whole weights inside of `noria.materialize`, if ranks share the model. All ranks are given the same batches, so
what they have is to the bit what one process has."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn
from torch.distributed import checkpoint as dcp

from tests.device import DEVICE, NEEDS_FULL_HOST
from tests.journeys.pairs import HOSTILE, Net, adamw, loss_of, state_tensors
from tests.ranks import alone, asked_for, assert_fine, in_turn_on_ranks


def tied() -> nn.Module:
    net = Net(blocks=2)
    net.head.weight = net.embed.weight
    net.blocks[0].requires_grad_(False)
    return net


def wrapped_net(make: Callable[[], nn.Module] = Net, **policy: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make()
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2, **policy)
    return model, optimizer


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    for number in range(first, last):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in {**model.state_dict(), **state_tensors(optimizer)}.items()}


def edits(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Training, and every kind of edit in between."""
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str) -> None:
        for key, value in model.named_parameters():
            kept[f"{name}: {key}"] = value.detach().clone()

    train(model, optimizer, 0, 2)
    with noria.materialize(model, read_only=True):
        keep("looked at")
        loaded = {key: value * 1.5 for key, value in model.state_dict().items()}
        other = copy.deepcopy(model).to(DEVICE)
    train(model, optimizer, 2, 3)
    kept["loss of a copy"] = loss_of(other, 0).detach()
    with noria.materialize(model.blocks[1]), torch.no_grad():
        model.blocks[1].norm.weight[:5] = 0.75
        with noria.materialize(model):
            model.head.bias.add_(1.0)
            model.blocks[0].expand.weight.data = model.blocks[0].expand.weight.data * 0.5
            model.embed.load_state_dict({"weight": loaded["embed.weight"]})
            keep("inside")
        kept |= {f"given: {key}": value.clone() for key, value in model.state_dict().items()}
    train(model, optimizer, 3, 5)
    with noria.materialize(model):
        model.load_state_dict(loaded)
        keep("loaded")
    train(model, optimizer, 5, 6)
    return kept | state_of(model, optimizer)


def like_one_process(rank: int, size: int, make: Callable[[], nn.Module], policy: dict[str, Any]) -> None:
    with on_machine(hostility=HOSTILE):
        shared = edits(*wrapped_net(make, **policy))
    with alone():
        own = edits(*wrapped_net(make, **policy))
    assert_same_bits(own, shared)


def refuses_other_edits(rank: int, size: int, policy: dict[str, Any]) -> None:
    model, optimizer = wrapped_net(**policy)
    train(model, optimizer, 0, 2)
    before = state_of(model, optimizer)
    with pytest.raises(noria.UsageError) as caught, noria.materialize(model), torch.no_grad():
        model.embed.weight[0] = 3.0
        model.blocks[1].norm.bias += rank
    assert '"blocks.1.norm.bias" left with other values on rank 1' in str(caught.value)
    assert_same_bits(before, state_of(model, optimizer))
    train(model, optimizer, 2, 3)


def keeps_what_was_not_to_be_written(rank: int, size: int, policy: dict[str, Any]) -> None:
    model, optimizer = wrapped_net(**policy)
    train(model, optimizer, 0, 2)
    with (
        pytest.raises(noria.UsageError, match=r'a write to "blocks\.1\.norm\.bias"'),
        noria.materialize(model, read_only=True),
    ):
        model.blocks[1].norm.bias.data.fill_(0.5)
        model.head.bias.data.fill_(0.25)
    train(model, optimizer, 2, 3)
    values = model.state_dict()
    # One AdamW step of lr 0.01 from there, and not from where it was before.
    assert (values["blocks.1.norm.bias"] - 0.5).abs().max() < 0.05
    assert (values["head.bias"] - 0.25).abs().max() < 0.05


def says_what_it_takes(rank: int, size: int) -> None:
    model, _ = wrapped_net()
    wrapped = wrapped_by(model)
    assert wrapped is not None

    def rows() -> dict[str, tuple[int, int]]:
        return {
            row.purpose: (row.planned, row.taken)
            for row in noria.report(model).ledger
            if row.purpose.startswith("materialized")
        }

    def weights(*units: int) -> int:
        return sum(unit.weights for unit in wrapped.context.units if not units or unit.index in units)

    unit = wrapped.context.unit_indices(model.blocks[1])
    with noria.materialize(model.blocks[1]):
        assert rows() == {"materialized weights": (weights(*unit),) * 2}
        with noria.materialize(model):
            assert rows()["materialized weights, block 2"] == (weights() - weights(*unit),) * 2
    assert rows() == {}
    with pytest.raises(RuntimeError, match=r"is evicted: use noria\.materialize"):
        model.head.bias.sum()


def finds_no_room(rank: int, size: int) -> None:
    model, _ = wrapped_net()
    wrapped = wrapped_by(model)
    assert wrapped is not None
    weights = sum(unit.weights for unit in wrapped.context.units)
    home = sum(row.taken for row in noria.report(model).ledger if row.place == "host")
    tight, other = wrapped_net(host_memory=home + weights // 2)
    with pytest.raises(noria.UsageError, match="materialized weights"), noria.materialize(tight):
        pass
    with noria.materialize(tight.head):
        assert tight.head.weight.sum().isfinite()
    train(tight, other, 0, 1)


def other_calls(rank: int, size: int, folder: str) -> None:
    """Which ranks that differ, and what would go around the block."""
    model, optimizer = wrapped_net()
    train(model, optimizer, 0, 1)
    before = state_of(model, optimizer)
    with noria.materialize(model), torch.no_grad():
        model.head.bias += 1
        for call in (dcp.save, dcp.load):
            with pytest.raises((noria.UsageError, dcp.api.CheckpointException), match="materialize"):
                call(noria.sharded_state(model), checkpoint_id=folder)
        noria.save(pathlib.Path(folder) / "inside.pt", model)
    assert not torch.equal(before["head.bias"], model.state_dict()["head.bias"])
    inside = torch.load(pathlib.Path(folder) / "inside.pt")["model"]
    assert torch.equal(inside["head.bias"], before["head.bias"] + 1)
    for module in (model.blocks[rank], model if rank else model.head):
        with pytest.raises(noria.UsageError), noria.materialize(module):
            pass
        assert not noria.report(model).ledger[-1].purpose.startswith("materialized")
    with pytest.raises(noria.UsageError, match="about to"):
        if rank == 0:
            with noria.materialize(model):
                pass
        else:
            model.state_dict()
    with pytest.raises(ZeroDivisionError), noria.materialize(model), torch.no_grad():
        model.head.bias.zero_()
        raise ZeroDivisionError
    assert_same_bits(before | {"head.bias": torch.zeros(23)}, state_of(model, optimizer))
    train(model, optimizer, 1, 2)


def read_back(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": read_back,
}


def copies(rank: int, size: int, name: str) -> None:
    """A copy made inside of the block is an ordinary model. Outside all ranks make deep copies together."""
    model, optimizer = wrapped_net()
    train(model, optimizer, 0, 2)
    with noria.materialize(model):
        other = COPIES[name](model).to(DEVICE)  # deep copies are on the CPU
    assert_same_bits(other.state_dict(), model.state_dict())
    assert wrapped_by(other) is None
    its = adamw(other.parameters())
    with other.no_sync():
        loss_of(other, rank).backward()
    its.step()
    assert any(not torch.equal(value.cpu(), model.state_dict()[key]) for key, value in other.state_dict().items())
    if name == "deepcopy":
        assert_same_bits(copy.deepcopy(model).state_dict(), model.state_dict())
    else:
        with pytest.raises(Exception, match=r"unit [\w.]+ is evicted: use noria\.materialize"):
            COPIES[name](model)
    train(model, optimizer, 2, 3)


POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32 torch": {"kernel": "torch"},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 torch": {"dtype": torch.bfloat16, "kernel": "torch"},
}
ACTS: dict[str, tuple[Callable[..., Any], Any]] = {
    **{f"edits, {name}": (like_one_process, (Net, policy)) for name, policy in POLICIES.items()},
    "edits, tied and frozen": (like_one_process, (tied, {})),
    **{f"other edits, {name}": (refuses_other_edits, (policy,)) for name, policy in POLICIES.items()},
    **{f"writes, {name}": (keeps_what_was_not_to_be_written, (policy,)) for name, policy in POLICIES.items()},
    **{f"copies by {name}": (copies, (name,)) for name in COPIES},
    "takes": (says_what_it_takes, ()),
    **({"no room": (finds_no_room, ())} if DEVICE == "cpu" else {}),
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        return in_turn_on_ranks(2, asked_for(request, {**ACTS, "calls": (other_calls, (folder,))}))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in ACTS if name.startswith("edits")])
def test_edits_of_whole_weights_on_two_ranks_have_the_bits_of_one_process(found, name):
    assert_fine(found, name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in ACTS if name.startswith("other edits")])
def test_edits_that_differ_between_ranks_are_dropped_on_all_of_them(found, name):
    assert_fine(found, name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in ACTS if name.startswith("writes")])
def test_a_write_to_weights_that_were_to_be_read_only_is_kept_and_complained_of(found, name):
    assert_fine(found, name)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_the_model_is_made_inside_of_the_block_and_refused_outside(found, name):
    assert_fine(found, f"copies by {name}")


def test_whole_weights_are_a_row_of_the_ledger(found):
    assert_fine(found, "takes")


@NEEDS_FULL_HOST
def test_whole_weights_that_host_memory_has_no_room_for_are_refused(found):
    assert_fine(found, "no room")


def test_what_goes_around_the_block_is_refused_on_all_ranks(found):
    assert_fine(found, "calls")
