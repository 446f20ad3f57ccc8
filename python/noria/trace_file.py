"""Reads the trace files that noria writes."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
from pathlib import Path

from noria import _C
from noria._errors import usage_error

__all__ = ["TracedSpan", "covered", "is_step", "read_trace", "whole_steps"]


@dataclasses.dataclass(eq=False)
class TracedSpan:
    """Describes one span of a trace, in microseconds.

    `op`: its position in issue order. `givers`: the spans that this one waited for.
    """

    op: int
    lane: str
    name: str
    start: float
    end: float
    num_bytes: int
    givers: list[TracedSpan] = dataclasses.field(default_factory=list)
    idle: float = 0.0
    """How long the lane was idle before this span because a giver had not ended."""

    @property
    def verb(self) -> str:
        return self.name.split(" ", 1)[0]

    @property
    def unit(self) -> str:
        return self.name.partition(" ")[2]


def read_trace(path: Path) -> list[TracedSpan]:
    """Returns the spans of a trace file. Within each lane they are in the order of their ends.

    Raises UsageError if the file cannot be read, is no trace of noria's, or has no spans.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        slices = [event for event in events if event["ph"] == "X"]
        spans = [
            TracedSpan(e["args"]["op"], lanes[e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"], e["args"]["bytes"])
            for e in slices
        ]
        arrows: dict[int, dict[str, tuple[str, float]]] = {}
        for event in events:
            if event["ph"] in ("s", "f"):
                arrows.setdefault(event["id"], {})[event["ph"]] = (lanes[event["tid"]], event["ts"])
        if any(not isinstance(span.name, str) or span.lane not in _C.LANES for span in spans):
            raise ValueError("a name or a lane")
        sum(span.op + span.num_bytes + span.start + span.end for span in spans)  # all of them are numbers
    except OSError as error:
        raise usage_error("a trace file that can be read", f"{path}: {error.strerror}", "give Policy.trace's") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        remedy = 'give a file that noria wrote: noria.wrap(..., trace="trace.json")'
        raise usage_error("a trace in Chrome's JSON, as noria writes it", str(path), remedy) from None
    if not spans:
        raise usage_error("a trace with spans", f"none in {path}", "train a few steps before the trace is written")
    _connect(spans, arrows)
    return spans


def _connect(spans: list[TracedSpan], arrows: dict[int, dict[str, tuple[str, float]]]) -> None:
    starts = {(span.lane, span.start): span for span in spans}
    # An arrow leaves one microsecond before its slice ends, and arrives at the start of another slice.
    ends = {(span.lane, max(span.start, span.end - 1)): span for span in spans}
    for arrow in arrows.values():
        if len(arrow) == 2 and arrow["s"] in ends and arrow["f"] in starts:
            starts[arrow["f"]].givers.append(ends[arrow["s"]])
    free: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        since = free.get(span.lane)
        if since is not None and span.givers:
            span.idle = max(0.0, min(max(giver.end for giver in span.givers), span.start) - since)
        free[span.lane] = max(since or 0.0, span.end)


def covered(spans: list[TracedSpan]) -> float:
    """Returns the microseconds during which at least one of the spans runs."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def whole_steps(spans: list[TracedSpan]) -> list[tuple[float, float]]:
    """Returns (begin, end) of each whole step.

    A step goes from the end of the last backward before one `step()` to the end of the last backward before the next.
    So the fetches that `step()` issues ahead count for the next step. If no step is marked, each backward counts as
    the last one.
    """
    compute = sorted(
        (s for s in spans if s.lane == "compute" and s.verb in ("forward", "backward")), key=lambda s: s.op
    )
    marks = [span.op for span in spans if is_step(span)]
    if marks:
        last = {bisect.bisect_left(compute, mark, key=lambda span: span.op) - 1 for mark in marks}
        ends = [compute[number].end for number in sorted(last) if number >= 0]
    else:
        ends = [
            each.end
            for each, later in itertools.zip_longest(compute, compute[1:])
            if each.verb == "backward" and (later is None or later.verb == "forward")
        ]
    return list(itertools.pairwise(ends))


def is_step(span: TracedSpan) -> bool:
    """Returns True for the mark of a `step()`. In a run it has no length; in a simulation it is the user's loop."""
    return span.lane == "compute" and span.verb == "user"
