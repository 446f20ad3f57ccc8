"""The soak's verdict: what counts as flat, and that the smallest tensor that each cycle leaves behind does not."""

from __future__ import annotations

import json
import random
import sys

import pytest
from noria import _C

from benchmarks import soak

CYCLES = 300
REASON = "as the test wants it"
TENSOR = 64 + 400
"""Bytes of the smallest tensor in a CPU's memory: its values, and what torch keeps beside them, at least."""


def wandering(rise: float, width: float, seed: int = 0) -> list[float]:
    """Rises by `rise` in a cycle, and goes up and down by `width`."""
    chance = random.Random(seed)
    return [1e8 + rise * cycle + width * chance.uniform(-1, 1) for cycle in range(CYCLES)]


@pytest.mark.parametrize("seed", range(5))
def test_a_small_tensor_that_each_cycle_leaves_behind_is_no_flat_measure(seed):
    assert soak.verdict_of("bytes in use", wandering(0, 20_000, seed))["is_flat"]
    found = soak.verdict_of("bytes in use", wandering(TENSOR, 20_000, seed))
    assert not found["is_flat"]
    assert found["rise_per_cycle"] == pytest.approx(TENSOR, rel=0.2)


def test_what_grows_while_a_process_gets_warm_does_not_count():
    warm = int(soak.WARM_UP * CYCLES)
    samples = [min(cycle, warm) * 10_000.0 for cycle in range(CYCLES)]
    assert soak.verdict_of("bytes in use", samples)["is_flat"]
    assert not soak.verdict_of("bytes in use", [cycle * 10_000.0 for cycle in range(CYCLES)])["is_flat"]


def test_a_step_late_in_the_soak_counts():
    samples = [0.0] * (CYCLES // 2) + [1e6] * (CYCLES - CYCLES // 2)
    assert not soak.verdict_of("bytes in use", samples)["is_flat"]


def test_a_pool_may_leap_and_must_not_grow_in_each_cycle():
    leaps = [100.0 + 50 * (cycle // 40) for cycle in range(CYCLES)]
    assert soak.verdict_of("events", leaps)["is_flat"] and not soak.verdict_of("threads", leaps)["is_flat"]
    assert not soak.verdict_of("events", [100.0 + cycle for cycle in range(CYCLES)])["is_flat"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("leap_of", ["noria's groups", "torch's own"])
def test_what_torch_keeps_of_groups_does_not_count_and_what_comes_on_top_of_it_does(seed, leap_of):
    """Also if a table grows by a leap, by a group of noria's or by one of torch's own."""
    num_cycles, a_leap = 120, 256 << 10

    def verdicts(more: float) -> dict[str, dict[str, float]]:
        chance, samples, held = random.Random(seed), [], 1e8
        for number in range(num_cycles):
            leaps = {leap_of: a_leap} if number in (40, 90) else {}
            held += 20_000 + more + leaps.get("noria's groups", 0)
            found = {name: held + 2_000 * chance.uniform(-1, 1) for name in ("bytes in use", "resident bytes")}
            found[soak.OF_GROUPS] = 20_000 + leaps.get("torch's own", 0)
            held += 2 * found[soak.OF_GROUPS]
            samples.append(found)
        return soak.verdicts_of(samples)

    assert all(each["is_flat"] for each in verdicts(0).values())
    assert not verdicts(TENSOR)["bytes in use"]["is_flat"]


@pytest.mark.parametrize("measure", ["descriptors", "threads", "tensors", "ledger bytes", *_C.living()])
def test_not_one_thing_more_is_flat(measure):
    assert soak.verdict_of(measure, [7.0] * CYCLES)["is_flat"]
    assert not soak.verdict_of(measure, [7.0] * (CYCLES - 100) + [8.0] * 100)["is_flat"]


def test_thinned_samples_keep_the_first_and_the_last():
    kept = soak.thinned([{"threads": float(number)} for number in range(10_000)])
    assert len(kept["cycle"]) == len(kept["threads"]) == soak.KEPT_SAMPLES
    assert kept["threads"][0] == 0 and kept["threads"][-1] == 9_999
    assert soak.thinned([{"threads": 1.0}, {"threads": 2.0}])["threads"] == [1.0, 2.0]


def test_an_arm_that_cannot_run_is_told_at_the_beginning_and_beside_the_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(soak.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(soak.vehicle, "absent", lambda: REASON)
    monkeypatch.setattr(
        sys, "argv", ["soak", "--judge", "--samples", str(tmp_path), "--out", str(tmp_path / "out.json")]
    )
    assert soak.arms() == ["cpu", "ranks"]
    sample = {"bytes in use": 1.0, "resident bytes": 1.0, "threads": 1.0}
    for arm in soak.arms():
        for path in soak.files_of(arm, tmp_path).values():
            path.write_text((json.dumps(sample) + "\n") * soak.LEAST_SAMPLES)
    assert soak.main() == 0
    first, *_, last = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("no arm on CUDA: ") and REASON in first
    assert last == "verdict: flat; not tried on CUDA"
    assert REASON in json.loads((tmp_path / "out.json").read_text())["settings"]["left_out"]["cuda"]
