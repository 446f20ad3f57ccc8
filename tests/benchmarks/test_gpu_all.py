"""The first run on a GPU: environments that are made where it is hard, verdicts, and that the docs name the parts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_all
from benchmarks.systems import beside

ROOT = Path(__file__).resolve().parents[2]


def said_by(python: Path, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_an_environment_sees_the_packages_of_the_one_that_it_was_made_from_and_so_on(tmp_path):
    first = beside.make(tmp_path / "first")
    site = Path(said_by(first, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    (site / "only_there.py").write_text("here = 1\n")
    command = [first, "-m", "benchmarks.systems.beside", tmp_path / "second"]
    subprocess.run(command, check=True, cwd=ROOT)
    second = tmp_path / "second" / "bin" / "python"
    assert said_by(second, "import sys; print(sys.prefix)") == str(tmp_path / "second")
    assert said_by(second, "import only_there; print(only_there.here)") == "1"
    where = "import importlib.util; print(importlib.util.find_spec('torch').origin)"
    assert said_by(second, where) == said_by(Path(sys.executable), where)


def test_what_cannot_be_installed_is_told(tmp_path):
    python = beside.make(tmp_path / "environment")
    (tmp_path / "wheels").mkdir()
    assert "no_such_package" in str(beside.install(python, ["no_such_package"], tmp_path / "wheels"))


@pytest.mark.parametrize(
    ("status", "log", "verdict", "why"),
    [
        (0, "x\nverdict: fetch 52 GiB/s\nbye", "ok", "fetch 52 GiB/s"),
        (0, "nothing to say", "ok", ""),
        (0, "....\n==== 18 passed, 1 skipped in 12.3s ====", "ok", "18 passed, 1 skipped"),
        (0, "SKIPPED [5] tests/a.py:3: test_a[1] needs a device: none\n5 skipped in 0.1s", "skipped", "needs a device"),
        (5, "no tests ran in 0.01s", "skipped", ""),
        (1, "FAILED tests/a.py::test_b - E: bits\n1 failed, 2 passed in 3s", "FAILED", "1 failed, 2 passed; first: "),
        (-11, "Segmentation fault", "FAILED", "exit status -11: Segmentation fault"),
        (None, "....", "FAILED", "more than 30 s"),
    ],
)
def test_verdicts(status, log, verdict, why):
    found = gpu_all.judged(status, log, 30)
    assert found[0] == verdict and why in found[1], found


def run_of(parts: list[gpu_all.Part], out: Path, budget_s: float = 60) -> dict[str, str]:
    run = gpu_all.Run(out, budget_s)
    for part in parts:
        run.do(part)
    run.wait()
    return {name: each.verdict for name, each in run.verdicts.items()}


def test_parts_follow_each_other_and_what_needs_a_broken_one_is_skipped(tmp_path):
    python = sys.executable
    parts = [
        gpu_all.Part("beside", 30, [python, "-c", ""], needs=(), is_beside=True),
        gpu_all.Part("good", 30, [python, "-c", ""], needs=()),
        gpu_all.Part("bad", 30, [python, "-c", "raise SystemExit(3)"], needs=("good",)),
        gpu_all.Part("after", 30, [python, "-c", ""], needs=("bad",)),
        gpu_all.Part("timed", 30, [python, "-c", ""], needs=("good",), is_timed=True),
    ]
    found = run_of(parts, tmp_path)
    assert found == {"good": "ok", "bad": "FAILED", "after": "skipped", "beside": "ok", "timed": "ok"}
    assert list(found)[-2:] == ["beside", "timed"]  # nothing runs beside what is timed
    assert (tmp_path / "verdicts.json").exists()


def test_a_part_that_hangs_is_stopped_and_without_time_none_begins(tmp_path):
    hangs = gpu_all.Part("hangs", 0.3, [sys.executable, "-c", "import time; time.sleep(60)"], needs=())
    assert run_of([hangs], tmp_path) == {"hangs": "FAILED"}
    assert run_of([hangs], tmp_path, budget_s=1) == {"hangs": "skipped"}


def test_the_docs_name_every_part_in_its_order(tmp_path):
    names = [part.name for part in gpu_all.parts(tmp_path, None, small=False)]
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "benchmarks" / "gpu_all.md").read_text(), re.MULTILINE)
    assert table == names
    text = (ROOT / "docs" / "gpu_status.md").read_text()
    first_run = text[text.index("## How to run it") : text.index("Then `make test`")]
    named = [word for word in re.findall(r"`(\w+)`", first_run) if word in names]
    assert named == [name for name in names if name != "rivals"]


def test_some_part_runs_each_file_that_has_tests_for_a_gpu_with_all_of_their_cases(tmp_path):
    commands = [part.command for part in gpu_all.parts(tmp_path, None, small=False) if "pytest" in part.command]
    commands = [command for command in commands if command[0] != "env"]  # journeys: what is not marked gpu
    assert all(command[command.index("-m", 2) + 1] == "gpu" for command in commands)  # also those marked `rest`
    run = [ROOT / word for command in commands for word in command if word.startswith("tests/")]
    asks = re.compile(r"mark\.gpu\b|import DEVICES\b")
    files = [each for each in (ROOT / "tests").rglob("*.py") if asks.search(each.read_text())]
    helpers = {ROOT / "tests" / "journeys" / "gradient_pairs.py", Path(__file__)}
    assert [each for each in files if each not in helpers and not any(each.is_relative_to(one) for one in run)] == []


@pytest.mark.parametrize("small", [True, False])
def test_rivals_are_tried_without_noria_which_is_built_meanwhile(small, tmp_path):
    [rivals] = [part for part in gpu_all.parts(tmp_path, None, small) if part.name == "rivals"]
    tried = rivals.command[rivals.command.index("--systems") + 1].split(",")
    assert len(tried) > 3 and not any(name.startswith("noria") for name in tried)
