"""Keeps the modes that happen to be on where noria works away from noria's own operators.

An update runs when its unit is needed: in the middle of somebody's forward, under autocast, inference mode or a mode of
the user's. `plainly` makes it compute what it would have computed inside `step()`, and makes tensors that outlive the
mode ordinary ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["Autocast", "autocast_now", "await_device", "plainly"]

Autocast = tuple[bool, torch.dtype]
"""Whether autocast is on for a kind of device, and to which dtype."""


def autocast_now(device_type: str) -> Autocast:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def await_device(device: torch.device) -> None:
    """Blocks until a CUDA device has done all that it was asked for. The CPU has done so already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def plainly(autocast: Autocast = (False, torch.bfloat16)) -> Iterator[None]:
    """No gradients, no inference mode, no torch function or dispatch mode, and on the CPU, where updates run, this
    autocast, without its cache."""
    was, cached = autocast_now("cpu"), torch.is_autocast_cache_enabled()
    on, dtype = autocast
    try:
        torch.set_autocast_enabled("cpu", on)
        torch.set_autocast_dtype("cpu", dtype)
        torch.set_autocast_cache_enabled(False)
        with (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
            torch._C._InferenceMode(False),  # turns gradients on
            torch.no_grad(),
        ):
            yield
    finally:
        torch.set_autocast_enabled("cpu", was[0])
        torch.set_autocast_dtype("cpu", was[1])
        torch.set_autocast_cache_enabled(cached)
