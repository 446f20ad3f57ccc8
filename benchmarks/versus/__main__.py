"""How fast does each system train the same model, and with how much memory?

    python -m benchmarks.versus --model gpt2-124m --systems all --device auto --device-memory 4GiB \
        --tokens-per-step 2048,4096,8192,16384 --steps 20

One model definition, one stream of real text, one seed, one optimizer setting (systems/task.py). Each system lives in a
process of its own and sleeps while another one steps; steps take turns, and who comes first changes from round to
round. Losses are compared step by step with plain PyTorch's. Memory is the kernel's count of each process, pinned
memory included, from behind its imports; on a machine without a device, what would lie on one is in it, is known, and
is told apart. Run `make rivals` first: what does not run here is in the result with its reason.

The result is JSON; the table and the plots beside it are made from that alone (`python -m benchmarks.versus.tables`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for _common

import _common
import torch
from noria.policy import parse_bytes

from benchmarks.rivals.__main__ import STATUS
from benchmarks.rivals.environments import FOLDER, pins
from benchmarks.systems.catalogue import PLAIN, SYSTEMS, add_systems
from benchmarks.systems.client import Client, RefusedError
from benchmarks.systems.task import MODELS, Task, text_file
from benchmarks.versus import tables

WARMUP = 3  # steps of each number of tokens; in the first ones noria records what comes
WARMUP_QUICK = 2


class Race:
    """All systems that run, alive at once."""

    def __init__(self, names: list[str], task: Task) -> None:
        self.task = task
        self.refused = reasons(names)
        self.clients: dict[str, Client] = {}
        self.about: dict[str, Any] = {}
        self.samples: dict[str, dict[str, Any]] = {}
        for name in names:
            if name not in self.refused:
                self._start(name)

    def _start(self, name: str) -> None:
        client = Client(name, FOLDER / "logs" / f"versus_{name.replace(' ', '_')}.log")
        try:
            built = client.start(self.task)
        except RefusedError as refusal:
            self._leave(name, client, str(refusal))
            return
        self.clients[name] = client
        self.about[name] = built | {"peak_host_until_built": client.peak_host_bytes()}
        self.samples[name] = {}
        print(f"  {name}: built in {built['seconds']:.1f} s", flush=True)

    def _leave(self, name: str, client: Client, reason: str) -> None:
        self.clients.pop(name, None)
        client.close()
        self.refused[name] = reason
        print(f"  {name}: {reason}", flush=True)

    def run(self, tokens: int, first: int, warmup: int, steps: int) -> None:
        """Rounds number `first`, ...: a step of each."""
        for name in list(self.clients):
            self._ask(name, tokens, Client.peak_host_bytes)  # from here on
        for number in range(first, first + warmup + steps):
            names = list(self.clients)
            begin = number % max(len(names), 1)
            for name in names[begin:] + names[:begin]:
                if number == first + warmup:
                    self._note_moved(name, tokens, "before")
                self._step(name, tokens, number, number >= first + warmup)
        for name in list(self.clients):
            self._note_moved(name, tokens, "after")
            if peak := self._ask(name, tokens, Client.peak_host_bytes):
                self.samples[name][str(tokens)]["peak_host_bytes"] = peak

    def _ask(self, name: str, tokens: int, act: Callable[[Client], Any]) -> Any:
        """None from whoever is not there any more."""
        client = self.clients.get(name)
        if client is None:
            return None
        try:
            return act(client)
        except RefusedError as refusal:
            self.samples[name].pop(str(tokens), None)
            self._leave(name, client, f"at {tokens} tokens: {refusal}")
            return None

    def _step(self, name: str, tokens: int, number: int, is_measured: bool) -> None:
        step = self._ask(name, tokens, lambda client: client.tell(do="step", tokens=tokens, number=number))
        if step is None:
            return
        found = self.samples[name].setdefault(
            str(tokens), {"seconds": [], "losses": [], "device_bytes": 0, "first": number}
        )
        found["losses"].append(step["loss"])
        found["device_bytes"] = max(found["device_bytes"], step["device_bytes"])
        if is_measured:
            found["seconds"].append(step["seconds"])

    def _note_moved(self, name: str, tokens: int, when: str) -> None:
        if about := self._ask(name, tokens, lambda client: client.tell(do="about")):
            self.about[name] |= {key: value for key, value in about.items() if key != "moved_bytes"}
            if about["moved_bytes"] is not None:
                self.samples[name][str(tokens)].setdefault("moved_bytes", {})[when] = about["moved_bytes"]

    def close(self) -> None:
        for client in self.clients.values():
            client.close()


def reasons(names: list[str]) -> dict[str, str]:
    """Of those that do not run on this machine, as `make rivals` has found."""
    status = json.loads(STATUS.read_text()) if STATUS.exists() else {}
    needed = [name for name in names if name not in status and SYSTEMS[name].environment in pins()]
    if needed:
        raise SystemExit(f"expected the environments of {', '.join(needed)}; found none: run `make rivals`")
    return {name: status[name]["reason"] for name in names if name in status and not status[name]["runs"]}


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, help="default: gpt2-124m on a device, gpt-30m without one")
    add_systems(parser)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--device-memory", help="of each system, as 4GiB; default: all")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], help="default: bf16 on a device, fp32 without one")
    parser.add_argument("--tokens-per-step", help="numbers between commas")
    parser.add_argument("--steps", type=int, help="measured, of each number of tokens")
    parser.add_argument("--micro-batches", type=int, default=1, help="accumulated in a step")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of all gradients; 0: none")
    args = parser.parse_args()
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    has_device = device == "cuda"
    tokens = args.tokens_per_step or ("2048,4096,8192,16384" if has_device else "256,512,1024,2048")
    if args.quick and not args.tokens_per_step:
        tokens = "2048,8192" if has_device else "256,512"
    steps = args.steps or (3 if args.quick else 20)
    task = Task(
        args.model or ("gpt2-124m" if has_device else "gpt-3m" if args.quick else "gpt-30m"),
        str(text_file(FOLDER)),
        device,
        args.dtype or ("bf16" if has_device else "fp32"),
        parse_bytes(args.device_memory) if args.device_memory else None,
        threads=torch.get_num_threads(),
        clip=args.clip,
        micro_batches=args.micro_batches,
    )
    began = _common.hardware()
    names = args.systems
    race = Race(names, task)
    warmup, number = WARMUP_QUICK if args.quick else WARMUP, 0
    try:
        for each in map(int, tokens.split(",")):
            race.run(each, number, warmup, steps)
            number += warmup + steps
            print(f"  {each} tokens: done", flush=True)
    finally:
        race.close()
    samples = {"systems": race.samples, "about": race.about, "refused": race.refused}
    summary = tables.summary_of(samples, PLAIN)
    settings = {"task": vars(task) | {"tokens": "python standard library"}, "steps": steps, "warmup": warmup}
    settings["pins"] = pins()
    question = f"versus_{task.model}_{task.dtype}" + (f"_of_{args.device_memory}" if args.device_memory else "")
    path = _common.Result(question, samples, summary, settings).write(args, began)
    tables.show(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
