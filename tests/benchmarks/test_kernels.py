"""The benchmarks of the host's updates run, and their results have what their questions ask for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from noria import _C

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import adamw

ROOT = Path(__file__).resolve().parents[2]
IS_X86 = _C.instruction_sets()[0] == "baseline"


def result(tmp_path: Path, program: str, *words: Any) -> dict[str, Any]:
    out = tmp_path / "result.json"
    command = [sys.executable, f"benchmarks/{program}", "--quick", *map(str, words), "--out", str(out)]
    paths = os.pathsep.join([str(ROOT / "python"), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


# ---- adamw.py ------------------------------------------------------------------------------------------------------


def test_each_way_of_an_update_has_a_share_of_its_own_limit(tmp_path):
    found = result(tmp_path, "adamw.py", "--params", 1, "--rounds", 2, "--threads", 1)
    ways, samples = found["summary"]["1 threads"], found["samples"]["1 threads"]
    assert {len(taken) for taken in samples.values()} == {2} and samples.keys() == ways.keys()
    limits = {name for name in ways if name.startswith("limit ")}
    assert len(limits) == 2 * 5 * 3  # formats of masters; none, one or two moments, bf16, 8 bits; what is done to logs
    for name, way in ways.items():
        assert way["gparam_s"]["best"] >= way["gparam_s"]["median"] > 0 and way["gb_s"]["median"] > 0
        if name in limits or name == "triad":
            assert "share_of_limit" not in way
        else:
            assert way["limit"] in limits and way["share_of_limit"] > 0
    for moments in ("", ", bf16 moments", ", 8bit moments"):
        assert {f"adamw split {way}{moments}, clipped" for way in ("update", "draft")} <= ways.keys()


@pytest.fixture(scope="module")
def ways():
    memory, pool = adamw.Memory(1 << 16), _C.HostOptimizer(1)
    yield memory, adamw.noria_ways(memory, pool, adamw.Limits(memory, 1))
    pool.close()


def test_a_limit_moves_the_bytes_of_its_ways_without_the_scales_of_codes(ways):
    memory, found = ways
    for name, way in found.items():
        if way.limit is not None:
            scales = 2 * 2 * 4 * memory.count // _C.STATE_BLOCK if "8bit" in name else 0
            assert found[way.limit].num_bytes == way.num_bytes - scales, name


def test_limits_change_no_value_and_write_logs(ways):
    memory, found = ways
    memory.renew()
    arrays = {**memory.own, "gradient": memory.gradient, "half gradient": memory.half_gradient}
    before = {name: array.clone() for name, array in arrays.items()}
    limits = {name: way for name, way in found.items() if way.limit is None}
    assert len(limits) == 30
    for name, limit in limits.items():
        memory.log_of_limits.fill_(1)
        limit.work()
        assert (memory.log_of_limits == (0 if "written" in name else 1)).all(), name
        for each, array in arrays.items():
            assert torch.equal(array.view(torch.uint8), before[each].view(torch.uint8)), (name, each)


# ---- others --------------------------------------------------------------------------------------------------------


def test_updates_and_copies_share_memory_in_all_combinations(tmp_path):
    words = ("--device", "cpu", "--params", 1, "--mib", 1, "--rounds", 1, "--seconds", 0.01)
    found = result(tmp_path, "host_memory.py", *words)
    assert len(found["summary"]) == 7 and len(found["summary"]["update + fetch + drain"]) == 3
    assert all(rate > 0 for rates in found["summary"].values() for rate in rates.values())


@pytest.mark.rest
def test_torch_and_the_pool_share_cores_under_each_policy(tmp_path):
    found = result(tmp_path, "threads.py", "--rounds", 1)
    assert list(found["summary"]) == ["passive", "unset", "active"]
    for cases in found["summary"].values():
        assert {"alone", "pool idle", "updating, 1"} <= cases.keys()
        assert cases["updating, 1"]["gparam_s"] > 0 and cases["updating, 1"]["both_at_once"] > 0


@pytest.mark.rest
@pytest.mark.skipif(not IS_X86, reason="it knows the instruction sets of x86")
def test_parts_of_an_update_are_told_for_each_instruction_set(tmp_path):
    found = result(tmp_path, "update_parts.py")
    assert list(found["summary"]) == _C.instruction_sets()
    for parts in found["summary"].values():
        ways = [part for name, part in parts.items() if name.endswith((", update", ", draft"))]
        assert len(ways) == 12 and all(way["cycles"] > 0 and way["cores_for_0.9"] > 0 for way in ways)
        assert parts["hash"]["cycles"] > 0 and parts["8-bit split: step, and encode"]["cycles"] > 0


@pytest.mark.rest
@pytest.mark.skipif(not IS_X86, reason="it is for x86")
def test_variants_of_memory_make_the_same_bits_and_are_compared_with_the_base(tmp_path):
    found = result(tmp_path, "memory_variants.py", "--rounds", 1)
    assert list(found["summary"]) == ["1 threads", "2 threads"]
    for ways in found["summary"].values():
        assert len(ways) == 9
        for way, variants in ways.items():
            assert len(variants) == (5 if "clipped" in way else 9) and variants["base"]["over_base"] == 1
            assert all(each["over_base"] > 0 and each["gparam_s"] > 0 for each in variants.values())


@pytest.mark.parametrize("optimizer", ["adafactor", pytest.param("muon", marks=pytest.mark.rest)])
def test_an_optimizer_of_matrices_is_compared_with_that_of_torch(tmp_path, optimizer):
    found = result(tmp_path, "matrix_optimizers.py", "--optimizer", optimizer)
    assert list(found["summary"]) == ["fp32", "bf16", "bf16, momentum in 8 bits"][: 3 if optimizer == "muon" else 2]
    for its in found["summary"].values():
        assert set(its["step_s"]) == {"plain", "torch", "fused"} and its["fused_gib_s"] > 0
        assert its["torch_over_fused"]["of_pairs"] > 0 and its["home_bytes"]["fused"] > 4


@pytest.mark.rest
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_losses_are_told_for_each_format_of_the_moments(tmp_path, optimizer):
    small = ["--steps", 2, "--seeds", 2, "--width", 32, "--layers", 1]
    found = result(tmp_path, "states.py", "--optimizer", optimizer, *small)
    assert {"fp32", "bf16", "8bit"} < set(found["summary"])
    for state, its in found["summary"].items():
        assert len(its["held_out"]) == 2 and its["mean"] == pytest.approx(sum(its["held_out"]) / 2)
        assert its["mean_difference"] == 0 or state != "fp32"


@pytest.mark.rest
def test_host_bytes_of_a_parameter_are_told(tmp_path):
    way = "noria backward, bf16, 8-bit moments"
    found = result(tmp_path, "host_bytes.py", "--only", way)
    assert list(found["summary"]) == [way] and 4 < found["summary"][way]["slope"] < 20
