"""The device that journeys train on: "cpu", or "cuda" in a process with the pretend GPU (tests/pretend_gpu).

Journeys are programs that say `torch.set_default_device(DEVICE)` first. So plain twins lie on the device, and so does
what a test makes, unless it says otherwise; models that noria wraps come from there or from the CPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.pretend_gpu import vehicle

DEVICE = "cuda" if vehicle.is_installed() else "cpu"
SHARES = 2 if DEVICE == "cuda" else 1
"""The window has one of as many equal parts of `device_memory`; on a device the rest is left to activations."""

NEEDS_SLOW_LINKS = pytest.mark.cpu_only("a device's link cannot be slowed down")
NEEDS_SPARSE = pytest.mark.cpu_only("the pretend GPU has no sparse tensors")
NEEDS_FULL_HOST = pytest.mark.cpu_only("beside a device the budget of the host has a staging ring, which is not taken")

_optimizers = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it
_where_foreach_is_default = _optimizers._get_foreach_kernels_supported_devices
_hooks: list[Any] = []


def _set_division(divides: bool) -> None:
    import _pretend_gpu

    _pretend_gpu.set_division(divides)


def use_device(index: int = 0) -> None:
    """Makes it this process's default. Optimizers there loop over parameters and divide by numbers, as they do on the
    CPU, where noria has torch update: so plain twins have the bits of that."""
    if DEVICE == "cuda":
        torch.cuda.set_device(index)
        torch.set_default_device(DEVICE)
        _optimizers._get_foreach_kernels_supported_devices = list
        if not _hooks:
            _hooks.append(_optimizers.register_optimizer_step_pre_hook(lambda *_: _set_division(True)))
            _hooks.append(_optimizers.register_optimizer_step_post_hook(lambda *_: _set_division(False)))


def leave_device() -> None:
    """Takes `use_device` back. What runs there is over then, and its failures are forgotten."""
    if DEVICE == "cuda":
        import _pretend_gpu

        torch.set_default_device(None)
        _optimizers._get_foreach_kernels_supported_devices = _where_foreach_is_default
        while _hooks:
            _hooks.pop().remove()
        _set_division(False)
        _pretend_gpu.forget_failure()
        torch.cuda.set_device(0)
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
