"""Settings of the machine that tests and benchmarks may choose, and training code never does."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Machine", "machine", "on_machine"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rate limits by lane ("fetch", "drain", "peer": of each link, "peer:1": of the link to stage 1 alone, "update"),
    as (GiB/s, latency in us), 0 meaning unlimited; hostility as the backends take it (`seed`, `max_delay_us`,
    `hold_us`, `poison`); threads of the host pool, 0 meaning all but one."""

    limits: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    hostility: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    update_threads: int = 0

    def backend_limits(self) -> dict[str, tuple[float, float]]:
        return {lane: limit for lane, limit in self.limits.items() if lane != "update"}

    def pool_settings(self) -> dict[str, Any]:
        bandwidth, latency = self.limits.get("update", (0.0, 0.0))
        settings = {name: self.hostility.get(name, 0) for name in ("seed", "max_delay_us")}
        holds = self.hostility.get("hold_us", {})
        held = max(holds.get(verb, 0) for verb in ("update", "draft"))
        return {"bandwidth_gib_s": bandwidth, "latency_us": latency, "hold_us": held, **settings}


_PLAIN = Machine()
_MACHINE: contextvars.ContextVar[Machine] = contextvars.ContextVar("noria_machine", default=_PLAIN)


def machine() -> Machine:
    return _MACHINE.get()


@contextlib.contextmanager
def on_machine(**settings: Any) -> Iterator[Machine]:
    """Models wrapped inside this block live on a machine with these settings (fields of `Machine`)."""
    token = _MACHINE.set(Machine(**settings))
    try:
        yield _MACHINE.get()
    finally:
        _MACHINE.reset(token)
