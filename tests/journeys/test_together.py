"""What ranks that share a model do together on the calling thread: saves that rank 0 alone gathers, models that no rank
has built with values, and ranks that do not do the same, which hear of it at once."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import noria
import pytest
import torch
import torch.distributed.checkpoint as dcp
from noria.runtime.rank_sync import RankSync
from noria.testing import assert_same_bits
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.device import DEVICE
from tests.journeys.pairs import Net, adamw, loss_of, sgd
from tests.journeys.test_shared import Normed, tied, values_of
from tests.ranks import asked_for, in_turn_on_ranks, on_ranks


def made(make: Callable[[], nn.Module] = Net, device: str = DEVICE, **policy: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    with torch.device(device):
        model = make()
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2, **policy)
    return model, optimizer


def step(model: Any, optimizer: Any, number: int) -> None:
    loss_of(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- noria.save -------------------------------------------------------------------------------------------------


def gathers_on_first(rank: int, size: int, folder: str) -> None:
    model, optimizer = made(tied, dtype=torch.bfloat16)
    step(model, optimizer, rank)
    path = os.path.join(folder, "tied")
    gathered: list[str] = []
    whole = RankSync.whole

    def watched(self: Any, slot: Any, part: torch.Tensor, what: str) -> torch.Tensor:
        found = whole(self, slot, part, what)
        assert found.is_meta == (rank != 0)
        gathered.append(f"{what} of {slot.name}")
        return found

    with mock.patch.object(RankSync, "whole", watched):
        noria.save(path, model, optimizer)
    assert len(gathered) == len(set(gathered)) == 4 * sum(1 for _ in model.parameters())
    saved = torch.load(path)["model"]  # it is there as soon as save has returned, on all ranks
    assert saved["embed.weight"].data_ptr() == saved["head.weight"].data_ptr()
    assert_same_bits(model.state_dict(), saved)


def save_fails(rank: int, size: int, folder: str) -> None:
    model, optimizer = made()
    with pytest.raises(Exception) as caught:
        noria.save(os.path.join(folder, "not there", "file"), model, optimizer)
    assert "not there" in str(caught.value) and ("on rank 0 failed" in str(caught.value)) == (rank != 0)
    with pytest.raises(noria.UsageError, match="'strange'"):
        noria.save(os.path.join(folder, "strange"), model, optimizer, strange=object())
    assert not os.path.exists(os.path.join(folder, "strange"))
    step(model, optimizer, rank)


def saves_several(rank: int, size: int, folder: str) -> None:
    """One that no other rank shares is first; another two are of two wrap calls."""
    (first, of_first), (second, of_second) = made(), made(tied)
    step(first, of_first, rank)
    step(second, of_second, rank)
    gathered: list[bool] = []
    whole = RankSync.whole

    def watched(*args: Any) -> torch.Tensor:
        found = whole(*args)
        gathered.append(found.is_meta)
        return found

    path = os.path.join(folder, "several")
    with mock.patch.object(RankSync, "whole", watched), mock.patch.object(torch, "save", wraps=torch.save) as written:
        noria.save(path, [nn.Linear(2, 2), first, second], [of_first, of_second])
    assert gathered and set(gathered) == {rank != 0} and written.call_count == (rank == 0)
    assert_same_bits(second.state_dict(), torch.load(path)["model"][2])


# ---- ranks that do not do the same ------------------------------------------------------------------------------


def first_alone(rank: int, size: int) -> None:
    """`if rank == 0: model.state_dict()`, and the others go on."""
    model, optimizer = made()
    step(model, optimizer, rank)
    with pytest.raises(noria.UsageError, match="ranks that do the same") as caught:
        if rank == 0:
            model.state_dict()
        for number in range(2):
            step(model, optimizer, number)
    if rank == 0:
        assert 'about to gather values of "embed.weight"' in "".join(caught.value.__notes__)


def other_calls(rank: int, size: int) -> None:
    model, optimizer = made()
    step(model, optimizer, rank)
    with pytest.raises(noria.UsageError) as caught:
        model.state_dict() if rank == 0 else optimizer.state_dict()
    for part in ('rank 0 about to gather values of "embed.weight"', "rank 1 to gather the optimizer's state"):
        assert part in str(caught.value)
    with pytest.raises(noria.UsageError) as caught:
        model.blocks[rank].state_dict()
    assert '"blocks.0.' in str(caught.value) and '"blocks.1.' in str(caught.value)
    step(model, optimizer, rank)  # they agree again


def clips_alone(rank: int, size: int) -> None:
    model, optimizer = made()
    loss_of(model, rank).backward()
    with pytest.raises(noria.UsageError) as caught:
        optimizer.clip_grad_norm_(1.0) if rank == 0 else noria.unwrap(model, optimizer)
    assert "ranks that do the same" in str(caught.value)


def clips_in_other_orders(rank: int, size: int) -> None:
    """Of as many parameters each."""
    torch.manual_seed(0)
    model = Net()
    optimizers = [adamw(block.parameters()) for block in model.blocks[:2]]
    noria.wrap(model, optimizers, device=DEVICE)
    loss_of(model, rank).backward()
    with pytest.raises(noria.UsageError, match="ranks that do the same") as caught:
        for optimizer in optimizers if rank == 0 else reversed(optimizers):
            optimizer.clip_grad_norm_(1.0)
    assert '"blocks.0.' in str(caught.value) and '"blocks.1.' in str(caught.value)


def clips_to_other_norms(rank: int, size: int) -> None:
    model, optimizer = made()
    loss_of(model, rank).backward()
    with pytest.raises(noria.UsageError) as caught:
        optimizer.clip_grad_norm_(1.0 + rank)
    assert "more to a norm of 1.0" in str(caught.value) and "more to a norm of 2.0" in str(caught.value)


def clips_what_was_multiplied(rank: int, size: int) -> None:
    """By torch's clip, which multiplies no bytes here, before noria's own looks at them."""
    norms = []
    for factor in (1.0, 0.5):
        model, optimizer = made()
        loss_of(model, rank).backward()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), factor, torch.tensor(1.0 - 1e-6))
        norms.append(optimizer.clip_grad_norm_(1000.0))
        step(model, optimizer, rank)
    assert torch.equal(norms[0] * 0.5, norms[1]), norms


def saves_after_other_rates(rank: int, size: int, folder: str) -> None:
    model, optimizer = made()
    step(model, optimizer, rank)
    optimizer.param_groups[0]["lr"] *= 1 + rank
    step(model, optimizer, rank)
    for act in (model.state_dict, lambda: noria.save(os.path.join(folder, "mixed"), model, optimizer)):
        with pytest.raises(noria.UsageError, match="the same hyperparameters on all ranks"):
            act()
    assert not os.path.exists(os.path.join(folder, "mixed"))


def breaks_off_a_step(rank: int, size: int) -> None:
    """One parameter's update by torch fails, on one rank. The other's fetch ahead waits for that one until it ends."""
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2, kernel="torch")
    for number in range(2):
        step(model, optimizer, number)
    loss_of(model, rank).backward()
    if rank == 0:
        optimizer.step()
        return
    state = optimizer.state[model.blocks[2].expand.weight]
    state["momentum_buffer"] = state["momentum_buffer"].new_zeros(3)
    with pytest.raises(RuntimeError, match=r"shape|size"):
        optimizer.step()
    with pytest.raises(noria.MachineError, match="of different steps: an update by torch has raised"):
        loss_of(model, rank)
    with pytest.raises(noria.UsageError, match="of different steps"):
        model.state_dict()


def other_rates(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 2


def clears_before_step(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][-1].grad = None


def drops_a_group(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop(2)


APART = {"rates": (other_rates, "hyperparameters"), "gradients": (clears_before_step, "step as often")}
APART |= {"groups": (drops_a_group, "step as often")}


def steps_apart(rank: int, size: int, name: str, update: str) -> None:
    """What only the last rank does between its passes, all hear of at the end of the next backward."""
    alone, told = APART[name]
    model, optimizer = made(update=update)
    step(model, optimizer, rank)
    if alone is clears_before_step:
        loss_of(model, 1).backward()
    if rank == size - 1:
        alone(optimizer)
    if alone is not clears_before_step:
        loss_of(model, 1).backward()
    optimizer.step()
    model.zero_grad()
    with pytest.raises(noria.UsageError, match=f"{told}.*rank 0 than on rank 1"):
        loss_of(model, 2).backward()


def clears_apart(rank: int, size: int, no_sync: bool) -> None:
    """Sums of earlier backwards are added to on all ranks or on none; which is told, with a name."""
    model, _ = made()
    loss_of(model, rank).backward()
    if rank == 0:
        model.head.bias.grad = None
    if no_sync:
        with model.no_sync():
            loss_of(model, rank).backward()
    with pytest.raises(noria.UsageError, match=r'"head\.bias" on rank 1 and not on rank 0'):
        loss_of(model, rank).backward()
    model.zero_grad()
    model.blocks[0](torch.ones(2, 16, device=DEVICE)).sum().backward()
    with_gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradients == {name for name, _ in model.named_parameters() if name.startswith("blocks.0.")}


def steps_alike(rank: int, size: int) -> None:
    """Two optimizers step one after the other, each of its own units."""
    torch.manual_seed(0)
    model = Net()
    optimizers = [adamw(model.blocks.parameters()), torch.optim.SGD(model.head.parameters(), lr=0.1)]
    noria.wrap(model, optimizers, device=DEVICE, window=2)
    model.embed.requires_grad_(False)
    for number in range(3):
        loss_of(model, number).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()


def clips_inside_backward(rank: int, size: int) -> None:
    model, optimizer = made(update="backward")
    loss_of(model, rank).backward()
    with pytest.raises(noria.UsageError, match='update="auto" or "blocking"'):
        optimizer.clip_grad_norm_(1.0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)
    assert norm > 0.001, norm
    with pytest.raises(noria.UsageError, match=r"clip that does not bite.*update=\"auto\""):
        optimizer.step()


# ---- ranks that load different contents -------------------------------------------------------------------------


def differs(act: Callable[[], Any], *words: str, error: type[Exception] = noria.UsageError) -> None:
    with pytest.raises(error) as caught:
        act()
    for word in words:
        assert word in str(caught.value), caught.value


def loads_other_weights(rank: int, size: int) -> None:
    """Nothing is written: neither what differs nor what is alike."""
    model, optimizer = made(Normed, dtype=torch.bfloat16)
    step(model, optimizer, rank)
    before = model.state_dict()
    kept = copy.deepcopy(before)
    like = {name: torch.zeros_like(value) for name, value in before.items()}
    last = "head.bias"
    others = {
        "values": {**like, last: torch.full_like(before[last], float(rank))},
        "shapes": {**like, last: like[last] if rank == 0 else torch.zeros(3)},
        "dtypes": {**like, last: like[last] if rank == 0 else like[last].double()},
        "one is missing": {name: value for name, value in like.items() if name != last or rank == 0},
    }
    for other in others.values():
        differs(lambda other=other: model.load_state_dict(other), "the same contents to load", f'"{last}"', "on rank 1")
        assert_same_bits(model.state_dict(), kept)
    differs(lambda: model.load_state_dict(like, assign=rank == 1), "assign=False", "assign=True")
    differs(lambda: model.head.load_state_dict({**model.head.state_dict(), "bias": others["values"][last]}), '"bias"')
    assert_same_bits(model.state_dict(), kept)
    model.load_state_dict({**like, "norm.running_var": like["norm.running_var"] + rank})  # each rank's own
    step(model, optimizer, rank)


def loads_other_state(rank: int, size: int) -> None:
    model, optimizer = made()
    step(model, optimizer, rank)
    kept = copy.deepcopy(optimizer.state_dict())

    def other(change: Callable[[Any], Any]) -> Any:
        found = copy.deepcopy(kept)
        if rank == 1:
            change(found)
        return found

    changes: dict[str, Callable[[Any], Any]] = {
        "step": lambda state: state["state"][0]["step"].add_(1),
        "exp_avg": lambda state: state["state"][0].update(exp_avg=torch.zeros(3)),
        "'lr'": lambda state: state["param_groups"][0].update(lr=0.5),
    }
    for name, change in changes.items():
        differs(lambda change=change: optimizer.load_state_dict(other(change)), "the same contents to load", name)
        found = optimizer.state_dict()
        assert found["param_groups"] == kept["param_groups"]
        for number, entries in found["state"].items():
            assert_same_bits(entries, kept["state"][number])
    optimizer.load_state_dict(kept)
    step(model, optimizer, rank)


def loads_other_paths(rank: int, size: int, folder: str) -> None:
    """Two files, two folders, or one of each: told before anything is loaded, of model or optimizer."""
    model, optimizer = made()
    paths = [os.path.join(folder, name) for name in ("one", "two")]
    step(model, optimizer, rank)
    for path in paths:
        noria.save(path + ".pt", model, optimizer)
        dcp.save(noria.sharded_state(model, optimizer), checkpoint_id=path)
    stepped = os.path.join(folder, "stepped.pt")
    weights = model.state_dict()
    step(model, optimizer, rank)
    noria.save(stepped, model, optimizer)
    rest = os.path.join(folder, f"rest {rank}.pt")
    state = optimizer.state_dict()
    torch.save({"model": weights, "optimizer": {**state, "state": {}} if rank else state}, rest)
    before = values_of(model, optimizer)
    for pair, words in (
        ((paths[0] + ".pt", stepped), ("rank 0: ", "rank 1: ", "with checksum")),
        ((paths[0], paths[1]), ("folder whose .metadata",)),
        ((paths[0] + ".pt", paths[1]), ("rank 0: a file", "rank 1: a folder")),
        ((rest, rest), ("rank 0: ", "exp_avg")),
    ):
        differs(lambda pair=pair: noria.load(pair[rank], model, optimizer), "the same contents to load", *words)
        assert_same_bits(values_of(model, optimizer), before)
    noria.load(paths[rank] + ".pt", model, optimizer)  # two files of the same contents
    step(model, optimizer, rank)


def raises_alike(rank: int, size: int) -> None:
    """What torch refuses of the same contents it refuses on all ranks; a load that fits makes good what was loaded."""
    model, optimizer = made()
    kept = model.state_dict()
    differs(
        lambda: model.load_state_dict({**kept, "head.bias": torch.zeros(3)}),
        "size mismatch for head.bias",
        error=RuntimeError,
    )
    whole = optimizer.state_dict()
    broken = {"param_groups": 3} if rank else whole
    differs(lambda: optimizer.load_state_dict(broken), "not iterable", error=TypeError if rank else RuntimeError)
    model.load_state_dict(kept)
    step(model, optimizer, rank)


def wraps_parallel(rank: int, size: int) -> None:
    for parallel in (nn.parallel.DistributedDataParallel, fully_shard):
        model = parallel(Net())
        for given in (model, nn.Sequential(model)):
            optimizer = adamw(given.parameters())
            differs(
                lambda given=given, its=optimizer: noria.wrap(given, its, device=DEVICE), "a plain model", "averages"
            )


# ---- models without values --------------------------------------------------------------------------------------


class Shifted(Normed):
    """What no checkpoint has is computed on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("cpu"):
            self.shift = torch.ones(2, 16)


def refused(act: Callable[[], Any], *names: str) -> None:
    with pytest.raises(noria.UsageError) as caught:
        act()
    for name in (*names, "meta device"):
        assert name in str(caught.value)


def all_meta(rank: int, size: int, folder: str, by: str) -> None:
    model, optimizer = made(Shifted, "meta" if by != "rank 0" or rank == 0 else "cpu")
    shown = model.get_parameter("embed.weight")
    assert not shown.is_meta
    for act in (
        lambda: loss_of(model, 1),
        lambda: model.blocks[0](torch.zeros(2, 6, 16)),
        optimizer.step,
        lambda: noria.save(os.path.join(folder, "nothing"), model),
        lambda: noria.unwrap(model, optimizer),
    ):
        refused(act, '"embed.weight"')
    assert all(value.is_meta for value in model.state_dict().values())
    kept = torch.load(os.path.join(folder, "kept"))
    last = {key: value for key, value in kept["model"].items() if key != "norm.running_var"}
    if by == "noria.load":
        noria.load(os.path.join(folder, "kept"), model, optimizer)
    elif by == "dcp.load":
        dcp.load(noria.sharded_state(model, optimizer), checkpoint_id=os.path.join(folder, "parts"))
    else:
        model.load_state_dict(last, strict=False)
        refused(lambda: loss_of(model, 1), '"norm.running_var"')
        assert [name for name, value in model.state_dict().items() if value.is_meta] == ["norm.running_var"]
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    expected = torch.load(os.path.join(folder, "kept.expected"))
    step(model, optimizer, rank)
    own = dict(model.named_buffers()) if rank else {}  # which go on from rank 0's
    found = {key: value for key, value in values_of(model, optimizer).items() if key not in own}
    assert_same_bits(found, {key: expected[key] for key in expected if key not in own})


def keeps(rank: int, size: int, folder: str) -> None:
    model, optimizer = made(Shifted)
    step(model, optimizer, rank)
    noria.save(os.path.join(folder, "kept"), model, optimizer)
    dcp.save(noria.sharded_state(model, optimizer), checkpoint_id=os.path.join(folder, "parts"))
    step(model, optimizer, rank)
    expected = values_of(model, optimizer)
    if rank == 0:
        torch.save(expected, os.path.join(folder, "kept.expected"))


def lost_buffer(rank: int, size: int) -> None:
    with pytest.raises(noria.UsageError, match='"shift"'):
        made(Normed, "meta")


WAYS = ("noria.load", "dcp.load", "load_state_dict", "rank 0")


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    folder = str(tmp_path_factory.mktemp("together"))
    acts: dict[str, Any] = {
        "gathers on first": (gathers_on_first, (folder,)),
        "save fails": (save_fails, (folder,)),
        "saves several": (saves_several, (folder,)),
        "first alone": (first_alone, ()),
        "other calls": (other_calls, ()),
        "clips alone": (clips_alone, ()),
        "clips apart": (clips_in_other_orders, ()),
        "clips otherwise": (clips_to_other_norms, ()),
        "clips twice": (clips_what_was_multiplied, ()),
        "saves apart": (saves_after_other_rates, (folder,)),
        **{f"{name} apart": (steps_apart, (name, "auto")) for name in APART},
        "rates apart, backward": (steps_apart, ("rates", "backward")),
        "clears apart": (clears_apart, (False,)),
        "clears apart, no_sync": (clears_apart, (True,)),
        "steps alike": (steps_alike, ()),
        "clips in backward": (clips_inside_backward, ()),
        "other weights": (loads_other_weights, ()),
        "other state": (loads_other_state, ()),
        "other paths": (loads_other_paths, (folder,)),
        "raises alike": (raises_alike, ()),
        "parallel": (wraps_parallel, ()),
        "keeps": (keeps, (folder,)),
        "lost buffer": (lost_buffer, ()),
        **{f"meta: {by}": (all_meta, (folder, by)) for by in WAYS},
    }
    return in_turn_on_ranks(2, asked_for(request, acts, always=("keeps",)))


NAMES = {
    "gathers on first": "a save gathers on rank 0 alone, tied values once, and is there when it returns",
    "save fails": "where rank 0 cannot write all ranks raise",
    "saves several": "rank 0 alone gathers and writes models of several wrap calls",
    "first alone": "a rank that calls state_dict alone and those that go on raise",
    "other calls": "ranks that call other things are told both",
    "clips alone": "a rank that clips while another unwraps is told",
    "clips apart": "ranks that clip several optimizers in different orders are told",
    "clips otherwise": "ranks that clip to different norms are told both",
    "clips twice": "noria's norm is that of gradients after torch's clip",
    "saves apart": "what ranks have updated with different hyperparameters is not saved",
    "rates apart": "ranks whose learning rates differ are told at the next backward",
    "rates apart, backward": "ranks whose learning rates differ are told, with updates inside backward too",
    "gradients apart": "ranks that clear gradients before a step, each others, are told",
    "groups apart": "ranks whose groups differ are told",
    "clears apart": "a rank that clears a gradient alone is told before it goes on",
    "clears apart, no_sync": "a rank that clears a gradient alone is told at the first backward that sums",
    "steps alike": "several optimizers step in the same order on all ranks",
    "clips in backward": "a clip after updates inside backward is refused, with what works",
    "other weights": "ranks that load different weights are told the name, and nothing is written",
    "other state": "ranks that load different optimizer state are told the entry, and nothing is written",
    "other paths": "ranks that load different files or folders, or one of each, are told before anything is loaded",
    "raises alike": "a load that torch refuses raises on all ranks, and another one makes it good",
    "parallel": "models inside of DistributedDataParallel or FSDP are refused",
    "keeps": "a model with values is kept for those without",
    "lost buffer": "buffers without values that no checkpoint has are refused",
    **{f"meta: {by}": f"values that no rank has built come by {by}" for by in WAYS},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES, ids=NAMES.get)
def test_ranks(found, name):
    assert not found[name], found[name]


def test_one_process_loads_what_was_built_without_values(tmp_path):
    model, optimizer = made(Shifted)
    step(model, optimizer, 1)
    noria.save(tmp_path / "kept", model, optimizer)
    other, its = made(Shifted, "meta")
    refused(lambda: loss_of(other, 1), '"embed.weight"')

    def look() -> None:
        with noria.materialize(other.blocks[0]):
            pass

    refused(look, '"embed.weight"')
    noria.load(tmp_path / "kept", other, its)
    for each in (model, optimizer), (other, its):
        step(*each, 2)
    assert_same_bits(values_of(other, its), values_of(model, optimizer))


def test_a_rank_on_which_an_update_by_torch_has_raised_does_not_go_on_with_half_of_a_step():
    on_ranks(2, breaks_off_a_step)
