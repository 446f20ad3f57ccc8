"""Ranks that share a model, with state in files: each rank has its own, and the bits are those of no files."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import noria
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from noria import _C
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn

from benchmarks.systems.by_noria import least_host_memory
from tests.device import DEVICE
from tests.journeys import test_files, test_frozen_files
from tests.journeys.pairs import HOSTILE, Net, adamw, loss_of, state_tensors
from tests.ranks import asked_for, in_turn_on_ranks, on_ranks

Run = tuple[nn.Module, Any]

POLICIES: dict[str, dict[str, Any]] = {
    "a window": {},
    "moments of 8 bits": {"state_dtype": "8bit"},
    "blocking": {"update": "blocking"},
    "inside backward": {"update": "backward"},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16, inside backward": {"dtype": torch.bfloat16, "update": "backward"},
    "inside backward, parameters that one rank does not use": {"update": "backward", "gates": True},
    "frozen weights": {"freezes": True},
    "frozen weights, unused parameters": {"freezes": True, "find_unused_parameters": True},
}


def folder_of_all(rank: int) -> Path:
    """A folder on a real file system, the same for all ranks."""
    found = [tempfile.mkdtemp(dir="/var/tmp") if rank == 0 else ""]
    dist.broadcast_object_list(found)
    return Path(found[0])


class Gated(nn.Module):
    """A block whose gate rank 0 alone uses."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.gate = nn.Parameter(torch.ones(test_files.WIDTH_HERE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * self.gate if dist.get_rank() == 0 else self.block(x)


def new_gated() -> Run:
    torch.manual_seed(0)
    model = Net(test_files.BLOCKS_HERE, test_files.WIDTH_HERE)
    model.blocks = nn.ModuleList(Gated(block) for block in model.blocks)
    return model, adamw(model.parameters())


def wrapped(folder: Path | None = None, freezes: bool = False, gates: bool = False, **policy: Any) -> Run:
    make = test_frozen_files.new if freezes else new_gated if gates else test_files.new
    policy = {"device": DEVICE, "window": 3, "kernel": "fused", **policy}
    if folder is not None:
        policy = {**policy, "files": folder}
        policy["host_memory"] = least_host_memory(*make(), **policy)
        if policy.get("update") == "backward":
            policy["host_memory"] = test_files.memory_to_postpone(*make(), **policy)
    model, optimizer = make()
    noria.wrap(model, optimizer, **policy)
    return model, optimizer


def train(run: Run, rank: int, first: int, last: int) -> None:
    for number in range(first, last):
        loss_of(run[0], 100 * rank + number).backward()
        run[1].step()
        run[1].zero_grad()


def assert_alike(one: Run, other: Run) -> None:
    assert_same_bits(
        {**one[0].state_dict(), **state_tensors(one[1])}, {**other[0].state_dict(), **state_tensors(other[1])}
    )


def like_memory(rank: int, size: int, name: str) -> None:
    folder = folder_of_all(rank)
    there = wrapped(**POLICIES[name])
    faults = _C.RandomFileFaults(seed=rank + 1, short_answers=0.3, interruptions=0.1, max_delay_us=200)
    with on_machine(hostility=HOSTILE, file_faults=faults):
        here = wrapped(folder / "run", **POLICIES[name])
    for each in (there, here):
        train(each, rank, 0, 4)
    files = wrapped_by(here[0]).context.home.files
    assert files is not None and files.file_bytes > 0
    assert bool(wrapped_by(here[0]).context.plan.files.weights) == ("freezes" in POLICIES[name])
    assert faults.num_faults > 0
    assert_alike(there, here)
    report = noria.report(here[0])
    assert report.ledger_agrees, str(report)
    assert os.listdir(folder / "run") == []
    for each in (there, here):
        noria.unwrap(*each)
    assert_same_bits(
        {**there[0].state_dict(), **state_tensors(there[1])}, {**here[0].state_dict(), **state_tensors(here[1])}
    )


def goes_on(rank: int, size: int, way: str) -> None:
    """From a checkpoint of a run with files: one with files, and one without."""
    folder = folder_of_all(rank)
    policy = {"dtype": torch.bfloat16}
    never_stopped, first = wrapped(**policy), wrapped(folder / "first", **policy)
    train(never_stopped, rank, 0, 4)
    train(first, rank, 0, 2)
    if way == "a file":
        noria.save(folder / "saved", *first)
    else:
        dcp.save(noria.sharded_state(*first), checkpoint_id=folder / "saved")
    for place in (None, folder / "second"):
        second = wrapped(place, **policy)
        train(second, rank, 7, 8)
        noria.load(folder / "saved", *second)
        train(second, rank, 2, 4)
        assert_alike(never_stopped, second)
        noria.unwrap(*second)
    for each in (never_stopped, first):
        noria.unwrap(*each)


def short_of_memory(rank: int, size: int) -> None:
    """What is copied is whole on each rank, in fp32, and both take it from one machine. Rank 1 alone sees the limit."""
    folder = folder_of_all(rank)
    there, here = wrapped(state_dtype="8bit"), wrapped(folder / "run", state_dtype="8bit")
    for each in (there, here):
        train(each, rank, 0, 2)
    elements = sum(slot.shape.numel() for slot in wrapped_by(here[0]).context.slots)
    parts = 8 * elements  # of both ranks together
    calls = {
        "unwrap": (lambda: noria.unwrap(*here), 2 * (4 + 8) * elements + parts),
        "a state dict": (here[1].state_dict, 2 * 8 * elements + parts),
        "a save": (lambda: noria.save(folder / "saved", *here), 8 * elements + parts),
    }
    for call, needed in calls.values():
        seen = test_files.only_free(needed - 1) if rank == 1 else contextlib.nullcontext()
        with seen, pytest.raises(noria.UsageError, match="copies of all that lies in files"):
            call()
    assert not (folder / "saved").exists()
    with test_files.only_free(2 * calls["a save"][1]):
        noria.save(folder / "saved", *here)
    for each in (there, here):
        train(each, rank, 2, 4)
    assert_alike(there, here)
    with test_files.only_free(2 * calls["unwrap"][1]):
        noria.unwrap(*here)
    noria.unwrap(*there)


ACTS = {
    **{name: (like_memory, (name,)) for name in POLICIES},
    **{way: (goes_on, (way,)) for way in ("a file", "a folder")},
    "short of memory": (short_of_memory, ()),
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    yield in_turn_on_ranks(2, asked_for(request, ACTS))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", POLICIES)
def test_ranks_with_files_have_the_bits_of_ranks_without(found, name):
    assert not found[name], found[name]


@pytest.mark.parametrize("way", ["a file", "a folder"])
def test_ranks_go_on_from_a_checkpoint_with_and_without_files(found, way):
    assert not found[way], found[way]


@pytest.mark.parametrize("act", ["short of memory"])
def test_all_ranks_refuse_copies_for_which_the_machine_of_one_has_no_room(found, act):
    assert not found[act], found[act]


def fails_on_rank_1(rank: int, size: int, way: str) -> str:
    faults = _C.RandomFileFaults()
    with on_machine(file_faults=faults):
        run = wrapped(folder_of_all(rank) / "run")
    train(run, rank, 0, 2)
    if rank == 1:
        faults.fail_next(way, errno.EIO, 2)
    try:
        train(run, rank, 2, 6)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.long  # the other rank waits for the group's timeout
@pytest.mark.parametrize("way", ["read", "write"])
def test_a_disk_that_fails_on_one_rank_is_told_by_all(way):
    told = on_ranks(2, fails_on_rank_1, way)
    assert "Input/output error" in told[1], told
    assert told[0], told
