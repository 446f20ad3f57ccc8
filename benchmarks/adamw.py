"""What does an update on the host cost, against torch's own, and against what memory allows?

Every rule of the fused kernels, on fp32 and on split masters, with one thread and with more: as an update, as a draft,
which can be undone, as the undo of a draft, and as a draft that is redone with another factor. AdamW with moments in
bf16 and 8 bits too, also with a factor on the gradient, as clipping has it; torch.optim.AdamW, fused and foreach. All
take turns in one process, on memory of the same kind.

Each way has a limit of its own: a loop without arithmetic, compiled for this machine, that reads and writes the same
arrays as the way. It runs in the same round. The share of the limit is the median of the rounds' ratios. STREAM's triad
runs, too.

--deepspeed installs DeepSpeed into an environment of its own, and measures its CPU Adam as
ZeRO-Offload calls it against AdamW with a split master, which does the same job: scaled gradients in, a bf16 working
copy out. The two are processes that take turns.
"""

from __future__ import annotations

import ctypes
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import _common
import _deepspeed
import torch
from noria import _C
from noria.model.layout import SLOTS_PER_ELEMENT

MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "lion": 1}

# How a loop without arithmetic moves an array; see _memory_limits.cpp.
READ, WRITTEN, CHANGED = range(3)
# What each way does to the undo log.
LOGS = {"update": None, "draft": WRITTEN, "undo": READ, "second draft": WRITTEN, "redo": READ}


class Way(NamedTuple):
    num_bytes: int  # read and written
    work: Callable[[], Any]
    limit: str | None  # the way whose time is the limit


class Stream(ctypes.Structure):
    _fields_ = (("lines", ctypes.c_void_p), ("bytes_of_element", ctypes.c_int), ("how", ctypes.c_int))


class Memory:
    """The arrays of one large unit, in the arenas that the home is made of; aligned, on huge pages, written once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.arenas: list[Any] = []
        self.own = self._arrays()
        self.log_size = (count, _C.num_undo_blocks(count), int(count * SLOTS_PER_ELEMENT))
        self.log = self._tensor(torch.uint8, 0, _C.undo_log_bytes(*self.log_size))
        self.log_of_limits = self._tensor(torch.uint8, 0)
        self.masters, self.moments = self._floats(), (self._floats(), self._floats())  # for others
        self.gradient, self.half_gradient = self._floats(), self._halves()
        self.gradient.normal_(std=1e-3)
        self.half_gradient.copy_(self.gradient.bfloat16().view(torch.int16))

    def renew(self) -> None:
        """Gives moments the spread that they have in training. With the same gradient at each turn they would settle,
        and a draft would have no exceptions."""
        for name, mean, spread in (("m", 0.0, 2.5e-4), ("m of sgd_momentum", 0.0, 2.3e-3), ("v", 1e-6, 1e-7)):
            self.own[name].normal_(std=spread).add_(mean)
        for name in "mv":
            self.own[f"{name} bf16"].copy_(self.own[name].bfloat16().view(torch.int16))
            arrays = (self.own[each].data_ptr() for each in (name, f"{name} 8bit", f"{name}_scales"))
            _C.encode_moment(*arrays, self.count, is_first=name == "m")

    def _arrays(self) -> dict[str, torch.Tensor]:
        halves = {"working": self._halves(), "low": self._halves()}
        reduced = {f"{name} bf16": self._halves() for name in "mv"}
        reduced |= {f"{name} 8bit": self._tensor(torch.uint8, 64) for name in "mv"}
        reduced |= {f"{name}_scales": self._floats(-(-self.count // _C.STATE_BLOCK)) for name in "mv"}
        return halves | {name: self._floats() for name in ("master", "m", "m of sgd_momentum", "v")} | reduced

    def _tensor(self, dtype: torch.dtype, value: Any, count: int = 0) -> torch.Tensor:
        count = count or self.count
        arena = _C.Arena(count * dtype.itemsize)
        self.arenas.append(arena)
        return _C.tensor_in(arena, 0, dtype, [count], [1]).fill_(value)

    def _floats(self, count: int = 0) -> torch.Tensor:
        return self._tensor(torch.float32, 1e-3, count)

    def _halves(self) -> torch.Tensor:
        return self._tensor(torch.int16, 0x3A83)  # 1e-3 in bf16

    def names(self, rule: str, is_split: bool, state: str) -> dict[str, str]:
        """The arrays of masters and moments: by the field of UnitArrays, the name."""
        kind = " of sgd_momentum" if rule == "sgd_momentum" else "" if state == "fp32" else f" {state}"
        masters = ("working", "low") if is_split else ("master",)
        return {name: name for name in masters} | {name: f"{name}{kind}" for name in "mv"[: MOMENTS[rule]]}

    def job(self, rule: str, is_split: bool, factor: float = 1.0, state: str = "fp32") -> Any:
        names = self.names(rule, is_split, state)
        if state == "8bit":
            names |= {f"{name}_scales": f"{name}_scales" for name in "mv"[: MOMENTS[rule]]}
        addresses = {field: self.own[name].data_ptr() for field, name in names.items()}
        scalars = _C.update_scalars(rule, 30, lr=1e-3, weight_decay=1e-2, momentum=0.9, factor=factor)
        arrays, pieces = _C.UnitArrays(**addresses, state=state), [(0, self.count, scalars)]
        return _C.UpdateJob(rule, pieces, arrays, gradient=self.gradient_for(is_split).data_ptr())

    def gradient_for(self, is_split: bool) -> torch.Tensor:
        return self.half_gradient if is_split else self.gradient

    def streams(self, rule: str, is_split: bool, state: str, log: int | None) -> list[Stream]:
        """What a way moves, without the scales of codes and the log's exceptions. `log`: how its bytes are moved."""
        moved = [(self.own[name], CHANGED) for name in self.names(rule, is_split, state).values()]
        moved += [(self.gradient_for(is_split), READ)] + ([] if log is None else [(self.log_of_limits, log)])
        moved.sort(key=lambda each: each[1])
        return [Stream(tensor.data_ptr(), tensor.itemsize, how) for tensor, how in moved]


class Limits:
    """The loops without arithmetic, on the arrays of the ways."""

    def __init__(self, memory: Memory, num_threads: int) -> None:
        self._memory, self._sizes = memory, (ctypes.c_size_t(memory.count), ctypes.c_int(num_threads))
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "limits.so"
            flags = ["-march=native", "-shared", "-fPIC", "-pthread"]
            _common.compile_cxx(library, ["benchmarks/_memory_limits.cpp"], flags)
            self._loops = ctypes.CDLL(str(library))

    def way(self, streams: list[Stream]) -> Way:
        moved = sum(each.bytes_of_element * (2 if each.how == CHANGED else 1) for each in streams)
        array, number = (Stream * len(streams))(*streams), ctypes.c_int(len(streams))
        return Way(moved * self._memory.count, lambda: self._loops.move_lines(array, number, *self._sizes), limit=None)

    def triad(self) -> Way:
        arrays = (self._memory.masters, *self._memory.moments)
        addresses = [ctypes.c_void_p(array.data_ptr()) for array in arrays]
        return Way(16 * self._memory.count, lambda: self._loops.triad(*addresses, *self._sizes), limit=None)


def noria_ways(memory: Memory, pool: Any, limits: Limits) -> dict[str, Way]:
    """The ways of one kind run in the order in which training runs them: a draft is redone or undone once. Their limits
    run before them. Kinds that move the same bytes share a limit."""
    ways: dict[str, Way] = {}

    def limit_of(rule: str, is_split: bool, state: str, log: int | None) -> str:
        moments = f"{MOMENTS[rule]} {state} moments" if MOMENTS[rule] else "no moments"
        what = {None: "", WRITTEN: ", log written", READ: ", log read"}[log]
        name = f"limit {'split' if is_split else 'fp32'}, {moments}{what}"
        if name not in ways:
            ways[name] = limits.way(memory.streams(rule, is_split, state, log))
        return name

    def add(rule: str, is_split: bool, state: str = "fp32", is_clipped: bool = False) -> None:
        base = 0.5 if is_clipped else 1.0
        update, other = (memory.job(rule, is_split, factor, state) for factor in (base, base / 2))
        draft = update.drafting(memory.log.data_ptr(), *memory.log_size)
        jobs = {
            "update": (update, "update"),
            "draft": (draft, "draft"),
            "undo": (draft.undoing(), "undo"),
            "second draft": (draft, "draft"),
            "redo": (other.redoing(draft), "update"),
        }
        what = ("" if state == "fp32" else f", {state} moments") + (", clipped" if is_clipped else "")
        names = list(jobs)[: 2 if is_clipped else None]
        limit = {name: limit_of(rule, is_split, state, LOGS[name]) for name in names}
        for name in names:
            job, verb = jobs[name]
            work = functools.partial(_run, pool, job, verb)
            ways[f"{rule} {'split' if is_split else 'fp32'} {name}{what}"] = Way(job.bytes, work, limit[name])

    for rule in MOMENTS:
        for is_split in (False, True):
            add(rule, is_split)
    for state in ("bf16", "8bit"):
        for is_split in (False, True):
            add("adamw", is_split, state)
    for state in ("fp32", "bf16", "8bit"):
        add("adamw", True, state, is_clipped=True)
    return ways


def _run(pool: Any, job: Any, verb: str) -> None:
    pool.submit(job, verb=verb).wait_passed()


def torch_ways(memory: Memory) -> dict[str, Way]:
    parameter = torch.nn.Parameter(memory.masters)
    parameter.grad = memory.gradient
    ways: dict[str, Way] = {}
    for name in ("fused", "foreach"):
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, **{name: True})
        optimizer.step()
        ways[f"torch AdamW {name} fp32"] = Way(28 * memory.count, optimizer.step, "limit fp32, 2 fp32 moments")
    return ways


def measure(count: int, threads: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Raw seconds, and the summary: billions of parameters a second, GB/s, and the share of the limit."""
    memory, pool = Memory(count), _C.HostOptimizer(threads)
    torch.set_num_threads(threads)
    limits = Limits(memory, threads)
    ways = {"triad": limits.triad()} | noria_ways(memory, pool, limits) | torch_ways(memory)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        memory.renew()
        for name, way in ways.items():
            taken = _common.seconds(way.work)
            if number:
                times[name].append(taken)
    pool.close()
    summary: dict[str, Any] = {}
    for name, (num_bytes, _, limit) in ways.items():
        best, usual = min(times[name]), median(times[name])
        summary[name] = {
            "gparam_s": {"best": count / best / 1e9, "median": count / usual / 1e9},
            "gb_s": {"best": num_bytes / best / 1e9, "median": num_bytes / usual / 1e9},
        }
        if limit is not None:
            share = _common.paired_ratio(times[limit], times[name])["of_pairs"]
            summary[name] |= {"limit": limit, "share_of_limit": share}
    return times, summary


# ---- DeepSpeed -----------------------------------------------------------------------------------------------------


def noria_child(count: int, rounds: int, threads: int) -> list[float]:
    """The same job in a process of its own."""
    memory, pool = Memory(count), _C.HostOptimizer(threads)
    job = memory.job("adamw", True, 0.999)
    times = [_common.seconds(lambda: pool.submit(job).wait_passed()) for _ in range(rounds + 2)]
    pool.close()
    return times[2:]


def against_deepspeed(count: int, threads: int, turns: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    rounds = 5
    samples: dict[str, list[float]] = {"noria": [], "deepspeed step": [], "deepspeed as ZeRO-Offload": []}
    numbers = [str(count), str(rounds), str(threads)]
    child = [sys.executable, str(Path(__file__).resolve()), "--child", *numbers]
    for turn in range(turns + 1):
        theirs = _deepspeed.run("_deepspeed_adam.py", *numbers)
        done = subprocess.run(child, env=_deepspeed.environment(), check=True, capture_output=True, text=True)
        ours = json.loads(done.stdout.splitlines()[-1])
        if turn:
            samples["noria"] += ours
            samples["deepspeed step"] += theirs["step"]
            samples["deepspeed as ZeRO-Offload"] += theirs["offloaded"]
    summary = {
        name: {"gparam_s": {"best": count / min(times) / 1e9, "median": count / median(times) / 1e9}}
        for name, times in samples.items()
    }
    return samples, summary


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(noria_child(*(int(word) for word in sys.argv[2:5]))))
        return 0
    parser = _common.parser_of(__doc__)
    parser.add_argument("--params", type=int, help="millions (2**20) of parameters; default 64, with --quick 8")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="how many, each measured by itself")
    parser.add_argument("--rounds", type=int, help="turns of all ways")
    parser.add_argument("--deepspeed", action="store_true", help="beside DeepSpeed's CPU Adam; installs it")
    args = parser.parse_args()
    count = (args.params or (8 if args.quick else 64)) << 20
    rounds = args.rounds or (5 if args.quick else 21)
    began = _common.hardware()
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for threads in args.threads:
        key = f"{threads} threads"
        samples[key], summary[key] = measure(count, threads, rounds)
        rows = [
            [
                name,
                f"{found['gparam_s']['best']:.2f}",
                f"{found['gparam_s']['median']:.2f}",
                f"{found['gb_s']['best']:.1f}",
                f"{found['gb_s']['median']:.1f}",
                f"{found['share_of_limit']:.2f}" if "limit" in found else "",
            ]
            for name, found in summary[key].items()
        ]
        columns = ["", "Gparam/s best", "median", "GB/s best", "median", "of its limit"]
        _common.show(f"{count >> 20} Mi parameters, {key}", columns, rows)
        if args.deepspeed:
            key += ", beside DeepSpeed"
            samples[key], summary[key] = against_deepspeed(count, threads, 1 if args.quick else 5)
            rows = [
                [name, f"{found['gparam_s']['best']:.2f}", f"{found['gparam_s']['median']:.2f}"]
                for name, found in summary[key].items()
            ]
            _common.show(f"{count >> 20} Mi parameters, {key}", ["", "Gparam/s best", "median"], rows)
    ended = {"load_1min_at_end": _common.hardware()["load_1min"]}
    settings = {
        "params": count,
        "rounds": rounds,
        "instruction_sets": _C.instruction_sets(),
        "deepspeed": _deepspeed.VERSION,
    }
    _common.Result("adamw", samples, summary, settings | ended).write(args, began)
    key = f"{args.threads[-1]} threads"
    shares = {way: summary[key][f"adamw split {way}"]["share_of_limit"] for way in ("update", "draft", "undo", "redo")}
    told = ", ".join(f"{way} {share:.2f}" for way, share in shares.items())
    print(f"verdict: AdamW, split, with {key}, share of their limits by memory: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
