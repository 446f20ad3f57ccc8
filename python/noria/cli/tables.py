"""Prints tables and times for the commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from noria.planning.cost_table import aligned

__all__ = ["show", "time_text"]


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a rich table on a terminal, and aligned columns into a pipe or file."""
    cells = [[*row] for row in rows]
    if sys.stdout.isatty():
        table = Table(title=title, title_justify="left", title_style="bold")
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in cells:
            table.add_row(*row)
        Console().print(table)
        return
    print("\n".join([f"{title}:", *aligned(columns, cells)]))


def time_text(us: float) -> str:
    return f"{us / 1e3:.1f} ms" if us < 1e7 else f"{us / 1e6:.1f} s"
