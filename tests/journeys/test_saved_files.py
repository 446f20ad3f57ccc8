"""noria.save reads state that lies in files while it writes: the same bytes as without files, in little memory."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import noria
import noria.runtime.unread_tensors as unread_tensors
import pytest
import torch
import torch.distributed.checkpoint as dcp
from noria import _C
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn

from tests.journeys.pairs import OPTIMIZERS, adamw
from tests.journeys.test_files import assert_alike, moved, train, wrapped

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on a real file system, for this user alone."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as found:
        yield Path(found)


def tensors_in(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of nested dicts, by path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    nested = value.items() if isinstance(value, dict) else ()
    return {path: each for key, inner in nested for path, each in tensors_in(inner, f"{name}/{key}").items()}


def pair(
    folder: Path, optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, num_steps: int = 3, **policy: Any
) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Two runs of the same bits: all state in memory, and as much as can in files."""
    runs = [wrapped(optimizer, **policy), wrapped(optimizer, files=folder / "state", **policy)]
    for run in runs:
        train(*run, 0, num_steps)
    assert wrapped_by(runs[1][0]).context.plan.files.sizes
    return runs


def saved(folder: Path, runs: list[tuple[nn.Module, torch.optim.Optimizer]]) -> list[Path]:
    """Saves each run. The files have the same name, because torch writes it into them."""
    paths = [folder / "there" / "saved", folder / "here" / "saved"]
    for path, run in zip(paths, runs, strict=True):
        path.parent.mkdir(exist_ok=True)
        noria.save(path, *run, step=3)
        assert os.listdir(path.parent) == ["saved"]
    return paths


def in_two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Weights decay, biases do not: the groups take turns at the units."""
    found = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [each for each in found if each.ndim > 1]},
            {"params": [each for each in found if each.ndim == 1], "weight_decay": 0.0},
        ]
    )


# ---- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("rule", ["adamw", "momentum"])
def test_the_file_has_the_bytes_of_a_run_without_files(rule, state_dtype, dtype, folder):
    there, here = saved(folder, pair(folder, OPTIMIZERS[rule], state_dtype=state_dtype, dtype=dtype))
    assert there.read_bytes() == here.read_bytes()
    with zipfile.ZipFile(here) as file:
        assert file.testzip() is None
    expected = tensors_in(torch.load(there, weights_only=True))
    for mmap in (True, False):
        assert_same_bits(expected, tensors_in(torch.load(here, weights_only=True, mmap=mmap)))


def test_groups_that_take_turns_at_the_units_have_the_same_bytes(folder):
    there, here = saved(folder, pair(folder, in_two_groups))
    assert there.read_bytes() == here.read_bytes()


def test_state_that_the_user_has_edited_has_the_same_bytes(folder):
    runs = pair(folder)
    for model, optimizer in runs:
        one, other = model.blocks[1].expand.weight, model.blocks[4].expand.weight
        optimizer.state[one]["a view"] = optimizer.state[one]["exp_avg"][1:, ::2]
        optimizer.state[one]["exp_avg_sq"] = optimizer.state[one]["exp_avg_sq"].t().clone().t()
        optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]
        optimizer.state[model.blocks[2].expand.weight] = {}
        optimizer.state[model.blocks[3].expand.weight]["exp_avg"].mul_(0.5)
    there, here = saved(folder, runs)
    assert there.read_bytes() == here.read_bytes()
    loaded = torch.load(here, weights_only=True)["optimizer"]["state"]
    [found] = [values for values in loaded.values() if "a view" in values]
    assert found["a view"].untyped_storage()._cdata == found["exp_avg"].untyped_storage()._cdata


def test_weights_that_are_not_contiguous_have_the_same_bytes(folder):
    def transposed(parameters: Any) -> torch.optim.Optimizer:
        found = list(parameters)
        for each in found:
            if each.ndim == 2:
                each.data = each.data.t().contiguous().t()
        return adamw(found)

    there, here = saved(folder, pair(folder, transposed))
    assert there.read_bytes() == here.read_bytes()
    loaded = torch.load(here, weights_only=True)["optimizer"]["state"]
    assert any(not values["exp_avg"].is_contiguous() for values in loaded.values())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_each_record_is_read_once_and_none_is_written_and_the_bar_hears_of_each(dtype, folder, monkeypatch):
    told = []

    class Bar:
        def __init__(self, what: str, total: int) -> None:
            told.append(total)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *raised: object) -> None:
            pass

        def tell(self, before: int, now: int) -> None:
            told.append(before + now)

    _, (model, optimizer) = pair(folder, dtype=dtype)
    monkeypatch.setattr(unread_tensors, "Bar", Bar)
    before = moved(model)
    noria.save(folder / "saved", model, optimizer)
    sizes = wrapped_by(model).context.plan.files.sizes
    after = moved(model)
    assert after["read"] - before["read"] <= len(sizes)
    assert after["write"] == before["write"]
    total, *done = told
    assert 0.9 * sum(sizes.values()) <= total <= sum(sizes.values())
    assert done == sorted(done)
    assert done[-1] == total
    assert len(done) >= 2 * len(sizes)


@pytest.mark.parametrize("is_refused", [False, True], ids=["saved", "refused"])
def test_moments_that_were_taken_before_a_save_cannot_be_written_behind_it(is_refused, folder):
    """A save does not write records back, so what is written into one would be lost."""
    _, (model, optimizer) = pair(folder)
    units = wrapped_by(model).context.plan.files.sizes
    slots = [slot for slot in wrapped_by(model).context.slots if slot.unit in units]
    taken = [optimizer.state[slot.parameter]["exp_avg"] for slot in slots]
    noria.save(folder / "saved", model, optimizer)
    taken[-1].mul_(2)  # until the next step they count
    train(model, optimizer, 3, 4)
    if is_refused:
        with pytest.raises(noria.UsageError, match="wrong"):
            noria.save(folder / "saved", model, optimizer, wrong=Path("what weights_only does not read"))
    else:
        noria.save(folder / "saved", model, optimizer)
    for each in taken:
        with pytest.raises(RuntimeError, match="lies in a file now"):
            each.mul_(2)


def test_a_run_trains_on_after_a_save_and_its_file_goes_on_elsewhere(folder):
    there, here = pair(folder)
    noria.save(folder / "saved", *here)
    for files in ({}, {"files": folder / "other"}):
        other = wrapped(**files)
        noria.load(folder / "saved", *other)
        train(*other, 3, 5)
        if not files:
            train(*there, 3, 5)
            train(*here, 3, 5)
        assert_alike(there, other)
    assert_alike(there, here)


# ---- what users see ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_hooks_of_the_state_dict_see_values(state_dtype, folder):
    runs = pair(folder, state_dtype=state_dtype)
    for _, optimizer in runs:

        def double(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            for values in state["state"].values():
                values["exp_avg"] = values["exp_avg"] * 2
            return state

        optimizer.register_state_dict_post_hook(double)
    there, here = saved(folder, runs)
    assert there.read_bytes() == here.read_bytes()


def test_state_dict_itself_has_plain_tensors(folder):
    there, here = pair(folder)
    noria.save(folder / "saved", *here)
    state = here[1].state_dict()
    assert {type(value) for values in state["state"].values() for value in values.values()} == {torch.Tensor}
    assert_same_bits(tensors_in(there[1].state_dict()), tensors_in(state))


def test_a_stand_in_refuses_all_operators():
    stand_in = unread_tensors.UnreadTensors().stand_in(
        torch.ones(3), lambda: torch.ones(3).untyped_storage(), lambda: None
    )
    for use in (lambda: stand_in + 1, stand_in.clone, stand_in.cpu().sum, lambda: stand_in.to("meta")):
        with pytest.raises(noria.UsageError, match="lies in a file"):
            use()


# ---- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_before", [0, 3, 8])
def test_a_read_that_fails_leaves_the_old_file(num_before, folder):
    faults = _C.RandomFileFaults()
    with on_machine(file_faults=faults):
        there, here = pair(folder)
    noria.save(folder / "saved", *here)
    before = (folder / "saved").read_bytes()
    for run in (there, here):
        train(*run, 3, 4)
    wrapped_by(here[0]).context.engine.idle()
    faults.fail_next("read", errno.EIO, num_before)
    with pytest.raises(Exception, match="Input/output error"):
        noria.save(folder / "saved", *here)
    assert sorted(os.listdir(folder)) == ["saved", "state"]
    assert (folder / "saved").read_bytes() == before
    with contextlib.suppress(noria.MachineError):
        wrapped_by(here[0]).context.engine.idle()  # the next pass would tell the failure again
    noria.save(folder / "saved", *here)  # the disk is well again, and nothing is lost
    other = wrapped()
    noria.load(folder / "saved", *other)
    for run in (there, here, other):
        train(*run, 4, 6)
    assert_alike(there, here)
    assert_alike(there, other)


def save_folder(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dcp.save(noria.sharded_state(model, optimizer), checkpoint_id=path.with_name("parts"))


def make_plain(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    noria.unwrap(model, optimizer)


@pytest.mark.parametrize("act", [noria.save, save_folder, make_plain])
@pytest.mark.parametrize("ways", [["write"], ["write", "read"]])
def test_a_disk_that_takes_no_more_is_told_before_zeros_are_seen(ways, act, folder):
    faults = _C.RandomFileFaults()
    with on_machine(file_faults=faults):
        _, here = pair(folder)
    noria.save(folder / "saved", *here)
    before = (folder / "saved").read_bytes()
    train(*here, 3, 4)
    noria.save(folder / "later", *here)
    noria.load(folder / "later", *here)  # what came last is still in slots, and not in the file
    wrapped_by(here[0]).context.engine.idle()
    for way in ways:
        faults.fail_next(way, errno.EIO, 0, 1000)
    with pytest.raises(BaseException, match="Input/output error"):  # as torch.distributed.checkpoint wraps it
        act(folder / "saved", *here)
    assert not list(folder.glob("*.part"))
    assert (folder / "saved").read_bytes() == before


def test_a_save_that_cannot_pickle_leaves_the_old_file(tmp_path):
    noria.save(tmp_path / "saved", nn.Linear(2, 2))
    before = (tmp_path / "saved").read_bytes()
    with pytest.raises(Exception, match="lambda"):
        noria.save(tmp_path / "saved", nn.Linear(2, 2), wrong=lambda: 0)
    assert os.listdir(tmp_path) == ["saved"]
    assert (tmp_path / "saved").read_bytes() == before


# ---- memory --------------------------------------------------------------------------------------------------------

PROGRAM = """
import gc, json, sys
import psutil, torch, noria
from noria import _C
from noria.wrapped import wrapped_by
from torch import nn

folder, width, depth = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)

def wrapped(width, depth, host_memory):
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    optimizer = torch.optim.AdamW(model.parameters())
    return noria.wrap(model, optimizer, device="cpu", window=2, units=[nn.Linear], kernel="fused",
                      files=folder + "/state", host_memory=host_memory)

def trained(width, depth):
    try:
        wrapped(width, depth, 1)
    except noria.UsageError as error:
        least = int(str(error).split("(")[1].split(" bytes)")[0])
    model, optimizer = wrapped(width, depth, least)
    for _ in range(2):
        model(torch.ones(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    wrapped_by(model).context.engine.idle()
    return model, optimizer

noria.save(folder + "/small", *trained(8, 12))  # imports what a save imports
model, optimizer = trained(width, depth)
gc.collect()
_C.return_freed_memory()
before = psutil.Process().memory_info().rss
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
noria.save(folder + "/saved", model, optimizer)
with open("/proc/self/status") as file:
    [peak] = [int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM")]
sizes = wrapped_by(model).context.plan.files.sizes
print(json.dumps({"growth": peak - before, "unit": max(sizes.values()), "files": sum(sizes.values())}))
"""


@pytest.mark.cpu_only("it wraps on the CPU in a process of its own")
def test_a_save_needs_memory_for_few_units(folder):
    paths = os.pathsep.join([os.path.dirname(os.path.dirname(noria.__file__)), "."])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), "1024", "24"],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["files"] >= 100 * MIB, found
    assert found["growth"] <= 2 * found["unit"] + 4 * MIB, found
