"""Checks that each room of csrc/ includes only lower steps, and that torch and CUDA stay where they belong.

Run it from anywhere: `python tools/check_layers.py [root]`. Prints one line for each violation.
"""

import re
import sys
from pathlib import Path

STEPS = {"base": 0, "plan": 1, "device": 1, "store": 2, "comm": 2, "optim": 3, "engine": 4, "testing": 4, "bindings": 5}
SUFFIXES = {".h", ".cpp", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)

TORCH = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^Python\.h$")
CUDA = re.compile(r"^(cuda|nvtx3/|nv/|cub/|thrust/|driver_types|vector_types|device_launch_parameters|crt/)")
CUDA_HOME = "tests/csrc/device/fake_cuda/"  # the product has declarations of its own: csrc/device/cuda_runtime.h


def included(text: str) -> list[tuple[bool, str]]:
    """(written in quotes, path) of every include of a source text."""
    return [(quote == '"', path) for quote, path in INCLUDE.findall(text)]


def violations_of(file: str, text: str, known: set[str]) -> list[str]:
    """What is wrong with the includes of `file`, a path below the root; `known`: all such paths."""
    room = file.split("/")[1] if file.startswith("csrc/") else None
    found = []
    if room is not None and room not in STEPS:
        return [f"{file}: {room} is no room of the staircase"]
    for in_quotes, path in included(text):
        if TORCH.match(path) and room is not None and room != "bindings":
            found.append(f"{file}: {path}: LibTorch, Python and pybind11 stop at bindings/")
        if CUDA.match(path) and not file.startswith(CUDA_HOME):
            found.append(f"{file}: {path}: no CUDA header is needed: device/cuda_runtime.h declares what is called")
        if not in_quotes or room is None or CUDA.match(path):
            continue
        target = path.split("/")[0]
        if f"csrc/{path}" not in known:
            found.append(f"{file}: {path}: no such file in csrc/ (include paths are relative to it)")
        elif target != room and STEPS[target] >= STEPS[room]:
            found.append(f"{file}: {path}: {room} (step {STEPS[room]}) may not include {target} (step {STEPS[target]})")
    if file.endswith(".h") and "#pragma once" not in text:
        found.append(f"{file}: a header without #pragma once")
    return found


def check(root: Path) -> list[str]:
    files = sorted(
        path
        for folder in ("csrc", "tests/csrc")
        for path in (root / folder).rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    )
    known = {path.relative_to(root).as_posix() for path in files}
    return [
        line
        for path in files
        for line in violations_of(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"), known)
    ]


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    found = check(root)
    print("\n".join(found) if found else "the staircase holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
