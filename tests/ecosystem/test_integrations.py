"""noria.integrations: each trainer against the framework's own, with the same arguments."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import noria
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from noria.integrations.accelerate import prepare
from noria.integrations.lightning import NoriaEMA, NoriaStrategy
from noria.integrations.transformers import NoriaCallback, NoriaTrainer, NoriaTrainerMixin
from noria.testing import assert_same_bits
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tests.ecosystem import tiny
from tests.ecosystem.harness import POLICY, Run, Script, assert_equal, assert_streamed, cases
from tests.ecosystem.test_trl import arguments


class StreamingSFT(NoriaTrainerMixin, SFTTrainer):
    pass


def trainer(run: Run, model: Any = None, policy: dict[str, Any] | None = None, **more: Any) -> Trainer:
    args = TrainingArguments(**arguments(run.folder, **more))
    data = {"train_dataset": tiny.token_rows(), "eval_dataset": tiny.token_rows(4)}
    given = model or tiny.llama()
    if run.is_wrapped:
        return NoriaTrainer(given, args, **data, noria={**POLICY, **(policy or {})})
    return Trainer(given, args, **data)


def end(run: Run, made: Any) -> None:
    wanted = ("loss", "grad_norm", "eval_loss")
    run.keep("log", [{key: each[key] for key in wanted if key in each} for each in made.state.log_history])
    run.keep_model(made.model)
    if run.is_wrapped:
        assert_streamed(made.model)


def train(run: Run, **more: Any) -> None:
    made = trainer(run, **more)
    made.train()
    end(run, made)


def evaluated_first(run: Run) -> None:
    made = trainer(run, eval_strategy="steps", eval_steps=2)
    run.keep("before", made.evaluate()["eval_loss"])
    made.train()
    end(run, made)


def resumed(run: Run) -> None:
    trainer(run, save_strategy="steps", save_steps=2).train()
    again = trainer(run, max_steps=6)
    again.train(resume_from_checkpoint=str(run.folder / "checkpoint-4"))
    end(run, again)


def sft(run: Run) -> None:
    cls = StreamingSFT if run.is_wrapped else SFTTrainer
    more = {"noria": POLICY} if run.is_wrapped else {}
    config = SFTConfig(**arguments(run.folder, max_length=16))
    made = cls(tiny.llama(), config, train_dataset=tiny.texts(), processing_class=tiny.tokenizer(), **more)
    made.train()
    end(run, made)


def accelerated(run: Run, steps: int = 4, saves: bool = False, **more: Any) -> None:
    accelerator = Accelerator(cpu=True, **more)
    model = tiny.llama()
    optimizer = tiny.adamw(model)
    if run.is_wrapped:
        model, optimizer = prepare(accelerator, model, optimizer, **POLICY)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    for number in range(steps):
        with accelerator.accumulate(model):
            loss = model(**tiny.batch(number * accelerator.num_processes + accelerator.process_index)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                run.keep(f"norm {number}", accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        run.keep(f"loss {number}", loss)
    if saves:
        accelerator.save_state(str(run.folder / "state"))
    run.keep_model(accelerator.unwrap_model(model))
    if run.is_wrapped:
        assert_streamed(accelerator.unwrap_model(model))


class Module(L.LightningModule):
    """Computes its loss from the head's weight in `training_step`, outside of all modules' forwards."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.model = tiny.llama()
        self.automatic_optimization = not manual
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, index: int) -> Any:
        if self.automatic_optimization:
            hidden = self.model.model(input_ids=batch["input_ids"]).last_hidden_state
            logits = hidden @ self.model.lm_head.weight.t()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        else:
            loss = self.model(**batch).loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        return tiny.adamw(self)


def loader(count: int = 8, rank: int = 0, size: int = 1) -> Any:
    return DataLoader([tiny.batch(number * size + rank) for number in range(count)], batch_size=None)


def lightning(
    run: Run,
    manual: bool = False,
    average: bool = False,
    other: str = "auto",
    others: tuple[Any, ...] = (),
    resumes_from: Path | None = None,
    **more: Any,
) -> None:
    strategy = NoriaStrategy(**POLICY) if run.is_wrapped else other
    callbacks: list[Any] = [Streamed()] if run.is_wrapped else []
    if average:
        callbacks.append((NoriaEMA if run.is_wrapped else EMAWeightAveraging)(decay=0.9))
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "default_root_dir": str(run.folder),
        "enable_checkpointing": False,
        **quiet,
        **more,
    }
    module = Module(manual)
    trainer = L.Trainer(**options, strategy=strategy, callbacks=[*callbacks, *others])
    trainer.fit(module, loader(), loader(2), ckpt_path=resumes_from)
    run.keep("losses", module.losses)
    run.keep("validation", {key: float(value) for key, value in trainer.callback_metrics.items()})
    run.keep_model(module)


def resumed_lightning(run: Run) -> None:
    keeper = ModelCheckpoint(run.folder, filename="first")
    begun = Run(run.is_wrapped, run.folder)
    lightning(begun, max_epochs=1, enable_checkpointing=True, others=(keeper,))
    lightning(run, resumes_from=run.folder / "first.ckpt")


class Streamed(L.Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert_streamed(pl_module)


SCRIPTS: dict[str, Script] = {
    "Lightning": lightning,
    "Lightning, clip and accumulation": functools.partial(lightning, gradient_clip_val=0.1, accumulate_grad_batches=2),
    "Lightning, autocast": functools.partial(lightning, precision="bf16-mixed"),
    "Lightning, manual optimization": functools.partial(lightning, manual=True),
    "Lightning, an average of weights": functools.partial(lightning, average=True),
    "Lightning, resumed": resumed_lightning,
    "Trainer": train,
    "Trainer, all options at once": functools.partial(
        train, gradient_accumulation_steps=2, max_grad_norm=0.1, bf16=True, gradient_checkpointing=True
    ),
    "Trainer, adafactor": functools.partial(train, optim="adafactor"),
    "Trainer, evaluated before and meanwhile": evaluated_first,
    "Trainer, resumed": resumed,
    "SFT": sft,
    "accelerate": accelerated,
    "accelerate, autocast and accumulation": functools.partial(
        accelerated, mixed_precision="bf16", gradient_accumulation_steps=2
    ),
}


@cases(SCRIPTS)
def test_integrations(script: Script, tmp_path: Path):
    assert_equal(script, tmp_path)


# ---- checkpoints of 8-bit moments ----

CODED = {**POLICY, "kernel": "fused", "state_dtype": "8bit"}


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_checkpoints_of_the_trainer_keep_codes_and_a_run_goes_on_with_the_same_bits(tmp_path):
    straight = trainer(Run(True, tmp_path), policy=CODED, max_steps=6, save_strategy="steps", save_steps=4)
    straight.train()
    file = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert file["noria"]["moments"] == "8bit" and "exp_avg_codes" in file["state"][0]
    again = trainer(Run(True, tmp_path), policy=CODED, max_steps=6)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same_bits(weights_of(again.model), weights_of(straight.model))
    assert "noria" not in again.optimizer.state_dict()


def test_checkpoints_of_accelerate_keep_codes_and_a_run_goes_on_with_the_same_bits(tmp_path):
    left = []
    for steps in ([0, 1, 2, 3, 4, 5], [4, 5]):
        accelerator = Accelerator(cpu=True)
        model = tiny.llama()
        model, optimizer = prepare(accelerator, model, tiny.adamw(model), **CODED)
        if len(steps) == 2:
            accelerator.load_state(str(tmp_path / "state"))
        for number in steps:
            accelerator.backward(model(**tiny.batch(number)).loss)
            optimizer.step()
            optimizer.zero_grad()
            if number == 3:
                accelerator.save_state(str(tmp_path / "state"))
        left.append(weights_of(model))
    state = torch.load(tmp_path / "state" / "optimizer.bin", weights_only=True)
    assert state["noria"]["moments"] == "8bit" and "exp_avg_codes" in state["state"][0]
    assert_same_bits(left[1], left[0])


def test_accelerate_keeps_masters_of_a_bfloat16_model_unless_the_policy_says_otherwise():
    for fields, wanted in (({}, True), ({"dtype": None}, False)):
        model = tiny.llama(dtype=torch.bfloat16)
        prepare(Accelerator(cpu=True), model, tiny.adamw(model), **POLICY, **fields)
        assert ("masters" in {row.purpose for row in noria.report(model).ledger}) == wanted


def test_checkpoints_of_lightning_keep_codes_and_a_run_goes_on_with_the_same_bits(tmp_path):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    left = []
    for epochs, file in ((1, None), (2, tmp_path / "first.ckpt"), (2, None)):
        module, keeper = Module(), ModelCheckpoint(tmp_path, filename="first" if epochs == 1 else "other")
        fit = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            callbacks=[keeper],
            **quiet,
            strategy=NoriaStrategy(**CODED),
        )
        fit.fit(module, loader(), ckpt_path=file)
        left.append(weights_of(module))
    state = torch.load(tmp_path / "first.ckpt", weights_only=False)["optimizer_states"][0]
    assert state["noria"]["moments"] == "8bit" and "exp_avg_codes" in state["state"][0]
    assert_same_bits(left[1], left[2])


# ---- logs and refusals ----


class Listener(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.logs.append(dict(logs))


def test_other_callbacks_have_norias_numbers(tmp_path: Path):
    listener = Listener()
    made = trainer(Run(True, tmp_path))
    made.add_callback(listener)
    made.train()
    told = [each for each in listener.logs if "loss" in each]
    assert len(told) == 4
    for each in told:
        assert each["noria/fetched_gib"] > 0 and 0 <= each["noria/stalled"] <= 1 and each["noria/peak_device_gib"] > 0
    total = noria.report(made.model)
    fetched = {lane.lane: lane.bytes for lane in total.lanes}["fetch"]
    assert sum(each["noria/fetched_gib"] for each in told) * 2**30 <= fetched


def test_the_callback_alone_tells_later_ones(tmp_path: Path):
    model, listener = tiny.llama(), Listener()
    optimizer = tiny.adamw(model)
    noria.wrap(model, optimizer, **POLICY)
    args = TrainingArguments(**arguments(tmp_path))
    made = Trainer(
        model,
        args,
        train_dataset=tiny.token_rows(),
        optimizers=(optimizer, None),
        callbacks=[NoriaCallback(), listener],
    )
    made.train()
    assert all("noria/stalled" in each for each in listener.logs if "loss" in each)


def test_bfloat16_weights_get_masters_unless_the_policy_says_otherwise(tmp_path: Path):
    for number, (dtype, wanted) in enumerate([("left out", torch.bfloat16), (None, None)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        policy = {} if dtype == "left out" else {"dtype": dtype}
        made = trainer(Run(True, folder), tiny.llama(dtype=torch.bfloat16), policy, max_steps=1)
        made.train()
        assert ("masters" in {row.purpose for row in noria.report(made.model).ledger}) == (wanted is not None)


def test_a_wrong_policy_raises_before_anything_is_built(tmp_path: Path):
    args = TrainingArguments(**arguments(tmp_path))
    for wrong in ({"device_memroy": "1GiB"}, {"window": 0}, "20GiB"):
        with pytest.raises((noria.UsageError, TypeError)):
            NoriaTrainer(tiny.llama(), args, noria=wrong)  # type: ignore[arg-type]


class Fails(L.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if index == 1:
            raise ValueError("no luck")


def quiet(folder: Path, *callbacks: Any, **more: Any) -> L.Trainer:
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": str(folder)} | off | more
    return L.Trainer(strategy=NoriaStrategy(**POLICY), callbacks=list(callbacks), **options)


def test_a_fit_that_raised_leaves_a_module_that_fits_anew(tmp_path: Path):
    module = Module()
    with pytest.raises(ValueError, match="no luck"):
        quiet(tmp_path, Fails()).fit(module, loader())
    assert not noria.is_wrapped(module)
    quiet(tmp_path, Streamed()).fit(module, loader())
    assert len(module.losses) == 9


def test_an_average_from_an_epoch_on_is_read_at_home(tmp_path: Path):
    class ByEpoch(NoriaEMA):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return epoch_idx is not None

    average = ByEpoch(decay=0.5)
    quiet(tmp_path, average, max_epochs=2).fit(Module(), loader(4))
    assert average._latest_update_epoch == 1


def test_a_module_that_is_wrapped_without_its_optimizers_is_refused(tmp_path: Path):
    module = Module()
    noria.wrap(module, **POLICY)
    with pytest.raises(noria.UsageError, match="the strategy wraps both"):
        quiet(tmp_path).fit(module, loader())
    model = noria.wrap(tiny.llama(), **POLICY)
    args = TrainingArguments(**arguments(tmp_path))
    with pytest.raises(noria.UsageError, match="the trainer wraps both"):
        NoriaTrainer(model, args, train_dataset=tiny.token_rows()).train()


# ---- ranks ----


def torchrun(script: str, folder: Path, *more: str) -> None:
    here = Path(__file__).resolve()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(here.parent / script)]
    done = subprocess.run(
        [*command, str(folder), *more],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(here.parents[2])]), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.mark.parametrize("kind", ["plain", "options", "resumed", "accelerate", "lightning"])
def test_two_ranks_have_the_bits_of_ddp(kind: str, tmp_path: Path):
    ends = []
    for which in ("ddp", "noria"):
        folder = tmp_path / which
        folder.mkdir()
        torchrun("two_ranks.py", folder, kind, which)
        ends.append(torch.load(folder / "end.pt"))
    noria.testing.assert_same_bits(ends[1], ends[0])
