"""How close does a step come to what no schedule can beat?

A chain of equal layers trains on a machine whose lanes are limited, so that on any hardware each resource takes a known
time: fetch, drain and update by their bandwidth, compute by the layers themselves (one thread). Four settings: all
resources about equal (their sum is at least 2.5 times the bound), and three in which one of them is the busiest. Each
runs with update="auto" and "blocking", in turns with a resident run that tells the compute times F and B. With f_F, f_B
and d for the limited transfers and U for the limited updates (DESIGN, section 5):

    auto      max(F, U, f_F) + max(B, d, f_B)
    blocking  max(F, f_F) + max(B, d, f_B) + U

A fifth one has updates that take longer than a forward, and a bound of its own, max(F + B, U, f_F + f_B, d), which
drafts of all units and update="backward" aim at: with no drafts, half of them and all; without clipping, with torch's
clip and with `max_grad_norm`. If a clip bites, drafts are redone. torch's clip is compute of the loop's own: what it
takes on plain tensors is added to B.

A measured step within 1.10 of its own mode's bound is the aim. Models are far smaller than the lanes' real speed asks
for, so that what is measured is the schedule and not this machine's memory. With `--compute paced` compute is a limited
lane as well: layers are small and then wait until their time is over, so that a busy or small machine shows the
schedule too; with "real", the default, they are large enough to take that time.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import _common
import noria
import torch
from noria import _C
from noria.testing import on_machine
from noria.wrapped import wrapped_by
from torch import nn

Limits = dict[str, tuple[float, float]]  # by lane: GiB/s, us
GIB = 1 << 30
LATENCY_US = 30.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """How long one step's fetches, drains and updates take, as multiples of what hides them: fetches of the forward
    pass and updates of F, drains of B (fetches of the backward pass follow from the same bandwidth)."""

    name: str
    fetch: float
    drain: float
    update: float


SETTINGS = [
    Setting("balanced", fetch=0.97, drain=0.97, update=0.97),
    Setting("fetch-bound", fetch=2.5, drain=0.5, update=0.5),
    Setting("drain-bound", fetch=0.5, drain=2.0, update=0.5),
    Setting("update-bound", fetch=0.5, drain=0.5, update=2.5),
]


class Paced(torch.autograd.Function):
    """An identity that makes what lies between two of them last: the first notes when it began, the second waits until
    `wait_s` after that; in backward they change parts."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, clock: dict[str, float], forward_s: float, backward_s: float
    ) -> torch.Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        _wait_until(clock.pop("forward", None), forward_s) or clock.update(forward=time.perf_counter())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        clock = ctx.clock
        _wait_until(clock.pop("backward", None), ctx.backward_s) or clock.update(backward=time.perf_counter())
        return gradient, None, None, None


def _wait_until(began: float | None, lasts_s: float) -> bool:
    """False: nothing has begun."""
    if began is None:
        return False
    while (left := began + lasts_s - time.perf_counter()) > 0:
        time.sleep(left)
    return True


class Block(nn.Module):
    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.pace = ({}, forward_s, backward_s) if forward_s else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pace is None:
            return self.linear(x).tanh()
        return Paced.apply(self.linear(Paced.apply(x, *self.pace)).tanh(), *self.pace)


class Chain(nn.Module):
    def __init__(self, num_blocks: int, width: int, forward_s: float = 0, backward_s: float = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, forward_s, backward_s) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Run:
    """One wrapped model; `block` runs some steps of it and gives their times and the engine's sums over them."""

    def __init__(
        self,
        model: nn.Module,
        batch: torch.Tensor,
        limits: dict[str, tuple[float, float]],
        clip: float | None = None,
        every: int = 1,
        **policy: Any,
    ) -> None:
        """`clip`: the norm, at every `every`th step; at the others a norm that no gradient exceeds."""
        self.model, self.batch, self.clip, self.every = copy.deepcopy(model), batch, clip, every
        self.num_steps = 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        with on_machine(limits=limits, update_threads=1):
            noria.wrap(self.model, self.optimizer, device="cpu", kernel="fused", **{"resident": "none", **policy})
        wrapped = wrapped_by(self.model)
        assert wrapped is not None
        self.engine = wrapped.context.engine
        self.forget()

    def forget(self) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []
        self.sums: dict[str, list[float]] = {}

    def step(self) -> None:
        loss = self.model(self.batch)
        loss.backward()
        if self.clip is not None:
            norm = self.clip if self.num_steps % self.every == 0 else NEVER
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        self.num_steps += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def block(self, num_steps: int) -> None:
        """A first step fills the lanes; then each lasts from the end of the one before it to its own end."""
        self.step()
        before, last = self.engine.statistics.step_sums(), time.perf_counter()
        for _ in range(num_steps):
            self.step()
            now = time.perf_counter()
            after = self.engine.statistics.step_sums()
            self.times.append(now - last)
            for name in after:
                self.sums.setdefault(name, []).append(after[name] - before[name])
            before, last = after, now
        self.engine.idle()

    def per_step(self, name: str) -> float:
        return median(self.sums[name])


def transfer_us(num_bytes: float, num_ops: float, bandwidth_gib_s: float) -> float:
    return num_ops * LATENCY_US + 1e6 * num_bytes / GIB / bandwidth_gib_s


def limited_times(run: Run, limits: Limits, forward_us: float, backward_us: float) -> Any:
    """What the lanes must take for what this run moved, and the compute times of the resident run."""
    report = noria.report(run.model)
    fetches = {each.phase: each.fetches for each in report.passes}
    units = report.num_units
    # 28 bytes per element are read and written by an update: p, m, v in and out, the gradient in.
    update_bytes = 28 * sum(parameter.numel() for parameter in run.model.parameters())
    return _C.StepTimes(
        forward_us=forward_us,
        backward_us=backward_us,
        update_us=transfer_us(update_bytes, units, limits["update"][0]),
        forward_fetch_us=transfer_us(run.per_step("forward_fetched"), fetches["forward"], limits["fetch"][0]),
        backward_fetch_us=transfer_us(run.per_step("backward_fetched"), fetches["backward"], limits["fetch"][0]),
        drain_us=transfer_us(run.per_step("drained"), units, limits["drain"][0]),
    )


def as_dict(times: Any) -> dict[str, float]:
    names = ["forward_us", "backward_us", "update_us", "forward_fetch_us", "backward_fetch_us", "drain_us"]
    return {name: getattr(times, name) for name in names}


def pace(setting: Setting, args: Any, model: nn.Module, batch: torch.Tensor) -> tuple[Run, Limits]:
    """The resident run, warm, and what its compute times make of a setting."""
    resident = Run(model, batch, {}, device_memory=1.0)
    for _ in range(args.warmup):
        resident.block(2)
    resident.forget()
    resident.block(4)
    limits = limits_of(setting, model, resident.per_step("forward_us"), resident.per_step("backward_us"))
    return resident, limits


def take_turns(args: Any, resident: Run, runs: dict[str, Run], warmup_steps: int) -> None:
    for run in runs.values():
        run.block(warmup_steps)
        run.forget()
    resident.forget()
    for _ in range(args.rounds):
        for run in (resident, *runs.values()):
            run.block(args.steps)


def limits_of(setting: Setting, model: nn.Module, forward_us: float, backward_us: float) -> Limits:
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    units = len(list(model.blocks))

    def bandwidth(num_bytes: float, wanted_us: float) -> float:
        return num_bytes / GIB / (max(wanted_us - units * LATENCY_US, wanted_us / 10) / 1e6)

    return {
        "fetch": (bandwidth(weights, setting.fetch * forward_us), LATENCY_US),
        "drain": (bandwidth(weights, setting.drain * backward_us), LATENCY_US),
        "update": (bandwidth(7 * weights, setting.update * forward_us), LATENCY_US),
    }


def measure(setting: Setting, args: Any, model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    resident, limits = pace(setting, args, model, batch)
    traces = {
        mode: args.traces / f"{setting.name}_{mode}.json" if args.traces else None for mode in ("auto", "blocking")
    }
    runs = {
        mode: Run(model, batch, limits, window=args.window, update=mode, trace=traces[mode])
        for mode in ("auto", "blocking")
    }
    take_turns(args, resident, runs, 3)

    forward_us, backward_us = resident.per_step("forward_us"), resident.per_step("backward_us")
    result: dict[str, Any] = {
        "setting": dataclasses.asdict(setting),
        "limits": limits,
        "resident_step_s": _common.spread(resident.times),
        "same_losses_in_both_modes": runs["auto"].losses == runs["blocking"].losses,
        "modes": {},
        "samples": {"resident": resident.times, **{mode: run.times for mode, run in runs.items()}},
    }
    for mode, run in runs.items():
        times = limited_times(run, limits, forward_us, backward_us)
        bound_us = {"auto": _C.deferred_bound_us, "blocking": _C.blocking_bound_us}[mode](times)
        own = _C.StepTimes(
            **{**as_dict(times), "forward_us": run.per_step("forward_us"), "backward_us": run.per_step("backward_us")}
        )
        own_bound_us = {"auto": _C.deferred_bound_us, "blocking": _C.blocking_bound_us}[mode](own)
        total_us = sum(as_dict(times).values())
        step_us = 1e6 * median(run.times)
        report = noria.report(run.model)
        result["modes"][mode] = {
            "step_us": step_us,
            "bound_us": bound_us,
            "ratio": step_us / bound_us,
            "ratio_with_its_own_compute": step_us / own_bound_us,
            "sum_over_bound": total_us / bound_us,
            "times": as_dict(times),
            "measured": {name: run.per_step(name) for name in run.sums if name.endswith("_us")},
            "fetches": {each.phase: [each.fetches, each.planned_fetches] for each in report.passes},
            "peak_units": report.peak_units,
        }
    for run in (resident, *runs.values()):
        noria.unwrap(run.model, run.optimizer)
    return result


DRAFTS = Setting("updates between F and F + B", fetch=0.5, drain=0.5, update=1.9)
SHARES = {"no drafts": 0.0, "half drafts": 0.5, "all drafts": 1.0}
NEVER, ALWAYS = 1e6, 1e-6  # norms that a gradient of this model never and always exceeds


def settings_of_updates() -> dict[str, dict[str, Any]]:
    """By name: `clip` of torch, and policy."""
    found: dict[str, dict[str, Any]] = {}
    for name, share in SHARES.items():
        found[name] = {"share": share}
        found[f"{name}, torch's clip"] = {"share": share, "clip": NEVER}
        found[f"{name}, max_grad_norm"] = {"share": share, "max_grad_norm": NEVER}
    found["in backward"] = {"share": 0.0, "update": "backward"}
    found["all drafts, torch's clip bites"] = {"share": 1.0, "clip": ALWAYS}
    found["all drafts, torch's clip bites at every second step"] = {"share": 1.0, "clip": ALWAYS, "every": 2}
    found["all drafts, max_grad_norm bites"] = {"share": 1.0, "max_grad_norm": ALWAYS}
    return found


def time_of_clip(model: nn.Module, times: list[float]) -> None:
    """Appends to `times` the seconds that torch's clip takes, for gradients that no other code uses."""
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), NEVER)
    began = time.perf_counter()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), NEVER)
    times.append(time.perf_counter() - began)


def measure_updates(args: Any, model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    resident, limits = pace(DRAFTS, args, model, batch)
    logs = sum(
        noria.plan(model, torch.optim.AdamW(model.parameters()), device="cpu", kernel="fused").draftable.values()
    )
    runs = {}
    for name, fields in settings_of_updates().items():
        memory = int(fields.pop("share") * logs * 1.01)
        policy = {} if fields.get("update") == "backward" else {"draft_memory": memory}
        runs[name] = Run(model, batch, limits, window=args.window, **policy, **fields)
    clips: list[float] = []
    for _ in range(5):
        time_of_clip(model, clips)
    take_turns(args, resident, runs, 12)  # drafts that are always thrown away have stopped by then
    for _ in range(5):
        time_of_clip(model, clips)
    forward_us, backward_us = resident.per_step("forward_us"), resident.per_step("backward_us")
    result: dict[str, Any] = {"setting": dataclasses.asdict(DRAFTS), "limits": limits, "runs": {}}
    result["samples"] = {"resident": resident.times, "clip": clips, **{name: run.times for name, run in runs.items()}}
    result["same_losses_unless_clipped"] = (
        len({tuple(r.losses) for name, r in runs.items() if "bites" not in name}) == 1
    )
    for name, run in runs.items():
        clip_us = 1e6 * median(clips) if run.clip is not None else 0.0
        times = limited_times(run, limits, forward_us, backward_us + clip_us)
        step_us = 1e6 * median(run.times)
        bounds = {"deferred": _C.deferred_bound_us(times), "drafts": _C.drafting_bound_us(times)}
        result["runs"][name] = {
            "step_us": step_us,
            "clip_us": clip_us,
            "times": as_dict(times),
            "bounds_us": bounds,
            "over_deferred_bound": step_us / bounds["deferred"],
            "over_drafting_bound": step_us / bounds["drafts"],
            "drafts": noria.report(run.model).drafts,
        }
    for run in (resident, *runs.values()):
        noria.unwrap(run.model, run.optimizer)
    return result


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--only", help="one setting, by name")
    parser.add_argument("--compute", choices=["real", "paced"], default="real")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--width", type=int)
    parser.add_argument("--tokens", type=int, help="rows of the batch: the compute per layer")
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--rounds", type=int, help="turns of resident, auto, blocking")
    parser.add_argument("--steps", type=int, help="measured steps in each turn")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--traces", type=Path, help="folder for a trace of each run (for `noria trace`)")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 4)
    args.steps = args.steps or (3 if args.quick else 5)
    paced = args.compute == "paced"
    args.width = args.width or (256 if paced else 512)
    args.tokens = args.tokens or (32 if paced else 96 if args.quick else 256)
    if args.traces:
        args.traces.mkdir(parents=True, exist_ok=True)
    began = _common.hardware()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Chain(args.blocks, args.width, *((0.003, 0.0045) if paced else ()))
    batch = torch.randn(args.tokens, args.width)

    results = [measure(setting, args, model, batch) for setting in SETTINGS if args.only in (None, setting.name)]
    rows = []
    for result in results:
        for mode, found in result["modes"].items():
            times = found["times"]
            rows.append(
                [
                    f"{result['setting']['name']}, {mode}",
                    *(
                        f"{times[name] / 1e3:.0f}"
                        for name in (
                            "forward_us",
                            "backward_us",
                            "forward_fetch_us",
                            "backward_fetch_us",
                            "drain_us",
                            "update_us",
                        )
                    ),
                    f"{found['sum_over_bound']:.2f}",
                    f"{found['step_us'] / 1e3:.1f}",
                    f"{found['bound_us'] / 1e3:.1f}",
                    f"{found['ratio']:.3f}",
                    f"{found['ratio_with_its_own_compute']:.3f}",
                ]
            )
    columns = ["setting (ms)", "F", "B", "f_F", "f_B", "d", "U", "sum/bound", "step", "bound", "step/bound", "own F, B"]
    _common.show(f"{args.blocks} units, window {args.window}, kernel fused, compute {args.compute}", columns, rows)
    if args.only in (None, "drafts"):
        drafted = measure_updates(args, model, batch)
        rows = []
        for name, found in drafted["runs"].items():
            times = found["times"]
            rows.append(
                [
                    name,
                    *(f"{times[key] / 1e3:.0f}" for key in ("forward_us", "backward_us", "update_us")),
                    f"{found['clip_us'] / 1e3:.0f}",
                    f"{found['step_us'] / 1e3:.1f}",
                    f"{found['over_deferred_bound']:.3f}",
                    f"{found['over_drafting_bound']:.3f}",
                    ", ".join(f"{value} {key}" for key, value in found["drafts"].items() if value),
                ]
            )
        columns = [
            "updates (ms)",
            "F",
            "B",
            "U",
            "clip in B",
            "step",
            "over max(F,U..)+max(B..)",
            "over max(F+B,U..)",
            "drafts",
        ]
        _common.show(f"drafts, compute {args.compute}", columns, rows)
        results.append(drafted)
    summary = {r["setting"]["name"]: {k: v for k, v in r.items() if k != "samples"} for r in results}
    samples = {r["setting"]["name"]: r["samples"] for r in results}
    settings = {
        name: getattr(args, name) for name in ("compute", "blocks", "width", "tokens", "window", "rounds", "steps")
    }
    _common.Result("overlap_paced" if paced else "overlap", samples, summary, settings).write(args, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
