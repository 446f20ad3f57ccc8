"""What does it take to give the device's memory away for a while, and to take it again?

A GPT trains. Between steps, in turns: nothing, or `noria.asleep`.

- away, back: seconds to begin the block, and to end it
- step, step after: a step that follows a step, and the first one behind the block, which fetches all units again
- given, held: bytes that the driver has free inside of the block and had not before, and those that noria had there
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded: its threads give way to noria's

import _common
import noria
import torch
from noria.wrapped import wrapped_by

from examples.gpt import GPT, GPTConfig


def free_bytes(device: str) -> int:
    """Of the device; of the CPU nothing, where the process keeps what it frees."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    torch.manual_seed(0)
    config = GPTConfig(args.vocabulary, args.context, args.layers, args.width // 64, args.width, tied=True)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    dtype = torch.bfloat16 if args.device == "cuda" else None
    noria.wrap(model, optimizer, device=args.device, window=args.window, dtype=dtype, kernel="fused")
    context = wrapped_by(model).context

    def idle() -> None:
        if args.device == "cuda":
            torch.cuda.synchronize()
        context.engine.idle()

    def step_s() -> float:
        began = time.perf_counter()
        tokens = torch.randint(args.vocabulary, (args.tokens // args.context, args.context)).to(args.device)
        model(tokens, tokens)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        idle()
        return time.perf_counter() - began

    for _ in range(args.warmup):
        step_s()
    found: dict[str, list[float]] = {name: [] for name in ("step", "away", "back", "step after", "given", "held")}
    for _ in range(args.rounds):
        found["step"].append(step_s())
        found["held"].append(context.backend.allocated)
        free, began = free_bytes(args.device), time.perf_counter()
        with noria.asleep(model):
            found["away"].append(time.perf_counter() - began)
            found["given"].append(free_bytes(args.device) - free if args.device == "cuda" else found["held"][-1])
            began = time.perf_counter()
        found["back"].append(time.perf_counter() - began)
        found["step after"].append(step_s())
    noria.unwrap(model, optimizer)
    return found


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--window", type=int, default=6, help="units")
    parser.add_argument("--warmup", type=int, default=3, help="steps")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    is_small = args.quick or args.device == "cpu"
    args.layers, args.width, args.tokens = (6, 128, 512) if is_small else (24, 1024, 16384)
    args.context = min(1024, args.tokens // 2)
    args.vocabulary = 1024 if is_small else 50304
    began = _common.hardware()
    samples = measure(args)
    found: dict[str, Any] = {name: median(values) for name, values in samples.items()}
    times = ("step", "away", "back", "step after")
    title = f"{args.layers} blocks of width {args.width}, {args.tokens} tokens, {args.device}"
    _common.show(title, [f"{each}, ms" for each in times], [[f"{1e3 * found[each]:.2f}" for each in times]])
    settings = {name: getattr(args, name) for name in ("device", "tokens", "layers", "width", "window", "rounds")}
    _common.Result("asleep", samples, found, settings).write(args, began)
    words = ", ".join(f"{each} {1e3 * found[each]:.1f} ms" for each in times)
    print(f"verdict: {words}, {found['given'] / 2**30:.2f} of {found['held'] / 2**30:.2f} GiB given")
    return 0


if __name__ == "__main__":
    sys.exit(main())
