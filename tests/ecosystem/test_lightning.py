"""Lightning's Trainer and Fabric, on the CPU."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import lightning as L
import noria
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from torch.utils.data import DataLoader

from tests.ecosystem import tiny
from tests.ecosystem.harness import Run, Script, assert_equal, cases


class Language(L.LightningModule):
    """A small Llama. Without a run it is never wrapped, as in a script that only loads a checkpoint."""

    def __init__(self, run: Run | None = None, **policy: Any) -> None:
        super().__init__()
        self.model = tiny.llama()
        self.run = run
        self.policy = policy
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.log("val_loss", self.model(**batch).loss, on_epoch=True, batch_size=2)

    test_step = validation_step

    def wrap(self, optimizer: torch.optim.Optimizer) -> None:
        if self.run is not None:
            self.run.wrap(self.model, optimizer, **self.policy)

    def configure_optimizers(self) -> Any:
        optimizer = tiny.adamw(self.model)
        self.wrap(optimizer)
        return optimizer


class WrappedAtOnce(Language):
    """Makes and wraps its optimizer with the model."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.made = tiny.adamw(self.model)
        self.wrap(self.made)

    def configure_optimizers(self) -> Any:
        return self.made


class WrappedAsAWhole(Language):
    """Gives itself to wrap, not only the model that it holds."""

    def configure_optimizers(self) -> Any:
        optimizer = tiny.adamw(self)
        assert self.run is not None
        self.run.wrap(self, optimizer)
        return optimizer


class Scheduled(Language):
    """Logs the norm of each gradient, too."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self.model, norm_type=2))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Plateaued(Language):
    """Its validation loss does not improve for long: the learning rate is large."""

    def configure_optimizers(self) -> Any:
        optimizer = tiny.adamw(self.model, lr=0.05)
        self.wrap(optimizer)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Descending(Language):
    """Has an optimizer that updates with the same bits by noria's own kernel and by torch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.wrap(optimizer)
        return optimizer


class ByHand(Language):
    """Its steps are its own: clipping, a schedule, and one step for two batches."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        loss = super().training_step(batch, number)
        self.manual_backward(loss / 2)
        if number % 2 == 1:
            self.clip_gradients(optimizer, 0.3, "norm")
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)]


class Rivals(ByHand):
    """Two models, each with a wrap call and an optimizer. They train in turn, as in a GAN: one is frozen meanwhile."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.other = tiny.llama()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        first, second = self.optimizers()
        for optimizer, own, rival in ((first, self.model, self.other), (second, self.other, self.model)):
            self.toggle_optimizer(optimizer)
            made = own(**batch)
            loss = made.loss + rival(inputs_embeds=made.logits[..., :32], labels=batch["labels"]).loss
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.detach())

    def configure_optimizers(self) -> Any:
        assert self.run is not None
        return [self.run.wrap(model, tiny.adamw(model))[1] for model in (self.model, self.other)]


class Tuned(Language):
    """Is wrapped anew in each fit: the tuner fits, too."""

    lr = 1e-3

    def configure_optimizers(self) -> Any:
        if noria.is_wrapped(self.model):
            assert self.run is not None
            self.run.unwrap(self.model)
        optimizer = tiny.adamw(self.model, self.lr)
        self.wrap(optimizer)
        return optimizer


class Backboned(Language):
    @property
    def backbone(self) -> torch.nn.Module:
        return self.model.model


class MaterializedEMA(EMAWeightAveraging):
    """Lets Lightning's callback read and write weights between passes."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        with materialized(pl_module):
            super().on_train_batch_end(trainer, pl_module, *others)

    def _swap_models(self, pl_module: Any) -> None:
        with materialized(pl_module):
            super()._swap_models(pl_module)

    def _copy_average_to_current(self, pl_module: Any) -> None:
        with materialized(pl_module):
            super()._copy_average_to_current(pl_module)


class MaterializedSWA(StochasticWeightAveraging):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        with materialized(pl_module):
            super().on_train_epoch_start(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with materialized(pl_module):
            super().on_train_end(trainer, pl_module)


class MaterializedFinetuning(BackboneFinetuning):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        with materialized(pl_module):
            super().on_train_epoch_start(trainer, pl_module)


def materialized(module: Language) -> Any:
    """As a script would write `noria.materialize(module.model)`; it does nothing in the plain run."""
    return noria.materialize(module.model) if noria.is_wrapped(module.model) else contextlib.nullcontext()


def batches(first: int = 0, count: int = 4) -> DataLoader:
    return DataLoader([tiny.batch(first + number) for number in range(count)], batch_size=None)


def trainer_of(run: Run, **options: Any) -> L.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "default_root_dir": run.folder, "log_every_n_steps": 1}
        | quiet
        | options
    )


def keep(run: Run, trainer: L.Trainer, module: Language, name: str = "end") -> None:
    run.keep(f"{name}.losses", module.losses)
    run.keep(f"{name}.metrics", dict(trainer.callback_metrics))
    run.keep(f"{name}.steps", trainer.global_step)
    run.keep_model(module, f"{name}.model")


def fit(run: Run, kind: type[Language] = Language, validates: bool = False, **options: Any) -> None:
    module, trainer = kind(run), trainer_of(run, **options)
    trainer.fit(module, batches(), batches(90, 2) if validates else None)
    keep(run, trainer, module)


def update_in_backward(run: Run) -> None:
    if "avx2" not in noria._C.instruction_sets():
        pytest.skip("torch has no fused multiply-add here")
    module, trainer = Descending(run, update="backward", kernel="fused"), trainer_of(run)
    trainer.fit(module, batches())
    keep(run, trainer, module)


def watched(run: Run) -> None:
    """Validation ends the run early; a monitor and a logger write down the learning rates."""
    module = Plateaued(run)
    stop, monitor = EarlyStopping("val_loss", patience=2), LearningRateMonitor(logging_interval="step")
    logger = CSVLogger(run.folder)
    trainer = trainer_of(run, max_epochs=12, callbacks=[stop, monitor], logger=logger, val_check_interval=2)
    trainer.fit(module, batches(), batches(90, 2))
    assert 0 < stop.stopped_epoch < 11
    run.keep("logged", [{key: float(each[key]) for key in each} for each in logger.experiment.metrics])
    keep(run, trainer, module)


def shown(run: Run) -> None:
    """All that prints: the summary, the progress bar, and both profilers."""
    for number, profiler in enumerate(("simple", "pytorch")):
        module = Language(run)
        trainer = trainer_of(run, profiler=profiler, enable_progress_bar=True, enable_model_summary=True)
        trainer.fit(module, batches())
        keep(run, trainer, module, f"run {number}")


def resumed(run: Run) -> None:
    """A run that is cut in two, and one that goes on from a run without noria."""
    for name, first in (("own", Scheduled(run)), ("plain", Scheduled())):
        checkpoint = ModelCheckpoint(run.folder / name, save_last=True, every_n_train_steps=3, save_top_k=-1)
        before = trainer_of(run, callbacks=[checkpoint], enable_checkpointing=True, max_epochs=2, max_steps=6)
        before.fit(first, batches())
        keep(run, before, first, f"{name} before")
        second, after = Scheduled(run), trainer_of(run, max_epochs=3)
        after.fit(second, batches(), ckpt_path=checkpoint.last_model_path)
        keep(run, after, second, f"{name} after")
    left = torch.load(checkpoint.last_model_path, weights_only=True)
    run.keep("file", [left["state_dict"], left["optimizer_states"]])


def best(run: Run) -> None:
    """The best of several checkpoints, tested with noria, and loaded without."""
    module = Plateaued(run)
    checkpoint = ModelCheckpoint(run.folder, monitor="val_loss", save_top_k=1)
    trainer = trainer_of(run, callbacks=[checkpoint], enable_checkpointing=True, max_epochs=3)
    trainer.fit(module, batches(), batches(90, 2))
    run.keep("last", trainer.validate(module, batches(90, 2), verbose=False))
    run.keep("best", trainer.test(module, batches(90, 2), ckpt_path="best", verbose=False))
    run.keep("score", checkpoint.best_model_score)
    keep(run, trainer, module)
    loaded = Language.load_from_checkpoint(checkpoint.best_model_path, weights_only=True)
    run.keep_model(loaded, "loaded")
    run.keep("loaded again", trainer.test(loaded, batches(90, 2), verbose=False))


def averaged(run: Run, kind: type[EMAWeightAveraging] = MaterializedEMA) -> None:
    fit(run, validates=True, max_epochs=2, callbacks=[kind(decay=0.8)])


def averaged_late(run: Run, kind: type[StochasticWeightAveraging] = MaterializedSWA) -> None:
    fit(run, max_epochs=3, callbacks=[kind(swa_lrs=1e-2, swa_epoch_start=1)])


def unfrozen_late(run: Run, kind: type[BackboneFinetuning] = MaterializedFinetuning) -> None:
    fit(run, Backboned, max_epochs=2, callbacks=[kind(unfreeze_backbone_at_epoch=1)])


def tuned(run: Run) -> None:
    """Learning rates are tried first. All that this trained is then undone, and the real run begins."""
    module = Tuned(run)
    found = Tuner(trainer_of(run, max_epochs=3)).lr_find(module, batches(), num_training=10, update_attr=False)
    assert found is not None
    run.keep("tried", found.results["loss"])
    module.losses.clear()
    trainer = trainer_of(run)
    trainer.fit(module, batches())
    keep(run, trainer, module)


def fit_twice(run: Run) -> None:
    module = Language(run)
    trainer_of(run).fit(module, batches())
    trainer_of(run).fit(module, batches())


def fabric(run: Run, place: str, precision: Any = "32-true", **clip: float) -> None:
    """A loop of one's own. `place`: where noria is called, beside `fabric.setup`."""
    lightning = L.Fabric(accelerator="cpu", precision=precision)
    lightning.launch()
    inner = tiny.llama()
    optimizer = tiny.adamw(inner)
    if place == "before":
        run.wrap(inner, optimizer)
    model, stepper = lightning.setup(inner, optimizer)
    if place == "after":
        run.wrap(inner, optimizer)
    elif place == "what setup returned":
        run.wrap(model, stepper)
    for number, batch in enumerate(lightning.setup_dataloaders(batches(count=6))):
        is_last = number % 2 == 1
        with lightning.no_backward_sync(model, enabled=not is_last):
            loss = model(**batch).loss / 2
            lightning.backward(loss)
        run.keep(f"loss {number}", loss)
        if is_last:
            if clip:
                run.keep(f"norm {number}", lightning.clip_gradients(model, stepper, **clip))
            stepper.step()
            stepper.zero_grad()
    run.keep_model(inner)


def fabric_resumed(run: Run) -> None:
    """Saves in the middle, and goes on in new objects."""
    lightning = L.Fabric(accelerator="cpu", precision="bf16-mixed")
    path = run.folder / "state.ckpt"
    for part in range(2):
        inner = tiny.llama()
        optimizer = tiny.adamw(inner)
        run.wrap(inner, optimizer)
        model, stepper = lightning.setup(inner, optimizer)
        state = {"model": model, "optimizer": stepper, "step": 0}
        if part:
            assert lightning.load(path, state) == {}
            run.keep("step", state["step"])
        for number in range(3):
            loss = model(**tiny.batch(3 * part + number)).loss
            lightning.backward(loss)
            stepper.step()
            stepper.zero_grad()
            run.keep(f"loss {part} {number}", loss)
        lightning.save(path, state | {"step": 3})
        run.keep_model(inner, f"model {part}")


SCRIPTS: dict[str, Script] = {
    "Trainer, wrapped in configure_optimizers": fit,
    "Trainer, wrapped in __init__": functools.partial(fit, kind=WrappedAtOnce),
    "Trainer, the LightningModule itself": functools.partial(fit, kind=WrappedAsAWhole, validates=True),
    "Trainer, clip by norm, accumulation": functools.partial(
        fit, gradient_clip_val=0.3, accumulate_grad_batches=2, kind=Scheduled, max_epochs=2
    ),
    "Trainer, clip by value, anomaly detection": functools.partial(
        fit, gradient_clip_val=0.01, gradient_clip_algorithm="value", detect_anomaly=True
    ),
    "Trainer, bf16-mixed": functools.partial(fit, precision="bf16-mixed", validates=True),
    "Trainer, bf16-true": functools.partial(fit, precision="bf16-true", validates=True),
    "Trainer, early stopping, LR monitor, logger": watched,
    "Trainer, summary, progress bar, profilers": shown,
    "Trainer, checkpoint and resume": resumed,
    "Trainer, best checkpoint": best,
    "Trainer, manual optimisation": functools.partial(fit, kind=ByHand),
    "Trainer, two models in turn": functools.partial(fit, kind=Rivals),
    "Trainer, learning rate finder": tuned,
    "Trainer, update in backward": update_in_backward,
    "Trainer, EMA inside materialize": averaged,
    "Trainer, SWA inside materialize": averaged_late,
    "Trainer, BackboneFinetuning inside materialize": unfrozen_late,
    "Fabric, wrapped before setup, clip by norm": functools.partial(fabric, place="before", max_norm=0.3),
    "Fabric, wrapped after setup, bf16-true": functools.partial(fabric, place="after", precision="bf16-true"),
    "Fabric, what setup returned, clip by value": functools.partial(fabric, place="what setup returned", clip_val=0.01),
    "Fabric, save and load, bf16-mixed": fabric_resumed,
}


@cases(SCRIPTS)
def test_lightning(script: Script, tmp_path: Path):
    assert_equal(script, tmp_path)


READS = r"evicted.*inside `with noria.materialize\(model\):`"
REFUSED: dict[str, tuple[Script, str]] = {
    "Trainer, EMAWeightAveraging": (functools.partial(averaged, kind=EMAWeightAveraging), READS),
    "Trainer, StochasticWeightAveraging": (functools.partial(averaged_late, kind=StochasticWeightAveraging), READS),
    "Trainer, BackboneFinetuning": (functools.partial(unfrozen_late, kind=BackboneFinetuning), READS),
    "Trainer, fit twice": (fit_twice, r"expected a model that is not wrapped, .*noria.unwrap it first"),
    "Fabric, bf16-true, wrapped before setup": (
        functools.partial(fabric, place="before", precision="bf16-true"),
        r"expected no change of dtype after noria.wrap, .*change dtypes before noria.wrap",
    ),
}


@pytest.mark.parametrize(("script", "words"), [pytest.param(*each, id=name) for name, each in REFUSED.items()])
def test_refused(script: Script, words: str, tmp_path: Path):
    script(Run(False, tmp_path))
    with pytest.raises((RuntimeError, noria.UsageError), match=words):
        script(Run(True, tmp_path))
