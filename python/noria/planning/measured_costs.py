"""Measures what ops take, out of the trace of a run: what a prediction of later steps starts from."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from noria import _C

__all__ = ["MeasuredCosts", "measured_costs", "slowest"]

_GIB = 1 << 30
_SLOWS = 0.9
"""Two lanes share something if one is slower than this share of its own rate while the other works."""
_ENOUGH = 0.1
"""Of a lane's time: less tells nothing about a rate."""


@dataclasses.dataclass(frozen=True)
class MeasuredCosts:
    """Holds what ops take if nothing makes them wait. Times are in microseconds.

    - `forward_us`, `backward_us`: one visit, by unit, with the hooks and the launch beside it. Without the forward that
      noria computes again in a backward.
    - `gib_s`, `latency_us`: by lane. The latency of "compute" is what the user's loop does before updates begin.
    - `draft_gib_s`: of drafts. 0: there were none.
    - `both_ways_gib_s`: of fetches and drains together, while both run. 0: neither slows the other down.
    - `host_gib_s`: of the host's memory, while copies and updates run. 0: they do not slow each other down.
    - `device_update_gib_s`: of updates on the device. 0: not measured.
    - `hooks_us`: what hooks and launches add to a visit. It is a part of `forward_us` and `backward_us`.
    - `saved`: bytes that one forward of a unit keeps for its backward. Empty: not measured.
    - `saved_by`: the same, by operator, over all units.
    - `backwards`: how many backwards a step has.
    - `workspace`: bytes on the device that torch had at most, beside what it keeps from one step to the next.
    - `forwards`: how often the first block runs in a step.
    - `elements`: what it puts out each time, in elements. 0: not measured.
    - `inputs`: bytes of a block's inputs, by unit: all that it keeps if it computes its forward again in backward. -1:
      it is no block, or must not run twice. Empty: not measured.
    - `by_threads_gib_s`: of AdamW alone, in the run's formats, by the number of threads; the last one is that of the
      run. Empty: not measured.
    """

    forward_us: list[float]
    backward_us: list[float]
    gib_s: dict[str, float]
    latency_us: dict[str, float]
    draft_gib_s: float = 0.0
    both_ways_gib_s: float = 0.0
    host_gib_s: float = 0.0
    device_update_gib_s: float = 0.0
    hooks_us: float = 0.0
    saved: list[int] = dataclasses.field(default_factory=list)
    saved_by: dict[str, int] = dataclasses.field(default_factory=dict)
    workspace: int = 0
    backwards: int = 1
    forwards: float = 0.0
    elements: float = 0.0
    inputs: list[int] = dataclasses.field(default_factory=list)
    by_threads_gib_s: dict[str, float] = dataclasses.field(default_factory=dict)

    def scaled(self, ratio: float, forwards: float) -> MeasuredCosts:
        """Returns the costs of steps with `forwards` forwards of `ratio` times the elements.

        Compute and what autograd keeps grow by this ratio, and the number of backwards with that of forwards.
        """

        def visits(each: list[float]) -> list[float]:
            return [ratio * max(us - self.hooks_us, 0.0) + min(us, self.hooks_us) for us in each]

        return dataclasses.replace(
            self,
            forward_us=visits(self.forward_us),
            backward_us=visits(self.backward_us),
            saved=[round(ratio * size) for size in self.saved],
            saved_by={name: round(ratio * size) for name, size in self.saved_by.items()},
            inputs=[round(ratio * size) if size >= 0 else size for size in self.inputs],
            backwards=max(round(self.backwards * forwards / self.forwards), 1),
            forwards=forwards,
            elements=ratio * self.elements,
        )

    def without_again(self, units: Iterable[int]) -> MeasuredCosts:
        """Returns costs of a run in which blocks of these units have computed their forward again in backward."""
        backward_us = list(self.backward_us)
        for unit in units:
            backward_us[unit] = max(backward_us[unit] - self.forward_us[unit], 0.0)
        return dataclasses.replace(self, backward_us=backward_us)

    def with_threads(self, number: int) -> MeasuredCosts | None:
        """Returns the costs if so many threads update. None: that was not measured."""
        rates = self.by_threads_gib_s
        if str(number) not in rates or "update" not in self.gib_s:
            return None
        ratio = rates[str(number)] / list(rates.values())[-1]
        gib_s = self.gib_s | {"update": ratio * self.gib_s["update"]}
        return dataclasses.replace(self, gib_s=gib_s, draft_gib_s=ratio * self.draft_gib_s)

    def with_links(self, ratios: dict[str, float]) -> MeasuredCosts:
        """Returns the costs if copies of these lanes take so many times as long."""
        gib_s = {lane: rate / ratios.get(lane, 1.0) for lane, rate in self.gib_s.items()}
        links = [lane for lane in ("fetch", "drain") if self.gib_s.get(lane)]
        now, before = (sum(rates[lane] for lane in links) for rates in (gib_s, self.gib_s))
        both_ways = self.both_ways_gib_s * now / before if links else self.both_ways_gib_s
        return dataclasses.replace(self, gib_s=gib_s, both_ways_gib_s=both_ways)


def slowest(each: Sequence[MeasuredCosts]) -> MeasuredCosts:
    """Returns the longest times and the lowest rates of several ranks. They wait for each other in every visit."""

    def longest(name: str) -> list[Any]:
        return [max(of_unit) for of_unit in zip(*(getattr(costs, name) for costs in each), strict=True)]

    def by_key(name: str, choose: Callable[[Iterable[Any]], Any]) -> dict[str, Any]:
        found = [getattr(costs, name) for costs in each]
        return {key: choose(its[key] for its in found if key in its) for key in dict.fromkeys(itertools.chain(*found))}

    def lowest(name: str) -> float:
        return min((rate for costs in each if (rate := getattr(costs, name))), default=0.0)

    return MeasuredCosts(
        longest("forward_us"),
        longest("backward_us"),
        by_key("gib_s", min),
        by_key("latency_us", max),
        lowest("draft_gib_s"),
        lowest("both_ways_gib_s"),
        lowest("host_gib_s"),
        lowest("device_update_gib_s"),
        max(costs.hooks_us for costs in each),
        longest("saved") if all(costs.saved for costs in each) else [],
        by_key("saved_by", max),
        max(costs.workspace for costs in each),
        max(costs.backwards for costs in each),
        max(costs.forwards for costs in each),
        max(costs.elements for costs in each),
        [max(of_unit) if min(of_unit) >= 0 else -1 for of_unit in zip(*(costs.inputs for costs in each), strict=True)]
        if all(costs.inputs for costs in each)
        else [],
        by_key("by_threads_gib_s", min)
        if all(costs.by_threads_gib_s.keys() == each[0].by_threads_gib_s.keys() for costs in each)
        else {},
    )


def measured_costs(
    spans: Sequence[_C.Span],
    num_units: int,
    bytes_per_copied: int = 1,
    bytes_on_device: Mapping[int, float] | None = None,
) -> MeasuredCosts:
    """Returns the medians over a trace.

    A visit takes the time until its end from the moment when its lane was free and its weights were there. Copies and
    updates of several sizes tell a latency and a rate; of one size, a rate alone.

    A trace does not say what updates by torch's code move, so they count as nothing here.

    Args:
        spans: of a run with a trace, in any order. Leave out the first steps, which are unlike the others.
        num_units: of the model.
        bytes_per_copied: how often a copied byte is read or written in the host's memory.
        bytes_on_device: by unit that the device updates: the bytes of one op.
    """
    ends = {span.op: span.end_us for span in spans}
    # In issue order. The end of a step has the host's time, which may be before visits of that step.
    compute = sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.op)
    visits: dict[tuple[str, int], list[float]] = defaultdict(list)
    hooks: list[float] = []
    landed = sorted(span.end_us for span in spans if span.verb == "drain")
    left = sorted(span.end_us for span in spans if span.verb == "offload")
    free_us, is_backward = None, False
    backwards = [0]  # by step; the first one may have begun before the trace. A second optimizer's step has none
    last: tuple[str, int] | None = None
    again: dict[int, float] = defaultdict(float)  # by unit: a forward that is computed again for its backward
    open_visits: Counter[int] = Counter()  # by unit: forwards whose backward has not come
    update_us = update_bytes = 0.0  # of the device, between visits
    for span in compute:
        if span.verb == "save":  # marks that something is written, and takes no time
            continue
        if span.verb == "update":
            update_us += span.end_us - span.start_us
            update_bytes += (bytes_on_device or {}).get(span.unit, 0.0)
            free_us = span.end_us
            continue
        is_again = is_backward and span.verb == "forward" and open_visits[span.unit] > 0
        if span.verb != "user" and free_us is not None:
            since = max([free_us, *(ends[op] for op in span.waits if op in ends)])
            if span.verb == "forward" and last is not None and last[0] == "backward" and not is_again:
                since = max(since, _last_until(landed, span.start_us) or 0)  # the loop waits for gradients
            since = max(since, _last_until(left, span.start_us) or 0)  # perhaps it had to make room
            took = span.end_us - min(since, span.start_us)
            hooks.append(max(span.start_us - since, 0))
            if is_again:
                again[span.unit] += took
            elif last == (span.verb, span.unit):  # the same visit goes on, as another op
                visits[span.verb, span.unit][-1] += took
            else:
                visits[span.verb, span.unit].append(took + again.pop(span.unit, 0.0))
        if span.verb == "user":
            open_visits.clear()
            backwards.append(0)
        elif not is_again:
            open_visits[span.unit] += 1 if span.verb == "forward" else -1
        backwards[-1] += span.verb == "backward" and not is_backward
        is_backward = span.verb == "backward" or is_again
        last = None if free_us is None or is_again else (span.verb, span.unit)
        free_us = max(free_us or 0, span.end_us)  # the mark of a step may be earlier than the visit before it
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

    fetches, drains = ([span for span in spans if span.lane == lane and span.bytes] for lane in ("fetch", "drain"))
    both_ways = [_rate_beside(fetches, drains, fits), _rate_beside(drains, fetches, fits)]
    updates = _rate_beside(_most_of([s for s in spans if s.lane == "update" and s.bytes]), fetches + drains, fits)
    return MeasuredCosts(
        of_visits("forward"),
        of_visits("backward"),
        {lane: 1e6 / us_per_byte / _GIB for lane, (_, us_per_byte) in fits.items() if us_per_byte > 0},
        {lane: latency for lane, (latency, _) in fits.items()} | {"compute": _loop_us(spans)},
        draft_gib_s,
        sum(each for each, _ in both_ways) if any(is_slower for _, is_slower in both_ways) else 0.0,
        updates[0] + bytes_per_copied * _rate_of(fetches + drains) if updates[1] else 0.0,
        update_bytes / update_us * 1e6 / _GIB if update_us else 0.0,
        hooks_us=median(hooks) if hooks else 0.0,
        backwards=max(round(median([each for each in backwards[1:-1] if each] or backwards[:1])), 1),
    )


def _rate_beside(
    own: Sequence[_C.Span], others: Sequence[_C.Span], fits: dict[str, tuple[float, float]]
) -> tuple[float, bool]:
    """Returns the rate of ops while others run, in GiB/s, and whether it is lower than alone.

    Each op moves its bytes at one rate while none of the others runs, and at another one while some do. Both come from
    least squares over all ops.
    """
    busy = _merged(others)
    starts = [start for start, _ in busy]
    before = [0.0]  # busy time before each of the intervals
    for start, end in busy:
        before.append(before[-1] + end - start)

    def busy_until(us: float) -> float:
        number = bisect.bisect_right(starts, us)
        return before[number] - max(0.0, busy[number - 1][1] - us) if number else 0.0

    aa = ab = bb = ay = by = 0.0
    for span in own:
        together = busy_until(span.end_us) - busy_until(span.start_us)
        alone = max(span.end_us - span.start_us - together - fits.get(span.lane, (0.0, 0.0))[0], 0.0)
        aa, ab, bb = aa + alone * alone, ab + alone * together, bb + together * together
        ay, by = ay + alone * span.bytes, by + together * span.bytes
    determinant = aa * bb - ab * ab
    if min(aa, bb) < _ENOUGH**2 * max(aa, bb) or determinant <= _ENOUGH**2 * aa * bb:
        return _rate_of(own), False  # always alone, never alone, or always for the same share of the time
    rate_alone, rate_together = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
    if rate_together <= 0 or rate_together >= _SLOWS * rate_alone:
        return _rate_of(own), False
    return rate_together * 1e6 / _GIB, True


def _most_of(spans: Sequence[_C.Span]) -> list[_C.Span]:
    """Returns the spans of the verb that takes most of the time: updates and drafts have rates of their own."""
    by_verb: dict[str, list[_C.Span]] = defaultdict(list)
    for span in spans:
        by_verb[span.verb].append(span)
    return max(by_verb.values(), key=lambda each: sum(span.end_us - span.start_us for span in each), default=[])


def _rate_of(spans: Sequence[_C.Span]) -> float:
    """Returns GiB/s while at least one of the spans runs. 0: there are none."""
    busy_us = sum(end - start for start, end in _merged(spans))
    return sum(span.bytes for span in spans) / busy_us * 1e6 / _GIB if busy_us else 0.0


def _merged(spans: Iterable[_C.Span]) -> list[tuple[int, int]]:
    """Returns the intervals in which at least one of the spans runs, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((span.start_us, span.end_us) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _loop_us(spans: Sequence[_C.Span]) -> float:
    """Returns how long the user's loop goes on after a backward until updates begin, or else until `step()` returns.

    A backward is over when its gradients have landed.
    """
    marks = sorted(span.start_us for span in spans if span.verb == "user")
    landed = sorted(span.end_us for span in spans if span.verb in ("backward", "drain"))
    begun = sorted(span.start_us for span in spans if span.verb == "update")
    found = []
    for mark in marks:
        over = _last_until(landed, mark)
        if over is None:
            continue
        first = bisect.bisect_left(begun, over)
        found.append(min([mark, *begun[first : first + 1]]) - over)
    return median(found) if found else 0.0


def _last_until(times: Sequence[int], us: float) -> int | None:
    """Returns the last of these times, which are sorted, that is not after `us`. None: all are."""
    number = bisect.bisect_right(times, us)
    return times[number - 1] if number else None


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
