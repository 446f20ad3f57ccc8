"""The switch by which a test shows that a kind of wait matters."""

from __future__ import annotations

from torch import nn

from noria.custody import wrapped_together

__all__ = ["omit_wait"]


def omit_wait(model: nn.Module, kind: str) -> None:
    """From now on the engine of this wrapped model leaves out waits of one kind, such as
    "update -> fetch on working_copy (RAW)"; "" ends that. Results are then wrong whenever the giver is late."""
    wrapped_together(model).custody.omit_wait(kind)
