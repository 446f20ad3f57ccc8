"""Where does the time of an update on one core go, if memory costs nothing?

AdamW's update and its draft, for each format of master and moments, on a block that stays in the first cache; then the
parts of an update with 8-bit moments, and the hash that gives each element its random bits. One thread; nanoseconds and
cycles for each element, for each instruction set of x86 that this machine has.

The last columns say how many cores it takes until memory is the wall: `--gb-s` is what memory reads and writes in a
second (`benchmarks/adamw.py` measures it), and the cores are those that reach 0.9 of it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _common
from noria import _C

# As CMakeLists.txt has them.
FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS_OF_GCC = ["-fschedule-insns"]
MARCH = {"baseline": "x86-64", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}
BYTES = {"fp32 moments": 16, "bf16 moments": 8, "8-bit moments": 4 + 16 / _C.STATE_BLOCK}
BYTES_OF_MASTER = {"whole": 12, "split": 10}  # with the gradient


def compile_kernels(program: Path, source: str, instruction_set: str) -> None:
    """Compiles a program with noria's kernels, as noria is compiled."""
    version = subprocess.run([_common.CXX, "--version"], check=True, capture_output=True, text=True).stdout
    flags = FLAGS + (FLAGS_OF_GCC if "Free Software Foundation" in version else [])
    _common.compile_cxx(program, [source], [*flags, f"-march={MARCH[instruction_set]}", "-pthread"])


def parts(instruction_set: str) -> dict[str, float]:
    """Nanoseconds by name."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "parts"
        compile_kernels(program, "benchmarks/_update_parts.cpp", instruction_set)
        lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: float(time) for name, time in (line.split("\t") for line in lines)}


def bytes_of(name: str) -> float | None:
    """What an update or a draft reads and writes for each element. None for the parts of one."""
    moments, _, rest = name.partition(", ")
    master, _, way = rest.partition(", ")
    if moments not in BYTES:
        return None
    return BYTES[moments] + BYTES_OF_MASTER[master] + (1 if way == "draft" else 0)


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--turns", type=int, help="of the whole measurement; the best of each part counts")
    parser.add_argument("--gb-s", type=float, default=40.0, help="of memory, all cores together")
    args = parser.parse_args()
    began = _common.hardware()
    samples: dict[str, list[dict[str, float]]] = {}
    summary: dict[str, Any] = {}
    for instruction_set in [each for each in _C.instruction_sets() if each in MARCH]:
        turns = [parts(instruction_set) for _ in range(args.turns or (1 if args.quick else 5))]
        samples[instruction_set] = turns
        best = {name: min(turn[name] for turn in turns) for name in turns[0]}
        cycle = best.pop("cycle")
        summary[instruction_set] = {"ns_of_a_cycle": cycle}
        rows = []
        for name, time in best.items():
            moved = bytes_of(name)
            found = {"ns": time, "cycles": time / cycle}
            if moved is not None:
                found |= {"bytes": moved, "cores_for_0.9": 0.9 * args.gb_s * time / moved}
            summary[instruction_set][name] = found
            cells = [f"{moved:.1f}", f"{found['cores_for_0.9']:.1f}"] if moved is not None else ["", ""]
            rows.append([name, f"{time:.3f}", f"{time / cycle:.2f}", *cells])
        columns = ["", "ns", "cycles", "bytes", f"cores for 0.9 of {args.gb_s:g} GB/s"]
        _common.show(f"{instruction_set}: one element, one core, {1 / cycle:.2f} GHz", columns, rows)
    _common.Result("update_parts", samples, summary, {"gb_s": args.gb_s}).write(args, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
