"""Costs that a run has measured: kept for the same model on the same machine, and for nothing else."""

import dataclasses
import json
import os
import stat

import noria
import pytest
import torch
from noria.planning.cost_cache import cache_folder, load_costs, save_costs
from noria.planning.measured_costs import MeasuredCosts, slowest
from torch import nn

COSTS = MeasuredCosts([1.0, 2.0], [3.0, 4.0], {"fetch": 5.0}, {"fetch": 6.0}, 1, 2, 3, 8, 4, [10, 20], {"Tanh": 30}, 7)


def plan_of(width=8, **policy):
    model = nn.Sequential(nn.Sequential(nn.Linear(width, width)), nn.Sequential(nn.Linear(width, width)))
    return noria.plan(model, torch.optim.AdamW(model.parameters()), device="cpu", **policy)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NORIA_CACHE", str(tmp_path / "noria"))
    return tmp_path / "noria"


def only_file(folder):
    [path] = (folder / "costs").iterdir()
    return path


def test_costs_come_back_as_they_were(folder):
    assert save_costs(plan_of(), COSTS, "[2, 8]") == ""
    found = load_costs(plan_of())
    assert (found.costs, found.note) == (COSTS, "") and "[2, 8]" in found.measured


def test_another_model_or_policy_has_none(folder):
    save_costs(plan_of(), COSTS, "")
    others = ({"width": 16}, {"update": "backward"}, {"dtype": torch.bfloat16}, {"files": "/another/disk"})
    for other in (plan_of(**each) for each in others):
        assert load_costs(other).costs is None
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert load_costs(plan_of()).costs is None
    finally:
        torch.set_num_threads(threads)
    assert load_costs(plan_of(window=2)).costs == COSTS  # what moves costs the same in any window


@pytest.mark.parametrize(
    "edit",
    [
        lambda told: "{",
        lambda told: "[" * 100_000,
        lambda told: "[]",
        lambda told: json.dumps(told | {"costs": {}}),
        lambda told: json.dumps(told | {"costs": told["costs"] | {"forward_us": [1.0]}}),
        lambda told: json.dumps(told | {"costs": told["costs"] | {"saved": [1.0]}}),
        lambda told: json.dumps(told | {"costs": told["costs"] | {"forward_us": [1.0, -1.0]}}),
        lambda told: json.dumps(told | {"costs": told["costs"] | {"hooks_us": float("nan")}}),
        lambda told: json.dumps(told | {"costs": told["costs"] | {"hooks_us": "long"}}),
        lambda told: json.dumps(told | {"costs": told["costs"] | {"gib_s": [1.0]}}),
        lambda told: json.dumps(told | {"costs": told["costs"] | {"more": 1.0}}),
        lambda told: json.dumps({"costs": told["costs"]}),
    ],
)
def test_a_damaged_file_is_ignored_and_said(folder, edit):
    save_costs(plan_of(), COSTS, "")
    path = only_file(folder)
    path.write_text(edit(json.loads(path.read_text())))
    found = load_costs(plan_of())
    assert found.costs is None and str(path) in found.note and "not used" in found.note


def test_a_foreign_file_is_ignored_and_said(folder):
    save_costs(plan_of(), COSTS, "")
    path = only_file(folder)
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"of": told["of"] | {"cpu": "another"}}))
    found = load_costs(plan_of())
    assert found.costs is None and "another model or machine" in found.note


def test_a_folder_that_cannot_be_written_is_said(folder):
    folder.write_text("a file in its place")
    assert "not kept" in save_costs(plan_of(), COSTS, "")
    assert load_costs(plan_of()).costs is None


def test_a_file_that_cannot_be_read_is_said(folder):
    save_costs(plan_of(), COSTS, "")
    path = only_file(folder)
    path.unlink()
    path.mkdir()
    assert "cannot be read" in load_costs(plan_of()).note


def test_nothing_is_left_beside_the_file_and_others_may_not_read_it(folder):
    for _ in range(3):
        save_costs(plan_of(), COSTS, "")
    assert stat.S_IMODE(os.stat(only_file(folder)).st_mode) & 0o077 == 0


def test_the_folder_is_the_users_unless_it_is_set(monkeypatch, tmp_path):
    monkeypatch.delenv("NORIA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "noria"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "noria"
    monkeypatch.setenv("NORIA_CACHE", "")
    assert cache_folder() is None
    assert save_costs(plan_of(), COSTS, "") == "" and load_costs(plan_of()).costs is None
    assert not (tmp_path / ".cache").exists()


def test_ranks_count_on_the_slowest_of_each():
    other = MeasuredCosts([2.0, 1.0], [1.0, 5.0], {"fetch": 4.0, "drain": 1.0}, {"fetch": 7.0}, 0, 0, 1, 0, 5, [1, 30])
    both = slowest([COSTS, other])
    assert both == slowest([other, COSTS])
    assert both == MeasuredCosts(
        [2.0, 2.0], [3.0, 5.0], {"drain": 1.0, "fetch": 4.0}, {"fetch": 7.0}, 1, 2, 1, 8, 5, [10, 30], {"Tanh": 30}, 7
    )
    assert slowest([COSTS]) == COSTS
    assert slowest([COSTS, dataclasses.replace(other, saved=[])]).saved == []
