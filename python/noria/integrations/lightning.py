"""Trains with Lightning: `Trainer(strategy="noria")`, after `import noria.integrations.lightning`.

    from noria.integrations.lightning import NoriaStrategy

    trainer = L.Trainer(strategy=NoriaStrategy(device_memory="20GiB"))

The LightningModule makes its optimizers in `configure_optimizers`, and noria wraps both. The module is never placed on
the device as a whole. The ranks of one launch share it. When the run ends, the module is unwrapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from noria._C import UsageError
from noria._errors import usage_error
from noria.integrations._defaults import with_defaults
from noria.optimizer import driver_of, for_file
from noria.policy import Policy, make_policy
from noria.wrap import is_wrapped, materialize, unwrap, wrap

__all__ = ["NoriaEMA", "NoriaStrategy"]

_ABSENT = object()


class NoriaStrategy(DDPStrategy):  # type: ignore[misc]
    """Streams the LightningModule.

    Args:
        policy: A `noria.Policy`, which is taken as it is. Instead, its fields may be given by name. Without device=
            it is the Trainer's. Without dtype= weights that are trained in bfloat16 get fp32 masters.
        strategy_options: Arguments of Lightning's `DDPStrategy`, such as {"process_group_backend": "gloo"}.
        **policy_fields: Fields of `Policy` by name, such as device_memory="20GiB".

    Raises:
        UsageError: if the policy makes no sense.

    Example:
        >>> trainer = L.Trainer(strategy=NoriaStrategy(device_memory="20GiB"))
        >>> trainer.fit(module, loader)
    """

    model: Any
    lightning_module: Any

    def __init__(
        self, policy: Policy | None = None, *, strategy_options: dict[str, Any] | None = None, **policy_fields: Any
    ) -> None:
        make_policy(policy, policy_fields)  # raises before anything is built
        super().__init__(**(strategy_options or {}))
        self._policy = policy
        self._policy_fields = policy_fields
        self._step: tuple[str, Any] = ("", _ABSENT)
        self._has_wrapped = self._has_raised = False

    # ---- set-up ----

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        if self.num_nodes * self.num_processes == 1:  # the order of data is that of other strategies
            trainer._accelerator_connector.use_distributed_sampler = False
        self.model = self.precision_plugin.convert_module(self.model)
        self._has_raised = False
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self.setup_optimizers(trainer)
        self._wrap(list(self.optimizers) if fits else [])
        self.setup_precision_plugin()

    def _wrap(self, optimizers: list[Any]) -> None:
        module = self.lightning_module
        if any(is_wrapped(each) for each in module.modules()):  # by the user
            if any(driver_of(each) is None for each in optimizers):
                raise usage_error(
                    "a module that is wrapped with its optimizers, or not yet",
                    "one that noria.wrap has wrapped, and optimizers that it has not",
                    "leave noria.wrap out: the strategy wraps both",
                )
            return
        fields = self._policy_fields
        if self._policy is None:
            fields = with_defaults(fields, module, self.root_device, bool(optimizers))
        wrap(module, optimizers or None, self._policy, **fields)
        self._has_wrapped = True

    def model_to_device(self) -> None:
        """Moves nothing: the module goes to its home."""

    def configure_ddp(self) -> None:
        """Puts nothing around the module: noria's ranks share it."""

    def optimizer_state(self, optimizer: Any) -> Any:
        with for_file(getattr(optimizer, "_optimizer", optimizer)):
            return super().optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)  # it stays in the home

    # ---- steps run inside of the module's own forward, so that noria sees all that they use ----

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            if not self.lightning_module.automatic_optimization:  # it runs backward and step() by itself
                return self.lightning_module.training_step(*args, **kwargs)
            return self._in_forward("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._in_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._in_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._in_forward("predict_step", *args, **kwargs)

    def _in_forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        own = vars(module).get("forward", _ABSENT)
        self._step = method, own
        module.__dict__["forward"] = self._forward
        try:
            return module(*args, **kwargs)
        finally:
            self._give_forward_back(own)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        method, own = self._step
        self._give_forward_back(own)  # the step may call it
        return getattr(self.lightning_module, method)(*args, **kwargs)

    def _give_forward_back(self, own: Any) -> None:
        module = self.lightning_module
        if own is _ABSENT:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = own

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.lightning_module.no_sync():
            yield

    # ---- the end ----

    def on_exception(self, exception: BaseException) -> None:
        self._has_raised = True
        super().on_exception(exception)

    def teardown(self) -> None:
        module = self.lightning_module
        if self._has_wrapped and is_wrapped(module):
            if not self._has_raised:
                unwrap(module)
            elif self.world_size == 1:  # other ranks may be elsewhere
                with contextlib.suppress(UsageError):  # the first error is raised already
                    unwrap(module)
        self._has_wrapped = False
        super().teardown()


class NoriaEMA(EMAWeightAveraging):  # type: ignore[misc]
    """Lightning's average of weights, for modules that noria streams: it reads and writes them at home.

    Args:
        *args, **kwargs: As for `EMAWeightAveraging`.

    Example:
        >>> trainer = L.Trainer(strategy="noria", callbacks=[NoriaEMA(decay=0.999)])
    """

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any, **more: Any) -> None:
        step = trainer.global_step
        with self._reading(pl_module, step > self._latest_update_step and self.should_update(step_idx=step - 1)):
            super().on_train_batch_end(trainer, pl_module, *others, **more)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        epoch = trainer.current_epoch
        with self._reading(pl_module, epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch)):
            super().on_train_epoch_end(trainer, pl_module)

    @staticmethod
    def _reading(module: Any, is_due: bool) -> contextlib.AbstractContextManager[Any]:
        return materialize(module, read_only=True) if is_due else contextlib.nullcontext()

    def _swap_models(self, pl_module: Any) -> None:
        with materialize(pl_module):
            super()._swap_models(pl_module)

    def _copy_average_to_current(self, pl_module: Any) -> None:
        with materialize(pl_module):
            super()._copy_average_to_current(pl_module)


StrategyRegistry.register("noria", NoriaStrategy, description="Streams models that do not fit on the device.")
