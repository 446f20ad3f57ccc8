"""What do ranks that share a model save each other?

The chain of overlap.py trains on 1, 2 and 4 ranks of this machine, over gloo. Each rank has lanes of its own, as slow
for all numbers of ranks: over a whole model, fetches of the forward take 2.5 times its compute F, drains 2 times the
compute of backward B, updates 2.5 F. With N ranks each fetches, drains and updates its N-th part, so the bound of a
step falls until compute is the busiest, and no lower. With the times that the limited lanes must take for what this
rank moves:

    bound          max(F, U, f_F) + max(B, d, f_B)
    with collect   max(F, U, f_F, c_F) + max(B, d, f_B, c_B)

What ranks send each other, c, goes through this machine's memory at its own pace, on the cores that also compute: the
first bound leaves it out, the second counts it at the rate that the collect lane was measured at, as noria.report does.
Compute is paced: layers are small, and then wait until their time is over. So the ranks need not have a core each; but
what they send each other, and agree about before each op, does want one. F and B are of a resident model in the same
processes, before they share anything.

Bytes of a step are those of this rank, as the lanes counted them, beside theory: of fetch and drain 1/N of what one
rank alone moves; of collect, what the rank gets from the others, (N - 1)/N of what one rank alone fetches and drains.
All ranks see the same batch, so losses have the same bits for every N that is a power of two: the N-th part of a
gradient, N times.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
from statistics import median
from typing import Any

import _common
import noria
import torch
import torch.distributed as dist
from noria import _C
from noria.wrapped import wrapped_by
from overlap import LATENCY_US, Chain, Limits, Run, Setting, as_dict, limits_of, transfer_us

SETTING = Setting("bound by its lanes on one rank", fetch=2.5, drain=2.0, update=2.5)
FORWARD_S, BACKWARD_S = 0.003, 0.0045  # of a block
LANES = ("fetch", "drain", "collect")
BOUNDS = ("bound_us", "bound_with_collect_us")


SHARES = ("home", "fetch", "drain", "collect")  # shares in the bytes of a rank that trains alone


@dataclasses.dataclass(frozen=True)
class Shape:
    blocks: int
    width: int
    tokens: int
    window: int
    steps: int
    warmup: int


def on_rank(rank: int, size: int, meeting: str, answers: Any, limits: Limits, shape: Shape) -> None:
    """Puts (rank, what it measured) among the answers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Chain(shape.blocks, shape.width, FORWARD_S, BACKWARD_S)
    batch = torch.randn(shape.tokens, shape.width)
    resident = Run(model, batch, {}, device_memory=1.0)  # before there is a process group: nothing is shared
    resident.block(shape.warmup)
    resident.forget()
    resident.block(shape.steps)
    if size > 1:
        patience = datetime.timedelta(minutes=2)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=patience)
    run = Run(model, batch, limits, window=shape.window)
    run.block(shape.warmup)
    run.forget()
    wrapped = wrapped_by(run.model)
    assert wrapped is not None
    before = {lane: wrapped.context.backend.stats(lane) for lane in LANES}
    run.block(shape.steps)
    after = {lane: wrapped.context.backend.stats(lane) for lane in LANES}
    steps = shape.steps + 1  # the one that fills the lanes too
    lanes = {
        lane: {name: (after[lane][name] - before[lane][name]) / steps for name in ("bytes", "num_ops", "busy_us")}
        for lane in LANES
    }
    update_bytes = 28 * sum(parameter.numel() for parameter in run.model.parameters()) / size
    fetches = {each.phase: each.fetches for each in noria.report(run.model).passes}
    times = _C.StepTimes(
        forward_us=resident.per_step("forward_us"),
        backward_us=resident.per_step("backward_us"),
        update_us=transfer_us(update_bytes, shape.blocks, limits["update"][0]),
        forward_fetch_us=transfer_us(run.per_step("forward_fetched"), fetches["forward"], limits["fetch"][0]),
        backward_fetch_us=transfer_us(run.per_step("backward_fetched"), fetches["backward"], limits["fetch"][0]),
        drain_us=transfer_us(run.per_step("drained"), shape.blocks, limits["drain"][0]),
    )
    collect_us = {name: run.per_step(name) for name in ("forward_collect_us", "backward_collect_us")}
    with_collect = _C.StepTimes(**as_dict(times), **collect_us)
    home = wrapped.context.ledger.on("host")
    answers.put(
        (
            rank,
            {
                "steps_s": run.times,
                "losses": run.losses,
                "lanes": lanes,
                "times": as_dict(times) | collect_us,
                "bound_us": _C.deferred_bound_us(times),
                "bound_with_collect_us": _C.deferred_bound_us(with_collect),
                "home_bytes": home,
            },
        )
    )
    if size > 1:
        dist.barrier()  # no rank leaves while another one still moves


def summarised(turns: list[list[dict[str, Any]]], alone: dict[str, Any] | None) -> dict[str, Any]:
    """Of one number of ranks, over its turns; `alone`: of one rank."""
    everybody = [found for turn in turns for found in turn]
    step_us = 1e6 * median(time for found in everybody for time in found["steps_s"])
    bound_us, with_collect_us = (median(found[name] for found in everybody) for name in BOUNDS)
    lanes = {
        lane: {name: max(found["lanes"][lane][name] for found in everybody) for name in ("bytes", "num_ops", "busy_us")}
        for lane in LANES
    }
    home_bytes = max(found["home_bytes"] for found in everybody)
    result = {
        "step_us": step_us,
        "bound_us": bound_us,
        "bound_with_collect_us": with_collect_us,
        "ratio": step_us / bound_us,
        "ratio_with_collect": step_us / with_collect_us,
        "times": {name: median(found["times"][name] for found in everybody) for name in everybody[0]["times"]},
        "lanes": lanes,
        "home_bytes": home_bytes,
    }
    if alone is not None:
        result["share_of_one_rank"] = {
            "home": home_bytes / alone["home_bytes"],
            **{lane: lanes[lane]["bytes"] / alone["lanes"][lane]["bytes"] for lane in ("fetch", "drain")},
            "collect": lanes["collect"]["bytes"] / sum(alone["lanes"][lane]["bytes"] for lane in ("fetch", "drain")),
        }
    return result


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks; one alone is first")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--rounds", type=int, help="turns of all numbers of ranks, each in new processes")
    parser.add_argument("--steps", type=int, help="measured steps in each turn")
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args()
    args.blocks = args.blocks or (8 if args.quick else 32)
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.steps = args.steps or (3 if args.quick else 10)
    sizes = sorted({1, *args.ranks})
    began = _common.hardware()
    shape = Shape(args.blocks, args.width, args.tokens, args.window, args.steps, args.warmup)
    model = Chain(args.blocks, args.width)
    limits = limits_of(SETTING, model, 1e6 * FORWARD_S * args.blocks, 1e6 * BACKWARD_S * args.blocks)

    turns: dict[int, list[list[dict[str, Any]]]] = {size: [] for size in sizes}
    for _ in range(args.rounds):
        for size in sizes:
            turns[size].append(_common.on_ranks(size, on_rank, limits, shape))
    summary: dict[str, Any] = {}
    for size in sizes:
        summary[str(size)] = summarised(turns[size], summary.get("1"))
    losses = {tuple(found["losses"]) for each in turns.values() for turn in each for found in turn}

    times, moved = [], []
    for size in sizes:
        found = summary[str(size)]
        lanes, share = found["lanes"], found.get("share_of_one_rank", dict.fromkeys(SHARES, 1.0) | {"collect": 0.0})
        times.append(
            [
                str(size),
                *(f"{found[name] / 1e3:.1f}" for name in ("step_us", *BOUNDS)),
                *(f"{found[name]:.3f}" for name in ("ratio", "ratio_with_collect")),
                f"{lanes['collect']['busy_us'] / 1e3:.1f}",
            ]
        )
        moved.append(
            [
                str(size),
                *(f"{lanes[lane]['bytes'] / 2**20:.2f}" for lane in LANES),
                *(f"{share[name]:.3f}" for name in SHARES),
                f"{1 / size:.3f}",
                f"{1 - 1 / size:.3f}",
            ]
        )
    title = f"{args.blocks} units, window {args.window}, compute paced, per rank and step"
    columns = ["ranks (ms)", "step", "bound", "with collect", "step/bound", "step/with collect", "collect busy"]
    _common.show(title, columns, times)
    columns = ["ranks (MiB)", *LANES, *(f"{name}/one's" for name in SHARES), "theory", "of collect"]
    _common.show(title, columns, moved)
    print(f"same losses on all ranks of all numbers of ranks: {'yes' if len(losses) == 1 else 'NO'}")
    summary["same_losses"] = len(losses) == 1
    summary["limits"] = limits
    settings = {"setting": dataclasses.asdict(SETTING), "latency_us": LATENCY_US, **dataclasses.asdict(shape)}
    settings |= {"rounds": args.rounds, "ranks": sizes, "block_s": [FORWARD_S, BACKWARD_S]}
    samples = {str(size): each for size, each in turns.items()}
    _common.Result("sharded", samples, summary, settings).write(args, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
