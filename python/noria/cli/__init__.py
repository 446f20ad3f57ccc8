"""Runs the command `noria`: `plan` a model without having its memory, `doctor` a machine, sum up a `trace`."""

from noria.cli.main import main

__all__ = ["main"]
