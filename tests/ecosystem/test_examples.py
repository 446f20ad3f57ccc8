"""The examples with trainers run, say before they train what will fit, and go on from what they saved."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

from PIL import Image
from safetensors.torch import load_file

from tests.ecosystem import tiny

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


def losses_of(printed: str) -> list[float]:
    return [float(each) for each in re.findall(r"(?:^step +\d+  loss |\{'loss': ')([\d.]+)", printed, re.M)]


def assert_falls(printed: str) -> None:
    losses = losses_of(printed)
    assert len(losses) >= 6 and mean(losses[-3:]) < 0.98 * mean(losses[:3]), losses


def test_trl_fine_tunes_saves_and_goes_on(tmp_path: Path):
    small = ["--context", "16", "--batch", "1", "--out", str(tmp_path)]
    assert_told(run("06_trainer.py", "--steps", "2", *small))
    printed = run("06_trainer.py", "--steps", "3", "--resume", str(tmp_path / "checkpoint-2"), *small)
    assert "'loss'" in printed and (tmp_path / "checkpoint-3" / "model.safetensors").is_file()


def test_lightning_trains_a_gpt(tmp_path: Path):
    small = ["--layers", "4", "--width", "64", "--context", "32", "--text-bytes", "40000", "--device-memory", "1MiB"]
    assert_told(run("08_lightning.py", "--steps", "3", "--out", str(tmp_path), *small))


def test_adapters_learn_over_a_base_in_four_bits(tmp_path: Path):
    printed = run("07_qlora.py", "--steps", "6", "--context", "64", "--batch", "1", "--out", str(tmp_path))
    assert_told(printed)
    assert_falls(printed)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved and all("lora" in name and value.any() for name, value in saved.items())
    local = ["--model", str(tmp_path / "base"), "--text", str(EXAMPLES / "text.py"), "--context", "16", "--steps", "1"]
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    assert "saved" in run("07_qlora.py", *local, "--out", str(tmp_path / "again"))


def test_a_diffusion_model_learns_letters_and_writes_a_word(tmp_path: Path):
    small = ["--layers", "4", "--width", "64", "--device-memory", "1MiB", "--sampling-steps", "2", "--word", "ab1"]
    printed = run("09_diffusion.py", "--steps", "12", *small, "--out", str(tmp_path))
    assert_told(printed)
    assert_falls(printed)
    with Image.open(tmp_path / "word.png") as word:
        assert word.size == (3 * 16 * 4, 16 * 4) and len(set(word.tobytes())) > 16
    again = run("09_diffusion.py", "--steps", "1", "--resume", str(tmp_path), *small, "--out", str(tmp_path))
    assert losses_of(again)[0] < 0.9 * losses_of(printed)[0]  # of the same letters and noise
