"""`wrap` and its inverse: an ordinary model and optimizer go in, the same two objects come out, trained from the home.

Everything is checked and planned before anything is changed; then the home is taken, unit by unit the parameters move
into it, and hooks and facades are put in place. No random numbers are drawn and no global torch state is touched.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from noria import _C
from noria._errors import usage_error
from noria._lists import as_list
from noria.beside import ASSIST_SCRATCH, REDUCE_SCRATCH, Beside
from noria.custody import Wrapped, activations, wrapped_by, wrapped_together
from noria.custody.hooks import compiler_config_of, refuse_cuda_graphs
from noria.home import GRADIENT_RING, Home
from noria.kernels import SEPARABLE
from noria.lending import Stages
from noria.limits import find, least, numa_node
from noria.modes import await_device, plainly
from noria.optimizer import check_optimizer, facade, unfacade
from noria.out_of_memory import tell_when_full
from noria.plan import WrapPlan, fingerprint, make_plan
from noria.policy import Policy, compute_device, make_policy, refuse_lost_trace
from noria.ranks import Ranks, grid_of, raised_by_all
from noria.stages import check_stage, module_of, modules_of, stages_of
from noria.stand_ins import refuse_out_of_reach
from noria.testing._machine import machine
from noria.updates import Updates
from noria.updates.gradient_parts import GradientParts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["materialize", "plan", "unwrap", "wrap"]

Models = TypeVar("Models", bound="nn.Module | Sequence[nn.Module]")
Optimizers = TypeVar("Optimizers", bound="Optimizer | Sequence[Optimizer]")

_PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")

_LIVE: weakref.WeakSet[Wrapped] = weakref.WeakSet()


def _let_go() -> None:
    """Frees wrap calls that nobody has any more. Their parts refer to each other, and Python's collector counts objects
    and not bytes: by itself it comes many homes later."""
    if _C.living()["custodies"]:
        gc.collect()


def _checked(models: Any, optimizers: Any) -> tuple[list[nn.Module], list[Optimizer]]:
    roots, updaters = as_list(modules_of(models)), as_list(optimizers)
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
    for updater in updaters:
        check_optimizer(updater)
    known = {parameter for root in roots for parameter in root.parameters()}
    for updater in updaters:
        for number, group in enumerate(updater.param_groups):
            for parameter in group["params"]:
                if parameter not in known:
                    raise usage_error(
                        "an optimizer whose parameters belong to the wrapped models",
                        f"one of shape {tuple(parameter.shape)} in group {number} that no wrapped model has",
                        "wrap all models that the optimizer updates: noria.wrap([a, b], optimizer)",
                    )
        if type(updater) not in SEPARABLE:
            refuse_out_of_reach(updater, known)
    return roots, updaters


def _refuse_parallel(module: nn.Module) -> None:
    """By name: the classes of what this torch has not, or nobody has imported, need not be there."""
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
    """What `wrap` with the same arguments would do: units, memory to the byte, fetches per pass. Nothing is changed.

    A model made under `torch.device("meta")` is enough, so a plan takes no memory. Raises UsageError where `wrap`
    would, but for that. Where ranks share the model, of what this one would take, by what it finds itself; not
    collective.
    """
    grid = grid_of(mesh)
    roots, updaters = _checked(model, optimizer)
    chosen = make_policy(policy, policy_fields)
    refuse_lost_trace(chosen)
    return make_plan(roots, updaters, chosen, is_carried_out=False, grid=grid)


def wrap(
    model: Any,
    optimizer: Any = None,
    policy: Policy | None = None,
    /,
    *,
    mesh: DeviceMesh | None = None,
    stages: DeviceMesh | None = None,
    **policy_fields: Any,
) -> Any:
    """Moves the model's weights, gradients and optimizer state to host memory, and streams them through a window of
    device memory from now on. Edits both objects in place and returns what it was given.

    `model`: a module or a `PipelineStage`, or a list of them; `optimizer`: one, a list, or None (inference, a frozen
    teacher); `policy`: a `Policy`, or its fields by name: `wrap(model, optimizer, device_memory="8GiB")`. `mesh`: which
    ranks share the model, as `fully_shard` takes it: a DeviceMesh of one dimension, or of two, (replicas, shards);
    without it all ranks of the default process group do, where there is one. `stages`: where the model is one stage of
    a pipeline, the DeviceMesh of one dimension of all of its stages' ranks, which lend each other memory; then without
    `mesh` the model is this rank's alone. A `PipelineStage` of torch.distributed.pipelining is given in the place of
    its module, and followed until `unwrap`: updates inside backward and drafts are made in its last backward of a step,
    its gradients are scaled as its schedule says, and but for activations="keep" it keeps no inputs and outputs.
    Returns `(model, optimizer)` as given, or the model alone without an optimizer. Raises UsageError before anything is
    changed: nonsense policy, a budget that is too small (with what would fit), an optimizer with parameters that no
    wrapped model has, a model that is wrapped already, a mesh without this rank; and what one of the ranks that share
    refuses, all of them do (but for a mesh that is wrong on one of them: there the others wait for the process group's
    timeout). The home is taken before anything moves, but for the optimizer's state, in parallel and with a progress
    bar where that takes long; Ctrl-C until then leaves all as it was, and after that, while the rest is taken, what it
    interrupts is a model that is wrapped. What of a model was built under `torch.device("meta")` gets its values by a
    load, and until all have come the model cannot be used.
    """
    _let_go()  # of models that were dropped without `unwrap`: what they take is not there for this one
    ranks = Ranks.meet(mesh) if mesh is not None or stages is None else None
    pipeline: Stages | None = None
    met: list[Any] = [] if ranks is None else [ranks]
    try:
        pipeline = Stages.meet(stages)
        if pipeline is not None:
            met.append(pipeline)
        with raised_by_all(met, "noria.wrap"):
            roots, updaters = _checked(model, optimizer)
            chosen = make_policy(policy, policy_fields)
            refuse_lost_trace(chosen)
            for stage in stages_of(model):
                check_stage(stage, compute_device(chosen))
            if pipeline is not None and not updaters:
                raise usage_error(
                    "an optimizer with stages=, for stages meet in its first step()",
                    "none",
                    "give the stage one, or wrap all stages without stages=",
                )
            found = find(compute_device(chosen))
        indices = [(stage.stage_index, stage.num_stages) for stage in stages_of(model)]
        told = [(found, indices)] if ranks is None else ranks.host.gather_objects((found, indices))
        everybodys = [each for each, _ in told]
        with raised_by_all(met, "noria.wrap"):
            _check_line(stages_of(model), [each for _, each in told], pipeline)
            values = ranks is None or ranks.rank == 0
            grid = None if ranks is None else ranks.grid
            planned = make_plan(roots, updaters, chosen, values=values, grid=grid, free=least(everybodys))
            lines = [] if ranks is None else fingerprint(planned, updaters)
        with raised_by_all([] if pipeline is None else [pipeline], "noria.wrap"):
            if ranks is not None:
                ranks.agree(lines)  # raises on all of them alike
        with plainly():
            wrapped = _carry_out(planned, roots, updaters, ranks, pipeline)
        wrapped.following.follow(stages_of(model))
    except BaseException:
        for each in met:
            each.close()
        raise
    _LIVE.add(wrapped)
    tell_when_full(wrapped)
    interrupt: KeyboardInterrupt | None = None
    with raised_by_all(met, "noria.wrap"):
        try:
            wrapped.home.take_rest()
        except KeyboardInterrupt as error:  # of this rank alone: the others are met first
            interrupt = error
    if interrupt is not None:
        raise interrupt
    return (model, optimizer) if optimizer is not None else model


def _check_line(own: list[Any], everybodys: list[list[tuple[int, int]]], pipeline: Stages | None) -> None:
    """`everybodys`: by rank that shares the model, number and count of each of its stages."""
    if any(each != everybodys[0] for each in everybodys):
        raise usage_error(
            "the same stages of the pipeline on all ranks that share the model",
            f"stages {[[number for number, _ in each] for each in everybodys]} on them",
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
    planned: WrapPlan, roots: list[nn.Module], updaters: list[Optimizer], ranks: Ranks | None, stages: Stages | None
) -> Wrapped:
    policy, device, units = planned.policy, planned.device, planned.units
    settings = machine()
    pool = None
    capacity = planned.device_bytes
    if stages is not None:
        capacity += planned.saved_room or 0  # what of it is spare may be lent
    met: list[Any] = [each for each in (ranks, stages) if each is not None]
    with raised_by_all(met, "noria.wrap"):
        if device.type == "cuda":
            backend = _C.make_cuda_backend(device.index, capacity, settings.hostility)
        else:
            backend = _C.make_host_backend(capacity, settings.backend_limits(), settings.hostility)
        if planned.fused:
            node = numa_node(backend.pci_bus_id)
            pool = _C.HostOptimizer(
                settings.update_threads,
                is_beside_device=device.type == "cuda",
                numa_node=-1 if node is None else node,
                **settings.pool_settings(),
            )
        home = Home(units, planned.regions, backend)
        beside = Beside(backend, planned.beside_the_arena())
    planned.staging_bytes = _C.STAGING_BYTES if home.staged else 0

    # Values first: a parameter's old memory is free as soon as it has moved.
    values = [(slot, slot.parameter.data) for unit in units for slot in unit.parameters]
    for slot, value in values:
        if value.is_meta:
            _leave_meta(slot.parameter)
    buffers = [each for root in roots for each in _buffers_of(root)]
    missing = [value.is_meta for _, value in values] + [buffer.is_meta for _, _, _, buffer in buffers]
    if ranks is not None:
        missing = ranks.word_of_first(missing)
    custody = _C.Custody(
        units=units,
        backend=backend,
        optimizer=pool,
        device=str(device),
        arena=planned.arena_bytes,
        window=planned.window,
        prefetch_at_step=True,
        held_home=home.arenas.get("held gradients"),
        ring=_slots(planned, home),
        collectives=None if ranks is None else ranks.collectives(device),
        reduce_scratch=beside.address(REDUCE_SCRATCH),
        assist_scratch=beside.address(ASSIST_SCRATCH),
        least_saved=activations.LEAST_SAVED if activations.leave(planned) else None,
        saved_room=planned.saved_room,
    )
    wrapped = Wrapped(planned, home, custody, backend, beside, pool, ranks, stages)
    while values:
        slot, value = values.pop(0)
        if missing.pop(0):
            wrapped.loaded.missing[slot.index] = slot.name
        else:
            wrapped.values.write(slot, value if ranks is None else ranks.from_first(value))
        del value
    for root in roots:
        _move_buffers(root, device, policy.dtype, ranks)
    wrapped.loaded.missing |= {
        (module, name): full for is_missing, (module, name, full, _) in zip(missing, buffers, strict=True) if is_missing
    }
    for updater, kernel, predicted in zip(updaters, planned.kernels, planned.states, strict=True):
        arena = home.arenas.get("optimizer state")
        updates = Updates(wrapped, updater, kernel, predicted, arena)
        wrapped.optimizers.append(updates)
        facade(updater, updates)
    custody.set_update_callback(wrapped.weakly(Wrapped.run_update))
    if ranks is not None:
        parts = GradientParts(wrapped)
        custody.set_parts_callbacks(parts.norms, parts.multiply)
    if policy.update == "backward":
        custody.set_backward_callback(wrapped.weakly(_begin_backward))
    if policy.trace is not None:
        wrapped.trace = _C.Trace(1 << 18)
        custody.set_trace(wrapped.trace)
    return wrapped


def _slots(planned: WrapPlan, home: Home) -> tuple[int, int, int] | None:
    if planned.ring is None:
        return None
    return (home.address(GRADIENT_RING, len(home.units)), planned.ring.slot_bytes, planned.ring.num_slots)


def _begin_backward(wrapped: Wrapped) -> None:
    told = {index for updates in wrapped.optimizers for index in updates.expect_in_backward()}
    for slot in wrapped.slots:
        if slot.trainable and slot.parameter.requires_grad and slot.index not in told:
            raise usage_error(
                'every trainable parameter in an optimizer under update="backward"',
                f'"{slot.name}", which none holds any more',
                'freeze it, or wrap with update="auto"',
            )


def _leave_meta(parameter: nn.Parameter) -> None:
    """The same object, on the CPU, still without memory."""
    data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
    data.untyped_storage().resize_(0)
    other = nn.Parameter(data, requires_grad=parameter.requires_grad)
    other.__class__ = type(parameter)
    other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)


def _buffers_of(root: nn.Module) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """Module, name in it, name in the model, buffer."""
    for path, module in root.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, f"{path}.{name}" if path else name, buffer


def _move_buffers(root: nn.Module, device: torch.device, dtype: torch.dtype | None, ranks: Ranks | None = None) -> None:
    """Buffers are not streamed: they live on the device, in the dtype that `model.bfloat16()` would give them; where
    ranks share the model, with rank 0's values. Those without values get some memory."""
    for module, name, _, buffer in list(_buffers_of(root)):
        wanted = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
        if buffer.is_meta:
            buffer = torch.empty(buffer.shape, dtype=wanted, device=device)
        if ranks is not None:
            buffer = ranks.from_first(buffer.contiguous())
        if buffer is not module._buffers[name] or buffer.device != device or buffer.dtype != wanted:
            module._buffers[name] = buffer.to(device=device, dtype=wanted)


def unwrap(model: Any, optimizer: Any = None) -> Any:
    """Gives back plain CPU tensors and the optimizer's own class; returns what it was given.

    Parameters, gradients and optimizer state keep their values (views of the home's memory, which lives as long as any
    of them); a bfloat16 policy leaves bfloat16 parameters, the low bits of the masters stay in the optimizer's state.
    Where ranks share the model, all of them call this; each gets all values, and no gradients.
    Moments stay fp32 beside them, so that a model which is wrapped again goes on exactly. No form of torch's Adam and
    AdamW steps with fp32 moments of bfloat16 parameters: to train on without noria, let torch cast them first,
    `optimizer.load_state_dict(optimizer.state_dict())`.
    """
    _unwrap(as_list(modules_of(model)), wrapped_together(model))
    _let_go()
    return (model, optimizer) if optimizer is not None else model


def _unwrap(roots: list[nn.Module], wrapped: Wrapped) -> None:
    missing = [root for root in wrapped.partition.roots if all(root is not given for given in roots)]
    if missing:
        raise usage_error(
            "all models of the wrap call", f"{len(missing)} of them missing", "unwrap all that wrap was given"
        )
    wrapped.refuse_when_busy("noria.unwrap")
    wrapped.recover()
    wrapped.refuse_between_steps("noria.unwrap")
    wrapped.together.meet("unwrap")
    wrapped.custody.settle_all()
    wrapped.custody.idle()
    held_back = {slot.index for slot in wrapped.slots if wrapped.custody.is_held_back(slot.index)}
    if wrapped.ranks is not None:
        held_back.clear()  # each rank has a part
    for slot in wrapped.slots:
        if wrapped.shows_gradients or slot.index in held_back:
            wrapped.custody.apply_scales(slot.index)
    await_device(wrapped.device)  # it may still write gradients, which become the host's to read
    gradients = [(slot, slot.parameter.grad, wrapped.custody.gradient_is(slot.index)) for slot in wrapped.slots]
    values = {slot.index: wrapped.together.values(slot) for slot in wrapped.slots}
    states = [updates.plain() for updates in wrapped.optimizers]
    for updates, state in zip(wrapped.optimizers, states, strict=True):
        unfacade(updates.optimizer, state)
    wrapped.remove_hooks()
    with plainly():
        for slot, gradient, kind in gradients:
            slot.parameter.grad = None
            wrapped.custody.release(slot.index, values[slot.index])
            if gradient is not None and (kind != "held" or wrapped.shows_gradients or slot.index in held_back):
                slot.parameter.grad = wrapped.home.held(slot) if kind == "held" else gradient.to("cpu")
        for root in roots:
            _move_buffers(root, torch.device("cpu"), None)
    wrapped.shutdown()
    wrapped.home.let_go()
    _LIVE.discard(wrapped)


@contextlib.contextmanager
def materialize(module: nn.Module, read_only: bool = False) -> Iterator[nn.Module]:
    """Inside the block the parameters of `module` (a wrapped model or a module inside of one) have their real values.

    They are the home itself, so nothing is copied to the device. Edits are kept, also in fp32 masters (an element that
    changed becomes that value). `read_only=True` says that there will be none and keeps copies on the device valid; a
    write then raises at the end of the block. Between passes only; raises UsageError inside one, and for a module that
    is not wrapped.

    Where ranks share the model no home has whole weights: all ranks enter and leave the block, with the same module,
    and each takes host memory for all of it, until the block ends (a row of the ledger, "materialized weights"; held
    against `host_memory` first). Then each keeps its part of what has changed. Raises UsageError on all ranks, and
    drops the edits, where they have made different ones.
    """
    wrapped = wrapped_together(module)
    units = {unit for each in as_list(module) for unit in wrapped.unit_indices(module_of(each))}
    with wrapped.values.materialized(sorted(units), read_only):
        yield module


@atexit.register
def _shutdown() -> None:
    for wrapped in list(_LIVE):
        wrapped.shutdown()
