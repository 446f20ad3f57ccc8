"""The parts of the first run on a GPU, one after the other: benchmarks/gpu_all.md. Run by gpu_all.sh.

Each part has a log, a time limit and a verdict: ok, FAILED or skipped, with the reason. A part may say more in a line
that begins with "verdict: ". All verdicts stand together at the end, and in verdicts.json, which is written after each
part. Needs nothing but the standard library: the first part makes the environment of the others.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.systems import catalogue

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "build" / "gpu_all_venv"
PACKAGES = "benchmarks/gpu_all.txt"
PYTHON = str(ENVIRONMENT / "bin" / "python")
LEAST_S = 8  # with less no part begins
PRETEND = "pretend_gpu"
WRITES = ("cuda_writes", "written_unheard", "clip")
MODULES = ["cmake", "--build", "build/current", "--parallel", "--target", "test_modules"]

# What the doctor says, and whether there is a device for what comes.
DOCTOR = """
import sys
from noria import _C
from noria.cli import main
main(["doctor"])
reason, may_lack = _C.cuda_absent_reason(), sys.argv[1] == "small"
print("verdict: " + (f"no device: {reason}" if reason else _C.find_cuda_runtime().path))
sys.exit(bool(reason) and not may_lack)
"""


@dataclasses.dataclass(frozen=True)
class Part:
    """`needs`: parts without which this one cannot run. `is_beside`: it runs beside those that follow. `is_timed`: it
    measures, so that nothing may run beside it. `is_ours`: noria alone runs in it; it has the pretend GPU.
    "{deadline}" in a command: seconds, somewhat before the limit."""

    name: str
    limit_s: float
    command: Sequence[str]
    needs: tuple[str, ...] = ("build", "doctor")
    is_beside: bool = False
    is_timed: bool = False
    is_ours: bool = True


@dataclasses.dataclass
class Verdict:
    part: str
    verdict: str  # ok, FAILED, skipped
    why: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0
    exit_status: int | None = None
    command: Sequence[str] = ()

    def line(self) -> str:
        return f"{self.part:<14} {self.verdict:<8} {self.seconds:>5.0f} s  {self.why}".rstrip()


# ---- what is run -----------------------------------------------------------------------------------------------------


def parts(out: Path, wheels: Path | None, small: bool, times: float = 1.0, pretend: bool = False) -> list[Part]:
    """In the order of docs/gpu_status.md: what everything rests on first, and the comparison with others last. `times`:
    the limits are so many times as long. `pretend`: the pretend GPU is built too."""
    offline = ["--wheels", str(wheels)] if wheels else []
    quick = ["--quick"] if small else []
    systems = "plain,noria,fsdp2,trainstream,roundpipe exact,superoffload,zero-2,zero-3 offload weights"
    systems = "all" if small else f"{systems},noria backward,noria max_grad_norm"
    versus = ["--device", "cpu", *quick] if small else ["--model", "gpt2-355m", "--tokens-per-step", "16384"]
    versus += [] if small else ["--steps", "8", "--device-memory", "36GiB"]
    largest = ["--host-memory", "1GiB", "--first", "1", *quick] if small else ["--device-memory", "1GiB"]
    largest += [] if small else ["--host-memory", "6GiB", "--fineness", "4", "--first", "8"]

    def script(name: str, *words: str) -> list[str]:
        return [PYTHON, f"benchmarks/{name}.py", *quick, "--out", str(out / f"{name}_here.json"), *words]

    def tests(*paths: str) -> list[str]:
        pytest = [PYTHON, "-m", "pytest", "-m", "gpu", "-rfEs", "--durations=5"]
        return [*pytest, "-p", "no:cacheprovider", *(f"tests/{path}" for path in paths)]

    def journeys(*workers: str) -> list[str]:
        variables = [] if small else ["JOURNEYS=cuda", "OMP_NUM_THREADS=1"]  # small: on the CPU, or on the pretend GPU
        paths = ["tests/journeys/test_reads.py"] if small else ["tests/journeys"]
        pytest = [PYTHON, "-m", "pytest", *workers, "-rfE", "--durations=5", "-p", "no:cacheprovider"]
        return ["env", *variables, *pytest, *paths]

    def module(name: str, *words: str) -> list[str]:
        return [PYTHON, "-m", f"benchmarks.{name}", *words]

    ring = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ring += ["examples/05_pipeline_d2d.py", "--steps", "10", "--trace", str(out / "pipeline")]
    threads = [] if small else ["--threads", "8", "15", "--rounds", "9"]
    beside = ["-m", "benchmarks.systems.beside", str(ENVIRONMENT), "-r", PACKAGES, *offline]
    # Not noria, which is built at the same time; `versus` leaves out what did not run here.
    foreign = ",".join(each for each in catalogue.chosen(systems) if not each.startswith("noria"))
    found = [
        Part("environment", 60, [sys.executable, *beside], needs=(), is_ours=False),
        Part(
            "rivals",
            270,
            module("rivals", "--systems", foreign, *offline),
            needs=("environment",),
            is_beside=True,
            is_ours=False,
        ),
        Part(
            "build",
            150,
            [PYTHON, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "-e", "."],
            needs=("environment",),
            is_ours=False,
        ),
        *([Part(PRETEND, 150, MODULES, needs=("build",), is_ours=False)] if pretend else []),
        Part("doctor", 30, [PYTHON, "-c", DOCTOR, "small" if small else "full"], needs=("build",)),
        # The memory that all rests on: it may be wrong in ways that nothing without a GPU shows.
        Part("first_touch", 40, script("first_touch")),
        # Bits, and each promise of the backend. Apart, because an error of the device spoils the rest of its process;
        # beside each other, because none fills the machine.
        Part("writes", 200, tests(*(f"journeys/test_{name}.py" for name in WRITES)), is_beside=True),
        Part("training", 120, tests("journeys/test_cuda.py", "journeys/test_cuda_trainer.py"), is_beside=True),
        Part("journeys", 230, journeys("-n", "12", "--dist", "worksteal"), is_beside=True),
        Part("contract", 100, tests("python/device"), is_beside=True),
        Part("lending", 30, tests("journeys/test_lending_cuda.py"), is_beside=True),
        Part(
            "demo",
            50,
            [PYTHON, "examples/02_gpt.py", "--steps", "24" if small else "40", "--out", str(out / "demo")],
            is_beside=True,
        ),
        # Rates, which say what to expect of the rest.
        Part("transfers", 30, script("transfers"), is_timed=True),
        Part("host_memory", 30, script("host_memory"), is_timed=True),
        Part("adamw", 60, script("adamw", *threads), is_timed=True),
        # Whole steps.
        Part("big_step", 70, script("big_step"), is_timed=True),
        Part("accumulation", 60, script("accumulation"), is_timed=True),
        Part("placement", 150, script("placement"), is_timed=True),
        Part("overhead", 40, script("overhead", "--only", "stays"), is_timed=True),
        Part("asleep", 40, script("asleep"), is_timed=True),
        # Two stages lend each other memory: on a CUDA device each, where there are two, or else on the CPU.
        Part("pipeline", 40, ring),
        # Beside others.
        Part(
            "versus",
            240,
            module(
                *("versus", "--systems", systems, *versus, "--deadline", "{deadline}"),
                *("--out", str(out / "versus_here.json")),
            ),
            is_timed=True,
            is_ours=False,
        ),
        Part(
            "break_even",
            20,
            [
                *(PYTHON, "benchmarks/break_even.py", str(out / "versus_here.json")),
                *("--out", str(out / "break_even_here.json")),
            ],
            needs=("transfers", "adamw", "versus"),
        ),
        Part(
            "largest",
            100,
            module(
                *("largest", "--systems", "noria backward,zero-2,zero-3 offload weights", *largest),
                *("--deadline", "{deadline}", "--out", str(out / "largest_here.json")),
            ),
            is_timed=True,
            is_ours=False,
        ),
    ]
    return [dataclasses.replace(each, limit_s=each.limit_s * times) for each in found]


def pretend_variables() -> dict[str, str]:
    """With these every Python process has the pretend GPU: tests/pretend_gpu."""
    paths = [str(ROOT / "tests" / "pretend_gpu" / "child"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PRETEND_GPU": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def stamp() -> str:
    """Of an environment that `environment` has made."""
    return hashlib.sha256((ROOT / PACKAGES).read_bytes() + sys.prefix.encode()).hexdigest()


# ---- verdicts --------------------------------------------------------------------------------------------------------


def judged(status: int | None, log: str, limit_s: float) -> tuple[str, str]:
    """Verdict and reason; `status` None: it was stopped for its time."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = next((line.removeprefix("verdict: ") for line in reversed(lines) if line.startswith("verdict: ")), "")
    tests = next(
        (line for line in reversed(lines) if re.search(r"\b(passed|failed|skipped|errors?)\b.* in \d", line)), ""
    )
    tests = tests.strip("= ").split(" in ")[0]
    last = said or tests or (lines[-1] if lines else "")
    if status is None:
        return "FAILED", f"more than {limit_s:.0f} s; {last}"
    if status not in (0, 5):  # 5: no test of that name
        first = next((line for line in lines if re.match(r"(FAILED|ERROR|NO) ", line)), "")
        return "FAILED", f"exit status {status}: {last}" + (f"; first: {first}" if first and first != last else "")
    if status == 5 or (tests and "passed" not in tests):
        reason = next((line for line in lines if line.startswith("SKIPPED ")), "")
        return "skipped", re.sub(r"^SKIPPED \[\d+\] \S+ (test_\S+ )?", "", reason) or tests
    if said.startswith("skipped"):
        return "skipped", said.removeprefix("skipped").strip(" :,")
    return "ok", said or tests


class Run:
    """Parts that have begun, and the verdicts of those that are over."""

    def __init__(self, out: Path, budget_s: float, pretend: bool = False) -> None:
        self.out = out
        self.pretend = pretend
        self.ends = time.monotonic() + budget_s
        self.verdicts: dict[str, Verdict] = {}
        self.beside: dict[str, Started] = {}

    def do(self, part: Part) -> None:
        broken = [name for name in part.needs if name in self.verdicts and self.verdicts[name].verdict != "ok"]
        if part.is_timed:
            self.wait()
        left = self.ends - time.monotonic()
        if broken:
            self.note(Verdict(part.name, "skipped", f"needs {', '.join(broken)}"))
        elif left < LEAST_S:
            self.note(Verdict(part.name, "skipped", "no time was left"))
        else:
            variables = pretend_variables() if self.pretend and part.is_ours else {}
            started = Started(part, min(part.limit_s, left), self.out / f"{part.name}.log", variables)
            if part.is_beside:
                self.beside[part.name] = started
            else:
                self.note(started.ended())

    def wait(self) -> None:
        """For what runs beside."""
        for started in self.beside.values():
            self.note(started.ended())
        self.beside.clear()

    def note(self, verdict: Verdict) -> None:
        self.verdicts[verdict.part] = verdict
        print(verdict.line(), flush=True)
        content = {"parts": [dataclasses.asdict(each) for each in self.verdicts.values()]}
        (self.out / "verdicts.json").write_text(json.dumps(content, indent=1) + "\n")


class Started:
    """A part's process, and all that it starts."""

    def __init__(self, part: Part, limit_s: float, log: Path, variables: Mapping[str, str]) -> None:
        self.part, self.limit_s, self.log = part, limit_s, log
        deadline = f"{max(limit_s - 45, limit_s / 2):.0f}"
        self.command = [word.replace("{deadline}", deadline) for word in part.command]
        self.began = time.monotonic()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def ended(self) -> Verdict:
        status: int | None
        try:
            status = self.process.wait(max(self.limit_s - (time.monotonic() - self.began), 0))
        except subprocess.TimeoutExpired:
            status = None
            self._stop()
        verdict, why = judged(status, self.log.read_text(errors="replace"), self.limit_s)
        seconds = round(time.monotonic() - self.began, 1)
        return Verdict(self.part.name, verdict, why[:300], seconds, self.limit_s, status, self.command)

    def _stop(self) -> None:
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, how)
                self.process.wait(5)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


def chosen(known: list[Part], only: str | None) -> list[Part]:
    """`only`: names between commas; what they need comes along."""
    if only is None:
        return known
    by_name = {part.name: part for part in known}
    wanted = only.split(",")
    if unknown := [name for name in wanted if name not in by_name]:
        raise SystemExit(f"expected some of {', '.join(by_name)}; found {', '.join(unknown)}")
    needed = {"environment", "build", PRETEND, "doctor", *wanted}
    return [part for part in known if part.name in needed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="a folder to install from, on a machine without an index")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_all", help="folder for all results")
    parser.add_argument("--only", help="parts, between commas; the environment and the build are kept between runs")
    parser.add_argument("--seconds", type=float, help="for all parts together; default: 590")
    parser.add_argument("--small", action="store_true", help="small sizes, long limits, and no device needed")
    parser.add_argument("--pretend", action="store_true", help="with a pretend GPU, all but what others run in")
    args = parser.parse_args()
    if args.wheels and not args.wheels.is_dir():
        parser.error(f"expected a folder of wheels; found none at {args.wheels}")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    run = Run(out, args.seconds or (3 * 3600 if args.small else 590), args.pretend)
    times = 10.0 if args.small else 1.0
    known = parts(out, args.wheels and args.wheels.absolute(), args.small, times, args.pretend)
    stamp_file = ENVIRONMENT / ".gpu_all"
    for part in chosen(known, args.only):
        if part.name == "environment":
            if stamp_file.exists() and stamp_file.read_text() == stamp():
                run.note(Verdict(part.name, "ok", "was there"))
                continue
            run.do(part)
            if run.verdicts[part.name].verdict == "ok":
                stamp_file.write_text(stamp())
            continue
        run.do(part)
    run.wait()
    print(f"\n{time.monotonic() - began:.0f} s in all; logs, results and verdicts.json in {out}")
    order = {part.name: number for number, part in enumerate(known)}
    for verdict in sorted(run.verdicts.values(), key=lambda each: order[each.part]):
        print(verdict.line())
    return int(any(verdict.verdict == "FAILED" for verdict in run.verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
