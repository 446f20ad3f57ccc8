"""Measures what ops take, out of the trace of a run: what a prediction of later steps starts from."""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import mean, median

from noria import _C

__all__ = ["MeasuredCosts", "measured_costs"]

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class MeasuredCosts:
    """Holds what ops take if nothing makes them wait. Times are in microseconds.

    - `forward_us`, `backward_us`: one visit, by unit, with the hooks and the launch beside it.
    - `gib_s`, `latency_us`: by lane. The latency of "compute" is what the user's loop does before updates begin.
    - `draft_gib_s`: of drafts. 0: there were none.
    """

    forward_us: list[float]
    backward_us: list[float]
    gib_s: dict[str, float]
    latency_us: dict[str, float]
    draft_gib_s: float = 0.0


def measured_costs(spans: Sequence[_C.Span], num_units: int) -> MeasuredCosts:
    """Returns the medians over a trace.

    A visit takes the time until its end from the moment when its lane was free and its weights were there. Copies and
    updates of several sizes tell a latency and a rate; of one size, a rate alone.

    A trace does not say what updates by torch's code move, so they count as nothing here.

    Args:
        spans: of a run with a trace, in any order. Leave out the first steps, which are unlike the others.
        num_units: of the model.
    """
    ends = {span.op: span.end_us for span in spans}
    compute = sorted((span for span in spans if span.lane == "compute"), key=lambda span: (span.start_us, span.end_us))
    visits: dict[tuple[str, int], list[float]] = defaultdict(list)
    free_us, is_backward = None, False
    again: dict[int, float] = defaultdict(float)  # by unit: a forward that is computed again for its backward
    open_visits: Counter[int] = Counter()  # by unit: forwards whose backward has not come
    for span in compute:
        is_again = is_backward and span.verb == "forward" and open_visits[span.unit] > 0
        if span.verb != "user" and free_us is not None:
            since = max([free_us, *(ends[op] for op in span.waits if op in ends)])
            took = span.end_us - min(since, span.start_us)
            if is_again:
                again[span.unit] += took
            else:
                visits[span.verb, span.unit].append(took + again.pop(span.unit, 0.0))
        if span.verb == "user":
            open_visits.clear()
        elif not is_again:
            open_visits[span.unit] += 1 if span.verb == "forward" else -1
        is_backward = span.verb == "backward" or is_again
        free_us = span.end_us
    by_lane: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for span in spans:
        if span.lane != "compute" and span.bytes:
            lane = "draft" if span.verb == "draft" else span.lane
            by_lane[lane].append((span.bytes, span.end_us - span.start_us))
    drafts = by_lane.pop("draft", [])
    fits = {lane: _fit(each) for lane, each in by_lane.items()}
    draft_gib_s = 0.0
    if drafts:
        latency, _ = fits.setdefault("update", _fit(drafts))
        draft_gib_s = 1e6 / max(median((us - latency) / size for size, us in drafts), 1e-9) / _GIB

    def of_visits(verb: str) -> list[float]:
        return [median(visits.get((verb, unit), [0.0])) for unit in range(num_units)]

    return MeasuredCosts(
        of_visits("forward"),
        of_visits("backward"),
        {lane: 1e6 / us_per_byte / _GIB for lane, (_, us_per_byte) in fits.items() if us_per_byte > 0},
        {lane: latency for lane, (latency, _) in fits.items()} | {"compute": _loop_us(spans)},
        draft_gib_s,
    )


def _loop_us(spans: Sequence[_C.Span]) -> float:
    """Returns how long the user's loop goes on after a backward until updates begin, or else until `step()` returns.

    A backward is over when its gradients have landed.
    """
    marks = sorted(span.start_us for span in spans if span.verb == "user")
    landed = sorted(span.end_us for span in spans if span.verb in ("backward", "drain"))
    begun = sorted(span.start_us for span in spans if span.verb == "update")
    found = []
    for mark in marks:
        number = bisect.bisect_right(landed, mark)
        if number == 0:
            continue
        over = landed[number - 1]
        first = bisect.bisect_left(begun, over)
        found.append(min([mark, *begun[first : first + 1]]) - over)
    return median(found) if found else 0.0


def _fit(each: list[tuple[int, float]]) -> tuple[float, float]:
    """Returns the latency and the time of a byte, by least squares over the median of each size.

    Sizes that are alike tell no latency, nor do times that a latency would have to be negative for.
    """
    sizes: dict[int, list[float]] = defaultdict(list)
    for size, us in each:
        sizes[size].append(us)
    points = [(size, median(times)) for size, times in sizes.items()]
    middle, usual = mean(size for size, _ in points), mean(us for _, us in points)
    if max(sizes) > 1.5 * min(sizes):
        spread = sum((size - middle) ** 2 for size, _ in points)
        slope = sum((size - middle) * (us - usual) for size, us in points) / spread
        if slope > 0 and usual > slope * middle:
            return usual - slope * middle, slope
    return 0.0, usual / middle
