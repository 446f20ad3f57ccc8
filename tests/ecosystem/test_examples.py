"""The examples with trainers run, say before they train what will fit, and go on from what they saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(EXAMPLES)]), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def assert_told(printed: str) -> None:
    plan, report = printed.index("\nmemory:\n"), printed.index("\nmemory (planned = taken):\n")
    assert plan < report and "window and gradient buffers" in printed[plan:report]


def test_trl_fine_tunes_saves_and_goes_on(tmp_path: Path):
    small = ["--context", "16", "--batch", "1", "--out", str(tmp_path)]
    assert_told(run("06_trainer.py", "--steps", "2", *small))
    printed = run("06_trainer.py", "--steps", "3", "--resume", str(tmp_path / "checkpoint-2"), *small)
    assert "'loss'" in printed and (tmp_path / "checkpoint-3" / "model.safetensors").is_file()


def test_lightning_trains_a_gpt(tmp_path: Path):
    small = ["--layers", "4", "--width", "64", "--context", "32", "--text-bytes", "40000", "--device-memory", "1MiB"]
    assert_told(run("08_lightning.py", "--steps", "3", "--out", str(tmp_path), *small))
