"""Is this tree as fast as another one?

Two processes measure the same things, one with this tree's noria and one with the other's, and take turns:

    steps, torch and fused   a step of `overhead.py`: a GPT with all units resident
    visits                   what a visit of a trainable block takes in `overhead.py`, forward and backward
    overlap                  steps of `overlap.py`'s balanced setting with paced compute, update="auto"
    update, and its format   AdamW on split masters by one thread, with moments in this format (`adamw.py`)
    clipped update           the same, with a factor for the gradient
    draft                    the same as a draft, which can be undone

While one process measures, the other waits for its turn. A process may be faster than its like by where its memory
lies, and a model by where it lies in its process. So both start anew for each round, and in a round both make their
models several times. A round's ratio, this tree's time by the other's, is the median of its pairs. The table shows the
median of the rounds and its 95 % interval: that of the order statistics.

    python benchmarks/against.py ../other    # a built checkout of another commit; the same tree shows the noise

Each tree measures with its own `overhead.py` and `overlap.py`, because names inside of noria change.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

TREE = Path(__file__).resolve().parent.parent
FORMATS = ("fp32", "bf16", "8bit")
VARIED = [f"{kind}, {state}" for kind in ("clipped update", "draft") for state in FORMATS]
UPDATES = ["update, bf16", "update, 8bit", *VARIED]
NAMES = [*UPDATES, "steps, torch", "steps, fused", "visits", "overlap"]


def measures(quick: bool, blocks: int) -> dict[str, Callable[[], Callable[[], float]]]:
    """What to measure, by name: a call makes the models, and returns what measures once."""
    import overhead
    import overlap
    import torch

    from examples.gpt import GPT, GPTConfig

    def steps(kernel: str) -> Callable[[], float]:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.manual_seed(0)
        run = overhead.Run(GPT(GPTConfig(num_layers=blocks, num_heads=8, width=512)), True, kernel)
        tokens = torch.randint(0, 4096, (1, 256))
        return lambda: overhead._common.seconds(lambda: run.step(tokens))

    def visits() -> float:
        torch.set_num_threads(1)
        taken = overhead.hooks(64, 8, frozen=False)
        return median(taken["wrapped forward"]) + median(taken["wrapped backward"])

    def overlapped() -> Callable[[], float]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        links, forward_s, backward_s = 8 if quick else 32, 0.003, 0.0045
        model = overlap.Chain(links, 256, forward_s, backward_s)
        limits = overlap.limits_of(overlap.SETTINGS[0], model, links * forward_s * 1e6, links * backward_s * 1e6)
        run = overlap.Run(model, torch.randn(32, 256), limits, window=min(8, links), update="auto")

        def turn() -> float:
            run.forget()
            run.block(4)
            return median(run.times)

        return turn

    def updates(name: str) -> Callable[[], float]:
        import adamw

        memory, pool = adamw.Memory((1 if quick else 16) << 20), adamw._C.HostOptimizer(1)
        kind, state = name.split(", ")
        job, verb = memory.job("adamw", True, 0.37 if kind == "clipped update" else 1.0, state), "update"
        if kind == "draft":
            job, verb = job.drafting(memory.log.data_ptr(), *memory.log_size), "draft"

        def turn() -> float:
            memory.renew()
            return overhead._common.seconds(lambda: pool.submit(job, verb=verb).wait_passed())

        return turn

    return {
        **{name: functools.partial(updates, name) for name in UPDATES},
        "steps, torch": lambda: steps("torch"),
        "steps, fused": lambda: steps("fused"),
        "visits": lambda: visits,
        "overlap": overlapped,
    }


def serve(tree: Path, quick: bool, blocks: int) -> None:
    """Measures what each line of the input names, with this tree's noria, and prints a number for it.

    An empty line comes before another name, or if the models are to be made anew.
    """
    sys.path[0] = str(tree / "benchmarks")  # its own helpers
    known, measure = measures(quick, blocks), None
    import noria

    print(json.dumps({"noria": noria.__file__}), flush=True)
    for line in sys.stdin:
        name = line.strip()
        if not name:
            measure = None
            gc.collect()
            continue
        if measure is None:
            measure = known[name]()
            for _ in range(3):  # the passes are known by then
                measure()
        print(json.dumps(measure()), flush=True)


class Server:
    """One of the two processes."""

    def __init__(self, tree: Path, quick: bool, blocks: int) -> None:
        command = [sys.executable, __file__, "--serve", str(tree), str(int(quick)), str(blocks)]
        paths = os.pathsep.join([str(tree / "python"), str(tree)])
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": paths, "OMP_WAIT_POLICY": "passive"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        found = Path(self._read()["noria"])
        if tree / "python" not in found.parents:
            raise SystemExit(f"{tree} is not a built checkout of noria: its process imported {found}")

    def measure(self, name: str) -> float:
        self._write(name)
        return float(self._read())

    def forget(self) -> None:
        """The next measure makes its models anew."""
        self._write("")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_read` tells how the process ended
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a measuring process ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate("")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median: between two of the sorted values, by the binomial distribution."""
    ordered, tail, cut = sorted(values), 0.0, 0
    while tail + math.comb(len(ordered), cut) / 2 ** len(ordered) <= 0.025:
        tail += math.comb(len(ordered), cut) / 2 ** len(ordered)
        cut += 1
    return ordered[max(cut - 1, 0)], ordered[min(len(ordered) - cut, len(ordered) - 1)]


def main() -> int:
    import _common

    parser = _common.parser_of(__doc__)
    parser.add_argument("other", type=Path, help="a built checkout of another commit")
    parser.add_argument("--rounds", type=int, help="starts of the two processes; from 6 on there is an interval")
    parser.add_argument("--draws", type=int, default=1, help="how often models are made in each round")
    parser.add_argument("--pairs", type=int, help="of each measure for each draw")
    parser.add_argument("--blocks", type=int, help="of the GPT; default: 12")
    parser.add_argument("--only", choices=NAMES)
    args = parser.parse_args()
    rounds, pairs = args.rounds or (2 if args.quick else 12), args.pairs or (2 if args.quick else 8)
    blocks = args.blocks or (3 if args.quick else 12)
    began = _common.hardware()
    other = args.other.resolve()
    trees = {"this": TREE, "other": other}
    chosen = NAMES if args.only is None else [args.only]
    samples = {name: {which: list[list[float]]() for which in trees} for name in chosen}
    for number in range(rounds):
        order = list(trees) if number % 2 else list(reversed(trees))
        servers = {which: Server(trees[which], args.quick, blocks) for which in order}
        for name in chosen:
            taken = {which: list[float]() for which in trees}
            for draw in range(args.draws):
                for server in servers.values():
                    server.forget()
                for pair in range(pairs):
                    for which in order if (draw + pair) % 2 else reversed(order):
                        taken[which].append(servers[which].measure(name))
            for which in trees:
                samples[name][which].append(taken[which])
        for server in servers.values():
            server.close()
    summary: dict[str, Any] = {}
    rows = []
    for name, by_tree in samples.items():
        ratios = [
            median(ours / theirs for ours, theirs in zip(*of_round, strict=True))
            for of_round in zip(by_tree["this"], by_tree["other"], strict=True)
        ]
        low, high = interval(ratios)
        summary[name] = {"ratio": median(ratios), "low": low, "high": high}
        times = [median(chain.from_iterable(by_tree[which])) for which in trees]
        rows.append([name, *times, *(f"{x:.4f}" for x in (median(ratios), low, high))])
    columns = ["s, or us a visit", "this", "other", "ratio", "95 %, from" if rounds >= 6 else "all, from", "to"]
    _common.show(f"this tree and another, {rounds} rounds of {args.draws * pairs} pairs", columns, rows)
    commits = {
        which: subprocess.run(
            ["git", "-C", tree, "describe", "--always", "--dirty"], capture_output=True, text=True
        ).stdout.strip()
        for which, tree in trees.items()
    }
    settings = {"rounds": rounds, "draws": args.draws, "pairs": pairs, "blocks": blocks, "commits": commits}
    _common.Result("against", samples, summary, settings).write(args, began)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3] == "1", int(sys.argv[4]))
    else:
        sys.exit(main())
