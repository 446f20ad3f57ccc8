"""Refuses torch's DistributedDataParallel around modules of a wrapped model, before it reads a weight.

Its constructor first asks the module which parameters to leave alone, by an attribute. Modules of a wrapped model have
an attribute of this name that raises when it is iterated.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from noria._errors import usage_error

__all__ = ["allow_parallel", "refuse_parallel"]

_ATTRIBUTE = "_ddp_params_and_buffers_to_ignore"


class _Refusal:
    """Stands for a list of names. Copies of the model get an empty list."""

    def __iter__(self) -> Iterator[str]:
        raise usage_error(
            "a wrapped model without DistributedDataParallel around it",
            "DistributedDataParallel(model)",
            "leave it out: ranks share a model if a process group exists when noria.wrap is called",
        )

    def __deepcopy__(self, memo: object) -> list[str]:
        return []

    def __reduce__(self) -> tuple[object, ...]:
        return (list, ())


def refuse_parallel(module: nn.Module) -> None:
    """Makes DistributedDataParallel refuse this module. A module with a list of the user's own is not refused."""
    if _ATTRIBUTE not in module.__dict__:
        module.__dict__[_ATTRIBUTE] = _Refusal()


def allow_parallel(module: nn.Module) -> None:
    if isinstance(module.__dict__.get(_ATTRIBUTE), _Refusal):
        del module.__dict__[_ATTRIBUTE]
