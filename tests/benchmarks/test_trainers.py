"""The benchmark of trainers: what takes turns does the same work, and its result has all questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.rest


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("trainers") / "result.json"
    command = [sys.executable, "benchmarks/trainers.py", "--quick", "--rounds", "2", "--out", str(out)]
    paths = os.pathsep.join([str(ROOT / "python"), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_trainers_take_turns_and_end_with_the_same_losses(result):
    found, samples = result["summary"]["step"], result["samples"]["step"]
    assert {len(taken) for taken in samples.values()} == {2} and len(samples) == 4
    assert found["same_losses_to_the_bit"], found["losses"]
    assert found["fetches"]["streamed"] > found["fetches"]["resident"]  # which fetches what was updated


def test_adapters_learn_the_same_over_a_base_that_streams(result):
    by_share = result["summary"]["adapters"]["bf16"]
    assert set(by_share) == {"0.97", "2.0"}
    for found in by_share.values():
        assert found["same_losses_to_the_bit"] and found["speed"] > 0
        assert found["fetches"] > 6 * 2 * 5  # each layer, twice in a round
    assert by_share["0.97"]["limits"]["fetch"][0] > 0


def test_loads_and_generate_are_there(result):
    assert set(result["summary"]["load"]["s_per_gib"]) == {"wrap", "wrap, frozen", "load wrapped", "load plain"}
    assert result["summary"]["generate"]["same_tokens"]
    assert result["settings"]["rounds"] == 2 and "--quick" in result["command"]
