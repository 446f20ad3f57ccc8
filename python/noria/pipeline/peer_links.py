"""Opens one pipeline stage's memory in another stage, and measures how fast each link is.

The code does not consult a table of devices. It tries to open the memory of the other device, and measures each link
once, before any loan. For this, each stage with spare memory lends a small arena to the stages that need memory. One
borrower at a time copies there and back for a few milliseconds. If this fails for a pair, the pair has no link and
makes no loan; all stages learn the reason. Any other failure raises on all stages.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from noria import _C
from noria.dist.ranks import raised_by_all
from noria.policy import format_bytes
from noria.torch_state import await_device

if TYPE_CHECKING:
    from noria.dist.stage_group import StageGroup

__all__ = ["CALL", "Handover", "Loan", "Pair", "Source", "free_left", "measured", "retire"]

CALL = "noria's lending between stages"

PATIENCE_MS = 10_000
"""Timeout for one answer. Only a stopped process reaches it."""

_PROBE_BYTES = 1 << 20  # for each pair; in smaller copies most time is startup
_PAGE = 4096
_TIMES = 3  # measurements of each link; the best one counts

Pair = tuple[int, int]
"""Lender and borrower, as ranks of `stages`."""


@dataclasses.dataclass(frozen=True)
class Loan:
    """Describes a loan between ranks of `stages`: `bytes` bytes at `offset` in the lender's arena.

    The last `for_units` bytes of it are for copies of units.
    """

    lender: int
    borrower: int
    offset: int
    bytes: int
    for_units: int = 0

    def told(self, row_name: str) -> str:
        """Returns a sentence for the report. `row_name`: "stage" or "rank"."""
        units = f", {format_bytes(self.for_units)} of it for units" if self.for_units else ""
        return f"{row_name} {self.lender} lends {format_bytes(self.bytes)} to {row_name} {self.borrower}{units}"

    @property
    def for_saved(self) -> int:
        return self.bytes - self.for_units

    def shrunk(self, left: int) -> Loan:
        """Returns the loan reduced to its first `left` bytes."""
        return dataclasses.replace(self, bytes=left, for_units=max(left - self.for_saved, 0))

    @property
    def pair(self) -> Pair:
        return self.lender, self.borrower


@dataclasses.dataclass
class Source:
    """Holds one range that this process has borrowed from a lender."""

    loan: Loan
    borrower: _C.Borrower
    opened: int = 0  # address of the lender's arena in this process; 0: not open
    is_for_saved: bool = False  # the engine uses it for saved tensors
    is_for_units: bool = False  # the engine uses it for units

    @property
    def address(self) -> int:
        return self.opened + self.loan.offset


class Handover:
    """Hands each lender's arena to its borrowers, in several parts.

    Order: after each part all stages exchange the result. So each part starts when the other stages have finished the
    part before, and no stage waits for one that has failed.
    """

    def __init__(self, stages: StageGroup, backend: _C.Backend) -> None:
        self.stages = stages
        self.lender: _C.Lender | None = None
        self.sources: list[Source] = []
        self.failed: dict[Pair, str] = {}
        """Loans that failed, with the reason; the same on all stages."""
        self._backend = backend
        self._arena = 0
        self._loans: Sequence[Loan] = ()

    def make(self, loans: Sequence[Loan], arena: Callable[[], int]) -> None:
        """Makes the loans. Collective. `arena` returns the address of this stage's arena, and may raise MachineError.

        It is called only if this stage lends.
        """
        stages, self._loans = self.stages, loans
        self.together(lambda: self._listen(arena))
        addresses = stages.group.gather_objects(self.lender.address if self.lender is not None else "")
        self.together(lambda: self._connect(addresses))
        self.together(self._lend)
        self.together(self._open)

    def together(self, act: Callable[[], None]) -> None:
        """Runs `act`, then exchanges failures. Collective. `act` may add entries to `failed`."""
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
        """Closes all that this process borrows. It does not wait for other stages."""
        for source in self.sources:
            self._close(source)
        self.sources.clear()


def measured(
    stages: StageGroup, backend: _C.Backend, device: torch.device, pairs: Sequence[Pair], spare: Sequence[int]
) -> tuple[list[list[float]], dict[Pair, str]]:
    """Measures the links of `pairs`. Collective, with the same result on all stages.

    Args:
        stages: the ranks of the pipeline.
        backend: copies and measures.
        device: this rank's device.
        pairs: the links to measure.
        spare: by rank, the bytes that a lender has for its arena.

    Returns:
        GiB/s by lender and borrower, 0 if there is no link, and the reason for each pair that failed.
    """
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
    """Groups the borrowers that may measure at the same time: two borrowers of a group have no stage in common.

    On one machine all lenders lend to each borrower, so its borrowers usually take separate turns.
    """
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
    await_device(device)  # other work on the device may still use that memory
    for source in handover.sources * _TIMES:  # repeats links in turns: the machine may be busy for a while
        loan = source.loan
        if loan.pair in handover.failed:
            continue
        try:
            gib_s = backend.measure_link(own.data_ptr(), source.address, loan.bytes, loan.lender)
            speeds[loan.pair] = max(speeds.get(loan.pair, 0.0), gib_s)
        except _C.MachineError as error:
            handover.failed[loan.pair] = str(error)
            speeds.pop(loan.pair, None)


# ---- arenas that borrowers may still use ----


@dataclasses.dataclass
class _Left:
    """Keeps an arena that is no longer lent, until its borrowers stop using it."""

    pid: int
    lender: _C.Lender
    borrowers: list[int]  # as ranks of the world
    backend: _C.Backend
    arena: int


_LEFT: list[_Left] = []


def retire(lender: _C.Lender | None, borrowers: list[int], backend: _C.Backend, arena: int) -> None:
    """Frees an arena, at once or after `borrowers` stop using it. `lender` is None if it was offered to no borrower."""
    if lender is not None:
        lender.leave()
        if any(lender.lent(borrower) for borrower in borrowers):
            _LEFT.append(_Left(os.getpid(), lender, borrowers, backend, arena))
            return
        lender.close()
    backend.free(arena)


def free_left() -> None:
    """Frees the retired arenas that no borrower uses any more. The end of the process frees the others."""
    for each in list(_LEFT):
        if each.pid == os.getpid() and not any(each.lender.lent(borrower) for borrower in each.borrowers):
            _LEFT.remove(each)
            each.lender.close()
            each.backend.free(each.arena)
