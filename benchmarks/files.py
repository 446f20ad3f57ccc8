"""What do moments in files cost, and how fast are the files?

    python benchmarks/files.py                          # all parts, on the disk of the current directory
    python benchmarks/files.py door step --folder /nvme/bench

    door     noria's door to files beside fio: reads alone, writes alone, and both at once. The same file, block size,
             depth and bytes, O_DIRECT, registered memory. Sequential, in turns. noria's reads compare checksums, and
             its writes take them. "slots" is the memory that records pass through, in pages of 2 MiB if the kernel
             gives them; "scattered" has no two pages side by side.
    sweep    the door alone, over depths and sizes of its parts
    checksums  noria's checksum on one core beside a plain read and memcpy: of 16 KiB in the first cache, and of a
             record in memory, part by part as the door takes it. In turns with the door, which reads and writes at
             once. Its speed over the checksum's is the share of its time for which one core takes checksums.
    step     steps of a chain of equal layers whose moments lie in files, at the disk's speed, at 1/2 and at 1/4 of it,
             in turns with the same chain without files. Compute is paced: at the disk's own speed it takes as long as
             the disk.
    frozen   the same with frozen weights in files; only biases train. Each pass reads all, so at the disk's own speed
             forward and backward each take as long as one reading. The bound is max(T, all reads).
    rival    a GPT in bf16, whose optimizer state lies in files, by noria and by DeepSpeed's ZeRO-3 with NVMe offload.
             Processes of their own take steps in turns. Memory is the kernel's count, less what would lie on a device.
             Run `python -m benchmarks.rivals --systems zero-3` first.
    largest  the largest model within 2 GiB of host memory, without files and with them (`benchmarks/largest`)

`step` compares with two bounds. T is the step without files, F and B are its compute in forward and in backward. R
and W are the time to read and to write each record once, at the speed that the lanes had in the same steps:

    bound      max(T, R, W): no schedule could be faster
    own bound  the same for update="backward". In "auto", updates run between `step()` and the next forward's visits, so
               only that forward hides reads and most writes: max(F, R, W') + B, if that is more. W' lacks the writes of
               the last units: one for each slot.

A step within 1.10 of its bound is the aim. No run drafts, for units in files are not drafted. With "least memory" the
gradient ring is the smallest one, so no update is postponed. The other runs with update="backward" have a tenth more
host memory. The same bytes lie in files.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the others, also if run by -m

import _common
import noria
import overlap
import torch
from _disk import DIRECTIONS, MIB, Door, Fio, Memory, Traffic, Way
from noria import _C
from noria.wrapped import wrapped_by
from torch import nn

from benchmarks.systems.by_noria import least_host_memory
from benchmarks.systems.client import Client
from benchmarks.systems.environments import FOLDER, pins, reasons
from benchmarks.systems.task import Task, text_file

GIB = 1 << 30
MODES = {"auto": ("auto", 1.0), "backward, least memory": ("backward", 1.0), "backward": ("backward", 1.1)}
"""The value of `update`, and `host_memory` as a multiple of the least."""
SHARES = {"no files": None, "full": 1.0, "1/2": 0.5, "1/4": 0.25}
OURS, RIVAL = "noria files", "ZeRO-3 NVMe"
SYSTEMS = "noria draft_memory=0,noria backward,noria files"


def in_turns(ways: Mapping[str, Way], traffic: Mapping[str, Traffic], rounds: int) -> dict[str, dict[str, list[float]]]:
    """GiB/s of each round, by direction and way. The order of the ways alternates."""
    found = {direction: {name: list[float]() for name in ways} for direction in DIRECTIONS}
    for number, direction in itertools.product(range(rounds), DIRECTIONS):
        for name in ways if number % 2 else reversed(ways):
            taken = ways[name].seconds(direction)
            found[direction][name].append(traffic[name].bytes_of(direction) / GIB / taken)
    return found


def ranged(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "low": min(values), "high": max(values)}


def shown(found: Mapping[str, float]) -> str:
    return f"{found['median']:.3f} ({found['low']:.3f}-{found['high']:.3f})"


# ---- the door ----


def door(args: argparse.Namespace, folder: Path) -> None:
    began, traffic = _common.hardware(), Traffic(args.file_bytes, args.record)
    ways, notes = dict[str, Way](), list[str]()
    kinds = {"slots": Memory(traffic.record), "scattered": Memory(traffic.record, is_scattered=True)}
    reason = _C.uring_absent_reason()
    doors = (
        [("threads", "slots")] if reason else [("io_uring", "slots"), ("io_uring", "scattered"), ("threads", "slots")]
    )
    for way, kind in doors:
        name = f"{way}, {kind}"
        made = Door(folder, traffic, kinds[kind], way)
        notes += made.notes
        if without := Fio.why_missing():
            notes.append(without)
        else:
            ways[f"fio beside {name}"] = fio = Fio(made.path, traffic)
            notes += fio.notes
        ways[name] = made
    notes += [f"no door uses io_uring: {reason}"] if reason else []
    samples = in_turns(ways, dict.fromkeys(ways, traffic), args.rounds)
    summary: dict[str, Any] = {}
    rows = []
    for direction, taken in samples.items():
        ratios = {
            name: ranged([ours / theirs for ours, theirs in zip(values, taken[f"fio beside {name}"], strict=True)])
            for name, values in taken.items()
            if f"fio beside {name}" in taken
        }
        summary[direction] = {"gib_s": {name: ranged(values) for name, values in taken.items()}, "of_fio": ratios}
        for name in (name for name in ways if not name.startswith("fio")):
            ours, theirs = median(taken[name]), median(taken.get(f"fio beside {name}", [math.nan]))
            rows.append([f"{name}: {direction}", ours, theirs, shown(ratios[name]) if name in ratios else "-"])
    title = f"GiB/s; {args.file_bytes / GIB:.3g} GiB each way, {traffic.part // MIB} MiB, depth {traffic.depth}"
    _common.show(title, ["door, memory", "noria", "fio", "noria / fio"], rows)
    settings = {**vars(traffic), "rounds": args.rounds, "notes": notes}
    settings["fio_engine"] = [way.engine for way in ways.values() if isinstance(way, Fio)]
    _common.Result("files_door", samples, summary, settings).write(args, began)
    print("\n".join(notes))


def sweep(args: argparse.Namespace, folder: Path) -> None:
    began, memory = _common.hardware(), Memory(args.record)
    by_name = {
        f"depth {depth}, {part // 1024} KiB": Traffic(args.file_bytes // 4, args.record, depth, part)
        for depth in (4, 16, 32)
        for part in (MIB // 4, MIB, 4 * MIB)
    }
    ways = {name: Door(folder, traffic, memory) for name, traffic in by_name.items()}
    samples = in_turns(ways, by_name, args.rounds)
    summary = {name: {direction: ranged(samples[direction][name]) for direction in DIRECTIONS} for name in by_name}
    rows = [[name, *(shown(found[direction]) for direction in DIRECTIONS)] for name, found in summary.items()]
    kind = next(iter(ways.values())).name
    _common.show(f"GiB/s of the door {kind}, {args.file_bytes / 4 / GIB:.3g} GiB each way", ["", *DIRECTIONS], rows)
    settings = {"rounds": args.rounds, "file_bytes": args.file_bytes // 4, "record": args.record, "door": kind}
    _common.Result("files_sweep", samples, summary, settings).write(args, began)


# ---- checksums ----

# As CMakeLists.txt has them for csrc/base/checksum.cpp.
CHECKSUM_FLAGS = ["-funroll-loops", "-ffp-contract=off", "-DNDEBUG", "-shared", "-fPIC"]
FIRST_CACHE = 16 << 10


def checksum_loops() -> ctypes.CDLL:
    """See _checksum_speed.cpp."""
    sources = ["csrc/base/checksum.cpp", "benchmarks/_checksum_speed.cpp"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "checksums.so"
        _common.compile_cxx(library, sources, CHECKSUM_FLAGS)
        return ctypes.CDLL(str(library))


def checksums(args: argparse.Namespace, folder: Path) -> None:
    began, traffic = _common.hardware(), Traffic(args.file_bytes, args.record)
    memory, loops = Memory(traffic.record), checksum_loops()
    disk = Door(folder, traffic, memory)
    places = {
        "in the first cache": (FIRST_CACHE, traffic.record // FIRST_CACHE, 0),
        "over memory": (traffic.part, traffic.record // traffic.part, traffic.part),
    }
    kinds = {"checksum": loops.checksums, "read": loops.reads, "memcpy": loops.copies}
    addresses = ctypes.c_void_p(memory.to_read), ctypes.c_void_p(memory.to_write)
    ways: dict[str, tuple[int, Callable[[], Any]]] = {
        f"{kind} {where}": (size * count, functools.partial(loop, *addresses, *map(ctypes.c_size_t, place)))
        for where, place in places.items()
        for size, count, _ in [place]
        for kind, loop in kinds.items()
    }
    ways["disk"] = (traffic.bytes_of("both"), disk._both)
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds):
        for name in ways if number % 2 else reversed(ways):
            num_bytes, work = ways[name]
            samples[name].append(num_bytes / GIB / _common.seconds(work))
    pairs = zip(samples["disk"], samples["checksum over memory"], strict=True)
    summary: dict[str, Any] = {"gib_s": {name: ranged(values) for name, values in samples.items()}}
    summary["share of a core"] = ranged([disk_gib_s / gib_s for disk_gib_s, gib_s in pairs])
    rows = [[name, shown(found)] for name, found in summary["gib_s"].items()]
    _common.show(f"GiB/s of one core, and of the disk by {disk.name}", ["", "GiB/s"], rows)
    print(f"while the disk reads and writes, checksums take {shown(summary['share of a core'])} of one core")
    settings = {**vars(traffic), "rounds": args.rounds, "first_cache": FIRST_CACHE, "flags": CHECKSUM_FLAGS}
    settings |= {"door": disk.name, "notes": disk.notes}
    _common.Result("files_checksums", samples, summary, settings).write(args, began)


# ---- steps ----


def bound_s(mode: str, turn: Mapping[str, float], alone: Mapping[str, float]) -> float:
    """The least that a schedule of this mode could reach. `alone`: the same without files, of the same round.
    `turn["last"]`: the share of the writes that no read waits for."""
    least_s = max(alone["step_s"], turn["read_s"], turn["write_s"])
    if MODES[mode][0] == "backward":
        return least_s
    waited_for_s = (1 - turn["last"]) * turn["write_s"]
    return max(least_s, max(alone["forward_s"], turn["read_s"], waited_for_s) + alone["backward_s"])


class Steps:
    """A chain that trains; `turn` tells what a step of it takes, and what its lanes read and write."""

    def __init__(
        self, model: nn.Module, batch: torch.Tensor, mode: str, folder: Path | None, limit: Mapping[str, float]
    ) -> None:
        """`limit`: GiB/s by lane, none: the disk's own."""
        update, memory = MODES[mode]
        policy: dict[str, Any] = {"window": 8, "update": update, "draft_memory": 0, "resident": "none"}
        if folder is not None:
            policy["files"] = folder
            optimizer = torch.optim.AdamW(model.parameters())
            least = least_host_memory(model, optimizer, device="cpu", kernel="fused", **policy)
            policy["host_memory"] = int(memory * least)
        self._run = overlap.Run(model, batch, {lane: (each, 0.0) for lane, each in limit.items()}, **policy)
        context = wrapped_by(self._run.model).context
        self.plan, self.ring, self.files = context.plan.files, context.plan.ring, context.home.files
        self._lanes = dict.fromkeys(("read", "write") if self.plan.sizes else (), self.plan.state_bytes)
        if self.plan.weights:
            self._lanes["read_weights"] = self.plan.weights_bytes
        self.losses: list[float] = []

    def turn(self, num_steps: int) -> dict[str, float]:
        """Of a step. `read_s`: to read each record once, at the speed of these steps. `read_times`: how often each was.

        Likewise for writes, and for `read_weights`.
        """
        before = self._moved()
        self._run.forget()
        self._run.block(num_steps)
        self.losses += self._run.losses
        found = {"step_s": median(self._run.times)}
        found |= {f"{phase}_s": self._run.per_step(f"{phase}_us") / 1e6 for phase in ("forward", "backward")}
        for lane, (num_bytes, taken_us) in self._moved().items():
            moved, taken_s = num_bytes - before[lane][0], (taken_us - before[lane][1]) / 1e6
            found[f"{lane}_gib_s"] = moved / GIB / taken_s
            found[f"{lane}_s"] = self._lanes[lane] / moved * taken_s
            found[f"{lane}_times"] = moved / self._lanes[lane] / (num_steps + 1)
        if self.plan.sizes:
            found["last"] = self.plan.num_slots / len(self.plan.sizes)
        return found

    def _moved(self) -> dict[str, tuple[int, int]]:
        """By lane: bytes, and us that it was busy."""
        stats = {lane: self._run.engine.statistics.file_stats(lane) for lane in self._lanes}
        return {lane: (each["bytes"], each["busy_us"]) for lane, each in stats.items()}

    def end(self) -> None:
        noria.unwrap(self._run.model, self._run.optimizer)


def disk_speed(model: nn.Module, batch: torch.Tensor, folder: Path) -> tuple[dict[str, float], float]:
    """GiB/s of the lanes that read and write, at once, for a chain that computes in no time; and seconds of the slower
    one for a block."""
    steps = Steps(model, batch, "backward", folder, {})
    steps.turn(2)
    turns = [steps.turn(2) for _ in range(3)]
    steps.end()
    speed = {lane: median(turn[f"{lane}_gib_s"] for turn in turns) for lane in ("read", "write")}
    slower_s = max(median(turn[f"{lane}_s"] for turn in turns) for lane in speed)
    return speed, slower_s / len(steps.plan.sizes)


def step(args: argparse.Namespace, folder: Path) -> None:
    began = _common.hardware()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = torch.randn(32, args.width)
    speed, disk_s = disk_speed(overlap.Chain(args.blocks, args.width), batch, folder)
    block_s = args.compute * disk_s
    model = overlap.Chain(args.blocks, args.width, 0.4 * block_s, 0.6 * block_s)
    runs: dict[tuple[str, str], Steps] = {}
    for mode, (name, share) in itertools.product(MODES, SHARES.items()):
        if share is None and mode != MODES[mode][0]:
            continue  # without files memory has room for all
        limit = {} if share in (None, 1.0) else {lane: share * each for lane, each in speed.items()}
        runs[mode, name] = Steps(model, batch, mode, None if share is None else folder, limit)
    for run in runs.values():
        run.turn(2)
    turns: dict[tuple[str, str], list[dict[str, float]]] = {key: [] for key in runs}
    for _ in range(args.rounds):
        for key, run in runs.items():
            turns[key].append(run.turn(args.steps))
    summary: dict[str, Any] = {"same_losses": len({tuple(run.losses) for run in runs.values()}) == 1}
    rows = []
    for (mode, name), found in turns.items():
        if name == "no files":
            continue
        row = row_of(mode, found, turns[MODES[mode][0], "no files"])
        summary[f"{mode}, {name}"] = row
        seconds = (f"{row[key]:.3f}" for key in ("alone_s", "read_s", "write_s", "step_s"))
        rows.append(
            [f"{mode}, {name}", *(f"{row[key]:.2f}" for key in ("read_gib_s", "write_gib_s", "read_times")), *seconds]
            + [shown(row["over_bound"]), shown(row["over_own_bound"]), f"{row['over_alone']['median']:.3f}"]
        )
    files = runs["auto", "full"].files
    gib = files.file_bytes / GIB
    title = f"{args.blocks} units, {gib:.3g} GiB in files; GiB/s, reads of a record, s"
    columns = ["update, disk", "read", "write", "reads", "T", "R", "W", "step", "/ bound", "/ own bound", "/ T"]
    _common.show(title, columns, rows)
    print(f"same losses in all runs: {summary['same_losses']}")
    settings = {name: getattr(args, name) for name in ("blocks", "width", "compute", "rounds", "steps")}
    settings |= {"speed_gib_s": speed, "block_s": block_s, "file_bytes": files.file_bytes}
    settings |= {"door": files.door, "notes": files.notes}
    for (mode, name), run in runs.items():
        most_postponed = run.ring.most_postponed if run.ring else 0
        settings[f"{mode}, {name}"] = {"units_in_files": len(run.plan.sizes), "most_postponed": most_postponed}
    for run in runs.values():
        run.end()
    samples = {f"{mode}, {name}": found for (mode, name), found in turns.items()}
    _common.Result("files_step", samples, summary, settings).write(args, began)


def row_of(mode: str, turns: Sequence[dict[str, float]], alone: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Ratios are those of each round."""
    pairs = list(zip(turns, alone, strict=True))
    found: dict[str, Any] = {key: median(turn[key] for turn in turns) for key in turns[0]}
    found["alone_s"] = median(each["step_s"] for each in alone)
    found["over_bound"] = ranged([turn["step_s"] / bound_s("backward", turn, other) for turn, other in pairs])
    found["over_own_bound"] = ranged([turn["step_s"] / bound_s(mode, turn, other) for turn, other in pairs])
    found["over_alone"] = ranged([turn["step_s"] / other["step_s"] for turn, other in pairs])
    return found


# ---- frozen weights ----


def frozen_chain(*of_chain: Any) -> nn.Module:
    model = overlap.Chain(*of_chain)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim < 2)
    return model


def frozen(args: argparse.Namespace, folder: Path) -> None:
    began = _common.hardware()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = torch.randn(32, args.width)
    steps = Steps(frozen_chain(args.blocks, args.width), batch, "auto", folder, {})
    steps.turn(2)
    turns = [steps.turn(2) for _ in range(3)]
    steps.end()
    speed = median(turn["read_weights_gib_s"] for turn in turns)
    block_s = args.compute * median(turn["read_weights_s"] for turn in turns) / len(steps.plan.weights)
    model = frozen_chain(args.blocks, args.width, block_s, block_s)  # each pass reads all
    limits = {"no files": {}, "full": {}, "1/2": {"read_weights": speed / 2}}
    runs = {name: Steps(model, batch, "auto", None if name == "no files" else folder, limits[name]) for name in limits}
    for run in runs.values():
        run.turn(2)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            found[name].append(run.turn(args.steps))
    summary: dict[str, Any] = {"same_losses": len({tuple(run.losses) for run in runs.values()}) == 1}
    rows = []
    for name in list(runs)[1:]:
        pairs = list(zip(found[name], found["no files"], strict=True))
        row: dict[str, Any] = {key: median(turn[key] for turn in found[name]) for key in found[name][0]}
        row["alone_s"] = median(other["step_s"] for _, other in pairs)
        row["over_bound"] = ranged(
            [
                turn["step_s"] / max(other["step_s"], turn["read_weights_s"] * turn["read_weights_times"])
                for turn, other in pairs
            ]
        )
        summary[name] = row
        keys = ("read_weights_gib_s", "read_weights_times", "alone_s", "read_weights_s", "step_s")
        rows.append([name, *(f"{row[key]:.3f}" for key in keys), shown(row["over_bound"])])
    plan = runs["full"].plan
    title = f"{args.blocks} units, {plan.weights_bytes / GIB:.3g} GiB of weights in files; GiB/s, reads a step, s"
    _common.show(title, ["disk", "read", "reads", "T", "R of one", "step", "/ bound"], rows)
    print(f"same losses in all runs: {summary['same_losses']}")
    settings = {name: getattr(args, name) for name in ("blocks", "width", "compute", "rounds", "steps")}
    settings |= {"speed_gib_s": speed, "block_s": block_s, "weights_bytes": plan.weights_bytes}
    for run in runs.values():
        run.end()
    _common.Result("files_frozen", {**found}, summary, settings).write(args, began)


# ---- DeepSpeed ----


def rival(args: argparse.Namespace, folder: Path) -> None:
    began = _common.hardware()
    layers, width, tokens = (2, 128, 64) if args.quick else (24, 1024, args.tokens)
    model, threads = f"family-{layers}x{width}", torch.get_num_threads()
    task = Task(model, str(text_file(FOLDER)), "cpu", "bf16", 2 * GIB, threads=threads, clip=0.0)
    notes = reasons([OURS, RIVAL])
    names = [name for name in (OURS, RIVAL) if name not in notes]
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    built: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        clients: dict[str, Client] = {}
        for name in names:
            own = folder.resolve() / name.replace(" ", "_")
            own.mkdir(mode=0o700, exist_ok=True)
            clients[name] = Client(name, FOLDER / "logs" / f"files_{own.name}.log")
            stack.callback(clients[name].close)
            built[name] = clients[name].start(dataclasses.replace(task, files=str(own)))
            built[name]["peak_host_bytes"] = clients[name].peak_host_bytes()
        for number in range(-2, args.rounds):  # in the first two, systems learn what comes
            for name in names if number % 2 else reversed(names):
                first = (number + 2) * args.steps
                turn = clients[name].tell(do="steps", tokens=tokens, first=first, count=args.steps)
                turn["host_bytes"] = clients[name].peak_host_bytes() - turn["device_bytes"]
                if number >= 0:
                    turns[name].append(turn)
        for name in names:
            built[name] |= clients[name].tell(do="about")
    summary: dict[str, Any] = {}
    for name, found in turns.items():
        summary[name] = {"step_s": ranged([turn["seconds"] for turn in found])}
        held = max(turn["host_bytes"] for turn in found)
        summary[name] |= {"host_bytes": held, "host_bytes_per_parameter": held / task.num_parameters()}
    if RIVAL in turns:
        pairs = zip(turns[RIVAL], turns[OURS], strict=True)
        summary["rival / noria"] = ranged([theirs["seconds"] / ours["seconds"] for theirs, ours in pairs])
    rows = [[name, shown(summary[name]["step_s"]), summary[name]["host_bytes_per_parameter"]] for name in names]
    title = f"{task.num_parameters() / 1e6:.0f} M parameters, {tokens} tokens a step"
    _common.show(title, ["", "s a step", "host bytes / parameter"], rows)
    print("\n".join([f"{RIVAL} / noria: {shown(summary['rival / noria'])}"] if RIVAL in turns else notes.values()))
    settings = {**dataclasses.asdict(task), "tokens_per_step": tokens, "rounds": args.rounds, "steps": args.steps}
    settings |= {"notes": notes, "pins": pins()["deepspeed"], "systems": built}
    _common.Result("files_rival", turns, summary, settings).write(args, began)


# ---- the largest model ----


def largest(args: argparse.Namespace, folder: Path) -> None:
    """Blocks of 3 million parameters: a slot holds the moments of a whole block, and there are four."""
    suffix = "_quick" if args.quick else ""
    name = f"largest_files_{_common.hardware_word()}_{time.strftime('%Y%m')}{suffix}.json"
    memory, out = ("512MiB" if args.quick else "2GiB"), args.out or _common.RESULTS / name
    command = [sys.executable, "-m", "benchmarks.largest", "--systems", SYSTEMS, "--host-memory", memory]
    command += ["--width", "512", "--files", str(folder.resolve()), "--out", str(out.resolve())]
    command += ["--quick"] if args.quick else []
    if code := subprocess.run(command, cwd=_common.ROOT).returncode:
        raise SystemExit(f"benchmarks.largest ended with {code}")


PARTS: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    "door": door,
    "sweep": sweep,
    "checksums": checksums,
    "step": step,
    "frozen": frozen,
    "rival": rival,
    "largest": largest,
}


@contextlib.contextmanager
def folder_of(args: argparse.Namespace) -> Iterator[Path]:
    if args.folder is not None:
        args.folder.mkdir(mode=0o700, exist_ok=True)
        yield args.folder
        return
    with tempfile.TemporaryDirectory(prefix="noria_files_", dir=".") as found:
        yield Path(found)


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--folder", type=Path, help="on the disk; default: a new one below the current directory")
    parser.add_argument("--file-bytes", type=noria.policy.parse_bytes, help="that are read, and written; default: 2GiB")
    parser.add_argument("--record", type=noria.policy.parse_bytes, help="of a call of noria's door; default: 256MiB")
    parser.add_argument("--rounds", type=int, help="turns of all that is compared")
    parser.add_argument("--steps", type=int, help="measured in each turn")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, help="of a block; default: 1536")
    parser.add_argument("--tokens", type=int, default=8, help="of a step of `rival`; default: 8")
    parser.add_argument("--compute", type=float, default=1.0, help="paced to this multiple of the disk's time")
    args = parser.parse_args()
    parts = args.parts or list(PARTS)
    if unknown := [each for each in parts if each not in PARTS]:
        parser.error(f"expected some of {', '.join(PARTS)}; found {', '.join(unknown)}")
    if args.out and len(parts) > 1:
        parser.error("--out names the result of one part: choose a part")
    args.file_bytes = args.file_bytes or (64 * MIB if args.quick else 2 * GIB)
    args.record = min(args.record or (16 * MIB if args.quick else 256 * MIB), args.file_bytes)
    args.rounds = args.rounds or (2 if args.quick else 8)
    args.steps = args.steps or (2 if args.quick else 3)
    args.width = args.width or (256 if args.quick else 1536)
    with folder_of(args) as folder:
        for each in parts:
            PARTS[each](args, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
