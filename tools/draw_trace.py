"""Draws two steps of a trace that noria wrote: a row per lane, a colour per unit, arrows for one unit's waits.

python tools/draw_trace.py build/demo/trace.json docs/wheel.png [--steps 2] [--unit blocks.6]
"""

import argparse
import itertools
from collections import Counter
from pathlib import Path

from matplotlib.patches import FancyArrowPatch
from noria.cli.picture import ROWS, colours_of, draw_bars, draw_legend, pyplot
from noria.trace_file import TracedSpan, read_trace


def step_starts(spans: list[TracedSpan]) -> list[float]:
    """Where training steps begin: at each first forward after a backward."""
    compute = sorted(
        (each for each in spans if each.lane == "compute" and each.verb in ("forward", "backward")),
        key=lambda each: each.start,
    )
    return [
        after.start
        for before, after in itertools.pairwise(compute)
        if (before.verb, after.verb) == ("backward", "forward")
    ]


def quickest(starts: list[float], num_steps: int) -> tuple[float, float]:
    """Begin and end of the quickest run of steps: the one that other programs disturbed least."""
    if len(starts) <= num_steps:
        raise SystemExit(f"the trace holds {max(len(starts) - 1, 0)} whole training steps, {num_steps} are needed")
    return min(zip(starts, starts[num_steps:], strict=False), key=lambda run: run[1] - run[0])


def draw(spans: list[TracedSpan], begin_us: float, end_us: float, marked: str, path: Path) -> None:
    margin_us = (end_us - begin_us) / 100
    shown = [s for s in spans if s.end > begin_us - margin_us and s.start < end_us + margin_us and s.lane in ROWS]
    colour = colours_of(shown)
    row = {lane: -i for i, lane in enumerate(ROWS)}

    def at_ms(time_us: float) -> float:
        return (time_us - begin_us) / 1e3

    figure, axes = pyplot().subplots(figsize=(13, 4.2))
    draw_bars(axes, shown, begin_us, end_us, colour, marked)
    arrows = [(g, s) for s in shown for g in s.givers if g in shown and marked in (g.unit, s.unit) and g.lane != s.lane]
    for giver, waiter in arrows:
        side = 0.3 if row[waiter.lane] > row[giver.lane] else -0.3
        begin, end = (at_ms(giver.end), row[giver.lane] + side), (at_ms(waiter.start), row[waiter.lane] - side)
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
    spans = read_trace(args.trace)
    begin_us, end_us = quickest(step_starts(spans), args.steps)
    draw(spans, begin_us, end_us, args.unit, args.picture)


if __name__ == "__main__":
    main()
