"""Tells if copies over a link take longer than they did: another process uses it, or it runs at a lower speed."""

from __future__ import annotations

from collections.abc import Callable

from noria import _C
from noria.planning.measured_costs import MeasuredCosts

__all__ = ["LinkPaces"]

_ALIKE = 1.5
"""A link has changed if copies take longer or shorter by this ratio."""


class LinkPaces:
    """Compares the time of copies with what costs say of them.

    Copies wait for the other way, and for updates that share the memory of the host. How long depends on the plan, and
    on the compute between them. So what a plan's copies take at first is taken to be usual.
    """

    def __init__(self, stats: Callable[[str], _C.LaneStats]) -> None:
        """`stats` returns a lane's counters."""
        self._stats = stats
        self._counted: dict[str, tuple[float, int, int]] = {}
        self._usual: dict[str, float] = {}
        self._plan: object = None

    def begin_anew(self) -> None:
        """Steps have other inputs from now on."""
        self._usual = {}

    def changes(self, costs: MeasuredCosts, plan: object) -> dict[str, float]:
        """Returns, by lane, how many times as long as usual copies have taken since the last call.

        Lanes whose copies take as long as usual are missing. `plan`: the one whose copies these were.
        """
        paces = {lane: pace for lane in ("fetch", "drain") if (pace := self._pace(lane, costs))}
        if plan is not self._plan:  # some of these copies were those of the plan before
            self._plan, self._usual = plan, {}
            return {}
        ratios = {lane: pace / self._usual.setdefault(lane, pace) for lane, pace in paces.items()}
        return {lane: ratio for lane, ratio in ratios.items() if not 1 / _ALIKE <= ratio <= _ALIKE}

    def _pace(self, lane: str, costs: MeasuredCosts) -> float:
        """Returns how many times as long copies have taken as the costs say; 0 if there were none."""
        stats, (us, ops, moved) = self._stats(lane), self._counted.get(lane, (0.0, 0, 0))
        self._counted[lane] = (stats["busy_us"], stats["num_ops"], stats["bytes"])
        us, ops, moved = stats["busy_us"] - us, stats["num_ops"] - ops, stats["bytes"] - moved
        rate = costs.gib_s.get(lane, 0.0) * (1 << 30) / 1e6
        if not moved or not rate:
            return 0.0
        return us / (ops * costs.latency_us.get(lane, 0.0) + moved / rate)
