"""Host memory that is taken once training has begun: held against budget and machine first, in the ledger while it is
there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from noria.home import Region
from noria.limits import Free, check_fits, find, least
from noria.policy import host_budget

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["LaterMemory"]


class LaterMemory:
    """Of one wrap call. The device can address all of it."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped

    def take(self, region: Region, *, together: bool = True) -> list[int]:
        """Addresses by unit; 0 where the region has nothing for it. Raises UsageError before anything is taken; where
        ranks share the model on all of them, if they take it together: then this is collective."""
        wrapped = self.wrapped
        budget = host_budget(wrapped.policy)
        more = [(region.purpose, region.bytes)]
        home = [(each.purpose, each.bytes) for each in wrapped.plan.regions]
        free = self._free(region) if together else least([find(wrapped.device)])
        if refusal := check_fits(home + more, budget, None) or check_fits(more, budget, free):
            raise refusal
        addresses = wrapped.home.take_later(region, wrapped.backend)
        wrapped.plan.regions = [*wrapped.plan.regions, region]
        return addresses

    def give_back(self, purpose: str) -> None:
        self.wrapped.home.give_back(purpose)
        self.wrapped.plan.regions = [each for each in self.wrapped.plan.regions if each.purpose != purpose]

    def _free(self, region: Region) -> Free:
        """Ranks that share the model all ask at once, before any takes, and get the same answer."""
        ranks, found = self.wrapped.ranks, find(self.wrapped.device)
        if ranks is None:
            return least([found])
        self.wrapped.together.meet(f"take memory for {region.purpose}")
        return least(ranks.host.gather_objects(found))
