"""Do stores that bypass the caches, prefetching, larger pages or another order of the arrays make updates faster?

AdamW's update, a clipped one and a draft on split masters, for each format of moments, on arrays that no cache holds:
the loops of this machine's widest instruction set, 256 elements a call. Each variant changes one thing of the base,
which is as in noria: an array for each stream, huge pages, plain stores, no prefetches but noria's own.

- All streams are prefetched 1, 2, 4 or 8 calls ahead.
- Pages have 4 KiB.
- The streams begin at different places of a page, in place of the same one. Or pieces of all streams follow each other
  in one array, 2 MiB of the bf16 weights, for example.
- An update's results, or a draft's log, are made in the first cache, and copied by streaming stores.
- Of a clipped update: the gradient of several calls is clipped at once.

All variants take turns on the same values, and must make the same bits. Ratios are of neighbours in one turn. For x86.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import _common
from noria import _C
from update_parts import MARCH, compile_kernels

BASE, HUGE_PAGES = "base", "huge pages, KiB"
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

Samples = dict[str, dict[str, list[float]]]  # seconds (KiB of HUGE_PAGES), by way and variant


def measure(program: Path, count: int, threads: int, rounds: int) -> Samples:
    command = [str(program), str(count), str(threads), str(rounds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    samples: Samples = {}
    for line in done.stdout.splitlines():
        way, variant, value = line.split("\t")
        samples.setdefault(way, {}).setdefault(variant, []).append(float(value))
    return samples


def summary_of(samples: Samples, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way, times in samples.items():
        found[way] = {
            variant: {
                "gparam_s": count / median(taken) / 1e9,
                "over_base": _common.paired_ratio(taken, times[BASE])["of_pairs"],
            }
            for variant, taken in times.items()
            if variant != HUGE_PAGES
        }
    return found


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--params", type=int, help="millions (2**20) of parameters; default 32, with --quick 2")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="how many, each measured by itself")
    parser.add_argument("--rounds", type=int, help="turns of all variants; default 15, with --quick 2")
    args = parser.parse_args()
    sets = [each for each in _C.instruction_sets() if each in MARCH]
    if not sets:
        parser.error("it needs an x86 processor")
    count, rounds = (args.params or (2 if args.quick else 32)) << 20, args.rounds or (2 if args.quick else 15)
    began = _common.hardware()
    samples: dict[str, Samples] = {}
    summary: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "variants"
        compile_kernels(program, "benchmarks/_memory_variants.cpp", sets[-1])
        for threads in args.threads:
            key = f"{threads} threads"
            samples[key] = measure(program, count, threads, rounds)
            summary[key] = found = summary_of(samples[key], count)
            variants = list(dict.fromkeys(chain(*found.values())))
            rows = [
                [variant, *(f"{its[variant]['over_base']:.3f}" if variant in its else "" for its in found.values())]
                for variant in variants
            ]
            rows.append(["base, Gparam/s", *(f"{each[BASE]['gparam_s']:.2f}" for each in found.values())])
            columns = [way.replace(" moments", "") for way in found]
            _common.show(f"time over the base's, {sets[-1]}, {count >> 20} Mi parameters, {key}", ["", *columns], rows)
    ended = {"load_1min_at_end": _common.hardware()["load_1min"]}
    pages = PAGES.read_text().strip() if PAGES.exists() else "unknown"
    settings = {"params": count, "rounds": rounds, "instruction_set": sets[-1], "transparent_hugepage": pages}
    _common.Result("memory_variants", samples, summary, settings | ended).write(args, began)
    told = []
    for variant in variants[1:]:
        ways = [its for found in summary.values() for its in found.values() if variant in its]
        ratios = [its[variant]["over_base"] for its in ways]
        told.append(f"{variant} {min(ratios):.2f} to {max(ratios):.2f}")
    print(f"verdict: AdamW, split, time over the base's: {'; '.join(told)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
