"""Keeps the ledger's planned side: all memory that noria has said it would take, before it took any of it."""

from __future__ import annotations

from noria.planning.wrap_plan import WrapPlan

__all__ = ["Ledger"]


class Ledger:
    """Holds one row for each place and purpose: the plan's rows first, then those of later allocations.

    A caller adds a row before it takes the memory. `noria.report` measures what was taken and compares the two.
    """

    def __init__(self, plan: WrapPlan) -> None:
        self._rows = {(place, purpose): num_bytes for place, purpose, num_bytes in plan.rows()}

    def expect(self, place: str, purpose: str, num_bytes: int) -> None:
        """Sets a row; 0 removes it."""
        others = {key: size for key, size in self._rows.items() if key != (place, purpose)}
        self._rows = (
            {**others, (place, purpose): num_bytes} if num_bytes else others
        )  # another thread may read a report

    def expected(self, place: str, purpose: str) -> int:
        return self._rows.get((place, purpose), 0)

    def on(self, place: str) -> int:
        """Returns the bytes of all rows of this place."""
        return sum(num_bytes for (where, _), num_bytes in self._rows.items() if where == place)

    def rows(self) -> list[tuple[str, str, int]]:
        """Returns (place, purpose, bytes), the host's rows first."""
        rows = [(place, purpose, num_bytes) for (place, purpose), num_bytes in self._rows.items()]
        return sorted(rows, key=lambda row: row[0] != "host")
