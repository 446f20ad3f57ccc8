"""Environments of their own for the rivals, in build/rivals, each beside the torch of this one; and which of them run
on this machine, as `make rivals` has found."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from benchmarks.systems import beside
from benchmarks.systems.catalogue import OWN, SYSTEMS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "rivals"
STATUS = FOLDER / "status.json"
PINS = Path(__file__).with_name("pins.toml")
_STAMP = ".packages"


def pins() -> dict[str, list[str]]:
    return {name: table["packages"] for name, table in tomllib.loads(PINS.read_text()).items()}


def python_of(environment: str) -> Path:
    """Its interpreter. `environment` OWN: this one."""
    return Path(sys.executable) if environment == OWN else FOLDER / environment / "bin" / "python"


def is_there(environment: str) -> bool:
    if environment == OWN:
        return True
    stamp = FOLDER / environment / _STAMP
    return stamp.exists() and stamp.read_text().split() == pins()[environment]


def install(environment: str, wheels: Path | None = None) -> str | None:
    """Makes it, unless it is there; what pip said where it cannot be. `wheels`: a folder, on a machine without an
    index."""
    if is_there(environment):
        return None
    root, packages = FOLDER / environment, pins()[environment]
    if reason := beside.install(beside.make(root), packages, wheels):
        return reason
    (root / _STAMP).write_text("\n".join(packages) + "\n")
    return None


def variables_of(name: str) -> dict[str, str]:
    """Of a system's process: what it compiles stays in its environment, and systems do not meet at a port."""
    environment = SYSTEMS[name].environment
    folder = python_of(environment).parent
    found = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "MASTER_PORT": str(29517 + list(SYSTEMS).index(name)),
    }
    if environment != OWN:
        extensions = str(FOLDER / environment / "extensions")
        found |= {"TORCH_EXTENSIONS_DIR": extensions, "TRAINSTREAM_CACHE_DIR": extensions}
    if environment == "deepspeed":
        found |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        found |= _exact_pinned_memory() if _has_cuda() else {"DS_ACCELERATOR": "cpu"}
    return found


def unlock() -> None:
    """A build that was killed leaves a lock for which the next one would wait."""
    for lock in FOLDER.glob("*/extensions/**/lock"):
        lock.unlink(missing_ok=True)


def reasons(names: list[str]) -> dict[str, str]:
    """Returns why systems do not run on this machine, or that this is not known."""
    status = json.loads(STATUS.read_text()) if STATUS.exists() else {}
    found = {name: status[name]["reason"] for name in names if name in status and not status[name]["runs"]}
    unknown = "not tried: `make rivals` has not come to it"
    return found | {name: unknown for name in names if name not in status and SYSTEMS[name].environment != OWN}


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@functools.cache
def _exact_pinned_memory() -> dict[str, str]:
    """torch's allocator of pinned memory rounds up to powers of two; not so with these, where this torch knows them.
    For who pins much once: what is smaller than a block that was given back gets another one."""
    found = {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"}
    probe = [sys.executable, "-c", "import torch; torch.empty(3 << 20, dtype=torch.uint8).pin_memory()"]
    return found if subprocess.run(probe, env=os.environ | found, capture_output=True).returncode == 0 else {}
