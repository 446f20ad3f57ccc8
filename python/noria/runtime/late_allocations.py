"""Takes host memory after training has begun, if budget and machine allow it. The ledger has it while it is held."""

from __future__ import annotations

from collections.abc import Sequence

from noria.host.limits import Free, check_fits, min_over_ranks, probe_limits
from noria.model.file_layout import STATE_SLOTS
from noria.model.layout import Region
from noria.runtime.context import Context
from noria.runtime.rank_sync import RankSync

__all__ = ["LateAllocations"]


class LateAllocations:
    """Takes such memory as arenas of the home, and gives it back."""

    def __init__(self, context: Context, sync: RankSync) -> None:
        self.context = context
        self.sync = sync

    def take(self, region: Region, *, together: bool = True) -> list[int]:
        """Takes memory, and returns addresses by unit: 0 for a unit that the region gives nothing.

        Raises UsageError before it takes anything. `together`: ranks that share the model all take it, and all raise if
        one must; the call is then collective.
        """
        free = self._free(region) if together else min_over_ranks([probe_limits(self.context.device)])
        self._refuse_too_much([region], free)
        return self._take(region)

    def take_all(self, regions: Sequence[Region], free: Free) -> None:
        """Takes memory for all of these purposes, or for none. `free`: the same on all ranks that share the model.

        Raises UsageError before it takes anything.
        """
        self._refuse_too_much(regions, free)
        taken: list[str] = []
        before = dict(self.context.home.regions)
        try:
            for region in regions:
                self._take(region)
                taken.append(region.purpose)
        except BaseException:
            for purpose in taken:
                self.give_back(purpose)
            self.context.home.regions.update(before)  # some have no bytes yet
            raise

    def _refuse_too_much(self, regions: Sequence[Region], free: Free) -> None:
        budget = self.context.plan.budgets.host
        more = [(region.purpose, region.bytes) for region in regions]
        home = [(each.purpose, each.bytes) for each in self.context.home.regions.values()]
        home.append((STATE_SLOTS, self.context.home.file_plan.memory))
        if refusal := check_fits(home + more, budget, None) or check_fits(more, budget, free):
            raise refusal

    def _take(self, region: Region) -> list[int]:
        try:
            self.context.ledger.expect("host", region.purpose, region.bytes)
            return self.context.home.take_later(region, self.context.backend)
        except BaseException:
            self.context.ledger.expect("host", region.purpose, 0)
            raise

    def give_back(self, purpose: str) -> None:
        self.context.home.give_back(purpose)
        self.context.ledger.expect("host", purpose, 0)

    def leave(self, purpose: str) -> None:
        """As `give_back`, for memory that tensors of the caller may still view. The last of them frees it."""
        self.context.home.leave(purpose)
        self.context.ledger.expect("host", purpose, 0)

    def _free(self, region: Region) -> Free:
        """Returns the free memory. Ranks that share the model all ask before any takes, and get the same answer."""
        ranks, found = self.context.ranks, probe_limits(self.context.device)
        if ranks is None:
            return min_over_ranks([found])
        self.sync.meet(f"take memory for {region.purpose}")
        return min_over_ranks(ranks.host.gather_objects(found))
