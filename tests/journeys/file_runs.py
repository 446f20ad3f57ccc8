"""Runs with state in files that end in given ways, each in a process that tests/rounds.py forks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from noria.testing import assert_same_bits, first_difference

from tests.rounds import Ended, Rounds

POLICIES: list[dict[str, Any]] = [
    {"update": "auto"},
    {"update": "backward"},
    {"update": "blocking", "state_dtype": "8bit"},
    {"update": "auto"},
]
FREEZES = 3
"""The policy whose model has frozen weights, which lie in files."""


@dataclasses.dataclass
class Runs:
    """Trains in processes. `whole`: by index of the policy, the end of a run that was never stopped and has no files;
    `counts`: how many of each moment a run with files has."""

    rounds: Rounds
    folder: Path
    disk: Path
    whole: dict[int, Path] = dataclasses.field(default_factory=dict)
    counts: dict[int, dict[str, int]] = dataclasses.field(default_factory=dict)
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def new_folder(self) -> Path:
        folder = self.folder / str(next(self.numbers))
        folder.mkdir()
        return folder

    def run(self, checkpoint: Path, policy: int, *, with_files: bool = True, seed: int = 0, **orders: Any) -> Ended:
        chosen = POLICIES[policy] | ({"files": str(self.disk / "files")} if with_files else {})
        orders |= {"checkpoint": str(checkpoint), "policy": chosen, "seed": seed, "freezes": policy == FREEZES}
        [ended] = self.rounds.run(self.new_folder(), [orders], timeout_s=0.0, patience_s=600.0)
        assert not (with_files and os.listdir(self.disk / "files"))
        return ended

    def train(self, checkpoint: Path, policy: int, **orders: Any) -> Ended:
        ended = self.run(checkpoint, policy, **orders)
        assert ended.status == (-signal.SIGKILL if "kill" in orders else 0), f"{ended.status}: {ended.out}{ended.error}"
        return ended

    def prepare(self, policy: int) -> None:
        """Trains without a kill, in memory and in files."""
        if policy in self.counts:
            return
        self.whole[policy], again = self.new_folder() / "whole.pt", self.new_folder() / "again.pt"
        self.train(self.whole[policy], policy, with_files=False)
        counted = self.train(again, policy, counts=True)
        assert_same_bits(values(self.whole[policy]), values(again))
        self.counts[policy] = json.loads(counted.out.splitlines()[-1])


@contextlib.contextmanager
def runs_in(folder: Path) -> Iterator[Runs]:
    """For checkpoints and what is printed; the files lie on a real file system."""
    rounds = Rounds("tests.killed_run")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as disk:
        yield Runs(rounds, folder, Path(disk))
    rounds.close()


def values(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All weights and all state in it."""
    contents = torch.load(checkpoint, weights_only=True)
    found = dict(contents["model"])
    for number, state in contents["optimizer"]["state"].items():
        found |= {f"{number}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return found


def differ(one: Path, other: Path) -> bool:
    a, b = values(one), values(other)
    return first_difference(list(a.values()), [b[name] for name in a], list(a)) is not None
