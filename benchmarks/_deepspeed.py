"""Scripts that run in DeepSpeed's environment (systems/pins.toml); nothing of it is copied here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import _common  # noqa: F401 - makes `benchmarks` importable

from benchmarks.systems.environments import install, pins, python_of, variables_of

HERE = Path(__file__).resolve().parent
ENVIRONMENT, SYSTEM = "deepspeed", "ZeRO-2 Offload"
VERSION = pins()[ENVIRONMENT][0].split("==")[1]


def environment() -> dict[str, str]:
    """Of its processes: one rank, the CPU as its device, and a place for what it compiles. Installs it first."""
    if reason := install(ENVIRONMENT):
        raise SystemExit(f"DeepSpeed cannot be installed: {reason}")
    return os.environ | variables_of(SYSTEM)


def run(script: str, *words: str) -> Any:
    """What a script beside this one prints last, as JSON."""
    env = environment()
    command = [str(python_of(ENVIRONMENT)), str(HERE / script), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
