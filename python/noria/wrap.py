"""Wraps and unwraps an ordinary model and optimizer: they stay the same objects, and train from the home.

Order: `wrap` checks and plans everything before it changes anything. Then it takes the home, moves the parameters into
it unit by unit, and installs hooks and facades. It draws no random numbers and touches no global torch state.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from noria import _C
from noria._errors import usage_error
from noria._lists import as_list
from noria.dist.groups import Line
from noria.dist.ranks import Ranks, grid_of, raised_by_all, warn_of_no_group
from noria.dist.stage_group import StageGroup
from noria.host.device_buffers import ASSIST_SCRATCH, REDUCE_SCRATCH, DeviceBuffers
from noria.host.home import Home
from noria.host.limits import Free, check_fits, min_over_ranks, numa_node, probe_limits
from noria.host.machine import machine, on
from noria.model.file_layout import WEIGHTS_SLOTS
from noria.model.inner_tensors import update_wrapper_devices
from noria.model.kept_views import bytes_leaving, kept_beside, kept_of, warn_of_kept
from noria.model.layout import AVERAGES, FACTORED, GRADIENT_RING, TORCH_STATE
from noria.model.moment_formats import PURPOSE_OF
from noria.model.optimizer_classes import original_class
from noria.model.quantised import give_back_quantised, take_quantised
from noria.model.update_rules import SEPARABLE
from noria.optimizer import as_plain, check_optimizer, refuse_kept_methods, seen_through, unfacade
from noria.out_of_memory import tell_when_full
from noria.pipeline.pipelining_compat import check_stage, module_of, modules_of, stages_of
from noria.planning.activation_choice import with_first_room
from noria.planning.cost_cache import load_costs
from noria.planning.decisions import as_costs_choose
from noria.planning.late_optimizers import plan_optimizers
from noria.planning.wrap_plan import STAGING_RING, WrapPlan, fingerprint, make_plan, with_stays
from noria.policy import Policy, compute_device, make_policy, refuse_lost_trace
from noria.runtime.context import Context
from noria.runtime.hooks import compiler_config_of, refuse_cuda_graphs
from noria.runtime.state import RunState
from noria.step.moved_gradients import MovedGradients
from noria.step.param_groups import refuse_strangers, wants_more
from noria.step.parameter_swap import refuse_out_of_reach
from noria.torch_state import await_device, plainly
from noria.wrapped import Wrapped, wrapped_by, wrapped_together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining.stage import _PipelineStageBase

__all__ = ["is_wrapped", "materialize", "plan", "unwrap", "wrap"]

_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")

_MORE_TRAINING = "training of more parameters"  # as errors name the call
_MOMENTS = frozenset(PURPOSE_OF.values()) - {FACTORED}  # those that `state_dtype` shortens

_ANY = 1 << 62  # bytes: no limit

_LIVE: weakref.WeakSet[RunState] = weakref.WeakSet()


def _let_go() -> None:
    """Frees wrap calls that no caller refers to any more.

    Their parts refer to each other, so only the garbage collector frees them. It counts objects, not bytes: without
    this call it would run many homes later.
    """
    if _C.living()["bridges"]:
        gc.collect()


def _checked(models: object, optimizers: object) -> tuple[list[nn.Module], list[Optimizer]]:
    roots, given = as_list(modules_of(models)), as_list(optimizers)
    updaters: list[Any] = [seen_through(each) for each in given]
    if not roots:
        raise usage_error("a torch.nn.Module or a list of them", repr(models), "give the model first")
    for root in roots:
        if not isinstance(root, nn.Module):
            raise usage_error("a torch.nn.Module or a list of them", type(root).__qualname__, "give the model first")
        for module in root.modules():
            if wrapped_by(module) is not None:
                raise usage_error("a model that is not wrapped", "one that is", "noria.unwrap it first")
            refuse_cuda_graphs(compiler_config_of(module), type(module).__name__)
            _refuse_parallel(module)
    _check_each(given, updaters)
    _check_held(updaters, {parameter for root in roots for parameter in root.parameters()})
    return roots, updaters


def _check_each(given: list[Any], updaters: list[Optimizer]) -> None:
    """Raises UsageError if one of the optimizers cannot be wrapped. `given`: they, or wrappers of them."""
    for updater, wrapper in zip(updaters, given, strict=True):
        check_optimizer(updater)
        refuse_kept_methods(wrapper, updater)


def _check_held(updaters: list[Optimizer], known: Collection[nn.Parameter]) -> None:
    """Raises UsageError if an optimizer holds other parameters than `known`, or where noria cannot exchange them."""
    for updater in updaters:
        refuse_strangers(updater.param_groups, known)
        if type(updater) not in SEPARABLE:
            refuse_out_of_reach(updater, known)


def _refuse_parallel(module: nn.Module) -> None:
    """Raises UsageError if torch has already made the module parallel.

    The check is by name, because a class may be missing from this torch or not imported.
    """
    for cls in type(module).__mro__:
        if cls.__name__ in _PARALLEL and cls.__module__.startswith("torch."):
            raise usage_error(
                "a plain model",
                f"one with {cls.__name__} in it",
                "wrap the model itself: noria averages gradients over ranks, and gives each its part of the model",
            )


def plan(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    policy: Policy | None = None,
    /,
    *,
    mesh: DeviceMesh | None = None,
    **policy_fields: Any,
) -> WrapPlan:
    """Returns what `wrap` with the same arguments would do: units, memory to the byte, fetches per pass.

    It changes nothing. A model built under `torch.device("meta")` is enough, so a plan takes no memory. If ranks share
    the model, the plan is of this rank alone, from the limits that it finds itself. The call is not collective.

    Args:
        model: As for `wrap`. It may be on the meta device.
        optimizer: As for `wrap`.
        policy: As for `wrap`.
        mesh: As for `wrap`.
        **policy_fields: Fields of `Policy` by name.

    Returns:
        A `WrapPlan`: `print` shows it as text, and its `rows()` are (place, purpose, bytes).

    Raises:
        UsageError: if `wrap` would refuse the same arguments. But if a meta model does not fit into this machine's
            memory, the plan only gets a note.

    Example:
        >>> print(noria.plan(model, optimizer, device_memory="8GiB"))
        5 units, ...
    """
    planned = plan_without_costs(model, optimizer, policy, mesh=mesh, **policy_fields)
    return planned if grid_of(mesh) is not None else as_costs_choose(planned, load_costs(planned).costs)


def plan_without_costs(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    policy: Policy | None = None,
    /,
    *,
    mesh: DeviceMesh | None = None,
    **policy_fields: Any,
) -> WrapPlan:
    """As `plan`, but what an earlier run has measured does not count."""
    grid = grid_of(mesh)
    roots, updaters = _checked(model, optimizer)
    chosen = make_policy(policy, policy_fields)
    refuse_lost_trace(chosen)
    return make_plan(roots, updaters, chosen, is_carried_out=False, grid=grid)


def plan_elsewhere(model: nn.Module, optimizers: list[Optimizer], free_bytes: int, **policy_fields: Any) -> WrapPlan:
    """As `plan`, for a CUDA device that is not here, with `free_bytes` free. `host_memory` limits the home."""
    roots, updaters = _checked(model, optimizers or None)
    policy = make_policy(None, policy_fields)
    free = Free((free_bytes, free_bytes), None, None)
    return make_plan(roots, updaters, policy, is_carried_out=False, free=free)


def wrap(
    model: Any,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    policy: Policy | None = None,
    /,
    *,
    mesh: DeviceMesh | None = None,
    stages: DeviceMesh | None = None,
    **policy_fields: Any,
) -> Any:
    """Moves weights, gradients and optimizer state to host memory, and streams them through a window of device memory.

    Both objects are edited in place.

    Parameters built under `torch.device("meta")` get their values by a load. Until all of them have values, the model
    cannot be used. `load_pretrained` does all of it: it builds, wraps, and streams files.

    A `PipelineStage` of torch.distributed.pipelining takes the place of its module, and noria follows it until
    `unwrap`. Drafts and updates inside backward then run in its last backward of a step. Its schedule says how its
    gradients are scaled. It keeps no inputs and outputs, unless activations="keep".

    `mesh` is as in `fully_shard`: a DeviceMesh of one dimension, or of two, (replicas, shards). The ranks of `stages`
    lend each other memory. If `stages` is given without `mesh`, the model belongs to this rank alone.

    An optimizer that comes later makes the home grow by its state; nothing else moves, unless it trains parameters that
    were frozen. Parameters that are unfrozen
    later, or added as a group, are planned and moved again at the next forward or in `add_param_group`. All ranks that
    share the model do this.

    Order: noria takes the home before it moves anything, in parallel, with a progress bar if that takes long. Only the
    memory for optimizer state comes later, once the weights have moved. Ctrl-C before the move leaves everything as it
    was. Ctrl-C after the move leaves a wrapped model.

    Args:
        model: A module or a `PipelineStage`, or a list of them.
        optimizer: One optimizer, a list, or None (inference, a frozen teacher). It may also come later, once: call
            `noria.wrap(model, optimizer)` on the wrapped model, without other options.
        policy: A `Policy`. Instead, its fields may be given by name.
        mesh: The ranks that share the model. None: all ranks of the default process group, if there is one.
        stages: The ranks of all stages, if the model is one stage of a pipeline: a DeviceMesh of one dimension.
        **policy_fields: Fields of `Policy` by name, such as device_memory="8GiB".

    Returns:
        `(model, optimizer)` as given, or the model alone if there is no optimizer.

    Raises:
        UsageError: before anything is changed. Reasons are a nonsense policy, and a budget that is too small. The
            error says what would fit. Other reasons are an optimizer parameter that no wrapped model has, a model that
            already has an optimizer, or a mesh without this rank. If one of the ranks that share the model refuses, all
            of them raise. Exception: if the mesh is wrong on one rank only, the others wait for the process group's
            timeout.
        MachineError: if the machine refuses memory that noria asks for.

    Example:
        >>> model, optimizer = noria.wrap(model, optimizer, device_memory="8GiB")
        >>> model(inputs).sum().backward()
        >>> optimizer.step()
        >>> model, optimizer = noria.unwrap(model, optimizer)
        >>> model = noria.wrap(model)  # without an optimizer it returns the model alone
        >>> model, optimizer = noria.wrap(model, torch.optim.AdamW(model.parameters()))  # which may come later
    """
    if optimizer is not None and (roots := as_list(modules_of(model))) and all(map(is_wrapped, roots)):
        _take_late(roots, as_list(optimizer), policy, policy_fields, mesh is not None or stages is not None)
        return model, optimizer
    if mesh is None and stages is None:
        warn_of_no_group(stacklevel=2)
    _let_go()  # models that were dropped without `unwrap` still hold memory, which this one may need
    ranks = Ranks.meet(mesh) if mesh is not None or stages is None else None
    pipeline: StageGroup | None = None
    met: list[Ranks | StageGroup] = [] if ranks is None else [ranks]
    try:
        pipeline = StageGroup.meet(stages)
        if pipeline is not None:
            met.append(pipeline)
        with raised_by_all(met, "noria.wrap"):
            roots, updaters = _checked(model, optimizer)
            chosen = make_policy(policy, policy_fields)
            refuse_lost_trace(chosen)
            for stage in stages_of(model):
                check_stage(stage, compute_device(chosen))
            is_stage = pipeline is not None or bool(stages_of(model))
            if is_stage and chosen.resident == "auto":
                chosen = dataclasses.replace(chosen, resident="none")
            if is_stage and chosen.resident != "none":
                raise usage_error(
                    f'resident="{chosen.resident}" with a model that is no stage of a pipeline',
                    "a stage, which borrows and lends what its device has left",
                    "leave resident out",
                )
            if pipeline is not None and not updaters:
                raise usage_error(
                    "an optimizer with stages=, for stages meet in its first step()",
                    "none",
                    "give the stage one, or wrap all stages without stages=",
                )
            found = probe_limits(compute_device(chosen), bytes_leaving(roots))
        indices = [(stage.stage_index, stage.num_stages) for stage in stages_of(model)]
        told = [(found, indices)] if ranks is None else ranks.host.gather_objects((found, indices))
        gathered = [each for each, _ in told]
        with raised_by_all(met, "noria.wrap"):
            _check_line(stages_of(model), [each for _, each in told], pipeline)
            values = ranks is None or ranks.rank == 0
            grid = None if ranks is None else ranks.grid
            planned = make_plan(roots, updaters, chosen, values=values, grid=grid, free=min_over_ranks(gathered))
            lines = [] if ranks is None else fingerprint(planned, updaters)
            if planned.without_masters:
                warnings.warn(f"noria.wrap: {planned.without_masters}", stacklevel=2)
            moved = [(slot.name, slot.parameter) for unit in planned.units for slot in unit.parameters]
            warn_of_kept(kept_beside(moved), stacklevel=2)
        with raised_by_all([] if pipeline is None else [pipeline], "noria.wrap"):
            if ranks is not None:
                ranks.agree(lines)  # raises on all of them alike
        with plainly():
            wrapped = _carry_out(planned, roots, updaters, ranks, pipeline)
        wrapped.stages.follow(stages_of(model))
    except BaseException:
        for each in met:
            each.close()
        raise
    _LIVE.add(wrapped.run)
    tell_when_full(wrapped.run)
    _take_rest(wrapped, met)
    return (model, optimizer) if optimizer is not None else model


def _take_rest(wrapped: Wrapped, met: Sequence[Ranks | StageGroup]) -> None:
    """Takes the memory for optimizer state, once the weights have moved."""
    interrupt: KeyboardInterrupt | None = None
    with raised_by_all(met, "noria.wrap"):
        try:
            _C.return_freed_memory()  # of the weights where they were before
            wrapped.context.home.take_rest()
        except KeyboardInterrupt as error:  # only this rank has it: meet the others before raising
            interrupt = error
        wrapped.streamed.begin()
    if interrupt is not None:
        raise interrupt


def _take_late(
    roots: list[nn.Module], given: list[Any], policy: Policy | None, policy_fields: dict[str, Any], has_mesh: bool
) -> None:
    """Gives a wrapped model its optimizers. The home grows by their state and undo logs; all else stays as it is."""
    wrapped = wrapped_together(roots)
    context = wrapped.context
    ranks, met = context.ranks, [] if context.ranks is None else [context.ranks]
    with raised_by_all(met, "noria.wrap"):
        updaters: list[Any] = [seen_through(each) for each in given]
        _check_each(given, updaters)
        if wrapped.drivers:
            first = original_class(type(wrapped.drivers[0].optimizer)).__name__
            raise usage_error(
                "a model that is not wrapped, or one that was wrapped without an optimizer",
                f"one that was wrapped with {first}",
                "noria.unwrap it first, and give noria.wrap all of its optimizers",
            )
        if any(root not in context.partition.roots for root in roots):
            raise usage_error("a model that noria.wrap was given", "a module inside of one", "give the model itself")
        _refuse_other_policy(context.policy, policy, policy_fields, has_mesh)
        wrapped.run.refuse_when_busy("noria.wrap")
        wrapped.run.recover()
        wrapped.run.require_consistent("noria.wrap", mends=True)
        context.engine.home.raise_lost_writes()
        _check_held(updaters, context.parameters_now())
        is_more = any(wants_more(updater.param_groups, context.slot_of) for updater in updaters)
        planned = context.plan
        lines: list[Line] = ["more parameters to train"]
        found = probe_limits(context.device)
    free = min_over_ranks([found] if ranks is None else ranks.host.gather_objects(found))
    with raised_by_all(met, "noria.wrap"):
        if not is_more:
            taken = sum(region.bytes for region in context.home.regions.values())
            planned = plan_optimizers(context.plan, updaters, None if ranks is None else ranks.grid, free, taken)
            if planned.arena_bytes != context.plan.arena_bytes:
                wrapped.run.refuse_asleep("noria.wrap")  # it takes memory of the device
            lines = [] if ranks is None else fingerprint(planned, updaters)
    if ranks is not None:
        ranks.agree(lines)
    if is_more:
        _wrap_anew(wrapped, updaters)
        return
    if planned.without_masters:
        warnings.warn(f"noria.wrap: {planned.without_masters}", stacklevel=3)
    with plainly():
        wrapped.add_optimizers(planned, updaters, free)


def _wrap_anew(wrapped: Wrapped, more: Sequence[Optimizer] = ()) -> None:
    """Wraps the same models and optimizers again, and `more` optimizers: more parameters are trained than were planned.

    Values, masters, gradients and optimizer state keep their bits. A parameter that has had memory for its training
    keeps some, even if it is frozen now: adapters may take turns. Collective if ranks share the model.

    Order: the new home is planned first, and must fit beside the old one. If that raises, nothing has changed. If the
    memory turns out not to be there after all, model and optimizer may stay unwrapped. Ranks have no gradients then.
    """
    context, ranks = wrapped.context, wrapped.context.ranks
    roots, met = context.partition.roots, [] if ranks is None else [ranks]
    wrapped.sync.meet(_MORE_TRAINING)
    with raised_by_all(met, _MORE_TRAINING):
        updaters = [*(driver.optimizer for driver in wrapped.drivers), *more]
        _refuse_anew(wrapped, updaters)
        wrapped.rest.end()
        found = probe_limits(context.device)
        if found.device is not None:
            found = dataclasses.replace(found, device=(found.device[0] + context.plan.device_bytes, found.device[1]))
    gathered = [found] if ranks is None else ranks.host.gather_objects(found)
    trained = {slot.parameter for slot in context.slots if slot.trainable}
    grid = None if ranks is None else ranks.grid
    with (
        wrapped.weights.materialized(range(len(context.units)), read_only=True),
        as_plain(updaters),
        raised_by_all(met, _MORE_TRAINING),
    ):
        free = min_over_ranks(gathered)
        planned = make_plan(roots, updaters, context.policy, grid=grid, free=free, trained=trained)
        _refuse_too_much(wrapped, planned, free)
        lines = [] if ranks is None else fingerprint(planned, updaters)
    with raised_by_all(met, _MORE_TRAINING):
        warn_of_kept(kept_of(wrapped.weights.views()), stacklevel=3)
        parts = MovedGradients(context, {slot.parameter for unit in planned.units for slot in unit.parameters})
    if ranks is not None:
        ranks.agree([*lines, *parts.lines()])
    slot_of, masters = context.slot_of, wrapped.weights.masters
    again = None if ranks is None else Ranks(ranks.grid)  # unwrapping closes the groups of before

    def value_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        slot = slot_of.get(parameter)
        if slot is None or not slot.has_master:
            return value
        master = masters.whole(slot)
        return master if again is None else again.whole(slot, master)

    try:
        with masters.kept_in_memory(context.slots):
            _unwrap(roots, wrapped, takes_in_weights=False)  # the next home takes them from the files
            gradients = [(slot, slot.parameter.grad) for unit in planned.units for slot in unit.parameters]
            with plainly(), on(wrapped.machine):
                made = _carry_out(planned, roots, updaters, again, None, value_of)
    except BaseException:
        if again is not None:
            again.close()
        raise
    _LIVE.add(made.run)
    tell_when_full(made.run)
    for slot, gradient in gradients:
        if gradient is not None:
            slot.parameter.grad = gradient.to(context.device)
            if slot.trainable and made.context.shows_gradients:
                made.context.engine.gradients.take_foreign_gradient(slot.index)
    parts.give(made.context)
    del parts  # of the old home
    wrapped.accumulation.pass_on(made.accumulation)
    _take_rest(made, [] if again is None else [again])


def _refuse_too_much(wrapped: Wrapped, planned: WrapPlan, free: Free) -> None:
    """Raises UsageError if the new home and what is whole while it is filled do not fit beside the old home."""
    context = wrapped.context
    shards = 1 if context.ranks is None else context.ranks.num_shards
    is_shared, regions = context.ranks is not None, context.home.regions
    widening = {"fp32": 1, "bf16": 2, "8bit": 4}[context.policy.state_dtype]
    moments = sum(region.bytes for purpose, region in regions.items() if purpose in _MOMENTS)
    others = sum(regions[purpose].bytes for purpose in (TORCH_STATE, "low bits") if purpose in regions)
    kept = [
        ("the new home", planned.home_bytes),
        ("gradients of open blocks", wrapped.accumulation.open_bytes(planned.units)),
    ]
    whole = [
        ("whole weights", sum(unit.weights for unit in context.units) if is_shared else 0),
        ("moments in fp32", moments * widening * shards if is_shared or widening > 1 else 0),
        ("state that lay in files", context.plan.files.state_bytes * widening * shards),
        ("other whole state", others * shards if is_shared else 0),
    ]
    budget = context.plan.budgets.host
    # What is whole for a while is no part of `host_memory`, and all processes of a machine hold it at once.
    total = None if budget is None else sum(size for _, size in [*kept, *whole])
    shared = dataclasses.replace(free, host=free.share)
    if refusal := check_fits(kept, budget, free) or check_fits([*kept, *whole], total, shared):
        raise refusal


def _refuse_anew(wrapped: Wrapped, updaters: list[Optimizer]) -> None:
    """Raises UsageError if more parameters cannot be trained now, by these optimizers."""
    context, run = wrapped.context, wrapped.run
    if context.ranks is None and any(context.lies_apart(unit.index) for unit in context.units):
        raise usage_error(
            "all weights in host memory, to train more parameters than before",
            "frozen weights in files, where the device cannot read",
            "noria.unwrap, unfreeze, and wrap again",
        )
    for module in (module for root in context.partition.roots for module in root.modules()):
        _refuse_parallel(module)
    known = context.parameters_now()
    for parameter in (each for updater in updaters for group in updater.param_groups for each in group["params"]):
        if parameter not in known and parameter in context.slot_of:
            raise usage_error(
                "optimizers whose parameters are in the model, to train more of them",
                f'"{context.slot_of[parameter].name}" in their groups, which has left the model',
                "take it out of optimizer.param_groups, or put it back into the model",
            )
    _check_held(updaters, known)
    if wrapped.stages.stages:
        raise usage_error(
            "the parameters that were trainable at noria.wrap, in stages of a pipeline",
            "others that were unfrozen or added since",
            "noria.unwrap(model, optimizer), and noria.wrap both again",
        )
    if any(purpose.startswith(AVERAGES) for purpose in context.home.arenas):
        raise usage_error(
            "the parameters that were trainable when noria.ema was made, while its averages are there",
            "others that were unfrozen or added since",
            "keep ema.state_dict(), delete the averages, run a forward that trains, and load the state into new ones",
        )
    run.refuse_when_busy(_MORE_TRAINING)
    run.refuse_asleep(_MORE_TRAINING)
    run.recover()
    run.require_consistent(_MORE_TRAINING)
    engine = context.engine
    engine.home.raise_lost_writes()
    if any(engine.gradients.is_unreduced(slot.index) for slot in context.slots):
        raise usage_error(
            "more parameters to train after step(), or before the first backward of one",
            "gradients of no_sync() that are not reduced over the ranks",
            "freeze these parameters again until step()",
        )
    if any(driver.steps_whole for driver in wrapped.drivers):
        raise usage_error(
            "more parameters to train between steps",
            "some that were unfrozen before a step() that runs torch's own code, with a closure",
            "run a forward that trains before that step()",
        )
    if any(engine.backward.is_held_back(slot.index) for slot in context.slots):
        raise usage_error(
            'more parameters to train after step() under update="backward"', "gradients that wait for it", "step first"
        )


def _refuse_other_policy(own: Policy, policy: Policy | None, policy_fields: dict[str, Any], has_mesh: bool) -> None:
    """Raises UsageError if a call that only brings the optimizer asks for another policy than the model has."""
    asked = make_policy(policy, policy_fields)
    names = list(policy_fields) if policy is None else [field.name for field in dataclasses.fields(Policy)]
    other = next((name for name in names if getattr(asked, name) != getattr(own, name)), "mesh" if has_mesh else "")
    if other == "device" and compute_device(asked) == compute_device(own):
        other = ""
    if other:
        raise usage_error(
            "the options of a wrapped model left out, when its optimizer comes",
            f"another {other}= than it was wrapped with" if other != "mesh" else "mesh= or stages=",
            "give all options to the first call, noria.wrap(model, ...)",
        )


def is_wrapped(model: object) -> bool:
    """Returns True if `noria.wrap` has wrapped this model, and `noria.unwrap` has not unwrapped it since.

    Args:
        model: A module, also one inside a wrapped model, or a `PipelineStage`. Anything else is not wrapped.

    Example:
        >>> noria.is_wrapped(model)
        False
        >>> noria.is_wrapped(noria.wrap(model))
        True
    """
    return wrapped_by(model) is not None


def _check_line(
    own: list[_PipelineStageBase], gathered: list[list[tuple[int, int]]], pipeline: StageGroup | None
) -> None:
    """Raises UsageError if the stages differ between ranks, or do not match the stage group.

    `gathered`: for each rank that shares the model, the (index, number of stages) of each of its stages.
    """
    if any(each != gathered[0] for each in gathered):
        raise usage_error(
            "the same stages of the pipeline on all ranks that share the model",
            f"stages {[[number for number, _ in each] for each in gathered]} on them",
            'give mesh=grid["replicas"], the ranks that share this stage, or stages=, the ranks of all stages; without '
            "either all ranks share it",
        )
    for stage in own:
        if pipeline is not None and stage.group_size != pipeline.size:
            raise usage_error(
                f"stages= of the {stage.group_size} ranks that the stage's own group has",
                f"{pipeline.size} ranks",
                "give both the same dimension of the mesh",
            )


def _carry_out(
    planned: WrapPlan,
    roots: list[nn.Module],
    updaters: list[Optimizer],
    ranks: Ranks | None,
    stages: StageGroup | None,
    value_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> Wrapped:
    """Takes the memory, moves values into the home one by one, and installs hooks and facades.

    `value_of` returns the value that a parameter's home gets, from the parameter and what it shows. None: what it
    shows, on rank 0 if ranks share the model.
    """
    policy, device, units = planned.policy, planned.device, planned.units
    known = load_costs(planned)
    if stages is not None:  # which blocks compute again depends on what other stages lend
        planned = dataclasses.replace(planned, chooses_activations=False)
    if ranks is None:  # they may have kept other costs: they choose when they have met
        planned = as_costs_choose(planned, known.costs)
    pool = None
    capacity = planned.device_bytes
    may_stay = policy.resident != "none" and bool(planned.may_stay)
    may_resize = planned.chooses_activations and device.type == "cuda"
    if may_stay or may_resize or (policy.optimizer_device == "device" and not updaters):
        capacity = max(capacity, planned.budgets.device or _ANY)
    if stages is not None:
        capacity += planned.saved_room or 0  # its unused part may be lent
    met = [each for each in (ranks, stages) if each is not None]
    with raised_by_all(met, "noria.wrap"):
        backend = machine().backend(device, capacity)
        needs_kernels = (planned.stays | planned.streamed.keys()) & planned.fused.keys()
        if needs_kernels and device.type != "cpu" and (why := backend.kernels_absent()):
            if policy.resident not in ("none", "auto"):
                raise usage_error("resident on a device that runs noria's kernels", why, "leave resident out")
            if policy.optimizer_device == "device":
                raise usage_error("optimizer_device on a device that runs noria's kernels", why, 'say kernel="torch"')
            planned = with_stays(dataclasses.replace(with_first_room(planned), streamed={}), frozenset())
        awaits_optimizer = not updaters and any(unit.gradients for unit in units)
        if planned.fused or awaits_optimizer:
            pool = machine().pool(is_beside_device=device.type == "cuda", numa_node=numa_node(backend.pci_bus_id))
        home = Home(units, planned.regions, backend, planned.files)
        if policy.reads == "home" and "working copies" in home.staged:
            raise usage_error(
                'reads="home" with weights in pinned memory, which the device can read',
                "memory that the driver refused to pin",
                'allow this process to pin more memory (ulimit -l unlimited), or wrap with reads="passes"',
            )
        device_buffers = DeviceBuffers(backend, planned.beside_the_arena())

    # Values move first: a parameter's old memory is free as soon as it has moved.
    values = [(slot, slot.parameter.data) for unit in units for slot in unit.parameters]
    for slot, value in values:
        if value.is_meta:
            _leave_meta(slot.parameter)
    buffers = [each for root in roots for each in _buffers_of(root)]
    missing = [value.is_meta for _, value in values] + [buffer.is_meta for _, _, _, buffer in buffers]
    if ranks is not None:
        missing, known = ranks.word_of_first((missing, known))
    engine = _C.TorchBridge(
        units=[unit.spec() for unit in units],
        backend=backend,
        optimizer=pool,
        device=str(device),
        arena=planned.arena_bytes,
        window=planned.window,
        prefetch_at_step=True,
        held_home=home.arenas.get("held gradients"),
        ring=_ring_slots(planned, home),
        most_postponed=planned.ring.most_postponed if planned.ring else 0,
        collectives=None if ranks is None else ranks.collectives(device),
        assists=policy.find_unused_parameters,
        reduce_scratch=device_buffers.address(REDUCE_SCRATCH),
        assist_scratch=device_buffers.address(ASSIST_SCRATCH),
        least_saved=planned.least_saved,
        saved_room=_most_saved_room(planned),
        files=home.files,
        records=[home.record(unit.index) for unit in units],
        file_weights=_weights_in_files(planned, home),
    )
    trace = None if policy.trace is None else _C.Trace(1 << 18)
    context = Context(planned, home, engine, backend, device_buffers, pool, ranks, trace)
    if home.staged:
        context.ledger.expect("host", STAGING_RING, _C.STAGING_BYTES)
    try:
        wrapped = Wrapped(context, stages, known, _wrap_anew)
    except BaseException:
        for slot, value in values:
            slot.parameter.data = value
        raise
    while values:
        slot, value = values.pop(0)
        if missing.pop(0):
            wrapped.loads.missing[slot.index] = slot.name
        else:
            if value_of is not None:
                value = value_of(slot.parameter, value)
            elif ranks is not None:
                value = ranks.from_first(value)
            wrapped.weights.write(slot, value)
        del value
    for root in roots:
        _move_buffers(root, device, policy.dtype, ranks if value_of is None else None)
    take_quantised(roots, device)
    update_wrapper_devices(roots)
    wrapped.loads.missing |= {
        (module, name): full for is_missing, (module, name, full, _) in zip(missing, buffers, strict=True) if is_missing
    }
    for updater, kernel, places in zip(updaters, planned.kernels, planned.states, strict=True):
        wrapped.take_optimizer(updater, kernel, places)
    wrapped.reads.begin()
    return wrapped


def _most_saved_room(planned: WrapPlan) -> int | None:
    """Returns the room for activations that the plan has, or has at first: a larger block is refused."""
    rooms = [each.saved_room for each in (planned, with_first_room(planned))]
    return max((room for room in rooms if room is not None), default=None)


def _ring_slots(planned: WrapPlan, home: Home) -> tuple[int, int, int] | None:
    """Returns (address, bytes of one, number) of the gradient ring's slots, or None if there is no ring."""
    if planned.ring is None:
        return None
    return (home.address(GRADIENT_RING, len(home.units)), planned.ring.slot_bytes, planned.ring.num_slots)


def _weights_in_files(planned: WrapPlan, home: Home) -> tuple[_C.FileStore, list[int], tuple[int, int, int]] | None:
    """Returns the files of frozen weights, records by unit, and the slots as `_ring_slots` does; None without any."""
    if home.weight_files is None:
        return None
    slots = home.address(WEIGHTS_SLOTS, 0), planned.files.weights_slot_bytes, planned.files.num_weights_slots
    return home.weight_files, [home.weights_record(unit.index) for unit in home.units], slots


def _leave_meta(parameter: torch.Tensor) -> None:
    """Puts a meta parameter on the CPU, still without memory. It stays the same object."""
    data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
    data.untyped_storage().resize_(0)
    other: torch.Tensor = nn.Parameter(data, requires_grad=parameter.requires_grad)
    other.__class__ = type(parameter)
    other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)


def _buffers_of(root: nn.Module) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """Yields (module, name in the module, name in the model, buffer)."""
    for path, module in root.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, f"{path}.{name}" if path else name, buffer


def _move_buffers(root: nn.Module, device: torch.device, dtype: torch.dtype | None, ranks: Ranks | None = None) -> None:
    """Moves buffers to the device, where they stay: noria does not stream them.

    Their dtype is the one that `model.bfloat16()` would give them. If ranks share the model, all ranks get rank 0's
    values. Buffers without values get uninitialized memory.
    """
    for module, name, _, buffer in list(_buffers_of(root)):
        wanted = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
        if buffer.is_meta:
            buffer = torch.empty(buffer.shape, dtype=wanted, device=device)
        if ranks is not None:
            buffer = ranks.from_first(buffer.contiguous())
        if buffer is not module._buffers[name] or buffer.device != device or buffer.dtype != wanted:
            module._buffers[name] = buffer.to(device=device, dtype=wanted)


def unwrap(model: Any, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> Any:
    """Gives back plain CPU tensors and the optimizer's own class.

    Parameters, gradients and optimizer state keep their values. They are views of the home's memory, which lives as
    long as any of them. If ranks share the model, all of them call this; each gets all values, and no gradients.

    A bfloat16 policy leaves bfloat16 parameters; the low bits of the masters stay in the optimizer's state. Moments
    stay fp32 beside them, so a model that is wrapped again continues exactly. torch's Adam and AdamW cannot step
    bfloat16 parameters with fp32 moments. To train on without noria, let torch cast the moments first:
    `optimizer.load_state_dict(optimizer.state_dict())`.

    Args:
        model: What `wrap` was given: a module, a stage, or a list of them.
        optimizer: What `wrap` was given. It is only returned.

    Returns:
        `(model, optimizer)` as given, or the model alone if there is no optimizer.

    Raises:
        UsageError: if the model is not wrapped, or a model of the same wrap call is missing. Also inside a pass, and
            while weights and optimizer state are of different steps. Once if weights were written on the device. Also
            if something lies in files, and host memory has no room for it. Nothing is changed then.

    Example:
        >>> model, optimizer = noria.wrap(model, optimizer)
        >>> model, optimizer = noria.unwrap(model, optimizer)
        >>> next(model.parameters()).device
        device(type='cpu')
    """
    _unwrap(as_list(modules_of(model)), wrapped_together(model))
    _let_go()
    return (model, optimizer) if optimizer is not None else model


def _unwrap(roots: list[nn.Module], wrapped: Wrapped, *, takes_in_weights: bool = True) -> None:
    missing = [root for root in wrapped.context.partition.roots if all(root is not given for given in roots)]
    if missing:
        raise usage_error(
            "all models of the wrap call", f"{len(missing)} of them missing", "unwrap all that wrap was given"
        )
    context, engine = wrapped.context, wrapped.context.engine
    wrapped.run.refuse_when_busy("noria.unwrap")
    wrapped.run.refuse_while_averaged("noria.unwrap")
    wrapped.run.refuse_asleep("noria.unwrap")
    wrapped.rest.end(wakes=False)
    wrapped.reads.end()
    wrapped.run.recover()
    wrapped.run.require_consistent("noria.unwrap")
    engine.home.raise_lost_writes()
    wrapped.sync.meet("unwrap")
    engine.updates.run_all_deferred()
    context.settle_units()
    engine.idle()
    _refuse_copies(wrapped, takes_in_weights)
    held_back = {slot.index for slot in context.slots if engine.backward.is_held_back(slot.index)}
    if context.ranks is not None:
        held_back.clear()  # each rank has only a part of them
    shown = engine.gradients
    for slot in context.slots:
        if context.shows_gradients or slot.index in held_back:
            shown.apply_scales(slot.index)
    await_device(context.device)  # the device may still write gradients, which the host reads from now on
    gradients = [(slot, slot.parameter.grad, shown.gradient_is(slot.index)) for slot in context.slots]
    values = {slot.index: wrapped.sync.values(slot) for slot in context.slots}
    states = [driver.plain() for driver in wrapped.drivers]
    if takes_in_weights and context.ranks is None:  # with ranks `values` are copies
        context.home.take_in_weights()
    for driver, state in zip(wrapped.drivers, states, strict=True):
        unfacade(driver.optimizer, state)
    wrapped.remove_hooks()
    with plainly():
        for slot, gradient, kind in gradients:
            slot.parameter.grad = None
            engine.home.release(slot.index, values[slot.index])
            if gradient is not None and (kind != "held" or context.shows_gradients or slot.index in held_back):
                slot.parameter.grad = context.home.held(slot) if kind == "held" else gradient.to("cpu")
        for root in roots:
            _move_buffers(root, torch.device("cpu"), None)
        give_back_quantised(roots)
        update_wrapper_devices(roots)
    wrapped.run.shutdown()
    context.home.let_go()
    _LIVE.discard(wrapped.run)


def _refuse_copies(wrapped: Wrapped, takes_in_weights: bool) -> None:
    """Raises UsageError if something lies in files, and memory has no room for what `unwrap` takes."""
    context, sync = wrapped.context, wrapped.sync
    weights = sum(sync.whole_bytes(slot, slot.dtype.itemsize) for slot in context.slots)
    if takes_in_weights and context.ranks is None:
        weights = context.plan.files.weights_bytes
    try:
        sync.refuse_copies(weights + sum(driver.plain_bytes() for driver in wrapped.drivers), "unwrap")
    except BaseException:
        wrapped.reads.begin()
        raise


@contextlib.contextmanager
def materialize(module: nn.Module, read_only: bool = False) -> Iterator[nn.Module]:
    """Gives the parameters of `module` their real values inside the `with` block, to read or edit.

    The parameters then view the home itself, so nothing is copied to the device. Edits are kept, also in fp32 masters:
    an element that changed becomes the new value.

    If ranks share the model, no home has whole weights. All ranks then enter and leave the block with the same module.
    Each takes host memory for all of its weights until the block ends, which the ledger shows as "materialized
    weights". noria checks this amount against `host_memory` first. At the end each rank keeps its part of the edits.

    Args:
        module: A wrapped model, or a module inside one.
        read_only: True promises that there will be no edits, so copies on the device stay valid. A write then raises
            at the end of the block.

    Yields:
        `module`.

    Raises:
        UsageError: inside a pass, or if the module is not wrapped. Also on all ranks if ranks made different edits;
            the edits are then dropped.

    Example:
        >>> model, optimizer = noria.wrap(model, optimizer)
        >>> with noria.materialize(model), torch.no_grad():
        ...     first = next(model.parameters()).zero_()
    """
    wrapped = wrapped_together(module)
    units = {unit for each in as_list(module) for unit in wrapped.context.unit_indices(module_of(each))}
    with wrapped.weights.materialized(sorted(units), read_only):
        yield module


@atexit.register
def _shutdown() -> None:
    for run in list(_LIVE):
        run.shutdown()
