"""What do several micro-batches in a step cost, and clipping or scaling by torch's own functions?

From the second micro-batch on noria adds to gradients that lie on the host; torch's clip and its GradScaler read and
write them there, which on a device is over the link. One GPT takes the same tokens a step in turns: in one micro-batch
and in several; then with torch's clip, torch's GradScaler, noria's `optimizer.clip_grad_norm_`; and a second one has
`max_grad_norm=`. A turn is a few steps until all is done. For comparison the same forwards and backwards on the device
alone, without any update: micro-batches cost there too, for they are smaller. In bfloat16 on a device, where torch has
no scaler for it.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded: its threads give way to noria's

import _common
import noria
import torch
from noria.wrapped import wrapped_by
from torch import nn

from examples.gpt import GPT, GPTConfig

CLIP = 1.0
ONE, SEVERAL, TORCHS_CLIP = "one micro-batch", "several", "torch's clip"
RESIDENT_ONE, RESIDENT_SEVERAL = "resident, no update: one", "resident, no update: several"
AGAINST = {SEVERAL: ONE, RESIDENT_SEVERAL: RESIDENT_ONE}  # all others: ONE


class Run:
    """A model, and its loop in several ways."""

    def __init__(self, model: nn.Module, args: argparse.Namespace, **policy: Any) -> None:
        self.args = args
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        options = {"device": args.device, "window": args.window, "dtype": args.dtype, "kernel": "fused"}
        noria.wrap(model, self.optimizer, **options, **policy)
        self.scaler = torch.amp.GradScaler(args.device, init_scale=1024.0)

    def backward(self, tokens: torch.Tensor, count: int, scaled: bool = False) -> None:
        for part in tokens.chunk(count):
            loss = self.model(part, part)[1] / count
            (self.scaler.scale(loss) if scaled else loss).backward()

    def finish(self) -> None:
        self.optimizer.zero_grad()
        wrapped_by(self.model).context.engine.idle()

    def plain(self, tokens: torch.Tensor, count: int = 1) -> None:
        self.backward(tokens, count)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clipped_by_torch(self, tokens: torch.Tensor) -> None:
        self.backward(tokens, 1)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clipped_by_noria(self, tokens: torch.Tensor) -> None:
        self.backward(tokens, 1)
        self.optimizer.clip_grad_norm_(CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def scaled(self, tokens: torch.Tensor) -> None:
        self.backward(tokens, 1, scaled=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def resident_ways(model: nn.Module, count: int) -> dict[str, Callable[[torch.Tensor], None]]:
    def run(tokens: torch.Tensor, count: int) -> None:
        for part in tokens.chunk(count):
            (model(part, part)[1] / count).backward()
        model.zero_grad()

    return {RESIDENT_ONE: lambda tokens: run(tokens, 1), RESIDENT_SEVERAL: lambda tokens: run(tokens, count)}


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="of a step; default: 16384 on a device")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help="a multiple of 64")
    parser.add_argument("--window", type=int, default=4, help="units")
    parser.add_argument("--turns", type=int, help="of each way")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    args = parser.parse_args()
    is_small = args.quick or args.device == "cpu"
    args.layers = args.layers or (4 if is_small else 24)
    args.width = args.width or (128 if is_small else 1024)
    args.tokens = args.tokens or (512 if is_small else 16384)
    args.turns = args.turns or (3 if args.quick else 8)
    args.dtype = torch.bfloat16 if args.device == "cuda" else None
    context = min(1024, args.tokens // args.micro_batches)
    began = _common.hardware()
    torch.manual_seed(0)
    vocabulary = 1024 if is_small else 50304
    config = GPTConfig(vocabulary, context, args.layers, args.width // 64, args.width, tied=True)
    model = GPT(config)
    twin = copy.deepcopy(model).to(args.device, args.dtype)
    other = copy.deepcopy(model)
    num_parameters = sum(each.numel() for each in model.parameters())
    run, limited = Run(model, args), Run(other, args, max_grad_norm=CLIP)
    several = f"{args.micro_batches} micro-batches"
    # torch's scaler has no kernel for bfloat16 on CUDA devices
    scaled = {"torch's GradScaler": run.scaled} if args.dtype is None else {}
    ways: dict[str, Callable[[torch.Tensor], None]] = {
        ONE: run.plain,
        SEVERAL: lambda tokens: run.plain(tokens, args.micro_batches),
        TORCHS_CLIP: run.clipped_by_torch,
        **scaled,
        "optimizer.clip_grad_norm_": run.clipped_by_noria,
        "max_grad_norm": limited.plain,
        **resident_ways(twin, args.micro_batches),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(args.turns + 1):  # the first one is not counted: passes are learnt there
        first = turn % len(names)
        tokens = torch.randint(vocabulary, (args.tokens // context, context)).to(args.device)
        for name in names[first:] + names[:first]:

            def work(name: str = name, tokens: torch.Tensor = tokens) -> None:
                for _ in range(args.steps):
                    ways[name](tokens)
                for each in (run, limited):
                    each.finish()
                if args.device == "cuda":
                    torch.cuda.synchronize()

            taken = _common.seconds(work) / args.steps
            if turn:
                times[name].append(taken)
    for each in (run, limited):
        noria.unwrap(each.model, each.optimizer)

    summary: dict[str, Any] = {}
    rows = []
    for name, values in times.items():
        ratio = _common.paired_ratio(values, times[AGAINST.get(name, ONE)])
        summary[name] = {"step_s": _common.spread(values), "ratio": ratio}
        shown = name.replace("several", several)
        rows.append([shown, f"{1e3 * median(values):.1f}", f"{ratio['of_medians']:.3f}", f"{ratio['of_pairs']:.3f}"])
    more = median(
        (a - b) - (c - d)
        for a, b, c, d in zip(*(times[each] for each in (SEVERAL, ONE, RESIDENT_SEVERAL, RESIDENT_ONE)), strict=True)
    )
    further = args.micro_batches - 1
    summary["a further micro-batch"] = {
        "seconds": more / further,
        "gradient_bytes": sum(each.nbytes for each in twin.parameters()),
    }
    columns = ["", "step, ms", "ratio of medians", "median of ratios"]
    _common.show(f"{num_parameters / 1e6:.0f} M parameters, {args.tokens} tokens a step, {args.device}", columns, rows)
    settings = {
        name: getattr(args, name)
        for name in ("device", "tokens", "micro_batches", "layers", "width", "window", "steps")
    }
    _common.Result("accumulation", times, summary, settings).write(args, began)
    of_pairs = {name: each["ratio"]["of_pairs"] for name, each in summary.items() if "ratio" in each}
    print(
        f"verdict: {several} {of_pairs[SEVERAL]:.2f} x one ({of_pairs[RESIDENT_SEVERAL]:.2f} x without noria), torch's "
        f"clip {of_pairs[TORCHS_CLIP]:.2f} x none, max_grad_norm {of_pairs['max_grad_norm']:.2f} x"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
