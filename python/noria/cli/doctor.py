"""Runs `noria doctor`: prints what this machine has for noria and what it lacks."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from noria.doctor import diagnose

__all__ = ["run_doctor"]


def run_doctor(args: argparse.Namespace) -> int:
    found = diagnose(args.files or ())
    if args.json:
        print(json.dumps(found.to_dict(), indent=1))
        return 0
    rows = found.rows()
    if sys.stdout.isatty():
        table = Table(show_header=False, box=None)
        table.add_column(style="bold")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    else:
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            print(f"{name:<{width}}  {value}")
    print()
    for lack in found.missing:
        print(f"missing: {lack}")
    if not found.missing:
        print("nothing is missing")
    return 0
