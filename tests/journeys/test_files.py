"""Moments that lie in files: same bits as in memory, on a slow and on a failing disk; users see current values."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import noria
import pytest
import torch
import torch.distributed.checkpoint as dcp
from noria import _C
from noria.host.limits import Limit
from noria.planning.endurance import endurance_text
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn

from benchmarks.systems.by_noria import least_host_memory as least_host_memory_of
from tests.device import DEVICE, NEEDS_FULL_HOST
from tests.journeys.pairs import HOSTILE, OPTIMIZERS, Net, adamw, go_on_here, loss_of, state_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS_HERE, WIDTH_HERE = 12, 48
DOORS = ["threads", "io_uring"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on a real file system, for this user alone."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as found:
        yield Path(found)


def new(optimizer: Callable[[Any], torch.optim.Optimizer] = adamw) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(BLOCKS_HERE, WIDTH_HERE)
    return model, optimizer(model.parameters())


def wrapped(
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, **policy: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """With `files`: as much of the moments lies there as can. With update="backward" an update is postponed besides."""
    policy = {"device": DEVICE, "window": 3, "kernel": "fused", **policy}
    if "files" in policy and "host_memory" not in policy:
        policy["host_memory"] = least_host_memory(optimizer, **policy)
        if policy.get("update") == "backward":
            policy["host_memory"] = memory_to_postpone(*new(optimizer), **policy)
    return noria.wrap(*new(optimizer), **policy)


def memory_to_postpone(model: nn.Module, optimizer: torch.optim.Optimizer, *, host_memory: int, **policy: Any) -> int:
    """Returns a slot of the gradient ring more than the least `host_memory`, so that one update is postponed."""
    least = noria.plan(model, optimizer, host_memory=host_memory, **policy)
    assert least.ring is not None
    more = host_memory + least.ring.slot_bytes
    found = noria.plan(model, optimizer, host_memory=more, **policy)
    assert found.ring is not None and (least.ring.most_postponed, found.ring.most_postponed) == (0, 1)
    assert found.files.sizes == least.files.sizes
    return more


def least_host_memory(optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, **policy: Any) -> int:
    """What the refusal of less says would do."""
    return least_host_memory_of(*new(optimizer), **policy)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, micro_batches: int = 1) -> None:
    for number in range(first, last):
        for part in range(micro_batches):
            loss_of(model, number * micro_batches + part).backward()
        optimizer.step()
        optimizer.zero_grad()


def begin_from(run: tuple[nn.Module, torch.optim.Optimizer], saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """What a user does after a step that broke off."""
    run[0].load_state_dict(saved[0])
    run[1].load_state_dict(saved[1])
    run[1].zero_grad()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}: {key}"] = torch.as_tensor(value).clone()
    masters = wrapped_by(model).weights.masters
    for slot in wrapped_by(model).context.slots:
        if slot.has_master:
            found[f"{slot.name}: master"] = masters.whole(slot).clone()
    return found


def assert_alike(one: tuple[nn.Module, torch.optim.Optimizer], other: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    assert_same_bits(dict(one[0].state_dict()), dict(other[0].state_dict()))
    assert_same_bits(states(*one), states(*other))


def files_of(model: nn.Module) -> _C.FileHome:
    files = wrapped_by(model).context.home.files
    assert files is not None
    return files


def only_free(num_bytes: int) -> contextlib.AbstractContextManager[Any]:
    """Pretends that copies of these bytes, which lie in files, have room: beside it noria leaves 256 MiB free."""
    limit = Limit("a limit of this test", "test", num_bytes + (256 << 20))
    return mock.patch("noria.runtime.file_state.host_limits", return_value=[limit])


def moved(model: nn.Module) -> dict[str, int]:
    wrapped_by(model).context.engine.idle()
    return {lane.lane: lane.num_ops for lane in noria.report(model).lanes if lane.lane in ("read", "write")}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("update", ["auto", "backward", "blocking"])
def test_files_have_the_bits_of_memory(update, state_dtype, dtype, folder):
    options = {"update": update, "state_dtype": state_dtype, "dtype": dtype}
    there = wrapped(**options)
    faults = _C.RandomFileFaults(seed=3, short_answers=0.3, interruptions=0.1, max_delay_us=200)
    with on_machine(hostility=HOSTILE, file_faults=faults):
        here = wrapped(files=folder, **options)
    before = moved(here[0])
    for each in (there, here):
        train(*each, 0, 5)
    files, after = wrapped_by(here[0]).context.plan.files, moved(here[0])
    num_units = len(files.sizes)
    assert num_units >= 6
    # The low bits that `wrap` has written last are still in slots, and not yet in the file.
    late = files.num_slots if dtype is not None else 0
    assert 0 <= after["write"] - before["write"] - num_units * 5 <= late
    reads = after["read"] - before["read"]
    if update == "backward":  # once a step, and the first ones of the next step; what has a slot is not read
        assert reads == num_units * 5 + files.num_slots - late
    else:
        assert num_units <= reads <= num_units * 5
    assert faults.num_faults > 0
    assert_alike(there, here)


KEEPING = [(rule, None) for rule in sorted(OPTIMIZERS.keys() - {"sgd"})]


@pytest.mark.parametrize(("rule", "dtype"), [*KEEPING, ("sgd", torch.bfloat16), ("lion", torch.bfloat16)])
def test_every_rule_keeps_its_state_in_files(rule, dtype, folder):
    there = wrapped(OPTIMIZERS[rule], dtype=dtype)
    here = wrapped(OPTIMIZERS[rule], dtype=dtype, files=folder)
    for each in (there, here):
        train(*each, 0, 4)
    assert moved(here[0])["read"] > 0
    assert_alike(there, here)


@pytest.mark.parametrize("door", DOORS)
def test_both_doors_have_the_same_bits(door, folder):
    if door == "io_uring" and (reason := _C.uring_absent_reason()):
        pytest.skip(reason)
    there = wrapped()
    with on_machine(file_door=door):
        here = wrapped(files=[folder / "one", folder / "two"])
    for each in (there, here):
        train(*each, 0, 4)
    assert files_of(here[0]).door == door
    assert_alike(there, here)


@pytest.mark.parametrize("window", [2, "auto"])
@pytest.mark.parametrize("update", ["auto", "backward", "blocking"])
def test_other_windows_have_the_bits_of_memory(update, window, folder):
    """With "auto" the window has the whole model."""
    there = wrapped(update=update, window=window)
    with on_machine(hostility=HOSTILE):
        here = wrapped(update=update, window=window, files=folder)
    for each in (there, here):
        train(*each, 0, 4)
    plan = wrapped_by(here[0]).context.plan
    assert plan.window == (2 if window == 2 else 0)
    assert len(plan.files.sizes) >= 6 and moved(here[0])["read"] > 0
    assert_alike(there, here)


def test_units_are_drafted_beside_units_whose_state_lies_in_files(folder, monkeypatch):
    monkeypatch.setattr("noria.model.layout.SLOTS_PER_ELEMENT", 0.5)  # else a log is larger than a record
    there = wrapped()
    policy: dict[str, Any] = {"device": DEVICE, "window": 3, "kernel": "fused", "files": folder, "draft_memory": 60_000}
    least, most = (least_host_memory(**{**policy, **more}) for more in ({"draft_memory": 0}, {"files": None}))
    sizes = range((least + most) // 2, most, 4096)
    memory = next(size for size in sizes if len(noria.plan(*new(), **policy, host_memory=size).drafted) > 1)
    faults = _C.RandomFileFaults(seed=3, short_answers=0.3, interruptions=0.1, max_delay_us=200)
    with on_machine(hostility=HOSTILE, file_faults=faults):
        here = wrapped(**policy, host_memory=memory)
    for each in (there, here):
        train(*each, 0, 3)
        train(*each, 3, 6, micro_batches=2)  # the second one undoes the drafts behind the first
    plan, drafts = wrapped_by(here[0]).context.plan, noria.report(here[0]).drafts
    assert len(plan.files.sizes) >= 4 and len(plan.drafted) > 1
    assert not plan.drafted & plan.files.sizes.keys()
    assert drafts["kept"] > 0 and drafts["undone"] > 0 and moved(here[0])["read"] > 0
    assert_alike(there, here)


@pytest.mark.parametrize("update", ["auto", "blocking"])
def test_with_accumulation_moments_cross_once_a_step(update, folder):
    there, here = wrapped(update=update), wrapped(update=update, files=folder)
    for each in (there, here):
        train(*each, 0, 2, micro_batches=3)
    before = moved(here[0])
    for each in (there, here):
        train(*each, 2, 4, micro_batches=3)
    num_units = len(wrapped_by(here[0]).context.plan.files.sizes)
    after = moved(here[0])
    assert after["write"] - before["write"] == 2 * num_units
    assert after["read"] - before["read"] <= 2 * num_units
    assert_alike(there, here)


class Reordered(Net):
    """Visits some of the blocks, in any order."""

    order: tuple[int, ...] = ()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


def test_under_backward_another_order_costs_few_reads_and_no_bits(folder):
    """Those that were used longest ago are read ahead. Some come later than that, some never, some are looked at."""
    torch.manual_seed(0)
    plain = Reordered(BLOCKS_HERE, WIDTH_HERE)
    policy = {"device": DEVICE, "window": 3, "kernel": "fused", "update": "backward"}
    memory = memory_to_postpone(*new(), host_memory=least_host_memory(**policy, files=folder), **policy, files=folder)
    runs = []
    for more in ({}, {"files": folder, "host_memory": memory}):
        model = copy.deepcopy(plain)
        runs.append(noria.wrap(model, adamw(model.parameters()), **policy, **more))
    files = wrapped_by(runs[1][0]).context.plan.files
    ascending = tuple(range(BLOCKS_HERE))
    orders = [ascending, ascending[::-1], ascending[::2], (5, 3, 9), ascending, ascending, ascending]
    for number, order in enumerate(orders):
        before = moved(runs[1][0])
        for model, optimizer in runs:
            model.order = order
            train(model, optimizer, number, number + 1)
        after = moved(runs[1][0])
        used = after["write"] - before["write"]
        assert used >= len(order)
        if number == 6:  # as in the two steps before
            assert after["read"] - before["read"] == len(files.sizes)
        assert after["read"] - before["read"] <= 2 * used + files.num_slots
        if number in (1, 3, 6):
            for each in runs:
                assert len(states(*each)) > 0
    assert_alike(*runs)


class Repeating(Net):
    """Runs its first blocks twice, and drops what came of it the second time."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        logits = super().forward(tokens)
        for block in self.blocks[:4]:
            x = block(x)
        return logits


def test_a_full_ring_ends_the_wait_of_updates(folder):
    """The first blocks are not complete in the backward, so each keeps a slot. The ring has five."""
    policy: dict[str, Any] = {"device": DEVICE, "window": 3, "kernel": "fused", "update": "backward"}
    with_files = {**policy, "files": folder}
    with_files["host_memory"] = least_host_memory(**with_files)
    with_files["host_memory"] = memory_to_postpone(*new(), **with_files)
    runs = []
    for each in (policy | {"update": "auto"}, with_files):
        torch.manual_seed(0)
        model = Repeating(BLOCKS_HERE, WIDTH_HERE)
        runs.append(noria.wrap(model, adamw(model.parameters()), **each))
        train(*runs[-1], 0, 3)
    assert_alike(*runs)


def test_units_that_are_not_updated_any_more_give_their_slots_back(folder):
    """They are read ahead once more. Then all slots are for the others again."""
    torch.manual_seed(0)
    model = Reordered(BLOCKS_HERE, WIDTH_HERE)
    policy = {"device": DEVICE, "window": 3, "kernel": "fused", "update": "backward", "files": folder}
    memory = least_host_memory(**policy)
    model, optimizer = noria.wrap(model, adamw(model.parameters()), host_memory=memory, **policy)
    num_slots, left_out = wrapped_by(model).context.plan.files.num_slots, (4, 6, 8)
    model.order = tuple(range(BLOCKS_HERE))
    train(model, optimizer, 0, 2)
    assert moved(model)["read"] - moved(model)["write"] == num_slots  # of the next step
    model.order = tuple(number for number in model.order if number not in left_out)
    train(model, optimizer, 2, 6)
    assert moved(model)["read"] - moved(model)["write"] == num_slots + len(left_out)


def test_plan_and_ledger_agree_to_the_byte(folder):
    model, optimizer = wrapped(files=folder)
    train(model, optimizer, 0, 2)
    report = noria.report(model)
    rows = {(row.place, row.purpose): (row.planned, row.taken) for row in report.ledger}
    for planned, taken in rows.values():
        assert planned == taken
    plan = wrapped_by(model).context.plan
    assert rows[("files", "records")][1] == plan.files.file_bytes > 0
    assert rows[("host", "state slots")][1] == plan.files.memory > 0
    for parameter in model.parameters():  # each look holds one more unit
        optimizer.state[parameter]
    for row in noria.report(model).ledger:
        assert row.planned == row.taken, row
    train(model, optimizer, 2, 3)
    assert {(row.place, row.purpose): (row.planned, row.taken) for row in noria.report(model).ledger} == rows


def test_nothing_lies_in_files_if_memory_has_room(folder):
    model, optimizer = wrapped(files=folder, host_memory="1GiB")
    train(model, optimizer, 0, 1)
    assert wrapped_by(model).context.home.files is None
    assert any("nothing lies in files" in note for note in noria.report(model).notes)


# ---- what a step takes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("update", "postponed"), [("auto", 0), ("backward", 0), ("backward", 4), ("blocking", 0)])
def test_a_simulated_step_reads_and_writes_as_a_real_one(update, postponed, folder):
    torch.manual_seed(0)
    model = Net(22, 32)
    optimizer = adamw(model.parameters())
    policy = {"device": DEVICE, "window": 3, "kernel": "fused", "update": update, "files": folder}
    room = least_host_memory_of(model, optimizer, **policy)
    if postponed:
        room += postponed * noria.plan(model, optimizer, **policy, host_memory=room).ring.slot_bytes
    noria.wrap(model, optimizer, **policy, host_memory=room, trace=folder / "trace.json")
    if update == "backward":
        assert wrapped_by(model).context.plan.ring.most_postponed == postponed
    train(model, optimizer, 0, 3)
    before = moved(model)
    train(model, optimizer, 3, 5)
    after = moved(model)
    step = PlannedStep(wrapped_by(model).context.plan, 1, PlanSpeeds(1, 1, 1, 1))
    for lane in ("read", "write"):
        assert after[lane] - before[lane] == 2 * step.lane_use(lane)[0], lane
    names = [unit.name for unit in wrapped_by(model).context.plan.units]
    noria.unwrap(model, optimizer)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    real = [event["name"] for event in events if event["name"].startswith("write_state")]
    assert real[-len(names) :] == [f"write_state {names[span.unit]}" for span in step.spans if span.lane == "write"]


@pytest.mark.parametrize(("update", "slow"), [("auto", "read"), ("backward", "write"), ("blocking", "read")])
def test_a_report_names_a_slow_disk_and_says_how_long_it_lasts(update, slow, folder):
    with on_machine(limits={slow: (0.0, 8000.0)}, update_threads=1):
        model, optimizer = wrapped(update=update, files=[folder / "one", folder / "two"])
    train(model, optimizer, 0, 8)
    moved(model)  # waits until all is written
    report = noria.report(model, host_memory_gib_s=1e6)
    plan = wrapped_by(model).context.plan
    assert report.bound is not None and report.files is not None
    assert report.files.written == pytest.approx(plan.files.file_bytes, rel=0.01)
    name, busy_us = {
        "read": ("reads from disk", report.files.read_us),
        "write": ("writes to disk", report.files.write_us),
    }[slow]
    assert name in report.bound.limit.split(", ")
    assert report.bound.bound_us >= busy_us >= 0.8 * len(plan.files.sizes) * 8000
    assert report.bound.step_us > 0.8 * busy_us
    lasts = endurance_text(report.files.read, report.files.written, report.bound.step_us, 2)
    assert f"files: {lasts}" in str(report) and "each of 2 disks rated for 600 TBW lasts" in lasts
    assert report.advice == f"the disk limits the step: {plan.files.instead_text()}"


@pytest.mark.parametrize("update", ["auto", "blocking"])
def test_a_report_counts_what_the_disk_moves_through_host_memory(update, folder):
    model, optimizer = wrapped(update=update, files=folder)
    train(model, optimizer, 0, 6)
    moved(model)
    report = noria.report(model, host_memory_gib_s=1e-3)
    assert report.bound is not None and report.files is not None
    memory = report.bound.host_memory
    in_files = wrapped_by(model).context.plan.files.file_bytes
    assert memory.state_in_files == report.files.read + report.files.written >= 1.5 * in_files
    assert memory.weights_in_files == report.files.read_weights == 0
    assert memory.us == pytest.approx((memory.updated + memory.copied + memory.in_files) / 1024**3 * 1e9)
    assert report.bound.limit == "host memory" and report.bound.bound_us >= memory.us
    assert memory.bytes_per_parameter > 28 + 12  # two moments, nearly all of them in files
    assert "by reads and writes of files" in str(report)


def test_without_files_a_report_says_nothing_of_a_disk():
    model, optimizer = wrapped()
    train(model, optimizer, 0, 3)
    report = noria.report(model)
    assert report.files is None and "TBW" not in str(report)


# ---- what users see ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["auto", "backward"])
def test_edits_of_state_count(update, folder):
    there, here = wrapped(update=update), wrapped(update=update, files=folder)
    for model, optimizer in (there, here):
        train(model, optimizer, 0, 2)
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg"].mul_(0.5)
        optimizer.state[next(model.parameters())]["exp_avg_sq"].fill_(2.0)
        train(model, optimizer, 2, 4)
    assert_alike(there, here)


def test_a_tensor_of_state_raises_when_its_memory_is_gone(folder):
    model, optimizer = wrapped(files=folder)
    train(model, optimizer, 0, 2)
    unit = next(iter(wrapped_by(model).context.plan.files.sizes))
    parameter = wrapped_by(model).context.units[unit].parameters[0].parameter
    moment = optimizer.state[parameter]["exp_avg"]
    before = moment.clone()
    train(model, optimizer, 2, 3)
    with pytest.raises(RuntimeError, match="lies in a file now"):
        moment.sum()
    now = optimizer.state[parameter]["exp_avg"]
    assert now is moment
    assert not torch.equal(now, before)


def test_a_tensor_of_state_raises_when_looks_have_taken_the_memory_that_a_load_gave_it(folder):
    model, optimizer = wrapped(files=folder)
    train(model, optimizer, 0, 2)
    units = wrapped_by(model).context.plan.files.sizes
    parameters = [wrapped_by(model).context.units[unit].parameters[0].parameter for unit in units]
    moments = {parameter: optimizer.state[parameter]["exp_avg"] for parameter in parameters}
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 2, 3)
    optimizer.load_state_dict(saved)
    for parameter in parameters[:-1]:
        optimizer.state[parameter]
    with pytest.raises(RuntimeError, match="lies in a file now"):
        moments[parameters[-1]].sum()


def test_a_state_that_the_user_has_put_in_place_is_in_the_state_dict(folder):
    there, here = wrapped(dtype=torch.bfloat16), wrapped(dtype=torch.bfloat16, files=folder)
    found = []
    for model, optimizer in (there, here):
        moments = {p: {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(p)} for p in model.parameters()}
        optimizer.state = defaultdict(dict, moments)
        found.append({str(key): values["low_bits"] for key, values in optimizer.state_dict()["state"].items()})
    assert len(found[0]) == len(list(there[0].parameters()))
    assert_same_bits(*found)


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_state_dicts_load_with_and_without_files(state_dtype, folder):
    first = wrapped(files=folder / "first", state_dtype=state_dtype)
    train(*first, 0, 3)
    weights, state = first[0].state_dict(), first[1].state_dict()
    for files in ({}, {"files": folder / "second"}):
        second = wrapped(state_dtype=state_dtype, **files)
        train(*second, 7, 8)
        second[0].load_state_dict(weights)
        second[1].load_state_dict(state)
        if state_dtype == "fp32":
            assert_alike(first, second)
        train(*second, 3, 4)


@pytest.mark.parametrize(("state_dtype", "dtype"), [("fp32", None), ("8bit", None), ("fp32", torch.bfloat16)])
def test_a_saved_run_goes_on_with_and_without_files(state_dtype, dtype, folder):
    never_stopped = wrapped(state_dtype=state_dtype, dtype=dtype)
    train(*never_stopped, 0, 5)
    first = wrapped(files=folder / "first", state_dtype=state_dtype, dtype=dtype)
    train(*first, 0, 3)
    noria.save(folder / "saved", first[0], first[1])
    for number, files in enumerate(({}, {"files": folder / "second"})):
        second = wrapped(state_dtype=state_dtype, dtype=dtype, **files)
        noria.load(folder / "saved", second[0], second[1])
        train(*second, 3, 5)
        assert_alike(never_stopped, second), number


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_folder_of_parts_loads_with_and_without_files(dtype, folder):
    never_stopped = wrapped(dtype=dtype)
    train(*never_stopped, 0, 5)
    first = wrapped(files=folder / "first", dtype=dtype)
    train(*first, 0, 3)
    writer = dcp.FileSystemWriter(folder / "saved", thread_count=2)
    dcp.save(noria.sharded_state(*first), storage_writer=writer)
    assert files_of(first[0]).num_slots == wrapped_by(first[0]).context.plan.files.num_slots  # one unit after the other
    for files in ({}, {"files": folder / "second"}):
        second = wrapped(dtype=dtype, **files)
        noria.load(folder / "saved", *second)
        train(*second, 3, 5)
        assert_alike(never_stopped, second)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_unwrap_gives_plain_tensors(dtype, folder):
    there, here = wrapped(dtype=dtype), wrapped(dtype=dtype, files=folder)
    for model, optimizer in (there, here):
        train(model, optimizer, 0, 3)
        noria.unwrap(model, optimizer)
    assert_same_bits(dict(there[0].state_dict()), dict(here[0].state_dict()))
    for one, other in zip(there[1].state.values(), here[1].state.values(), strict=True):
        assert_same_bits(
            {key: torch.as_tensor(value) for key, value in one.items()},
            {key: torch.as_tensor(value) for key, value in other.items()},
        )
    if dtype is None:  # torch's AdamW cannot step bfloat16 weights beside these moments
        go_on_here(*here)
        loss_of(here[0], 9).backward()
        here[1].step()


SHORT_MEMORY = [("8bit", None, 8), ("bf16", None, 8), ("fp32", torch.bfloat16, 10)]


@pytest.mark.parametrize(("state_dtype", "dtype", "bytes_each"), SHORT_MEMORY)
def test_unwrap_is_refused_without_room_for_moments_in_fp32_and_nothing_is_lost(state_dtype, dtype, bytes_each, folder):
    there = wrapped(state_dtype=state_dtype, dtype=dtype)
    here = wrapped(files=folder, state_dtype=state_dtype, dtype=dtype)
    for each in (there, here):
        train(*each, 0, 2)
    plan = wrapped_by(here[0]).context.plan
    copied = [unit for unit in plan.units if unit.index in plan.files.sizes or state_dtype != "fp32"]
    needed = bytes_each * sum(slot.like.numel() for unit in copied for slot in unit.parameters)
    assert needed > plan.files.state_bytes or state_dtype == "fp32"
    with only_free(needed - 1), pytest.raises(noria.UsageError, match="copies of all that lies in files"):
        noria.unwrap(*here)
    assert noria.is_wrapped(here[0])
    for each in (there, here):
        train(*each, 2, 4)
    with only_free(needed):
        noria.unwrap(*here)
    noria.unwrap(*there)
    assert_same_bits(
        {**there[0].state_dict(), **state_tensors(there[1])}, {**here[0].state_dict(), **state_tensors(here[1])}
    )


def test_a_state_dict_and_a_save_with_hooks_are_refused_without_room_for_floats_of_codes(folder):
    model, optimizer = wrapped(files=folder / "run", state_dtype="8bit")
    train(model, optimizer, 0, 2)
    files = wrapped_by(model).context.plan.files
    needed = 8 * sum(parameter.numel() for parameter in model.parameters())
    needed += (len(files.sizes) - files.num_slots) * files.slot_bytes  # all codes are shown meanwhile
    path = folder / "saved"
    noria.save(path, model, optimizer)
    saved = path.read_bytes()
    optimizer.register_state_dict_post_hook(lambda *_: None)
    for call in (optimizer.state_dict, lambda: noria.save(path, model, optimizer)):
        with only_free(needed - 1), pytest.raises(noria.UsageError, match="copies of all that lies in files"):
            call()
        assert path.read_bytes() == saved
        with only_free(needed):
            call()
        assert path.read_bytes() != saved or call == optimizer.state_dict
        train(model, optimizer, 2, 3)  # what was shown ends


def freeze_and_unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.blocks[3].requires_grad_(False)
    train(model, optimizer, 0, 2)
    model.blocks[3].requires_grad_(True)
    train(model, optimizer, 2, 4)


def edit_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer, 0, 2)
    with noria.materialize(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    train(model, optimizer, 2, 4)


def sleep_and_look(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer, 0, 2)
    with noria.asleep(model):
        pickle.loads(pickle.dumps(optimizer.state_dict()))
    train(model, optimizer, 2, 4)


def begin_anew(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer, 0, 2)
    del optimizer.state[model.blocks[2].expand.weight]
    train(model, optimizer, 2, 3)
    optimizer.state.clear()
    train(model, optimizer, 3, 5)


def replace_and_swap(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer, 0, 2)
    one, other = model.blocks[1].expand.weight, model.blocks[2].expand.weight
    optimizer.state[one]["exp_avg"] = torch.full_like(optimizer.state[one]["exp_avg"], 0.25)
    optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]
    train(model, optimizer, 2, 4)


def clip_and_evaluate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(3):
        loss_of(model, number).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, number)


JOURNEYS = [freeze_and_unfreeze, edit_weights, sleep_and_look, begin_anew, replace_and_swap, clip_and_evaluate]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("journey", JOURNEYS)
def test_journeys_have_the_bits_of_memory(journey, dtype, folder):
    there, here = wrapped(dtype=dtype), wrapped(dtype=dtype, files=folder)
    for each in (there, here):
        journey(*each)
    assert moved(here[0])["read"] > 0
    assert_alike(there, here)


def test_averages_of_masters_whose_low_bits_lie_in_files(folder):
    there = wrapped(dtype=torch.bfloat16)
    options = {"device": DEVICE, "window": 3, "kernel": "fused", "dtype": torch.bfloat16, "files": folder}
    averages = 4 * sum(parameter.numel() for parameter in there[0].blocks[2].parameters())
    here = wrapped(**options, host_memory=least_host_memory(**options) + 3 * averages // 2)  # less than a unit's state
    found = []
    for model, optimizer in (there, here):
        average = noria.ema(model.blocks[2], 0.5)
        for number in range(3):
            train(model, optimizer, number, number + 1)
            before = moved(model)
            average.update()
            assert moved(model).get("write") == before.get("write")  # it only reads
        with average.applied():
            loss = loss_of(model, 7).detach()
        train(model, optimizer, 3, 5)
        found.append({**average.state_dict(), "loss": loss})
    assert all("low bits" in record for record in wrapped_by(here[0]).context.plan.files.offsets.values())
    assert_same_bits(*found)
    assert_alike(there, here)


@NEEDS_FULL_HOST
def test_averages_that_have_no_room_beside_state_in_files_are_refused(folder):
    options = {"device": DEVICE, "dtype": torch.bfloat16, "files": folder}
    model, _ = wrapped(**options, host_memory=least_host_memory(**options))
    with pytest.raises(noria.UsageError, match="averaged weights"):
        noria.ema(model, 0.5)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_that_is_wrapped_again_has_files_again(dtype, folder):
    there, here = wrapped(dtype=dtype), wrapped(dtype=dtype, files=folder)
    least = least_host_memory(device=DEVICE, window=3, kernel="fused", dtype=dtype, files=folder)
    for (model, optimizer), options in ((there, {}), (here, {"files": folder, "host_memory": least})):
        train(model, optimizer, 0, 2)
        noria.unwrap(model, optimizer)
        noria.wrap(model, optimizer, device=DEVICE, window=3, kernel="fused", dtype=dtype, **options)
        train(model, optimizer, 2, 4)
    assert files_of(here[0]).file_bytes > 0
    assert_alike(there, here)


# ---- failures ------------------------------------------------------------------------------------------------------


FAILURES = [
    *((update, way, errno.EIO) for update in ("auto", "backward", "blocking") for way in ("read", "write")),
    ("auto", "write", errno.ENOSPC),
    ("backward", "write", errno.EDQUOT),
]


@pytest.mark.parametrize(("update", "way", "error"), FAILURES)
def test_a_disk_that_fails_is_told_and_a_load_mends_it(update, way, error, folder):
    there = wrapped(update=update)
    faults = _C.RandomFileFaults()
    with on_machine(file_faults=faults):
        here = wrapped(update=update, files=folder)
    for each in (there, here):
        train(*each, 0, 2)
    saved = copy.deepcopy((there[0].state_dict(), there[1].state_dict()))  # torch would share the step counts
    faults.fail_next(way, error, 2)
    with pytest.raises(Exception, match=os.strerror(error)):
        train(*here, 2, 5)
    with pytest.raises(Exception, match=f"{os.strerror(error)}|different steps|after each backward"):
        train(*here, 5, 6)
    torn = wrapped_by(here[0]).context.engine.torn()
    assert "broke off" in torn or (update, way) == ("backward", "read")  # what was read ahead in vain is read again
    if not torn:
        here[1].step()  # of the backward that had no error
    begin_from(here, saved)
    for each in (there, here):
        train(*each, 2, 4)
    assert_alike(there, here)


@pytest.mark.parametrize("number", [1, 3])
def test_after_a_read_ahead_that_failed_the_call_that_raised_is_repeated(number, folder):
    there = wrapped(update="backward")
    faults = _C.RandomFileFaults()
    with on_machine(file_faults=faults):
        here = wrapped(update="backward", files=folder)
    for each in (there, here):
        train(*each, 0, 2)
    told = []

    def repeated(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            told.append(str(error))
            return call()

    faults.fail_next("read", errno.EIO, number)  # the first reads of this backward are read ahead
    for batch in range(2, 5):
        repeated(lambda batch=batch: loss_of(here[0], batch).backward())
        repeated(here[1].step)
        here[1].zero_grad()
    assert told and all(os.strerror(errno.EIO) in each for each in told), told
    assert not wrapped_by(here[0]).context.engine.torn()
    train(*there, 2, 5)
    assert_alike(there, here)


def test_a_limit_on_file_sizes_is_told_before_anything_moves(folder):
    model, optimizer = new()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    policy: dict[str, Any] = {"device": DEVICE, "window": 3, "kernel": "fused", "files": folder}
    policy["host_memory"] = least_host_memory(**policy)
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        with pytest.raises(noria.UsageError, match="ulimit -f"):
            noria.wrap(model, optimizer, **policy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert_same_bits(before, dict(model.state_dict()))
    run = noria.wrap(model, optimizer, **policy)
    there = wrapped()
    for each in (there, run):
        train(*each, 0, 2)
    assert_alike(there, run)


def test_nothing_is_left_of_a_process_that_was_killed(folder):
    script = """
        import sys, noria, torch
        from tests.journeys.test_files import train, wrapped
        model, optimizer = wrapped(files=sys.argv[1])
        train(model, optimizer, 0, 1)
        print("trained", flush=True)
        while True:
            train(model, optimizer, 0, 1)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(folder / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "trained\n"
        child.kill()
    assert os.listdir(folder / "run") == []


def test_folders_of_others_and_other_options_are_refused(folder):
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "link").symlink_to(folder)
    for files, why in (("open", "all users"), ("link", "symbolic link"), ("no/such", "No such file")):
        with pytest.raises(noria.UsageError, match=why):
            wrapped(files=folder / files)
    for option in ({"kernel": "torch"}, {"optimizer_device": "device"}, {"resident": "all"}, {"files": []}):
        with pytest.raises(noria.UsageError, match="files"):
            noria.Policy(**{"files": str(folder), **option})
    with pytest.raises(noria.UsageError, match="file_memory"):
        noria.Policy(file_memory="1GiB")
    model, optimizer = new()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(noria.UsageError, match="host_memory of at least"):
        noria.wrap(model, optimizer, device=DEVICE, kernel="fused", files=folder, host_memory=4096)
    assert_same_bits(before, dict(model.state_dict()))


def test_shown_moments_live_on_if_the_model_is_gone(folder):
    model, optimizer = wrapped(files=folder)
    train(model, optimizer, 0, 2)
    before = states(model, optimizer)
    kept = optimizer.state_dict()
    noria.unwrap(model, optimizer)
    del model, optimizer
    gc.collect()
    after = [torch.as_tensor(value) for state in kept["state"].values() for value in state.values()]
    assert_same_bits(dict(enumerate(before.values())), dict(enumerate(after)))


def test_a_run_that_begins_anew_after_a_broken_backward_begins_with_zeros(folder):
    there, here = wrapped(update="backward"), wrapped(update="backward", files=folder)
    saved = copy.deepcopy((here[0].state_dict(), here[1].state_dict()))

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("in the middle of backward")

    handle = here[0].blocks[0].register_full_backward_hook(lambda *_: fail(torch.empty(0)))
    with pytest.raises(RuntimeError, match="in the middle"):
        loss_of(here[0], 0).backward()
    handle.remove()
    begin_from(here, saved)
    for each in (there, here):
        train(*each, 0, 3)
    assert_alike(there, here)


def test_a_stale_tensor_raises_also_behind_a_first_step_of_its_unit(folder):
    model, optimizer = wrapped(files=folder)
    train(model, optimizer, 0, 2)
    block = model.blocks[2]
    moment = optimizer.state[block.expand.weight]["exp_avg"].detach()
    del optimizer.state[block.contract.weight]
    train(model, optimizer, 2, 3)
    with pytest.raises(RuntimeError, match="lies in a file now"):
        moment.sum()


def test_weights_alone_move_no_moments(folder):
    model, optimizer = wrapped(files=folder)
    train(model, optimizer, 0, 2)
    before = moved(model)
    model.state_dict()
    with noria.materialize(model), torch.no_grad():
        next(model.parameters()).mul_(0.5)
    assert len(optimizer.state) == len(list(model.parameters()))
    assert moved(model) == before
