"""Reads torch's state on this thread (backward, autocast, modes), and shields noria's own operators from it.

An update runs when its unit is needed. This may be inside a user's forward, under autocast, inference mode or a mode of
the user. Inside `plainly` the update gives the result that it would give inside `step()`. Tensors made there are
ordinary ones, so they may outlive the mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from noria._errors import usage_error

__all__ = [
    "Autocast",
    "autocast_now",
    "await_device",
    "empty_cache",
    "in_backward",
    "plainly",
    "refuse_inside_backward",
]

Autocast = tuple[bool, torch.dtype]
"""True if autocast is on for a kind of device, and its dtype."""


def in_backward() -> bool:
    """Returns True on a thread that runs a backward: in a hook, or while a checkpoint recomputes."""
    return torch._C._current_graph_task_id() >= 0


def refuse_inside_backward(call: str) -> None:
    if in_backward():
        raise usage_error(
            f"{call} after backward()",
            "it inside of one, in a hook, where gradients of other parameters are still on their way",
            "step once the backward has returned: its memory is one gradient buffer either way",
        )


def autocast_now(device_type: str) -> Autocast:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def await_device(device: torch.device) -> None:
    """Blocks until a CUDA device has finished all queued work. For the CPU it does nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Has torch give back device memory that no tensor uses."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def plainly(autocast: Autocast = (False, torch.bfloat16)) -> Iterator[None]:
    """Turns off gradients, inference mode, torch function modes and dispatch modes inside the `with` block.

    On the CPU, which runs the updates, `autocast` applies instead of the thread's own. Its cache is off.
    """
    was, cached = autocast_now("cpu"), torch.is_autocast_cache_enabled()
    on, dtype = autocast
    try:
        torch.set_autocast_enabled("cpu", on)
        torch.set_autocast_dtype("cpu", dtype)
        torch.set_autocast_cache_enabled(False)
        with (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
            torch._C._InferenceMode(False),  # this turns gradients on
            torch.no_grad(),
        ):
            yield
    finally:
        torch.set_autocast_enabled("cpu", was[0])
        torch.set_autocast_dtype("cpu", was[1])
        torch.set_autocast_cache_enabled(cached)
