"""Lets pipeline stages lend each other spare device memory.

Borrowed memory first holds tensors that blocks save for backward. The rest of it holds copies of units that a small
window evicts.

The stages agree on loans inside of the first `optimizer.step()`, after the first backwards. By then each stage knows
how much memory it lacks or has to spare, and all stages exchange these numbers. They measure the links between them
(`peer_links`). Each rank then computes the same loans from these numbers (csrc/plan/matching.h).

A lender exports one arena, once. After that, a borrower copies to and from its range by itself.
"""

from __future__ import annotations

import contextlib
import os

from noria import _C
from noria.dist.ranks import raised_by_all
from noria.dist.stage_group import StageGroup
from noria.host.device_buffers import LENT
from noria.host.limits import empty_cache
from noria.pipeline.peer_links import CALL, Handover, Loan, Pair, Source, free_left, measured, retire
from noria.runtime.context import Context
from noria.runtime.state import RunState

__all__ = ["Loan", "PeerMemory"]


class PeerMemory:
    """Lends and borrows device memory between stages. Without stages it does nothing.

    A lender keeps the memory that its own blocks need. If that need grows, the lender asks for the missing bytes
    (Note [Words that only fall] in csrc/store/lending.h).

    Order: giving back takes three step boundaries. The lender asks at one of its own. The borrower gives back at its
    next one, if nothing lies there any more. The lender takes the memory at its following one. Until then its blocks
    have less room, and more of their saved tensors go to the host.
    """

    def __init__(self, context: Context, run: RunState, stages: StageGroup | None) -> None:
        free_left()
        self.context = context
        run.on_close.append(self.close)
        self.stages = stages
        self.loans: list[Loan] = []  # all loans; those of this stage at their current size
        self.notes: list[str] = []
        """Sentences for the report: which stage lends nothing to which, and why."""
        self._has_met = False
        self._lender: _C.Lender | None = None
        self._asked: dict[int, int] = {}  # by borrower: bytes that it may keep
        self._wants = True  # loans for units
        self._sources: list[Source] = []

    @property
    def lent(self) -> list[Loan]:
        return [loan for loan in self.loans if self.stages is not None and loan.lender == self.stages.rank]

    @property
    def borrowed(self) -> list[Loan]:
        return [loan for loan in self.loans if self.stages is not None and loan.borrower == self.stages.rank]

    @property
    def row_name(self) -> str:
        """Returns the word for one member of `stages` in texts: "rank" if a rank holds several stages."""
        return "stage" if len(self.context.partition.roots) == 1 else "rank"

    def check(self) -> None:
        """Raises MachineError if a lender has died."""
        for source in self._sources:
            source.borrower.check()

    def begin_step(self) -> None:
        """Makes loans at the first step, and gives back or takes back memory at later steps.

        Collective over the stages at the first step after a backward. Later steps wait for no other stage.
        """
        free_left()
        self.check()
        if self.stages is None:
            return
        if not self._has_met and all(each["phase"] != "backward" for each in self.context.engine.statistics.passes()):
            return  # nothing was saved yet, e.g. a step before a checkpoint load
        if self._has_met:
            self._give_back()
            self._take_back()
            self._ask_back()
            return
        self._has_met = True
        try:
            self._meet(self.stages)
        except BaseException:
            self._abandon()
            raise

    # ---- once ----

    def _meet(self, stages: StageGroup) -> None:
        ranks = list(stages.group.ranks)
        try:
            with raised_by_all([stages], CALL):
                wanted = self._wanted()
                offer = (f"{_machine()} {self.context.device.type}", *self._need_and_spare(), wanted)
            offers = stages.group.gather_objects(offer)
        except _C.MachineError as error:
            raise _C.MachineError(
                f"the stages of a pipeline, ranks {ranks}, did not all come to their first optimizer.step(), where "
                f"they agree on who lends memory to whom; let each of them step as often as the others, or wrap all "
                f"without stages= ({error})"
            ) from error
        spare = [have for _, _, have, _ in offers]
        pairs = self._pairs(offers)
        if not pairs:
            return
        bandwidth, failed = measured(stages, self.context.backend, self.context.device, pairs, spare)
        self._note_failed(failed)
        links = _C.link_classes(bandwidth)
        if self._take_arena(stages, offers, links):
            self._trade(stages, links)

    def _pairs(self, offers: list[tuple[str, int, int, int]]) -> list[Pair]:
        """Returns pairs of a stage with memory to spare and a stage that needs or wants some, on the same machine."""
        wanted = [
            (lender, borrower)
            for borrower, (_, needed, _, also) in enumerate(offers)
            for lender, (_, own_need, spare, _) in enumerate(offers)
            if (needed or also) and lender != borrower and not own_need and spare >= _C.LOAN_GRANULE
        ]
        pairs = [(lender, borrower) for lender, borrower in wanted if offers[lender][0] == offers[borrower][0]]
        if len(pairs) < len(wanted):
            places = list(dict.fromkeys(machine for machine, *_ in offers))
            groups = [[rank for rank, offer in enumerate(offers) if offer[0] == place] for place in places]
            self.notes.append(
                f"{self.row_name}s lend each other memory inside of one machine, one container and one user alone: "
                + ", ".join(map(str, groups))
            )
        return pairs

    def _note_failed(self, failed: dict[Pair, str]) -> None:
        for (lender, borrower), why in sorted(failed.items()):
            self.notes.append(f"{self.row_name} {borrower} borrows nothing of {self.row_name} {lender}: {why}")

    def _wanted(self) -> int:
        """Returns the bytes of all units that were fetched more than once in the first step.

        Returns 0 if ranks share the units, because these ranks gather them together.
        """
        if self.context.ranks is not None:
            return 0
        times = self.context.engine.copies.times_fetched()
        return sum(unit.weights for unit, count in zip(self.context.units, times, strict=True) if count > 1)

    def _need_and_spare(self) -> tuple[int, int]:
        saved, room = self.context.engine.saved.saved_stats(), self.context.plan.saved_room
        if room is None and self.context.policy.activations != "offload":
            return 0, 0
        return _C.need_and_spare(saved["most_saved"], saved["largest"], room)

    def _take_arena(
        self, stages: StageGroup, offers: list[tuple[str, int, int, int]], links: list[list[float]]
    ) -> bool:
        """Allocates the arena for this stage's loans. Collective. Returns False if no stage lends.

        If a device cannot allocate its arena, that stage lends nothing, and all stages match again without its offer.
        """
        beside = self.context.device_buffers
        while True:
            self.loans = [Loan(*each) for each in _C.match_memory(offers, links)]
            if not self.loans:
                return False
            why = ""
            with raised_by_all([stages], CALL):
                try:
                    if arena := sum(loan.bytes for loan in self.lent):
                        self._expect_lent(arena)
                        empty_cache(self.context.device)
                        beside.take_shared(LENT, arena)
                        self._leave_room()
                except BaseException as error:
                    if not beside.address(LENT):
                        self._expect_lent(0)
                    if not isinstance(error, _C.MachineError):
                        raise
                    why = str(error)
            reasons = stages.group.gather_objects(why)
            if not any(reasons):
                return True
            for lender, why in enumerate(reasons):
                if why:
                    machine, _, _, wanted = offers[lender]
                    offers[lender] = (machine, 0, 0, wanted)
                    self.notes.append(f"{self.row_name} {lender} lends nothing: {why}")
            if beside.address(LENT):
                self._free_arena()

    def _trade(self, stages: StageGroup, links: list[list[float]]) -> None:
        handover = Handover(stages, self.context.backend)
        self._sources = handover.sources  # the same list, so it has what arrived also if `make` raises
        try:
            handover.make(self.loans, lambda: self.context.device_buffers.address(LENT))
        finally:
            self._lender = handover.lender
        handover.together(lambda: None)  # after this, failed borrowers have closed, and their ranges count as free
        self._note_failed(handover.failed)
        self._asked = {loan.borrower: loan.bytes for loan in self.lent if loan.pair not in handover.failed}
        self._take_back()
        self.loans = [loan for loan in self.loans if loan.pair not in handover.failed]
        for loan in self.loans:
            self._trace(loan)
        with raised_by_all([stages], CALL):
            for source in self._sources:
                loan = source.loan
                link = links[loan.lender][loan.borrower]
                if loan.for_saved:
                    self.context.engine.saved.add_peer(loan.lender, loan.lender, link, source.address, loan.for_saved)
                    source.is_for_saved = True
                if loan.for_units:
                    units = source.address + loan.for_saved
                    self.context.engine.copies.add_copy_peer(
                        loan.lender, loan.lender, link, units, loan.for_units, loan.for_saved
                    )
                    source.is_for_units = True

    def _abandon(self) -> None:
        """Gives up all lending after an error. A repeated step runs without lending.

        A borrower on another stage that already has its range gives it back at a later step.
        """
        with contextlib.ExitStack() as ends:  # runs all callbacks, the last one first, also if one raises
            for source in self._sources:
                ends.callback(source.borrower.close)
                if source.opened:
                    ends.callback(self.context.backend.close_shared, source.opened)
                ends.callback(self._shrink, source, 0)
            self._sources.clear()
        self.loans = self.lent if self.context.device_buffers.address(LENT) else []
        self._take_back()

    # ---- at step boundaries ----

    def _ask_back(self) -> None:
        """Asks borrowers for the memory that this stage lacks, in proportion to their loans.

        On CUDA it asks for everything, because an arena can only be freed as a whole.
        """
        room, left = self.context.plan.saved_room, sum(self._asked.values())
        if self._lender is None or room is None or not left:
            return
        in_parts = self.context.device.type == "cpu"
        lent = left if in_parts else self.context.ledger.expected(str(self.context.device), LENT)
        saved = self.context.engine.saved.saved_stats()
        lacked = _C.lacking(saved["most_saved"], saved["largest"], room, lent)
        kept = _C.ask_back(list(self._asked.values()), lacked, in_parts)
        for (borrower, before), now in zip(list(self._asked.items()), kept, strict=True):
            if now < before:
                self._asked[borrower] = now
                self._lender.ask_back(self._world(borrower), now)

    def stop_wanting(self) -> None:
        """Ends the loans for units: the memory goes back at the next step."""
        self._wants = False

    def _give_back(self) -> None:
        for source in list(self._sources):
            loan = source.loan
            left = min(source.borrower.allowed(), loan.bytes if self._wants else loan.for_saved)
            if left < loan.bytes:
                left = self._shrink(source, left)
            if left >= loan.bytes:
                continue
            if left:
                source.borrower.give_back(left)
            else:
                self.context.backend.close_shared(source.opened)
                source.borrower.close()
                self._sources.remove(source)
            source.loan = self._shrunk(loan, left)

    def _shrink(self, source: Source, left: int) -> int:
        """Tells the engine to use only the first `left` bytes, and returns the bytes that remain in use.

        That is more than `left` if tensors that are saved across steps still lie beyond.
        """
        engine, loan = self.context.engine, source.loan
        if source.is_for_units:
            engine.copies.shrink_copy_peer(loan.lender, max(left - loan.for_saved, 0))
        if source.is_for_saved and left < loan.for_saved and not engine.saved.shrink_peer(loan.lender, left):
            return loan.for_saved
        return left

    def _take_back(self) -> None:
        beside = self.context.device_buffers
        if not beside.address(LENT):
            return
        left = {loan: self._still_lent(loan) for loan in self.lent}
        for loan, still in left.items():
            if still < loan.bytes:
                beside.discard(LENT, loan.offset + still, loan.bytes - still)
                self._asked[loan.borrower] = min(self._asked.get(loan.borrower, 0), still)
                self._shrunk(loan, still)
        if not any(left.values()):
            self._free_arena()
            if self._lender is not None:
                self._lender.close()
                self._lender = None
        elif self.context.device.type == "cpu":  # CUDA has its memory back as a whole only
            self._expect_lent(sum(loan.bytes for loan in self.lent))
        self._leave_room()

    def _still_lent(self, loan: Loan) -> int:
        return 0 if self._lender is None else self._lender.lent(self._world(loan.borrower))

    def _expect_lent(self, num_bytes: int) -> None:
        """Enters what the arena is to take into the ledger."""
        self.context.ledger.expect(str(self.context.device), LENT, num_bytes)

    def _free_arena(self) -> None:
        self.context.device_buffers.free(LENT)
        self._expect_lent(0)
        self._leave_room()

    def _leave_room(self) -> None:
        """Leaves the room that the arena does not take to what this stage's own blocks save."""
        room = self.context.plan.saved_room
        assert room is not None
        self.context.engine.saved.set_saved_room(room - self.context.device_buffers.taken.get(LENT, 0))

    def _shrunk(self, loan: Loan, left: int) -> Loan:
        self.loans[self.loans.index(loan)] = shrunk = loan.shrunk(left)
        self._trace(shrunk)
        return shrunk

    def _trace(self, loan: Loan) -> None:
        if self.context.trace is not None:
            self.context.trace.note(loan.told(self.row_name))

    def _world(self, rank: int) -> int:
        assert self.stages is not None
        return self.stages.group.ranks[rank]

    # ---- end ----

    def close(self) -> None:
        """Ends all loans. Call it when nothing runs on the device any more. It does not wait for other stages."""
        with contextlib.ExitStack() as ends:  # runs all callbacks, the last one first, also if one raises
            if self.stages is not None:
                ends.callback(self.stages.close)
            ends.callback(self._end_lending)
            for source in self._sources:
                ends.callback(source.borrower.close)
                if source.opened:
                    ends.callback(self.context.backend.close_shared, source.opened)
            self._sources.clear()

    def _end_lending(self) -> None:
        free_left()
        lender, self._lender = self._lender, None
        if lender is not None:
            borrowers = [self._world(loan.borrower) for loan in self.lent]
            retire(lender, borrowers, self.context.backend, self.context.device_buffers.give_up(LENT))


def _machine() -> str:
    """Returns a text that is equal for processes on one machine, in one network namespace, of one user.

    Such processes can lend each other memory.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"
