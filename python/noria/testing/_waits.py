"""Omits waits: a test then shows that they matter."""

from __future__ import annotations

from torch import nn

from noria.wrapped import wrapped_together

__all__ = ["omit_wait"]


def omit_wait(model: nn.Module, kind: str) -> None:
    """Makes the engine of this wrapped model omit waits of one kind from now on.

    Results are then wrong if the op that is no longer waited for is late.

    Args:
        model: The wrapped model.
        kind: For example "update -> fetch on working_copy (RAW)"; "" ends the omission.

    Raises:
        UsageError: if the model is not wrapped.

    Example:
        >>> model, optimizer = noria.wrap(model, optimizer)
        >>> noria.testing.omit_wait(model, "update -> fetch on working_copy (RAW)")
    """
    wrapped_together(model).context.engine.omit_wait(kind)
