"""The benchmark of predictions runs, in each mode, and no setting is dropped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import prediction


def test_there_are_42_settings_and_each_has_a_name_of_its_own():
    assert len({case.name for case in prediction.CASES}) == len(prediction.CASES) == 42


@pytest.mark.parametrize(
    "name",
    [
        "balanced, drafts",
        "balanced, in backward",
        "update-bound, drafts, unequal units",
        "update-bound, updated on the device",
    ],
)
def test_a_setting_runs_within_its_memory_and_is_predicted(name, tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "SETTLING", 2)
    monkeypatch.setattr(prediction, "COSTS", 2)
    [case] = [case for case in prediction.CASES if case.name == name]
    found = prediction.run(case, 2, tmp_path)
    assert found["is_within_plan"]
    compute_us = 1e6 * sum(case.hidden) / prediction.WIDTH * (prediction.FORWARD_S + prediction.BACKWARD_S)
    assert found["predicted_us"] >= compute_us and min(found["measured_us"]) >= compute_us
