"""An op of a simulated step that no pass plan lists."""

from __future__ import annotations

import dataclasses

__all__ = ["SimulatedOp"]


@dataclasses.dataclass(frozen=True)
class SimulatedOp:
    """Describes an op. `accesses`: buffers, each with "read" or "write"."""

    lane: str
    verb: str
    unit: int
    num_bytes: int
    accesses: list[tuple[int, str]]
