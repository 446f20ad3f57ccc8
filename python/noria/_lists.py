"""Turns one model or optimizer, or several, into a list."""

from __future__ import annotations

from typing import Any

__all__ = ["as_list"]


def as_list(value: object) -> list[Any]:
    """Returns the values as a list. None gives an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
