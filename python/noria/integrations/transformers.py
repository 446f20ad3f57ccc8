"""Trains with transformers' Trainer, and with all trainers that are made from it, such as TRL's.

    from noria.integrations.transformers import NoriaTrainer

    trainer = NoriaTrainer(model, args, train_dataset=data, noria={"device_memory": "20GiB"})
    trainer.train()

For other trainers: `class StreamingSFT(NoriaTrainerMixin, SFTTrainer): pass`. The Trainer makes the optimizer as usual,
and noria wraps both. The model is never placed on the device as a whole. Under torchrun the ranks share the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import logging

from noria._errors import usage_error
from noria.integrations._defaults import with_defaults
from noria.integrations.accelerate import follow
from noria.optimizer import for_file
from noria.policy import Policy, make_policy
from noria.report import report
from noria.wrap import is_wrapped, unwrap, wrap
from noria.wrapped import wrapped_by

__all__ = ["NoriaCallback", "NoriaTrainer", "NoriaTrainerMixin"]

_GIB = 2**30
_logger = logging.get_logger("transformers.noria")  # shown as the Trainer's own lines are


class NoriaCallback(TrainerCallback):
    """Adds noria's numbers to the Trainer's logs, and prints the report when training ends.

    - `noria/fetched_gib`: what came to the device since the last log.
    - `noria/stalled`: the part of that time in which the device's compute waited for noria.
    - `noria/peak_device_gib`: the most that noria's window has held so far.

    `NoriaTrainerMixin` adds this callback before those of wandb, TensorBoard and others. Given by
    `callbacks=`, it comes after them, and only later callbacks have the numbers.
    """

    def __init__(self) -> None:
        self._last = (0.0, 0.0, 0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        model = more.get("model")
        if logs is None or not is_wrapped(model):
            return
        found = report(model, write_trace=False)  # type: ignore[arg-type]
        lanes = {lane.lane: lane for lane in found.lanes}
        stalled = sum(lanes["compute"].stalled_us.values())
        busy, fetched = lanes["compute"].busy_us + stalled, lanes["fetch"].bytes
        before_stalled, before_busy, before_fetched = self._last
        if fetched < before_fetched:  # it was wrapped again
            before_stalled, before_busy, before_fetched = 0.0, 0.0, 0
        self._last = stalled, busy, fetched
        logs["noria/fetched_gib"] = (fetched - before_fetched) / _GIB
        logs["noria/stalled"] = (stalled - before_stalled) / max(busy - before_busy, 1.0)
        logs["noria/peak_device_gib"] = found.peak_lease_bytes / _GIB

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if is_wrapped(more.get("model")) and state.is_world_process_zero:
            print(report(more["model"]))


class NoriaTrainerMixin:
    """Comes before a Trainer in a class's bases: `class StreamingSFT(NoriaTrainerMixin, SFTTrainer)`.

    Args:
        *args, **kwargs: The Trainer's own arguments.
        noria: Fields of `Policy` in a dictionary, such as {"device_memory": "20GiB"}. The device is the Trainer's, if
            no other is given. Weights that are trained in bfloat16 get fp32 masters, if no dtype is given; a line of
            the log says so. A `Policy` is taken as it is.

    A model that `noria.wrap` has wrapped before stays as it is.
    """

    model: Any
    optimizer: Any
    args: Any
    accelerator: Any

    def __init__(self, *args: Any, noria: Policy | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._noria = noria
        self._has_wrapped = False
        self._gathered: dict[str, Any] | None = None  # while `save_model` runs
        if isinstance(noria, Mapping):
            make_policy(None, dict(noria))  # raises before anything is built
        elif not isinstance(noria, Policy | None):
            raise usage_error("noria= a noria.Policy or a dictionary of its fields", repr(noria), "give one of them")
        super().__init__(*args, **kwargs)
        self.callback_handler.callbacks.insert(0, NoriaCallback())  # type: ignore[attr-defined]

    def _wrap(self, optimizer: torch.optim.Optimizer | None) -> None:
        policy = self._noria if isinstance(self._noria, Policy) else None
        fields = dict(self._noria) if isinstance(self._noria, Mapping) else {}
        if policy is None:
            given, fields = fields, with_defaults(fields, self.model, self.args.device, optimizer is not None)
            if "dtype" in fields.keys() - given.keys():
                _logger.warning("noria keeps fp32 masters for the bfloat16 weights that are trained")
        wrap(self.model, optimizer, policy, **fields)
        self._has_wrapped = True

    # ---- what the Trainer calls ----

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1  # no DataParallel: one process drives one device
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        follow(self.accelerator)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Moves nothing: the model goes to its home, and may be larger than the device."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        wrapped = wrapped_by(self.model)
        if wrapped is not None and not wrapped.drivers:
            if not self._has_wrapped:
                raise usage_error(
                    "a model that is wrapped with its optimizer, or not yet",
                    "one that noria.wrap has wrapped alone",
                    "leave noria.wrap out: the trainer wraps both, by noria=",
                )
            unwrap(self.model)  # it was wrapped for an evaluation before the training
        if not is_wrapped(self.model):
            self._wrap(optimizer)
        return optimizer  # type: ignore[no-any-return]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if not is_wrapped(self.model):
            self._wrap(None)
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    # ---- checkpoints: if ranks share the model, all of them give their parts, and rank 0 writes ----

    def _shares(self) -> bool:
        wrapped = wrapped_by(self.model)
        return wrapped is not None and wrapped.context.ranks is not None

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self._gathered = self.model.state_dict() if self._shares() else None
        try:
            super().save_model(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._gathered = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict=self._gathered if state_dict is None else state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._shares() and not self.args.should_save:
            self.optimizer.state_dict()
        with for_file(self.optimizer):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        file = None if checkpoint is None else os.path.join(checkpoint, OPTIMIZER_NAME)
        if file is None or not self._shares() or not os.path.isfile(file):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        assert checkpoint is not None
        self.optimizer.load_state_dict(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
        scheduler = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)  # type: ignore[attr-defined]


class NoriaTrainer(NoriaTrainerMixin, Trainer):
    """transformers' Trainer for models that may be larger than the device. See `NoriaTrainerMixin`.

    Example:
        >>> trainer = NoriaTrainer(model, args, train_dataset=data, noria={"device_memory": "20GiB"})
        >>> trainer.train()
    """
