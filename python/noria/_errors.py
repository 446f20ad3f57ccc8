"""Makes the errors for misuse. A sentence says what was expected and found, and a remedy follows."""

from noria._C import UsageError

__all__ = ["UsageError", "usage_error"]


def usage_error(expected: str, found: str, remedy: str) -> UsageError:
    """Returns an error with the same form of text as the engine's (csrc/base/errors.h).

    Example: "noria expected a wrapped model, but found Linear. Remedy: noria.wrap it first". Order: raise it before
    anything is changed.
    """
    return UsageError(f"noria expected {expected}, but found {found.rstrip('.')}. Remedy: {remedy}")
