"""What is hung on the user's modules. A copy of the module (`deepcopy`, `pickle`) is an ordinary model, so these do
nothing there. Hooks are hidden from torch.compile: blocks compile inside of them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from noria._errors import usage_error

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["Hook", "NoSync", "compiler_config_of", "in_backward", "refuse_cuda_graphs"]


def compiler_config_of(module: torch.nn.Module) -> dict[str, Any] | None:
    """What it was compiled with, in place or as the wrapper that torch.compile returns; None: it was not."""
    compiled: Any = getattr(module, "_compiled_call_impl", None) or module
    return compiled.get_compiler_config() if hasattr(compiled, "get_compiler_config") else None


def refuse_cuda_graphs(config: dict[str, Any] | None, what: str) -> None:
    if config is not None and config.get("triton.cudagraphs"):
        raise usage_error(
            'torch.compile without mode="reduce-overhead"',
            f"{what} compiled for CUDA graphs, which bake the addresses of weights that move",
            'compile with mode="default" or "max-autotune-no-cudagraphs"',
        )


def in_backward() -> bool:
    """True on a thread that is running a backward: in a hook, or in what a checkpoint computes again."""
    return torch._C._current_graph_task_id() >= 0


class Hook:
    """A hook of one wrap call."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = torch._dynamo.disable(call)

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> Any:
        return (_unpickled_hook, ())


def _no_hook(*args: Any) -> None:
    pass


def _unpickled_hook() -> Callable[..., None]:
    return _no_hook


class NoSync:
    """`model.no_sync`."""

    def __init__(self, wrapped: Wrapped) -> None:
        self._wrapped = weakref.ref(wrapped)

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        wrapped = self._wrapped()
        return contextlib.nullcontext() if wrapped is None else wrapped.gradients.no_sync()

    def __deepcopy__(self, memo: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext

    def __reduce__(self) -> Any:
        return (_unpickled_no_sync, ())


def _unpickled_no_sync() -> Callable[[], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext
