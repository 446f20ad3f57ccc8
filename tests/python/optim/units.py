"""A unit's arrays as numpy has them, for the kernels: every rule, every format, as updates and as drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from noria import _C

from tests.roomy_logs import PLANNED_SLOTS

MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "lion": 1}
RULES = list(MOMENTS)
SETS = _C.instruction_sets()
STATES = ["fp32", "bf16", "8bit"]

HYPER: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2},
    "adam": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2},
    "sgd": {"lr": 1e-1, "weight_decay": 1e-2},
    "sgd_momentum": {"lr": 1e-1, "weight_decay": 1e-2, "momentum": 0.9, "dampening": 0.1, "nesterov": False},
    "lion": {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 1e-1},
}
"""By rule: what nothing else is said about."""


def aligned(count: int, dtype: Any) -> np.ndarray:
    """Not written yet; at a multiple of 64 bytes, as all memory of the home is."""
    size = np.dtype(dtype).itemsize
    memory = np.empty(count * size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count * size].view(dtype)


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def widened(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def split(master: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high, low = aligned(master.size, np.uint16), aligned(master.size, np.uint16)
    _C.split_master(master.ctypes.data, high.ctypes.data, low.ctypes.data, master.size)
    return high, low


def encoded(values: np.ndarray, is_first: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales."""
    values = np.ascontiguousarray(values, np.float32)
    codes, scales = aligned(values.size, np.uint8), aligned(-(-values.size // _C.STATE_BLOCK), np.float32)
    _C.encode_moment(values.ctypes.data, codes.ctypes.data, scales.ctypes.data, values.size, is_first=is_first)
    return codes, scales


def decoded(codes: np.ndarray, scales: np.ndarray, is_first: bool) -> np.ndarray:
    values = np.empty(codes.size, np.float32)
    _C.decode_moment(codes.ctypes.data, scales.ctypes.data, values.ctypes.data, codes.size, is_first=is_first)
    return values


class Unit:
    """`arrays` by the names that `UnitArrays` gives them; the gradient is cut to bf16 where the master is split, and so
    are the moments where `state` says so."""

    def __init__(
        self,
        rule: str,
        p: np.ndarray,
        g: np.ndarray,
        *,
        moments: Sequence[np.ndarray] = (),
        split_master: bool = False,
        state: str = "fp32",
    ) -> None:
        self.rule, self.count, self.split, self.state = rule, p.size, split_master, state
        self.first = 0  # the number of the first element
        self.arrays: dict[str, np.ndarray] = {}
        if split_master:
            self.arrays["working"], self.arrays["low"] = split(np.ascontiguousarray(p, np.float32))
            self.gradient = bf16(g)
        else:
            self.arrays["master"] = self._own(p)
            self.gradient = g
        for number in range(MOMENTS[rule]):
            self._set_moment("mv"[number], moments[number] if moments else np.zeros_like(p))

    def _set_moment(self, name: str, values: np.ndarray) -> None:
        if self.state == "8bit":
            self.arrays[name], self.arrays[f"{name}_scales"] = encoded(values, name == "m")
        else:
            self.arrays[name] = self._own(bf16(values) if self.state == "bf16" else values)

    def moment(self, name: str) -> np.ndarray:
        """In fp32."""
        if self.state == "8bit":
            return decoded(self.arrays[name], self.arrays[f"{name}_scales"], name == "m")
        return widened(self.arrays[name]) if self.state == "bf16" else self.arrays[name]

    @staticmethod
    def _own(values: np.ndarray) -> np.ndarray:
        copy = aligned(values.size, values.dtype)
        copy[:] = values
        return copy

    @property
    def master(self) -> np.ndarray:
        if not self.split:
            return self.arrays["master"]
        high, low = self.arrays["working"], self.arrays["low"]
        master = np.empty(self.count, np.float32)
        _C.join_master(high.ctypes.data, low.ctypes.data, master.ctypes.data, self.count)
        return master

    def addresses(self, arrays: dict[str, np.ndarray]) -> Any:
        state = self.state if MOMENTS[self.rule] else "fp32"
        return _C.UnitArrays(**{name: array.ctypes.data for name, array in arrays.items()}, state=state)

    def scalars(self, step: int, hyper: dict[str, Any] | None = None, **changed: Any) -> Any:
        return _C.update_scalars(self.rule, step, **{**(hyper or HYPER[self.rule]), **changed})

    def job(
        self,
        step: int = 1,
        *,
        cut: Sequence[int] = (),
        scalars: Any = None,
        sums: bool = False,
        **changed: Any,
    ) -> Any:
        edges = [0, *sorted(cut), self.count]
        scalars = scalars or self.scalars(step, **changed)
        pieces = [
            (begin, end - begin, scalars, self.first + begin, begin // _C.STATE_BLOCK) for begin, end in pairwise(edges)
        ]
        return _C.UpdateJob(
            self.rule, pieces, self.addresses(self.arrays), gradient=self.gradient.ctypes.data, sums=sums
        )

    def drafting(self, job: Any, cut: Sequence[int] = (), slots: int | None = None) -> Any:
        """The job as a draft, and a new log, full of what must be overwritten. `slots`: None: as planned."""
        edges = [0, *sorted(cut), self.count]
        blocks = sum(_C.num_undo_blocks(end - begin) for begin, end in pairwise(edges))
        size = self.count, blocks, int(self.count * PLANNED_SLOTS if slots is None else slots)
        self.log = aligned(_C.undo_log_bytes(*size), np.uint8)
        self.log[:] = 0xFF
        return job.drafting(self.log.ctypes.data, *size)

    def step(
        self, step: int = 1, *, draft: bool = False, instruction_set: str = "", slots: int | None = None, **job: Any
    ) -> None:
        """In place; or as a draft that is undone, made once more, and kept."""
        update = self.job(step, **job)
        if not draft:
            update.run(instruction_set)
            return
        before = self.bits()
        drafted = self.drafting(update, job.get("cut", ()), slots)
        drafted.run(instruction_set)
        drafted.undoing().run(instruction_set)
        assert self.bits() == before, "an undo restores every bit"
        drafted.run(instruction_set)
        update.redoing(drafted).run(instruction_set)

    def bits(self) -> bytes:
        return b"".join(array.tobytes() for array in self.arrays.values())


def any_floats(rng: np.random.Generator, count: int) -> np.ndarray:
    """Every pattern but NaN is as likely as any other: denormals, infinities, all exponents."""
    values = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    return np.where(np.isnan(values), np.float32(1), values)


def make(
    rule: str, count: int, seed: int = 0, *, wild: bool = False, split_master: bool = False, state: str = "fp32"
) -> Unit:
    """The seed alone says what the arrays hold."""
    rng = np.random.default_rng(seed)
    if wild:
        p, m, v, g = (any_floats(rng, count) for _ in range(4))
        v = np.abs(v)
    else:
        p, m, v, g = (rng.standard_normal(count, dtype=np.float32) for _ in range(4))
        p, m, v, g = p * np.float32(0.02), m * np.float32(1e-3), v**2 * np.float32(1e-6), g * np.float32(1e-3)
    return Unit(rule, p, g, moments=(m, v), split_master=split_master, state=state)
