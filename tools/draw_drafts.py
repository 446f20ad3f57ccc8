"""Trains the paced chain of benchmarks/overlap.py without drafts and with drafts of all units. Draws a steady step of
each out of its trace, on one scale.

python tools/draw_drafts.py docs/drafts.png
"""

import argparse
import sys
import tempfile
from pathlib import Path

from draw_trace import quickest, step_starts
from noria.cli.picture import ROWS, colours_of, draw_bars, draw_legend, pyplot
from noria.trace_file import read_trace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import noria
import torch
from overlap import Chain, Run, Setting, limits_of

FORWARD_S, BACKWARD_S = 0.006, 0.009  # of one block
UPDATES = Setting("updates between F and F + B", fetch=0.5, drain=0.5, update=1.9)
ROW_TITLES = {"without drafts": 0, "drafts of all units": 1 << 40}


def traced(folder: Path, name: str, draft_memory: int, num_blocks: int, num_steps: int) -> Path:
    """The trace of a run of equal blocks that wait until their time is over."""
    torch.manual_seed(0)
    model = Chain(num_blocks, 256, FORWARD_S, BACKWARD_S)
    limits = limits_of(UPDATES, model, 1e6 * num_blocks * FORWARD_S, 1e6 * num_blocks * BACKWARD_S)
    path = folder / f"{name}.json"
    batch = torch.randn(32, 256, requires_grad=True)  # so that the first block has a whole backward too
    run = Run(model, batch, limits, window=4, draft_memory=draft_memory, trace=path)
    run.block(num_steps)
    print(noria.report(run.model))  # writes the trace as well
    noria.unwrap(run.model, run.optimizer)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figure, panels = pyplot().subplots(2, 1, figsize=(13, 7.2), sharex=True, gridspec_kw={"hspace": 0.28})
    with tempfile.TemporaryDirectory() as folder:
        for axes, (title, memory) in zip(panels, ROW_TITLES.items(), strict=True):
            spans = read_trace(traced(Path(folder), title, memory, args.blocks, args.steps))
            starts = step_starts(spans)[3:]  # the first steps are unlike the others
            begin_us, end_us = quickest(starts, 1)
            length_us = end_us - begin_us
            shown = [s for s in spans if s.end > begin_us and s.start < end_us and s.lane in ROWS]
            colour = colours_of(shown)
            draw_bars(axes, shown, begin_us, end_us, colour)
            for x in (0, length_us / 1e3):
                axes.axvline(x, color="black", linewidth=0.9, linestyle=":", zorder=1)
            axes.set_title(f"{title}: {length_us / 1e3:.0f} ms a step", loc="left", fontsize=13, pad=22)
            if axes is panels[0]:
                draw_legend(axes, colour)
                panels[0].set_xlim(-length_us / 1e5, length_us * 1.01 / 1e3)
    panels[1].set_xlabel("ms (dotted: a step begins and ends; hatched: backward; crossed: drafts)", fontsize=12)
    figure.savefig(args.picture, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
