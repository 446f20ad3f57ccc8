"""Installs each rival from its package into an environment of its own, and sees whether it trains on this machine.

    python -m benchmarks.rivals [--systems all] [--wheels FOLDER]

Each system takes three steps of a small model. It trains if its last loss is nearer to that of plain PyTorch than to
that of a model which is never updated. What cannot be installed, cannot run or does not train is listed with the reason
that it gave, here and in build/rivals/status.json, which `benchmarks.versus` reads.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.systems.catalogue import OWN, PLAIN, SYSTEMS, add_systems
from benchmarks.systems.client import Client, RefusedError
from benchmarks.systems.environments import FOLDER, STATUS, install, pins, unlock
from benchmarks.systems.task import Task, text_file

STEPS, TOKENS = 3, 256


def losses_without_updates(task: Task) -> list[float]:
    model = task.make_model()
    with torch.no_grad():
        return [model(*task.batches(TOKENS, number)[0])[1].item() for number in range(STEPS)]


def why_not_trained(losses: list[float], plain: list[float], still: list[float]) -> str | None:
    """`still`: without any update."""
    said = f"its losses are {shown(losses)}, plain PyTorch's {shown(plain)}"
    if not all(map(math.isfinite, losses)):
        return said
    if abs(losses[-1] - plain[-1]) > abs(losses[-1] - still[-1]):
        return f"{said}, and without any update they are {shown(still)}"
    return None


def shown(losses: list[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)


def tried(name: str, task: Task) -> dict[str, Any]:
    """A system's losses, or why it has none."""
    try:
        client = Client(name, FOLDER / "logs" / f"{name.replace(' ', '_')}.log")
    except OSError as error:
        return {"runs": False, "reason": str(error)}
    try:
        client.start(task)
        losses = client.tell(do="steps", tokens=TOKENS, first=0, count=STEPS)["losses"]
    except RefusedError as refusal:
        return {"runs": False, "reason": str(refusal)}
    finally:
        client.close()
    return {"runs": True, "losses": losses}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_systems(parser)
    parser.add_argument("--wheels", type=Path, help="a folder to install from, on a machine without an index")
    args = parser.parse_args()
    tokens = text_file(FOLDER)
    names = args.systems
    refused: dict[str, str] = {}
    for environment in dict.fromkeys(SYSTEMS[name].environment for name in names):
        if environment == OWN:
            continue
        reason = install(environment, args.wheels)
        print(f"{environment}: {', '.join(pins()[environment])}: {reason or 'installed'}", flush=True)
        if reason:
            refused[environment] = reason
    unlock()
    has_device = torch.cuda.is_available()  # there it takes the dtype in which systems are compared
    task = Task("gpt-3m", str(tokens), "cuda" if has_device else "cpu", "bf16" if has_device else "fp32")
    still = losses_without_updates(task)
    plain: list[float] = tried(PLAIN, task)["losses"]
    found = json.loads(STATUS.read_text()) if STATUS.exists() else {}
    for name in names:
        reason = refused.get(SYSTEMS[name].environment)
        each = {"runs": False, "reason": f"not installed: {reason}"} if reason else tried(name, task)
        if each["runs"] and (reason := why_not_trained(each["losses"], plain, still)):
            each |= {"runs": False, "reason": reason}
        found[name] = each
        said = f"losses {shown(each['losses'])}" if each["runs"] else f"not here: {each['reason']}"
        print(f"  {name:<26} {said}", flush=True)
        STATUS.write_text(json.dumps(found, indent=1) + "\n")
    absent = [name for name in names if not found[name]["runs"]]
    ran = f"{len(names) - len(absent)} of {len(names)} run"
    print(f"verdict: {ran}" + (f"; not: {', '.join(absent)}" if absent else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
