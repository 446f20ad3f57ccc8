"""Hands a wrapped model's weights to other systems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from noria._errors import usage_error
from noria._lists import as_list
from noria.pipeline.pipelining_compat import module_of
from noria.runtime.hand_over import HandOver
from noria.wrapped import Wrapped, wrapped_together

__all__ = ["weights"]


def _only(model: Any, call: str) -> tuple[nn.Module, Wrapped]:
    wrapped = wrapped_together(model)
    [*given] = as_list(model)
    if len(given) > 1:
        raise usage_error(f"one model for {call}", f"a list of {len(given)}", "call it for each of them")
    return module_of(given[0]), wrapped


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
