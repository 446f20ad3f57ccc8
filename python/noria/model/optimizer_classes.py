"""Finds the class that an optimizer had before it was wrapped, that class's own step, and bitsandbytes' settings."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

__all__ = ["knows_modules", "look_up_overrides", "name_original", "original_class", "step_of"]

_ORIGINALS: dict[type[Optimizer], type[Optimizer]] = {}


def name_original(facade: type[Optimizer], original: type[Optimizer]) -> None:
    """Notes that the facade was made for this class."""
    _ORIGINALS[facade] = original


def original_class(cls: type[Optimizer]) -> type[Optimizer]:
    """Returns the class that this facade, or subclass of a facade, was made for. Returns any other class unchanged."""
    return next((_ORIGINALS[base] for base in cls.__mro__ if base in _ORIGINALS), cls)


def step_of(cls: type[Optimizer]) -> Callable[..., object]:
    """Returns the class's own step, without the wrapper that runs step hooks: they run once, on the facade."""
    step: Callable[..., object] = cls.step
    own: Callable[..., object] = getattr(step, "__wrapped__", step)
    return own if getattr(step, "hooked", False) else step


def knows_modules(value: object) -> bool:
    """Returns True for the manager that all optimizers of bitsandbytes share.

    It knows by module which parameters have settings of their own, such as embeddings that transformers keeps in 32
    bits. It needs these modules only until `look_up_overrides`.
    """
    return type(value).__name__ == "GlobalOptimManager" and type(value).__module__.startswith("bitsandbytes.")


def look_up_overrides(optimizer: Optimizer) -> None:
    """Lets an optimizer of bitsandbytes find the parameters that have settings of their own, as its first step does."""
    look_up = getattr(optimizer, "check_overrides", None)
    if look_up is not None and knows_modules(getattr(optimizer, "mng", None)):
        look_up()
