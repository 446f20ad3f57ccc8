"""How fast does each system train the same model, and with how much memory?

    python -m benchmarks.versus --model gpt2-124m --systems all --device auto --device-memory 4GiB \
        --tokens-per-step 2048,4096,8192,16384 --steps 20

One model definition, one stream of real text, one seed, one optimizer setting (systems/task.py). Each system lives in a
process of its own and sleeps while another one trains. They take turns, and who comes first changes from round to
round. A turn is a few steps in a row, until all that they need of device and host is done: an update that is made
behind the next step is hidden within a turn, and paid for at its end. On a device each system races with plain PyTorch
alone, so that no system lacks memory because of others; without one all race together.

Losses are compared step by step with plain PyTorch's. Memory is the kernel's count of each process and of those that it
has started, pinned memory included, from behind its imports. Run `make rivals` first: what does not run here is in the
result with its reason.

The result is JSON, written after each number of tokens; the table and the plots beside it are made from that alone
(`python -m benchmarks.versus.tables`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for _common

import _common
import torch
from noria.policy import parse_bytes

from benchmarks.systems.catalogue import PLAIN, add_systems
from benchmarks.systems.client import Client, RefusedError
from benchmarks.systems.environments import FOLDER, pins, reasons, variables_of
from benchmarks.systems.task import MODELS, Task, text_file
from benchmarks.versus import tables

TURN = 4
"""Steps."""

WARMUP_TURNS = 1
"""Of each number of tokens. In the first steps noria records what comes; planners of others take longer (below)."""

FIRST_WARMUP_TURNS_ON_A_DEVICE = 3


class Race:
    """Systems that are alive at once. `refused`: by system why it is not there."""

    def __init__(self, names: list[str], task: Task) -> None:
        self.task = task
        self.refused: dict[str, str] = {}
        self.clients: dict[str, Client] = {}
        self.about: dict[str, Any] = {}
        self.samples: dict[str, dict[str, Any]] = {}
        self._next = 0  # number of a step
        self._num_rounds = 0
        for name in names:
            self._start(name)

    def _start(self, name: str) -> None:
        try:
            client = Client(name, FOLDER / "logs" / f"versus_{name.replace(' ', '_')}.log")
        except OSError as error:
            self.refused[name] = str(error)
            return
        try:
            built = client.start(self.task)
            self.about[name] = built | {
                "peak_host_until_built": client.peak_host_bytes(),
                "variables": {key: value for key, value in variables_of(name).items() if key != "PATH"},
            }
        except RefusedError as refusal:
            self._leave(name, client, str(refusal))
            return
        self.clients[name] = client
        self.samples[name] = {}
        print(f"  {name}: built in {built['seconds']:.1f} s", flush=True)

    def _leave(self, name: str, client: Client, reason: str) -> None:
        self.clients.pop(name, None)
        client.close()
        self.refused[name] = reason
        print(f"  {name}: {reason}", flush=True)

    def run(self, tokens: int, warmup_turns: int, turns: int) -> None:
        """Rounds: a turn of each system."""
        for name in list(self.clients):
            self._ask(name, tokens, Client.peak_host_bytes)  # from here on
        for turn in range(-warmup_turns, turns):
            names = list(self.clients)
            begin = self._num_rounds % max(len(names), 1)
            for name in names[begin:] + names[:begin]:
                if turn == 0:
                    self._note_moved(name, tokens, "before")
                self._train(name, tokens, is_measured=turn >= 0)
            self._next += TURN
            self._num_rounds += 1
        for name in list(self.clients):
            self._note_moved(name, tokens, "after")
            if peak := self._ask(name, tokens, Client.peak_host_bytes):
                self._found(name, tokens)["peak_host_bytes"] = peak

    def _ask(self, name: str, tokens: int, act: Callable[[Client], Any]) -> Any:
        """Returns None if the client is not there any more."""
        client = self.clients.get(name)
        if client is None:
            return None
        try:
            return act(client)
        except RefusedError as refusal:
            self.samples[name].pop(str(tokens), None)
            self._leave(name, client, f"at {tokens} tokens: {refusal}")
            return None

    def _found(self, name: str, tokens: int) -> dict[str, Any]:
        new = {"seconds": [], "losses": [], "device_bytes": 0, "first": self._next}
        return self.samples[name].setdefault(str(tokens), new)

    def _train(self, name: str, tokens: int, *, is_measured: bool) -> None:
        first = self._next
        turn = self._ask(name, tokens, lambda client: client.tell(do="steps", tokens=tokens, first=first, count=TURN))
        if turn is None:
            return
        found = self._found(name, tokens)
        found["losses"] += turn["losses"]
        found["device_bytes"] = max(found["device_bytes"], turn["device_bytes"])
        if is_measured:
            found["seconds"].append(turn["seconds"])

    def _note_moved(self, name: str, tokens: int, when: str) -> None:
        if about := self._ask(name, tokens, lambda client: client.tell(do="about")):
            self.about[name] |= {key: value for key, value in about.items() if key != "moved_bytes"}
            if about["moved_bytes"] is not None:
                self._found(name, tokens).setdefault("moved_bytes", {})[when] = about["moved_bytes"]

    def close(self) -> None:
        for client in self.clients.values():
            client.close()


def races_of(names: list[str], has_device: bool) -> list[list[str]]:
    """Who is alive with whom."""
    if not has_device:
        return [names]
    others = [name for name in names if name != PLAIN]
    return [[PLAIN, name] for name in others] or [names]


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, help="default: gpt2-124m on a device, gpt-30m without one")
    add_systems(parser)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--device-memory", help="of each system, as 4GiB; default: all")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], help="default: bf16 on a device, fp32 without one")
    parser.add_argument("--tokens-per-step", help="numbers between commas")
    parser.add_argument("--steps", type=int, help=f"measured, of each number of tokens; in turns of {TURN}")
    parser.add_argument("--micro-batches", type=int, default=1, help="accumulated in a step")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of all gradients; 0: none")
    parser.add_argument("--deadline", type=float, help="seconds after which no race begins any more")
    args = parser.parse_args()
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    has_device = device == "cuda"
    tokens = args.tokens_per_step or ("2048,4096,8192,16384" if has_device else "256,512,1024,2048")
    if args.quick and not args.tokens_per_step:
        tokens = "2048,8192" if has_device else "256,512"
    turns = max((args.steps or (4 if args.quick else 20)) // TURN, 1)
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
    began, start = _common.hardware(), time.monotonic()
    refused = reasons(args.systems)
    for name, reason in refused.items():
        print(f"  {name}: {reason}", flush=True)
    settings = {"task": vars(task) | {"tokens": "python standard library"}, "steps": turns * TURN, "turn": TURN}
    settings |= {"warmup_turns": [WARMUP_TURNS, FIRST_WARMUP_TURNS_ON_A_DEVICE if has_device else WARMUP_TURNS]}
    settings["pins"] = pins()
    samples: dict[str, Any] = {"turn": TURN, "races": [], "refused": refused}
    question = f"versus_{task.model}_{task.dtype}" + (f"_of_{args.device_memory}" if args.device_memory else "")

    def written() -> Path:
        summary = tables.summary_of(samples, PLAIN)
        return _common.Result(question, samples, summary, settings).write(args, began)

    for names in races_of([name for name in args.systems if name not in refused], has_device):
        if args.deadline and time.monotonic() - start > args.deadline:
            refused |= dict.fromkeys(names[1:], "not begun: no time was left")
            continue
        race = Race(names, task)
        samples["races"].append({"systems": race.samples, "about": race.about})
        warmup_turns = settings["warmup_turns"][1]
        try:
            for each in map(int, tokens.split(",")):
                race.run(each, warmup_turns, turns)
                warmup_turns = WARMUP_TURNS
                print(f"  {each} tokens: done", flush=True)
                refused |= race.refused
                written()
        finally:
            race.close()
    if not samples["races"]:
        print("nothing ran")
        return 1
    tables.show(written())  # with who was not begun
    absent = [name for name in args.systems if name in refused]
    ran = f"{len(args.systems) - len(absent)} of {len(args.systems)} systems measured"
    print(f"verdict: {ran}" + (f"; not: {', '.join(absent)}" if absent else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
