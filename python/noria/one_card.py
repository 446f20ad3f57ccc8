"""Shares a card and a model's weights: gives device memory away, hands weights to other systems, averages them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from noria._errors import usage_error
from noria._lists import as_list
from noria.pipeline.pipelining_compat import module_of
from noria.runtime.averages import Averages
from noria.runtime.hand_over import HandOver
from noria.runtime.sleep import Sleep
from noria.wrapped import Wrapped, wrapped_together

__all__ = ["WeightAverage", "asleep", "ema", "weights"]


def _only(model: Any, call: str) -> tuple[nn.Module, Wrapped]:
    wrapped = wrapped_together(model)
    [*given] = as_list(model)
    if len(given) > 1:
        raise usage_error(f"one model for {call}", f"a list of {len(given)}", "call it for each of them")
    return module_of(given[0]), wrapped


@contextlib.contextmanager
def asleep(model: Any) -> Iterator[None]:
    """Gives a model's device memory away inside the `with` block, and takes it again behind it. No bit changes.

    It frees the window and the gradient buffers, which is what noria has on the device but for buffers of modules. On
    CUDA it also empties the cache of torch's allocator, on the way in and out. Weights stay at home: inside, use
    `noria.weights`, `model.state_dict()`, `noria.save` and loads. Updates of the last step may still run.

    The memory is of the same size afterwards. Its address may be another one. The first forward fetches all units
    again.

    If ranks share the model, all of them call this. Each keeps memory in which it sums gradients.

    Args:
        model: A wrapped model, or a module inside one.

    Yields:
        Nothing.

    Raises:
        UsageError: if the model is not wrapped, or belongs to stages, which may have lent their memory. Also inside a
            pass, a block of `noria.materialize` or another such block. Inside the block, forwards, `step()` and
            `noria.unwrap` raise it.
        MachineError: behind the block, if the device has no room any more. Nothing is lost: free memory, and go on. The
            next forward or `step()` tries again.

    Example:
        >>> model, optimizer = noria.wrap(model, optimizer)
        >>> with noria.asleep(model):
        ...     values = {name: tensor.clone() for name, tensor in noria.weights(model)}
    """
    wrapped = wrapped_together(model)
    has_stages = wrapped.peer_memory.stages is not None
    with Sleep(
        wrapped.context, wrapped.run, wrapped.sync, wrapped.rest, wrapped.streamed, has_stages=has_stages
    ).asleep():
        yield


def weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterates over names and values of all weights, for an inference engine that takes them one by one.

    It makes no second copy of the model. Each tensor lies on the CPU and views the home. Read it, or copy it to a
    device, before you ask for the next one. noria then waits for copies that the device still makes of it. Do not write
    to it.

    A parameter comes in its own dtype: the working copy, which forwards use. In bfloat16 training this is the fp32
    master, rounded. Names, parameters and buffers are those of `model.state_dict()`. Parameters come first, in the
    order of units, so that tied names follow each other. Right after `step()` the first units are given while others
    are still being updated. Constants of quantised weights are left out.

    The loop may end early. Inside of it, forwards may run. But weights must stay as they are: after a `step()`, a load
    or an edit the loop raises.

    If ranks share the model, no home has whole weights. All ranks then iterate, to the end or to the same tensor. Each
    tensor is gathered in memory of its own, so a rank has room for the one that it uses and for the next one.

    Args:
        model: A wrapped model, a `PipelineStage`, or a module inside one.

    Returns:
        An iterator over (name, tensor).

    Raises:
        UsageError: if the model is not wrapped, or if weights have changed since the loop began. Also inside a pass or
            a block of `noria.materialize`, and while weights and optimizer state are of different steps.

    Example:
        >>> model, optimizer = noria.wrap(model, optimizer)
        >>> sizes = {name: tensor.nbytes for name, tensor in noria.weights(model)}
    """
    module, wrapped = _only(model, "noria.weights")
    return iter(HandOver(wrapped.context, wrapped.run, wrapped.sync, wrapped.weights, module))


class WeightAverage:
    """Averages a model's weights exponentially. `noria.ema` makes it.

    Each method is collective if ranks share the model.
    """

    def __init__(self, averages: Averages) -> None:
        self._averages = averages

    def update(self) -> None:
        """Averages the weights of now in. Call it after `optimizer.step()`.

        It waits for the updates of that step, unit by unit. The first call copies the weights, as torch's does.

        Raises:
            UsageError: inside a pass, and inside `applied()`. Also if weights and optimizer state are of different
                steps.

        Example:
            >>> average = noria.ema(noria.wrap(model), 0.999)
            >>> average.update()
        """
        self._averages.update()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the model the averaged weights inside the `with` block, and its own again behind it, with their bits.

        Inside, evaluate and save the model. It takes no more memory: its own weights lie where the averages were. A
        parameter with an fp32 master then has the average as its master, rounded in the working copy. Gradients and
        optimizer state stay as they are.

        Yields:
            Nothing.

        Raises:
            UsageError: inside a pass, and inside another such block. Inside the block, `step()`, loads, edits of
                weights and `noria.unwrap` raise it.

        Example:
            >>> average = noria.ema(noria.wrap(model), 0.999)
            >>> with average.applied(), torch.no_grad():
            ...     loss = model(inputs).sum()
        """
        with self._averages.applied():
            yield

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the averages as `torch.optim.swa_utils.AveragedModel` does: "n_averaged", and names after "module.".

        Frozen parameters and buffers are the model's own. Without ranks, averages view the memory that they lie in.

        Returns:
            Tensors by name.

        Raises:
            UsageError: inside a pass, and inside `applied()`.

        Example:
            >>> average = noria.ema(noria.wrap(model), 0.999)
            >>> average.state_dict()["n_averaged"]
            tensor(0)
        """
        return self._averages.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads averages, also those of an `AveragedModel`. Frozen parameters and buffers are left to the model.

        Args:
            state_dict: What `state_dict()` has returned.

        Raises:
            UsageError: before anything is changed, if an average is missing or has another shape. Also inside a pass,
                inside `applied()`, and if ranks load different averages.

        Example:
            >>> average = noria.ema(noria.wrap(model), 0.999)
            >>> average.load_state_dict(average.state_dict())
        """
        self._averages.load_state_dict(state_dict)

    @property
    def num_bytes(self) -> int:
        """The host memory that this rank's averages take."""
        return self._averages.num_bytes


def ema(model: Any, decay: float, *, foreach: bool = True) -> WeightAverage:
    """Makes an exponential moving average of a wrapped model's weights, at home.

    It has the bits of `torch.optim.swa_utils.AveragedModel` on the CPU, of a plain model that is trained alike.

    Averages lie in ordinary host memory, which this call takes: 4 bytes for each trainable parameter in fp32 or with an
    fp32 master. Others take the size of their dtype. If ranks share the model, each has its part. The ledger shows this
    memory as "averaged weights", and noria checks it against `host_memory` first. It is freed with the object and the
    tensors that it has given.

    A parameter with an fp32 master has the average of its masters: one in bfloat16 would stand still. A frozen
    parameter is its own average.

    Args:
        model: A wrapped model, a `PipelineStage`, or a module inside one.
        decay: How much of the average each update keeps, from 0 to 1.
        foreach: True gives the bits of `get_ema_multi_avg_fn(decay)`, False those of `get_ema_avg_fn(decay)`.

    Returns:
        A `WeightAverage`: call its `update()` after each `optimizer.step()`.

    Raises:
        UsageError: if the model is not wrapped, if `decay` is no number from 0 to 1, or if the memory does not fit.
            Also inside a pass.

    Example:
        >>> model, optimizer = noria.wrap(model, optimizer)
        >>> average = noria.ema(model, 0.999)
        >>> model(inputs).sum().backward()
        >>> optimizer.step()
        >>> average.update()
    """
    module, wrapped = _only(model, "noria.ema")
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise usage_error("a decay from 0 to 1", repr(decay), "give 0.999, for example")
    return WeightAverage(
        Averages(wrapped.context, wrapped.run, wrapped.sync, wrapped.weights, wrapped.late, module, decay, foreach)
    )
