"""Loops of one's own with accelerate, on the CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import noria
import pytest
import torch
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import find_executable_batch_size
from torch.utils.data import DataLoader

from tests.ecosystem import tiny
from tests.ecosystem.harness import POLICY, Run, Script, assert_equal, cases


def accelerate(**more: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the process
    GradientState._reset_state()
    return Accelerator(cpu=True, **more)


def as_half(accelerator: Accelerator) -> Accelerator:
    """Gives it what mixed_precision="fp16" gives where there is a GPU: autocast, and a scaler."""
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return accelerator


def prepared(run: Run, accelerator: Accelerator, order: str = "before") -> tuple[Any, Any]:
    """The three places for the call of noria.wrap."""
    model = tiny.llama()
    optimizer: Any = tiny.adamw(model)
    if order == "before":
        run.wrap(model, optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    if order == "inner":
        run.wrap(accelerator.unwrap_model(model), optimizer.optimizer)
    if order == "after":
        model, optimizer = run.wrap(model, optimizer)
    return model, optimizer


def losses(run: Run, accelerator: Accelerator, model: Any, optimizer: Any, steps: range, clip: str = "none") -> None:
    for step in steps:
        loss = model(**tiny.batch(step)).loss
        accelerator.backward(loss)
        if clip == "norm":
            run.keep(f"norm {step}", accelerator.clip_grad_norm_(model.parameters(), 0.5))
        if clip == "value":
            accelerator.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        run.keep(f"loss {step}", loss)


def plain_loop(run: Run, order: str = "before", clip: str = "none", **more: Any) -> None:
    accelerator = accelerate(**more)
    model, optimizer = prepared(run, accelerator, order)
    losses(run, accelerator, model, optimizer, range(4), clip)
    run.keep_model(accelerator.unwrap_model(model))


def accumulated(run: Run) -> None:
    """A loader whose last batch ends an accumulation early, a schedule, and a clip where gradients are whole."""
    accelerator = accelerate(gradient_accumulation_steps=3)
    model = tiny.llama()
    optimizer: Any = tiny.adamw(model)
    run.wrap(model, optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in tiny.token_rows()]
    loader = DataLoader(rows, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for epoch in range(2):
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    run.keep(f"norm {epoch} {number}", accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            run.keep(f"loss {epoch} {number}", loss)
    run.keep("rate", schedule.get_last_lr())
    run.keep_model(accelerator.unwrap_model(model))


def saved_and_loaded(run: Run) -> None:
    """Training goes back to a state that it has saved."""
    accelerator = accelerate()
    model, optimizer = prepared(run, accelerator)
    losses(run, accelerator, model, optimizer, range(2))
    accelerator.save_state(str(run.folder))
    losses(run, accelerator, model, optimizer, range(2, 4))
    accelerator.load_state(str(run.folder))
    losses(run, accelerator, model, optimizer, range(4, 7))
    run.keep("optimizer", optimizer.state_dict()["state"])
    run.keep_model(accelerator.unwrap_model(model))


def crosswise(run: Run, is_first_wrapped: bool) -> None:
    """One run saves its state, and another loads it. Only one of the two has noria."""
    for number, steps in enumerate([range(3), range(3, 6)]):
        accelerator = accelerate()
        model = tiny.llama()
        optimizer: Any = tiny.adamw(model)
        if (number == 0) == is_first_wrapped:
            run.wrap(model, optimizer)
        model, optimizer = accelerator.prepare(model, optimizer)
        if number == 1:
            accelerator.load_state(str(run.folder))
        losses(run, accelerator, model, optimizer, steps)
        if number == 0:
            accelerator.save_state(str(run.folder))
    run.keep("optimizer", optimizer.state_dict()["state"])
    run.keep_model(model)


def saved_in_shards(run: Run) -> None:
    """The files are read by accelerate's own loader, into a model without noria."""
    accelerator = accelerate()
    model, optimizer = prepared(run, accelerator)
    losses(run, accelerator, model, optimizer, range(3))
    accelerator.save_model(model, str(run.folder), max_shard_size="30KB")
    files = sorted(each.name for each in run.folder.glob("*.safetensors"))
    assert len(files) > 2
    run.keep("files", len(files))
    fresh = tiny.llama()
    load_checkpoint_in_model(fresh, str(run.folder))
    run.keep_model(fresh)


def unwrapped_in_the_middle(run: Run) -> None:
    """The objects that accelerate has prepared train on without noria, and then with it again."""
    accelerator = accelerate()
    model, optimizer = prepared(run, accelerator, "after")
    losses(run, accelerator, model, optimizer, range(3), "norm")
    run.unwrap(model, optimizer)
    losses(run, accelerator, model, optimizer, range(3, 5), "norm")
    run.wrap(model, optimizer)
    losses(run, accelerator, model, optimizer, range(5, 8), "norm")
    run.keep("optimizer", optimizer.state_dict()["state"])
    run.keep_model(model)


def freed_between(run: Run) -> None:
    """Two trainings in one process, with free_memory between them."""
    accelerator = accelerate()
    for number in range(2):
        model, optimizer = prepared(run, accelerator)
        losses(run, accelerator, model, optimizer, range(3 * number, 3 * number + 3))
        run.keep_model(model, f"model {number}")
        model, optimizer = accelerator.free_memory(model, optimizer)
        assert model is None and optimizer is None


def distilled(run: Run) -> None:
    """A student learns from a teacher that streams, too, in half precision."""
    accelerator = accelerate()
    teacher = run.wrap(tiny.llama(dtype=torch.bfloat16).requires_grad_(False).eval())
    student, optimizer = prepared(run, accelerator)
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    for step in range(4):
        batch = tiny.batch(step)
        with torch.no_grad():
            wanted = teacher(input_ids=batch["input_ids"]).logits.float().softmax(-1)
        ours = student(**batch)
        loss = ours.loss + torch.nn.functional.cross_entropy(ours.logits.flatten(0, 1), wanted.flatten(0, 1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.keep(f"loss {step}", loss)
    run.keep_model(student)


def smaller_batches(run: Run, is_model_kept: bool) -> None:
    """A forward runs out of memory in the middle; accelerate calls again with half the rows."""
    accelerator = accelerate()
    outer = prepared(run, accelerator) if is_model_kept else None

    @find_executable_batch_size(starting_batch_size=4)
    def train(rows: int) -> Any:
        if outer is None:
            accelerator.free_memory()
        model, optimizer = outer or prepared(run, accelerator)

        def fill(*_: Any) -> None:
            if rows > 2:
                raise RuntimeError("CUDA out of memory.")

        for step in range(4):
            hook = model.model.layers[2].register_forward_hook(fill) if step == 1 else None
            try:
                loss = model(**tiny.batch(step, rows)).loss
            finally:
                if hook is not None:
                    hook.remove()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.keep(f"loss of {rows} {step}", loss)
        return model

    run.keep_model(train())


def scaled(run: Run, clip: str = "none") -> None:
    """As mixed_precision="fp16": the loss is scaled, and a step whose gradients overflow is skipped."""
    accelerator = as_half(accelerate(mixed_precision="fp16"))
    model, optimizer = prepared(run, accelerator)
    for step in range(6):
        loss = model(**tiny.batch(step)).loss
        accelerator.backward(loss * (1e38 if step == 3 else 1))
        if clip == "norm":
            run.keep(f"norm {step}", accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped == (step == 3)
        run.keep(f"loss {step}", loss)
        run.keep(f"scale {step}", accelerator.scaler.get_scale())
    run.keep_model(accelerator.unwrap_model(model))


SCRIPTS: dict[str, Script] = {
    "wrap, then prepare": plain_loop,
    "prepare, then wrap what is inside": functools.partial(plain_loop, order="inner"),
    "wrap(*prepare())": functools.partial(plain_loop, order="after"),
    "accumulate": accumulated,
    "clip norm": functools.partial(plain_loop, clip="norm"),
    "clip value": functools.partial(plain_loop, clip="value"),
    "bf16, wrap before": functools.partial(plain_loop, clip="norm", mixed_precision="bf16"),
    "bf16, wrap after": functools.partial(plain_loop, order="after", clip="norm", mixed_precision="bf16"),
    "save_state, load_state": saved_and_loaded,
    "a plain run's state, loaded with noria": functools.partial(crosswise, is_first_wrapped=False),
    "noria's state, loaded by a plain run": functools.partial(crosswise, is_first_wrapped=True),
    "save_model in shards": saved_in_shards,
    "unwrap in the middle": unwrapped_in_the_middle,
    "free_memory": freed_between,
    "a student and a streamed teacher": distilled,
    "find_executable_batch_size": functools.partial(smaller_batches, is_model_kept=False),
    "find_executable_batch_size, one model": functools.partial(smaller_batches, is_model_kept=True),
    "a scaler that skips a step": scaled,
    "a scaler that skips a step, clip norm": functools.partial(scaled, clip="norm"),
}


@cases(SCRIPTS)
def test_accelerate(script: Script, tmp_path: Path):
    assert_equal(script, tmp_path)


def scaled_without_noria() -> tuple[Accelerator, Any, Any]:
    accelerator = as_half(accelerate(mixed_precision="fp16"))
    model = tiny.llama()
    return accelerator, *accelerator.prepare(model, tiny.adamw(model))


def test_a_scaler_is_refused_after_prepare():
    """accelerate's optimizer has then kept the step that noria would replace."""
    _, model, optimizer = scaled_without_noria()
    with pytest.raises(noria.UsageError, match=r"\(AcceleratedOptimizer\) that has kept some") as caught:
        noria.wrap(model, optimizer, **POLICY)
    assert "give noria.wrap the optimizer itself, before the AcceleratedOptimizer is made" in str(caught.value)
    assert not noria.is_wrapped(model)


def test_a_scalers_old_step_changes_nothing():
    """The optimizer inside does not show that accelerate has kept its step. That step then raises."""
    accelerator, model, optimizer = scaled_without_noria()
    noria.wrap(model, optimizer.optimizer, **POLICY)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.backward(model(**tiny.batch(0)).loss)
    with pytest.raises(RuntimeError, match=r"noria expected .* keeps its step\(\)"):
        optimizer.step()
    noria.testing.assert_same_bits(dict(model.state_dict()), before)
