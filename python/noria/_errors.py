"""Makes the errors for misuse. Their text says what was expected, what was found, and what to do about it."""

from noria._C import UsageError

__all__ = ["UsageError", "usage_error"]


def usage_error(expected: str, found: str, remedy: str) -> UsageError:
    """Returns an error with the same form of text as the engine's. Order: raise it before anything is changed."""
    return UsageError(f"expected {expected}; found {found}; remedy: {remedy}")
