"""The user's optimizer, unchanged to the eye: `step()` and its kin go to its `Updates`, and back when it is unwrapped.

`facade(optimizer)` changes the class of the object to a subclass of its own class, so schedulers, scalers and trainers
that hold it stay right. These classes are found here by name (`noria.optimizer.NoriaAdamW`), for pickles of them.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from noria import optim
from noria._errors import usage_error
from noria.custody import in_backward

if TYPE_CHECKING:
    from noria.updates import Updates

__all__ = ["check_optimizer", "facade", "original_class", "refuse_inside_backward", "step_of", "unfacade"]


class WrappedOptimizer(Optimizer):
    """Mixed in before the user's optimizer class. Without `_noria` (unpickled, unwrapped) it is that class."""

    _noria: Updates | None = None

    # Not compiled: the home changes outside of what the compiler traces.
    @torch._disable_dynamo
    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._noria is None:
            own = step_of(original_class(type(self)))
            return own(self) if closure is None else own(self, closure)
        self._opt_called = True  # what LR schedulers look at
        return self._noria.step(closure)

    step: Any = Optimizer.profile_hook_step(_step)
    step.hooked = True
    step._wrapped_by_lr_sched = True

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._noria is not None:
            refuse_inside_backward("optimizer.zero_grad()")
            self._noria.wrapped.recover()
            if self._noria.in_backward and not set_to_none:
                raise usage_error(
                    'zero_grad(set_to_none=True) under update="backward"',
                    "set_to_none=False, which wants gradients of zero",
                    "leave set_to_none out",
                )
        super().zero_grad(set_to_none)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """`with optimizer.accumulate():` around each backward that no `step()` follows. Only update="backward" needs to
        be told; the first time it takes memory for all gradients. Elsewhere it changes nothing."""
        return contextlib.nullcontext() if self._noria is None else self._noria.accumulate()

    @torch._disable_dynamo
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` on this optimizer's parameters, up to the order of summation, and faster:
        the norm is taken on the host while gradients land, and gradients are written only where it exceeds `max_norm`.

        Returns the norm before clipping: fp32, also of gradients in bfloat16 (fp64 where some are), no dimensions.
        Raises RuntimeError where torch does. Once unwrapped, it is torch's call in all.
        """
        if self._noria is None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        return self._noria.clip_grad_norm_(float(max_norm), norm_type, error_if_nonfinite)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of the gradients, before clipping, at the last `step()` under `max_grad_norm`; None without."""
        return None if self._noria is None else self._noria.grad_norm

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._noria is None else self._noria.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._noria is None:
            super().load_state_dict(state_dict)
        else:
            self._noria.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._noria is None:
            super().add_param_group(param_group)
        else:
            self._noria.add_param_group(param_group)


_FACADES: dict[type[Optimizer], type[Optimizer]] = {}


def _facade_class(cls: type[Optimizer]) -> type[Optimizer]:
    if cls not in _FACADES:
        name = f"Noria{cls.__name__}"
        made = type(name, (WrappedOptimizer, cls), {"__module__": __name__, "__doc__": cls.__doc__})
        globals()[name] = _FACADES[cls] = made
    return _FACADES[cls]


def __getattr__(name: str) -> Any:
    """Unpickling in a fresh process asks for NoriaAdamW and the like by name."""
    own = name.removeprefix("Noria")
    original = getattr(torch.optim, own, None) or getattr(optim, own, None) if name.startswith("Noria") else None
    if original is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _facade_class(original)


def original_class(cls: type[Optimizer]) -> type[Optimizer]:
    return cls.__mro__[cls.__mro__.index(WrappedOptimizer) + 1] if issubclass(cls, WrappedOptimizer) else cls


def check_optimizer(optimizer: Any) -> None:
    """Refuses what cannot be wrapped, before anything is changed."""
    if not isinstance(optimizer, Optimizer):
        raise usage_error("a torch.optim.Optimizer", type(optimizer).__qualname__, "wrap optimizers of torch.optim")
    if isinstance(optimizer, WrappedOptimizer):
        if optimizer._noria is not None:
            raise usage_error("an optimizer that is not wrapped", "one that is", "noria.unwrap it first")
        optimizer.__class__ = original_class(type(optimizer))  # type: ignore[assignment]  # a copy of one that was
    if type(optimizer) is torch.optim.SparseAdam:
        raise usage_error("dense gradients", "SparseAdam, which wants sparse ones", "use Adam and sparse=False")
    step = vars(optimizer).get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        raise usage_error(
            "an optimizer whose step() is its class's own", "one replaced on the object", "replace it after noria.wrap"
        )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable") or group.get("capturable"):
            raise usage_error(
                "optimizer groups without differentiable and capturable",
                f"group {number} with one of them",
                "leave them out: updates run on the host",
            )


def facade(optimizer: Optimizer, updates: Updates) -> None:
    """From now on `optimizer.step()` and its kin go to `updates`. A scheduler's patch on the object is taken off: the
    class's step says itself what the scheduler wants to know."""
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = _facade_class(
        type(optimizer) if not isinstance(optimizer, WrappedOptimizer) else original_class(type(optimizer))
    )
    optimizer._noria = updates  # type: ignore[attr-defined]
    # Where it is False, a scaler unscales p.grad itself.
    optimizer._step_supports_amp_scaling = updates.takes_factor()  # type: ignore[attr-defined]


def unfacade(optimizer: Optimizer, state: dict[Any, Any]) -> None:
    """A plain optimizer again, on this state."""
    updates: Updates = optimizer._noria  # type: ignore[attr-defined]
    optimizer._step_supports_amp_scaling = updates.scaled_by_class  # type: ignore[attr-defined]
    del optimizer._noria  # type: ignore[attr-defined]
    optimizer.__class__ = original_class(type(optimizer))
    optimizer.state = defaultdict(dict, state)
    optimizer._patch_step_function()


def step_of(cls: type[Optimizer]) -> Callable[..., Any]:
    """The class's own step, without the wrapper that runs step hooks (they run once, on the facade)."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def refuse_inside_backward(call: str) -> None:
    if in_backward():
        raise usage_error(
            f"{call} after backward()",
            "it inside of one, in a hook, where gradients of other parameters are still on their way",
            "step once the backward has returned: its memory is one gradient buffer either way",
        )
