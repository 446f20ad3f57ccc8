"""Makes hooks for the user's modules. torch.compile does not see them: it compiles what runs between them.

A copy of a module (`deepcopy`, `pickle`) is an ordinary model, so hooks do nothing there.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.hooks import RemovableHandle

from noria._errors import usage_error

__all__ = [
    "CompiledCall",
    "Hook",
    "call_pre_hooks",
    "compiler_config_of",
    "is_compiled",
    "move_hooks",
    "refuse_cuda_graphs",
    "remove_hooks",
]


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Removes hooks of noria's. From now on they call nothing, even inside a call that is under way."""
    for handle in handles:
        hook = (handle.hooks_dict_ref() or {}).get(handle.id)
        if isinstance(hook, Hook):
            hook.end()
        handle.remove()
    handles.clear()


def call_pre_hooks(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Calls noria's forward pre-hooks of a module whose call has begun before they were registered."""
    for number, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, Hook):
            hook(module, args, kwargs) if number in module._forward_pre_hooks_with_kwargs else hook(module, args)


def move_hooks(module: nn.Module, to: nn.Module) -> list[RemovableHandle]:
    """Makes noria's hooks of one module those of another."""
    return _register(to, *_taken_hooks(module))


def _taken_hooks(module: nn.Module) -> tuple[list[tuple[Hook, bool]], list[Hook]]:
    """Takes noria's hooks off a module. Returns the pre-hooks, each with True if it wants kwargs, and the others."""
    pre, post = [], []
    for number, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, Hook):
            pre.append((hook, number in module._forward_pre_hooks_with_kwargs))
            del module._forward_pre_hooks[number]
    for number, hook in list(module._forward_hooks.items()):
        if isinstance(hook, Hook):
            post.append(hook)
            del module._forward_hooks[number]
    return pre, post


def _register(module: nn.Module, pre: list[tuple[Hook, bool]], post: list[Hook]) -> list[RemovableHandle]:
    """Puts hooks that `_taken_hooks` has returned on a module, in their order."""
    handles = [
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=wants_kwargs)
        for hook, wants_kwargs in reversed(pre)
    ]
    return handles + [module.register_forward_hook(hook, always_call=True) for hook in post]


def is_compiled(module: nn.Module) -> bool:
    """Returns True if the module or its forward was compiled in place, or it is the wrapper by torch.compile."""
    forward: Any = vars(module).get("forward")
    own = getattr(forward, "own", None)  # what noria has replaced, if the block computes again
    is_forward_compiled = any(hasattr(each, "_torchdynamo_orig_callable") for each in (forward, own))
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules or is_forward_compiled


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


@functools.cache
def _dynamo() -> Any:
    """Returns torch's decorators that hide code from its compiler. It skips the frame of each hook from now on.

    Order: torch takes a second to import them, so not before a model is wrapped.
    """
    decorators = importlib.import_module("torch._dynamo.decorators")
    decorators.skip(Hook.__call__)
    return decorators


class Hook:
    """Calls a function for one wrap call. A copy of it calls nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call
        self._hidden_call = _dynamo().disable(call)

    def __call__(self, *args: object) -> None:
        """Calls directly if nothing is being compiled: this runs at each visit."""
        if get_eval_frame_callback() is None:
            self._call(*args)
        else:
            self._hidden_call(*args)

    def end(self) -> None:
        """Makes the hook call nothing: a call of its module that is under way may still come to it."""
        self._call = self._hidden_call = _no_hook

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickled_hook, ())


def _no_hook(*args: object) -> None:
    pass


def _unpickled_hook() -> Callable[..., None]:
    return _no_hook


class CompiledCall:
    """Takes the place of what `module.compile()` made, with noria's hooks around it.

    A module that is compiled in place compiles its hooks, too, and each hook of noria's would cut its graph. So noria's
    hooks move here before the first call.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], before: CompiledCall | None) -> None:
        """`before`: what stood here when the module was compiled before that."""
        self.compiled = compiled
        self._module = weakref.ref(module)
        self._pre: list[tuple[Hook, bool]] = [] if before is None else before._pre  # with or without kwargs
        self._post: list[Hook] = [] if before is None else before._post
        pre, post = _taken_hooks(module)
        self._pre += pre
        self._post += post

    @torch._disable_dynamo(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, output = self._module(), None
        raised: list[BaseException] = []
        try:
            for hook, wants_kwargs in self._pre:
                hook(module, args, kwargs) if wants_kwargs else hook(module, args)
            output = self._call(module, args, kwargs)
        finally:  # all of noria's hooks are called, also after an error
            for hook in self._post:
                try:
                    hook(module, args, output)
                except BaseException as error:
                    raised.append(error)
        if raised:
            raise raised[0]
        return output

    @torch._disable_dynamo(recursive=False)
    def _call(self, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward: Any = vars(module).get("forward")
        if not hasattr(forward, "encloses_call"):
            return self.compiled(*args, **kwargs)
        forward.encloses_call = True
        return forward.enclose(self.compiled, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)

    def give_back(self, module: nn.Module) -> list[RemovableHandle]:
        """Makes the hooks the module's own again, because the user has made it uncompiled."""
        forward: Any = vars(module).get("forward")
        if hasattr(forward, "encloses_call"):
            forward.encloses_call = False
        return _register(module, self._pre, self._post)
