"""Memory that is taken after training has begun, alone: it fits the budget and all ranks, or nothing is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import noria
import pytest
import torch
from noria.host.limits import Found, Limit
from noria.model.file_layout import FilePlan
from noria.model.layout import Region
from noria.runtime.late_allocations import LateAllocations
from noria.runtime.ledger import Ledger

WANTED = Region.of("unsummed gradients", [300, 0, 200])


class Machine:
    """Is home, backend and ranks of a wrap call, and keeps what it was told."""

    def __init__(self, budget: int | None = None, free: list[int] | None = None) -> None:
        """`free`: by rank, the free bytes there. None: nothing shares the model."""
        self.heard: list[str] = []
        self.fails = False
        self.free = free
        self.regions = {"working weights": Region.of("working weights", [1000])}
        self.ledger = Ledger(SimpleNamespace(rows=lambda: [("host", "working weights", 1000)]))  # type: ignore[arg-type]
        self.file_plan = FilePlan()
        context: Any = SimpleNamespace(
            plan=SimpleNamespace(budgets=SimpleNamespace(host=budget)),
            home=self,
            backend="backend",
            ledger=self.ledger,
            device=torch.device("cpu"),
            ranks=None if free is None else SimpleNamespace(host=self),
        )
        sync: Any = SimpleNamespace(meet=lambda what: self.heard.append(f"met to {what}"))
        self.late = LateAllocations(context, sync)

    def take_later(self, region: Region, backend: object) -> list[int]:
        self.heard.append(f"took {region.bytes}, expected {self.ledger.expected('host', region.purpose)}")
        if self.fails:
            raise noria.UsageError("on purpose")
        return [7, 0, 8]

    def give_back(self, purpose: str) -> None:
        self.heard.append(f"gave back {purpose}")

    def gather_objects(self, own: Found) -> list[Found]:
        self.heard.append("asked all")
        assert self.free is not None
        limits = [Limit("the memory limit", f"file {rank}", free) for rank, free in enumerate(self.free)]
        return [Found(f"host {rank}", 1, None, (limit,)) for rank, limit in enumerate(limits)]


def test_the_ledger_has_memory_before_it_is_taken_and_until_it_is_given_back():
    machine = Machine(budget=1500)
    assert machine.late.take(WANTED) == [7, 0, 8]
    assert machine.ledger.expected("host", "unsummed gradients") == 500
    machine.late.give_back("unsummed gradients")
    assert machine.heard == ["took 500, expected 500", "gave back unsummed gradients"]
    assert machine.ledger.rows() == [("host", "working weights", 1000)]


def test_a_budget_counts_what_the_home_has_already():
    machine = Machine(budget=1499)
    with pytest.raises(noria.UsageError, match=r"host_memory of at least .*\(1500 bytes\): working weights"):
        machine.late.take(WANTED)
    assert not machine.heard and machine.ledger.on("host") == 1000


def test_memory_that_could_not_be_taken_leaves_the_ledger():
    machine = Machine(budget=1500)
    machine.fails = True
    with pytest.raises(noria.UsageError, match="on purpose"):
        machine.late.take(WANTED)
    assert machine.heard == ["took 500, expected 500"]
    assert machine.ledger.rows() == [("host", "working weights", 1000)]


def test_no_machine_has_room_for_everything():
    machine = Machine()
    with pytest.raises(noria.UsageError, match="free host memory of at least"):
        machine.late.take(Region.of("unsummed gradients", [1 << 60]))
    assert not machine.heard


@pytest.mark.parametrize(("free", "fits"), [([500, 10**6], True), ([10**6, 499], False)])
def test_ranks_ask_together_before_any_takes_and_the_tightest_decides_for_all(free, fits):
    machine = Machine(budget=1500, free=free)
    asked = ["met to take memory for unsummed gradients", "asked all"]
    if fits:
        assert machine.late.take(WANTED) == [7, 0, 8]
        assert machine.heard == [*asked, "took 500, expected 500"]
    else:
        with pytest.raises(noria.UsageError, match="499 B free under the memory limit on rank 1"):
            machine.late.take(WANTED)
        assert machine.heard == asked and machine.ledger.on("host") == 1000


def test_a_rank_that_takes_memory_alone_asks_no_other():
    machine = Machine(budget=1500, free=[0, 0])
    machine.late.take(WANTED, together=False)
    assert machine.heard == ["took 500, expected 500"]
