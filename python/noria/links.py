"""Ways between stages of a pipeline: how one's memory comes into the hands of another, and how fast each way is.

Whether a device can open another one's memory is not asked of a table, but tried; and what a link carries is measured,
once, before anything is lent: each stage that has something to spare lends a small arena to those in need, which copy
there and back, one borrower at a time, for a few milliseconds. A pair of which that fails has no link, and goes
without: all stages know of it and why. Whatever else fails raises on all of them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from noria import _C
from noria.modes import await_device
from noria.policy import format_bytes
from noria.ranks import raised_by_all

if TYPE_CHECKING:
    from noria.lending import Stages

__all__ = ["CALL", "Handover", "Loan", "Pair", "Source", "free_left", "measured", "retire"]

CALL = "noria's lending between stages"

PATIENCE_MS = 10_000
"""Only a process that has stopped comes to it."""

_PROBE_BYTES = 1 << 20  # of a pair: copies of less are mostly starts
_PAGE = 4096
_TIMES = 3  # that a link is measured; the best one counts

Pair = tuple[int, int]
"""Lender and borrower, ranks of `stages`."""


@dataclasses.dataclass(frozen=True)
class Loan:
    """Between ranks of `stages`; bytes, by offset in the lender's arena. Of these, the last `for_units` are for copies
    of units."""

    lender: int
    borrower: int
    offset: int
    bytes: int
    for_units: int = 0

    def told(self, row_name: str) -> str:
        """`row_name`: what one of `stages` is called."""
        units = f", {format_bytes(self.for_units)} of it for units" if self.for_units else ""
        return f"{row_name} {self.lender} lends {format_bytes(self.bytes)} to {row_name} {self.borrower}{units}"

    @property
    def for_saved(self) -> int:
        return self.bytes - self.for_units

    def shrunk(self, left: int) -> Loan:
        """To its first bytes."""
        return dataclasses.replace(self, bytes=left, for_units=max(left - self.for_saved, 0))

    @property
    def pair(self) -> Pair:
        return self.lender, self.borrower


@dataclasses.dataclass
class Source:
    """What this process has borrowed from one lender."""

    loan: Loan
    borrower: _C.Borrower
    opened: int = 0  # the address of the lender's arena here; 0: not yet
    is_for_saved: bool = False  # the engine knows of it, for what blocks save
    is_for_units: bool = False  # and for units

    @property
    def address(self) -> int:
        return self.opened + self.loan.offset


class Handover:
    """Each lender's arena to its borrowers. After each part all tell each other how it went: so what a part needs of
    others is there when it begins, and nobody waits for one that has failed."""

    def __init__(self, stages: Stages, backend: _C.Backend) -> None:
        self.stages = stages
        self.lender: _C.Lender | None = None
        self.sources: list[Source] = []
        self.failed: dict[Pair, str] = {}
        """What came to nothing, and why; the same on all stages."""
        self._backend = backend
        self._arena = 0
        self._loans: Sequence[Loan] = ()

    def make(self, loans: Sequence[Loan], arena: Callable[[], int]) -> None:
        """Collective. `arena`: the address of this stage's, if it lends; may raise MachineError."""
        stages, self._loans = self.stages, loans
        self.together(lambda: self._listen(arena))
        addresses = stages.group.gather_objects(self.lender.address if self.lender is not None else "")
        self.together(lambda: self._connect(addresses))
        self.together(self._lend)
        self.together(self._open)

    def together(self, act: Callable[[], None]) -> None:
        """Collective. `act` may note in `failed`."""
        stages = self.stages
        with raised_by_all([stages], CALL):
            act()
        for each in stages.group.gather_objects(self.failed):
            self.failed |= {pair: why for pair, why in each.items() if pair not in self.failed}
        for source in [each for each in self.sources if each.loan.pair in self.failed]:
            self.sources.remove(source)
            self._close(source)

    def _listen(self, arena: Callable[[], int]) -> None:
        if not any(loan.lender == self.stages.rank for loan in self._loans):
            return
        try:
            self._arena = arena()
            self.lender = _C.Lender(self._world(self.stages.rank))
        except _C.MachineError as error:
            self._fail_to_lend(error)

    def _connect(self, addresses: Sequence[str]) -> None:
        own = self._world(self.stages.rank)
        for loan in self._left(borrower=self.stages.rank):
            lender = self._world(loan.lender)
            try:
                self.sources.append(Source(loan, _C.Borrower(own, lender, addresses[loan.lender], PATIENCE_MS)))
            except _C.MachineError as error:
                self.failed[loan.pair] = str(error)

    def _lend(self) -> None:
        if self.lender is None:
            return
        loans = [(self._world(loan.borrower), loan.offset, loan.bytes) for loan in self._left(lender=self.stages.rank)]
        try:
            self.lender.lend(self._backend.shared(self._arena), loans, PATIENCE_MS)
        except _C.MachineError as error:
            self._fail_to_lend(error)

    def _fail_to_lend(self, error: _C.MachineError) -> None:
        self.failed |= {loan.pair: str(error) for loan in self._left(lender=self.stages.rank)}
        if self.lender is not None:
            self.lender.close()
            self.lender = None

    def _open(self) -> None:
        for source in self.sources:
            try:
                shared, _, _ = source.borrower.receive(PATIENCE_MS)
                try:
                    source.opened = self._backend.open_shared(shared)
                finally:
                    if shared.fd >= 0:
                        os.close(shared.fd)
            except _C.MachineError as error:
                self.failed[source.loan.pair] = str(error)

    def _left(self, lender: int | None = None, borrower: int | None = None) -> list[Loan]:
        return [
            loan
            for loan in self._loans
            if loan.pair not in self.failed and lender in (None, loan.lender) and borrower in (None, loan.borrower)
        ]

    def _world(self, rank: int) -> int:
        return self.stages.group.ranks[rank]

    def _close(self, source: Source) -> None:
        if source.opened:
            self._backend.close_shared(source.opened)
        source.borrower.close()

    def end(self) -> None:
        """Nobody borrows here any more. Waits for nobody."""
        for source in self.sources:
            self._close(source)
        self.sources.clear()


def measured(
    stages: Stages, backend: _C.Backend, device: torch.device, pairs: Sequence[Pair], spare: Sequence[int]
) -> tuple[list[list[float]], dict[Pair, str]]:
    """GiB/s by lender and borrower, of `pairs` alone, and 0 where there is no link; and why not. `spare`: bytes that
    each stage has for that. Collective, and the same on all stages."""
    loans: list[Loan] = []
    for lender in sorted({lender for lender, _ in pairs}):
        borrowers = [borrower for each, borrower in pairs if each == lender]
        size = max(min(_PROBE_BYTES, spare[lender] // len(borrowers) // _PAGE * _PAGE), _PAGE)
        loans += [Loan(lender, borrower, nth * size, size) for nth, borrower in enumerate(borrowers)]
    own_size = sum(loan.bytes for loan in loans if loan.lender == stages.rank)
    arena = 0

    def take() -> int:
        nonlocal arena
        arena = backend.allocate_shared(own_size)
        return arena

    handover, speeds = Handover(stages, backend), dict[Pair, float]()
    try:
        handover.make(loans, take)
        for turn in _turns(pairs):
            handover.together(lambda turn=turn: _measure(handover, backend, device, turn, speeds))  # type: ignore[misc]
        handover.end()
        handover.together(lambda: None)
    finally:
        handover.end()
        if arena:
            borrowers = [stages.group.ranks[loan.borrower] for loan in loans if loan.lender == stages.rank]
            retire(handover.lender, borrowers, backend, arena)
    bandwidth = [[0.0] * stages.size for _ in range(stages.size)]
    for each in stages.group.gather_objects(speeds):
        for (lender, borrower), gib_s in each.items():
            bandwidth[lender][borrower] = gib_s
    return bandwidth, handover.failed


def _turns(pairs: Sequence[Pair]) -> list[set[int]]:
    """Borrowers that measure at the same time: those whose links lead to no stage in common, for a machine's lenders
    all lend to each of its borrowers."""
    turns: list[set[int]] = []
    met_by = {borrower: {borrower, *(lender for lender, each in pairs if each == borrower)} for _, borrower in pairs}
    for borrower, met in sorted(met_by.items()):
        for turn in turns:
            if all(met.isdisjoint(met_by[other]) for other in turn):
                turn.add(borrower)
                break
        else:
            turns.append({borrower})
    return turns


def _measure(
    handover: Handover, backend: _C.Backend, device: torch.device, turn: set[int], speeds: dict[Pair, float]
) -> None:
    if handover.stages.rank not in turn or not handover.sources:
        return
    own = torch.empty(max(source.loan.bytes for source in handover.sources), dtype=torch.uint8, device=device)
    await_device(device)  # that memory may have been somebody else's until now
    for source in handover.sources * _TIMES:  # in turns: the machine may be busy for a while
        loan = source.loan
        if loan.pair in handover.failed:
            continue
        try:
            gib_s = backend.measure_link(own.data_ptr(), source.address, loan.bytes, loan.lender)
            speeds[loan.pair] = max(speeds.get(loan.pair, 0.0), gib_s)
        except _C.MachineError as error:
            handover.failed[loan.pair] = str(error)
            speeds.pop(loan.pair, None)


# ---- arenas that others may be using still ----


@dataclasses.dataclass
class _Left:
    """An arena that nobody lends any more."""

    pid: int
    lender: _C.Lender
    borrowers: list[int]  # of the world
    backend: _C.Backend
    arena: int


_LEFT: list[_Left] = []


def retire(lender: _C.Lender | None, borrowers: list[int], backend: _C.Backend, arena: int) -> None:
    """Frees an arena, at once or when those borrowers use it no more. `lender` None: it has been told to nobody."""
    if lender is not None:
        lender.leave()
        if any(lender.lent(borrower) for borrower in borrowers):
            _LEFT.append(_Left(os.getpid(), lender, borrowers, backend, arena))
            return
        lender.close()
    backend.free(arena)


def free_left() -> None:
    """Of arenas that are left those that nobody uses any more. What is left at the end of the process goes with it."""
    for each in list(_LEFT):
        if each.pid == os.getpid() and not any(each.lender.lent(borrower) for borrower in each.borrowers):
            _LEFT.remove(each)
            each.lender.close()
            each.backend.free(each.arena)
