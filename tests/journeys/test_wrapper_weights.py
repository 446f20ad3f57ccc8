"""Frozen weights that wrap other tensors, as torchao quantises them: the tensors inside stream as they are."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import noria
import pytest
import torch
from noria.dist.shard_tensor import ShardTensor
from noria.testing import assert_same_bits, first_difference, omit_wait
from torch import nn
from torch.distributed import checkpoint as dcp

from tests.device import DEVICE
from tests.journeys.pairs import HOSTILE, WIDTH, Side, adamw, both, new_side, wrap_side
from tests.journeys.wrapper import Codes, adapted
from tests.ranks import alone, on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def batch(number: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator(DEVICE).manual_seed(number), device=DEVICE)


def adapters(parameters: Any) -> torch.optim.Optimizer:
    return adamw([each for each in parameters if each.requires_grad])


def train(side: Side, first: int = 0, last: int = 4, looks: bool = True) -> None:
    for number in range(first, last):
        loss = side.model(batch(number)).square().mean()
        loss.backward()
        side.keep(f"loss {number}", loss)
        if looks:
            side.keep_gradients(f"batch {number}")
        side.optimizer.step()
        side.optimizer.zero_grad()


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "auto"])
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_they_stream(saves: bool, tied: bool, activations: str):
    both(train, model=lambda: adapted(saves, tied), optimizer=adapters, activations=activations)


@pytest.mark.parametrize("policy", [{"update": "backward"}, {"kernel": "fused"}])
def test_they_stream_beside(policy: dict[str, Any]):
    both(functools.partial(train, looks=False), model=adapted, optimizer=adapters, **policy)


def test_tensors_inside_keep_their_dtype():
    """Also where weights travel in another one."""

    def journey(side: Side) -> None:
        assert side.model[2].base.weight.scale.dtype is torch.float32
        for number in range(3):
            loss = side.model(batch(number).bfloat16()).float().square().mean()
            loss.backward()
            side.keep(f"loss {number}", loss)
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey, model=adapted, optimizer=adapters, dtype=torch.bfloat16)


def test_an_optimizer_may_hold_them():
    """As `AdamW(model.parameters())` does."""
    both(train, model=adapted, optimizer=adamw)


def gradients(omitted: str = "") -> list[torch.Tensor]:
    late = {**HOSTILE, "hold_us": {"fetch": 10_000}}  # longer than a busy machine dawdles
    side = wrap_side(new_side(model=adapted, optimizer=adapters), kernel="torch", window=2, hostility=late)
    if omitted:
        omit_wait(side.model, omitted)
    train(side)
    return [value for name, value in side.kept.items() if "gradient" in name]


def test_gradients_differ_if_a_base_has_not_come_in_time():
    """The control arm of all of these."""
    right = gradients()
    late = gradients("fetch -> forward on weights (RAW)")
    assert first_difference(right, late, [str(number) for number in range(len(right))]) is not None


def test_state_dicts_hold_wrappers_and_load():
    other = adapted()
    torch.manual_seed(5)
    for each in other:
        each.base.weight.data = Codes.of(torch.randn(WIDTH, WIDTH))

    def journey(side: Side) -> None:
        train(side, 0, 2)
        saved = side.model.state_dict()
        assert type(saved["0.base.weight"]) is Codes
        if side.is_wrapped:
            assert saved["0.base.weight"].device.type == "cpu"
        side.model.load_state_dict(other.state_dict())
        train(side, 2, 4)

    both(journey, model=adapted, optimizer=adapters)


def test_a_load_of_another_kind_is_refused_as_by_torch():
    side = wrap_side(new_side(model=adapted, optimizer=adapters), window=2)
    before = copy.deepcopy(side.model.state_dict())
    saved = dict(before) | {"1.base.weight": torch.zeros(WIDTH, WIDTH, device="cpu")}
    with pytest.raises(RuntimeError, match=r"1\.base\.weight"):
        side.model.load_state_dict(saved)
    assert_same_bits(side.model.state_dict(), before)


def test_files_hold_wrappers(tmp_path: Path):
    torch.serialization.add_safe_globals([Codes])
    side = wrap_side(new_side(model=adapted, optimizer=adapters), window=2)
    noria.save(tmp_path / "saved.pt", side.model, side.optimizer)
    other = wrap_side(new_side(1, model=adapted, optimizer=adapters), window=2)
    noria.load(tmp_path / "saved.pt", other.model, other.optimizer)
    plain = new_side(2, model=adapted, optimizer=adapters)
    noria.load(tmp_path / "saved.pt", plain.model, plain.optimizer)
    for each in (other, plain):
        assert_same_bits(each.model.state_dict(), side.model.state_dict())


def test_one_that_is_unfrozen_is_refused():
    side = wrap_side(new_side(model=adapted, optimizer=adapters), window=2)
    weight = side.model[2].base.weight
    weight.requires_grad_(True)
    with pytest.raises(noria.UsageError, match="only adapters beside it"):
        side.model(batch(0))
    weight.requires_grad_(False)
    train(side)


def test_they_are_where_the_tensors_inside_are():
    model = adapted().cpu()
    weight = model[1].base.weight
    noria.wrap(model, window=2, device=DEVICE)
    assert weight.device.type == weight.codes.device.type == DEVICE
    noria.unwrap(model)
    assert weight.device.type == weight.codes.device.type == "cpu"


def test_one_that_comes_late_moves_with_the_tensors_inside():
    """It stays outside of noria."""
    side = wrap_side(new_side(model=adapted, optimizer=adapters), window=2)
    late = side.model.late = adapted(count=1).cpu()[0]
    weight = late.base.weight
    side.model.to(DEVICE)
    assert late.base.weight is weight
    assert weight.device.type == weight.codes.device.type == weight.scale.device.type == DEVICE


def with_one_scale() -> nn.Module:
    model = adapted()
    codes, scale = model[1].base.weight.codes, model[0].base.weight.scale
    model[1].base.weight = nn.Parameter(Codes(codes, scale, False), requires_grad=False)
    return model


def test_they_are_copied_handed_over_and_given_back():
    plain = new_side(model=adapted, optimizer=adapters).model
    side = wrap_side(new_side(model=adapted, optimizer=adapters), window=2)
    copied = copy.deepcopy(side.model)
    assert not noria.is_wrapped(copied)
    assert_same_bits(copied.state_dict(), plain.state_dict())
    assert_same_bits(dict(noria.weights(side.model)), plain.state_dict())
    weight = side.model[0].base.weight
    assert weight.device.type == torch.device(DEVICE).type
    with noria.materialize(side.model):
        assert_same_bits({"": weight}, {"": plain[0].base.weight})
    noria.unwrap(side.model, side.optimizer)
    assert side.model[0].base.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.device == weight.codes.device == torch.device("cpu")
    assert_same_bits(side.model.state_dict(), plain.state_dict())


def test_unwrapped_they_train_on():
    def journey(side: Side) -> None:
        train(side, 0, 2)
        if side.is_wrapped:
            noria.unwrap(side.model, side.optimizer)
            noria.wrap(side.model, side.optimizer, window=2, kernel="torch", device=DEVICE)
        train(side, 2, 4)

    both(journey, model=adapted, optimizer=adapters)


def test_reads_at_home_show_them():
    side = wrap_side(new_side(model=adapted, optimizer=adapters), window=2, kernel="torch", reads="home")
    plain = new_side(model=adapted, optimizer=adapters)
    for each in (side, plain):
        train(each, 0, 2)
        each.keep("read", each.model[3].base.weight.values())
    assert_same_bits(side.kept, plain.kept)


def test_the_plan_counts_the_bytes_inside():
    ours, full = adapted(), nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)))
    weights = {place: size for place, purpose, size in noria.plan(ours).rows() if purpose == "working copies"}
    inside = sum(each.base.weight.codes.nbytes + each.base.weight.scale.nbytes for each in ours)
    assert (
        inside < sum(weights.values()) <= inside + 5 * 8 * 512 < sum(each.weight.nbytes for each in full) + 5 * 8 * 512
    )


def trained() -> nn.Module:
    model = adapted()
    model[1].base.weight.requires_grad_(True)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return adapted()


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        (trained, "only adapters beside it can be trained"),
        (on_meta, "give it values before noria.wrap"),
        (with_one_scale, "parameters that share no memory"),
    ],
)
def test_others_are_refused(model: Any, remedy: str):
    with pytest.raises(noria.UsageError, match=remedy):
        noria.wrap(model(), device_memory="1GiB")


def trained_and_saved(rank: int, size: int, folder: str) -> None:
    """Ranks with the same batches have the bits of one process, and so has what they save and load."""

    def trained(steps: int = 3, seed: int = 0) -> Side:
        side = wrap_side(new_side(seed, model=adapted, optimizer=adamw), window=2, kernel="torch")
        train(side, 0, steps, looks=False)
        return side

    shared = trained()
    whole = shared.model.state_dict()
    with alone():
        own = trained()
        assert_same_bits(shared.kept, own.kept)
        assert_same_bits(whole, own.model.state_dict())
    entries = {name: each.state_dict() for name, each in noria.sharded_state(shared.model, shared.optimizer).items()}
    assert type(entries["model"]["1.base.weight.codes"]) is ShardTensor
    assert "1.base.weight" not in entries["model"]
    dcp.save(entries, checkpoint_id=folder)
    other = trained(0, seed=1)
    assert first_difference(
        [other.model.state_dict()["1.base.weight"].codes], [whole["1.base.weight"].codes], ["codes"]
    )
    parts = noria.sharded_state(other.model, other.optimizer)
    dcp.load(parts, checkpoint_id=folder)
    assert_same_bits(other.model.state_dict(), whole)
    other.model.load_state_dict(trained(0, seed=2).model.state_dict())
    assert_same_bits(other.model.state_dict(), trained(0, seed=2).model.state_dict())


def test_ranks_share_them(tmp_path: Path):
    on_ranks(2, trained_and_saved, str(tmp_path))
