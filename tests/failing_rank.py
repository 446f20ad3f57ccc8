"""Runs one of several ranks that train together, and one of them fails at a given moment: the script of
tests/journeys/test_rank_failures.py. tests/rounds.py forks its ranks.

The moment is the n-th call of a function of noria's or of this loop, of one name or of any. What other threads do
at that moment does not matter.
"""

from __future__ import annotations

import datetime
import importlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import noria
import torch
import torch.distributed as dist

from tests.journeys.pairs import Net, loss_of, sgd
from tests.rounds import serve

STEPS = 3
WATCHED = (str(Path(noria.__file__).parent), str(Path(__file__).parent))


class MishapError(Exception):
    """What a rank raises by itself."""


class Moment:
    """Counts calls, and acts at one of them."""

    def __init__(self, described: str) -> None:
        self.how, self.name, number = described.split(":")
        self.number = int(number)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or self.name not in ("any", code.co_name) or not code.co_filename.startswith(WATCHED):
            return
        self.number -= 1
        if self.number != 0:
            return
        print("failing in", code.co_qualname, flush=True)
        if self.how == "raise":
            sys.setprofile(None)
            raise MishapError("of this rank's own")
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}[self.how])


class Model(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        if logits.requires_grad:
            logits.register_hook(on_gradient)
        return logits


def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone()


def on_loss(loss: torch.Tensor) -> None:
    """What a loop does between forward and backward."""


def train(rank: int, checkpoint: Path, policy: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Model(blocks=3)
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device="cpu", window=2, **policy)
    for number in range(STEPS):
        with model.no_sync():
            loss_of(model, 10 * number + rank).backward()
        loss = loss_of(model, 100 * number + rank)
        on_loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        noria.save(checkpoint, model, optimizer, step=number + 1)
        print("step", number + 1, flush=True)


def meet(rank: int, size: int, folder: Path, timeout: datetime.timedelta) -> None:
    """Makes the process group when all ranks are there and have loaded what a first step loads: its timeout is for what
    follows."""
    model = Model(blocks=1)
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device="cpu", window=2)
    loss_of(model, 0).backward()
    optimizer.step()
    noria.unwrap(model, optimizer)
    store = dist.FileStore(str(folder / "meeting"), size)
    store.set(f"rank {rank} is there", "")
    store.wait([f"rank {other} is there" for other in range(size)], datetime.timedelta(minutes=2))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


POLICIES: list[dict[str, Any]] = [{}, {"max_grad_norm": 0.1}, {"draft_memory": "64MiB"}, {"update": "blocking"}]


def run(rank: int, size: int, folder: Path, orders: dict[str, Any], timeout_s: float) -> None:
    """`orders`: maybe "fails": kill, hang or raise, the name of a function, and the number of its call."""
    torch.set_num_threads(1)
    meet(rank, size, folder, datetime.timedelta(seconds=timeout_s))
    if "fails" in orders:
        sys.setprofile(Moment(orders["fails"]))
    train(rank, folder / "checkpoint.pt", POLICIES[orders["policy"]])
    sys.setprofile(None)
    print("finished", flush=True)


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # a first optimizer would, in each rank
    serve(run)
