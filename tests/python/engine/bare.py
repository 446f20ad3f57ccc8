"""The engine without torch (tests/csrc/engine/bare_engine.h), its slow twin, and the programs that both run.

A program is a list of calls, each a verb and its arguments. The twin does at once, in numpy, what each call means; the
engine moves memory about. Nothing may differ by a bit.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from noria import _C

BUILD = Path(__file__).parents[3] / "build" / "current"
SLOT = 128  # elements; 512 bytes
CELL = 512

Call = tuple[str, tuple[Any, ...]]
Slot = tuple[int, int]  # unit, and which of its slots
ADAMW = {"lr": 0.05, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}

# Before all else here: where it is not built, files that import this one are skipped before they import each other.
if str(BUILD) not in sys.path:
    sys.path.append(str(BUILD))
bare: Any = pytest.importorskip("_bare_engine", reason=f"the bare engine is not built in {BUILD}")


@dataclass
class Model:
    """Units as (slots, trainable slots). Each layer needs some units; its index is its hook."""

    units: list[tuple[int, int]]
    layers: list[list[int]]

    def trainable(self, unit: int) -> bool:
        return self.units[unit][1] > 0

    def slots(self, units: list[int]) -> list[Slot]:
        return [(unit, slot) for unit in units for slot in range(self.units[unit][1])]

    def smallest(self, program: list[Call]) -> tuple[int, int]:
        """The smallest arena and window in which every visit of the program has room."""
        arena, window, needs, gradients = 0, 0, [], set()
        for verb, arguments in program:
            if verb in ("leave", "begin_forward", "begin_backward", "end_pass", "reset"):
                needs, gradients = [], set()
            elif verb == "visit" and not set(arguments[1]) <= set(needs):  # else it is no visit of its own
                needs, gradients = arguments[1], set()
            elif verb == "gradient":
                gradients.add(arguments[0])
            room = sum(self.units[unit][0] for unit in needs) + sum(self.units[unit][1] for unit in gradients)
            arena, window = max(arena, room * CELL), max(window, len(needs))
        return arena, window

    def whole(self) -> int:
        return sum(slots + trainable for slots, trainable in self.units) * CELL


def spread(bits: np.ndarray, number: int, dropped: int = 8) -> np.ndarray:
    mixed = (bits ^ np.uint32(number * 0x9E3779B9 & 0xFFFFFFFF)) * np.uint32(2654435761)
    return (mixed >> np.uint32(dropped)).astype(np.float32) * np.float32(2.0 ** (dropped - 32)) - np.float32(0.5)


@dataclass
class Gradient:
    arrived: bool = False
    held: bool = False
    num_updates: int = 0


class Twin:
    """Everything lies in one memory and happens when it is called for. `is_shared`: it is that of ranks which share a
    home, whose gradients have so few digits that the order of sums does not matter."""

    def __init__(self, units: list[tuple[int, int]], is_shared: bool = False) -> None:
        self.dropped = 20 if is_shared else 8
        self.slots = [[Gradient() for _ in range(trainable)] for _, trainable in units]
        counts = [slots * SLOT for slots, _ in units]
        self.weights = [spread(np.arange(n, dtype=np.uint32), u + 1) for u, n in enumerate(counts)]
        self.results = [np.zeros(n, np.uint32) for n in counts]
        self.held, self.moment1, self.moment2 = ([np.zeros(n, np.float32) for n in counts] for _ in range(3))
        self.num_gradients = 0

    def visit(self, hook: int, needs: list[int]) -> None:
        for unit in needs:
            bits = self.weights[unit].view(np.uint32)
            self.results[unit] = self.results[unit] * np.uint32(1664525) + bits + np.uint32(1013904223)

    def gradient(self, unit: int, slot: int) -> None:
        self.num_gradients += 1
        state, part = self.slots[unit][slot], self.part(slot)
        gradient = spread(self.results[unit][part], self.num_gradients, self.dropped)
        if state.arrived or state.held:
            gradient = self.held[unit][part] + gradient
        self.held[unit][part] = gradient
        state.arrived = True

    def end_pass(self) -> None:
        for state in (state for unit in self.slots for state in unit):
            state.held, state.arrived = state.held or state.arrived, False

    def reset(self) -> None:
        for state in (state for unit in self.slots for state in unit):
            state.arrived = False

    def clip(self, unit: int, slot: int) -> None:
        self.held[unit][self.part(slot)] *= np.float32(0.5)

    def keep(self, unit: int, slot: int) -> None:
        """Who can write it does not matter here."""

    def look(self, unit: int, slot: int) -> None:
        part = self.part(slot)
        bits = self.held[unit][part].view(np.uint32)
        self.results[unit][part] = self.results[unit][part] * np.uint32(1664525) + bits + np.uint32(1013904223)

    def zero_grad(self) -> None:
        for state in (state for unit in self.slots for state in unit):
            state.held = False

    def update(self, unit: int, on_pool: bool) -> None:
        for slot, state in enumerate(self.slots[unit]):
            if not state.held:
                continue
            state.num_updates += 1
            part = self.part(slot)
            w, g, m, v = (a[unit][part] for a in (self.weights, self.held, self.moment1, self.moment2))
            if on_pool:
                pieces = [(0, w.size, _C.update_scalars("adamw", state.num_updates, **ADAMW))]
                arrays = _C.UnitArrays(master=w.ctypes.data, m=m.ctypes.data, v=v.ctypes.data)
                _C.UpdateJob("adamw", pieces, arrays, gradient=g.ctypes.data).run()
            else:
                m[:] = np.float32(0.5) * m + g
                w -= np.float32(0.25) * m

    def claim(self) -> None:
        for unit in range(len(self.slots)):
            self.update(unit, on_pool=True)
        self.zero_grad()

    def sums(self) -> list[float]:
        found = []
        for unit, states in enumerate(self.slots):
            for slot, state in enumerate(states):
                if not state.held:
                    continue
                squares = self.held[unit][self.part(slot)].astype(np.float64).reshape(-1, 32) ** 2
                lanes = np.zeros(32)
                for row in squares:
                    lanes += row
                found.append(sum(lanes.tolist()))
        return found

    def read_home(self, unit: int) -> list[float]:
        return self.weights[unit].tolist()

    def write_home(self, unit: int, value: float) -> None:
        self.weights[unit] = self.weights[unit] * np.float32(0.5) + np.float32(value)

    def nothing(self, *_: Any) -> None:
        """What only moves memory."""

    begin_forward = begin_backward = leave = begin_step = end_step = idle = change_stream = set_unsynced = nothing
    expect_updates = await_stream = expect_in_backward = lend = keep_copies = shrink_copies = nothing
    lose = nothing

    def part(self, slot: int) -> slice:
        return slice(slot * SLOT, (slot + 1) * SLOT)

    def outcome(self) -> dict[str, np.ndarray]:
        """Every bit that a user may see."""
        out = {}
        for unit, states in enumerate(self.slots):
            arrays = {"weights": self.weights, "moment1": self.moment1, "moment2": self.moment2}
            out |= {f"{name} of unit {unit}": array[unit].view(np.uint32) for name, array in arrays.items()}
            out[f"result of unit {unit}"] = self.results[unit]
            for slot, state in enumerate(states):
                if state.held:
                    out[f"gradient {slot} of unit {unit}"] = self.held[unit][self.part(slot)].view(np.uint32)
        return out


def play(program: list[Call], on: Any) -> list[Any]:
    """Calls everything; returns what was returned."""
    returned = [getattr(on, verb)(*arguments) for verb, arguments in program]
    return [each for each in returned if each is not None]


def engine_outcome(engine: Any, twin: Twin) -> dict[str, np.ndarray]:
    """What the engine has of all that the twin shows."""

    def of(name: str) -> np.ndarray:
        words = name.split()
        unit = int(words[-1])
        if words[0] == "result":
            return np.array(engine.result(unit), np.uint32)
        if words[0] == "gradient":
            return np.array(engine.array("held", unit), np.float32)[twin.part(int(words[1]))].view(np.uint32)
        return np.array(engine.array(words[0], unit), np.float32).view(np.uint32)

    return {name: of(name) for name in twin.outcome()}


def differences(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    """Where two outcomes differ, element by element."""
    assert a.keys() == b.keys()
    found = []
    for name in a:
        where = np.flatnonzero(a[name] != b[name])
        if where.size:
            found.append(f"{name}: {where.size} of {a[name].size} elements, the first at {where[0]}")
    return found
