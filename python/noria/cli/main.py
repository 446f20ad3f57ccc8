"""Parses the arguments of the command `noria`, and sets its exit code.

0: success. 1: a plan was checked and found wanting. 2: misuse, with UsageError's text and no traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from noria._errors import UsageError
from noria.cli.doctor import run_doctor
from noria.cli.plan import run_plan
from noria.cli.trace import run_trace
from noria.pipeline.schedules import SCHEDULES
from noria.planning.machines import DEVICES, DISK_READ_GIB_S, DISK_WRITE_GIB_S

__all__ = ["main"]

_DESCRIPTION = "plan a model without having its memory, doctor a machine, sum up a trace"


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(f"noria {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `noria plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="noria", description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)

    plan = commands.add_parser("plan", help="what noria.wrap would do: units, memory, fetches, time, bounds")
    plan.set_defaults(run=run_plan)
    source = plan.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf-config", metavar="PATH", help="a config.json of transformers, or its folder")
    source.add_argument(
        "--model", metavar="MODULE:FACTORY", help="a function that returns the model, or (model, optimizer)"
    )
    plan.add_argument(
        "--optimizer",
        default=None,
        metavar="NAME",
        help='of torch.optim, with arguments if need be: AdamW (default), "SGD(momentum=0.9)"; none: no updates',
    )
    policy = plan.add_argument_group("policy, as in noria.wrap")
    for name in ("device", "device-memory", "host-memory", "kernel", "state-dtype", "update"):
        policy.add_argument(f"--{name}")
    policy.add_argument(
        "--files", action="append", metavar="FOLDER", help="for state that does not fit; several share it"
    )
    policy.add_argument("--file-memory", metavar="BYTES", help="a limit on the bytes there")
    policy.add_argument("--window", type=int)
    policy.add_argument("--resident", help='units that stay on the device: all, an amount such as "24GiB", or auto')
    policy.add_argument("--optimizer-device", choices=["host", "device"], help="where updates of the others run")
    policy.add_argument(
        "--activations", choices=["keep", "offload", "recompute", "auto"], help="what becomes of those of blocks"
    )
    policy.add_argument("--dtype", choices=["bf16", "bfloat16"], help="default: the model's own")
    policy.add_argument("--units", action="append", metavar="PATTERN", help='name pattern, such as "*.layers.*"')
    speed = plan.add_argument_group(
        "speeds, for the simulated step; without any: the costs that a run of this model has measured on this machine, "
        "else this machine's speeds, measured quickly"
    )
    for lane in ("fetch", "drain", "update"):
        speed.add_argument(f"--{lane}-gib-s", type=_positive, metavar="GIB/S")
    for way, default in (("read", DISK_READ_GIB_S), ("write", DISK_WRITE_GIB_S)):
        told = f"of each folder of --files, while the disk does both (default: {default})"
        speed.add_argument(f"--disk-{way}-gib-s", type=_positive, metavar="GIB/S", help=told)
    speed.add_argument("--tflops", type=_positive, help="of the device, on matrix products")
    speed.add_argument("--tokens", type=_number, help="of a step: batch x length (default 4096)")
    speed.add_argument(
        "--micro-batches",
        type=int,
        metavar="N",
        help="backwards of a step, which share its tokens (default: 1; with --pipeline: 2 a stage)",
    )
    machine = plan.add_argument_group("another machine, and what if; the speeds above count before those of --gpu")
    machine.add_argument("--gpu", metavar="NAME", help=f"{', '.join(DEVICES)}: its memory, link and compute")
    machine.add_argument("--cores", type=_number, help="of its host, for updates (default: this machine's)")
    machine.add_argument(
        "--dram-gib-s", type=_positive, metavar="GIB/S", help="of its memory: copies and updates share it"
    )
    machine.add_argument("--picture", type=Path, metavar="FILE", help="draw the step: .svg, .png or .pdf")
    machine.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the simulated steps, as a run writes a trace"
    )
    line = plan.add_argument_group("a pipeline of stages: what blocks save, who lends what")
    line.add_argument("--pipeline", type=int, metavar="STAGES", help="as many ranks")
    line.add_argument("--schedule", default="1f1b", metavar="NAME", help=f"{', '.join(SCHEDULES)}; default: 1f1b")
    line.add_argument(
        "--virtual-stages", type=int, metavar="V", help="of each rank, under interleaved-1f1b (default: 2)"
    )
    line.add_argument("--micro-batch-size", type=int, default=1, metavar="ROWS")
    line.add_argument("--length", type=int, default=512, metavar="TOKENS")
    line.add_argument("--activation-memory", metavar="BYTES", help="of each stage; default: no limit, nothing moves")
    plan.add_argument("--check", action="store_true", help="derive every wait of the planned step, and prove them")

    doctor = commands.add_parser("doctor", help="what this machine has for noria, and what it lacks")
    doctor.set_defaults(run=run_doctor)
    doctor.add_argument("--json", action="store_true")
    doctor.add_argument("--files", action="append", metavar="FOLDER", help="see whether files= can use this folder")

    trace = commands.add_parser("trace", help="sum up a trace file that Policy.trace has written")
    trace.set_defaults(run=run_trace)
    trace.add_argument("file", type=Path, nargs="?")
    trace.add_argument(
        "--diff", nargs=2, type=Path, metavar=("PREDICTED", "MEASURED"), help="where two traces of the same model part"
    )
    trace.add_argument("--waits", type=_number, default=5, help="how many of the longest waits to show")
    return parser


def _number(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 10**12:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 10**12")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 1e-9 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not between 1e-9 and 1e9")
    return value
