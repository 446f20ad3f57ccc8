"""From how many tokens a step on is training outside of the device as fast as on it?

    python benchmarks/break_even.py RESULT_OF_VERSUS [--down GIB_S --up GIB_S --update GPARAM_S]

Computed from measured rates, not measured: plain PyTorch's speed and the bytes that noria moved are those of a result
of `benchmarks.versus`; the rates of the link and of the host's AdamW are those of `transfers.py` and `adamw.py`, or
given. By the bounds of the modes (docs/journey.md), where forward is a third of the compute:

    all units drafted, or update="backward":
        tokens = speed of plain PyTorch x max(down / rate down, up / rate up, parameters / update rate)
    none drafted: a forward hides the updates and half of the fetches, a backward the drains and the other half
        tokens = speed of plain PyTorch x max(1.5 down / rate down, 1.5 up / rate up, 3 parameters / update rate)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

GIB = 1 << 30
ALL_DRAFTED, NONE_DRAFTED = "all units drafted", "none drafted"
MODES = {ALL_DRAFTED: {"down": 1.0, "up": 1.0, "update": 1.0}, NONE_DRAFTED: {"down": 1.5, "up": 1.5, "update": 3.0}}
"""Compute that hides what takes a second."""


def modes_of(settings: dict[str, str]) -> list[str]:
    """Of a system that counts what it moves. How many units are drafted depends on the host's memory."""
    if settings.get("update") == "backward":
        return [ALL_DRAFTED]
    return [NONE_DRAFTED] if settings.get("draft_memory") == "0" else [ALL_DRAFTED, NONE_DRAFTED]


def newest(question: str, folder: Path) -> dict[str, Any]:
    found = sorted(folder.glob(f"{question}_*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"expected a result of {question}.py in {folder}, found none: run it, or give the rates")
    return json.loads(found[-1].read_text())


def rates(args: argparse.Namespace) -> dict[str, float]:
    """Bytes and parameters a second."""
    folder = args.result.parent
    if args.down is None or args.up is None:
        measured = newest("transfers", folder)["summary"].values()
        by_size = [each for each in measured if isinstance(each, dict) and "gib_s" in each]  # others are times
        largest = by_size[-1]["gib_s"]
        args.down, args.up = args.down or largest["fetch"], args.up or largest["drain"]
    if args.update is None:
        summary = newest("adamw", folder)["summary"]
        threads = [name for name in summary if name.endswith(" threads")][-1]
        args.update = summary[threads]["adamw split draft"]["gparam_s"]["median"]
    return {"down": args.down * GIB, "up": args.up * GIB, "update": args.update * 1e9}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of benchmarks.versus")
    parser.add_argument("--down", type=float, help="to the device, GiB/s")
    parser.add_argument("--up", type=float, help="to the host, GiB/s")
    parser.add_argument("--update", type=float, help="the host's AdamW, in 10^9 parameters a second")
    parser.add_argument("--out", type=Path, help="file for the figures")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    summary, rate = result["summary"], rates(args)
    about = {name: each for race in result["samples"]["races"] for name, each in race["about"].items()}
    plain = summary.get("plain PyTorch", {})
    found: dict[str, Any] = {"rates": rate}
    said: dict[str, float] = {}
    for name, by_tokens in summary.items():
        rows = {int(tokens): row for tokens, row in by_tokens.items() if row["moved_bytes"]}
        shared = max((tokens for tokens in rows if str(tokens) in plain), default=None)
        if shared is None or not name.startswith("noria"):
            continue
        row, speed = rows[shared], plain[str(shared)]["tokens_per_s"]
        seconds = {way: row["moved_bytes"][way] / rate[way] for way in ("down", "up")}
        seconds["update"] = row["parameters"] / rate["update"]
        found[name] = {"seconds": seconds}
        for mode in modes_of(about[name]["settings"]):
            needed = {what: MODES[mode][what] * taken for what, taken in seconds.items()}
            busiest = max(needed, key=lambda each: needed[each])
            found[name][mode] = {"busiest": busiest, "tokens": speed * needed[busiest]}
            said[mode] = max(said.get(mode, 0.0), speed * needed[busiest])
            print(
                f"{name}, {mode}: computed, from {speed * needed[busiest]:.0f} tokens a step on ({busiest} wants "
                f"{1e3 * needed[busiest]:.1f} ms of compute a step; plain PyTorch: {speed:.0f} tokens/s)"
            )
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    words = ", ".join(f"{tokens:.0f} with {mode}" for mode, tokens in said.items())
    print(f"verdict: computed, as fast as plain PyTorch from so many tokens a step on: {words or 'unknown'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
