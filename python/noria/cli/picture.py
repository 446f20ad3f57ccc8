"""Draws steps as pictures: a row for each lane, a colour for each unit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noria._errors import usage_error
from noria.trace_file import TracedSpan

if TYPE_CHECKING:
    from noria.planning.step_simulation import PlannedStep

__all__ = ["ROWS", "check_picture", "colours_of", "draw_bars", "draw_legend", "draw_wheel", "pyplot", "spans_of"]

ROWS = ["fetch", "compute", "drain", "update"]
"""The way of a unit, from top to bottom."""
_SMALL = "#b0b0b0"  # what is no block
_HATCHES = {"backward": "///", "draft": "xxx"}
_MOST_NAMED = 24  # blocks that a legend has room for


def pyplot() -> Any:
    """Returns matplotlib's module, which needs no screen. Raises UsageError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise usage_error("matplotlib, which draws", "no such package", "pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as module

    return module


def colours_of(spans: Sequence[TracedSpan]) -> dict[str, str]:
    """Returns a colour by block, in the order of the forward pass."""
    from matplotlib.colors import to_hex

    blocks = list(dict.fromkeys(s.unit for s in spans if s.verb == "forward" and s.unit[-1:].isdigit()))
    colours = pyplot().get_cmap("turbo")
    return {unit: to_hex(colours(0.07 + 0.86 * i / max(len(blocks) - 1, 1))) for i, unit in enumerate(blocks)}


def draw_bars(
    axes: Any,
    shown: Sequence[TracedSpan],
    begin_us: float,
    end_us: float,
    colour: dict[str, str],
    marked: str = "",
) -> None:
    """Draws a row for each lane; time from `begin_us` on, in ms. `marked`: a unit that gets a frame."""
    least_ms = (end_us - begin_us) / 1e3 / 900
    for span in shown:
        left, width = (span.start - begin_us) / 1e3, max((span.end - span.start) / 1e3, least_ms)
        bar = {"y": -ROWS.index(span.lane), "width": width, "left": left, "height": 0.6}
        axes.barh(**bar, color=colour.get(span.unit, _SMALL), zorder=2)
        if hatch := _HATCHES.get(span.verb):
            axes.barh(**bar, fill=False, hatch=hatch, ec="white", lw=0, zorder=3)
        framed = span.unit == marked
        frame = {"ec": "black", "lw": 1.6, "zorder": 4} if framed else {"ec": "white", "lw": 0.5, "zorder": 3}
        axes.barh(**bar, fill=False, **frame)
    axes.set_yticks([-i for i in range(len(ROWS))], ROWS, fontsize=14)
    axes.set_ylim(-len(ROWS) + 0.5, 0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw_legend(axes: Any, colour: dict[str, str], marked: str = "") -> None:
    """Names the blocks above the axes; of many, some."""
    named = range(0, len(colour), -(-len(colour) // _MOST_NAMED) or 1)
    for i, unit in enumerate(colour):
        if i not in named:
            continue
        box = {"fc": colour[unit], "ec": "black" if unit == marked else "none", "pad": 3}
        where = (0.01 + 0.98 * (i + 0.5) / len(colour), 1.02)
        label = axes.text(*where, unit.rpartition(".")[2], transform=axes.transAxes, ha="center", bbox=box)
        label.set_color("white" if i in (0, len(colour) - 1) else "black")


def spans_of(step: PlannedStep) -> list[TracedSpan]:
    """Returns the simulated ops of all steps as a trace has them."""
    names = [unit.name for unit in step.planned.units]
    return [
        TracedSpan(
            span.op,
            span.lane,
            f"{span.verb} {names[span.unit]}" if span.unit >= 0 else span.verb,
            span.start_us,
            span.end_us,
            span.bytes,
        )
        for span in step.all_spans
    ]


def check_picture(path: Path) -> None:
    """Raises UsageError if no picture can have this name."""
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise usage_error("a picture's name that ends in .svg, .png or .pdf", f'"{path}"', "name it so")


def draw_wheel(path: Path, spans: Sequence[TracedSpan], begin_us: float, end_us: float, title: str) -> None:
    """Draws one step to an SVG or PNG file. Raises UsageError if it cannot be written."""
    check_picture(path)
    module = pyplot()
    shown = [span for span in spans if span.end > begin_us and span.start < end_us and span.lane in ROWS]
    colour = colours_of(spans)
    figure, axes = module.subplots(figsize=(13, 4.2))
    draw_bars(axes, shown, begin_us, end_us, colour)
    draw_legend(axes, colour)
    for at in (0.0, (end_us - begin_us) / 1e3):
        axes.axvline(at, color="black", linewidth=0.9, linestyle=":", zorder=1)
    axes.set_xlim(-(end_us - begin_us) / 1e5, (end_us - begin_us) * 1.01 / 1e3)
    axes.set_title(title, loc="left", fontsize=13, pad=22)
    axes.set_xlabel("ms (dotted: the step begins and ends; hatched: backward; crossed: drafts)", fontsize=12)
    try:
        figure.savefig(path, dpi=110, bbox_inches="tight")
    except OSError as error:
        raise usage_error("a picture that can be written", f"{path}: {error.strerror}", "choose another path") from None
    finally:
        module.close(figure)
