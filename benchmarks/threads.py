"""What do torch's threads and those of the host pool cost each other where both want the same cores?

A GPT trains on the CPU with torch's intra-op threads on all cores: alone; with a pool that has nothing to do; and while
the pool updates without a pause, for several budgets of threads. Each OMP_WAIT_POLICY is a process of its own (torch
reads it once), the processes take turns, and so do the cases inside of them; ratios are of neighbours in one turn.
"Both at once" is what is done in a second of both, compute and updates each as a share of what it does alone: 1 is what
taking turns would give, less is lost, more is won.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import _common
import torch
from adamw import Memory
from noria import _C

from examples.gpt import GPT, GPTConfig

POLICIES = ("passive", "unset", "active")
PATIENCE_S = 2.0  # for the steps of one case
ALONE, IDLE = "alone", "pool idle"


def budgets_of(cores: int) -> list[int]:
    """Up to 4 each, then powers of two; and one less than all, which is the default."""
    powers = [n for n in (1, 2, 3, 4, 8, 16, 32, 64, 128) if n < cores]
    return sorted({*powers, max(1, cores - 1), cores})


class Updates:
    """While it lives the pool has always something to do; then how many elements it updated in a second."""

    def __init__(self, job: Any, count: int, threads: int) -> None:
        self.job, self.count, self.threads = job, count, threads

    def __enter__(self) -> Updates:
        self.pool, self.done, self.is_over = _C.HostOptimizer(self.threads), 0, False
        self.feeder = threading.Thread(target=self._feed)
        self.began = time.perf_counter()
        self.feeder.start()
        return self

    def _feed(self) -> None:
        last = self.pool.submit(self.job)
        while not self.is_over:
            following = self.pool.submit(self.job)
            last.wait_passed()
            self.done, self.ended = self.done + self.count, time.perf_counter()
            last = following
        last.wait_passed()

    def __exit__(self, *_: Any) -> None:
        self.is_over = True
        self.feeder.join()
        self.pool.close()
        self.per_second = self.done / (self.ended - self.began)


def child(rounds: int, steps: int, count: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of a compute step and elements updated in a second, by case."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=4, vocab_size=1024))
    tokens = torch.randint(0, 1024, (2, 128))
    memory = Memory(count)
    job = memory.job("adamw", is_split=True)
    budgets = budgets_of(torch.get_num_threads())

    def compute() -> None:
        model(tokens, tokens)[1].backward()
        model.zero_grad()

    def step_s() -> float:
        """Median of `steps`, or of as many as were begun in time: threads that spin may take seconds for one."""
        times: list[float] = []
        while len(times) < steps and sum(times) < PATIENCE_S:
            times.append(_common.seconds(compute))
        return median(times)

    found: dict[str, dict[str, list[float]]] = {"step_s": {}, "updated_per_s": {}}

    def keep(kind: str, case: str, value: float) -> None:
        found[kind].setdefault(case, []).append(value)

    def with_pool(case: str, threads: int, work: Callable[[], Any] | None) -> None:
        with Updates(job, count, threads) as updates:
            if work is None:
                time.sleep(0.3)
            else:
                keep("step_s", case, work())
        keep("updated_per_s", case, updates.per_second)

    step_s()
    for _ in range(rounds):
        keep("step_s", ALONE, step_s())
        idle = _C.HostOptimizer(max(budgets))
        keep("step_s", IDLE, step_s())
        idle.close()
        for threads in budgets:
            with_pool(f"updates alone, {threads}", threads, None)
            with_pool(f"updating, {threads}", threads, step_s)
    return found


def run_child(policy: str, *numbers: int) -> dict[str, dict[str, list[float]]]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *(str(n) for n in numbers)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if policy != "unset":
        environment["OMP_WAIT_POLICY"] = policy
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def summary_of(samples: dict[str, dict[str, list[float]]], budgets: list[int]) -> dict[str, dict[str, float]]:
    steps, updated = samples["step_s"], samples["updated_per_s"]

    def ratio(values: list[float], base: list[float]) -> float:
        return median(a / b for a, b in zip(values, base, strict=True))

    found: dict[str, dict[str, float]] = {
        ALONE: {"step_ms": 1e3 * median(steps[ALONE])},
        IDLE: {"step_ms": 1e3 * median(steps[IDLE]), "step_over_alone": ratio(steps[IDLE], steps[ALONE])},
    }
    for threads in budgets:
        both, alone = f"updating, {threads}", f"updates alone, {threads}"
        shares = [
            a / b + c / d for a, b, c, d in zip(steps[ALONE], steps[both], updated[both], updated[alone], strict=True)
        ]
        found[both] = {
            "step_ms": 1e3 * median(steps[both]),
            "step_over_alone": ratio(steps[both], steps[ALONE]),
            "updates_over_alone": ratio(updated[both], updated[alone]),
            "gparam_s": median(updated[both]) / 1e9,
            "both_at_once": median(shares),
        }
    return found


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(*(int(word) for word in sys.argv[2:5]))))
        return 0
    parser = _common.parser_of(__doc__)
    parser.add_argument("--turns", type=int, help="processes of each policy")
    parser.add_argument("--rounds", type=int, default=2, help="of all cases in a process")
    args = parser.parse_args()
    turns = args.turns or (1 if args.quick else 3)
    steps, count = (2, 1 << 20) if args.quick else (5, 16 << 20)
    began = _common.hardware()
    budgets = budgets_of(torch.get_num_threads())
    samples: dict[str, Any] = {policy: {"step_s": {}, "updated_per_s": {}} for policy in POLICIES}
    for _ in range(turns):
        for policy in POLICIES:
            for kind, cases in run_child(policy, args.rounds, steps, count).items():
                for case, values in cases.items():
                    samples[policy][kind].setdefault(case, []).extend(values)
    summary = {policy: summary_of(found, budgets) for policy, found in samples.items()}
    rows = [
        [f"{policy}: {case}", *(f"{found[key]:.2f}" if key in found else "" for key in COLUMNS)]
        for policy, cases in summary.items()
        for case, found in cases.items()
    ]
    _common.show(
        f"{torch.get_num_threads()} cores, torch on all of them", ["OMP_WAIT_POLICY: case", *COLUMNS.values()], rows
    )
    settings = {"turns": turns, "rounds": args.rounds, "steps": steps, "elements_of_an_update": count}
    ended = {"load_1min_at_end": _common.hardware()["load_1min"]}
    _common.Result("threads", samples, summary, settings | ended).write(args, began)
    return 0


COLUMNS = {
    "step_ms": "step ms",
    "step_over_alone": "step / alone",
    "updates_over_alone": "updates / alone",
    "gparam_s": "Gparam/s",
    "both_at_once": "both at once",
}


if __name__ == "__main__":
    sys.exit(main())
