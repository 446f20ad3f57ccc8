"""When a link counts as slower or faster than usual, and what costs say then."""

from __future__ import annotations

from typing import Any

from noria.forward.link_paces import LinkPaces
from noria.planning.measured_costs import MeasuredCosts

GIB = 1 << 30
COSTS = MeasuredCosts([1.0], [2.0], {"fetch": 2.0, "drain": 4.0, "update": 1.0}, {"fetch": 10.0}, both_ways_gib_s=3.0)


class Links:
    def __init__(self) -> None:
        self.lanes: dict[str, dict[str, Any]] = {
            lane: {"busy_us": 0.0, "num_ops": 0, "bytes": 0} for lane in ("fetch", "drain")
        }
        self.paces = LinkPaces(lambda lane: self.lanes[lane])  # type: ignore[arg-type,return-value]

    def copy(self, lane: str, pace: float, gib_s: float, *, num_ops: int = 4, latency_us: float = 0.0) -> None:
        """Copies a GiB, in `pace` times the time that costs say."""
        stats = self.lanes[lane]
        stats["busy_us"] += pace * (1e6 / gib_s + num_ops * latency_us)
        stats["num_ops"] += num_ops
        stats["bytes"] += GIB

    def step(self, fetch: float = 1.0, drain: float = 1.0) -> None:
        self.copy("fetch", fetch, 2.0, latency_us=10.0)
        self.copy("drain", drain, 4.0)


def test_what_copies_take_at_first_is_usual():
    """But for those before the first call: some of them are of the plan before."""
    links = Links()
    for fetch, drain in ((9.0, 0.5), (1.5, 3.0), (1.5, 3.0), (1.7, 2.6)):
        links.step(fetch, drain)
        assert links.paces.changes(COSTS, "plan") == {}


def test_a_link_that_is_slower_is_told_until_costs_say_so():
    links = Links()
    for _ in range(2):
        links.step(1.5, 1.0)
        assert links.paces.changes(COSTS, "plan") == {}
    links.step(4.5, 1.1)
    found = links.paces.changes(COSTS, "plan")
    assert found.keys() == {"fetch"} and abs(found["fetch"] - 3) < 1e-9
    slow = COSTS.with_links(found)
    links.step(4.5, 1.1)
    assert links.paces.changes(slow, "plan") == {}
    links.step(1.5, 1.0)
    assert links.paces.changes(slow, "plan")["fetch"] < 0.4  # it is fast again


def test_another_plan_has_another_usual_time_and_no_copies_tell_nothing():
    links = Links()
    for _ in range(2):
        links.step()
        assert links.paces.changes(COSTS, "plan") == {}
    assert links.paces.changes(COSTS, "plan") == {}
    for _ in range(2):
        links.step(5.0, 5.0)
        assert links.paces.changes(COSTS, "other plan") == {}
    links.paces.begin_anew()
    for _ in range(2):
        links.step(9.0, 9.0)
        assert links.paces.changes(COSTS, "other plan") == {}
    links.step()
    assert links.paces.changes(COSTS, "other plan").keys() == {"fetch", "drain"}


def test_costs_of_slower_links():
    slow = COSTS.with_links({"fetch": 4.0})
    assert slow.gib_s == {"fetch": 0.5, "drain": 4.0, "update": 1.0}
    assert slow.both_ways_gib_s == 3.0 * 4.5 / 6.0
    assert (slow.forward_us, slow.latency_us) == (COSTS.forward_us, COSTS.latency_us)
