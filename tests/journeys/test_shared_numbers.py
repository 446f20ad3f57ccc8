"""Ranks that share a model tell in numbers what they send each other, and what each has at home."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
from noria import _C
from noria.report import _bound
from noria.testing import on_machine
from noria.trace_file import read_trace
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE, finish
from tests.journeys.pairs import Net, loss_of, sgd
from tests.ranks import in_turn_on_ranks, on_ranks


def wrapped_net(**policy: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, **policy)
    return model, optimizer


def reports_what_ranks_send_each_other(rank: int, size: int, policy: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report_with_trace(size, rank, pathlib.Path(folder) / "trace.json", policy)


def report_with_trace(size: int, rank: int, trace: pathlib.Path, policy: dict[str, Any]) -> None:
    model, optimizer = wrapped_net(window=2, trace=str(trace), **policy)
    loss_of(model, rank).backward()
    model.state_dict()  # collective: after it, all lanes are idle
    finish()
    wrapped = wrapped_by(model)
    assert wrapped is not None
    sums, busy_us = wrapped.context.engine.statistics.step_sums(), wrapped.context.backend.stats("collect")["busy_us"]
    assert busy_us > 0 and abs(sums["forward_collect_us"] + sums["backward_collect_us"] - busy_us) <= 2
    lanes = {lane.lane: lane for lane in noria.report(model).lanes}
    fetch, drain, collect = (lanes[name] for name in ("fetch", "drain", "collect"))
    assert fetch.num_ops > drain.num_ops, lanes
    assert drain.num_ops == len(wrapped.context.units), lanes
    assert collect.num_ops == fetch.num_ops + drain.num_ops, lanes
    doubled = 2 if "reduce_dtype" in policy else 1
    assert collect.bytes == (size - 1) * (fetch.bytes + doubled * drain.bytes)
    assert lanes["compute"].num_ops == len([span for span in read_trace(trace) if span.lane == "compute"])
    spans = [span for span in read_trace(trace) if span.lane == "collect"]
    assert len([span for span in spans if span.verb == "gather"]) == fetch.num_ops
    assert len([span for span in spans if span.verb == "reduce"]) == drain.num_ops
    assert sum(span.num_bytes for span in spans) == collect.bytes
    assert {giver.verb for span in spans if span.verb == "gather" for giver in span.givers} >= {"fetch"}
    assert all("backward" in {giver.verb for giver in span.givers} for span in spans if span.verb == "reduce")
    for number in range(2):
        loss_of(model, number).backward()
        optimizer.step()
    slowed = wrapped.context.engine.statistics.step_sums() | {
        "forward_collect_us": 3_000_000,
        "backward_collect_us": 4_000_000,
    }
    found, steps = _bound(wrapped, slowed, 1e6, None), slowed["num_steps"]
    assert found is not None and found.deferred_us == found.drafting_us == 7e6 / steps
    assert "collect " in str(noria.report(model))


def names_what_ranks_can_do_about_evicted_weights(rank: int, size: int) -> None:
    model, _ = wrapped_net(window=2)
    with pytest.raises(RuntimeError) as caught:
        model.blocks[2].expand.weight.sum()
    for part in ('"blocks.2"', "is evicted", "noria.materialize(model):`, which all ranks enter"):
        assert part in str(caught.value)


# ---- host memory ------------------------------------------------------------------------------------------------

MIB = 1 << 20
NOISE = 24 * MIB  # what torch and gloo keep for themselves
# malloc gives large blocks back as soon as they are free. Else the copies that gloo's threads make of what they sum
# stay, one for each thread: 48 MiB with gradients of 16.
GIVES_BACK = ("MALLOC_MMAP_THRESHOLD_", "1048576")
DEPTH = 12
PER_ELEMENT = {None: (16, 4), torch.bfloat16: (14, 2)}
"""Bytes of docs/distributed.md: at home, gradients included; and of whole gradients."""


def resident(*, peak: bool = False) -> int:
    """Of this process, now; `peak`: at most since `forget_peak`."""
    gc.collect()
    _C.return_freed_memory()  # what torch has given back to malloc it does not use
    name = "VmHWM" if peak else "VmRSS"
    [line] = [line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def wrapped_layers(rank: int, width: int, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    """Sizes that every number of ranks here divides without padding; only rank 0 ever has values."""
    with torch.device("meta" if rank > 0 else "cpu"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters())
    with on_machine(hostility={"seed": 1, "poison": True}):  # so that the device's memory is all touched
        noria.wrap(model, optimizer, device=DEVICE, window=2, units=[nn.Linear], dtype=dtype, draft_memory=0)
    return model, optimizer


def train(model: Any, optimizer: Any, width: int, *, unsynced: int) -> None:
    dtype = next(model.parameters()).dtype
    for _ in range(2):
        for number in range(unsynced + 1):
            with model.no_sync() if number < unsynced else contextlib.nullcontext():
                model(torch.ones(4, width, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def takes_its_part(rank: int, size: int, dtype: torch.dtype | None, width: int) -> None:
    train(*wrapped_layers(rank, 64, dtype), 64, unsynced=1)  # torch loads its libraries at a first step
    before = resident()
    forget_peak()
    model, optimizer = wrapped_layers(rank, width, dtype)
    peak = resident(peak=True) - before
    at_home, of_gradients = PER_ELEMENT[dtype]
    elements = DEPTH * width * width
    assert elements == sum(parameter.numel() for parameter in model.parameters())
    for unsynced in (0, 1):
        train(model, optimizer, width, unsynced=unsynced)
        wrapped = wrapped_by(model)
        assert wrapped is not None
        wrapped.context.engine.idle()
        growth, report = resident() - before, noria.report(model)
        assert report.ledger_agrees, str(report)
        host = {row.purpose: row.taken for row in report.ledger if row.place == "host"}
        device = sum(row.taken for row in report.ledger if row.place == report.device)
        assert host.pop("gradient scales") == 8 * DEPTH
        assert sum(host.values()) == elements * at_home // size + unsynced * elements * of_gradients, host
        if unsynced:
            assert host["unsummed gradients"] == elements * of_gradients
        told = f"rank {rank} of {size}: {growth / MIB:.0f} MiB, {device / MIB:.0f} of them device memory, {host}"
        assert abs(growth - device - sum(host.values())) <= 0.02 * sum(host.values()) + NOISE, told
    if rank > 0:  # at no time more than its part, and a few whole parameters
        allowed = 1.02 * elements * at_home // size + device + 4 * 4 * width * width + NOISE
        assert allowed < elements * at_home
        assert peak <= allowed, f"rank {rank} of {size}: at most {peak / MIB:.0f} MiB in wrap, of {allowed / MIB:.0f}"
    noria.unwrap(model, optimizer)


ACTS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "report": (reports_what_ranks_send_each_other, ({},)),
    "report of sums in fp32": (
        reports_what_ranks_send_each_other,
        ({"dtype": torch.bfloat16, "reduce_dtype": torch.float32},),
    ),
    "evicted": (names_what_ranks_can_do_about_evicted_weights, ()),
    "host memory": (takes_its_part, (None, 1024)),
    "host memory in bfloat16": (takes_its_part, (torch.bfloat16, 1024)),
}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(*GIVES_BACK)
        return in_turn_on_ranks(2, ACTS, fresh=True)


@pytest.mark.parametrize("name", ["report", "report of sums in fp32"])
def test_report_trace_and_bound_count_what_ranks_send_each_other(found, name):
    assert not found[name], found[name]


def test_a_look_at_an_evicted_weight_names_what_ranks_can_do(found):
    assert not found["evicted"], found["evicted"]


@pytest.mark.parametrize("name", ["host memory", "host memory in bfloat16"])
def test_a_rank_takes_its_part_of_the_host_memory_and_no_more(found, name):
    assert not found[name], found[name]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_of_a_large_model_takes_its_part_of_the_host_memory_and_no_more(monkeypatch, size, dtype):
    monkeypatch.setenv(*GIVES_BACK)
    on_ranks(size, takes_its_part, dtype, 2048, fresh=True)
