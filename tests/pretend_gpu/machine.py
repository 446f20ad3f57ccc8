"""What the pretend GPU does to a test, and what it has counted."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from tests.pretend_gpu import vehicle

__all__ = ["DEFAULT_MEMORY", "Machine", "apply", "counters", "machine", "reset_counters", "settle"]

DEFAULT_MEMORY = 1 << 30


@dataclasses.dataclass(frozen=True)
class Machine:
    """`delayed_percent` of kernels and copies start late, by a random time of up to `max_delay_us`, drawn from `seed`.
    `lazy`: streams do nothing until a thread waits for them, and then only what that needs; `observers`: threads that
    only watch, each of whose waits counts after 20 ms. `writes_everything`: kernels ask for all pointers without const,
    as compiled code does. `poison`: memory is overwritten when it is given out. `memory`: bytes of each device.
    `threads`: of torch, on a stream's thread; results may depend on it as on the CPU."""

    seed: int = 0
    max_delay_us: int = 0
    delayed_percent: int = 25
    lazy: bool = False
    observers: tuple[str, ...] = ()
    writes_everything: bool = False
    poison: bool = True
    memory: int = DEFAULT_MEMORY
    threads: int = 1

    @staticmethod
    def from_text(text: str) -> Machine:
        """`lazy,seed=3,max_delay_us=300`; 1 says nothing."""
        fields: dict[str, Any] = {}
        known = [field.name for field in dataclasses.fields(Machine) if field.name != "observers"]
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in ("1", *known):
                raise ValueError(f"expected {vehicle.VARIABLE} to be of 1, {', '.join(known)}; found {name!r}")
            if name != "1":
                fields[name] = int(value or 1) if name not in ("lazy", "writes_everything", "poison") else value != "0"
        return Machine(**fields)

    def __str__(self) -> str:
        """As `from_text` reads it."""
        default, parts = Machine(), ["1"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "observers" and value != getattr(default, field.name):
                parts.append(f"{field.name}={int(value)}")
        return ",".join(parts)


_now = Machine()


def apply(wanted: Machine) -> None:
    import _pretend_gpu

    global _now
    _now = wanted
    _pretend_gpu.set_observers(list(wanted.observers))
    _pretend_gpu.set_pace(wanted.lazy, wanted.seed, wanted.max_delay_us, wanted.delayed_percent)
    _pretend_gpu.set_kernels(wanted.poison, wanted.writes_everything, wanted.threads)
    for device in range(_pretend_gpu.device_count()):
        _pretend_gpu.set_capacity(device, wanted.memory)
    os.environ[vehicle.VARIABLE] = str(wanted)  # for processes that are started from here


def settle() -> None:
    """Waits for all devices. Raises a failure of theirs that no call has raised yet, and forgets it."""
    import _pretend_gpu
    import torch

    with contextlib.ExitStack() as stack:  # all of it, even if one raises
        stack.callback(_pretend_gpu.forget_failure)
        for device in range(torch.cuda.device_count()):
            stack.callback(torch.cuda.synchronize, device)


@contextlib.contextmanager
def machine(**fields: Any) -> Iterator[None]:
    """The fields of `Machine`; what is not given stays. The devices are idle when the block begins, and when it
    ends without an exception; a failure that no call in it has raised is raised at its end."""
    import _pretend_gpu
    import torch

    before = _now
    settle()
    if "memory" in fields:
        torch.cuda.empty_cache()
    apply(dataclasses.replace(before, **fields))
    try:
        yield
        settle()
    finally:
        _pretend_gpu.forget_failure()
        apply(before)


def counters() -> dict[str, Any]:
    """Since `reset_counters`. `operators`, `synchronizing_operators`: by name, how often they were launched, or had to
    wait for the device. `most_ahead`: operators that were launched and not done. `link_bytes_read`,
    `link_bytes_written`: of registered host memory, by kernels and not by copy engines. `host_waits`: how often a host
    thread waited in a call that synchronises; `full_queues`: how often because a stream had no slot free."""
    import _pretend_gpu

    return _pretend_gpu.counters()


def reset_counters() -> None:
    import _pretend_gpu

    _pretend_gpu.reset_counters()
