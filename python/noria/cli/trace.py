"""Runs `noria trace`: prints how busy lanes were, and which op waited for which, step by step."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from pathlib import Path
from statistics import median

from noria import _C
from noria._errors import usage_error
from noria.cli.tables import show, time_text
from noria.trace_file import covered, is_step, read_trace, whole_steps

__all__ = ["run_trace"]


def run_trace(args: argparse.Namespace) -> int:
    if (args.file is None) == (args.diff is None):
        raise usage_error("a trace file, or --diff with two", "both" if args.diff else "neither", "give one of them")
    if args.diff is not None:
        return _run_diff(args.diff[0], args.diff[1], args.waits)
    spans = read_trace(args.file)
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    lanes = {span.lane: None for span in sorted(spans, key=lambda span: span.start)}
    order = [lane for lane in _C.LANES if lane in lanes]
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


@dataclasses.dataclass
class _Steps:
    """Holds what ops of a trace took in a step, in microseconds: the median over its whole steps."""

    length: float
    ops: dict[tuple[str, int], tuple[float, float]]
    """By name, and its number in the step: how long the op ran, and how long its lane was idle before it."""
    verbs: dict[str, tuple[float, float]]
    """By verb: how long its ops ran, and how long their lanes were idle before them."""


def _steps_of(path: Path) -> _Steps:
    spans = read_trace(path)
    steps = whole_steps(spans)
    if not steps:
        raise usage_error("a trace with a whole step", f"none in {path}", "trace more steps")
    ops: dict[tuple[str, int], list[tuple[float, float]]] = {}
    verbs: dict[str, list[tuple[float, float]]] = {}
    for begin, end in steps:
        sums: dict[str, tuple[float, float]] = {}
        numbers: Counter[str] = Counter()
        for span in sorted(spans, key=lambda span: span.start):
            if not begin <= span.start < end or is_step(span):
                continue
            took = (span.end - span.start, span.idle)
            ops.setdefault((span.name, numbers[span.name]), []).append(took)
            numbers[span.name] += 1
            sum_ran, sum_idle = sums.get(span.verb, (0.0, 0.0))
            sums[span.verb] = (sum_ran + took[0], sum_idle + took[1])
        for verb, took in sums.items():
            verbs.setdefault(verb, []).append(took)
    return _Steps(
        median(end - begin for begin, end in steps),
        {op: _medians(each) for op, each in ops.items()},
        {verb: _medians([*each, *[(0.0, 0.0)] * (len(steps) - len(each))]) for verb, each in verbs.items()},
    )


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return median(ran for ran, _ in pairs), median(idle for _, idle in pairs)


def _run_diff(predicted_path: Path, measured_path: Path, num_rows: int) -> int:
    """Shows how two traces of the same model part: by step, by kind of op, and the ops that differ most."""
    predicted, measured = _steps_of(predicted_path), _steps_of(measured_path)
    both = predicted.ops.keys() & measured.ops.keys()
    if not both:
        raise usage_error("two traces of the same model", "no op of the same name in both", "compare others")
    longer = measured.length / max(predicted.length, 1) - 1
    print(f"a step: predicted {time_text(predicted.length)}, measured {time_text(measured.length)} ({longer:+.1%})")
    none = (0.0, 0.0)
    rows = []
    for verb in dict.fromkeys([*predicted.verbs, *measured.verbs]):
        (ran, idle), (really_ran, really_idle) = predicted.verbs.get(verb, none), measured.verbs.get(verb, none)
        rows.append([verb, *map(time_text, (ran, really_ran, idle, really_idle))])
    columns = ["", "predicted", "measured", "predicted wait", "measured wait"]
    print()
    show("by kind of op, in a step", columns, rows)
    names = [{name for name, _ in each.ops} for each in (predicted, measured)]
    only = [
        f"only {who}: {', '.join(sorted(mine - others)[:num_rows])}"
        for who, mine, others in (("predicted", names[0], names[1]), ("measured", names[1], names[0]))
        if mine - others
    ]
    for title, which in (("ops that part most", 0), ("waits that part most", 1)):
        apart = {op: measured.ops[op][which] - predicted.ops[op][which] for op in both}
        rows = [
            [
                f"{name} ({number + 1})" if (name, 1) in both else name,
                time_text(predicted.ops[name, number][which]),
                time_text(measured.ops[name, number][which]),
            ]
            for name, number in sorted(both, key=lambda op: (-abs(apart[op]), op))[:num_rows]
        ]
        print()
        show(title, ["", "predicted", "measured"], rows)
    print("\n".join(["", *only]) if only else "")
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
