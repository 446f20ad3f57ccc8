"""Pipeline stages lend each other spare device memory: for what their blocks save, and what then is left for copies of
units that their windows evict.

How much a stage has to spare or lacks is known once a step has been made: after the first backwards, inside of the
first `optimizer.step()`, all stages tell each other, and the same matching on each of them (csrc/plan/matching.h) says
who lends what to whom, by the links that they have measured (noria/links.py). A lender exports one arena, once; a
borrower copies to and from its range by itself from then on.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from noria import _C
from noria._errors import usage_error
from noria.beside import LENT
from noria.groups import Group
from noria.links import CALL, Handover, Loan, Pair, Source, free_left, measured, retire
from noria.ranks import SAME_MESHES, raised_by_all

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["Lending", "Loan", "Stages", "need_and_spare"]


class Stages:
    """The ranks of a pipeline, met: one process each."""

    def __init__(self, ranks: list[int]) -> None:
        """Collective."""
        self.group = Group(ranks)
        self.rank, self.size = self.group.rank, self.group.size
        try:
            self.group.agree([f"stages={ranks}"], **SAME_MESHES)
        except BaseException:
            self.close()
            raise

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
    """Of one wrap call. Without stages nothing happens.

    A lender keeps what its own blocks need. When that grows, it asks back what it then lacks (Note [Words that only
    fall] in csrc/store/lending.h), all of it at step boundaries: its own, where it asks; the borrower's next, where
    nothing may lie there any more; and its own again, where it gets it. Until then its blocks have less room, and more
    of what they save goes to the host.
    """

    def __init__(self, wrapped: Wrapped, stages: Stages | None) -> None:
        free_left()
        self.wrapped = wrapped
        self.stages = stages
        self.loans: list[Loan] = []  # all of them as they were made, but this stage's as they are
        self.notes: list[str] = []
        """Who lends nothing to whom, and why."""
        self._has_met = False
        self._lender: _C.Lender | None = None
        self._asked: dict[int, int] = {}  # by borrower: what it may have still
        self._wants = True  # what is for units
        self._sources: list[Source] = []

    @property
    def lent(self) -> list[Loan]:
        return [loan for loan in self.loans if self.stages is not None and loan.lender == self.stages.rank]

    @property
    def borrowed(self) -> list[Loan]:
        return [loan for loan in self.loans if self.stages is not None and loan.borrower == self.stages.rank]

    @property
    def row_name(self) -> str:
        """What one of `stages` is called, which may hold several stages of its pipeline."""
        return "stage" if len(self.wrapped.partition.roots) == 1 else "rank"

    def check(self) -> None:
        """Raises MachineError where a lender has died."""
        for source in self._sources:
            source.borrower.check()

    def begin_step(self) -> None:
        """The first time after a pass collective over the stages."""
        free_left()
        self.check()
        if self.stages is None:
            return
        if not self._has_met and all(each["phase"] != "backward" for each in self.wrapped.custody.passes()):
            return  # a step before anything was saved, as for the sake of a checkpoint, tells nothing
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

    def _meet(self, stages: Stages) -> None:
        ranks = list(stages.group.ranks)
        try:
            with raised_by_all([stages], CALL):
                wanted = self.wrapped.copies.wanted()
                offer = (f"{_machine()} {self.wrapped.device.type}", *self._need_and_spare(), wanted)
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
        bandwidth, failed = measured(stages, self.wrapped.backend, self.wrapped.device, pairs, spare)
        self._note_failed(failed)
        links = _C.link_classes(bandwidth)
        if self._take_arena(stages, offers, links):
            self._trade(stages, links)

    def _pairs(self, offers: list[tuple[str, int, int, int]]) -> list[Pair]:
        """Of those that lack or want something and those that have something to spare, the ones that may reach each
        other."""
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

    def _own_need(self) -> int:
        saved = self.wrapped.custody.saved_stats()
        return own_need(saved["most_saved"], saved["largest"])

    def _need_and_spare(self) -> tuple[int, int]:
        saved, room = self.wrapped.custody.saved_stats(), self.wrapped.plan.saved_room
        if room is None and self.wrapped.policy.activations != "offload":
            return 0, 0
        return need_and_spare(saved["most_saved"], saved["largest"], room)

    def _take_arena(self, stages: Stages, offers: list[tuple[str, int, int, int]], links: list[list[float]]) -> bool:
        """False: nobody lends. A stage whose device has no such arena lends nothing, and what it would have lent is
        sought elsewhere."""
        beside = self.wrapped.beside
        while True:
            self.loans = [Loan(*each) for each in _C.match_memory(offers, links)]
            if not self.loans:
                return False
            why = ""
            with raised_by_all([stages], CALL):
                try:
                    if arena := sum(loan.bytes for loan in self.lent):
                        beside.take_shared(LENT, arena)
                        self._note_lent()
                except _C.MachineError as error:
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
                beside.free(LENT)
                self._note_lent()

    def _trade(self, stages: Stages, links: list[list[float]]) -> None:
        wrapped = self.wrapped
        handover = Handover(stages, wrapped.backend)
        self._sources = handover.sources  # also what has come when it fails
        try:
            handover.make(self.loans, lambda: wrapped.beside.address(LENT))
        finally:
            self._lender = handover.lender
        handover.together(lambda: None)  # who has failed has closed, and what it had counts as free
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
                    wrapped.custody.add_peer(loan.lender, loan.lender, link, source.address, loan.for_saved)
                    source.is_for_saved = True
                if loan.for_units:
                    units = source.address + loan.for_saved
                    wrapped.custody.add_copy_peer(loan.lender, loan.lender, link, units, loan.for_units, loan.for_saved)
                    source.is_for_units = True

    def _abandon(self) -> None:
        """Nobody lends: a step that is made again is made without. What has come to a borrower already comes back at a
        later step."""
        with contextlib.ExitStack() as ends:  # each comes, whatever another one raises; the last one first
            for source in self._sources:
                ends.callback(source.borrower.close)
                if source.opened:
                    ends.callback(self.wrapped.backend.close_shared, source.opened)
                ends.callback(self._shrink, source, 0)
            self._sources.clear()
        self.loans = self.lent if self.wrapped.beside.address(LENT) else []
        self._take_back()

    # ---- at step boundaries ----

    def _ask_back(self) -> None:
        """Of the borrowers, in proportion to what they have. All, where a device has memory back only as a whole."""
        plan, left = self.wrapped.plan, sum(self._asked.values())
        if self._lender is None or plan.saved_room is None or not left:
            return
        in_parts = self.wrapped.device.type == "cpu"
        lacking = min(self._own_need(), plan.saved_room) - (plan.saved_room - (left if in_parts else plan.lent_bytes))
        if lacking <= 0:
            return
        for borrower, asked in self._asked.items():
            if not asked:
                continue
            kept = asked - -(-lacking * asked // left) if in_parts else 0
            self._asked[borrower] = kept = max(kept, 0) // _C.LOAN_GRANULE * _C.LOAN_GRANULE
            self._lender.ask_back(self._world(borrower), kept)

    def stop_wanting(self) -> None:
        """What is lent for units goes back at the next step."""
        self._wants = False

    def _give_back(self) -> None:
        wrapped = self.wrapped
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
                wrapped.backend.close_shared(source.opened)
                source.borrower.close()
                self._sources.remove(source)
            source.loan = self._shrunk(loan, left)

    def _shrink(self, source: Source, left: int) -> int:
        """Returns what must be left: more, where what is saved across steps lies beyond."""
        custody, loan = self.wrapped.custody, source.loan
        if source.is_for_units:
            custody.shrink_copy_peer(loan.lender, max(left - loan.for_saved, 0))
        if source.is_for_saved and left < loan.for_saved and not custody.shrink_peer(loan.lender, left):
            return loan.for_saved
        return left

    def _take_back(self) -> None:
        beside = self.wrapped.beside
        if not beside.address(LENT):
            return
        left = {loan: self._still_lent(loan) for loan in self.lent}
        for loan, still in left.items():
            if still < loan.bytes:
                beside.discard(LENT, loan.offset + still, loan.bytes - still)
                self._asked[loan.borrower] = min(self._asked.get(loan.borrower, 0), still)
                self._shrunk(loan, still)
        if not any(left.values()):
            beside.free(LENT)
            if self._lender is not None:
                self._lender.close()
                self._lender = None
        self._note_lent()

    def _still_lent(self, loan: Loan) -> int:
        return 0 if self._lender is None else self._lender.lent(self._world(loan.borrower))

    def _note_lent(self) -> None:
        """What the arena takes is of the room for what this stage's own blocks save."""
        plan, beside = self.wrapped.plan, self.wrapped.beside
        plan.lent_bytes = beside.taken.get(LENT, 0)
        assert plan.saved_room is not None
        self.wrapped.custody.set_saved_room(plan.saved_room - plan.lent_bytes)

    def _shrunk(self, loan: Loan, left: int) -> Loan:
        self.loans[self.loans.index(loan)] = shrunk = loan.shrunk(left)
        self._trace(shrunk)
        return shrunk

    def _trace(self, loan: Loan) -> None:
        if self.wrapped.trace is not None:
            self.wrapped.trace.note(loan.told(self.row_name))

    def _world(self, rank: int) -> int:
        assert self.stages is not None
        return self.stages.group.ranks[rank]

    # ---- end ----

    def close(self) -> None:
        """Once nothing runs on the device any more. Waits for nobody."""
        with contextlib.ExitStack() as ends:  # each comes, whatever another one raises; the last one first
            if self.stages is not None:
                ends.callback(self.stages.close)
            ends.callback(self._end_lending)
            for source in self._sources:
                ends.callback(source.borrower.close)
                if source.opened:
                    ends.callback(self.wrapped.backend.close_shared, source.opened)
            self._sources.clear()

    def _end_lending(self) -> None:
        free_left()
        lender, self._lender = self._lender, None
        if lender is not None:
            borrowers = [self._world(loan.borrower) for loan in self.lent]
            retire(lender, borrowers, self.wrapped.backend, self.wrapped.beside.give_up(LENT))


def own_need(most_saved: int, largest: int) -> int:
    """Bytes of room for what was saved at once; two bundles have it in any case."""
    return max(most_saved, 2 * largest)


def need_and_spare(most_saved: int, largest: int, room: int | None) -> tuple[int, int]:
    """Bytes of what a stage's blocks save, `most_saved` at once and `largest` of one block; without a `room` all of it
    leaves. Two blocks' room is for what is saved now, and what leaves or comes meanwhile; whole blocks' leave; and one
    block's is for ranges that do not fit each other."""
    if room is None:
        return most_saved, 0
    if most_saved > room:
        return -(-(most_saved - room + 3 * largest) // largest) * largest, 0
    return 0, max(room - own_need(most_saved, largest), 0)


def _machine() -> str:
    """Alike for processes that can lend each other: of one machine, one network namespace and one user."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"
