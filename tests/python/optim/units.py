"""A unit's arrays as numpy has them, for the kernels: every rule, both formats, in place or as a draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from noria import _C

MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "lion": 1}
RULES = list(MOMENTS)
SETS = _C.instruction_sets()

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


class Unit:
    """`arrays` by the names that `UnitArrays` gives them; the gradient is cut to bf16 where the master is split."""

    def __init__(
        self,
        rule: str,
        p: np.ndarray,
        g: np.ndarray,
        *,
        moments: Sequence[np.ndarray] = (),
        split_master: bool = False,
    ) -> None:
        self.rule, self.count, self.split = rule, p.size, split_master
        self.arrays: dict[str, np.ndarray] = {}
        if split_master:
            self.arrays["working"], self.arrays["low"] = split(np.ascontiguousarray(p, np.float32))
            self.gradient = bf16(g)
        else:
            self.arrays["master"] = self._own(p)
            self.gradient = g
        for number in range(MOMENTS[rule]):
            self.arrays["mv"[number]] = self._own(moments[number] if moments else np.zeros_like(p))

    @staticmethod
    def _own(values: np.ndarray) -> np.ndarray:
        copy = aligned(values.size, np.float32)
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

    @staticmethod
    def addresses(arrays: dict[str, np.ndarray]) -> Any:
        return _C.UnitArrays(**{name: array.ctypes.data for name, array in arrays.items()})

    def scalars(self, step: int, hyper: dict[str, Any] | None = None, **changed: Any) -> Any:
        return _C.update_scalars(self.rule, step, **{**(hyper or HYPER[self.rule]), **changed})

    def job(
        self,
        step: int = 1,
        *,
        cut: Sequence[int] = (),
        to: dict[str, np.ndarray] | None = None,
        scalars: Any = None,
        sums: bool = False,
        **changed: Any,
    ) -> Any:
        edges = [0, *sorted(cut), self.count]
        scalars = scalars or self.scalars(step, **changed)
        pieces = [(begin, end - begin, scalars) for begin, end in pairwise(edges)]
        target = self.addresses(to) if to is not None else None
        return _C.UpdateJob(
            self.rule, pieces, self.addresses(self.arrays), gradient=self.gradient.ctypes.data, to=target, sums=sums
        )

    def spare(self) -> dict[str, np.ndarray]:
        """Arrays for a draft, full of what must be overwritten."""
        made = {name: aligned(self.count, array.dtype) for name, array in self.arrays.items()}
        for array in made.values():
            array.view(np.uint8)[:] = 0xFF
        return made

    def step(self, step: int = 1, *, draft: bool = False, instruction_set: str = "", **job: Any) -> None:
        """In place; or as a draft that is committed."""
        to = self.spare() if draft else None
        before = self.bits()
        self.job(step, to=to, **job).run(instruction_set)
        if to is not None:
            assert self.bits() == before, "a draft writes nothing that it reads"
            self.arrays = to

    def bits(self) -> bytes:
        return b"".join(array.tobytes() for array in self.arrays.values())


def any_floats(rng: np.random.Generator, count: int) -> np.ndarray:
    """Every pattern but NaN is as likely as any other: denormals, infinities, all exponents."""
    values = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    return np.where(np.isnan(values), np.float32(1), values)


def make(rule: str, count: int, seed: int = 0, *, wild: bool = False, split_master: bool = False) -> Unit:
    """The seed alone says what the arrays hold."""
    rng = np.random.default_rng(seed)
    if wild:
        p, m, v, g = (any_floats(rng, count) for _ in range(4))
        v = np.abs(v)
    else:
        p, m, v, g = (rng.standard_normal(count, dtype=np.float32) for _ in range(4))
        p, m, v, g = p * np.float32(0.02), m * np.float32(1e-3), v**2 * np.float32(1e-6), g * np.float32(1e-3)
    return Unit(rule, p, g, moments=(m, v), split_master=split_master)
