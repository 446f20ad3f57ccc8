"""Misuse is reported in three parts: what was expected, what was found, what to do about it."""

from noria._C import UsageError

__all__ = ["UsageError", "usage_error"]


def usage_error(expected: str, found: str, remedy: str) -> UsageError:
    """The same text that the engine gives its own usage errors; to be raised before anything is changed."""
    return UsageError(f"expected {expected}; found {found}; remedy: {remedy}")
