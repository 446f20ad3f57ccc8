"""Makes hooks for the user's modules. torch.compile does not see them: it compiles what runs between them.

A copy of a module (`deepcopy`, `pickle`) is an ordinary model, so hooks do nothing there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from noria._errors import usage_error

__all__ = ["Hook", "compiler_config_of", "refuse_cuda_graphs"]


def compiler_config_of(module: torch.nn.Module) -> dict[str, object] | None:
    """Returns the options that the module was compiled with; None if it was not compiled.

    It may be compiled in place, or be the wrapper that torch.compile returns.
    """
    compiled: Any = getattr(module, "_compiled_call_impl", None) or module
    return compiled.get_compiler_config() if hasattr(compiled, "get_compiler_config") else None


def refuse_cuda_graphs(config: dict[str, object] | None, what: str) -> None:
    if config is not None and config.get("triton.cudagraphs"):
        raise usage_error(
            'torch.compile without mode="reduce-overhead"',
            f"{what} compiled for CUDA graphs, which bake the addresses of weights that move",
            'compile with mode="default" or "max-autotune-no-cudagraphs"',
        )


class Hook:
    """Calls a function for one wrap call. A copy of it calls nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = torch._dynamo.disable(call)

    def __call__(self, *args: object) -> None:
        self._call(*args)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickled_hook, ())


def _no_hook(*args: object) -> None:
    pass


def _unpickled_hook() -> Callable[..., None]:
    return _no_hook
