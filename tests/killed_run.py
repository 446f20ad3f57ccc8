"""Trains with state in files, saves every few steps, and kills itself at a given moment, or omits a wait: the script of
tests/journeys/test_files_killed.py and test_files_waits.py. tests/rounds.py forks it.

A moment is a kind and a number: of "calls" of the main thread, to Python and C; of "save calls", those inside of one
noria.save; of ops that are done on the lane "read" or "write". The other threads are anywhere then.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import noria
import torch
from noria import _C
from noria.testing import omit_wait, on_machine
from noria.wrapped import wrapped_by
from torch import nn

from tests.journeys import test_files, test_frozen_files
from tests.journeys.pairs import HOSTILE
from tests.journeys.test_files import train
from tests.rounds import serve

STEPS, SAVE_EVERY, KILLED_SAVE = 6, 2, 4
LANES = ("read", "write", "read_weights")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Calls:
    """Counts this thread's calls, and dies at one of them."""

    def __init__(self) -> None:
        self.number, self.last = 0, -1

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self.number += 1
            if self.number == self.last:
                die()


def num_ops(model: nn.Module, lane: str) -> int:
    return wrapped_by(model).context.engine.statistics.file_stats(lane)["num_ops"]


def die_behind(model: nn.Module, lane: str, last: int) -> None:
    """Dies when so many ops of this lane are done, or a little later: another thread looks."""

    def look() -> None:
        while num_ops(model, lane) < last:
            time.sleep(0)
        die()

    sys.setswitchinterval(1e-4)
    threading.Thread(target=look, daemon=True).start()


def run(rank: int, size: int, folder: Path, orders: dict[str, Any], timeout_s: float) -> None:
    """`orders`: the `checkpoint` to go on from and to save; `policy`; the `seed` of all that is late; `freezes`, that
    some weights are frozen. These may lack:
    `kill`, a moment and its number; `counts`, that it counts calls; `until`, the step to end at; `omit`, a kind of
    wait; `hold_us`, by verb."""
    torch.set_num_threads(1)
    checkpoint, (moment, number) = Path(orders["checkpoint"]), orders.get("kill", ("never", 0))
    faults = _C.RandomFileFaults(orders["seed"], short_answers=0.2, interruptions=0.1, max_delay_us=300)
    hostility = {**HOSTILE, "seed": orders["seed"], "hold_us": orders.get("hold_us", {})}
    with on_machine(hostility=hostility, file_faults=faults):
        module = test_frozen_files if orders["freezes"] else test_files
        model, optimizer = module.wrapped(**orders["policy"])
    omit_wait(model, orders.get("omit", ""))
    begin = noria.load(checkpoint, model, optimizer)["step"] if checkpoint.exists() else 0
    print("began at", begin, flush=True)
    calls = Calls()
    if moment == "calls":
        calls.last = number
    elif moment in LANES:
        die_behind(model, moment, num_ops(model, moment) + number)
    counted = {lane: -num_ops(model, lane) for lane in LANES if "files" in orders["policy"]}
    if "counts" in orders or moment.endswith("calls"):
        sys.setprofile(calls)
    for step in range(begin, orders.get("until", STEPS)):
        train(model, optimizer, step, step + 1)
        if (step + 1) % SAVE_EVERY == 0:
            counted["save calls"] = -calls.number
            if moment == "save calls" and step + 1 == KILLED_SAVE:
                calls.last = calls.number + number
            noria.save(checkpoint, model, optimizer, step=step + 1)
            counted["save calls"] += calls.number
    sys.setprofile(None)
    counted["calls"] = calls.number
    print(json.dumps(wrapped_by(model).context.engine.wait_kinds()))
    print(json.dumps({what: many + (num_ops(model, what) if what in LANES else 0) for what, many in counted.items()}))


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # a first optimizer would, in each process
    gc.collect()
    gc.freeze()  # noria.wrap collects, and would look at all that has been imported
    serve(run)
