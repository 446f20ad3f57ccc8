"""The command `noria`: `plan` a model without having its memory, `doctor` a machine, sum up a `trace`.

Exit codes: 0; 1 when a plan was checked and found wanting; 2 for misuse, with UsageError's text and no traceback.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from noria._errors import UsageError, usage_error
from noria.schedules import SCHEDULES

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from noria.plan import WrapPlan

__all__ = ["main"]


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
    parser = argparse.ArgumentParser(prog="noria", description=__doc__.split("\n")[0] if __doc__ else "")
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
        help='of torch.optim, with arguments if need be: AdamW (default), "SGD(momentum=0.9)"; none: inference',
    )
    policy = plan.add_argument_group("policy, as in noria.wrap")
    for name in ("device", "device-memory", "host-memory", "kernel", "state-dtype", "update"):
        policy.add_argument(f"--{name}")
    policy.add_argument("--window", type=int)
    policy.add_argument("--dtype", choices=["bf16", "bfloat16"], help="default: the model's own")
    policy.add_argument("--units", action="append", metavar="PATTERN", help='name pattern, such as "*.layers.*"')
    speed = plan.add_argument_group("speeds, for the simulated step; default: this machine's, measured quickly")
    for lane in ("fetch", "drain", "update"):
        speed.add_argument(f"--{lane}-gib-s", type=_positive, metavar="GIB/S")
    speed.add_argument("--tflops", type=_positive, help="of the device, on matrix products")
    speed.add_argument("--tokens", type=int, default=4096, help="of a step: batch x length (default 4096)")
    line = plan.add_argument_group("a pipeline of stages: what blocks save, who lends what")
    line.add_argument("--pipeline", type=int, metavar="STAGES", help="as many ranks")
    line.add_argument("--schedule", default="1f1b", metavar="NAME", help=f"{', '.join(SCHEDULES)}; default: 1f1b")
    line.add_argument(
        "--virtual-stages", type=int, metavar="V", help="of each rank, under interleaved-1f1b (default: 2)"
    )
    line.add_argument("--micro-batches", type=int, default=None, metavar="N", help="of a step (default: 2 a stage)")
    line.add_argument("--micro-batch-size", type=int, default=1, metavar="ROWS")
    line.add_argument("--length", type=int, default=512, metavar="TOKENS")
    line.add_argument("--activation-memory", metavar="BYTES", help="of each stage; default: no limit, nothing moves")
    plan.add_argument("--check", action="store_true", help="derive every wait of the planned step, and prove them")

    doctor = commands.add_parser("doctor", help="what this machine has for noria, and what it lacks")
    doctor.set_defaults(run=run_doctor)
    doctor.add_argument("--json", action="store_true")

    trace = commands.add_parser("trace", help="sum up a trace file that Policy.trace has written")
    trace.set_defaults(run=run_trace)
    trace.add_argument("file", type=Path)
    trace.add_argument("--waits", type=int, default=5, help="how many of the longest waits to show")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


# ---- output -------------------------------------------------------------------------------------------------------


def _show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A rich table on a terminal; aligned columns in a pipe or file."""
    cells = [[*row] for row in rows]
    if sys.stdout.isatty():
        table = Table(title=title, title_justify="left", title_style="bold")
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in cells:
            table.add_row(*row)
        Console().print(table)
        return
    print(f"{title}:")
    head = [[*columns]] if any(columns) else []
    widths = [max(len(row[i]) for row in [*head, *cells]) for i in range(len(columns))]
    for row in [*head, *cells]:
        line = row[0].ljust(widths[0]) + "".join(
            f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)
        )
        print(f"  {line.rstrip()}")


def _time(us: float) -> str:
    return f"{us / 1e3:.1f} ms" if us < 1e7 else f"{us / 1e6:.1f} s"


# ---- plan ---------------------------------------------------------------------------------------------------------


def run_plan(args: argparse.Namespace) -> int:
    import torch

    from noria.wrap import plan

    model, optimizers = _model_and_optimizers(args)
    fields: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("device", "device_memory", "host_memory", "kernel", "state_dtype", "update", "window", "units")
        if getattr(args, name) is not None
    }
    if "device_memory" in fields:
        fields["device_memory"] = _amount(fields["device_memory"])
    if args.dtype is not None:
        fields["dtype"] = torch.bfloat16
    if args.pipeline is None and args.activation_memory is not None:
        raise usage_error("--pipeline beside --activation-memory", "none", "say how many stages there are")
    planned = plan(model, optimizers or None, **fields)
    if args.pipeline is not None:
        return _run_pipeline(args, model, planned)
    print(planned)
    step = PlannedStep(planned, args.tokens, _speeds(args, planned))
    step.show()
    if not args.check:
        return 0
    faults = step.check()
    print("\n".join(faults) if faults else "every conflicting pair is ordered")
    return 1 if faults else 0


def _run_pipeline(args: argparse.Namespace, model: nn.Module, planned: WrapPlan) -> int:
    from noria.pipeline import drawing, plan_pipeline, run_without_memory, saved_by_block
    from noria.policy import activation_budget, format_bytes, make_policy
    from noria.schedules import name_of_schedule, num_virtual_stages

    schedule = name_of_schedule(args.schedule)
    virtual_stages = num_virtual_stages(schedule, args.virtual_stages)
    num_micro_batches = 2 * args.pipeline if args.micro_batches is None else args.micro_batches
    for name, least, value in (
        ("--pipeline", 2, args.pipeline),
        ("--micro-batches", 1, num_micro_batches),
        ("--micro-batch-size", 1, args.micro_batch_size),
        ("--length", 1, args.length),
    ):
        if value < least:
            raise usage_error(f"{name} of {least} or more", f"{value}", "raise it")
    room = None
    if args.activation_memory is not None:
        memory = _amount(args.activation_memory)
        room = activation_budget(make_policy(None, {"activations": "auto", "activation_memory": memory}))
    run = run_without_memory(model, planned.policy.dtype, (args.micro_batch_size, args.length))
    found = plan_pipeline(
        planned.partition,
        saved_by_block(planned.partition, run),
        [unit.weights for unit in planned.units],
        num_stages=args.pipeline,
        schedule=schedule,
        virtual_stages=virtual_stages,
        num_micro_batches=num_micro_batches,
        room=room,
    )
    columns = ["blocks", "in flight", "weights", "saved", "on the device", "lent", "borrowed", "at the host"]
    rows = []
    for number, stage in enumerate(found.stages):
        amounts = (stage.weights, stage.saved, stage.kept, stage.lent, stage.borrowed, stage.at_host)
        in_flight = " + ".join(map(str, stage.in_flight))
        rows.append([str(number), str(len(stage.blocks)), in_flight, *map(format_bytes, amounts)])
    stages = f"{args.pipeline} stages" if virtual_stages == 1 else f"{args.pipeline} ranks of {virtual_stages} stages"
    batches = f"{num_micro_batches} micro-batches of {args.micro_batch_size} x {args.length} tokens"
    _show(f"{stages} by {schedule}, {batches}: what blocks save at most", [found.row_name, *columns], rows)
    print("\n".join([*(loan.told(found.row_name) for loan in found.loans), *drawing(found)]))
    return 0


def _amount(text: str) -> str | int | float:
    """On a command line 0.5 is a fraction and 1000000 bytes; "8GiB" stays text."""
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _model_and_optimizers(args: argparse.Namespace) -> tuple[nn.Module, list[Optimizer]]:
    import torch

    with torch.device("meta"):
        made = _from_hf_config(args.hf_config) if args.hf_config else _from_factory(args.model)
    given: list[Optimizer] = []
    if isinstance(made, tuple):
        made, *rest = made
        given = [each for entry in rest for each in (entry if isinstance(entry, list | tuple) else [entry])]
    if not isinstance(made, torch.nn.Module):
        raise usage_error("a torch.nn.Module", f"{type(made).__qualname__} from {args.model}", "return the model")
    if args.optimizer is None and given:
        return made, given
    return made, _make_optimizer(args.optimizer or "AdamW", made)


def _from_hf_config(text: str) -> Any:
    path = Path(text)
    if not path.exists() or (path.is_dir() and not (path / "config.json").exists()):
        raise usage_error("a config.json or a folder with one", f"none at {text}", "give the path of a local file")
    try:
        import transformers
    except ImportError:
        raise usage_error(
            "transformers, which knows the model behind a config", "it is not installed", "pip install transformers"
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(text)
    except (ValueError, OSError, KeyError) as error:
        what = str(error).strip().split("\n")[0]
        expected = f"a config that transformers {transformers.__version__} knows"
        raise usage_error(expected, what, "look at its model_type, or install the transformers that has it") from None
    names = getattr(config, "architectures", None) or []
    named = getattr(transformers, names[0], None) if names else None
    if named is not None:
        return named._from_config(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def _from_factory(text: str) -> Any:
    module_name, _, function_name = text.partition(":")
    if not module_name or not function_name:
        raise usage_error("--model module:function", f"--model {text}", "such as --model my_models.gpt:make")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # of the caller's own imports
        raise usage_error(
            f"a module {module_name}", "none", "run where it can be imported, or set PYTHONPATH"
        ) from None
    except AttributeError:
        raise usage_error(f"{function_name} in {module_name}", "no such name", "name a function there") from None
    return factory()


def _make_optimizer(text: str, model: nn.Module) -> list[Optimizer]:
    import torch

    if text.lower() == "none":
        return []
    name, _, rest = text.partition("(")
    cls = getattr(torch.optim, name.strip(), None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer):
        known = sorted(
            each for each, kind in vars(torch.optim).items() if isinstance(kind, type) and each != "Optimizer"
        )
        raise usage_error(f"an optimizer of torch.optim ({', '.join(known)})", text, "name one, or none")
    try:
        call = ast.parse(f"f({rest or ')'}", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        keywords = {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [cls(trainable, **keywords)]
    except (SyntaxError, AssertionError, ValueError, TypeError) as error:
        raise usage_error(
            'an optimizer such as "SGD(momentum=0.9)"', f"{text}: {error}", "give arguments by name"
        ) from None


# ---- the planned step ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlanSpeeds:
    """GiB/s of the lanes, Tflop/s of the device; `measured`: which of them were measured here and now."""

    fetch: float
    drain: float
    update: float
    tflops: float
    measured: tuple[str, ...]


def _speeds(args: argparse.Namespace, planned: WrapPlan) -> PlanSpeeds:
    import torch

    from noria.doctor import measure_matmul_tflops, measure_speeds

    given = {"fetch": args.fetch_gib_s, "drain": args.drain_gib_s, "update": args.update_gib_s, "tflops": args.tflops}
    missing = tuple(name for name, value in given.items() if value is None)
    if set(missing) - {"tflops"}:
        speeds = measure_speeds()
        given |= {name: getattr(speeds, name) for name in missing if name != "tflops"}
    if "tflops" in missing:
        dtypes = {slot.dtype for unit in planned.units for slot in unit.parameters}
        dtype = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float32
        given["tflops"] = measure_matmul_tflops(planned.device, dtype)
    return PlanSpeeds(**given, measured=missing)


class PlannedStep:
    """A step in a steady state, in virtual time: the updates of the step before, then forward and backward as planned.

    Compute is taken as two flops per weight and token in forward, and twice that in backward; embeddings take none.
    Right for what is made of matrix products, too little for long attention.
    """

    def __init__(self, planned: WrapPlan, tokens: int, speeds: PlanSpeeds) -> None:
        from noria import _C

        self.planned, self.speeds, self.tokens = planned, speeds, tokens
        self.ops: list[Any] = []
        self.phases: list[str] = []
        buffers = planned.buffers
        trains = bool(planned.kernels)
        for unit in self._forward_order():
            if trains and unit.gradients:
                accesses = [
                    (buffers.intern("host:1", unit.index, 1, "held_gradient", unit.index), "read"),
                    (buffers.intern("host:2", unit.index, 1, "optimizer_state", unit.index), "write"),
                    (buffers.intern("host:0", unit.index, 1, "working_copy", unit.index), "write"),
                ]
                self._add("update", "update", "update", unit.index, self._update_bytes(unit), accesses)
        for phase, each in planned.passes.items():
            for op in each.ops:
                accesses = [(access.buffer, access.mode) for access in op.accesses]
                self._add(phase, op.lane, op.verb, op.unit, op.bytes, accesses)
        self.waits = _C.derive(self.ops, buffers)
        rates = {"fetch": speeds.fetch, "drain": speeds.drain, "update": speeds.update}
        forward_us = [2 * tokens * count / speeds.tflops / 1e6 for count in self._multiplied()]
        costs = _C.Costs(rates, {}, forward_us, [2 * us for us in forward_us])
        self.spans = _C.simulate(self.ops, self.waits, costs)

    def _multiplied(self) -> list[int]:
        """By unit: the weights that every token is multiplied with."""
        from torch import nn

        return [
            0 if isinstance(spec.module, nn.Embedding | nn.EmbeddingBag) else sum(p.numel() for p in spec.parameters)
            for spec in self.planned.partition.units
        ]

    def _forward_order(self) -> list[Any]:
        order = dict.fromkeys(unit for visit in self.planned.visits["forward"] for unit in visit.needs)
        order |= dict.fromkeys(range(len(self.planned.units)))
        return [self.planned.units[index] for index in order]

    def _update_bytes(self, unit: Any) -> int:
        """What the fused kernel reads and writes; what torch does there is guessed to be as much as AdamW."""
        count = sum(slot.parameter.numel() for slot in unit.parameters if slot.trainable)
        is_split = any(slot.has_master for slot in unit.parameters)
        rules = self.planned.fused.get(unit.index)
        fallback = 26 if is_split else 28
        state_dtype = self.planned.policy.state_dtype
        each = max(rule.bytes_per_element(is_split, state_dtype) for rule in rules) if rules else fallback
        return int(count * each)

    def _add(
        self, phase: str, lane: str, verb: str, unit: int, num_bytes: int, accesses: list[tuple[int, str]]
    ) -> None:
        """Versions are counted anew: the passes were planned one by one."""
        from noria import _C

        made = [_C.Access(buffer, 0, mode) for buffer, mode in accesses]
        self.ops.append(_C.Op(len(self.ops), lane, verb, unit, num_bytes, -1, made))
        self.phases.append(phase)

    def check(self) -> list[str]:
        """What the proof finds wrong: in the step as a whole, and in each pass with the planner's own versions."""
        from noria import _C

        buffers = self.planned.buffers
        faults: list[str] = _C.check(self.ops, self.waits, buffers)
        for name, each in self.planned.passes.items():
            faults += [f"{name}: {fault}" for fault in _C.check(each.ops, _C.derive(each.ops, buffers), buffers)]
        return faults

    def times(self) -> Any:
        from noria import _C

        names = ("forward", "backward", "update", "forward_fetch", "backward_fetch", "drain", "offload", "peer")
        sums = dict.fromkeys([f"{name}_us" for name in names], 0.0)
        for span in self.spans:
            phase = self.phases[span.op]
            name = f"{phase}_fetch_us" if span.verb in ("fetch", "reload") else f"{span.verb}_us"
            if span.lane == "peer":
                name = "peer_us"
            if name in sums:
                sums[name] += span.end_us - span.start_us
        # The rate of updates is that of the host's memory, through which the copies go, too: twice where that is also
        # the device's, which reads and writes them.
        times = 2 if self.planned.device.type == "cpu" else 1
        copied = sum(span.bytes for span in self.spans if span.lane in ("fetch", "drain"))
        sums["host_copies_us"] = times * copied / (self.speeds.update * (1 << 30)) * 1e6
        sums["host_updates_us"] = sums["update_us"]
        return _C.StepTimes(**sums)

    def show(self) -> None:
        from noria import _C

        end_us = max((span.end_us for span in self.spans), default=0)
        rows = []
        for lane in ("compute", "fetch", "drain", "update"):
            spans = [span for span in self.spans if span.lane == lane]
            busy = sum(span.end_us - span.start_us for span in spans)
            share = f"{busy / end_us:.0%}" if end_us else ""
            rows.append([lane, str(len(spans)), _time(busy), share, _time(max((s.end_us for s in spans), default=0))])
        rate = {name: f"{getattr(self.speeds, name):.1f}" for name in ("fetch", "drain", "update")}
        tflops = f"{self.speeds.tflops:.3g}"
        print()
        _show("one step, simulated", ["lane", "ops", "busy", "share", "ends at"], rows)
        print(
            f"at fetch {rate['fetch']}, drain {rate['drain']}, update {rate['update']} GiB/s and {tflops} Tflop/s"
            + (f" (measured here: {', '.join(self.speeds.measured)})" if self.speeds.measured else "")
            + f", {self.tokens} tokens"
        )
        times = self.times()
        print(
            f"step {_time(end_us)}; no schedule beats: update='auto' {_time(_C.deferred_bound_us(times))}, "
            f"'blocking' {_time(_C.blocking_bound_us(times))}"
        )


# ---- doctor -------------------------------------------------------------------------------------------------------


def run_doctor(args: argparse.Namespace) -> int:
    from noria.doctor import diagnose

    found = diagnose()
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


# ---- trace --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class TracedSpan:
    """Microseconds. `givers`: the spans that this one waited for."""

    lane: str
    name: str
    start: float
    end: float
    num_bytes: int
    givers: list[TracedSpan] = dataclasses.field(default_factory=list)
    idle: float = 0.0
    """How long the lane stood before this span because a giver had not ended."""

    @property
    def verb(self) -> str:
        return self.name.split(" ", 1)[0]


def run_trace(args: argparse.Namespace) -> int:
    spans = read_trace(args.file)
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    lanes = {span.lane: None for span in sorted(spans, key=lambda span: span.start)}
    order = [lane for lane in ("compute", "fetch", "drain", "collect", "peer", "update") if lane in lanes]
    rows = []
    for lane in order:
        own = [span for span in spans if span.lane == lane and not _is_step(span)]
        busy = _covered(own)
        num_bytes = sum(span.num_bytes for span in own)
        rate = f"{num_bytes / (1 << 30) / (busy / 1e6):.2f}" if num_bytes and busy else ""
        waited = _time(sum(span.idle for span in own))
        rows.append([lane, str(len(own)), _time(busy), f"{busy / max(end - begin, 1):.0%}", waited, rate])
    _show(f"{_time(end - begin)} of {args.file}", ["lane", "spans", "busy", "share", "waited", "GiB/s"], rows)

    kinds: dict[str, float] = {}
    for span in spans:
        if span.idle > 0:
            giver = max(span.givers, key=lambda each: each.end)
            kind = f"{giver.verb} -> {span.verb}"
            kinds[kind] = kinds.get(kind, 0.0) + span.idle
    print()
    _show(
        "waits by kind", ["", "in all"], [[kind, _time(us)] for kind, us in sorted(kinds.items(), key=lambda x: -x[1])]
    )
    print()
    longest = sorted((span for span in spans if span.idle > 0), key=lambda span: -span.idle)[: args.waits]
    _show(
        "longest waits",
        ["who waited", "on the lane", "at", "for", "until it had done"],
        [
            [s.name, s.lane, _time(s.start - begin), _time(s.idle), max(s.givers, key=lambda each: each.end).name]
            for s in longest
        ],
    )
    print()
    steps = _steps(spans)
    fetches = [sum(start <= span.start < stop for span in spans if span.verb == "fetch") for start, stop in steps]
    if not steps:
        print("no whole step in this trace")
    else:
        lengths = sorted(stop - start for start, stop in steps)
        print(
            f"{len(steps)} whole steps, median {_time(lengths[len(lengths) // 2])}; "
            f"fetches per step: {_ranges(fetches)}"
        )
    return 0


def read_trace(path: Path) -> list[TracedSpan]:
    """The spans of a trace file as noria writes it, in the order of their ends within each lane."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
        slices = [event for event in events if event["ph"] == "X"]
        spans = [
            TracedSpan(lanes[e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"], e["args"]["bytes"]) for e in slices
        ]
        arrows: dict[int, dict[str, tuple[str, float]]] = {}
        for event in events:
            if event["ph"] in ("s", "f"):
                arrows.setdefault(event["id"], {})[event["ph"]] = (lanes[event["tid"]], event["ts"])
    except OSError as error:
        raise usage_error("a trace file that can be read", f"{path}: {error.strerror}", "give Policy.trace's") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        remedy = 'give a file that noria wrote: noria.wrap(..., trace="trace.json")'
        raise usage_error("a trace in Chrome's JSON, as noria writes it", str(path), remedy) from None
    if not spans:
        raise usage_error("a trace with spans", f"none in {path}", "train a few steps before the trace is written")
    _connect(spans, arrows)
    return spans


def _connect(spans: list[TracedSpan], arrows: dict[int, dict[str, tuple[str, float]]]) -> None:
    starts = {(span.lane, span.start): span for span in spans}
    # An arrow leaves one microsecond before its slice ends, and arrives where one starts.
    ends = {(span.lane, max(span.start, span.end - 1)): span for span in spans}
    for arrow in arrows.values():
        if len(arrow) == 2 and arrow["s"] in ends and arrow["f"] in starts:
            starts[arrow["f"]].givers.append(ends[arrow["s"]])
    free: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        since = free.get(span.lane)
        if since is not None and span.givers:
            span.idle = max(0.0, min(max(giver.end for giver in span.givers), span.start) - since)
        free[span.lane] = max(since or 0.0, span.end)


def _covered(spans: list[TracedSpan]) -> float:
    """Microseconds in which at least one of them runs."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def _steps(spans: list[TracedSpan]) -> list[tuple[float, float]]:
    """From the end of the last backward pass before a step to the end of the next such one: fetches that a step issues
    ahead belong to the next. Where no step is marked each backward pass is taken for the last."""
    compute = sorted(
        (s for s in spans if s.lane == "compute" and s.verb in ("forward", "backward")), key=lambda s: s.start
    )
    marks = sorted(span.start for span in spans if _is_step(span))
    ends = []
    for each, later in zip(compute, [*compute[1:], None], strict=True):
        if marks:
            until = float("inf") if later is None else later.start
            is_end = bisect.bisect_left(marks, each.end) < bisect.bisect_right(marks, until)
        else:
            is_end = each.verb == "backward" and (later is None or later.verb == "forward")
        if is_end:
            ends.append(each.end)
    return list(itertools.pairwise(ends))


def _is_step(span: TracedSpan) -> bool:
    """A mark, without length."""
    return span.lane == "compute" and span.verb == "user"


def _ranges(counts: list[int]) -> str:
    """ "14 x 12, 16": in the order in which they came."""
    parts: list[list[int]] = []
    for count in counts:
        if parts and parts[-1][0] == count:
            parts[-1][1] += 1
        else:
            parts.append([count, 1])
    return ", ".join(f"{count} ({times} times)" if times > 1 else str(count) for count, times in parts)


if __name__ == "__main__":
    sys.exit(main())
