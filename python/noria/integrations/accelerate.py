"""Trains with accelerate: `prepare` wraps a model and its optimizer, and hands them to an `Accelerator`.

    from noria.integrations.accelerate import prepare

    accelerator = Accelerator()
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, device_memory="8GiB")

Ranks of one launch share the model: accelerate then puts no DistributedDataParallel around it.
"""

from __future__ import annotations

import contextlib
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from noria._errors import usage_error
from noria.integrations._defaults import with_defaults
from noria.optimizer import driver_of, for_file
from noria.policy import Policy
from noria.wrap import is_wrapped, wrap

__all__ = ["follow", "prepare"]


def prepare(accelerator: Accelerator, *objects: Any, policy: Policy | None = None, **policy_fields: Any) -> Any:
    """Wraps the models and optimizers among `objects` with noria, and prepares all of them with accelerate.

    If one model is wrapped and trained in bfloat16, it gets fp32 masters: dtype=None trains without.

    Args:
        accelerator: The `Accelerator`. Its later `prepare` calls leave wrapped models alone, too.
        *objects: As for `accelerator.prepare`. What is wrapped already stays as it is.
        policy: A `Policy`. Instead, its fields may be given by name.
        **policy_fields: Fields of `Policy` by name, such as device_memory="8GiB".

    Returns:
        What `accelerator.prepare` returns: the same objects prepared, in the same order.

    Raises:
        UsageError: if `noria.wrap` raises it, or if there is no model to wrap.

    Example:
        >>> accelerator = Accelerator(cpu=True)
        >>> model, optimizer = prepare(accelerator, model, optimizer)
        >>> accelerator.backward(model(inputs).sum())
        >>> optimizer.step()
    """
    models = [each for each in objects if isinstance(each, nn.Module) and not is_wrapped(each)]
    optimizers = [each for each in objects if isinstance(each, Optimizer) and driver_of(each) is None]
    if optimizers and not models:
        raise usage_error(
            "a model beside its optimizer, none of them wrapped",
            "an optimizer alone",
            "give both to one call, or wrap both with noria.wrap before",
        )
    follow(accelerator)
    if models:
        fields = policy_fields
        if policy is None:
            trains_one = len(models) == 1 and bool(optimizers)  # a policy's dtype is that of all models
            fields = with_defaults(fields, models[0], accelerator.device, trains_one)
        wrap(models, optimizers or None, policy, **fields)
    return accelerator.prepare(*objects)


def follow(accelerator: Accelerator) -> None:
    """Makes an accelerator leave wrapped models and optimizers where they are.

    It puts no DistributedDataParallel around them, moves no weights, and moves no optimizer state to the device.
    Autocast and torch.compile work as before. `save_state` keeps the codes of 8-bit moments.

    Args:
        accelerator: The `Accelerator`, before `prepare` is called.

    Example:
        >>> model, optimizer = noria.wrap(model, optimizer)
        >>> accelerator = Accelerator(cpu=True)
        >>> follow(accelerator)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
    """
    if "prepare_model" in vars(accelerator):
        return
    prepare_model, prepare_optimizer = accelerator.prepare_model, accelerator.prepare_optimizer

    def model(given: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if not is_wrapped(given):
            return prepare_model(given, device_placement, evaluation_mode)
        return prepare_model(given, device_placement=False, evaluation_mode=True)

    def optimizer(given: Optimizer, device_placement: bool | None = None) -> Any:
        return prepare_optimizer(given, device_placement if driver_of(given) is None else False)

    save = accelerator.save_state

    def save_state(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as files:
            for each in accelerator._optimizers:
                files.enter_context(for_file(each))
            return save(*args, **kwargs)

    accelerator.prepare_model, accelerator.prepare_optimizer = model, optimizer
    accelerator.save_state = save_state
