"""Defines the version of this library. No other file repeats it."""

__version__ = "0.1.0"
