"""Says what a step reads from files and writes to them, and how long disks last at that rate."""

from __future__ import annotations

from noria.policy import format_bytes

__all__ = ["RATED_BYTES", "days_until_worn", "endurance_text"]

RATED_BYTES = 600e12
"""Bytes that a disk is rated to take. 600 TBW is common for consumer disks of 1 TB."""


def days_until_worn(written: float, step_us: float, num_disks: int) -> float:
    """Returns the days until each disk has taken `RATED_BYTES`, if steps follow each other day and night.

    Args:
        written: bytes that a step writes, to all disks together. They share them evenly.
        step_us: the time of a step.
        num_disks: how many disks there are.
    """
    return RATED_BYTES * num_disks / written * step_us / 1e6 / 86400


def endurance_text(read: float, written: float, step_us: float, num_disks: int) -> str:
    """Returns a line on the bytes that a step reads and writes; empty if there are none."""
    if not (read or written) or not step_us:
        return ""
    if not written:
        return f"a step reads {format_bytes(round(read))} from files and writes nothing to them"
    each = "a disk" if num_disks == 1 else f"each of {num_disks} disks"
    return (
        f"a step reads {format_bytes(round(read))} from files and writes {format_bytes(round(written))}; at this rate "
        f"{each} rated for {RATED_BYTES / 1e12:.0f} TBW lasts {_time(days_until_worn(written, step_us, num_disks))}"
    )


def _time(days: float) -> str:
    if days < 2:
        return f"{24 * days:.0f} hours"
    return f"{days:.0f} days" if days < 2 * 365 else f"{days / 365:.0f} years"
