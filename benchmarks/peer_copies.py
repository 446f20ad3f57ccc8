"""Does it pay to keep units that a window evicts at another stage of the pipeline, where the host's link is slow?

Two stages of torch.distributed.pipelining train under 1F1B on this machine, one process each, over gloo. All methods
keep what blocks save, within an activation memory that is mostly spare. Methods:

    resident     every unit stays on the device
    window       a window of `--window` units: the others come from home for each forward and each backward
    peers        the same, and stages= keep each other's units: of each step only the first fetch comes from home

Lanes are limited, alike for all methods: a unit takes `--host` times the compute of its forward over the link to the
host, and over the link to a peer that by `--faster`. The aim: peers no slower than window, and near resident where the
peer's link is faster than compute. Losses have the same bits for all methods. Compute is paced, and model and loop are
those of d2d_swap.py.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import _common
import noria
import torch.distributed as dist
from d2d_swap import LANES, LATENCY_US, MIB, Run, Shape, compared, limits_of, meet, take_turns

RESIDENT, WINDOW, PEERS = METHODS = ("resident", "window", "peers")
SIZE = 2
WARMUP = 7  # steps: in the first stages agree; at most two are measured, and two tried


def policy_of(method: str, window: int, grid: Any) -> dict[str, Any]:
    policy: dict[str, Any] = {"activations": "auto", "activation_memory": "2GiB", "mesh": grid["replicas"]}
    if method != RESIDENT:
        policy["window"] = window
    if method == PEERS:
        policy["stages"] = grid["stages"]
    return policy


def on_rank(rank: int, size: int, meeting: str, answers: Any, shape: Shape, window: int) -> None:
    """Puts (rank, what it measured) among the answers."""
    grid = meet(rank, size, meeting)
    limits = limits_of(shape, 4 * shape.width * (shape.width + 1), shape.forward_s)
    runs = {method: Run(policy_of(method, window, grid), shape, grid, limits) for method in METHODS}
    take_turns(runs, shape, WARMUP)
    reports = {method: noria.report(run.model) for method, run in runs.items()}
    methods = {
        method: run.found() | {"copies": reports[method].copies, "num_fetches": reports[method].num_fetches}
        for method, run in runs.items()
    }
    loans = [dataclasses.asdict(loan) for loan in reports[PEERS].loans]
    answers.put((rank, {"limits": limits, "loans": loans, "methods": methods}))
    dist.barrier()  # no rank leaves while another one still moves


def show(shape: Shape, window: int, summary: dict[str, Any]) -> None:
    host, peer = (summary["limits"][lane][0] for lane in ("fetch", "peer"))
    rows = []
    for method, each in summary["methods"].items():
        step = each["step_s"]
        rows.append(
            [
                method,
                f"{1e3 * step['median']:.0f}",
                f"{1e3 * step['q25']:.0f}-{1e3 * step['q75']:.0f}",
                f"{each['over_resident']['of_pairs']:.3f}",
                f"{each['over_window']['of_pairs']:.3f}",
                *(f"{stage['stalled_us'] / 1e3:.0f}" for stage in each["stages"]),
                *(f"{each['stages'][0]['moved_bytes'][lane] / MIB:.1f}" for lane in LANES),
                " ".join(str(stage["copies"]["num_units"]) for stage in each["stages"]),
            ]
        )
    title = f"{SIZE} stages of {shape.blocks} blocks, window {window}, {shape.micro_batches} micro-batches; host "
    title += f"{host:.3f} GiB/s, peer {peer:.3f}; stalls of both stages, MiB of stage 0, per step"
    columns = [
        "method",
        "step ms",
        "quartiles",
        "over resident",
        "over window",
        "stalls 0",
        "stalls 1",
        *LANES,
        "units",
    ]
    _common.show(title, columns, rows)
    print(f"same losses: {'yes' if summary['same_losses'] else 'NO'}")


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=6, help="of a stage")
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--window", type=int, default=2, help="units")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--host", type=float, default=2.0, help="time of a unit on the host's link, over F")
    parser.add_argument("--faster", type=float, default=8.0, help="the link to a peer than that to the host")
    parser.add_argument("--rounds", type=int, help="turns of all methods")
    parser.add_argument("--steps", type=int, help="measured steps in each turn")
    args = parser.parse_args()
    shape = Shape(
        args.blocks,
        args.width,
        args.rows,
        args.micro_batches,
        0.004,
        0.008,
        args.host,
        args.faster,
        args.rounds or (1 if args.quick else 4),
        args.steps or (2 if args.quick else 5),
    )
    began = _common.hardware()
    found = _common.on_ranks(SIZE, on_rank, shape, args.window)
    samples = [{method: each["steps_s"] for method, each in stage["methods"].items()} for stage in found]
    summary = compared(found, RESIDENT, WINDOW)
    show(shape, args.window, summary)
    settings = {"window": args.window, "latency_us": LATENCY_US, "warmup": WARMUP, **dataclasses.asdict(shape)}
    _common.Result("peer_copies", samples, summary, settings).write(args, began)
    return 0 if summary["same_losses"] else 1


if __name__ == "__main__":
    sys.exit(main())
