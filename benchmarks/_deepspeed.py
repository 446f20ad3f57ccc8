"""DeepSpeed from PyPI in an environment of its own (build/deepspeed), with the torch of this one; nothing of it is
copied here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VERSION = "0.19.8"


def python() -> Path:
    """The environment's interpreter; made at the first call."""
    root = HERE.parent / "build" / "deepspeed"
    found = root / "bin" / "python"
    if not found.exists():
        subprocess.run([sys.executable, "-m", "venv", str(root)], check=True)
        site = subprocess.run(
            [str(found), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        Path(site, "torch_of_this_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
        needed = ["setuptools", "wheel", "ninja", f"deepspeed=={VERSION}"]
        subprocess.run([str(found), "-m", "pip", "install", "-q", *needed], check=True)
    return found


def environment() -> dict[str, str]:
    """Of its processes: one rank, the CPU as its device, and a place for what it compiles."""
    bin_folder = python().parent
    return os.environ | {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(bin_folder.parent / "extensions"),
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29517",
    }


def run(script: str, *words: str) -> Any:
    """What a script beside this one prints last, as JSON."""
    command = [str(python()), str(HERE / script), *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
