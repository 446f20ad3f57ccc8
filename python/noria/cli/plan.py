"""Runs `noria plan`: prints what a wrap call would take, and how long its step would be."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noria import _C
from noria._errors import usage_error
from noria.cli.tables import show, time_text
from noria.planning.step_simulation import PlannedStep, PlanSpeeds

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from noria.planning.wrap_plan import WrapPlan

__all__ = ["run_plan"]


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
        if args.tflops is not None and args.pipeline is None and not torch.cuda.is_available():
            fields.setdefault("device", "cuda")  # of another machine
    if args.dtype is not None:
        fields["dtype"] = torch.bfloat16
    if args.pipeline is None and args.activation_memory is not None:
        raise usage_error("--pipeline beside --activation-memory", "none", "say how many stages there are")
    planned = plan(model, optimizers or None, **fields)
    if args.pipeline is not None:
        return _run_pipeline(args, model, planned)
    print(planned)
    step = PlannedStep(planned, args.tokens, _speeds(args, planned))
    _show_step(step)
    if not args.check:
        return 0
    faults = step.check()
    print("\n".join(faults) if faults else "every conflicting pair is ordered")
    return 1 if faults else 0


def _run_pipeline(args: argparse.Namespace, model: nn.Module, planned: WrapPlan) -> int:
    from noria.pipeline.pipeline_plan import drawing, plan_pipeline, run_without_memory, saved_by_block
    from noria.pipeline.schedules import name_of_schedule, num_virtual_stages
    from noria.policy import format_bytes, make_policy, to_bytes

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
        room = to_bytes(make_policy(None, {"activations": "auto", "activation_memory": memory}).activation_memory)
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
    show(f"{stages} by {schedule}, {batches}: what blocks save at most", [found.row_name, *columns], rows)
    print("\n".join([*(loan.told(found.row_name) for loan in found.loans), *drawing(found)]))
    return 0


def _amount(text: str) -> str | int | float:
    """Parses an amount of memory: 0.5 is a fraction, 1000000 is bytes, and "8GiB" stays text."""
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


def _from_hf_config(text: str) -> object:
    path = Path(text)
    if not path.exists() or (path.is_dir() and not (path / "config.json").exists()):
        raise usage_error("a config.json or a folder with one", f"none at {text}", "give the path of a local file")
    try:
        import transformers
    except ImportError:
        raise usage_error(
            "transformers, which knows the model behind a config", "no such package", "pip install transformers"
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


def _from_factory(text: str) -> object:
    module_name, _, function_name = text.partition(":")
    if not module_name or not function_name:
        raise usage_error("--model module:function", f"--model {text}", "write --model my_models.gpt:make")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # raised by an import inside the caller's module
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


def _show_step(step: PlannedStep) -> None:
    rows = []
    for lane in ("compute", "fetch", "drain", "update"):
        spans = [span for span in step.spans if span.lane == lane]
        busy = sum(span.end_us - span.start_us for span in spans)
        share = f"{busy / step.step_us:.0%}" if step.step_us else ""
        ends_at = max((span.end_us - step.begin_us for span in spans), default=0)
        rows.append([lane, str(len(spans)), time_text(busy), share, time_text(ends_at)])
    print()
    show("one steady step, simulated", ["lane", "ops", "busy", "share", "ends at"], rows)
    speeds = step.speeds
    print(
        f"at fetch {speeds.fetch:.1f}, drain {speeds.drain:.1f}, update {speeds.update:.1f} GiB/s and "
        f"{speeds.tflops:.3g} Tflop/s"
        + (f" (measured here: {', '.join(speeds.measured)})" if speeds.measured else "")
        + f", {step.tokens} tokens"
    )
    times = step.times()
    print(
        f"step {time_text(step.step_us)}; no schedule beats: drafts of all units, and update='backward', "
        f"{time_text(_C.drafting_bound_us(times))}; update='auto' without drafts "
        f"{time_text(_C.deferred_bound_us(times))}; 'blocking' {time_text(_C.blocking_bound_us(times))}"
    )


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
