"""Omits waits: a test then shows that they matter."""

from __future__ import annotations

from torch import nn

from noria.wrapped import wrapped_together

__all__ = ["omit_wait"]


def omit_wait(model: nn.Module, kind: str) -> None:
    """Makes the engine of this wrapped model omit waits of one kind from now on.

    A kind is, for example, "update -> fetch on working_copy (RAW)"; "" ends the omission. Results are then wrong if the
    op that is no longer waited for is late."""
    wrapped_together(model).context.engine.omit_wait(kind)
