"""Frozen weights that lie in files: same bits as in memory; users read and write them as ever."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import noria
import pytest
import torch
import torch.distributed.checkpoint as dcp
from noria import _C
from noria.model.layout import HomeUnit
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn

from benchmarks.systems.by_noria import least_host_memory
from tests.device import DEVICE
from tests.journeys.pairs import HOSTILE, Net, adamw, loss_of, state_tensors
from tests.journeys.test_files import DOORS, train

pytestmark = pytest.mark.usefixtures("one_thread")

Run = tuple[nn.Module, Any]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on a real file system, for this user alone."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as found:
        yield Path(found)


def new() -> Run:
    """Every third block is frozen; in the others the widest weights are."""
    torch.manual_seed(0)
    model = Net(12, 96)
    for number, block in enumerate(model.blocks):
        (block if number % 3 == 0 else block.expand).requires_grad_(False)
    return model, adamw([each for each in model.parameters() if each.requires_grad])


def wrapped(files: Any = None, **policy: Any) -> Run:
    """With `files`: as much as can lies there."""
    policy = {"device": DEVICE, "window": 3, "kernel": "fused", **policy}
    if files is not None:
        policy = {**policy, "files": files}
        if "host_memory" not in policy:
            policy["host_memory"] = least_host_memory(*new(), **policy)
    return noria.wrap(*new(), **policy)


def assert_alike(one: Run, other: Run) -> None:
    assert_same_bits(
        {**one[0].state_dict(), **state_tensors(one[1])}, {**other[0].state_dict(), **state_tensors(other[1])}
    )


def num_reads(model: nn.Module) -> int:
    wrapped_by(model).context.engine.idle()
    return next(lane.num_ops for lane in noria.report(model).lanes if lane.lane == "read_weights")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("update", ["auto", "backward", "blocking"])
def test_frozen_files_have_the_bits_of_memory(update, dtype, folder):
    there = wrapped(update=update, dtype=dtype)
    faults = _C.RandomFileFaults(seed=3, short_answers=0.3, interruptions=0.1, max_delay_us=200)
    with on_machine(hostility=HOSTILE, file_faults=faults):
        here = wrapped([folder / "one", folder / "two"], update=update, dtype=dtype)
    for each in (there, here):
        train(*each, 0, 4)
    files = wrapped_by(here[0]).context.plan.files
    assert len(files.weights) == 12 and len(files.sizes) >= 6
    assert num_reads(here[0]) >= 4 * len(files.weights)
    assert faults.num_faults > 0
    assert_alike(there, here)


@pytest.mark.parametrize("window", [2, 5])
@pytest.mark.parametrize("door", DOORS)
def test_both_doors_and_windows_have_the_same_bits(door, window, folder):
    if door == "io_uring" and (reason := _C.uring_absent_reason()):
        pytest.skip(reason)
    there = wrapped(window=window)
    with on_machine(file_door=door):
        here = wrapped(folder, window=window)
    for each in (there, here):
        train(*each, 0, 3, micro_batches=2)
    assert_alike(there, here)


def test_weights_lie_in_files_only_if_state_there_is_not_enough(folder):
    state, all_of_it = (wrapped_by(wrapped(folder, host_memory=size)[0]).context.plan.files for size in sizes(folder))
    assert state.sizes and not state.weights
    assert len(all_of_it.weights) == 12


def sizes(folder: Path) -> tuple[int, int]:
    """Host memory for which some state lies in files, and for which as much lies there as can."""
    policy: dict[str, Any] = {"device": DEVICE, "window": 3, "kernel": "fused"}
    return least_host_memory(*new(), **policy) - 1, least_host_memory(*new(), **policy, files=folder)


@pytest.mark.parametrize("update", ["auto", "backward"])
def test_plan_and_ledger_agree_and_the_home_is_smaller(update, folder):
    there, here = wrapped(update=update, draft_memory=0), wrapped(folder, update=update, draft_memory=0)
    train(*here, 0, 2)
    report, plan = noria.report(here[0]), wrapped_by(here[0]).context.plan
    assert report.ledger_agrees, str(report)
    saved = wrapped_by(there[0]).context.plan.home_bytes - plan.home_bytes
    slots = plan.files.memory + plan.files.weights_slot_bytes * 2
    assert saved == pytest.approx(plan.files.file_bytes - slots, abs=64 * 4096)
    assert "frozen weights of 12 of" in str(plan)
    assert os.listdir(folder) == []


def resident_bytes(folder: Path) -> int:
    """How much of what is mapped from files there has memory."""
    found, is_there = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split()[0]:  # the line that begins a range
            is_there = str(folder) in line
        elif is_there and name == "Rss":
            found += int(rest.split()[0]) * 1024
    return found


def test_mapped_weights_take_memory_only_while_a_user_looks(folder):
    model, optimizer = wrapped(folder)
    weights_bytes = wrapped_by(model).context.plan.files.weights_bytes
    assert resident_bytes(folder) == weights_bytes  # `wrap` has written them
    train(model, optimizer, 0, 1)
    wrapped_by(model).context.engine.idle()
    assert resident_bytes(folder) == 0
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert resident_bytes(folder) == weights_bytes
    train(model, optimizer, 1, 2)


@pytest.mark.parametrize("update", ["auto", "backward", "blocking"])
def test_a_simulated_step_reads_as_often_as_a_real_one(update, folder):
    model, optimizer = wrapped(folder, update=update)
    train(model, optimizer, 0, 3)
    before = num_reads(model)
    train(model, optimizer, 3, 5)
    step = PlannedStep(wrapped_by(model).context.plan, 1, PlanSpeeds(1, 1, 1, 1))
    assert num_reads(model) - before == 2 * step.lane_use("read_weights")[0]


def test_a_report_counts_what_is_read_of_weights(folder):
    with on_machine(limits={"read_weights": (0.0, 20_000.0)}):
        model, optimizer = wrapped(folder)
    train(model, optimizer, 0, 4)
    num_reads(model)
    report, plan = noria.report(model, host_memory_gib_s=1e6), wrapped_by(model).context.plan
    assert report.files is not None and report.bound is not None
    assert report.files.read > plan.files.file_bytes
    assert report.bound.host_memory.weights_in_files == report.files.read_weights > plan.files.weights_bytes
    assert "reads from disk" in report.bound.limit


# ---- what users see ------------------------------------------------------------------------------------------------


def write_by_load(model: nn.Module, optimizer: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def write_in_place(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for value in model.state_dict().values():
            value.mul_(0.5)


def write_in_a_block(model: nn.Module, optimizer: Any) -> None:
    if DEVICE != "cpu":
        if wrapped_by(model).context.plan.files.weights:
            with pytest.raises(noria.UsageError, match="in a file"), noria.materialize(model):
                pass
        write_in_place(model, optimizer)
        return
    with noria.materialize(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def read_only(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        assert sum(float(value.double().abs().sum()) for value in model.state_dict().values()) > 0


def sleep(model: nn.Module, optimizer: Any) -> None:
    with noria.asleep(model):
        write_in_place(model, optimizer)


def unfreeze(model: nn.Module, optimizer: Any) -> None:
    if DEVICE != "cpu":
        if wrapped_by(model).context.plan.files.weights:
            model.blocks[3].requires_grad_(True)
            with pytest.raises(noria.UsageError, match="frozen weights in files"):
                optimizer.add_param_group({"params": list(model.blocks[3].parameters())})
            model.blocks[3].requires_grad_(False)
        return
    model.blocks[3].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.blocks[3].parameters())})


USES = [write_by_load, write_in_place, write_in_a_block, read_only, sleep, unfreeze]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("use", USES)
def test_uses_between_steps_have_the_bits_of_memory(use: Callable[..., None], dtype, folder):
    policy: dict[str, Any] = {"device": DEVICE, "window": 3, "kernel": "fused", "dtype": dtype}
    room = least_host_memory(*new(), **policy, files=folder) + (700_000 if use is unfreeze and DEVICE == "cpu" else 0)
    there, here = wrapped(dtype=dtype), wrapped(folder, dtype=dtype, host_memory=room)
    for each in (there, here):
        train(*each, 0, 2)
        use(*each)
        train(*each, 2, 4)
    assert wrapped_by(here[0]).context.plan.files.weights
    assert_alike(there, here)


def test_a_saved_run_goes_on_with_and_without_files(folder):
    never_stopped, first = wrapped(), wrapped(folder / "first")
    train(*never_stopped, 0, 4)
    train(*first, 0, 2)
    noria.save(folder / "saved", *first)
    for files in (None, folder / "second"):
        second = wrapped(files)
        with torch.no_grad():
            for value in second[0].state_dict().values():
                value.zero_()
        noria.load(folder / "saved", *second)
        train(*second, 2, 4)
        assert_alike(never_stopped, second)


def test_unwrap_takes_weights_into_memory(folder):
    there, here = wrapped(), wrapped(folder)
    for each in (there, here):
        train(*each, 0, 3)
    kept = here[0].state_dict()["blocks.0.expand.weight"]
    before = kept.clone()
    assert num_mappings(folder) > 0
    noria.unwrap(*here)
    noria.unwrap(*there)
    assert num_mappings(folder) == 0
    assert_same_bits({"kept": kept}, {"kept": before})
    assert_alike(there, here)


def num_mappings(folder: Path) -> int:
    """How many ranges of this process are mapped from files there."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_an_unwrap_without_memory_is_refused_and_nothing_is_lost(folder, monkeypatch):
    there, here = wrapped(), wrapped(folder)
    for each in (there, here):
        train(*each, 0, 2)
    free = noria.host.limits.Limit("a limit of this test", "test", 1)
    monkeypatch.setattr("noria.runtime.file_state.host_limits", lambda: [free])
    with pytest.raises(noria.UsageError, match="copies of all that lies in files"):
        noria.unwrap(*here)
    monkeypatch.undo()
    for each in (there, here):
        train(*each, 2, 4)
    assert_alike(there, here)


# ---- a disk that fails ---------------------------------------------------------------------------------------------


def trained_on_a_disk_that_may_fail(folder: Path) -> tuple[Run, Run, _C.RandomFileFaults]:
    """A run in memory, and one with files, both behind two steps; and what goes wrong on the disk."""
    there = wrapped()
    faults = _C.RandomFileFaults(seed=1)
    with on_machine(file_faults=faults):
        here = wrapped(folder)
    for each in (there, here):
        train(*each, 0, 2)
    return there, here, faults


def test_a_read_that_fails_raises_and_the_next_one_goes_on(folder):
    there, here, faults = trained_on_a_disk_that_may_fail(folder)
    wrapped_by(here[0]).context.engine.idle()
    faults.fail_next("read", errno.EIO, 0, 1)
    with pytest.raises(RuntimeError, match="a file in"):
        for _ in range(3):
            with torch.no_grad():
                loss_of(here[0], 0)
    for each in (there, here):
        train(*each, 2, 4)
    assert_alike(there, here)


def test_weights_that_could_not_be_written_are_told_until_they_are_loaded_again(folder):
    there, here, faults = trained_on_a_disk_that_may_fail(folder)
    weights = {name: value * 0.5 for name, value in there[0].state_dict().items()}
    for model, _ in (there, here):
        model.load_state_dict(weights)
    faults.fail_next("write", errno.EIO, 0, 1)
    for told in ("Load these weights again", "is torn", "is torn"):
        with pytest.raises(RuntimeError, match=told), torch.no_grad():
            loss_of(here[0], 0)
    here[0].load_state_dict(weights)  # at once, behind a pass that has failed
    for each in (there, here):
        train(*each, 2, 4)
    assert_alike(there, here)


def test_lost_weights_are_neither_shown_nor_saved_until_all_of_them_are_loaded_again(folder):
    there, here, faults = trained_on_a_disk_that_may_fail(folder)
    weights = {name: value * 0.5 for name, value in there[0].state_dict().items()}
    old = dict(here[0].state_dict())
    for model, _ in (there, here):
        model.load_state_dict(weights)
    faults.fail_next("write", errno.EIO, 0, 1)
    with pytest.raises(RuntimeError, match="Load these weights again"), torch.no_grad():
        loss_of(here[0], 0)
    for look in (
        lambda: here[0].state_dict(),
        lambda: noria.save(folder / "saved.pt", *here),
        lambda: noria.unwrap(*here),
        lambda: here[0].load_state_dict(dict(list(weights.items())[::2]), strict=False) and here[0].state_dict(),
    ):
        with pytest.raises(noria.UsageError, match=r"frozen weights of .* that it has lost or changed"):
            look()
    for value in old.values():
        with contextlib.suppress(RuntimeError):
            value.numpy()  # asks to write
    for _ in range(2):
        with pytest.raises(RuntimeError, match="is torn"), torch.no_grad():
            loss_of(here[0], 0)
    assert not (folder / "saved.pt").exists()
    here[0].load_state_dict(weights)
    for each in (there, here):
        train(*each, 2, 4)
    assert_alike(there, here)


def test_a_load_behind_a_read_that_failed_does_not_hear_of_it(folder):
    there, here, faults = trained_on_a_disk_that_may_fail(folder)
    weights = {name: value * 0.5 for name, value in there[0].state_dict().items()}
    wrapped_by(here[0]).context.engine.idle()
    faults.fail_next("read", errno.EIO, 0, 1)
    with pytest.raises(RuntimeError, match="a file in"), torch.no_grad():
        loss_of(here[0], 0)
    for model, _ in (there, here):
        model.load_state_dict(weights)
    for each in (there, here):
        train(*each, 2, 4)
    assert_alike(there, here)


def change_a_bit(model: nn.Module) -> HomeUnit:
    """Of a unit that also trains, through the mapping, behind noria's back."""
    context = wrapped_by(model).context
    context.engine.idle()
    units = [context.units[number] for number in context.plan.files.weights]
    unit = next(unit for unit in units if any(slot.trainable for slot in unit.parameters))
    _C.bytes_at(unit.working_address + unit.in_file[0], 4096, "cpu")[7] += 1
    return unit


def test_a_changed_bit_is_found(folder):
    model, optimizer = wrapped(folder)
    train(model, optimizer, 0, 2)
    change_a_bit(model)
    with pytest.raises(RuntimeError, match="checksum differs"):
        for number in range(3):
            with torch.no_grad():
                loss_of(model, number)


LOOKS: dict[str, Callable[[Run, Path, torch.Tensor], object]] = {
    "save": lambda run, folder, value: noria.save(folder / "saved.pt", *run),
    "numpy": lambda run, folder, value: value.numpy(),
    "unwrap": lambda run, folder, value: noria.unwrap(*run),
    "parts": lambda run, folder, value: dcp.save(noria.sharded_state(*run), checkpoint_id=folder / "parts"),
    "materialize": lambda run, folder, value: noria.materialize(run[0], read_only=True).__enter__(),
    "a pass": lambda run, folder, value: loss_of(run[0], 0),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_changed_bit_is_found_by_all_that_look_and_stays_known_until_all_is_loaded(look, folder):
    if look == "materialize" and DEVICE != "cpu":
        pytest.skip("a device refuses to show weights that lie in files")
    there, here = wrapped(), wrapped(folder)
    for each in (there, here):
        train(*each, 0, 2)
    shown = dict(here[0].state_dict())
    weights = {name: value.clone() for name, value in there[0].state_dict().items()}
    unit = change_a_bit(here[0])
    frozen = [slot.name for slot in unit.parameters if not slot.trainable]
    assert len(frozen) == 2
    # What trains may be written: that is not taken for a write of what is frozen.
    here[1].load_state_dict(here[1].state_dict())
    here[0].load_state_dict({name: weights[name] for name in weights.keys() - frozen}, strict=False)
    shown[next(slot.name for slot in unit.parameters if slot.trainable)].mul_(1.0)
    with pytest.raises(BaseException, match="checksum differs"):
        LOOKS[look](here, folder, shown[frozen[0]])
    here[0].load_state_dict({frozen[0]: weights[frozen[0]]}, strict=False)
    for again in (lambda: loss_of(here[0], 0), lambda: noria.save(folder / "saved.pt", *here)):
        with pytest.raises(RuntimeError, match="checksum differs"):
            again()
    assert not (folder / "saved.pt").exists()
    here[0].load_state_dict({frozen[1]: weights[frozen[1]]}, strict=False)
    here[0].load_state_dict(weights)
    for each in (there, here):
        train(*each, 2, 4)
    assert_alike(there, here)


def test_too_little_space_is_refused_with_the_numbers_and_nothing_is_taken(folder):
    model, optimizer = new()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(noria.UsageError, match="host_memory of at least"):
        noria.wrap(model, optimizer, device=DEVICE, files=folder, host_memory=1, window=3, kernel="fused")
    policy: dict[str, Any] = {"device": DEVICE, "window": 3, "kernel": "fused", "files": folder}
    least = least_host_memory(*new(), **policy)
    with pytest.raises(noria.UsageError, match="host_memory of at least"):
        noria.wrap(model, optimizer, **policy, host_memory=least, file_memory=4096)
    assert_same_bits(dict(model.state_dict()), before)


def test_weights_that_are_shown_at_home_stay_in_memory(folder):
    policy: dict[str, Any] = {"device": DEVICE, "window": 3, "kernel": "fused", "reads": "home", "files": folder}
    assert not noria.plan(*new(), **policy, host_memory=least_host_memory(*new(), **policy)).files.weights
