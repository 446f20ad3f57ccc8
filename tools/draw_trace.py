"""Draws two steps of a trace that noria wrote: a row per lane, a colour per unit, arrows for one unit's waits.

python tools/draw_trace.py build/demo/trace.json docs/wheel.png [--steps 2] [--unit blocks.6]
"""

import argparse
import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch

ROWS = ["fetch", "compute", "drain", "update"]  # the way of a unit, from top to bottom
SMALL = "#b0b0b0"  # colour of what is no block


@dataclass
class Span:
    lane: str
    verb: str
    unit: str
    start_us: int
    end_us: int
    givers: list["Span"] = field(default_factory=list)


def read(path: Path) -> list[Span]:
    """All spans by start, each with the spans it waited for."""
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans, leaving = [], {}
    for event in events:
        if event["ph"] == "X":
            verb, _, unit = event["name"].partition(" ")
            spans.append(Span(lanes[event["tid"]], verb, unit, event["ts"], event["ts"] + event["dur"]))
            waiter = spans[-1]
        elif event["ph"] == "s":
            leaving[event["id"]] = (lanes[event["tid"]], event["ts"])
        elif event["ph"] == "f":  # arrows follow the span they arrive at
            waiter.givers.append(leaving.pop(event["id"]))
    by_lane: dict[str, list[Span]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    for span in spans:
        span.givers = [
            next(giver for giver in by_lane[lane] if giver.start_us <= at <= max(giver.end_us - 1, giver.start_us))
            for lane, at in span.givers
        ]
    return sorted(spans, key=lambda span: span.start_us)


def step_starts(spans: list[Span]) -> list[int]:
    """Where training steps begin: at each first forward after a backward."""
    compute = [span for span in spans if span.lane == "compute" and span.verb in ("forward", "backward")]
    return [
        after.start_us
        for before, after in itertools.pairwise(compute)
        if (before.verb, after.verb) == ("backward", "forward")
    ]


def quickest(starts: list[int], num_steps: int) -> tuple[int, int]:
    """Begin and end of the quickest run of steps: the one that other programs disturbed least."""
    if len(starts) <= num_steps:
        raise SystemExit(f"the trace holds {max(len(starts) - 1, 0)} whole training steps, {num_steps} are needed")
    return min(zip(starts, starts[num_steps:], strict=False), key=lambda run: run[1] - run[0])


def colours_of(spans: list[Span]) -> dict[str, str]:
    """By block, in the order of the forward pass."""
    blocks = list(dict.fromkeys(s.unit for s in spans if s.verb == "forward" and s.unit[-1:].isdigit()))
    colours = pyplot.get_cmap("turbo")
    return {unit: to_hex(colours(0.07 + 0.86 * i / max(len(blocks) - 1, 1))) for i, unit in enumerate(blocks)}


HATCHES = {"backward": "///", "draft": "xxx"}


def draw_bars(
    axes: pyplot.Axes, shown: list[Span], begin_us: int, end_us: int, colour: dict[str, str], marked: str = ""
) -> None:
    """A row for each lane; time from `begin_us` on, in ms."""
    least_ms = (end_us - begin_us) / 1e3 / 900
    for span in shown:
        left, width = (span.start_us - begin_us) / 1e3, max((span.end_us - span.start_us) / 1e3, least_ms)
        bar = {"y": -ROWS.index(span.lane), "width": width, "left": left, "height": 0.6}
        axes.barh(**bar, color=colour.get(span.unit, SMALL), zorder=2)
        if hatch := HATCHES.get(span.verb):
            axes.barh(**bar, fill=False, hatch=hatch, ec="white", lw=0, zorder=3)
        framed = span.unit == marked
        frame = {"ec": "black", "lw": 1.6, "zorder": 4} if framed else {"ec": "white", "lw": 0.5, "zorder": 3}
        axes.barh(**bar, fill=False, **frame)
    axes.set_yticks([-i for i in range(len(ROWS))], ROWS, fontsize=14)
    axes.set_ylim(-len(ROWS) + 0.5, 0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw_legend(axes: pyplot.Axes, colour: dict[str, str], marked: str = "") -> None:
    for i, unit in enumerate(colour):
        box = {"fc": colour[unit], "ec": "black" if unit == marked else "none", "pad": 3}
        where = (0.01 + 0.98 * (i + 0.5) / len(colour), 1.02)
        label = axes.text(*where, unit.rpartition(".")[2], transform=axes.transAxes, ha="center", bbox=box)
        label.set_color("white" if i in (0, len(colour) - 1) else "black")


def draw(spans: list[Span], begin_us: int, end_us: int, marked: str, path: Path) -> None:
    margin_us = (end_us - begin_us) // 100
    shown = [s for s in spans if s.end_us > begin_us - margin_us and s.start_us < end_us + margin_us and s.lane in ROWS]
    colour = colours_of(shown)
    row = {lane: -i for i, lane in enumerate(ROWS)}

    def at_ms(time_us: int) -> float:
        return (time_us - begin_us) / 1e3

    figure, axes = pyplot.subplots(figsize=(13, 4.2))
    draw_bars(axes, shown, begin_us, end_us, colour, marked)
    arrows = [(g, s) for s in shown for g in s.givers if g in shown and marked in (g.unit, s.unit) and g.lane != s.lane]
    for giver, waiter in arrows:
        side = 0.3 if row[waiter.lane] > row[giver.lane] else -0.3
        begin, end = (at_ms(giver.end_us), row[giver.lane] + side), (at_ms(waiter.start_us), row[waiter.lane] - side)
        style = {"arrowstyle": "-|>", "mutation_scale": 13, "shrinkA": 0, "shrinkB": 0, "lw": 1.3, "zorder": 6}
        axes.add_patch(FancyArrowPatch(begin, end, color="black", **style))

    draw_legend(axes, colour, marked)
    for start_us in [start for start in step_starts(spans) if begin_us <= start <= end_us]:
        axes.axvline(at_ms(start_us), color="black", linewidth=0.9, linestyle=":", zorder=1)
    axes.set_xlim(at_ms(begin_us - margin_us), at_ms(end_us + margin_us))
    axes.set_xlabel(f"ms (dotted: a step begins; hatched: backward; framed, with its waits: {marked})", fontsize=12)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    kinds = Counter(f"{giver.lane} -> {waiter.lane}" for giver, waiter in arrows)
    print(f"{path}: {len(shown)} spans, {at_ms(end_us):.0f} ms; arrows: {dict(kinds)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--unit", default="blocks.6", help="the unit whose waits are drawn")
    args = parser.parse_args()
    spans = read(args.trace)
    begin_us, end_us = quickest(step_starts(spans), args.steps)
    draw(spans, begin_us, end_us, args.unit, args.picture)


if __name__ == "__main__":
    main()
