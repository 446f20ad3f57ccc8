"""How large a model trains, with limited memory on the device and on the host?

    python -m benchmarks.largest --systems all --device-memory 2GiB --host-memory 16GiB

One family of GPTs, of any number of layers; the largest one that takes three steps, by bisection. Each attempt is a
process of its own. The device's limit is its allocator's (and noria's budget); the host's is held by the kernel (a
control group, else RLIMIT_DATA, for what comes behind the imports), and by its count of the peak afterwards,
pinned memory included. On a machine without a device, what would lie on one is host memory as well: it is computed from
the sizes of tensors and buffers, taken off, and held against the device's limit. The model is built on the host in
fp32. The system then takes it over in its own way: the memory for that counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for _common

import _common
import torch
from noria.policy import format_bytes, parse_bytes

from benchmarks.systems.catalogue import PLAIN, add_systems
from benchmarks.systems.client import Client, RefusedError
from benchmarks.systems.environments import FOLDER, pins, reasons
from benchmarks.systems.task import FAMILY, Task, text_file

STEPS = 3
TOKENS = 64
LAYERS_AT_MOST = 4096


def attempt(name: str, layers: int, task: Task, args: argparse.Namespace) -> dict[str, Any]:
    """Three steps; what they took, and why they were too much where they were."""
    has_device, host = task.device == "cuda", args.host_memory
    client = Client(name, FOLDER / "logs" / f"largest_{name.replace(' ', '_')}_{layers}.log", args.patience)
    found: dict[str, Any] = {"layers": layers}
    try:
        # What would lie on the device is private memory too.
        limit = host if has_device else host + args.device_memory
        found |= client.start(task, host_limit=limit)
        host_bytes, device_bytes = client.peak_host_bytes(), 0
        for number in range(STEPS):
            step = client.tell(do="steps", tokens=args.tokens, first=number, count=1)
            device_bytes = max(device_bytes, step["device_bytes"])
            found.setdefault("losses", []).extend(step["losses"])
            found.setdefault("step_seconds", []).append(step["seconds"])
        found["peak_until_built"] = host_bytes
        host_bytes = max(host_bytes, client.peak_host_bytes())
        found |= {"host_bytes": host_bytes - (0 if has_device else device_bytes), "device_bytes": device_bytes}
        if device_bytes > args.device_memory:
            found["bound"] = f"device: {format_bytes(device_bytes)}"
        elif found["host_bytes"] > host:
            found["bound"] = f"host: {format_bytes(found['host_bytes'])} at most"
    except RefusedError as refusal:
        found["bound"] = f"refused: {refusal}"
    finally:
        client.close()
    return found


def largest(name: str, task: Task, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All attempts. First twice as many layers each time, then the middle."""
    attempts: list[dict[str, Any]] = []

    def fits(layers: int) -> bool:
        model = f"family-{layers}x{args.width}"
        attempts.append(attempt(name, layers, Task(**{**vars(task), "model": model}), args))
        bound = attempts[-1].get("bound")
        print(f"  {name}: {layers} layers: {bound or 'fits'}", flush=True)
        return bound is None

    good, bad = 0, args.first
    while bad <= LAYERS_AT_MOST and fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // args.fineness):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return attempts


def summary_of(attempts: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    found = {}
    for name, tried in attempts.items():
        good = [each for each in tried if "bound" not in each]
        bad = [each for each in tried if "bound" in each]
        best = max(good, key=lambda each: each["layers"], default=None)
        found[name] = {
            "parameters": best["parameters"] if best else 0,
            "layers": best["layers"] if best else 0,
            "host_bytes": best["host_bytes"] if best else 0,
            "device_bytes": best["device_bytes"] if best else 0,
            "bound": min(bad, key=lambda each: each["layers"])["bound"] if bad else "",
        }
    return found


def markdown(result: dict[str, Any]) -> str:
    settings = result["settings"]
    heads, width, _ = settings["family"]
    has_device = settings["has_device"]
    lines = [
        f"# The largest model within {format_bytes(settings['device_memory'])} of device memory and "
        f"{format_bytes(settings['host_memory'])} of the host's",
        "",
        f"`{result['command']}`, {result['date']}, {result['hardware'].get('gpu', result['hardware']['cpu'])}, "
        f"{settings['dtype']}. GPTs of width {width} with {heads} heads; three steps of {settings['tokens']} tokens. "
        f"Bisection ends where the next size is within {settings['fineness']:.0%}."
        + ("" if has_device else " Host: the process without what would lie on a device, computed from sizes."),
        "",
        "| | parameters | of plain PyTorch | layers | host | B/parameter "
        f"| device{'' if has_device else ' (computed)'} | the next size |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = result["summary"].get(PLAIN, {}).get("parameters", 0)
    for name, row in result["summary"].items():
        ratio = f"{row['parameters'] / plain:.2f}" if plain else "-"
        lines.append(
            f"| {name} | {row['parameters'] / 1e6:.0f} M | {ratio} | {row['layers']} "
            f"| {format_bytes(row['host_bytes'])} | {row['host_bytes'] / max(row['parameters'], 1):.1f} "
            f"| {format_bytes(row['device_bytes'])} | {row['bound']} |"
        )
    lines += ["", *(f"- not run: {name}: {reason}" for name, reason in result["samples"]["refused"].items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = _common.parser_of(__doc__)
    add_systems(parser)
    parser.add_argument("--device-memory", type=parse_bytes, help="default: 2GiB")
    parser.add_argument("--host-memory", type=parse_bytes, help="default: 16GiB; quick: 3GiB")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--first", type=int, help="layers of the first attempt")
    parser.add_argument("--fineness", type=int, help="the next size is larger by one of so many parts at most")
    parser.add_argument("--deadline", type=float, help="seconds after which no other system begins")
    parser.add_argument("--width", type=int, default=FAMILY[1], help="of the models")
    parser.add_argument("--files", help="the folder of systems that keep state on a disk; default: in build/rivals")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a step; a multiple of the context if more")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds of one build or step")
    args = parser.parse_args()
    args.device_memory = args.device_memory or 2 << 30
    args.host_memory = args.host_memory or (3 << 30 if args.quick else 16 << 30)
    args.first = args.first or (2 if args.quick else 8)
    args.fineness = args.fineness or (4 if args.quick else 16)
    has_device = torch.cuda.is_available()
    task = Task(
        "family-1",
        str(text_file(FOLDER)),
        "cuda" if has_device else "cpu",
        args.dtype,
        args.device_memory,
        args.host_memory,
        threads=torch.get_num_threads(),
        clip=0.0,  # so that nothing is bounded by what another way to clip needs
        files=args.files,
    )
    began = _common.hardware()
    names = args.systems
    refused = reasons(names)
    question = "largest" if len(names) > 1 else f"largest_{names[0].lower().replace(' ', '_')}"
    attempts: dict[str, Any] = {}
    samples = {"attempts": attempts, "refused": refused}
    settings = {
        "device_memory": args.device_memory,
        "host_memory": args.host_memory,
        "dtype": args.dtype,
        "family": (FAMILY[0], args.width, FAMILY[2]),
        "tokens": args.tokens,
        "has_device": has_device,
        "fineness": 1 / args.fineness,
        "pins": pins(),
    }

    def written() -> str:
        path = _common.Result(question, samples, summary_of(attempts), settings).write(args, began)
        page = markdown(json.loads(path.read_text()))
        path.with_suffix(".md").write_text(page)
        return page

    start = time.monotonic()
    for name in names:
        if args.deadline and time.monotonic() - start > args.deadline:
            refused.setdefault(name, "not begun: no time was left")
        if name in refused:
            continue
        attempts[name] = largest(name, task, args)
        written()
    if not attempts:
        print("nothing ran")
        return 1
    print(written())  # with who was not begun
    return 0


if __name__ == "__main__":
    sys.exit(main())
