"""Gives a wrapped model and its optimizer to `torch.distributed.checkpoint`: each rank handles its own parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from noria._errors import usage_error
from noria._lists import as_list
from noria.dist.shard_tensor import ShardTensor
from noria.model.inner_tensors import tensors_in
from noria.model.layout import HomeParameter
from noria.optimizer import driver_of
from noria.pipeline.pipelining_compat import modules_of
from noria.wrapped import Wrapped, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from noria.step.driver import StepDriver

__all__ = ["parts_of", "sharded_state"]


def sharded_state(
    model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | Sequence[Optimizer] | None = None
) -> dict[str, Any]:
    """Returns a dict for `torch.distributed.checkpoint.save` and `load`, alone or with other entries beside it.

    The entry "model" and, with an optimizer, "optimizer" have a `state_dict()` and a `load_state_dict()`. For lists,
    as `noria.wrap` takes them, each has entries "0", "1", ... in it. A load writes into the home.

    Each rank writes only what it has at home, and reads no more. The folder holds whole tensors, in pieces. Their names
    are those of `get_state_dict` of `torch.distributed.checkpoint.state_dict`. So any number of ranks may load it, or
    noria without ranks, or plain torch. Exception: of a weight that wraps tensors, as torchao's do, it holds those
    inside under names of their own, which noria alone loads.

    If ranks share the model, all of them call this right before the save or load. `torch.distributed.checkpoint` waits
    for all ranks, and assists none of them meanwhile.

    Args:
        model: A wrapped model, a stage, or a list of them.
        optimizer: A wrapped optimizer, a list, or None for the model alone.

    Returns:
        The entries "model" and, with an optimizer, "optimizer".

    Raises:
        UsageError: if the model or optimizer is not wrapped. If ranks share the model, also inside a pass.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> model, optimizer = noria.wrap(model, optimizer)
        >>> metadata = dcp.save({**noria.sharded_state(model, optimizer), "step": 10}, checkpoint_id="run")
        >>> dcp.load(noria.sharded_state(model, optimizer), checkpoint_id="run")
    """
    entries = parts_of(model, optimizer)
    takers = [taker for each in entries.values() for taker in (each.members if isinstance(each, _Several) else [each])]
    for run, sync in dict.fromkeys((taker.run, taker.sync) for taker in takers):
        if run.context.ranks is not None:
            run.refuse_when_busy("noria.sharded_state")
            run.recover()
            sync.meet("take noria.sharded_state")
    return entries


def parts_of(model: object, optimizer: object) -> dict[str, _ModelParts | _OptimizerParts | _Several]:
    """As `sharded_state`, after the ranks have met."""
    entries: dict[str, _ModelParts | _OptimizerParts | _Several] = {}
    model = modules_of(model)
    models = [_ModelParts(_owner_of(each), each) for each in as_list(model)]
    entries["model"] = models[0] if isinstance(model, nn.Module) else _Several(models)
    if optimizer is not None:
        optimizers = [_OptimizerParts(_driver_of(each)) for each in as_list(optimizer)]
        entries["optimizer"] = _Several(optimizers) if isinstance(optimizer, list | tuple) else optimizers[0]
    return entries


def _owner_of(model: nn.Module) -> Wrapped:
    wrapped = wrapped_by(model)
    if wrapped is None or all(model is not root for root in wrapped.context.partition.roots):
        raise usage_error("a wrapped model", type(model).__qualname__, "give what noria.wrap was given")
    return wrapped


def _driver_of(optimizer: object) -> StepDriver:
    driver = driver_of(optimizer)
    if driver is None:
        raise usage_error("a wrapped optimizer", type(optimizer).__qualname__, "give what noria.wrap was given")
    return driver


class _Several:
    """Passes each entry of a state dict, "0", "1" and so on, to one of several members."""

    def __init__(self, members: Sequence[_ModelParts | _OptimizerParts]) -> None:
        self.members = members

    def state_dict(self) -> dict[str, Any]:
        return {str(number): each.state_dict() for number, each in enumerate(self.members)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for number, each in enumerate(self.members):
            each.load_state_dict(state_dict[str(number)])


class _OptimizerParts:
    """Is the entry "optimizer" of `sharded_state`."""

    def __init__(self, driver: StepDriver) -> None:
        self._driver = driver
        self.run, self.sync = driver.run, driver.services.sync

    def state_dict(self) -> dict[str, Any]:
        return self._driver.parts()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "param_groups" not in state_dict:
            raise usage_error('a checkpoint with "param_groups" of the optimizer', "one without", "load another one")
        states = state_dict.setdefault("state", {}).items()
        _finish({f"{key} of {name}": each for name, values in states for key, each in values.items()})
        self._driver.load_parts(state_dict)


class _ModelParts:
    """Is the entry "model" of `sharded_state`."""

    def __init__(self, wrapped: Wrapped, model: nn.Module) -> None:
        self.wrapped = wrapped
        self.run, self.sync = wrapped.run, wrapped.sync
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        self.wrapped.run.recover()
        if self.wrapped.context.ranks is not None:  # the home lacks the changes of a block of noria.materialize
            self.wrapped.run.refuse_when_busy("noria.sharded_state")
        with self.wrapped.weights.giving(self._part, parts=True):
            found = self._model.state_dict()
        for name, module, key in self._buffers():
            if name in found:
                found[name] = self._buffer(module, key)
        return dict(found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, own in self.state_dict().items():
            if isinstance(own, ShardTensor) and not isinstance(state_dict.get(name), ShardTensor):
                raise usage_error(
                    f'"{name}" as state_dict() gave it to torch.distributed.checkpoint.load',
                    type(state_dict[name]).__name__ if name in state_dict else "nothing under that name",
                    "load whole tensors by model.load_state_dict()",
                )
        _finish(state_dict)
        for path, module in self._model.named_modules():
            name = f"{path}._extra_state" if path else "_extra_state"
            if name in state_dict:
                module.set_extra_state(state_dict[name])
        slot_of = self.wrapped.context.slot_of
        slots = [slot_of[each].index for each in tensors_in(self._model.parameters()) if each in slot_of]
        self.wrapped.context.engine.home.bump_versions(slots)
        for part in (*slots, *((module, key) for _, module, key in self._buffers())):
            self.wrapped.loads.note(part)

    def _buffers(self) -> Iterator[tuple[str, nn.Module, str]]:
        for path, module in self._model.named_modules(remove_duplicate=False):
            for key, _ in module.named_buffers(recurse=False, remove_duplicate=False):
                yield f"{path}.{key}" if path else key, module, key

    def _part(self, slot: HomeParameter) -> ShardTensor:
        wrapped = self.wrapped

        def read() -> torch.Tensor:
            return slot.flat(wrapped.context.home.working(slot))

        def write(flat: torch.Tensor) -> None:
            wrapped.run.require_loadable("a load of weights")
            wrapped.weights.begin_load([slot.unit], not slot.trainable)
            wrapped.context.engine.home.access_home(slot.unit, True, frozen=not slot.trainable)
            wrapped.weights.write_part(slot, flat.as_strided(slot.like.shape, slot.like.stride()))

        def before_read() -> None:
            wrapped.run.require_consistent("a save of weights")
            wrapped.weights.check(slot)
            wrapped.context.engine.home.access_home(slot.unit, False)

        return ShardTensor.of(
            slot.shape,
            slot.strides,
            slot.dtype,
            first=slot.first,
            count=slot.like.numel(),
            read=read,
            write=write,
            before_read=before_read,
            landing_dtype=torch.float32 if slot.has_master else None,
        )

    def _buffer(self, module: nn.Module, key: str) -> ShardTensor:
        """Returns a buffer as a tensor to save or load: rank 0 saves it, and all ranks load it."""
        wrapped, buffer = self.wrapped, module._buffers[key]
        assert buffer is not None
        shape = buffer.shape
        strides = torch.empty(shape, device="meta").stride()

        def write(flat: torch.Tensor) -> None:
            with torch.no_grad():
                buffer.copy_(flat.view(shape))

        return ShardTensor.of(
            shape,
            strides,
            buffer.dtype,
            read=lambda: buffer.detach().to("cpu").reshape(-1),
            write=write,
            before_read=lambda: wrapped.run.require_consistent("a save of buffers"),
            is_saved=wrapped.context.ranks is None or wrapped.context.ranks.rank == 0,
        )


def _finish(entries: dict[str, object]) -> None:
    for name, each in entries.items():
        if isinstance(each, ShardTensor):
            each.finish(name)
