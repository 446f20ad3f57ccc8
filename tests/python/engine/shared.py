"""Ranks that share a home, in one process: a bare engine each, on a thread each, that play the same program.

All compute the same, so that the mean of their gradients is each of them, to the bit, where their number is a power of
two; and the twin of one engine is theirs.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.python.engine.bare import SLOT, Call, Twin, bare, play


class Ranks:
    """`holds`: by rank, by how much ops of a verb are late."""

    def __init__(
        self, size: int, units: list[tuple[int, int]], holds: Sequence[dict[str, int]] = (), **settings: Any
    ) -> None:
        self.units = units
        self.group = bare.LocalGroup(size)
        self.engines = [
            bare.BareEngine(units, group=self.group, rank=rank, hold_us=holds[rank] if holds else {}, **settings)
            for rank in range(size)
        ]

    def play(self, program: list[Call]) -> list[Any]:
        """What each call returned that returns something: of a read at home, the whole unit."""
        returned: list[list[Any]] = [[] for _ in self.engines]
        errors: list[BaseException] = []

        def follow(rank: int) -> None:
            try:
                returned[rank] = play([*program, ("idle", ())], self.engines[rank])
            except BaseException as error:
                errors.append(error)
                self.group.leave()

        threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(len(self.engines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        reads = [arguments[0] for verb, arguments in program if verb == "read_home"]
        return [self.whole(unit, list(parts)) for unit, *parts in zip(reads, *returned, strict=True)]

    def whole(self, unit: int, parts: list[list[float]]) -> list[float]:
        """From each rank's part of the trained slots, and of the frozen ones behind it."""
        cut = self.units[unit][1] * SLOT // len(parts)
        return [each for part in parts for each in part[:cut]] + [each for part in parts for each in part[cut:]]

    def outcome(self, twin: Twin) -> dict[str, np.ndarray]:
        """All that the twin shows, and that every rank's results are the first one's."""
        found = {}
        for name in twin.outcome():
            words = name.split()
            unit = int(words[-1])
            if words[0] == "result":
                found[name] = np.array(self.engines[0].result(unit), np.uint32)
                for rank, engine in enumerate(self.engines):
                    found[f"{name} on rank {rank}"] = np.array(engine.result(unit), np.uint32)
                continue
            which = "held" if words[0] == "gradient" else words[0]
            values = self.whole(unit, [engine.array(which, unit) for engine in self.engines])
            bits = np.array(values, np.float32).view(np.uint32)
            found[name] = bits[twin.part(int(words[1]))] if which == "held" else bits
        return found

    def each(self, verb: str, *arguments: Any) -> list[Any]:
        return [getattr(engine, verb)(*arguments) for engine in self.engines]


def expected(twin: Twin, size: int) -> dict[str, np.ndarray]:
    """The twin's outcome, as `Ranks.outcome` names it."""
    found = twin.outcome()
    for name in [name for name in found if name.startswith("result")]:
        found |= {f"{name} on rank {rank}": found[name] for rank in range(size)}
    return found
