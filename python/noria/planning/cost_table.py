"""Shows measured costs as a table: equal units that follow each other share a row."""

from __future__ import annotations

from collections.abc import Sequence

from noria.model.layout import HomeUnit
from noria.planning.measured_costs import MeasuredCosts
from noria.planning.wrap_plan import folded
from noria.policy import format_bytes

__all__ = ["COLUMNS", "aligned", "cost_rows", "rates_text"]

COLUMNS = ("unit", "forward", "backward", "keeps")
_MOST_OPERATORS = 4


def cost_rows(units: list[HomeUnit], costs: MeasuredCosts) -> list[list[str]]:
    """Returns a row for each line of the plan: the mean time of a visit, and the bytes that one forward keeps."""
    rows = []
    for name, alike in folded(units):
        numbers = [unit.index for unit in alike]
        times = [_mean([us[number] for number in numbers]) for us in (costs.forward_us, costs.backward_us)]
        kept = format_bytes(round(_mean([costs.saved[number] for number in numbers]))) if costs.saved else ""
        rows.append([name, *(f"{us / 1e3:.3f} ms" for us in times), kept])
    return rows


def rates_text(costs: MeasuredCosts) -> list[str]:
    """Returns lines on all costs that are not by unit."""
    told = [f"{lane} {rate:.2f} GiB/s{_after(costs, lane)}" for lane, rate in costs.gib_s.items()]
    if costs.draft_gib_s:
        told.append(f"drafts {costs.draft_gib_s:.2f} GiB/s")
    if costs.both_ways_gib_s:
        told.append(f"fetches and drains together {costs.both_ways_gib_s:.2f} GiB/s")
    if costs.host_gib_s:
        told.append(f"copies and updates together {costs.host_gib_s:.2f} GiB/s of the host's memory")
    if costs.device_update_gib_s:
        told.append(f"updates on the device {costs.device_update_gib_s:.2f} GiB/s")
    lines = [", ".join(told)] if told else []
    if costs.by_threads_gib_s:
        rates = ", ".join(f"{number}: {rate:.2f}" for number, rate in costs.by_threads_gib_s.items())
        lines.append(f"AdamW alone, GiB/s by the number of threads: {rates}")
    lines.append(
        f"hooks and launches take {costs.hooks_us:.0f} us of a visit, and the loop between backward and updates "
        f"{costs.latency_us.get('compute', 0) / 1e3:.2f} ms"
    )
    if costs.saved_by:
        most = sorted(costs.saved_by.items(), key=lambda each: -each[1])
        kept = [f"{name} {format_bytes(size)}" for name, size in most[:_MOST_OPERATORS]]
        if others := sum(size for _, size in most[_MOST_OPERATORS:]):
            kept.append(f"others {format_bytes(others)}")
        lines.append(f"kept for backward by operator: {', '.join(kept)}")
    if costs.workspace:
        lines.append(f"torch takes at most {format_bytes(costs.workspace)} on the device besides")
    return lines


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines of text: the first column to the left, the others to the right."""
    head = [columns] if any(columns) else []
    widths = [max(len(row[number]) for row in [*head, *rows]) for number in range(len(columns))]
    lines = []
    for row in [*head, *rows]:
        cells = [f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"  {row[0].ljust(widths[0])}{''.join(cells)}".rstrip())
    return lines


def _after(costs: MeasuredCosts, lane: str) -> str:
    latency = costs.latency_us.get(lane, 0.0)
    return f" after {latency:.0f} us" if latency >= 1 else ""


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
