"""What does noria cost when it wins nothing?

A 12-block GPT of width 512 trains on the CPU, once as plain PyTorch and once wrapped with all units resident: hooks,
gradients caught and drained, updates, and the fetches after them are all there, and nothing is saved. The two take
turns step by step in one process. Aim: a ratio of at most 1.03.

The second table is what wrapping adds to one visit (one use of a unit in one pass), from a model of many tiny blocks:
in forward it is entered and left, in backward announced, and where blocks are trainable their gradients are caught,
drained and handed over. Aim: less than 25 us a visit.

The third table is a model that stays on the device (resident="all") beside plain PyTorch with torch's fused AdamW, in
pairs of steps whose order alternates. Its interval is of the median of the pairs' ratios, by drawing pairs anew. Aim:
at most 1.005, and an interval within 0.003 of that median.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import random
import sys
from statistics import median
from typing import Any

import _common
import noria
import torch
from noria.wrapped import wrapped_by
from torch import nn

from examples.gpt import GPT, GPTConfig


class Run:
    """One model with its own loop."""

    def __init__(self, model: nn.Module, wrapped: bool, kernel: str = "torch") -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.wrapped = None
        if wrapped:
            noria.wrap(self.model, self.optimizer, device="cpu", device_memory=1.0, resident="none", kernel=kernel)
            self.wrapped = wrapped_by(model)

    def step(self, tokens: torch.Tensor) -> float:
        _, loss = self.model(tokens, tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.wrapped is not None:
            self.wrapped.context.engine.idle()  # what its threads still do is this step's, not the next run's
        return loss.item()


def whole_steps(args: Any) -> tuple[dict[str, list[float]], dict[str, Any]]:
    torch.manual_seed(0)
    blocks = 3 if args.quick else 12
    plain = GPT(GPTConfig(num_layers=blocks, num_heads=8, width=512))
    runs = {
        "plain": Run(copy.deepcopy(plain), wrapped=False),
        "torch": Run(copy.deepcopy(plain), wrapped=True),
        "fused": Run(plain, wrapped=True, kernel="fused"),
    }
    batches = [torch.randint(0, 4096, (args.batch, args.length)) for _ in range(args.steps + 3)]
    samples: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number, tokens in enumerate(batches):
        first = number % len(names)
        for name in names[first:] + names[:first]:  # none always follows the same one
            taken = _common.seconds(lambda name=name, tokens=tokens: losses[name].append(runs[name].step(tokens)))
            if number >= 3:  # the passes are known by then
                samples[name].append(taken)
    same = losses["torch"] == losses["plain"]
    report = noria.report(runs["torch"].model)
    summary = {
        "step_s": {name: _common.spread(values) for name, values in samples.items()},
        "ratio_torch": _common.paired_ratio(samples["torch"], samples["plain"]),
        "ratio_fused": _common.paired_ratio(samples["fused"], samples["plain"]),
        "same_losses_to_the_bit": same,
        "fetches_per_step": sum(each.fetches for each in report.passes),
        "fetches_planned": sum(each.planned_fetches or 0 for each in report.passes),
        "units": report.num_units,
        "report": report.to_dict(),
    }
    return samples, summary


class Blocks(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def hooks(num_blocks: int, rounds: int, frozen: bool) -> dict[str, list[float]]:
    """Microseconds per visit of the plain and of the wrapped model, forward and backward, round by round."""
    plain = Blocks(num_blocks)
    plain.requires_grad_(not frozen)
    wrapped = noria.wrap(copy.deepcopy(plain), device="cpu", device_memory=1.0, resident="none")
    samples: dict[str, list[float]] = {}
    for number in range(rounds + 5):
        for name, model in (("plain", plain), ("wrapped", wrapped)):
            x = torch.zeros(1, 8, requires_grad=True)
            outputs: list[torch.Tensor] = []
            forward = _common.seconds(lambda model=model, x=x, outputs=outputs: outputs.append(model(x)))
            loss = outputs[0].sum()
            backward = _common.seconds(loss.backward)
            for parameter in model.parameters():
                parameter.grad = None
            if number >= 5:
                samples.setdefault(f"{name} forward", []).append(1e6 * forward / num_blocks)
                samples.setdefault(f"{name} backward", []).append(1e6 * backward / num_blocks)
    return samples


PARTS = ["forward", "backward", "step", "whole"]


def stays(args: Any) -> tuple[dict[str, list[list[float]]], dict[str, Any]]:
    """Seconds of each part of a step, by run. On a GPU, if there is one: then parts are times of the host alone."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    plain = GPT(GPTConfig(num_layers=3 if args.quick else 12, num_heads=8, width=512))
    runs = {"plain": copy.deepcopy(plain).to(device), "stays": plain}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=3e-4, fused=name == "plain") for name, model in runs.items()
    }
    noria.wrap(runs["stays"], optimizers["stays"], device=device, device_memory="4GiB", kernel="fused", resident="all")
    seconds = _common.seconds
    samples: dict[str, list[list[float]]] = {name: [] for name in runs}
    for number in range(args.pairs + 3):
        tokens = torch.randint(0, 4096, (args.batch, args.length)).to(device)
        for name in list(runs) if number % 2 else reversed(runs):
            taken: list[float] = []
            loss: list[torch.Tensor] = []
            taken.append(seconds(lambda name=name, loss=loss, at=tokens: loss.append(runs[name](at, at)[1])))
            taken.append(seconds(loss[0].backward))
            taken.append(seconds(lambda name=name: (optimizers[name].step(), optimizers[name].zero_grad())))
            taken.append(sum(taken) + seconds(finish))
            if number >= 3:
                samples[name].append(taken)
    report = noria.report(runs["stays"])
    ratios = [
        [a[part] / b[part] for a, b in zip(samples["stays"], samples["plain"], strict=True)]
        for part in range(len(PARTS))
    ]
    return samples, {
        "ratios": {name: interval(each) for name, each in zip(PARTS, ratios, strict=True)},
        "at_rest": report.at_rest,
        "medians_s": {
            name: dict(zip(PARTS, map(median, zip(*each, strict=True)), strict=True)) for name, each in samples.items()
        },
    }


def interval(ratios: list[float]) -> dict[str, float]:
    """Returns the median, and an interval that holds 95 % of the medians of samples drawn from these ratios."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return {"median": median(ratios), "low": medians[100], "high": medians[-101]}


def added(samples: dict[str, list[float]], phase: str) -> float:
    return median(a - b for a, b in zip(samples[f"wrapped {phase}"], samples[f"plain {phase}"], strict=True))


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--steps", type=int, help="measured steps of each run")
    parser.add_argument("--batch", type=int, help="sequences of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--pairs", type=int, help="pairs of steps of the third table")
    parser.add_argument("--only", choices=["steps", "hooks", "stays"], help="one of the three questions")
    args = parser.parse_args()
    args.steps = args.steps or (5 if args.quick else 16)
    args.batch = args.batch or (1 if args.quick else 64 if torch.cuda.is_available() else 4)
    args.pairs = args.pairs or (5 if args.quick else 120)
    # Memory that is freed stays with the process. Else the system's part in a step depends on which model frees last.
    for threshold in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(threshold, 1 << 30)
    began = _common.hardware()
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}

    if args.only in (None, "hooks"):
        rows = []
        torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        gc.collect()
        gc.disable()
        for kind in ("frozen", "trainable"):
            measured = hooks(64, 20 if args.quick else 60, kind == "frozen")
            samples[f"hooks, {kind}"] = measured
            forward, backward = added(measured, "forward"), added(measured, "backward")
            summary[f"hooks_{kind}_us"] = {"forward": forward, "backward": backward, "visit": forward + backward}
            rows.append([f"{kind} blocks", forward, backward, forward + backward])
        gc.enable()
        torch.set_num_threads(torch_threads)
        _common.show("one visit's hooks (us), 64 blocks", ["", "forward visit", "backward visit", "both"], rows)
    if args.only in (None, "stays"):
        samples["stays"], summary["stays"] = stays(args)
        found = summary["stays"]
        rows = [
            [part, found["medians_s"]["plain"][part], found["medians_s"]["stays"][part]]
            + [f"{found['ratios'][part][key]:.4f}" for key in ("median", "low", "high")]
            for part in PARTS
        ]
        columns = ["", "plain (s)", "stays (s)", "ratio of pairs", "from", "to (95 %)"]
        _common.show("a model that stays on the device, beside plain PyTorch", columns, rows)
    if args.only in (None, "steps"):
        steps, whole = whole_steps(args)
        samples["steps"] = steps
        summary.update(whole)
        rows = [["plain PyTorch", whole["step_s"]["plain"]["median"], "", ""]]
        for kernel in ("torch", "fused"):
            ratio = whole[f"ratio_{kernel}"]
            rows.append(
                [
                    f'wrapped, kernel="{kernel}"',
                    whole["step_s"][kernel]["median"],
                    f"{ratio['of_medians']:.3f}",
                    f"{ratio['of_pairs']:.3f}",
                ]
            )
        _common.show("step (s), all units resident", ["", "median", "ratio of medians", "median of ratios"], rows)
        print(
            f"losses the same to the bit as plain PyTorch's: {whole['same_losses_to_the_bit']}; "
            f"{whole['fetches_per_step']} fetches a step, planned {whole['fetches_planned']}"
        )
    settings = {name: getattr(args, name) for name in ("steps", "batch", "length", "pairs")}
    settings["torch_threads"] = torch.get_num_threads()
    _common.Result("overhead", samples, summary, settings).write(args, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
