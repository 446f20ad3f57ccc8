"""Does a pipeline whose stages lend each other memory step as fast as one that has enough?

Stages of torch.distributed.pipelining train under 1F1B on this machine, one process each, over gloo. Stage i of n has
n - i micro-batches in flight, and all have the same `activation_memory`: as much as they need on average, and what two
blocks save for what is under way. So the first lacks what the last has to spare. Or it is less than they need on
average: the last one still lends, but not enough. Methods:

    no limit            activations="keep"
    D2D                 "auto", within activation_memory; stages= lend each other theirs
    host swap           "auto", within the same activation_memory, alone
    mixed               as D2D, with less: the rest goes to the host, or is computed again
    host swap, short    as host swap, with less
    offload             "offload": all but a few blocks
    recompute           "recompute": all but the inputs of blocks

Lanes are limited, alike for all methods: what a block saves takes `--host` times the compute of its forward over the
link to the host, each way, and over the link to a peer that by `--faster`. The aim: D2D within 1.05 of no limit as long
as the lenders' room lasts; D2D and mixed never slower than the best of the others. Losses have the same bits for all
methods.

`--compute paced`, the default: layers are small and then wait until their time is over, so that stages need not have
a core each; a recomputed forward takes its time again. With "real" they are large enough to take time themselves.
Methods take turns in the same processes. A step lasts from the end of the one before it to its own, on the first stage;
the first steps, in which stages lend and choose, are not measured.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
import time
from statistics import median
from typing import Any

import _common
import noria
import torch
import torch.distributed as dist
from noria.testing import on_machine
from noria.wrapped import wrapped_by
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

GIB, MIB = 1 << 30, 1 << 20
LATENCY_US = 30.0
WARMUP = 12  # steps; in the first, stages agree on who lends what; in some more each chooses what is computed again
LANES = ("fetch", "drain", "peer")
SWAPPED = ("host", "peers")  # bytes that blocks save, there and back
NO_LIMIT = "no limit"
NUM_SAVED = 4  # tensors of a block, each as large as its input


@dataclasses.dataclass(frozen=True)
class Method:
    activations: str
    lends: bool = False
    is_short: bool = False


METHODS = {
    NO_LIMIT: Method("keep"),
    "D2D": Method("auto", lends=True),
    "host swap": Method("auto"),
    "mixed": Method("auto", lends=True, is_short=True),
    "host swap, short": Method("auto", is_short=True),
    "offload": Method("offload"),
    "recompute": Method("recompute"),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """`forward_s`, `backward_s`: of a block and a micro-batch; 0: as long as they take."""

    blocks: int  # of a stage
    width: int
    rows: int  # of a micro-batch
    micro_batches: int
    forward_s: float
    backward_s: float
    host: float
    faster: float
    rounds: int
    steps: int
    spare: int = 2  # what so many blocks save: room over the average need
    short: int = 2  # and under it, where there is less

    @property
    def bundle_bytes(self) -> int:
        """What a block saves of a micro-batch."""
        return NUM_SAVED * 4 * self.rows * self.width

    def room(self, size: int, is_short: bool = False) -> int:
        return int(self.bundle_bytes * (self.blocks * (size + 1) / 2 + (-self.short if is_short else self.spare)))


class Begin(torch.autograd.Function):
    """An identity; its backward, the last of the block's, waits until that has lasted `backward_s`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: dict[str, float], backward_s: float) -> torch.Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sleep_until(ctx.clock["began"] + ctx.backward_s)
        return gradient, None, None


class End(torch.autograd.Function):
    """x + y, once the forward has lasted `forward_s`; its backward, the block's first, begins once what that needs is
    there. y is saved so that a recomputed forward reaches this point."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, clock: dict[str, float], until_s: float) -> torch.Tensor:
        ctx.clock = clock
        ctx.save_for_backward(y)
        output = x + y
        sleep_until(until_s)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _ = ctx.saved_tensors
        ctx.clock["began"] = time.perf_counter()
        return gradient, gradient, None, None


def sleep_until(deadline_s: float) -> None:
    while (left := deadline_s - time.perf_counter()) > 0:
        time.sleep(left)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.linear = nn.Linear(shape.width, shape.width)
        self.forward_s, self.backward_s = shape.forward_s, shape.backward_s
        self.clock: dict[str, float] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        until_s = time.perf_counter() + self.forward_s
        x = Begin.apply(x, self.clock, self.backward_s)
        y = self.linear(x)
        y = (y * y.sigmoid()).tanh()
        return End.apply(x, y, self.clock, until_s)


class Stage(nn.Module):
    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(shape.width, shape.width) if rank == 0 else None  # so that all blocks have a backward
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inlet is not None:
            x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x


def policy_of(method: Method, shape: Shape, grid: DeviceMesh) -> dict[str, Any]:
    policy: dict[str, Any] = {"mesh": grid["replicas"], "activations": method.activations}
    if method.activations == "auto":
        policy["activation_memory"] = shape.room(dist.get_world_size(), method.is_short)
    if method.lends:
        policy["stages"] = grid["stages"]
    return policy


class Run:
    """This rank's stage under one method."""

    def __init__(
        self, policy: dict[str, Any], shape: Shape, grid: DeviceMesh, limits: dict[str, tuple[float, float]]
    ) -> None:
        self.shape, self.rank, self.size = shape, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(self.rank)
        self.model = Stage(shape, self.rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        stage = PipelineStage(self.model, self.rank, self.size, torch.device("cpu"), group=grid["stages"].get_group())
        with on_machine(limits=limits, update_threads=1):
            noria.wrap(stage, self.optimizer, device="cpu", device_memory=1.0, **policy)
        wrapped = wrapped_by(self.model)
        assert wrapped is not None
        self.wrapped = wrapped
        self.schedule = Schedule1F1B(stage, shape.micro_batches, loss_fn=F.mse_loss)
        rows = torch.Generator().manual_seed(0)
        self.x, self.target = (
            torch.randn(shape.micro_batches * shape.rows, shape.width, generator=rows) for _ in range(2)
        )
        self.losses: list[float] = []
        self.times: list[float] = []
        self.moved = dict.fromkeys((*LANES, *SWAPPED), 0)  # bytes, in measured steps
        self.stalled_us = 0

    def step(self) -> None:
        losses: list[torch.Tensor] = []
        if self.rank == 0:
            self.schedule.step(self.x)
        elif self.rank == self.size - 1:
            self.schedule.step(target=self.target, losses=losses)
        else:
            self.schedule.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses += [loss.item() for loss in losses]

    def block(self, num_steps: int) -> None:
        """A first step fills the lanes."""
        dist.barrier()
        self.step()
        before, last = self.counts(), time.perf_counter()
        for _ in range(num_steps):
            self.step()
            now = time.perf_counter()
            self.times.append(now - last)
            last = now
        after = self.counts()
        for way in self.moved:
            self.moved[way] += after[way] - before[way]
        self.stalled_us += after["stalled"] - before["stalled"]
        self.wrapped.context.engine.idle()

    def forget(self) -> None:
        self.times.clear()
        self.moved, self.stalled_us = dict.fromkeys(self.moved, 0), 0

    def counts(self) -> dict[str, int]:
        stats = {lane: self.wrapped.context.backend.stats(lane) for lane in (*LANES, "compute")}
        stalled = sum(stats["compute"]["stalled_us"].values())
        saved = self.wrapped.context.engine.saved.saved_stats()
        peers = saved["offloaded_to_peers"] + saved["reloaded_from_peers"]
        swapped = {"host": saved["offloaded"] + saved["reloaded"] - peers, "peers": peers}
        return {lane: stats[lane]["bytes"] for lane in LANES} | swapped | {"stalled": stalled}

    def found(self) -> dict[str, Any]:
        report, num_steps = noria.report(self.model), len(self.times)
        return {
            "steps_s": self.times,
            "losses": self.losses,
            "moved_bytes": {way: amount / num_steps for way, amount in self.moved.items()},
            "stalled_us": self.stalled_us / num_steps,
            "saved": report.saved,
            "recomputed": report.recomputed,
            "lent_bytes": sum(loan.bytes for loan in report.loans if loan.lender == self.rank),
            "room": self.wrapped.context.policy.activation_memory,
        }


def limits_of(shape: Shape, num_bytes: int, forward_s: float) -> dict[str, tuple[float, float]]:
    """By what moves of a block, and its forward's time."""
    host = num_bytes / GIB / (shape.host * forward_s)
    return {
        "fetch": (host, LATENCY_US),
        "drain": (host, LATENCY_US),
        "peer": (host * shape.faster, LATENCY_US),
    }


def forward_time(shape: Shape) -> float:
    """Seconds of a block's forward, as on the slowest rank."""
    if shape.forward_s:
        return shape.forward_s
    block, x = Block(shape), torch.randn(shape.rows, shape.width)
    times = torch.tensor(median(_common.seconds(lambda: block(x)) for _ in range(30)))
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(times)


def meet(rank: int, size: int, meeting: str) -> DeviceMesh:
    """The ranks of all stages, and this stage's own."""
    torch.set_num_threads(1)
    patience = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=patience)
    return init_device_mesh("cpu", (size, 1), mesh_dim_names=("stages", "replicas"))


def take_turns(runs: dict[str, Run], shape: Shape, warmup: int) -> None:
    for run in runs.values():
        run.block(warmup - 1)
        run.forget()
    for _ in range(shape.rounds):
        for run in runs.values():
            run.block(shape.steps)


def on_rank(rank: int, size: int, meeting: str, answers: Any, shape: Shape) -> None:
    """Puts (rank, what it measured) among the answers."""
    grid = meet(rank, size, meeting)
    limits = limits_of(shape, shape.bundle_bytes, forward_time(shape))
    runs = {name: Run(policy_of(method, shape, grid), shape, grid, limits) for name, method in METHODS.items()}
    take_turns(runs, shape, WARMUP)
    loans = {
        name: [dataclasses.asdict(loan) for loan in runs[name].wrapped.peer_memory.loans]
        for name, method in METHODS.items()
        if method.lends
    }
    answers.put(
        (rank, {"limits": limits, "loans": loans, "methods": {name: run.found() for name, run in runs.items()}})
    )
    dist.barrier()  # no rank leaves while another one still moves


def compared(found: list[dict[str, Any]], *references: str) -> dict[str, Any]:
    """What all stages found of each method, and its steps over those of the `references`."""
    names = list(found[0]["methods"])
    times = {method: found[0]["methods"][method]["steps_s"] for method in names}
    losses = {tuple(found[-1]["methods"][method]["losses"]) for method in names}
    summary: dict[str, Any] = {name: found[0][name] for name in ("limits", "loans")}
    summary["same_losses"] = len(losses) == 1
    summary["methods"] = {
        method: {
            "step_s": _common.spread(times[method]),
            **{
                f"over_{reference.replace(' ', '_')}": _common.paired_ratio(times[method], times[reference])
                for reference in references
            },
            "stages": [
                {name: value for name, value in stage["methods"][method].items() if name not in ("steps_s", "losses")}
                for stage in found
            ],
        }
        for method in names
    }
    return summary


def summarised(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one number of stages."""
    summary = compared(found, NO_LIMIT)
    ratios = {name: each["over_no_limit"]["of_pairs"] for name, each in summary["methods"].items()}
    summary["over_best_other"] = {
        lending: ratios[lending] / min(ratios[name] for name in rivals_of(METHODS[lending]))
        for lending in summary["loans"]
    }
    return summary


def rivals_of(lending: Method) -> list[str]:
    """Those without loans that have no more room, and those without a limit."""
    alone = {name: method for name, method in METHODS.items() if name != NO_LIMIT and not method.lends}
    return [name for name, each in alone.items() if each.activations != "auto" or each.is_short == lending.is_short]


def show(size: int, shape: Shape, summary: dict[str, Any]) -> None:
    host, peer = (summary["limits"][lane][0] for lane in ("fetch", "peer"))
    rows = []
    for method, each in summary["methods"].items():
        step, ratio, stages = each["step_s"], each["over_no_limit"], each["stages"]
        limited = METHODS[method].activations in ("auto", "offload")

        def per_stage(name: str, stages: list[Any] = stages, limited: bool = limited) -> str:
            return " ".join(f"{stage['saved'][name] / MIB:.0f}" for stage in stages) if limited else "-"

        rows.append(
            [
                method,
                f"{1e3 * step['median']:.0f}",
                f"{1e3 * step['q25']:.0f}-{1e3 * step['q75']:.0f}",
                f"{ratio['of_medians']:.3f}",
                f"{ratio['of_pairs']:.3f}",
                f"{stages[0]['stalled_us'] / 1e3:.0f}",
                *(f"{stages[0]['moved_bytes'][way] / MIB:.1f}" for way in SWAPPED),
                " ".join(str(len(stage["recomputed"])) for stage in stages),
                per_stage("most_there"),
                per_stage("most_at_peers"),
            ]
        )
    title = f"{size} stages of {shape.blocks} blocks, {shape.micro_batches} micro-batches; host {host:.3f} GiB/s, "
    rooms = " or ".join(f"{shape.room(size, is_short) / MIB:.0f}" for is_short in (False, True))
    title += f"peer {peer:.3f}; room for {rooms} MiB each; stalls and MiB of stage 0, per step"
    columns = ["method", "step ms", "quartiles", "of medians", "of pairs", "stalls", *SWAPPED, "computed again"]
    _common.show(title, [*columns, "there", "at peers"], rows)
    for lending, loans in summary["loans"].items():
        lent = [f"{loan['lender']} lends {loan['bytes'] / MIB:.1f} MiB to {loan['borrower']}" for loan in loans]
        over = summary["over_best_other"][lending]
        print(f"{lending}: {', '.join(lent) or 'no stage lends'}; over the best other: {over:.3f}")
    print(f"same losses: {'yes' if summary['same_losses'] else 'NO'}")


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--compute", choices=["paced", "real"], default="paced")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3], help="numbers of stages")
    parser.add_argument("--blocks", type=int, default=6, help="of a stage")
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--width", type=int)
    parser.add_argument("--rows", type=int, help="of a micro-batch")
    parser.add_argument("--host", type=float, default=4.0, help="time of what a block saves on the host's link, over F")
    parser.add_argument("--faster", type=float, default=4.0, help="the link to a peer than that to the host")
    parser.add_argument("--spare", type=int, default=2, help="room over the average need, in what blocks save")
    parser.add_argument("--short", type=int, default=2, help="under it, where there is less")
    parser.add_argument("--rounds", type=int, help="turns of all methods")
    parser.add_argument("--steps", type=int, help="measured steps in each turn")
    args = parser.parse_args()
    paced = args.compute == "paced"
    shape = Shape(
        args.blocks,
        args.width or (64 if paced else 256),
        args.rows or (2048 if paced else 1024),
        args.micro_batches,
        *((0.004, 0.008) if paced else (0.0, 0.0)),
        args.host,
        args.faster,
        args.rounds or (1 if args.quick else 4),
        args.steps or (2 if args.quick else 5),
        args.spare,
        args.short,
    )
    began = _common.hardware()
    samples, summary = {}, {}
    for size in args.stages:
        found = _common.on_ranks(size, on_rank, shape)
        samples[str(size)] = [{method: each["steps_s"] for method, each in stage["methods"].items()} for stage in found]
        summary[str(size)] = summarised(found)
        show(size, shape, summary[str(size)])
    settings = {"compute": args.compute, "latency_us": LATENCY_US, "warmup": WARMUP, **dataclasses.asdict(shape)}
    _common.Result("d2d_swap" if paced else "d2d_swap_real", samples, summary, settings).write(args, began)
    return 0 if all(each["same_losses"] for each in summary.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
