"""Stages keep copies of units that their windows evict at each other: the same bits, and each unit comes over the
host's link once a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import noria
import pytest
import torch
from noria.pipeline.peer_cache import PeerCache
from noria.pipeline.peer_links import Loan
from noria.planning import wrap_plan
from noria.testing import assert_same_bits, on_machine

from tests.device import DEVICE, finish
from tests.journeys import test_pipelines
from tests.journeys.pairs import adamw, sgd
from tests.journeys.test_lending import AUTO, BUNDLE, LENGTH, ROOM
from tests.journeys.test_pipelines import trained
from tests.ranks import asked_for, assert_fine, in_turn_on_ranks
from tests.torch_versions import GROWING

Limits = dict[str, tuple[float, float]]
SLOW_HOME = {"fetch": (0.004, 0.0), "peer": (1.0, 0.0)}  # GiB/s: a unit takes 1.4 ms
SLOWER_PEER = {"fetch": (0.004, 0.0), "peer": (0.0005, 0.0)}
WIDE = {**AUTO, "activation_memory": "1GiB"}
KEEP = {"activations": "keep"}
UNITS = 3
STEPS = 6  # in the first stages agree, the second is measured, two are tried


def as_slow_as(limits: Limits) -> AbstractContextManager[Any]:
    """What is looked at to choose. A device's links cannot be slowed down: there it looks as if they were.

    On the CPU the links are so slow. But how long other processes hold the step up is left out.
    """
    see = PeerCache._see

    def seen(copies: PeerCache) -> Any:
        found = see(copies)
        if DEVICE == "cpu":
            return dataclasses.replace(found, wall_us=found.stalled_us)
        home_us, peer_us = (
            num_bytes / 2**30 / limits[lane][0] * 1e6
            for lane, num_bytes in (("fetch", found.home_bytes), ("peer", found.peer_bytes))
        )
        return dataclasses.replace(found, home_us=home_us, peer_us=peer_us, stalled_us=home_us, wall_us=home_us)

    return mock.patch.object(PeerCache, "_see", seen)


def reports_of(
    policy: dict[str, Any],
    limits: Limits,
    lengths: list[int],
    schedule: str = "1F1B",
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
) -> list[noria.Report]:
    """After each step, of stages whose bits are those of the same pipeline without noria."""
    wrap_plan.LEAST_SAVED = 64
    reports: list[noria.Report] = []

    def look(step: int, models: list[Any]) -> None:
        finish()
        reports.append(noria.report(models[0]))

    def limited(**settings: Any) -> Any:
        return on_machine(limits=limits, **settings)

    with mock.patch.object(test_pipelines, "on_machine", limited), as_slow_as(limits):
        ours = trained(schedule, policy, make_optimizer, length=lengths, after_step=look)
    assert_same_bits(ours, trained(schedule, None, make_optimizer, length=lengths))
    assert all(report.ledger_agrees for report in reports)
    return reports


def from_home(before: noria.Report, now: noria.Report) -> int:
    """Fetches of a step."""
    from_peers = now.copies["num_fetched"] - before.copies["num_fetched"]
    return now.num_fetches - before.num_fetches - from_peers


def comes_from_peers(
    rank: int,
    size: int,
    policies: list[dict[str, Any]],
    lends: set[int],
    schedule: str = "1F1B",
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
) -> None:
    reports = reports_of(policies[rank], SLOW_HOME, [LENGTH] * STEPS, schedule, make_optimizer)
    last = reports[-1]
    borrowed = [loan for loan in last.loans if loan.borrower == rank]
    if 1 - rank not in lends:
        assert not borrowed and not last.copies["num_stashed"], str(last)
        return
    num_units = UNITS * (2 if "interleaved" in schedule else 1)
    assert sum(loan.for_units for loan in borrowed) > 0, str(last)
    assert num_units >= last.copies["num_units"] > num_units / 2, str(last)  # one may stay in the window
    assert last.copies["num_stashed"] - reports[-2].copies["num_stashed"] == last.copies["num_units"]
    assert from_home(reports[1], reports[2]) < from_home(reports[0], reports[1])
    assert from_home(reports[-2], last) == num_units < last.num_fetches - reports[-2].num_fetches, str(last)
    [peer] = [lane for lane in last.lanes if lane.lane == "peer"]
    saved = last.saved["offloaded_to_peers"] + last.saved["reloaded_from_peers"]
    assert peer.bytes - saved == last.copies["stashed"] + last.copies["fetched"]
    assert " units at other stages: " in str(last) and " of it for units" in str(last)


def does_not_pay(rank: int, size: int) -> None:
    """The way there is tried, and what was lent for it goes back."""
    reports = reports_of({"kernel": "torch", **WIDE}, SLOWER_PEER, [LENGTH] * (STEPS + 1))
    last = reports[-1]
    assert last.copies["num_stashed"] == reports[3].copies["num_stashed"] > 0, str(last)
    assert last.copies["num_units"] == 0 and not any(loan.bytes for loan in last.loans), str(last)
    assert all(row.purpose != "lent to other stages" for row in last.ledger), str(last)
    assert from_home(reports[-2], last) == last.num_fetches - reports[-2].num_fetches > UNITS


def is_asked_back(rank: int, size: int) -> None:
    """The lender's own need grows: units come from home again."""
    lengths = [LENGTH] * 4 + [212] * 4  # three bundles then fill its room
    policy = {"kernel": "torch", **(AUTO if rank == 1 else KEEP)}
    reports = reports_of(policy, SLOW_HOME, lengths)
    assert ROOM - 3 * BUNDLE * 212 // LENGTH < 1 << 16
    [loan] = reports[3].loans
    assert (loan.lender, loan.borrower) == (1, 0) and loan.for_units == loan.bytes > 0
    assert not any(loan.bytes for loan in reports[-1].loans), str(reports[-1])
    if rank == 0:
        assert reports[3].copies["num_units"] == 2, str(reports[3])
        assert reports[-1].copies["num_units"] == 0, str(reports[-1])
        assert from_home(reports[2], reports[3]) == UNITS < from_home(reports[-2], reports[-1])
    else:
        assert reports[-1].saved["most_there"] <= ROOM and reports[-1].saved["num_unforeseen"] == 0


TORCH = {"kernel": "torch"}
ACTS: dict[str, tuple[Callable[..., Any], Any]] = {
    "both lend": (comes_from_peers, ([TORCH | WIDE] * 2, {0, 1})),
    "one keeps what it saves": (comes_from_peers, ([KEEP, TORCH | WIDE], {1}, "1F1B", sgd)),
    "one is in need": (comes_from_peers, ([TORCH | AUTO, TORCH | WIDE], {1})),
    "drafts": (comes_from_peers, ([WIDE | {"draft_memory": "64MiB"}] * 2, {0, 1}, "1F1B", sgd)),
    "a slow link": (does_not_pay, ()),
    "a lender in need": (is_asked_back, ()),
}
LONG: dict[str, tuple[Callable[..., Any], Any]] = {
    "blocking": (comes_from_peers, ([TORCH | WIDE | {"update": "blocking"}] * 2, {0, 1})),
    "interleaved 1F1B": (comes_from_peers, ([TORCH | WIDE] * 2, {0, 1}, "interleaved 1F1B")),
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    return in_turn_on_ranks(2, asked_for(request, ACTS))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=GROWING if name == "a lender in need" else ()) for name in ACTS]
)
def test_units_at_other_stages_have_the_bits_of_those_at_home(found, name):
    assert_fine(found, name)


class Steps:
    """What a wrap call says of its fetches, as a test counts them. Three units; there is room for two."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.has_stopped = False
        self._times = [0, 0, 0]
        self._lanes = {lane: {"busy_us": 0.0, "bytes": 0, "stalled_us": {}} for lane in ("fetch", "peer", "compute")}
        self._copies = {"stashed": 0, "fetched": 0}
        loan = Loan(1, 0, 0, 2 << 20, 2 << 20)
        context = SimpleNamespace(
            ranks=None,
            device=torch.device("cpu"),
            units=[SimpleNamespace(weights=1 << 20) for _ in range(3)],
            engine=SimpleNamespace(
                copies=SimpleNamespace(
                    times_fetched=lambda: list(self._times),
                    copy_stats=lambda: dict(self._copies),
                    keep_copies=lambda units: setattr(self, "kept", units),
                )
            ),
            backend=SimpleNamespace(stats=lambda lane: dict(self._lanes[lane])),
        )
        peer_memory = SimpleNamespace(borrowed=[loan], stop_wanting=lambda: setattr(self, "has_stopped", True))
        self.copies = PeerCache(cast(Any, context), cast(Any, peer_memory))

    def step(self, from_home: int, from_peers: int) -> None:
        """Units that come from there; a unit takes 10 ms from home and 0.1 ms from the other stage."""
        for lane, num, us in (("fetch", from_home, 1e4), ("peer", from_peers, 100.0)):
            self._lanes[lane]["busy_us"] += num * us
            self._lanes[lane]["bytes"] += num << 20
        self._lanes["compute"]["stalled_us"] = {("fetch", "forward"): self._lanes["fetch"]["busy_us"] * 1e6}
        self._copies["fetched"] += from_peers << 20
        self._times = [times + 2 for times in self._times]
        self.copies.begin_step()


def test_copies_that_leave_the_home_nothing_to_do_are_kept():
    """As where all that is streamed is frozen: their copies are never stale."""
    steps = Steps()
    steps.step(6, 0)
    steps.step(6, 0)
    assert len(steps.kept) == 2 and not steps.copies.is_settled
    steps.step(0, 6)
    assert not steps.copies.is_settled  # what else goes over the links is chosen after that
    steps.step(0, 6)
    assert len(steps.kept) == 2 and not steps.has_stopped and steps.copies.is_settled


@pytest.mark.long
def test_units_at_other_stages_have_those_bits_under_other_schedules_and_updates():
    for each in in_turn_on_ranks(2, LONG).values():
        assert not each, each
