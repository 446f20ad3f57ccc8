"""Runs stages of a pipeline that lend each other memory, and some fail or end in a given order: the script of
tests/journeys/test_lending_failures.py.

tests/rounds.py forks its ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import re
import select
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import noria
import torch
import torch.distributed as dist
from noria import _C
from noria.planning import wrap_plan
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from tests.failing_rank import Moment
from tests.journeys.pairs import WIDTH, adamw
from tests.journeys.test_lending import LENGTH, ROOM
from tests.journeys.test_pipelines import NUM_MICRO_BATCHES, Stage
from tests.rounds import serve


class MomentOfAnother(Moment):
    """At which another rank is killed, and is gone when the call begins."""

    def __init__(self, described: str, pid_file: Path) -> None:
        rank, moment = described.split(":", 1)
        super().__init__(f"raise:{moment}")
        self.pid_file = pid_file.with_name(f"pid{rank}")

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        try:
            super().__call__(frame, event, argument)
        except Exception:
            pid = int(self.pid_file.read_text())
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)


def wait_until(happened: Callable[[], bool]) -> None:
    while not happened():
        time.sleep(0.005)


def wait_for_end(pid: int) -> None:
    """Waits for the end of all threads of another rank. Its parent process may not have been told yet."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([process], [], [])
    os.close(process)


class HookedStage(Stage):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:  # torch 2.11 looks at shapes first, without gradients
                x.register_hook(on_gradient)
        return x


def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone()


def on_step(step: int) -> None:
    """Between steps."""


class Loop:
    """One rank's. Of `orders` each may lack. `fails`: a moment, as tests/failing_rank.py has it; `kills`: the same of
    this rank's, at which that one is killed whose number comes first; `other`: the one that fails, whose end this one
    waits for before it goes on; `workers`: that it forks; `never_steps`; `early_step`; `alone`: wraps without stages;
    `lacks_units`: all that it borrows for; `ends`: "unwrap", "drop" or "exit", which waits for the other one's `after`:
    "end" or "exit"; `times` that it does all."""

    def __init__(self, rank: int, size: int, folder: Path, orders: dict[str, Any], nth: int) -> None:
        self.rank, self.size, self.folder, self.orders, self.nth = rank, size, folder, orders, nth
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("stages",))
        torch.manual_seed(rank)
        self.model = HookedStage()
        self.optimizer = adamw(self.model.parameters())
        policy = {"kernel": "torch", "activations": "auto", "activation_memory": ROOM}
        if "lacks_units" in orders:  # and nothing else: what it borrows is for them
            policy = {"kernel": "torch", "activations": "keep"}
        policy |= {"mesh": DeviceMesh("cpu", [rank])} if "alone" in orders else {"stages": mesh["stages"]}
        # So slow that it holds the compute up on a busy machine, too.
        limits = {"fetch": (0.0005, 0.0)} if "lacks_units" in orders else {}
        self.held = held()
        with on_machine(limits=limits):
            noria.wrap(self.model, self.optimizer, device="cpu", window=2, **policy)
        group = mesh["stages"].get_group()
        stage = pipelining.PipelineStage(self.model, rank, size, torch.device("cpu"), group=group)
        self.play = pipelining.Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=F.mse_loss)

    def train(self) -> None:
        if "early_step" in self.orders:
            self.optimizer.step()
        for step in range(self.orders.get("steps", 4)):
            generator = torch.Generator().manual_seed(step)
            x, target = (torch.randn(8, LENGTH, WIDTH, generator=generator) for _ in range(2))
            on_step(step)
            if self.rank == 0:
                self.play.step(x)
            else:
                self.play.step(**({"target": target, "losses": []} if self.rank == self.size - 1 else {}))
            if self.orders.get("never_steps"):
                wait_for_end(self.pid_of(1 - self.rank))
                return
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step == 0:
                self.note_lending()
                self.workers = [fork_worker() for _ in range(self.orders.get("workers", 0))]
            print("step", step + 1, noria.report(self.model).copies["num_fetched"], "from peers", flush=True)

    def note_lending(self) -> None:
        """Before anything fails: this rank does lend or borrow, and its socket's name can be seen."""
        lending = wrapped_by(self.model).peer_memory
        assert lending.lent or self.rank != self.size - 1
        assert lending.borrowed or self.rank != 0
        if lending.lent:
            name = lending._lender.address.split(":")[1]
            assert name in Path("/proc/net/unix").read_text()
            (self.folder / "socket").write_text(name)

    def pid_of(self, rank: int) -> int:
        return int((self.folder / f"pid{rank}").read_text())

    def go_on_alone(self) -> None:
        """After an error that another rank is to blame for: what noria says then, and that the model is whole."""
        lending = wrapped_by(self.model).peer_memory
        if "other" in self.orders:  # connections are closed before a process has ended
            wait_for_end(self.pid_of(self.orders["other"]))
        try:
            self.optimizer.step()
        except _C.MachineError as error:
            print("step raised", error, flush=True)
        print("lends", sum(loan.bytes for loan in lending.lent), flush=True)
        self.unwrap()
        print("unwrapped", flush=True)
        if "other" in self.orders:
            now = held()
            assert now == self.held, f"{now} are held, and {self.held} were before noria.wrap"

    def end(self) -> None:
        after, how = self.orders.get("after"), self.orders.get("ends", "exit")
        if after == "end":
            wait_until((self.folder / f"ended{1 - self.rank}-{self.nth}").exists)
        elif after == "exit":
            wait_for_end(self.pid_of(1 - self.rank))
        if how == "unwrap":
            self.unwrap()
        elif how == "drop":
            del self.model, self.optimizer, self.play
            gc.collect()
        (self.folder / f"ended{self.rank}-{self.nth}").touch()

    def unwrap(self) -> None:
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        noria.unwrap(self.model, self.optimizer)
        assert_same_bits(before, {name: value.detach() for name, value in self.model.named_parameters()})


def held() -> Counter[str]:
    """What this process has open, by kind, and which memory of noria's it has mapped. But for connections of process
    groups, which torch closes when the other end is gone."""
    local = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    sockets = [link for link in links if link.startswith("socket:")]
    of_groups = [link for link in sockets if link[len("socket:[") : -1] not in local]
    mapped = [line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:noria" in line]
    return Counter(re.sub(r"\[\d+\]", "", link) for link in links if link not in of_groups) + Counter(mapped)


def fork_worker() -> int:
    """As a data loader's: it has all that its parent has, and goes when that is gone."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: a process of several threads forks
        pid = os.fork()
    if pid == 0:
        while os.getppid() == parent:
            time.sleep(0.02)
        os._exit(0)
    return pid


def run(rank: int, size: int, folder: Path, orders: dict[str, Any], timeout_s: float) -> None:
    torch.set_num_threads(1)
    wrap_plan.LEAST_SAVED = 64
    folder.joinpath(f"pid{rank}").write_text(str(os.getpid()))
    store = dist.FileStore(str(folder / "meeting"), size)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    for nth in range(orders.get("times", 1)):
        run_once(Loop(rank, size, folder, orders, nth))
        gc.collect()
        print("descriptors", len(os.listdir("/proc/self/fd")), flush=True)
    print("finished", flush=True)


def run_once(loop: Loop) -> None:
    orders = loop.orders
    if "fails" in orders:
        sys.setprofile(Moment(orders["fails"]))
    if "kills" in orders:
        sys.setprofile(MomentOfAnother(orders["kills"], loop.folder / "pid"))
    try:
        loop.train()
    except RuntimeError:
        sys.setprofile(None)
        loop.go_on_alone()
        raise
    sys.setprofile(None)
    loop.end()


if __name__ == "__main__":
    serve(run)
