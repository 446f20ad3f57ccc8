"""Checkpoints of parts, by torch.distributed.checkpoint: saved by any number of ranks, loaded by any other, by noria
without ranks, and by plain torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
import torch.distributed.checkpoint as dcp
from noria.testing import assert_same_bits
from noria.wrapped import wrapped_by
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.device import DEVICE
from tests.journeys.pairs import Net, adamw, lion, loss_of
from tests.journeys.test_shared import BY_TORCH, Pictures, adapted, sgd, tied, together, uneven, values_of
from tests.ranks import asked_for, in_turn_on_ranks


def with_buffers() -> nn.Module:
    net = Net(blocks=2)
    net.register_buffer("scale", torch.full((3, 2), 2.0))
    net.blocks[0].register_buffer("count", torch.tensor(7))
    return net


def wide() -> nn.Module:
    return Net(blocks=2, width=29)


class Sometimes(Net):
    """Has a layer that it uses where it is told to."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.extra = nn.Linear(16, 16)
        self.uses_extra = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(self.extra(x) if self.uses_extra else x)


COURSES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "momentum": (wide, sgd, {}),
    "adamw": (wide, adamw, {}),
    "lion, moments of 16 bits": (wide, lion, {"state_dtype": "bf16"}),
    "bfloat16": (wide, adamw, {"dtype": torch.bfloat16}),
    "bfloat16, moments of 8 bits": (wide, adamw, {"dtype": torch.bfloat16, "state_dtype": "8bit"}),
    "RMSprop by torch": (wide, BY_TORCH["RMSprop"], {}),
    "Adagrad by torch, bfloat16": (wide, BY_TORCH["Adagrad"], {"dtype": torch.bfloat16}),
    "channels last": (Pictures, adamw, {}),
    "tied": (tied, sgd, {}),
    "frozen units": (adapted, adamw, {"dtype": torch.bfloat16}),
    "a scalar and nothing": (uneven, sgd, {}),
    "buffers": (with_buffers, sgd, {}),
}

SOME = ("bfloat16, moments of 8 bits", "channels last", "a scalar and nothing", "buffers")


def made(name: str, seed: int = 0, **more: Any) -> tuple[nn.Module, Any]:
    make, optimizer, policy = COURSES[name]
    torch.manual_seed(seed)
    model = make()
    updater = optimizer([p for p in model.parameters() if p.requires_grad])
    noria.wrap(model, updater, device=DEVICE, window=2, **policy, **more)
    return model, updater


def save(folder: str, model: Any, updater: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save({**noria.sharded_state(model, updater), "step": 2}, checkpoint_id=folder)


def load(folder: str, model: Any, updater: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(noria.sharded_state(model, updater), checkpoint_id=folder)


UNWRAPPED = {"a scalar and nothing": noria.load, "bfloat16": load, "Adagrad by torch, bfloat16": noria.load}


def folder_of(root: str, name: str, size: int) -> str:
    return os.path.join(root, f"{name} by {size}")


def loads_and_saves(rank: int, size: int, root: str, name: str, froms: tuple[int, ...]) -> None:
    expected = torch.load(os.path.join(root, name + ".expected"))
    model, updater = made(name, seed=rank + 5)
    for other in froms:
        load(folder_of(root, name, other), model, updater)
        assert_same_bits(values_of(model, updater), expected)
        assert updater.param_groups[0]["lr"] == 0.07
        if other == froms[-1]:
            save(folder_of(root, name, size), model, updater)
        updater.param_groups[0]["lr"] = 0.1
        together(model, updater, [rank], size, range(1))


def resumes(rank: int, size: int, root: str, name: str) -> None:
    """Saved between two steps; others that load it go on with the same bits."""
    model, updater = made(name)
    together(model, updater, [rank], size, range(2))
    folder = os.path.join(root, "resumed " + name)
    save(folder, model, updater)
    together(model, updater, [rank], size, range(2, 4))
    other, its = made(name, seed=rank + 5)
    load(folder, other, its)
    together(other, its, [rank], size, range(2, 4))
    assert_same_bits(values_of(other, its), values_of(model, updater))


def saves_before_a_step(rank: int, size: int, root: str) -> None:
    """Zeros stand for the state of no step, and a run that loads them goes on as one that begins."""
    model, updater = made("adamw")
    folder = os.path.join(root, "before a step")
    save(folder, model, updater)
    other, its = made("adamw", seed=rank + 5)
    load(folder, other, its)
    for each in (model, updater), (other, its):
        together(*each, [rank], size, range(2))
    assert_same_bits(values_of(other, its), values_of(model, updater))


def refuses(rank: int, size: int, root: str) -> None:
    """What does not fit is refused before anything is changed."""
    model, updater = made("adamw", seed=rank + 5)
    together(model, updater, [rank], size, range(1))
    before = values_of(model, updater)
    narrow, its = Net(blocks=2, width=13), None
    noria.wrap(narrow, device=DEVICE)
    for folder, each, of_it, theirs, ours in (
        ("channels last", model, updater, "Missing key.*embed.weight", 'with "model.*, but found one without'),
        ("momentum", model, updater, r"Missing key.*exp_avg", 'a checkpoint with "optimizer.state.*exp_avg'),
        ("adamw", narrow, its, r"Size mismatch.*embed.weight", r'"model.embed.weight" with shape \(23, 13\)'),
        ("tied", model, None, r"Size mismatch.*embed.weight", r"found shape \(23, 16\)"),
        ("buffers", narrow, None, r"Size mismatch", '"model.(scale|blocks.0.count)" in'),
    ):
        path = folder_of(root, folder, 1)
        with pytest.raises(dcp.api.CheckpointException, match=theirs):
            dcp.load(noria.sharded_state(each, of_it), checkpoint_id=path)
        with pytest.raises(noria.UsageError, match=ours):
            noria.load(path, each, of_it)
    weights = folder_of(root, "weights alone", size)
    dcp.save(noria.sharded_state(model), checkpoint_id=weights)
    with pytest.raises(noria.UsageError, match="a checkpoint with an optimizer"):
        noria.load(weights, model, updater)
    with pytest.raises(noria.UsageError, match=r'"embed.weight" as state_dict.. gave it.*found Tensor'):
        noria.sharded_state(model)["model"].load_state_dict(model.state_dict())
    with pytest.raises(noria.UsageError, match='"param_groups"'):
        noria.sharded_state(model, updater)["optimizer"].load_state_dict({})
    assert_same_bits(values_of(model, updater), before)
    model, updater = made("adamw", seed=rank + 5)
    updater.add_param_group({"params": []})  # one more than was saved
    before = values_of(model, updater)
    with pytest.raises(noria.UsageError, match=r'a checkpoint with "optimizer\.param_groups\.1\.params"'):
        noria.load(folder_of(root, "adamw", 1), model, updater)
    assert_same_bits(values_of(model, updater), before)
    with pytest.raises(noria.UsageError, match="a wrapped model"):
        noria.sharded_state(nn.Linear(2, 2))
    with pytest.raises(noria.UsageError, match="a wrapped optimizer"):
        noria.sharded_state(model, sgd(nn.Linear(2, 2).parameters()))


def loads_folders(rank: int, size: int, root: str) -> None:
    """noria.load reads what policies without low bits have saved, hyperparameters that this run has not, and extras."""
    for kept, name in (("adamw", "bfloat16"), ("bfloat16, moments of 8 bits", "adamw")):
        model, updater = made(name, seed=rank + 5)
        updater.param_groups[0]["initial_lr"] = 3.0
        assert noria.load(folder_of(root, kept, 1), model, updater) == {"step": 2}
        assert updater.param_groups[0]["lr"] == 0.07 and updater.param_groups[0]["initial_lr"] == 3.0
        expected = torch.load(os.path.join(root, kept + ".expected"))
        found = values_of(model, updater)
        for key, value in expected.items():
            if key in found:
                assert_same_bits({key: found[key]}, {key: value.to(found[key].dtype)})
        wrapped = wrapped_by(model)
        for slot in wrapped.context.slots if kept == "adamw" else ():  # masters have all of a value
            part = {"part": slot.part_of(expected[slot.name])}
            assert_same_bits({"part": wrapped.weights.masters.whole(slot)}, part)
        together(model, updater, [rank], size, range(1))


UNUSED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "RMSprop": (BY_TORCH["RMSprop"], {}),
    "NAdam, bfloat16": (BY_TORCH["NAdam"], {"dtype": torch.bfloat16}),
    "AdamW by torch": (adamw, {"kernel": "torch"}),
}


def saves_what_has_no_state(rank: int, size: int, root: str, name: str) -> None:
    """torch has not updated a layer yet: its state is left out, and begins where it is loaded, too."""
    optimizer, policy = UNUSED[name]

    def new(seed: int, steps: int = 0) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = Sometimes()
        updater = optimizer(model.parameters())
        noria.wrap(model, updater, device=DEVICE, window=2, **policy)
        model.uses_extra = True
        together(model, updater, [rank], size, range(steps))
        return model, updater

    model, updater = new(0)
    model.uses_extra = False
    together(model, updater, [rank], size, range(2))
    folder = os.path.join(root, f"unused, {name} by {size}")
    save(folder, model, updater)
    kept = [key for key in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata if "state.extra" in key]
    assert {key.rsplit(".", 1)[1] for key in kept} == ({"low_bits"} if policy.get("dtype") else set())
    fresh, used = new(rank + 5), new(rank + 5, steps=1)
    before = values_of(*fresh)
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key.*optimizer\.state\.extra\.(weight|bias)"):
        load(folder, *fresh)
    assert_same_bits(values_of(*fresh), before)
    assert used[1].state[used[0].extra.weight]
    for each in (fresh, used):
        noria.load(folder, *each)
        assert not each[1].state.get(each[0].extra.weight)
        assert_same_bits(values_of(*each), values_of(model, updater))
    for each in ((model, updater), fresh, used):
        each[0].uses_extra = True
        together(*each, [rank], size, range(2, 4))
        assert_same_bits(values_of(*each), values_of(model, updater))


def copy_of(state: Any) -> Any:
    """As pickle makes one, without the parameters that are its keys."""
    make, arguments = state.__reduce__()
    return make(*arguments)


def unwraps_what_it_has_loaded(rank: int, size: int, root: str, name: str, by: Callable[..., Any]) -> None:
    """A load makes entries of a fresh optimizer's state as parts arrive, in an order of each rank's own."""
    expected = torch.load(os.path.join(root, name + ".expected"))
    model, updater = made(name, seed=rank + 5)
    by(folder_of(root, name, 1), model, updater)
    if rank == 0:
        assert updater.state[model.get_parameter("embed.weight")]
    copied = copy_of(updater.state)
    noria.unwrap(model, updater)
    assert_same_bits(values_of(model, updater), expected)
    for parameter, values in updater.state.items():
        assert_same_bits(*({key: each[key] for key in values if key != "step"} for each in (copied[parameter], values)))


def looks_on_one_rank_alone(rank: int, size: int) -> None:
    """A look at a state that is not there yet makes it on this rank alone."""
    for act in ("state_dict", "copy", "unwrap"):
        model, updater = made("bfloat16")
        if rank == 0:
            assert updater.state[model.head.bias] == {}
        if act == "state_dict":
            assert not any(updater.state_dict()["state"].values())
        elif act == "copy":
            assert not any(copy_of(updater.state).values())
        else:
            noria.unwrap(model, updater)
            assert not any(updater.state.values())


def writes_on_one_rank_alone(rank: int, size: int) -> None:
    """A tensor that one rank alone has is refused by name before either optimizer is changed."""
    model = Net(blocks=2)
    parameters = list(model.parameters())
    updaters = [adamw(parameters[:3]), adamw(parameters[3:])]
    noria.wrap(model, updaters, device=DEVICE, window=2, dtype=torch.bfloat16)

    def step() -> None:
        loss_of(model, rank).backward()
        for updater in updaters:
            updater.step()
            updater.zero_grad()

    step()
    if rank == 1:
        updaters[1].state[model.head.bias]["mine"] = torch.zeros(model.head.bias.shape)
    for act in (updaters[1].state_dict, lambda: copy_of(updaters[1].state), lambda: noria.unwrap(model, updaters)):
        with pytest.raises(noria.UsageError, match=r'on rank 0: nothing; on rank 1: "mine" of "head\.bias"'):
            act()
        step()
    if rank == 1:
        del updaters[1].state[model.head.bias]["mine"]
    noria.unwrap(model, updaters)


def waits_for_who_is_elsewhere(rank: int, size: int, root: str) -> None:
    """A rank that evaluates before it loads or saves is assisted by those that are there already."""
    model, updater = made("adamw", seed=rank + 5, find_unused_parameters=True)
    together(model, updater, [rank], size, range(1))
    folder, file = os.path.join(root, "elsewhere"), os.path.join(root, "elsewhere.pt")
    noria.save(file, model, updater)
    before = values_of(model, updater)
    for act in (
        lambda: save(folder, model, updater),
        lambda: load(folder, model, updater),
        lambda: noria.load(folder, model, updater),
        lambda: noria.load(file, model, updater),
    ):
        if rank == 1:
            with torch.no_grad():
                loss_of(model, 3)
        act()
    assert_same_bits(values_of(model, updater), before)
    for what, alone in (
        ("load a checkpoint", lambda: noria.load(folder, model, updater)),
        ("load a checkpoint", lambda: noria.load(file, model, updater)),
        ("take noria.sharded_state", lambda: noria.sharded_state(model, updater)),
    ):
        with pytest.raises(noria.UsageError, match=f"rank 0 about to {what} and rank 1 to gather"):
            alone() if rank == 0 else model.state_dict()
    together(model, updater, [rank], size, range(1))


def reads_on_some_ranks_alone(rank: int, size: int, root: str) -> None:
    """What one rank cannot read all refuse, by that rank's words, before anything is changed."""
    model, updater = made("adamw", seed=rank + 5)
    together(model, updater, [rank], size, range(1))
    file = os.path.join(root, "for some.pt")
    noria.save(file, model, updater)
    together(model, updater, [rank], size, range(1, 2))
    before = values_of(model, updater)
    for path in (folder_of(root, "adamw", 1), file):
        with pytest.raises((FileNotFoundError, RuntimeError)) as caught:
            noria.load(path if rank == 0 else path + " of others", model, updater)
        told = str(caught.value)
        assert " of others'" in told and ("noria.load on rank 1 failed: FileNotFoundError" in told) == (rank == 0), told
        assert_same_bits(values_of(model, updater), before)
    weights = os.path.join(root, f"weights of {rank}.pt")
    whole = {"model": model.state_dict(), "optimizer": updater.state_dict()}
    torch.save(whole if rank == 0 else {"model": whole["model"]}, weights)
    with pytest.raises(noria.UsageError, match="a checkpoint with 'optimizer'"):
        noria.load(weights, model, updater)
    noria.load(file, model, updater)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Runs of one process, each saved as one process saves it."""
    root = str(tmp_path_factory.mktemp("parts"))
    for name in COURSES:
        model, updater = made(name)
        together(model, updater, [0], 1, range(2))
        updater.param_groups[0]["lr"] = 0.07
        save(folder_of(root, name, 1), model, updater)
        torch.save(values_of(model, updater), os.path.join(root, name + ".expected"))
    return root


@pytest.fixture(scope="module")
def found(root, request):
    def on(size: int, *froms: int) -> Any:
        acts = {name: (loads_and_saves, (root, name, froms)) for name in (COURSES if size == 2 else SOME)}
        return asked_for(request, acts)

    more = {f"resumes: {name}": (resumes, (root, name)) for name in SOME}
    more |= {
        "before a step": (saves_before_a_step, (root,)),
        "refuses": (refuses, (root,)),
        "folders": (loads_folders, (root,)),
        "elsewhere": (waits_for_who_is_elsewhere, (root,)),
        "some alone": (reads_on_some_ranks_alone, (root,)),
        **{f"unused: {name}": (saves_what_has_no_state, (root, name)) for name in UNUSED},
        "looks": (looks_on_one_rank_alone, ()),
        "writes": (writes_on_one_rank_alone, ()),
        **{f"unwraps: {name}": (unwraps_what_it_has_loaded, (root, name, by)) for name, by in UNWRAPPED.items()},
    }
    back = {f"back: {name}": (loads_and_saves, (root, name, (3,))) for name in SOME}
    found = {4: in_turn_on_ranks(4, on(4, 1))}
    found[3] = in_turn_on_ranks(3, on(3, 4))
    found[2] = in_turn_on_ranks(2, on(2, 1) | asked_for(request, back | more))
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COURSES)
def test_two_ranks_load_what_one_process_has_saved(found, name):
    assert not found[2][name], found[2][name]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("size", "what"), [(4, ""), (3, ""), (2, "back: ")], ids=["1 to 4", "4 to 3", "3 to 2"])
@pytest.mark.parametrize("name", SOME)
def test_any_number_of_ranks_loads_what_any_other_has_saved(found, name, size, what):
    assert not found[size][what + name], found[size][what + name]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SOME)
def test_as_many_ranks_go_on_with_the_same_bits(found, name):
    assert not found[2][f"resumes: {name}"], found[2][f"resumes: {name}"]


def test_what_is_saved_before_the_first_step_goes_on_as_one_that_begins(found):
    assert not found[2]["before a step"], found[2]["before a step"]


def test_a_checkpoint_that_does_not_fit_changes_nothing(found):
    assert not found[2]["refuses"], found[2]["refuses"]


@pytest.mark.parametrize("name", UNWRAPPED)
def test_what_ranks_have_loaded_from_a_folder_they_unwrap_and_copy(found, name):
    assert not found[2][f"unwraps: {name}"], found[2][f"unwraps: {name}"]


def test_a_look_at_optimizer_state_on_one_rank_alone_changes_nothing(found):
    assert not found[2]["looks"], found[2]["looks"]


def test_optimizer_state_that_one_rank_alone_has_is_refused_before_anything_is_unwrapped(found):
    assert not found[2]["writes"], found[2]["writes"]


def test_ranks_that_load_or_save_wait_for_those_that_do_something_else_first(found):
    assert not found[2]["elsewhere"], found[2]["elsewhere"]


def test_what_one_rank_cannot_read_all_refuse_before_anything_is_changed(found):
    assert not found[2]["some alone"], found[2]["some alone"]


@pytest.mark.parametrize("name", UNUSED)
def test_parameters_that_torch_has_not_updated_are_saved_without_state(found, name):
    assert not found[2][f"unused: {name}"], found[2][f"unused: {name}"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", UNUSED)
def test_one_process_saves_parameters_that_torch_has_not_updated_without_state(tmp_path, name):
    saves_what_has_no_state(0, 1, str(tmp_path), name)


class OwnSGD(torch.optim.SGD):
    """An optimizer that noria does not know: it cannot tell what state it keeps."""


def test_state_that_is_unknown_before_a_step_is_saved_and_loaded_after_one(tmp_path):
    def new(steps: int) -> tuple[Any, Any]:
        model = Sometimes()
        updater = OwnSGD(model.parameters(), lr=0.1, momentum=0.9)
        noria.wrap(model, updater, device=DEVICE, window=2)
        together(model, updater, [0], 1, range(steps))
        return model, updater

    begun = new(2)
    save(str(tmp_path / "begun"), *begun)
    save(str(tmp_path / "fresh"), *new(0))
    fresh = new(0)
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key.*state, not known before a first step"):
        load(str(tmp_path / "begun"), *fresh)
    with pytest.raises(noria.UsageError, match=r"take a step first"):
        noria.load(tmp_path / "begun", *fresh)
    noria.load(tmp_path / "fresh", *fresh)
    together(*fresh, [0], 1, range(1))
    noria.load(tmp_path / "begun", *fresh)
    assert_same_bits(values_of(*fresh), values_of(*begun))


def test_noria_load_reads_folders_of_other_policies(found):
    assert not found[2]["folders"], found[2]["folders"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COURSES)
@pytest.mark.usefixtures("one_thread", "found")
def test_one_process_loads_what_ranks_have_saved(root, name):
    expected = torch.load(os.path.join(root, name + ".expected"))
    for size in (1, 2, 3, 4) if name in SOME else (1, 2):
        model, updater = made(name, seed=5)
        load(folder_of(root, name, size), model, updater)
        assert_same_bits(values_of(model, updater), expected)
        other, its = made(name, seed=6)
        assert noria.load(folder_of(root, name, size), other, its) == {"step": 2}
        assert_same_bits(values_of(other, its), expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COURSES)
@pytest.mark.usefixtures("found")
def test_plain_torch_reads_whole_tensors_under_the_original_names(root, name, tmp_path):
    expected = torch.load(os.path.join(root, name + ".expected"))
    make = COURSES[name][0]
    for size in (1, 4 if name in SOME else 2):
        dcp_to_torch_save(folder_of(root, name, size), tmp_path / "whole.pt")
        whole = torch.load(tmp_path / "whole.pt")
        model = make()
        assert whole["model"].keys() == model.state_dict().keys() and whole["step"] == 2
        assert_same_bits(whole["model"], {key: expected[key] for key in whole["model"]})
        names = [key for key, p in model.named_parameters() if p.requires_grad]
        for number, key in enumerate(names):
            values = whole["optimizer"]["state"].get(key, {})
            its = {f"{number}.{entry}": value for entry, value in values.items() if isinstance(value, torch.Tensor)}
            assert its
            assert_same_bits(its, {entry: expected[entry] for entry in its})


@pytest.mark.parametrize("name", ["momentum"])
@pytest.mark.usefixtures("one_thread", "found")
def test_plain_torch_goes_on_with_the_same_bits(root, name):
    sides = []
    for is_plain in (True, False):
        if is_plain:
            torch.manual_seed(8)
            model = wide()
            updater = sgd(model.parameters())
            state = dict(zip(("model", "optimizer"), get_state_dict(model, updater), strict=True))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load(state, checkpoint_id=folder_of(root, name, 2))
            set_state_dict(model, updater, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        else:
            model, updater = made(name, seed=9)
            load(folder_of(root, name, 2), model, updater)
        together(model, updater, [0], 1, range(2, 4))
        sides.append(values_of(model, updater))
    assert_same_bits(*sides)
