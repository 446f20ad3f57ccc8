"""The comparison with other systems: who is told what, what is counted, and that its pages are those of its JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch

from benchmarks.largest import __main__ as largest
from benchmarks.rivals.__main__ import why_not_trained
from benchmarks.systems import environments
from benchmarks.systems.catalogue import PLAIN, SYSTEMS, add_systems, chosen
from benchmarks.systems.client import Client, ControlGroup, RefusedError
from benchmarks.systems.task import Task
from benchmarks.versus import __main__ as versus
from benchmarks.versus import tables

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.fixture
def task(tmp_path) -> Task:
    path = tmp_path / "tokens.npy"
    numpy.save(path, numpy.random.default_rng(0).integers(0, 8192, 20_000).astype("uint16"))
    return Task("gpt-3m", str(path))


# ---- who takes part ----


def test_systems_are_chosen_by_their_names_and_by_how_these_begin():
    assert chosen("all") == list(SYSTEMS)
    assert chosen("noria") == ["noria"]  # a name stands for itself
    assert chosen("zero-3, plain") == ["ZeRO-3 Offload", "ZeRO-3 Offload weights", "ZeRO-3 NVMe", PLAIN]


def test_unknown_systems_are_refused(capsys):
    parser = versus._common.parser_of("")
    add_systems(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--systems", "noria,megatron"])
    assert "found 'megatron'" in capsys.readouterr().err


def test_a_system_that_changes_nothing_does_not_train():
    plain, still = [9.0, 8.9, 8.5], [9.0, 8.99, 8.98]
    assert why_not_trained([9.0, 8.9, 8.51], plain, still) is None
    assert "without any update" in str(why_not_trained(still, plain, still))
    assert why_not_trained([9.0, float("nan"), 8.5], plain, still) is not None


@pytest.fixture
def own_folder(tmp_path, monkeypatch) -> Path:
    for module in (versus, largest):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
        monkeypatch.setattr(module, "text_file", lambda folder: folder / "tokens.npy")
    monkeypatch.setattr(environments, "STATUS", tmp_path / "status.json")
    return tmp_path


def test_systems_that_have_not_been_tried_are_left_out(own_folder):
    (own_folder / "status.json").write_text('{"ZenFlow": {"runs": false, "reason": "nan"}, "torchao": {"runs": true}}')
    found = environments.reasons([PLAIN, "noria", "ZenFlow", "RoundPipe"])
    assert found == {"ZenFlow": "nan", "RoundPipe": "not tried: `make rivals` has not come to it"}


def test_on_a_device_each_system_races_with_plain_pytorch_alone():
    assert versus.races_of([PLAIN, "noria", "ZenFlow"], True) == [[PLAIN, "noria"], [PLAIN, "ZenFlow"]]
    assert versus.races_of([PLAIN, "noria", "ZenFlow"], False) == [[PLAIN, "noria", "ZenFlow"]]
    assert versus.races_of([PLAIN], True) == [[PLAIN]]


# ---- what they are told ----


def test_micro_batches_are_parts_of_the_same_step(task):
    [(inputs, targets)] = task.batches(1024, 7)
    parts = Task(**{**vars(task), "micro_batches": 2}).batches(1024, 7)
    assert torch.equal(torch.cat([each for each, _ in parts]), inputs)
    assert torch.equal(torch.cat([each for _, each in parts]), targets)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(task.batches(1024, 8)[0][0], inputs)
    with pytest.raises(ValueError, match="in 3 micro-batches"):
        Task(**{**vars(task), "micro_batches": 3}).batches(1024, 7)


@pytest.mark.rest
def test_systems_take_turns_at_the_same_steps_and_the_pages_are_made_of_the_result(task, own_folder, monkeypatch):
    out = own_folder / "result.json"
    words = ["--systems", "plain,noria,noria max", "--model", "gpt-3m", "--tokens-per-step", "64,128", "--steps", "8"]
    monkeypatch.setattr(sys, "argv", ["versus", "--quick", *words, "--out", str(out)])
    assert versus.main() == 0
    result = json.loads(out.read_text())
    [race] = result["samples"]["races"]
    for tokens in ("64", "128"):
        plain, *others = (race["systems"][name][tokens] for name in (PLAIN, "noria", "noria max_grad_norm"))
        assert len(plain["losses"]) == 3 * versus.TURN and len(plain["seconds"]) == 2  # a turn was for warming up
        for other in others:
            assert other["losses"] == pytest.approx(plain["losses"], rel=1e-5)
            assert other["first"] == plain["first"]
        row = result["summary"]["noria"][tokens]
        assert row["efficiency"] > 0 and row["host_bytes"] > 16 * row["parameters"]
        assert set(row["moved_bytes"]) == {"down", "up"}
    assert out.with_suffix(".md").read_text() == tables.markdown(result)
    assert out.with_suffix(".svg").stat().st_size > 1000
    assert result["settings"]["steps"] == 8 and "--steps 8" in result["command"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("versus_*.json")), ids=lambda path: path.stem)
def test_committed_pages_are_made_of_the_results_beside_them(path):
    result = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text() == tables.markdown(result)
    assert result["summary"] == json.loads(json.dumps(tables.summary_of(result["samples"], PLAIN)))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("largest_*.json")), ids=lambda path: path.stem)
def test_committed_pages_of_the_largest_model_are_made_of_the_results_beside_them(path):
    result = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text() == largest.markdown(result)
    assert result["summary"] == largest.summary_of(result["samples"]["attempts"])


# ---- what is counted ----


ABOUT = {"parameters": 5, "clips": True, "accumulates": False, "is_exact": True, "activations": "kept"}


def samples(seconds: list[float], losses: list[float], **more: Any) -> dict[str, Any]:
    return {"seconds": seconds, "losses": losses, "device_bytes": 10, "peak_host_bytes": 100, "first": 0, **more}


def test_speeds_are_compared_by_round_and_losses_by_step():
    moved = {"before": {"down": 100, "up": 10}, "after": {"down": 700, "up": 40}}
    found = tables.summary_of(
        {
            "turn": 2,
            "races": [
                {
                    "systems": {
                        PLAIN: {"64": samples([1.0, 2.0, 4.0], [3.0, 2.0, 1.5, 1.0])},
                        "noria": {"64": samples([2.0, 2.0, 2.0], [3.0, 2.0, 1.75, 1.0], moved_bytes=moved)},
                    },
                    "about": {PLAIN: ABOUT, "noria": ABOUT},
                },
                {
                    "systems": {PLAIN: {"64": samples([9.0], [3.0])}, "ZenFlow": {}},
                    "about": {PLAIN: ABOUT, "ZenFlow": {}},
                },
            ],
        },
        PLAIN,
    )
    row = found["noria"]["64"]
    assert row["efficiency"] == 1.0  # of 0.5, 1 and 2: of the medians it is 1 as well, of the means it is not
    assert row["loss_distance"] == 0.25 and row["tokens_per_s"] == 32
    assert row["moved_bytes"] == {"down": 100, "up": 5}
    assert found[PLAIN]["64"]["efficiency"] == 1.0 and found[PLAIN]["64"]["moved_bytes"] is None
    assert found[PLAIN]["64"]["step_s"] == 2.0 and found["ZenFlow"] == {}


def test_a_system_that_ends_early_is_left_out_with_its_reason(task, own_folder):
    race = versus.Race([PLAIN, "noria"], task)
    try:
        race.run(64, 0, 1)
        race.clients["noria"].process.send_signal(signal.SIGKILL)
        race.clients["noria"].process.wait()
        race.run(128, 1, 1)
    finally:
        race.close()
    assert race.refused == {"noria": "at 128 tokens: ended by SIGKILL"}
    assert list(race.samples["noria"]) == ["64"] and list(race.samples[PLAIN]) == ["64", "128"]


def test_a_system_that_raises_says_why_and_goes_on(task, tmp_path):
    client = Client("noria", tmp_path / "log")
    try:
        with pytest.raises(RefusedError, match=r"UsageError: .*device_memory"):
            client.start(Task(**{**vars(task), "device_memory": 1000}))
        built = client.tell(do="build", task=vars(task))
        assert built["parameters"] == task.num_parameters()
        [loss] = client.tell(do="steps", tokens=64, first=0, count=1)["losses"]
        assert loss == pytest.approx(9.0, abs=0.2)
        assert client.resident("VmRSS") - client.before > 16 * built["parameters"]
    finally:
        client.close()
    assert client.process.returncode == 0


def test_a_control_group_counts_what_a_process_takes_at_most():
    size = 32 << 20
    program = f"""
import mmap, os
print(flush=True)
input()
pages = os.memfd_create("twice")
os.ftruncate(pages, {size})
mapped = [mmap.mmap(pages, {size}) for _ in range(2)]
for each in mapped:
    each[:] = bytes({size})
mapped.clear(), each.close(), os.close(pages)
print(flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"\n"
            group = ControlGroup.of(process.pid, None)
            if group is None:
                pytest.skip("needs the right to make a control group for memory")
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"\n"
            peaks = [group.peak_bytes() for _ in range(2)]
        finally:
            process.kill()
            process.wait()
    group.close()
    assert size <= peaks[0] < 1.5 * size  # and not twice as much
    assert peaks[1] < 0.5 * size  # it has given it back
    assert not list(Path("/sys/fs/cgroup").glob(f"**/noria_benchmark_{process.pid}"))


# ---- the largest model ----


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9, 31, 100, 5000])
def test_the_largest_is_found_as_finely_as_asked(limit):
    tried: list[int] = []

    def attempt(name: str, layers: int, task: Task, args: Any) -> dict[str, Any]:
        tried.append(layers)
        return {"layers": layers} | ({} if layers <= limit else {"bound": "host: too much"})

    args = mock.Mock(first=8, fineness=16)
    with mock.patch.object(largest, "attempt", attempt):
        attempts = largest.largest("noria", Task("family-1", ""), args)
    best = max((each["layers"] for each in attempts if "bound" not in each), default=0)
    assert best <= limit and len(tried) == len(set(tried))
    if limit <= largest.LAYERS_AT_MOST:
        assert limit - best <= max(0, best // 16)


def test_systems_that_were_not_begun_in_time_are_in_the_result(task, own_folder, monkeypatch):
    def attempt(name: str, layers: int, task: Task, args: Any) -> dict[str, Any]:
        while time.monotonic() < began + 10 * deadline:
            pass
        return {"layers": layers, "bound": "host: too much"}

    out, began, deadline = own_folder / "result.json", time.monotonic(), 0.2
    words = ["--systems", "plain,noria backward", "--deadline", str(deadline), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["largest", *words])
    with mock.patch.object(largest, "attempt", attempt):
        assert largest.main() == 0
    samples = json.loads(out.read_text())["samples"]
    assert list(samples["attempts"]) == [PLAIN]
    assert samples["refused"] == {"noria backward": "not begun: no time was left"}


@pytest.mark.long  # minutes, on a busy machine: three steps of a model that fills the limit
def test_an_attempt_is_held_to_the_limit_of_the_host(task, own_folder):
    """Three steps of a small model within enough, and within too little."""
    family = Task(**{**vars(task), "model": "family-1", "dtype": "bf16", "clip": 0.0})
    args = mock.Mock(device_memory=1 << 30, host_memory=8 << 30, patience=900.0, tokens=largest.TOKENS)
    fits = largest.attempt("noria backward", 1, family, args)
    assert "bound" not in fits and len(fits["losses"]) == largest.STEPS
    assert 10 * fits["parameters"] < fits["host_bytes"] < 8 << 30
    args.device_memory, args.host_memory = 64 << 20, 200 << 20
    assert "bound" in largest.attempt("noria backward", 1, family, args)
