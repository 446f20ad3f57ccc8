"""Models and optimizers are given one, or several in a list."""

from __future__ import annotations

from typing import Any

__all__ = ["as_list"]


def as_list(value: Any) -> list[Any]:
    """All that is given; None: nothing."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
