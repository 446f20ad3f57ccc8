"""What do ranks pay to agree before each gather and each sum?

A model of many tiny blocks trains on 2 ranks over gloo, all compute and all copies next to nothing, so that a step is
what its ops cost by themselves. Two wrapped models take turns in the same processes: one with the default, where a
thread compares queued ops ahead of the collect lane, and one with find_unused_parameters=True, where the lane asks the
other ranks before each op. Both give the same bits. Shown: the time of a step, divided by its gathers and sums.
"""

from __future__ import annotations

import datetime
import sys
import time
from statistics import median
from typing import Any

import _common
import noria
import torch
import torch.distributed as dist
from noria.wrapped import wrapped_by
from torch import nn

MODES = {"same modules": False, "other modules": True}


class Chain(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Run:
    def __init__(self, is_other: bool, blocks: int, width: int, window: int) -> None:
        torch.manual_seed(0)
        self.model = Chain(blocks, width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        noria.wrap(self.model, self.optimizer, device="cpu", window=window, find_unused_parameters=is_other)
        self.x = torch.randn(2, width)
        wrapped = wrapped_by(self.model)
        assert wrapped is not None
        self.backend = wrapped.context.backend

    def block(self, steps: int) -> float:
        """Returns the time of the steps in us, divided by the ops of the collect lane."""
        dist.barrier()
        before, began = self.backend.stats("collect")["num_ops"], time.perf_counter()
        for _ in range(steps):
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        took_us = 1e6 * (time.perf_counter() - began)
        return took_us / float(self.backend.stats("collect")["num_ops"] - before)


def on_rank(rank: int, size: int, meeting: str, answers: Any, shape: dict[str, int]) -> None:
    torch.set_num_threads(1)
    patience = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=patience)
    runs = {name: Run(mode, shape["blocks"], shape["width"], shape["window"]) for name, mode in MODES.items()}
    for run in runs.values():
        run.block(shape["steps"])
    found: dict[str, list[float]] = {name: [] for name in MODES}
    for number in range(shape["rounds"]):
        for name in list(MODES) if number % 2 else list(reversed(MODES)):
            found[name].append(runs[name].block(shape["steps"]))
    weights = [list(run.model.state_dict().values()) for run in runs.values()]
    same = all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    answers.put((rank, {"turns": found, "same_bits": same}))
    dist.barrier()


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--rounds", type=int, help="turns of both")
    parser.add_argument("--steps", type=int, default=10, help="in each turn")
    args = parser.parse_args()
    args.rounds = args.rounds or (3 if args.quick else 40)
    began = _common.hardware()
    shape = {name: getattr(args, name) for name in ("blocks", "width", "window", "rounds", "steps")}
    answers = _common.on_ranks(2, on_rank, shape)
    turns, same = answers[0]["turns"], all(each["same_bits"] for each in answers)
    ratios = [a / b for a, b in zip(*turns.values(), strict=True)]
    summary: dict[str, Any] = {name: median(times) for name, times in turns.items()}
    summary |= {"ratio": median(ratios), "same_bits": same}
    row = [*(f"{summary[name]:.0f}" for name in MODES), f"{summary['ratio']:.3f}"]
    _common.show("us of a step for each gather or sum, 2 ranks", [*MODES, "ratio"], [row])
    print(f"same bits: {'yes' if same else 'NO'}")
    _common.Result("agreement", {"turns": turns}, summary, shape).write(args, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
