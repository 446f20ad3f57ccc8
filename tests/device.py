"""The device that journeys train on: "cpu", or "cuda" in a process with the pretend GPU (tests/pretend_gpu).

Before each journey DEVICE becomes torch's default: plain twins, batches and models lie there, unless a test says
otherwise.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.pretend_gpu import vehicle
from tests.pretend_gpu.machine import settle

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


def finish() -> None:
    """Waits for what has been launched there: lanes count only what is done."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def leave_device() -> None:
    """Takes `use_device` back. What runs there is over then; raises a failure that was not raised before."""
    if DEVICE == "cuda":
        torch.set_default_device(None)
        _optimizers._get_foreach_kernels_supported_devices = _where_foreach_is_default
        while _hooks:
            _hooks.pop().remove()
        _set_division(False)
        torch.cuda.set_device(0)
        settle()
