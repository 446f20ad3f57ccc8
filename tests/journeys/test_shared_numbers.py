"""What ranks that share a model tell in numbers: of what they send each other, and of what each has at home."""

from __future__ import annotations

import functools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
from noria.cli import read_trace
from noria.custody import wrapped_by
from noria.report import _bound
from torch import nn

from tests.journeys.pairs import Net, loss_of, sgd
from tests.ranks import in_turn_on_ranks


def wrapped_net(**policy: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device="cpu", **policy)
    return model, optimizer


def reports_what_ranks_send_each_other(rank: int, size: int, policy: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report_with_trace(size, rank, pathlib.Path(folder) / "trace.json", policy)


def report_with_trace(size: int, rank: int, trace: pathlib.Path, policy: dict[str, Any]) -> None:
    model, optimizer = wrapped_net(window=2, trace=str(trace), **policy)
    loss_of(model, rank).backward()
    model.state_dict()  # collective: after it, all lanes are idle
    wrapped = wrapped_by(model)
    assert wrapped is not None
    sums, busy_us = wrapped.custody.step_sums(), wrapped.backend.stats("collect")["busy_us"]
    assert busy_us > 0 and abs(sums["forward_collect_us"] + sums["backward_collect_us"] - busy_us) <= 2
    lanes = {lane.lane: lane for lane in noria.report(model).lanes}
    fetch, drain, collect = (lanes[name] for name in ("fetch", "drain", "collect"))
    assert fetch.num_ops > drain.num_ops, lanes
    assert drain.num_ops == len(wrapped.units), lanes
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
    slowed = wrapped.custody.step_sums() | {"forward_collect_us": 3_000_000, "backward_collect_us": 4_000_000}
    found, steps = _bound(wrapped, slowed), slowed["num_steps"]
    assert found is not None and found.deferred_us == found.drafting_us == 7e6 / steps
    assert "collect " in str(noria.report(model))


def names_what_ranks_can_do_about_evicted_weights(rank: int, size: int) -> None:
    model, _ = wrapped_net(window=2)
    with pytest.raises(RuntimeError) as caught:
        model.blocks[2].expand.weight.sum()
    for part in ('"blocks.2"', "is evicted", "model.state_dict(), which all ranks call"):
        assert part in str(caught.value)
    assert "materialize" not in str(caught.value)


ACTS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "report": (reports_what_ranks_send_each_other, ({},)),
    "report of sums in fp32": (
        reports_what_ranks_send_each_other,
        ({"dtype": torch.bfloat16, "reduce_dtype": torch.float32},),
    ),
    "evicted": (names_what_ranks_can_do_about_evicted_weights, ()),
}


@functools.cache
def found() -> dict[str, str]:
    return in_turn_on_ranks(2, ACTS)


@pytest.mark.parametrize("name", ["report", "report of sums in fp32"])
def test_report_trace_and_bound_count_what_ranks_send_each_other(name):
    assert not found()[name], found()[name]


def test_a_look_at_an_evicted_weight_names_what_ranks_can_do():
    assert not found()["evicted"], found()["evicted"]
