"""What do placements gain on this device, and is each predicted?

A GPT trains with bf16 weights and fp32 masters. In each mode the planner, or the policy, places weights and updates
elsewhere. What ops cost is measured in the first mode alone. The steps of all modes are predicted from that.

- streams: windows of 3, 6 and 12 units, drafts; "deferred" has no drafts, "backward" updates in backward
- device: updates run on the device; masters and moments pass through it
- half, auto, all: half of the model stays on the device; what the planner chooses; all of it
- plain: PyTorch on the device, with fp32 masters of its own
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import time
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded: its threads give way to noria's

import _common
import noria
import torch
from noria.planning.measured_costs import MeasuredCosts
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.wrapped import wrapped_by

from examples.gpt import GPT, GPTConfig

WARM_UP = 10
"""Costs are measured in steps 3 to 7, and what they say to do is done in the step after."""


def modes_of(bytes_of_all: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    drafts = {} if args.device == "cuda" else {"draft_memory": "1GiB"}  # "auto" on a CPU: none
    roomy = {"device_memory": args.device_memory, **drafts}
    return {
        "streams, window 6": {"window": 6, **drafts},
        "streams, window 3": {"window": 3, **drafts},
        "streams, window 12": {"window": 12, **drafts},
        "deferred": {"window": 6, "draft_memory": 0},
        "backward": {"window": 6, "update": "backward"},
        "device": {"window": 6, "optimizer_device": "device"},
        "half": {"window": 6, "resident": bytes_of_all // 2, **roomy},
        "auto": {"resident": "auto", **roomy},
        "all": {"resident": "all", **drafts, "device_memory": 4 * bytes_of_all},
    }


def model_of(args: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(args.vocabulary, args.context, args.layers, args.width // 64, args.width, tied=True))


def batch_of(args: argparse.Namespace, generator: torch.Generator) -> torch.Tensor:
    rows = args.tokens // args.context
    return torch.randint(args.vocabulary, (rows, args.context), generator=generator).to(args.device)


class Steps:
    """Seconds of each step, from the end of the one before; a GPU says when that was."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._is_cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        if not self._is_cuda:
            return [after - before for before, after in itertools.pairwise(self._marks)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(self._marks)]


def measure(policy: dict[str, Any], args: argparse.Namespace, costs: MeasuredCosts | None) -> dict[str, Any]:
    model = model_of(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    noria.wrap(model, optimizer, device=args.device, dtype=torch.bfloat16, kernel="fused", **policy)
    steps, generator = Steps(args.device), torch.Generator().manual_seed(1)
    losses = []
    for number in range(WARM_UP + args.steps + 1):
        tokens = batch_of(args, generator)
        loss = model(tokens, tokens)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if number >= WARM_UP:
            steps.mark()
    samples = steps.seconds()
    wrapped, report = wrapped_by(model), noria.report(model)
    plan, known = wrapped.context.plan, costs or report.costs
    assert known is not None, "no costs were measured"
    found = {
        "policy": {key: str(value) for key, value in policy.items()},
        "step_s": samples,
        "predicted_s": PlannedStep(plan, 0, PlanSpeeds(0, 0, 0, 0), known).step_us / 1e6,
        "stays": len(plan.stays),
        "updated_on_the_device": len(plan.streamed),
        "window_bytes": plan.arena_bytes,
        "ledger": [(row.planned, row.taken) for row in report.ledger],
        "loss": losses[-1].item(),
        "report": report.to_dict(),
    }
    noria.unwrap(model, optimizer)
    return {**found, "costs": known}


def measure_plain(args: argparse.Namespace) -> dict[str, Any]:
    model = model_of(args).to(args.device)
    parameters = list(model.parameters())
    masters = [torch.nn.Parameter(each.detach().clone()) for each in parameters]
    for each in parameters:
        each.data = each.data.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    steps, generator = Steps(args.device), torch.Generator().manual_seed(1)
    for number in range(WARM_UP + args.steps + 1):
        tokens = batch_of(args, generator)
        model(tokens, tokens)[1].backward()
        for master, each in zip(masters, parameters, strict=True):
            master.grad = each.grad.float()
            each.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        if number >= WARM_UP:
            steps.mark()
    return {"step_s": steps.seconds()}


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="of a step, in one batch")
    parser.add_argument("--device-memory", default="8GiB", help="of the modes in which units may stay")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    is_small = args.quick or args.device == "cpu"
    args.layers, args.width, args.vocabulary = (14, 128, 1024) if is_small else (24, 1024, 50304)
    args.tokens = args.tokens or (512 if is_small else 16384)
    args.context = min(1024, args.tokens // 2)
    began = _common.hardware()

    model = model_of(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    everything = {"resident": "all", "device_memory": "1TiB", "kernel": "fused", "dtype": torch.bfloat16}
    bytes_of_all = noria.plan(model, optimizer, device=args.device, **everything).resident_bytes
    found: dict[str, dict[str, Any]] = {}
    costs = None
    for name, policy in modes_of(bytes_of_all, args).items():
        found[name] = measure(policy, args, costs)
        costs = found[name].pop("costs")
        print(f"{name}: {1e3 * median(found[name]['step_s']):.1f} ms", flush=True)
        gc.collect()
    found["plain"] = measure_plain(args)

    plain = median(found["plain"]["step_s"])
    rows, errors = [], []
    for name, each in found.items():
        step = median(each["step_s"])
        row = [name, f"{1e3 * step:.1f}", "", f"{step / plain:.2f}", each.get("stays", ""), ""]
        if "predicted_s" in each:
            errors.append(each["predicted_s"] / step - 1)
            row[2] = f"{1e3 * each['predicted_s']:.1f} ({errors[-1]:+.1%})"
            row[5] = each["updated_on_the_device"]
        rows.append(row)
    columns = ["mode", "step, ms", "predicted", "over plain", "units that stay", "others updated on the device"]
    _common.show(f"{args.layers} blocks of width {args.width}, {args.tokens} tokens, {args.device}", columns, rows)
    summary = {
        "step_s": {name: median(each["step_s"]) for name, each in found.items()},
        "errors": dict(zip(found, errors, strict=False)),
        "same_losses": len({each["loss"] for each in found.values() if "loss" in each}) == 1,
        "memory_within_plan": all(
            taken <= planned for each in found.values() for planned, taken in each.get("ledger", [])
        ),
        "costs": costs,
    }
    settings = {name: getattr(args, name) for name in ("device", "tokens", "layers", "width", "device_memory", "steps")}
    _common.Result("placement", found, summary, settings).write(args, began)
    worst = max(errors, key=abs)
    words = ", ".join(f"{name} {1e3 * median(each['step_s']):.0f} ms" for name, each in found.items())
    print(f"verdict: {words}; worst prediction {worst:+.1%}; same losses: {summary['same_losses']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
