"""What happens in one large step: how far is the host ahead, in which order does the pool update, where does the device
stand still?

A GPT trains for a few steps, with `update="auto"` (drafts where there is memory) and with `update="backward"`. A third
time, "looks", each block's forward takes the addresses of its weights, as compiled code does: noria then sums each unit
twice a visit, to see whether they were written. A trace of each lies beside the result (Perfetto, `noria trace`). Marks
on the stream that trains, at each block's forward and backward, say when the device came to a block and when the host
did.

- ahead: at most so many blocks that the host has issued and the device has not come to, in forward and in backward
- first block: from the end of the step before to the end of the first block's forward, on the device
- tail: from the last gradient's arrival to the end of the last update or draft
- blocked: until `step()` the pool stood still although a gradient had arrived whose update or draft came later
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded: its threads give way to noria's

import _common
import noria
import torch
from noria.trace_file import TracedSpan, read_trace
from noria.wrapped import wrapped_by
from torch import nn

from examples.gpt import GPT, GPTConfig

MODES: dict[str, dict[str, Any]] = {
    "auto": {"update": "auto"},
    "backward": {"update": "backward"},
    "looks": {"update": "auto"},
}
END, FORWARD, BACKWARD = "end", "forward", "backward"


class Marks:
    """When host and device came to each block. Without a device both are the same."""

    def __init__(self, blocks: nn.ModuleList, device: str) -> None:
        self.is_cuda = device == "cuda"
        self.taken: list[tuple[str, int, float, Any]] = []
        self.is_on = False
        for number, block in enumerate(blocks):
            block.register_forward_hook(self._hook(number))
        if self.is_cuda:
            torch.cuda.synchronize()
            self.origin = torch.cuda.Event(enable_timing=True)
            self.origin.record()
            torch.cuda.synchronize()
        self.began = time.perf_counter()

    def _hook(self, number: int) -> Any:
        def after(block: nn.Module, given: Any, output: torch.Tensor) -> None:
            self.mark(FORWARD, number)
            if output.requires_grad:
                output.register_hook(lambda gradient: self.mark(BACKWARD, number))

        return after

    def mark(self, what: str, number: int = 0) -> None:
        if not self.is_on:
            return
        event = None
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.taken.append((what, number, time.perf_counter() - self.began, event))

    def times(self) -> list[tuple[str, int, float, float]]:
        """What, which block, and seconds on the host and on the device; in the order of issue."""
        if self.is_cuda:
            torch.cuda.synchronize()
        return [
            (what, number, host, host if event is None else self.origin.elapsed_time(event) / 1e3)
            for what, number, host, event in self.taken
        ]


def ahead(times: list[tuple[str, int, float, float]], what: str) -> int:
    """At most, in blocks, of one kind."""
    most = 0
    for at, (kind, _, _, reached) in enumerate(times):
        if kind == what:
            most = max(most, sum(each[0] == what and each[2] <= reached for each in times[at + 1 :]))
    return most


def first_block_s(times: list[tuple[str, int, float, float]]) -> float:
    return median(later[3] - earlier[3] for earlier, later in itertools.pairwise(times) if earlier[0] == END)


def unit_of(span: TracedSpan) -> str:
    return span.name.split(" ", 1)[1]


def pool_of(spans: list[TracedSpan]) -> dict[str, float]:
    """Of the last step in the trace, in microseconds."""
    landed = {unit_of(span): span.end for span in sorted(spans, key=lambda span: span.end) if span.lane == "drain"}
    first, last = min(landed.values()), max(landed.values())
    step = min((span.start for span in spans if span.verb == "user" and span.start > last), default=last)
    work = [span for span in spans if span.lane == "update" and span.verb != "sum" and span.end > first]
    work.sort(key=lambda span: span.start)
    early = [span for span in work if span.start < step]
    blocked = 0.0
    for nth in range(1, len(early)):
        begin, end = early[nth - 1].end, early[nth].start
        arrived = min((landed[unit_of(span)] for span in early[nth:] if unit_of(span) in landed), default=end)
        blocked += max(0.0, end - max(begin, arrived))
    return {"tail_us": max(0.0, max(span.end for span in work) - last), "blocked_us": blocked, "early": len(early)}


def take_addresses(block: nn.Module, given: Any) -> None:
    for parameter in block.parameters():
        parameter.data_ptr()


def measure(mode: str, args: argparse.Namespace, trace: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    config = GPTConfig(args.vocabulary, args.context, args.layers, args.width // 64, args.width, tied=True)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    dtype = torch.bfloat16 if args.device == "cuda" else None
    policy = {"device": args.device, "window": args.window, "dtype": dtype, "kernel": "fused", "trace": trace}
    if args.device == "cpu" and mode != "backward":
        policy["draft_memory"] = "1GiB"  # auto there: none
    noria.wrap(model, optimizer, **policy, **MODES[mode])
    engine = wrapped_by(model).context.engine
    marks = Marks(model.blocks, args.device)
    if mode == "looks":
        for block in model.blocks:
            block.register_forward_pre_hook(take_addresses)

    def step() -> None:
        tokens = torch.randint(args.vocabulary, (args.tokens // args.context, args.context)).to(args.device)
        model(tokens, tokens)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        marks.mark(END)

    for number in range(args.warmup + args.steps):
        if number == args.warmup:
            engine.idle()
            marks.is_on = True
            began = time.perf_counter()
        step()
    if args.device == "cuda":
        torch.cuda.synchronize()
    engine.idle()
    seconds = (time.perf_counter() - began) / args.steps
    times = marks.times()
    report = noria.report(model)  # writes the trace
    found = {
        "step_s": seconds,
        "ahead": {what: ahead(times, what) for what in (FORWARD, BACKWARD)},
        "first_block_s": first_block_s(times),
        "pool": pool_of(read_trace(trace)),
        "report": report.to_dict(),
        "marks": times,
    }
    marks.is_on = False
    print(report)
    noria.unwrap(model, optimizer)
    return found


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tokens", type=int, help="of a step, in one batch; default: 16384 on a device")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help="a multiple of 64")
    parser.add_argument("--window", type=int, default=6, help="units")
    parser.add_argument("--warmup", type=int, default=4, help="steps")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--traces", type=Path, help="folder for the traces; default: that of --out, or build/big_step")
    args = parser.parse_args()
    is_small = args.quick or args.device == "cpu"
    args.layers = args.layers or (6 if is_small else 24)
    args.width = args.width or (128 if is_small else 1024)
    args.tokens = args.tokens or (512 if is_small else 16384)
    args.context = min(1024, args.tokens // 2)
    args.vocabulary = 1024 if is_small else 50304
    folder = args.traces or (args.out.parent if args.out else Path("build/big_step"))
    folder.mkdir(parents=True, exist_ok=True)
    began = _common.hardware()
    found = {mode: measure(mode, args, folder / f"big_step_{mode}.trace.json") for mode in args.modes}
    rows = [
        [
            mode,
            f"{1e3 * each['step_s']:.1f}",
            f"{each['ahead'][FORWARD]}, {each['ahead'][BACKWARD]}",
            f"{1e3 * each['first_block_s']:.2f}",
            *(f"{each['pool'].get(key, 0) / 1e3:.1f}" for key in ("tail_us", "blocked_us")),
        ]
        for mode, each in found.items()
    ]
    columns = ["mode", "step, ms", "ahead F, B", "first block, ms", "tail, ms", "blocked, ms"]
    _common.show(f"{args.layers} blocks of width {args.width}, {args.tokens} tokens, {args.device}", columns, rows)
    samples = {mode: {"marks": each.pop("marks")} for mode, each in found.items()}
    settings = {name: getattr(args, name) for name in ("device", "tokens", "layers", "width", "window", "steps")}
    _common.Result("big_step", samples, found, settings).write(args, began)
    words = [
        f"{mode}: step {1e3 * each['step_s']:.0f} ms, {max(each['ahead'].values())} blocks ahead, "
        f"pool blocked {each['pool'].get('blocked_us', 0) / 1e3:.1f} ms"
        for mode, each in found.items()
    ]
    print("verdict: " + "; ".join(words))
    return 0


if __name__ == "__main__":
    sys.exit(main())
