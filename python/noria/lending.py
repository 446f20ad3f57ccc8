"""Pipeline stages lend each other spare device memory for what their blocks save.

How much a stage has to spare or lacks is known once a step has been made: after the first backwards, inside of the
first `optimizer.step()`, all stages tell each other, and the same matching on each of them (csrc/plan/matching.h) says
who lends what to whom. A lender exports one arena, once; a borrower copies to and from its range by itself from then
on.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from noria import _C
from noria._errors import usage_error
from noria.beside import LENT
from noria.groups import Group, timeout
from noria.ranks import raised_by_all

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["Lending", "Loan", "Stages", "need_and_spare"]


@dataclasses.dataclass(frozen=True)
class Loan:
    """Between ranks of `stages`; bytes, by offset in the lender's arena."""

    lender: int
    borrower: int
    offset: int
    bytes: int


class Stages:
    """The ranks of a pipeline, met: one process each."""

    def __init__(self, ranks: list[int]) -> None:
        """Collective."""
        self.group = Group(ranks)
        self.rank, self.size = self.group.rank, self.group.size

    @staticmethod
    def meet(mesh: Any = None) -> Stages | None:
        """`mesh`: a DeviceMesh of one dimension. None without, and where there is one stage. Collective."""
        if mesh is None:
            return None
        if not dist.is_available() or not dist.is_initialized():
            raise usage_error("a process group before stages=", "none", "call init_process_group first")
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise usage_error(
                "stages=None or a DeviceMesh of one dimension",
                f"stages={mesh!r}",
                'give the dimension along which stages lie: grid["stages"]',
            )
        ranks = sorted(mesh.mesh.tolist())
        if dist.get_rank() not in ranks:
            raise usage_error(
                f"stages with rank {dist.get_rank()} in them", f"ranks {ranks}", "let those ranks alone call it"
            )
        return Stages(ranks) if len(ranks) > 1 else None

    def first_failure(self, own: Exception | None, call: str) -> Exception | None:
        """Collective."""
        return self.group.first_failure(own, call)

    def close(self) -> None:
        self.group.close()


class Lending:
    """Of one wrap call. Without stages nothing happens."""

    def __init__(self, wrapped: Wrapped, stages: Stages | None) -> None:
        self.wrapped = wrapped
        self.stages = stages
        self.loans: list[Loan] = []  # all of them
        self._has_met = False
        self._lender: _C.Lender | None = None
        self._borrowers: list[_C.Borrower] = []
        self._opened: list[int] = []

    @property
    def lent(self) -> list[Loan]:
        return [loan for loan in self.loans if self.stages is not None and loan.lender == self.stages.rank]

    @property
    def borrowed(self) -> list[Loan]:
        return [loan for loan in self.loans if self.stages is not None and loan.borrower == self.stages.rank]

    def check(self) -> None:
        """Raises MachineError where a lender has died."""
        for borrower in self._borrowers:
            borrower.check()

    def begin_step(self) -> None:
        """The first time collective over the stages."""
        self.check()
        if self.stages is None or self._has_met:
            return
        self._has_met = True
        with raised_by_all([self.stages], "noria's lending between stages"):
            saved, room = self.wrapped.custody.saved_stats(), self.wrapped.plan.saved_room
            needs = room is not None or self.wrapped.policy.activations == "offload"
            offer = (_machine(), *(need_and_spare(saved["most_saved"], saved["largest"], room) if needs else (0, 0)))
        offers = self.stages.group.gather_objects(offer)
        even = [[1.0] * self.stages.size for _ in offers]
        self.loans = [Loan(*each) for each in _C.match_memory(offers, even)]
        if self.loans:
            self._meet(self.stages)

    def _meet(self, stages: Stages) -> None:
        wrapped, group = self.wrapped, stages.group
        patience = int(timeout().total_seconds() * 1000)
        arena = sum(loan.bytes for loan in self.lent)
        address = ""
        with raised_by_all([stages], "noria's lending between stages"):
            if arena:
                memory = wrapped.beside.take_shared(LENT, arena)
                wrapped.plan.lent_bytes = arena
                assert wrapped.plan.saved_room is not None
                wrapped.custody.set_saved_room(wrapped.plan.saved_room - arena)
                self._lender = _C.Lender(stages.rank)
                address = self._lender.address
        addresses = group.gather_objects(address)
        with raised_by_all([stages], "noria's lending between stages"):
            for loan in self.borrowed:
                self._borrowers.append(_C.Borrower(stages.rank, loan.lender, addresses[loan.lender], patience))
            if self._lender is not None:
                loans = [(loan.borrower, loan.offset, loan.bytes) for loan in self.lent]
                self._lender.lend(wrapped.backend.shared(memory), loans, patience)
            for link, (loan, borrower) in enumerate(zip(self.borrowed, self._borrowers, strict=True)):
                shared, offset, size = borrower.receive(patience)
                try:
                    opened = wrapped.backend.open_shared(shared)
                finally:
                    if shared.fd >= 0:
                        os.close(shared.fd)
                self._opened.append(opened)
                wrapped.custody.add_peer(loan.lender, link, 1.0, opened + offset, size)

    def close(self) -> None:
        """Once nothing runs on the device any more. Waits for nobody."""
        for memory in self._opened:
            self.wrapped.backend.close_shared(memory)
        self._opened.clear()
        for borrower in self._borrowers:
            borrower.close()
        self._borrowers.clear()
        if self._lender is not None:
            if any(self._lender.lent(loan.borrower) for loan in self.lent):
                self.wrapped.beside.leave(LENT)
            self._lender.close()
            self._lender = None
        if self.stages is not None:
            self.stages.close()


def need_and_spare(most_saved: int, largest: int, room: int | None) -> tuple[int, int]:
    """Bytes of what a stage's blocks save, `most_saved` at once and `largest` of one block; without a `room` all of it
    leaves. Two blocks' room is for what is saved now, and what leaves or comes meanwhile."""
    if room is None:
        return most_saved, 0
    if most_saved > room:
        return most_saved - room + 2 * largest, 0
    return 0, room - most_saved


def _machine() -> str:
    """Alike for processes that can lend each other: of one machine, one network namespace and one user."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"
