"""Runs `noria trace`: prints how busy lanes were, and which op waited for which, step by step."""

from __future__ import annotations

import argparse

from noria.cli.tables import show, time_text
from noria.trace_file import covered, is_step, read_trace, whole_steps

__all__ = ["run_trace"]


def run_trace(args: argparse.Namespace) -> int:
    spans = read_trace(args.file)
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    lanes = {span.lane: None for span in sorted(spans, key=lambda span: span.start)}
    order = [lane for lane in ("compute", "fetch", "drain", "collect", "peer", "update") if lane in lanes]
    rows = []
    for lane in order:
        own = [span for span in spans if span.lane == lane and not is_step(span)]
        busy = covered(own)
        num_bytes = sum(span.num_bytes for span in own)
        rate = f"{num_bytes / (1 << 30) / (busy / 1e6):.2f}" if num_bytes and busy else ""
        waited = time_text(sum(span.idle for span in own))
        rows.append([lane, str(len(own)), time_text(busy), f"{busy / max(end - begin, 1):.0%}", waited, rate])
    show(f"{time_text(end - begin)} of {args.file}", ["lane", "spans", "busy", "share", "waited", "GiB/s"], rows)

    kinds: dict[str, float] = {}
    for span in spans:
        if span.idle > 0:
            giver = max(span.givers, key=lambda each: each.end)
            kind = f"{giver.verb} -> {span.verb}"
            kinds[kind] = kinds.get(kind, 0.0) + span.idle
    print()
    by_time = sorted(kinds.items(), key=lambda kind: -kind[1])
    show("waits by kind", ["", "in all"], [[kind, time_text(us)] for kind, us in by_time])
    print()
    longest = sorted((span for span in spans if span.idle > 0), key=lambda span: -span.idle)[: args.waits]
    rows = [
        [
            span.name,
            span.lane,
            time_text(span.start - begin),
            time_text(span.idle),
            max(span.givers, key=lambda giver: giver.end).name,
        ]
        for span in longest
    ]
    show("longest waits", ["who waited", "on the lane", "at", "for", "until it had done"], rows)
    print()
    steps = whole_steps(spans)
    fetches = [sum(start <= span.start < stop for span in spans if span.verb == "fetch") for start, stop in steps]
    if not steps:
        print("no whole step in this trace")
    else:
        lengths = sorted(stop - start for start, stop in steps)
        print(
            f"{len(steps)} whole steps, median {time_text(lengths[len(lengths) // 2])}; "
            f"fetches per step: {_ranges(fetches)}"
        )
    return 0


def _ranges(counts: list[int]) -> str:
    """Returns a text such as "14 (12 times), 16", in the order of the counts."""
    parts: list[list[int]] = []
    for count in counts:
        if parts and parts[-1][0] == count:
            parts[-1][1] += 1
        else:
            parts.append([count, 1])
    return ", ".join(f"{count} ({times} times)" if times > 1 else str(count) for count, times in parts)
