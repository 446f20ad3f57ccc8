"""The device that journeys train on: "cpu", or "cuda" in a process with the pretend GPU (tests/pretend_gpu), or with
JOURNEYS=cuda on a GPU.

Before each journey DEVICE becomes torch's default: plain twins, batches and models lie there, unless a test says
otherwise. Plain optimizers step on the CPU, as noria's do, so that plain twins have the bits of that.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from noria.optimizer import WrappedOptimizer, driver_of
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretend_gpu import machine, vehicle

IS_PRETEND = vehicle.is_installed()
DEVICE = "cuda" if IS_PRETEND else os.environ.get("JOURNEYS", "cpu")
IS_GPU = DEVICE == "cuda" and not IS_PRETEND
SHARES = 2 if DEVICE == "cuda" else 1
"""The window has one of as many equal parts of `device_memory`; on a device the rest is left to activations."""

NEEDS_SLOW_LINKS = pytest.mark.cpu_only("a device's link cannot be slowed down")
NEEDS_SPARSE = pytest.mark.cpu_only("the pretend GPU has no sparse tensors")
NEEDS_FULL_HOST = pytest.mark.cpu_only("beside a device the budget of the host has a staging ring, which is not taken")


def not_on_a_gpu(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(IS_GPU, reason=f"not on a GPU: {reason}")


class _Floats:
    def __init__(self, address: int, number: int) -> None:
        self.__cuda_array_interface__ = {"shape": (number,), "typestr": "<f4", "data": (address, False), "version": 2}


def at_address(address: int, number: int, index: int) -> torch.Tensor:
    """So many floats of device `index`, at an address that torch does not know."""
    if IS_PRETEND:
        import _pretend_gpu

        return _pretend_gpu.at_address(address, number, index)
    return torch.as_tensor(_Floats(address, number), device=f"cuda:{index}")


def use_device(index: int = 0) -> None:
    """Makes it this process's default."""
    if DEVICE == "cuda":
        torch.cuda.set_device(index)
        torch.set_default_device(DEVICE)
        torch.use_deterministic_algorithms(not IS_PRETEND)


def finish() -> None:
    """Waits for what has been launched there: lanes count only what is done."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def settle() -> None:
    """Waits for all devices. Raises a failure that was not raised before."""
    if IS_PRETEND:
        machine.settle()
    else:
        finish()


def leave_device() -> None:
    """Takes `use_device` back. What runs there is over then; raises a failure that was not raised before."""
    if DEVICE == "cuda":
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        torch.cuda.set_device(0)
        settle()


steps_at_home = True
"""False while a test is about the device itself, and plain optimizers step there."""


class _AtHome:
    """While a plain optimizer steps, its parameters, gradients, state and rates are on the CPU, where noria's are.

    For torch's own classes copies stand in for the parameters: hooks of DDP, for one, are lost when a parameter's data
    goes to another device. Other classes may hold parameters, so that their data goes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._numbers: list[dict[str, Any]] = []
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        self._lent: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._is_torchs = type(optimizer).__module__.startswith(("torch.", "noria."))

    def __enter__(self) -> _AtHome:
        if driver_of(self._optimizer) is not None:  # wrapped by its closure
            return self
        self._numbers = [_on_cpu(group) for group in self._optimizer.param_groups]
        for parameter in [each for group in self._optimizer.param_groups for each in group["params"]]:
            if parameter.device.type == DEVICE:
                gradient = None if parameter.grad is None else parameter.grad.cpu()
                if self._is_torchs:
                    held = self._copies[parameter] = nn.Parameter(parameter.detach().cpu(), parameter.requires_grad)
                else:
                    self._lent[parameter] = parameter.data, parameter.grad
                    held, parameter.grad = parameter, None
                    parameter.data = parameter.data.cpu()
                held.grad = gradient
        self._exchange(self._copies)
        for state in self._optimizer.state.values():
            if isinstance(state, dict):
                _on_cpu(state)
        return self

    def __exit__(self, *error: object) -> None:
        self._exchange({copy: parameter for parameter, copy in self._copies.items()})
        with torch.no_grad():
            for parameter, copy in self._copies.items():
                parameter.copy_(copy)
        for parameter, (data, gradient) in self._lent.items():
            now, parameter.grad = parameter.grad, None
            data.copy_(parameter.data)
            parameter.data = data
            if now is not None and gradient is not None:
                gradient.copy_(now)
            if now is not None:
                parameter.grad = now.to(DEVICE) if gradient is None else gradient
        for group, numbers in zip(self._optimizer.param_groups, self._numbers, strict=False):
            group.update(numbers)
        self._copies, self._lent, self._numbers = {}, {}, []

    def _exchange(self, others: dict[torch.Tensor, torch.Tensor]) -> None:
        if not others:
            return
        for group in self._optimizer.param_groups:
            group["params"] = [others.get(each, each) for each in group["params"]]
        if isinstance(self._optimizer, torch.optim.LBFGS):  # it has a list of its own
            self._optimizer._params = self._optimizer.param_groups[0]["params"]
        state = {others.get(each, each): value for each, value in self._optimizer.state.items()}
        self._optimizer.state.clear()
        self._optimizer.state.update(state)

    def left_for(self, closure: Any) -> Any:
        """`closure`, which runs while all is on the device."""

        def outside() -> Any:
            self.__exit__()
            try:
                return closure()
            finally:
                self.__enter__()

        return outside if callable(closure) else closure


def _on_cpu(values: dict[str, Any]) -> dict[str, Any]:
    """Moves tensors, and pairs of them, to the CPU. Returns those that were elsewhere."""
    on_device = lambda each: isinstance(each, torch.Tensor) and each.device.type == DEVICE  # noqa: E731
    found = {name: each for name, each in values.items() if name != "params" and any(map(on_device, tree_leaves(each)))}
    values.update(tree_map(lambda each: each.cpu() if on_device(each) else each, found))
    return found


_hooked: Callable[..., Any] = Optimizer.profile_hook_step


def _hooked_at_home(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def stepped(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not steps_at_home:
            return step(optimizer, *args, **kwargs)
        with _AtHome(optimizer) as home:
            given = {name: home.left_for(value) for name, value in kwargs.items()}
            return step(optimizer, *map(home.left_for, args), **given)

    return _hooked(stepped)


if not IS_PRETEND:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for the same bits each time
if DEVICE == "cuda":  # before any optimizer is made
    assert "step" in vars(WrappedOptimizer)  # which has torch's hooks already, and nothing of this
    Optimizer.profile_hook_step = staticmethod(_hooked_at_home)
