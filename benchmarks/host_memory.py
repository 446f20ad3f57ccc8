"""What is left of the host's memory bandwidth for updates while both copies run, and of the copies?

AdamW on a split master, fetches and drains work alone and together, each in a loop for as long as the others; all
combinations take turns. All three share the host's memory, which may be what bounds a step. On CUDA also what a kernel
gets that reads or writes registered memory by itself, as additions to held gradients and torch's clip do. Bytes are
those which each way moves: of the update bytes read and written, of a copy bytes copied.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import _common
import torch
from adamw import Memory
from noria import _C

MIB = 1 << 20
UPDATE, FETCH, DRAIN = "update", "fetch", "drain"
TOGETHER = [(UPDATE,), (FETCH,), (DRAIN,), (FETCH, DRAIN), (UPDATE, FETCH), (UPDATE, DRAIN), (UPDATE, FETCH, DRAIN)]
READS, WRITES = "kernel reads", "kernel reads and writes"
OF_KERNELS = [(READS,), (WRITES,), (READS, FETCH), (READS, DRAIN)]

Start = Callable[[], Callable[[], None]]  # begins a piece of work, and gives what waits for it


def copies(device: str, num_bytes: int) -> tuple[dict[str, tuple[int, Start]], list[Callable[[], None]]]:
    """By name: the bytes of a piece, and the piece; and what gives memory back, in this order."""
    total = 2 * num_bytes
    backend: Any = _C.make_cuda_backend(0, total) if device == "cuda" else _C.make_host_backend(total)
    home = _C.Arena(total)
    home.register_with(backend)
    memory = backend.allocate(total)
    ctypes.memset(home.data, 1, total)

    def lane(name: str, to: int, source: int) -> Start:
        return lambda: backend.submit(name, [(to, source, num_bytes)]).wait_passed

    found = {
        FETCH: (num_bytes, lane(FETCH, memory, home.data)),
        DRAIN: (num_bytes, lane(DRAIN, home.data + num_bytes, memory + num_bytes)),
    }
    ends = [lambda: backend.free(memory), home.close, backend.close]
    if device == "cuda":
        found |= kernels(backend.device_address(home.data), num_bytes)
    return found, ends


def kernels(address: int, num_bytes: int) -> dict[str, tuple[int, Start]]:
    shape = (num_bytes // 4,)
    interface = {"shape": shape, "typestr": "<f4", "data": (address, False), "version": 2}
    held = torch.as_tensor(type("Held", (), {"__cuda_array_interface__": interface})(), device="cuda")
    buffer, stream = torch.zeros(shape, device="cuda"), torch.cuda.Stream()

    def on_stream(act: Callable[[], Any]) -> Start:
        def start() -> Callable[[], None]:
            with torch.cuda.stream(stream):
                act()
                event = torch.cuda.Event()
                event.record()
            return event.synchronize

        return start

    return {
        READS: (num_bytes, on_stream(lambda: buffer.add_(held))),
        WRITES: (2 * num_bytes, on_stream(lambda: held.mul_(1.0))),
    }


def rates(ways: dict[str, tuple[int, Start]], names: tuple[str, ...], seconds: float) -> dict[str, float]:
    """GB/s of each while all of them run."""
    gates = threading.Barrier(len(names))
    found: dict[str, float] = {}

    def loop(name: str) -> None:
        num_bytes, start = ways[name]
        gates.wait()
        began, count = time.perf_counter(), 0
        waiting = start()
        while time.perf_counter() - began < seconds:
            later = start()  # so that its lane never stands
            waiting()
            waiting, count = later, count + 1
        taken = time.perf_counter() - began
        waiting()
        found[name] = count * num_bytes / taken / 1e9

    threads = [threading.Thread(target=loop, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if not _C.cuda_absent_reason() else "cpu")
    parser.add_argument("--params", type=int, help="millions (2**20) of an update; default 64, with --quick 4")
    parser.add_argument("--mib", type=int, help="of a copy; default 256, with --quick 16")
    parser.add_argument("--threads", type=int, help="that update; default: one less than there are cores")
    parser.add_argument("--rounds", type=int, help="turns of all combinations")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a turn")
    args = parser.parse_args()
    cores = torch.get_num_threads()
    threads = args.threads or max(cores - 1, 1)
    rounds = args.rounds or (2 if args.quick else 7)
    began = _common.hardware()
    memory, pool = Memory((args.params or (4 if args.quick else 64)) * MIB), _C.HostOptimizer(threads)
    job = memory.job("adamw", is_split=True)
    found, ends = copies(args.device, (args.mib or (16 if args.quick else 256)) * MIB)
    ways: dict[str, tuple[int, Start]] = {UPDATE: (job.bytes, lambda: pool.submit(job).wait_passed)} | found
    combinations = TOGETHER + (OF_KERNELS if args.device == "cuda" else [])
    samples: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds + 1):
        for names in combinations:
            measured = rates(ways, names, args.seconds)
            for name, rate in measured.items() if number else ():
                samples.setdefault(" + ".join(names), {}).setdefault(name, []).append(rate)
    pool.close()
    for end in ends:
        end()

    summary = {key: {name: median(values) for name, values in each.items()} for key, each in samples.items()}
    columns = [UPDATE, FETCH, DRAIN, *([READS, WRITES] if args.device == "cuda" else [])]
    rows = [[key, *(f"{each[name]:.1f}" if name in each else "" for name in columns)] for key, each in summary.items()]
    _common.show(f"GB/s, {threads} threads update, {args.device}", ["together", *columns], rows)
    settings = {"device": args.device, "threads": threads, "rounds": rounds, "seconds": args.seconds}
    _common.Result("host_memory", samples, summary, settings).write(args, began)
    alone, together = summary[UPDATE][UPDATE], summary[" + ".join(TOGETHER[-1])]
    print(
        f"verdict: update {alone:.1f} GB/s alone, {together[UPDATE]:.1f} with both copies at "
        f"{together[FETCH]:.1f} and {together[DRAIN]:.1f} (alone {summary[FETCH][FETCH]:.1f} and "
        f"{summary[DRAIN][DRAIN]:.1f})" + (f"; a kernel reads {summary[READS][READS]:.1f}" if READS in summary else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
