"""Does the planner choose well what stays on the device?

A chain of blocks trains on lanes of limited speed, with compute that takes a known time. There are four settings of
rates and five budgets of device memory, all named beforehand. In each, fixed rules run in turns with the planner's own
choice, `resident="auto"`. The rules draft all units that stream.

- smallest window: the fewest units whose fetches hide behind compute, as STRONGHOLD's users choose it
- all stream: the budget is all window
- half stays, all that fits stays: parts of the room that the smallest window leaves

The planner's step is also compared with a bound of its plan: the longest of compute, updates, fetches and drains, at
the costs that it has measured. The aim is 1.05 where arithmetic says that the bound can be reached, and that no rule is
faster. The bound can be reached if

- the window holds the weights and gradients of two visits, so that copies run beside compute;
- all units that stream have undo logs, so that their updates hide behind the backward too;
- fetches of the forward hide behind it, since they begin after `step()`. Those of the backward and drains hide behind
  that, since gradients land before `step()`: max(F, f_F) + max(B, f_B, d) is no longer than the bound.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from statistics import median
from typing import Any

import _common
import noria
import torch
from noria import _C
from noria.planning.decisions import room_for_stays
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.testing import on_machine
from noria.wrapped import wrapped_by
from overlap import LATENCY_US, SETTINGS, limits_of
from overlap import Setting as Rates
from prediction import BACKWARD_S, EQUAL, FORWARD_S, Chain

BUDGETS = {"least": 0.0, "a quarter": 0.25, "half": 0.5, "three quarters": 0.75, "all": 1.1}
"""Of the way from the smallest window to all units with their state and gradients."""
SETTLING = 25
DRAFTS: dict[str, Any] = {"draft_memory": "1GiB"}


class Arm:
    def __init__(self, rates: Rates, policy: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = Chain(EQUAL)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        forward_us, backward_us = (1e6 * sum(block.pace[number] for block in self.model.blocks) for number in (1, 2))
        limits = limits_of(rates, self.model, forward_us, backward_us)
        with on_machine(limits=limits, update_threads=1):
            noria.wrap(self.model, self.optimizer, device="cpu", kernel="fused", **DRAFTS, **policy)
        wrapped = wrapped_by(self.model)
        assert wrapped is not None
        self.wrapped = wrapped
        self.batch = torch.randn(16, EQUAL[0], requires_grad=True)
        self.times: list[float] = []
        for _ in range(SETTLING):
            self.step()

    def step(self) -> None:
        self.model(self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, num_steps: int) -> None:
        """A first step fills the lanes."""
        self.step()
        last = time.perf_counter()
        for _ in range(num_steps):
            self.step()
            now = time.perf_counter()
            self.times.append(1e6 * (now - last))
            last = now
        self.wrapped.context.engine.idle()

    def bound_us(self) -> tuple[float, bool]:
        """What no schedule of its plan beats, and if arithmetic says that it can be reached."""
        costs, plan = self.wrapped.recorder.known.costs, self.wrapped.context.plan
        assert costs is not None
        speeds = PlanSpeeds(0, 0, 0, 0, device=costs.device_update_gib_s)
        times = PlannedStep(plan, 0, speeds, costs).times()
        bound = _C.drafting_bound_us(times)
        streams = [unit for unit in plan.units if unit.index not in plan.stays]
        two_visits = sum(sorted((unit.weights + unit.gradients for unit in streams), reverse=True)[:2])
        phases = max(times.forward_us, times.forward_fetch_us)
        phases += max(times.backward_us, times.backward_fetch_us, times.drain_us)
        has_logs = {unit.index for unit in streams} <= plan.undo_logs.keys() | plan.streamed.keys()
        return bound, plan.arena_bytes >= two_visits and has_logs and phases <= 1.001 * bound


def plan_of(**policy: Any) -> Any:
    model = Chain(EQUAL)
    return noria.plan(model, torch.optim.AdamW(model.parameters()), device="cpu", kernel="fused", **policy)


def rules(rates: Rates, budget: int) -> dict[str, dict[str, Any]]:
    """The policies, by name."""
    room = room_for_stays(plan_of(resident="auto", device_memory=budget))
    fetch_us = 1e6 * rates.fetch * FORWARD_S + LATENCY_US  # of a unit, while a block computes for 1e6 * FORWARD_S
    window = max(2, 1 + math.ceil(fetch_us / (1e6 * FORWARD_S)))
    found: dict[str, dict[str, Any]] = {
        "smallest window": {"window": window, "resident": "none"},
        "all stream": {"resident": "none"},
    }
    if room >= plan_of(resident="all").resident_bytes // len(EQUAL):
        found |= {"half stays": {"resident": max(room // 2, 1)}, "all that fits stays": {"resident": room}}
    return {**found, "planner": {"resident": "auto"}}


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, help="in each, all rules run in turns")
    args = parser.parse_args()
    began = _common.hardware()
    torch.set_num_threads(1)
    rounds, steps = args.rounds or (1 if args.quick else 4), 6
    every = plan_of(resident="all")
    gradients = sum(unit.gradients for unit in every.units)
    samples: dict[str, Any] = {}
    rows, over_bound, over_reachable, over_rule = [], [], [], []
    for rates in SETTINGS:
        for name, share in BUDGETS.items():
            budget = every.least_device + int(share * (every.resident_bytes + gradients - every.least_device))
            arms = {rule: Arm(rates, {"device_memory": budget, **p}) for rule, p in rules(rates, budget).items()}
            for _ in range(rounds):
                for arm in arms.values():
                    arm.run(steps)
            took = {rule: median(arm.times) for rule, arm in arms.items()}
            planner = arms["planner"]
            (bound, is_reachable), stays = planner.bound_us(), len(planner.wrapped.context.plan.stays)
            best = min(us for rule, us in took.items() if rule != "planner")
            over_bound.append(took["planner"] / bound)
            over_reachable += over_bound[-1:] if is_reachable else []
            over_rule.append(took["planner"] / best)
            samples[f"{rates.name}, {name}"] = {
                "device_memory": budget,
                "stays": stays,
                "units": len(EQUAL),
                "drafted": len(planner.wrapped.context.plan.drafted),
                "bound_us": bound,
                "bound_can_be_reached": is_reachable,
                "rates": dataclasses.asdict(rates),
                "times_us": {rule: arm.times for rule, arm in arms.items()},
            }
            cells = [f"{took[rule] / 1e3:.1f}" if rule in took else "" for rule in RULES]
            reached = f"{over_bound[-1]:.3f}{'' if is_reachable else ' (out of reach)'}"
            rows.append([f"{rates.name}, {name}", *cells, str(stays), reached, f"{over_rule[-1]:.3f}"])
            for arm in arms.values():
                noria.unwrap(arm.model, arm.optimizer)
    _common.show("a step (ms)", ["setting", *RULES, "stay", "over bound", "over best rule"], rows)
    summary = {
        "over_bound": _common.spread(over_bound) | {"worst": max(over_bound)},
        "over_bound_in_reach": _common.spread(over_reachable) | {"worst": max(over_reachable)},
        "over_best_rule": _common.spread(over_rule) | {"worst": max(over_rule)},
        "compute_us": 1e6 * len(EQUAL) * (FORWARD_S + BACKWARD_S),
    }
    settings = {"rounds": rounds, "steps": steps, "settling": SETTLING}
    _common.Result("planner", samples, summary, settings).write(args, began)
    print(
        f"verdict: {len(rows)} settings; the planner's step over its bound: median {median(over_bound):.3f}, worst "
        f"{max(over_bound):.3f}; in the {len(over_reachable)} settings whose bound is in reach: median "
        f"{median(over_reachable):.3f}, worst {max(over_reachable):.3f}; over the fastest rule: median "
        f"{median(over_rule):.3f}, worst {max(over_rule):.3f}"
    )
    return 0


RULES = ("smallest window", "all stream", "half stays", "all that fits stays", "planner")

if __name__ == "__main__":
    sys.exit(main())
