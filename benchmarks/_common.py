"""What every benchmark shares: the machine it ran on, statistics of paired samples, and the result file.

A result is `results/<question>_<hardware>_<yyyymm>.json`: versions, hardware, command line, raw samples, summary.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import queue
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `examples`

os.environ["NORIA_CACHE"] = ""  # no run starts with the costs of another one

import torch
import torch.multiprocessing as mp
from noria.doctor import versions
from noria.host.processor import cpu_name
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CXX = os.environ.get("CXX", "c++")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and shorter: to see that it runs")
    parser.add_argument("--out", type=Path, help="file for the result; default: benchmarks/results/...")
    return parser


def compile_cxx(out: Path, sources: Sequence[str], flags: Sequence[str]) -> None:
    """Compiles C++ files, named from the project's root, to a program or a library."""
    files = [str(ROOT / source) for source in sources]
    command = [CXX, "-std=c++20", "-O3", f"-I{ROOT / 'csrc'}", *flags, *files]
    subprocess.run([*command, "-o", str(out)], check=True)


def hardware() -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": torch.get_num_threads(),
        "machine": platform.machine(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_1min": round(_load(), 2),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        found["gpu_driver"] = _gpu_driver()
    return found


def _gpu_driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return "unknown"


def _load() -> float:
    try:
        return float(Path("/proc/loadavg").read_text().split()[0])
    except OSError:
        return float("nan")


def hardware_word() -> str:
    """What the result file is called after: the device that computes, in a word."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else cpu_name()
    words = re.sub(r"\(.*?\)|@.*|processor|cpu|nvidia", " ", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "unknown"


@dataclasses.dataclass
class Result:
    """`samples`: raw, by name; `summary`: what the table shows."""

    question: str
    samples: Mapping[str, Any]
    summary: Mapping[str, Any]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, args: argparse.Namespace, began: Mapping[str, Any]) -> Path:
        """`began`: `hardware()` before the measurement, so that the load is not our own."""
        suffix = "_quick" if args.quick else ""
        name = f"{self.question}_{hardware_word()}_{time.strftime('%Y%m')}{suffix}.json"
        path = args.out or RESULTS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "question": self.question,
            "command": " ".join(["python", _program(), *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "versions": versions(),
            "hardware": began,
            "settings": self.settings,
            "summary": self.summary,
            "samples": self.samples,
        }
        path.write_text(json.dumps(content, indent=1, default=str).replace(f"{ROOT}/", "") + "\n")
        print(f"written: {path}")
        return path


def _program() -> str:
    path = Path(sys.argv[0])
    if path.name == "__main__.py":
        return f"-m benchmarks.{path.parent.name}"
    return f"benchmarks/{path.name}"


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "q25": quantile(values, 0.25), "q75": quantile(values, 0.75)}


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Ratio of the medians, and the median of the ratios of neighbours, which a drift of the machine leaves alone."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"of_medians": median(ours) / median(theirs), "of_pairs": median(ratios)}


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def on_ranks(size: int, act: Callable[..., None], *args: Any) -> list[dict[str, Any]]:
    """What each rank found, by rank: `act(rank, size, meeting, answers, *args)`, a process each, puts (rank, found)
    among the answers. `meeting`: a path for their process group."""
    answers = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, str(Path(folder) / "meeting"), answers, *args)
        ranks = mp.start_processes(act, arguments, nprocs=size, join=False, start_method="spawn")
        found: dict[int, dict[str, Any]] = {}
        while len(found) < size:
            try:
                rank, answer = answers.get(timeout=1)
                found[rank] = answer
            except queue.Empty:
                ranks.join(timeout=0)  # raises where one has failed
        while not ranks.join():
            pass
    return [found[rank] for rank in range(size)]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
