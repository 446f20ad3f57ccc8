"""Does a fetch or a drain cost more than the copy that it is?

Between home memory and device memory, over sizes: the bandwidth of the backend's fetch and drain lanes against
ctypes.memmove (host) and torch's copy_ of the same bytes, in turns. Lanes get a batch of copies at once and are waited
for at its end, as the engine uses them. On CUDA the plain copies are torch's, from and to pinned memory.

On CUDA noria cuts copies, so that a small copy of the user's passes between the pieces. What does that cost, and what
does it save? In turns, cut and uncut: a fetch, a drain, and how long a loss takes to the host that asks behind a drain.
Their home memory is registered after it has been touched: how long does that take?

(Not called copy.py: that name would hide the standard library's `copy` from every benchmark.)
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import _common
import torch
from noria import _C

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def ways(device: str, num_bytes: int, batch: int) -> tuple[dict[str, Callable[[], None]], Callable[[], None]]:
    """By name: `batch` copies of `num_bytes`, until the last has arrived; and what gives the memory back."""
    total = num_bytes * batch
    backend: Any = _C.make_cuda_backend(0, total) if device == "cuda" else _C.make_host_backend(total)
    home = _C.Arena(total)
    home.register_with(backend)
    memory = backend.allocate(total)
    ctypes.memset(home.data, 1, total)
    offsets = range(0, total, num_bytes)

    def lane(name: str, to: int, source: int) -> Callable[[], None]:
        def run() -> None:
            tickets = [backend.submit(name, [(to + at, source + at, num_bytes)]) for at in offsets]
            tickets[-1].wait_passed()  # a lane is in order

        return run

    found = {"fetch": lane("fetch", memory, home.data), "drain": lane("drain", home.data, memory)}
    if device == "cuda":
        pinned, there = torch.ones(total, dtype=torch.uint8).pin_memory(), torch.ones(total, dtype=torch.uint8).cuda()

        def by_torch(to: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
            def run() -> None:
                for at in offsets:
                    to[at : at + num_bytes].copy_(source[at : at + num_bytes], non_blocking=True)
                torch.cuda.synchronize()

            return run

        found |= {"torch to device": by_torch(there, pinned), "torch to host": by_torch(pinned, there)}
    else:
        source, to = torch.ones(total, dtype=torch.uint8), torch.ones(total, dtype=torch.uint8)

        def memmove() -> None:
            for at in offsets:
                ctypes.memmove(memory + at, home.data + at, num_bytes)

        def copy() -> None:
            for at in offsets:
                to[at : at + num_bytes].copy_(source[at : at + num_bytes])

        found |= {"memmove": memmove, "torch copy_": copy}

    def end() -> None:
        backend.free(memory)
        home.close()
        backend.close()

    return found, end


def cutting(num_bytes: int, rounds: int) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """Seconds by how copies are cut, and by what was timed; and the seconds of each registration."""
    whole = {"cut": {}, "uncut": {"copy_piece": num_bytes}}
    machines: dict[str, tuple[Any, Any, int]] = {}
    registered: list[float] = []
    for how, piece in whole.items():
        backend: Any = _C.make_cuda_backend(0, num_bytes, **piece)
        home = _C.Arena(num_bytes)
        ctypes.memset(home.data, 1, num_bytes)
        registered.append(_common.seconds(lambda home=home, backend=backend: home.register_with(backend)))
        machines[how] = (backend, home, backend.allocate(num_bytes))
    loss, kept = torch.ones((), device="cuda"), torch.empty((), pin_memory=True)

    def copy(how: str, lane: str) -> Any:
        backend, home, memory = machines[how]
        to, source = (memory, home.data) if lane == "fetch" else (home.data, memory)
        return backend.submit(lane, [(to, source, num_bytes)])

    def ask(how: str) -> float:
        drain = copy(how, "drain")
        taken = _common.seconds(lambda: kept.copy_(loss))  # which waits
        drain.wait_passed()
        return taken

    times: dict[str, dict[str, list[float]]] = {how: {"fetch": [], "drain": [], "loss": []} for how in whole}
    for number in range(rounds + 2):
        for how in whole:
            for lane in ("fetch", "drain"):
                taken = _common.seconds(lambda how=how, lane=lane: copy(how, lane).wait_passed())
                if number >= 2:
                    times[how][lane].append(taken)
            asked = ask(how)
            if number >= 2:
                times[how]["loss"].append(asked)
    for backend, home, memory in machines.values():
        backend.free(memory)
        home.close()
        backend.close()
    return times, registered


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if not _C.cuda_absent_reason() else "cpu")
    parser.add_argument("--rounds", type=int, help="turns of all ways")
    args = parser.parse_args()
    rounds = args.rounds or (7 if args.quick else 25)
    sizes = (
        [64 * KIB, MIB, 8 * MIB, 64 * MIB]
        if args.quick
        else [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
    )
    began = _common.hardware()
    torch.set_num_threads(1)
    samples: dict[str, dict[str, list[float]]] = {}
    summary: dict[str, Any] = {}
    rows = []
    for num_bytes in sizes:
        batch = max(1, 128 * MIB // num_bytes) if num_bytes >= MIB else 128
        found, end = ways(args.device, num_bytes, batch)
        times: dict[str, list[float]] = {name: [] for name in found}
        for number in range(rounds + 2):
            for name, run in found.items():
                taken = _common.seconds(run)
                if number >= 2:
                    times[name].append(taken)
        end()
        gib_s = {name: batch * num_bytes / GIB / median(values) for name, values in times.items()}
        against = {"fetch": list(found)[2], "drain": list(found)[-1 if args.device == "cuda" else 2]}
        ratios = {lane: _common.paired_ratio(times[other], times[lane]) for lane, other in against.items()}
        size = _C.format_bytes(num_bytes)
        samples[size] = times
        summary[size] = {"gib_s": gib_s, "against_plain": ratios, "batch": batch}
        rows.append(
            [
                size,
                *(f"{value:.2f}" for value in gib_s.values()),
                *(f"{ratios[lane]['of_pairs']:.3f}" for lane in ("fetch", "drain")),
            ]
        )
    columns = ["size", *list(found), "fetch / plain", "drain / plain"]
    _common.show(f"GiB/s, {args.device}; plain is {against['fetch']}", columns, rows)
    largest = summary[size]
    said = [
        f"{lane} {largest['gib_s'][lane]:.1f} GiB/s, {largest['against_plain'][lane]['of_pairs']:.2f} x a plain copy's"
        for lane in ("fetch", "drain")
    ]
    if args.device == "cuda":
        times, registered = cutting(sizes[-1], rounds)
        samples["cutting"], samples["registering"] = times, {size: registered}
        summary["register_s_per_gib"] = max(registered) * GIB / sizes[-1]
        ratios = {lane: _common.paired_ratio(times["cut"][lane], times["uncut"][lane]) for lane in ("fetch", "drain")}
        waits_us = {how: 1e6 * median(of["loss"]) for how, of in times.items()}
        summary["cutting"] = {"cut_against_uncut": ratios, "loss_behind_drain_us": waits_us}
        said.append(
            f"cut copies take {max(ratios[lane]['of_pairs'] for lane in ratios):.3f} x uncut ones, and a loss behind a "
            f"drain of {size} waits {waits_us['cut']:.0f} us, uncut {waits_us['uncut']:.0f}"
        )
        said.append(f"registering takes {summary['register_s_per_gib']:.2f} s a GiB")
    _common.Result("transfers", samples, summary, {"rounds": rounds, "device": args.device}).write(args, began)
    print(f"verdict: {'; '.join(said)}, on {args.device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
