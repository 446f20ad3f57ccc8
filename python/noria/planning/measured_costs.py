"""Measures what ops take, out of the trace of a run: what a prediction of later steps starts from."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean, median

from noria import _C

__all__ = ["MeasuredCosts", "measured_costs"]

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class MeasuredCosts:
    """Holds what ops take if nothing makes them wait. Times are in microseconds.

    - `forward_us`, `backward_us`: one visit, by unit, with the hooks and the launch beside it.
    - `gib_s`, `latency_us`: by lane. The latency of "compute" is what the user's loop does between two passes.
    """

    forward_us: list[float]
    backward_us: list[float]
    gib_s: dict[str, float]
    latency_us: dict[str, float]


def measured_costs(spans: Sequence[_C.Span], num_units: int) -> MeasuredCosts:
    """Returns the medians over a trace.

    A visit takes the time until its end from the moment when its lane was free and its weights were there. Copies and
    updates of several sizes tell a latency and a rate; of one size, a rate alone.

    Args:
        spans: of a run with a trace, in any order. Leave out the first steps, which are unlike the others.
        num_units: of the model.
    """
    ends = {span.op: span.end_us for span in spans}
    compute = sorted((span for span in spans if span.lane == "compute"), key=lambda span: (span.start_us, span.end_us))
    visits: dict[tuple[str, int], list[float]] = defaultdict(list)
    loops: list[float] = []
    free_us, is_after_backward = None, False
    for span in compute:
        if span.verb == "user":
            continue  # it has no length
        if free_us is not None:
            since = max([free_us, *(ends[op] for op in span.waits if op in ends)])
            before = max(0, span.start_us - since)
            if is_after_backward and span.verb == "forward":
                loops.append(before)
                before = 0
            visits[span.verb, span.unit].append(before + span.end_us - span.start_us)
        free_us, is_after_backward = span.end_us, span.verb == "backward"
    by_lane: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for span in spans:
        if span.lane != "compute" and span.bytes:
            by_lane[span.lane].append((span.bytes, span.end_us - span.start_us))
    fits = {lane: _fit(each) for lane, each in by_lane.items()}

    def of_visits(verb: str) -> list[float]:
        return [median(visits.get((verb, unit), [0.0])) for unit in range(num_units)]

    return MeasuredCosts(
        of_visits("forward"),
        of_visits("backward"),
        {lane: 1e6 / us_per_byte / _GIB for lane, (_, us_per_byte) in fits.items() if us_per_byte > 0},
        {lane: latency for lane, (latency, _) in fits.items()} | {"compute": median(loops) if loops else 0.0},
    )


def _fit(each: list[tuple[int, float]]) -> tuple[float, float]:
    """Returns the latency and the time of a byte, by least squares over the median of each size."""
    sizes: dict[int, list[float]] = defaultdict(list)
    for size, us in each:
        sizes[size].append(us)
    points = [(size, median(times)) for size, times in sizes.items()]
    if len(points) == 1:
        [(size, us)] = points
        return 0.0, us / size
    middle, usual = mean(size for size, _ in points), mean(us for _, us in points)
    spread = sum((size - middle) ** 2 for size, _ in points)
    slope = max(sum((size - middle) * (us - usual) for size, us in points) / spread, 0.0)
    return max(usual - slope * middle, 0.0), slope
