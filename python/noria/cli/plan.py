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

from noria._errors import UsageError, usage_error
from noria.cli.picture import check_picture, draw_wheel, spans_of
from noria.cli.tables import show, time_text
from noria.planning.cost_cache import KnownCosts, load_costs
from noria.planning.cost_table import COLUMNS, cost_rows, rates_text
from noria.planning.decisions import as_costs_choose, with_best_drafts, with_best_places, without_idle_logs
from noria.planning.endurance import endurance_text
from noria.planning.machines import BOTH_WAYS, DISK_READ_GIB_S, DISK_WRITE_GIB_S, Machine, device_named
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.planning.what_if import break_even_tokens, changes, compute_us, largest_model, simulated, wall

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from noria.planning.machines import Device
    from noria.planning.wrap_plan import WrapPlan

__all__ = ["run_plan"]


def run_plan(args: argparse.Namespace) -> int:
    import torch

    from noria.wrap import plan_without_costs

    model, optimizers = _model_and_optimizers(args)
    fields: dict[str, Any] = {
        name: getattr(args, name)
        for name in (
            "device",
            "device_memory",
            "host_memory",
            "kernel",
            "state_dtype",
            "update",
            "window",
            "units",
            "resident",
            "optimizer_device",
            "activations",
            "files",
            "file_memory",
        )
        if getattr(args, name) is not None
    }
    for name in ("host_memory", "file_memory"):
        if fields.get(name, "").isdecimal():
            fields[name] = int(fields[name])
    if "device_memory" in fields:
        fields["device_memory"] = _amount(fields["device_memory"])
        if args.tflops is not None and args.pipeline is None and not torch.cuda.is_available():
            fields.setdefault("device", "cuda")  # of another machine
    if args.dtype is not None:
        fields["dtype"] = torch.bfloat16
    if args.pipeline is None and args.activation_memory is not None:
        raise usage_error("--pipeline beside --activation-memory", "none", "say how many stages there are")
    if args.picture is not None:
        check_picture(args.picture)
        if args.picture == args.trace:
            raise usage_error("--picture and --trace in two files", f"{args.trace} for both", "name another")
    if args.gpu is not None:
        return _run_elsewhere(args, model, optimizers, fields)
    planned = plan_without_costs(model, optimizers or None, **fields)
    if args.pipeline is not None:
        if args.picture is not None or args.trace is not None:
            raise usage_error("--picture and --trace of one device", "--pipeline", "leave one of them out")
        return _run_pipeline(args, model, planned)
    known = _known_costs(args, planned)
    planned = as_costs_choose(planned, known.costs)
    print(planned)
    if known.note:
        print(f"note: {known.note}")
    if known.costs is None:
        step = simulated(planned, _machine(args, planned), _tokens(args), _backwards(args))
    else:
        print()
        show(f"costs, measured {known.measured}", COLUMNS, cost_rows(planned.units, known.costs))
        print("\n".join(rates_text(known.costs)))
        disk_read, disk_write = _disks(args, planned)
        speeds = PlanSpeeds(0, 0, 0, 0, disk_read=disk_read, disk_write=disk_write)
        step = PlannedStep(planned, 0, speeds, known.costs)
    _show_step(step)
    _show_wall(step)
    return _finish(args, step)


def _known_costs(args: argparse.Namespace, planned: WrapPlan) -> KnownCosts:
    """Returns the costs that a run has measured here, unless speeds are given. `--cores` may be one of its numbers."""
    speeds = (args.tflops, args.fetch_gib_s, args.drain_gib_s, args.update_gib_s, args.dram_gib_s)
    disks = (args.disk_read_gib_s, args.disk_write_gib_s)
    if any(each is not None for each in (*speeds, *disks, args.tokens, args.micro_batches)):
        return KnownCosts()
    known = load_costs(planned)
    if args.cores is None:
        return known
    costs = None if known.costs is None else known.costs.with_threads(args.cores)
    return KnownCosts() if costs is None else KnownCosts(costs, f"{known.measured}; with {args.cores} threads")


def _tokens(args: argparse.Namespace) -> int:
    return 4096 if args.tokens is None else int(args.tokens)


def _backwards(args: argparse.Namespace) -> int:
    """Returns how many backwards a step has."""
    found = 1 if args.micro_batches is None else int(args.micro_batches)
    if not 1 <= found <= _tokens(args):
        raise usage_error("--micro-batches of 1 or more, and of a token or more each", f"{found}", "say another number")
    return found


def _finish(args: argparse.Namespace, step: PlannedStep) -> int:
    """Writes the files that were asked for, and checks the step's waits. Returns the exit status."""
    if args.trace is not None:
        try:
            args.trace.write_text(step.trace_json(), encoding="utf-8")
        except OSError as error:
            found = f"{args.trace}: {error.strerror}"
            raise usage_error("a trace file that can be written", found, "choose another path") from None
        print(f"written: {args.trace}")
    if args.picture is not None:
        title = f"{time_text(step.step_us)} a step (simulated)"
        if step.tokens:
            tokens_s = _tokens_s(step.tokens, step.step_us)
            title = f"{time_text(step.step_us)} a step of {step.tokens} tokens, {tokens_s} tokens/s (simulated)"
        if step.num_simulated < step.backwards:
            title += f", {step.num_simulated} of {step.backwards} micro-batches are drawn"
        draw_wheel(args.picture, spans_of(step), step.begin_us, step.end_us, title)
        print(f"written: {args.picture}")
    if not args.check:
        return 0
    faults = step.check()
    print("\n".join(faults) if faults else "every conflicting pair is ordered")
    return 1 if faults else 0


def _run_elsewhere(
    args: argparse.Namespace, model: nn.Module, optimizers: list[Optimizer], fields: dict[str, Any]
) -> int:
    """Plans for a machine that is not here, and says what limits it."""
    from noria.policy import format_bytes, to_bytes
    from noria.wrap import plan_elsewhere

    if args.pipeline is not None:
        raise usage_error("--pipeline or --gpu", "both", "plan a stage's device by itself")
    if fields.get("host_memory", "auto") == "auto":
        found = fields.get("host_memory", "none")
        raise usage_error("--host-memory with an amount, beside --gpu", found, "say how much its host has for the home")
    host_bytes = to_bytes(fields["host_memory"])
    device = device_named(args.gpu)
    if not str(fields.setdefault("device", "cuda")).startswith("cuda"):
        raise usage_error('--device "cuda" beside --gpu', fields["device"], "leave --device out")
    asked = to_bytes(fields.get("device_memory", "auto"), device.free_bytes) or 0
    if asked > device.free_bytes:
        found = f"{format_bytes(asked)}; {args.gpu} has {format_bytes(device.free_bytes)} free"
        raise usage_error("--device-memory that the GPU has", found, "lower it, or leave --gpu out")

    def planned_with(more: dict[str, Any]) -> WrapPlan:
        planned = plan_elsewhere(model, optimizers, device.free_bytes, **{**fields, **more})
        machine = _machine(args, planned, device)
        tokens, backwards = _tokens(args), _backwards(args)

        def step_us(each: WrapPlan) -> float:
            return simulated(each, machine, tokens, backwards).step_us

        if planned.policy.resident == "auto":
            planned = with_best_places(planned, step_us)
        return without_idle_logs(with_best_drafts(planned, step_us))

    try:
        planned = planned_with({})
    except UsageError as error:
        try:
            planned = planned_with({"host_memory": "auto"})
        except UsageError:
            raise error from None  # the host is not what is too small
        print(planned)
        print(f"does not fit: {error}")
        _show_largest(planned, host_bytes)
        return 1
    print(planned)
    machine = _machine(args, planned, device)
    step = simulated(planned, machine, _tokens(args), _backwards(args))
    _show_step(step)
    _show_limits(step, machine)
    _show_largest(planned, host_bytes)
    columns = ["one change", "step", "tokens/s", "gain"]
    rows = [
        [change.what, time_text(change.step_us), _tokens_s(change.tokens, change.step_us), f"{change.gain:.2f} x"]
        for change in changes(step, machine, planned_with)
    ]
    print()
    show("what one change would give", columns, rows)
    return _finish(args, step)


def _tokens_s(tokens: int, us: float) -> str:
    return f"{1e6 * tokens / max(us, 1):.0f}"


def _show_limits(step: PlannedStep, machine: Machine) -> None:
    ideal_us = compute_us(step)
    print(
        f"{_tokens_s(step.tokens, step.step_us)} tokens/s; {_tokens_s(step.tokens, ideal_us)} if all lay on the device "
        f"({ideal_us / max(step.step_us, 1):.0%})"
    )
    _show_wall(step)
    tokens = break_even_tokens(step.planned, machine, step.backwards)
    print(
        "no number of tokens a step hides all else behind the compute"
        if tokens is None
        else f"break-even: from {tokens} tokens a step on, all else hides behind the compute, within 5 %"
    )


def _show_wall(step: PlannedStep) -> None:
    name, share = wall(step)
    print(f"the wall: {name}, {share:.0%} of the step")


def _show_largest(planned: WrapPlan, host_bytes: int | None) -> None:
    from noria.policy import format_bytes

    found = largest_model(planned, host_bytes or 0)
    if found is None:
        return
    room = f"{format_bytes(host_bytes or 0)} of host memory"
    if not found.num_blocks:
        print(f"not even one block like {found.block} fits into {room}")
        return
    size = f"{found.num_parameters / 1e9:.2f} B parameters, {found.num_blocks} blocks like {found.block}"
    print(f"largest model of this shape in {room}: {size}" + (", without drafts" if planned.draftable else ""))


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
        as_module = (
            f"write --model {Path(module_name).stem}:{function_name}, and " if "/" in text or ".py" in text else ""
        )
        raise usage_error(
            f"a module {module_name}", "none", f"{as_module}run where it can be imported, or set PYTHONPATH"
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
            'an optimizer such as "SGD(momentum=0.9)"',
            f"{text}: {error}",
            "give arguments by name, or return (model, [optimizers]) from the function that --model names",
        ) from None


def _show_step(step: PlannedStep) -> None:
    rows = []
    in_files = [*(("read", "write") if step.planned.files.sizes else ())]
    in_files += ["read_weights"] if step.planned.files.weights else []
    for lane in ("compute", "fetch", "drain", "update", *in_files):
        num_ops, busy, ends_at = step.lane_use(lane)
        share = f"{busy / step.step_us:.0%}" if step.step_us else ""
        rows.append([lane, str(num_ops), time_text(busy), share, time_text(ends_at)])
    print()
    show("one steady step, simulated", ["lane", "ops", "busy", "share", "ends at"], rows)
    speeds = step.speeds
    if step.measured is None:
        print(
            f"at fetch {speeds.fetch:.1f}, drain {speeds.drain:.1f}, update {speeds.update:.1f} GiB/s"
            + (f" of the host's {speeds.host:.1f}" if speeds.host else "")
            + (f", of disks {speeds.disk_read:.1f} read and {speeds.disk_write:.1f} written" if in_files else "")
            + f" and {speeds.tflops:.3g} Tflop/s"
            + (f" (measured here: {', '.join(speeds.measured)})" if speeds.measured else "")
            + f", {step.tokens} tokens"
            + (f" in {step.backwards} micro-batches" if step.backwards > 1 else "")
        )
    if (flops := sum(step.planned.update_flops.values())) and speeds.host_tflops and speeds.tflops:
        on_host, on_device = (time_text(flops / each / 1e6) for each in (speeds.host_tflops, speeds.tflops))
        print(
            f"Muon multiplies matrices: {flops / 1e12:.3g} Tflop a step. The host takes {on_host} for that, at what a "
            f"core here reaches now, and the device {on_device}"
            + ("" if step.planned.streamed else " (--optimizer-device device)")
        )
    if line := endurance_text(*step.file_bytes, step.step_us, len(step.planned.policy.folders)):
        print(line)
    bounds = step.bounds()
    if not step.planned.kernels:
        print(f"step {time_text(step.step_us)}; no schedule beats {time_text(bounds.drafting_us)}")
        return
    if step.planned.streamed:
        bound_us = bounds.blocking_us if step.planned.policy.update == "blocking" else bounds.deferred_us
        print(f"step {time_text(step.step_us)}; no schedule with updates on the device beats {time_text(bound_us)}")
        return
    print(
        f"step {time_text(step.step_us)}; no schedule beats: drafts of all units, and update='backward', "
        f"{time_text(bounds.drafting_us)}; update='auto' without drafts {time_text(bounds.deferred_us)}; "
        f"'blocking' {time_text(bounds.blocking_us)}"
    )


def _machine(args: argparse.Namespace, planned: WrapPlan, device: Device | None = None) -> Machine:
    """Returns the machine that the arguments describe. Speeds that nothing says are measured here."""
    import torch

    from noria.doctor import measure_matmul_tflops, measure_speeds

    given = {"fetch": args.fetch_gib_s, "drain": args.drain_gib_s, "update": args.update_gib_s, "tflops": args.tflops}
    host, cores = args.dram_gib_s, args.cores or os.cpu_count() or 1
    core_tflops, (disk_read, disk_write) = _core_tflops(planned), _disks(args, planned)
    if device is not None:
        of_device = {"fetch": device.link_gib_s, "drain": device.link_gib_s, "tflops": device.tflops}
        given |= {name: value for name, value in of_device.items() if given[name] is None}
        host = host or device.host_gib_s
        return Machine(
            **given,
            host=host,
            cores=cores,
            both_ways=BOTH_WAYS,
            device=device.update_gib_s,
            core_tflops=core_tflops,
            disk_read=disk_read,
            disk_write=disk_write,
        )
    missing = tuple(name for name, value in given.items() if value is None and not (name == "update" and args.cores))
    if set(missing) - {"tflops"}:
        speeds = measure_speeds()
        given |= {name: getattr(speeds, name) for name in missing if name != "tflops"}
    if "tflops" in missing:
        dtypes = {slot.dtype for unit in planned.units for slot in unit.parameters}
        dtype = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float32
        given["tflops"] = measure_matmul_tflops(planned.device, dtype)
    return Machine(
        **given,
        host=host or 0.0,
        cores=cores,
        core_tflops=core_tflops,
        measured=missing,
        disk_read=disk_read,
        disk_write=disk_write,
    )


def _disks(args: argparse.Namespace, planned: WrapPlan) -> tuple[float, float]:
    """Returns GiB/s from all disks together, and to them. Each folder is taken to lie on a disk of its own."""
    num_disks = len(planned.policy.folders)
    read, write = args.disk_read_gib_s or DISK_READ_GIB_S, args.disk_write_gib_s or DISK_WRITE_GIB_S
    return num_disks * read, num_disks * write


def _core_tflops(planned: WrapPlan) -> float:
    """Returns what a core of this machine reaches in matrix products of bfloat16, if updates need it."""
    import torch

    from noria.doctor import measure_matmul_tflops

    if not planned.update_flops:
        return 0.0
    return measure_matmul_tflops(torch.device("cpu"), torch.bfloat16) / torch.get_num_threads()
