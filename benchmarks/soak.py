"""Does what a process of noria holds stay flat, hour after hour?

A cycle goes through all modes. In each, a small GPT that was wrapped at the beginning goes on; one that has been
trained before is wrapped again, trained and unwrapped; and a new one is made, wrapped, trained, and dropped, on one
rank every other time without `unwrap`. Training is: steps of two micro-batches with a clip, another length at the end
of an epoch, an evaluation, a forward that raises, `noria.save` and `noria.load`, state dicts, `noria.materialize`, a
report. After each cycle the process is measured. Arms, each a process (or two) of its own, all at the same time,
for so many hours, and at least ten cycles:

- cpu: device="cpu";
- cuda: a CUDA device; where there is none, and it is built, the pretend GPU (tests/pretend_gpu); if there is neither,
  the script says so, at the beginning and beside the verdict;
- ranks: two ranks that share each model, over gloo. Torch keeps some bytes of each process group that is gone. The
  script measures these bytes and subtracts them. After each cycle it makes groups with torch alone, as many as noria
  made, and drops them. It does so twice; the second time shows what torch keeps. In an hour that was 1.3 KB a cycle too
  much, so this arm shows a leak from about 1.5 KB a cycle on.

The first fifth of the samples is warm-up. A measure is flat if it rises by less than its bound from the fifth after it
to the last one: between their medians, by cycle. Counts of things must not rise at all, pools not in most cycles. Bytes
of ranks may not rise over most fours of cycles: torch's tables of groups grow by leaps.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import datetime
import gc
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.pretend_gpu import vehicle

if vehicle.asked_for():
    vehicle.install()  # before torch


import noria
import torch
import torch.distributed as dist
from noria import _C
from noria.dist import groups
from noria.wrapped import wrapped_by

from benchmarks import _common
from examples.gpt import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIG = GPTConfig(vocab_size=61, context=16, num_layers=2, num_heads=2, width=32)
WARM_UP, PART = 0.2, 0.2  # shares of the samples
KEPT_SAMPLES = 240  # in the result
LEAST_SAMPLES = 10  # for a verdict
SLEEP_CYCLES = 200_000_000

Mode = dict[str, Any]
MODES: dict[str, Mode] = {
    "auto": {},
    "torch": {"kernel": "torch"},
    "drafts": {"kernel": "fused", "draft_memory": "8MiB"},
    "blocking": {"update": "blocking"},
    "backward": {"kernel": "fused", "update": "backward"},
    "offload": {"activations": "offload"},
    "recompute": {"activations": "recompute", "draft_memory": "8MiB"},
    "activations auto": {"activations": "auto", "activation_memory": "64KiB"},
    "norm": {"max_grad_norm": 0.1, "draft_memory": "8MiB"},
    "8bit": {"kernel": "fused", "state_dtype": "8bit"},
    "bfloat16": {"dtype": torch.bfloat16},
    "operators": {"check": "operators"},
}
RANK_MODES = ("auto", "torch", "drafts", "backward", "norm")


# ---- verdicts -----------------------------------------------------------------------------------------------

# By how much a measure may rise in a cycle, and in all. An ordinary tensor is some 500 bytes beside its values, and so
# a tensor that is left behind by every cycle shows, however small it is. What the system has given to the process also
# holds what lies free between what is in use, and rises by steps.
BYTES_IN_USE_PER_CYCLE, OBJECTS_PER_CYCLE = 200.0, 0.5
RESIDENT_AT_ALL = 4 << 20
# Pools grow to the most that was under way at once, which a loaded machine raises late, and by leaps. What is lost is
# lost in each cycle: of a pool it counts what the median cycle adds.
POOLS = ("events", "runtime: events")
# Of the pretend GPU they lie in this process, with their places in pools and maps; measured.
BYTES_OF_A_PRETEND_EVENT = 160
# Torch keeps bytes of groups that are gone: their addresses in the store, and an entry for each of their threads. This
# sample counts them for one cycle's groups.
OF_GROUPS = "kept by torch of groups"


def bound_of(measure: str, cycles: float) -> float:
    """How much `measure` may rise in so many cycles."""
    if measure == "bytes in use":
        return BYTES_IN_USE_PER_CYCLE * cycles
    if measure == "resident bytes":
        return max(RESIDENT_AT_ALL, BYTES_IN_USE_PER_CYCLE * cycles)
    if measure == "python objects":
        return OBJECTS_PER_CYCLE * cycles
    return 0.0


def usual_rise(samples: Sequence[float], over: int) -> float:
    """A cycle, over so many cycles: that of most. What leaps now and then is not seen."""
    return median((after - before) / over for before, after in zip(samples, samples[over:], strict=False))


def verdict_of(measure: str, samples: Sequence[float], is_of_ranks: bool = False) -> dict[str, Any]:
    count = len(samples)
    part = max(1, int(PART * count))
    first = int(WARM_UP * count)
    early, late = samples[first : first + part], samples[count - part :]
    cycles = max(1.0, float(count - part - first))
    rise = median(late) - median(early)
    if measure in POOLS:
        rise = cycles * usual_rise(samples[first:], 1)
    if is_of_ranks and measure == "bytes in use":
        rise = cycles * usual_rise(samples[first:], 4)
    bound = bound_of(measure, cycles)
    return {
        "after_warm_up": median(early),
        "at_the_end": median(late),
        "rise_per_cycle": rise / cycles,
        "bound_per_cycle": bound / cycles,
        "is_flat": rise <= bound,
    }


def own_bytes(samples: Sequence[dict[str, float]], measure: str) -> list[float]:
    """`measure` without the bytes of pretend events and what torch keeps of groups. Each earlier cycle has made
    three sets of groups: noria's, and two to compare."""
    of_groups = median(each.get(OF_GROUPS, 0.0) for each in samples)
    return [
        each[measure] - BYTES_OF_A_PRETEND_EVENT * each.get("runtime: events", 0) - 3 * number * of_groups
        for number, each in enumerate(samples)
    ]


def verdicts_of(samples: Sequence[dict[str, float]]) -> dict[str, dict[str, Any]]:
    def series(measure: str) -> list[float]:
        is_bytes = measure in ("bytes in use", "resident bytes")
        return own_bytes(samples, measure) if is_bytes else [each[measure] for each in samples]

    is_of_ranks = OF_GROUPS in samples[0]
    return {
        measure: verdict_of(measure, series(measure), is_of_ranks) for measure in samples[0] if measure != OF_GROUPS
    }


# ---- what is measured ---------------------------------------------------------------------------------------


class MallocInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


class Measures:
    """Of this process. `device` counts where there is one."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.libc = ctypes.CDLL(None)
        self.libc.mallinfo2.restype = MallocInfo
        self.runtime: Any = None
        if vehicle.is_installed():
            sys.path.append(str(vehicle.BUILD))
            import _fake_cuda

            self.runtime = _fake_cuda

    def sample(self, stays: Sequence[Side], ledger_bytes: int) -> dict[str, float]:
        for each in stays:
            wrapped_by(each.model).context.engine.idle()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        gc.collect()
        gc.collect()  # what the first has freed
        found: dict[str, float] = {
            "python objects": len(gc.get_objects()),
            "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
            "ledger bytes": ledger_bytes,
            "events": sum(wrapped_by(each.model).context.backend.num_events for each in stays),
            "remembered ops": sum(wrapped_by(each.model).context.engine.statistics.num_remembered for each in stays),
            "kinds of passes": sum(len(wrapped_by(each.model).context.engine.statistics.passes()) for each in stays),
        }
        found |= _C.living()
        if self.device == "cuda":
            found["device bytes"] = torch.cuda.memory_allocated()
        if self.runtime is not None:
            found |= {f"runtime: {name}": count for name, count in self.runtime.alive().items()}
        found["threads"] = len(os.listdir("/proc/self/task"))
        found["descriptors"] = len(os.listdir("/proc/self/fd"))
        self.libc.malloc_trim(0)
        info = self.libc.mallinfo2()
        found["bytes in use"] = info.uordblks + info.hblkhd
        found["resident bytes"] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return found


def make_groups(count: int) -> None:
    """By torch alone, as `noria.dist.groups` does, each used by this thread and by one of its own. Collective."""

    def use(group: Any) -> None:
        group.allreduce([torch.ones(1)]).wait()

    c10d: Any = dist.distributed_c10d
    cpu, gloo = torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO
    for _ in range(count):
        name = f"compare/{dist.get_world_size()}/{next(numbers)}"
        store = dist.PrefixStore(f"{name}/", c10d._get_default_store())
        group = c10d.ProcessGroup(store, dist.get_rank(), dist.get_world_size())
        backend = c10d.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), c10d.default_pg_timeout)
        backend._set_sequence_number_for_group()
        group._set_default_backend(gloo)
        group._register_backend(cpu, gloo, backend)
        group._set_group_name(name)
        c10d._register_process_group(name, group)
        use(group)
        lane = threading.Thread(target=use, args=(group,))
        lane.start()
        lane.join()
        c10d._unregister_process_group(name)


numbers = itertools.count(1)


# ---- what is done -------------------------------------------------------------------------------------------


class Side:
    """A model and its optimizer, in a mode. `sleeps`: the device does, again and again, so that the host is ahead of it
    by as much as it ever will be: pools, of events say, have their size after that."""

    sleeps = False

    def __init__(self, mode: str, device: str, ranks: int, is_compiled: bool = False) -> None:
        self.mode, self.device, self.ranks, self.is_compiled = mode, device, ranks, is_compiled
        self.policy = MODES[mode]
        torch.manual_seed(0)
        self.model = GPT(CONFIG)
        if is_compiled:
            for block in self.model.blocks:
                block.compile(backend="eager", dynamic=False)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)

    @property
    def updates_in_backward(self) -> bool:
        return self.policy.get("update") == "backward"

    def wrap(self) -> None:
        noria.wrap(self.model, self.optimizer, device=self.device, window=2, **self.policy)

    def unwrap(self) -> None:
        noria.unwrap(self.model, self.optimizer)

    def loss(self, number: int, length: int = 12) -> torch.Tensor:
        if self.device == "cuda" and self.sleeps:
            torch.cuda._sleep(SLEEP_CYCLES)
        batch = torch.randint(0, CONFIG.vocab_size, (2, length), generator=torch.Generator().manual_seed(number))
        batch = batch.to(self.device)
        return self.model(batch, batch)[1]

    def step(self, number: int, length: int) -> None:
        with self.optimizer.accumulate() if self.updates_in_backward else contextlib.nullcontext():
            self.loss(number, length).backward()
        self.loss(number + 1, length).backward()
        if not self.updates_in_backward and self.mode != "norm":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.schedule.step()
        clears = self.updates_in_backward or self.ranks > 1  # p.grad has no values to set to zero then
        self.optimizer.zero_grad(set_to_none=clears or number % 4 != 0)

    def epoch(self, steps: int) -> None:
        self.model.train()
        for number in range(steps):
            self.step(2 * number, 12)
        self.step(2 * steps, 7)
        self.optimizer.zero_grad()
        self.model.eval()
        with torch.no_grad():
            self.loss(8)
        self.model.train()

    def raise_in_forward(self) -> None:
        def broken(*_: Any) -> None:
            raise ZeroDivisionError

        handle = self.model.blocks[1].register_forward_hook(broken)
        with contextlib.suppress(ZeroDivisionError):
            self.loss(9)
        handle.remove()

    def look(self, path: Path) -> int:
        """Returns the ledger's bytes."""
        noria.save(path, self.model, self.optimizer, step=1)
        noria.load(path, self.model, self.optimizer)
        self.model.load_state_dict({name: value.clone() for name, value in self.model.state_dict().items()})
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        with noria.materialize(self.model):
            self.model.norm.weight.data.mul_(0.999)
        report = noria.report(self.model)
        str(report)
        if not report.ledger_agrees:
            raise SystemExit(f"the ledger of {self.mode!r} does not agree with its plan:\n{report}")
        return sum(row.taken for row in report.ledger)

    def journey(self, path: Path) -> int:
        self.epoch(2)
        if self.ranks == 1 and not self.is_compiled:  # a hook is compiled in, each time anew
            self.raise_in_forward()
        taken = self.look(path)
        self.epoch(1)
        return taken


class Soak:
    def __init__(self, device: str, ranks: int, modes: Sequence[str], path: Path) -> None:
        self.device, self.ranks, self.modes, self.path = device, ranks, modes, path
        self.stays = [Side(mode, device, ranks, is_compiled=mode == "auto" and ranks == 1) for mode in modes]
        for each in self.stays:
            each.wrap()
        self.again = [Side(mode, device, ranks) for mode in modes]

    def cycle(self, number: int) -> int:
        taken = 0
        for stay, again in zip(self.stays, self.again, strict=True):
            taken += stay.journey(self.path)
            again.wrap()
            taken += again.journey(self.path)
            again.unwrap()
            new = Side(stay.mode, self.device, self.ranks)
            new.wrap()
            taken += new.journey(self.path)
            if number % 2 or self.ranks > 1:
                new.unwrap()
        return taken


@contextlib.contextmanager
def as_far_ahead_as_can_be() -> Iterator[None]:
    """Makes a pretend GPU lazy: its streams do nothing until a thread waits for them."""
    if not vehicle.is_installed():
        yield
        return
    from tests.pretend_gpu import machine

    with machine.machine(lazy=True):
        yield


def soak(arm: str, seconds: float, samples: Path, leak: bool, more: Callable[[bool], bool] = bool) -> None:
    """Appends a line of JSON to `samples` after each cycle. `more`: what all ranks take for going on."""
    torch.set_num_threads(1)
    device = "cuda" if arm == "cuda" else "cpu"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    end, left_behind = time.monotonic() + seconds, []
    with tempfile.TemporaryDirectory() as folder, samples.open("w") as file:
        path = Path(folder) / "checkpoint.pt"
        if ranks > 1:  # of all ranks, and rank 0 writes it
            paths = [str(path)]
            dist.broadcast_object_list(paths)
            path = Path(paths[0])
        measures, number = Measures(device), 0
        process = Soak(device, ranks, RANK_MODES if ranks > 1 else tuple(MODES), path)
        while more(time.monotonic() < end or number < LEAST_SAMPLES):
            Side.sleeps, num_groups = number == 0, groups.num_made()
            with as_far_ahead_as_can_be() if number == 0 else contextlib.nullcontext():
                taken = process.cycle(number)
            if number == 0:  # what there is from now on need not be gone through whenever noria collects
                gc.collect()
                gc.freeze()
            if leak:
                left_behind.append(torch.empty(16))
            found = {"time": round(time.time(), 1), **measures.sample(process.stays, taken)}
            if ranks > 1:
                in_use = []
                for _ in range(2):  # from the first to the second, what is freed late is freed
                    make_groups(groups.num_made() - num_groups)
                    in_use.append(measures.sample(process.stays, taken)["bytes in use"])
                found[OF_GROUPS] = in_use[1] - in_use[0]
            file.write(json.dumps(found) + "\n")
            file.flush()
            number += 1
        if ranks > 1:
            dist.barrier()


def on_rank(rank: int, size: int, meeting: str, answers: Any, seconds: float, samples: str, leak: bool) -> None:
    timeout = datetime.timedelta(minutes=30)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timeout)

    def more(mine: bool) -> bool:
        votes = torch.tensor([int(mine)])
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return bool(votes.item())

    soak("ranks", seconds, Path(f"{samples}.{rank}"), leak, more)
    answers.put((rank, {}))
    answers.close()
    answers.join_thread()
    os._exit(0)


# ---- the arms -----------------------------------------------------------------------------------------------


def why_no_cuda() -> str:
    """Empty if that arm can run here."""
    absent = "" if torch.cuda.is_available() else vehicle.absent()
    return absent and f"torch {torch.__version__} reaches no CUDA device, and there is no pretend GPU: {absent}"


def arms() -> list[str]:
    return ["cpu", "ranks"] if why_no_cuda() else ["cpu", "ranks", "cuda"]


def files_of(arm: str, folder: Path) -> dict[str, Path]:
    """By process."""
    path = folder / f"{arm}.jsonl"
    return {f"rank {rank}": Path(f"{path}.{rank}") for rank in range(2)} if arm == "ranks" else {arm: path}


@contextlib.contextmanager
def started(arm: str, args: argparse.Namespace, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", arm, str(3600 * args.hours)]
    command += [str(folder / f"{arm}.jsonl"), str(int(args.leak))]
    # What a thread has freed and keeps for itself would count as in use.
    environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.tcache_count=0", OMP_NUM_THREADS="1")
    environment["TORCH_FR_BUFFER_SIZE"] = "0"  # torch's record of the last 2,000 collectives, which would fill up first
    if arm == "cuda" and not torch.cuda.is_available():
        environment.setdefault("PRETEND_GPU", "1")
    elif arm != "cuda":
        environment.pop("PRETEND_GPU", None)
    process = subprocess.Popen(command, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def summary_of(samples: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    return {
        process: verdicts_of([{name: each[name] for name in each if name != "time"} for each in found])
        for process, found in samples.items()
    }


def thinned(samples: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Evenly, first and last among them; by measure."""
    count = len(samples)
    chosen = sorted({round(i * (count - 1) / (KEPT_SAMPLES - 1)) for i in range(KEPT_SAMPLES)})
    return {"cycle": chosen} | {name: [samples[i][name] for i in chosen] for name in samples[0]}


def child(arm: str, seconds: float, path: str, leak: bool) -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    if arm == "ranks":
        _common.on_ranks(2, on_rank, seconds, path, leak)
    else:
        soak(arm, seconds, Path(path), leak)


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], float(sys.argv[3]), sys.argv[4], bool(int(sys.argv[5])))
        return 0
    parser = _common.parser_of(__doc__)
    parser.add_argument("--hours", type=float, default=1.0, help="of each arm; they run at the same time")
    parser.add_argument("--arms", nargs="+", choices=["cpu", "cuda", "ranks"], help="default: all that can run here")
    parser.add_argument("--samples", type=Path, help="folder for all samples as they come; default: build/soak")
    parser.add_argument("--judge", action="store_true", help="only judge the samples that an earlier call has left")
    parser.add_argument("--leak", action="store_true", help=argparse.SUPPRESS)  # a small tensor in each cycle
    args = parser.parse_args()
    if args.quick:
        args.hours = min(args.hours, 0.02)
    began, chosen = _common.hardware(), args.arms or arms()
    left_out = "" if args.arms else why_no_cuda()
    if left_out:
        print(f"no arm on CUDA: {left_out}", flush=True)
    folder = args.samples or ROOT / "build" / "soak"
    folder.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    if not args.judge:
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(started(arm, args, folder)) for arm in chosen]
            failed = [arm for arm, process in zip(chosen, processes, strict=True) if process.wait() != 0]
    samples = {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for arm in chosen
        if arm not in failed
        for name, path in files_of(arm, folder).items()
    }
    for name, found in samples.items():
        if len(found) < LEAST_SAMPLES:
            failed.append(f"{name}, with {len(found)} cycles where a verdict takes {LEAST_SAMPLES},")
    samples = {name: found for name, found in samples.items() if len(found) >= LEAST_SAMPLES}
    summary = summary_of(samples)
    rows = [
        [f"{name}: {measure}", *(each[key] for key in COLUMNS), "flat" if each["is_flat"] else "RISES"]
        for name, verdicts in summary.items()
        for measure, each in verdicts.items()
    ]
    _common.show(f"{args.hours} hours", ["measure", *COLUMNS.values(), "verdict"], rows)
    rising = [row[0] for row in rows if row[-1] != "flat"]
    settings = {
        "hours": args.hours,
        "cycles": {name: len(found) for name, found in samples.items()},
        "modes": {name: {key: str(value) for key, value in fields.items()} for name, fields in MODES.items()},
        "modes_of_ranks": RANK_MODES,
        "left_out": {"cuda": left_out} if left_out else {},
        "is_pretend_gpu": "cuda" in chosen and (vehicle.is_installed() or not torch.cuda.is_available()),
        "python": platform.python_version(),
    }
    rising += [f"{arm} failed" for arm in failed]
    thin = {name: thinned(found) for name, found in samples.items()}
    _common.Result("soak", thin, summary, settings).write(args, began)
    verdict = "flat" if not rising else "rising: " + ", ".join(rising)
    print(f"verdict: {verdict}" + ("; not tried on CUDA" if left_out else ""))
    return 1 if rising else 0


COLUMNS = {
    "after_warm_up": "after warm-up",
    "at_the_end": "at the end",
    "rise_per_cycle": "rise a cycle",
    "bound_per_cycle": "bound",
}


if __name__ == "__main__":
    sys.exit(main())
