"""Environments of their own for the rivals, in build/rivals, each beside the torch of this one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from benchmarks.systems.catalogue import OWN, SYSTEMS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "rivals"
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
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(root)], check=True)
    site = subprocess.run(
        [str(root / "bin" / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    shared = dict.fromkeys([str(Path(torch.origin).parents[1]), sysconfig.get_path("purelib")])
    Path(site, "torch_of_this_environment.pth").write_text("\n".join(shared) + "\n")
    command = [str(root / "bin" / "python"), "-m", "pip", "install", "-q", *packages]
    if wheels is not None:
        command += ["--no-index", "--find-links", str(wheels)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return (errors or done.stderr.splitlines() or ["pip failed"])[-1]
    (root / _STAMP).write_text("\n".join(packages) + "\n")
    return None


def variables_of(name: str) -> dict[str, str]:
    """Of a system's process: what it compiles stays in its environment, and systems do not meet at a port."""
    environment = SYSTEMS[name].environment
    folder = python_of(environment).parent
    found = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "MASTER_PORT": str(29517 + list(SYSTEMS).index(name)),
        "PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1",
    }
    if environment != OWN:
        found["TORCH_EXTENSIONS_DIR"] = str(FOLDER / environment / "extensions")
    if environment == "deepspeed":
        found |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        found |= {} if _has_cuda() else {"DS_ACCELERATOR": "cpu"}
    return found


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
