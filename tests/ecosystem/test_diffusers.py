"""diffusers' models and helpers, on the CPU."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import noria
import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, DiTTransformer2DModel, UNet2DConditionModel, UNet2DModel
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from torch import nn

from tests.ecosystem.harness import Run, Script, assert_equal, cases

CLASSES = 10


@contextlib.contextmanager
def always_the_same() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


SIZES: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}


def unet() -> UNet2DModel:
    """Down and up again, with attention half-way: noria finds its units in a tree of unlike blocks."""
    with always_the_same():
        return UNet2DModel(
            **SIZES,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
        )


def conditional_unet() -> UNet2DConditionModel:
    """As Stable Diffusion's: its attention looks at a text, too."""
    with always_the_same():
        return UNet2DConditionModel(
            **SIZES,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=8,
            attention_head_dim=2,
        )


def texts() -> torch.Tensor:
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(9))


def dit() -> DiTTransformer2DModel:
    """Four blocks, which the class and the time step modulate."""
    with always_the_same():
        return DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=1,
            num_layers=4,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=CLASSES,
        )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def step(run: Run, model: Any, optimizer: torch.optim.Optimizer, number: int, name: str = "loss") -> None:
    """One step of denoising, as diffusers' examples write it."""
    generator = torch.Generator().manual_seed(number)
    images, noise = torch.randn(2, 2, 1, 8, 8, generator=generator)
    times = torch.randint(CLASSES, (2,), generator=generator)
    noisy = DDPMScheduler(num_train_timesteps=CLASSES).add_noise(images, noise, times)
    given = {}
    if isinstance(model, DiTTransformer2DModel):
        given = {"class_labels": torch.tensor([1, 2])}
    elif isinstance(model, UNet2DConditionModel):
        given = {"encoder_hidden_states": texts()}
    loss = nn.functional.mse_loss(model(noisy, times, **given).sample, noise)
    loss.backward()
    run.keep(f"{name} {number}.norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    optimizer.zero_grad()
    run.keep(f"{name} {number}", loss)


def transformer(run: Run, checkpoints: bool = False) -> None:
    model = dit()
    if checkpoints:
        model.enable_gradient_checkpointing()
    optimizer = adamw(model)
    run.wrap(model, optimizer)
    model.train()
    for number in range(4):
        step(run, model, optimizer, number)
    run.keep_model(model)


def saved(run: Run) -> None:
    """Files are written in the middle, in shards. Another model is read from them, and goes on."""
    model = unet()
    optimizer = adamw(model)
    run.wrap(model, optimizer)
    for number in range(2):
        step(run, model, optimizer, number)
    model.save_pretrained(run.folder, max_shard_size="20KB")
    assert len(list(run.folder.glob("*.safetensors"))) > 1
    again = UNet2DModel.from_pretrained(run.folder).train()
    run.keep_model(again, "read")
    optimizer = adamw(again)
    run.wrap(again, optimizer)
    for number in range(2, 4):
        step(run, again, optimizer, number)
    run.keep_model(again)


def sampled(run: Run) -> None:
    """A pipeline samples images between steps, and saves itself."""
    model = unet()
    optimizer = adamw(model)
    run.wrap(model, optimizer)
    pipeline = DDPMPipeline(model, DDPMScheduler(num_train_timesteps=CLASSES))
    pipeline.set_progress_bar_config(disable=True)
    for number in range(3):
        step(run, model, optimizer, number)
        generator = torch.Generator().manual_seed(number)
        images = pipeline(batch_size=2, generator=generator, num_inference_steps=4, output_type="pt").images
        run.keep(f"images {number}", torch.as_tensor(images))
        model.train()
    pipeline.save_pretrained(run.folder)
    run.keep_model(DDPMPipeline.from_pretrained(run.folder).unet)


def adapted(run: Run) -> None:
    """LoRA is injected into a frozen model with cross attention. The adapter is saved, and read into another model."""
    model = conditional_unet().requires_grad_(False)
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    optimizer = adamw(model)
    run.wrap(model, optimizer)
    for number in range(4):
        step(run, model, optimizer, number)
    run.keep_model(model)
    model.save_lora_adapter(run.folder)
    again = conditional_unet()
    again.load_lora_adapter(run.folder, prefix=None, weight_name="pytorch_lora_weights.safetensors")
    for name, each in (("trained", model), ("read", again)):
        for is_on in (True, False):
            (each.enable_adapters if is_on else each.disable_adapters)()
            with torch.no_grad():
                run.keep(f"{name}, {is_on}", each(torch.ones(1, 1, 8, 8), 3, texts()[:1]).sample)


def averaged(run: Run, is_materialized: bool = True, **how: Any) -> None:
    """Averages the weights after each step, and looks at the average half-way."""

    def readable() -> Any:
        is_needed = is_materialized and noria.is_wrapped(model)
        return noria.materialize(model) if is_needed else contextlib.nullcontext()

    model = unet()
    optimizer = adamw(model)
    average = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config, **how)
    run.wrap(model, optimizer)
    for number in range(4):
        step(run, model, optimizer, number)
        with readable():
            average.step(model.parameters())
        if number == 2:
            with readable():
                average.store(model.parameters())
                average.copy_to(model.parameters())
            with torch.no_grad():
                run.keep("with the average", model(torch.ones(1, 1, 8, 8), 3).sample)
            with readable():
                average.restore(model.parameters())
    run.keep("average", average.shadow_params)
    average.save_pretrained(run.folder)
    run.keep_model(UNet2DModel.from_pretrained(run.folder), "read")
    run.keep_model(model)


SCRIPTS: dict[str, Script] = {
    "DiT": transformer,
    "DiT, checkpointing": functools.partial(transformer, checkpoints=True),
    "UNet, save_pretrained and from_pretrained": saved,
    "UNet, sampled by a DDPM pipeline": sampled,
    "UNet, LoRA": adapted,
    "UNet, EMAModel inside materialize": averaged,
    "UNet, EMAModel inside materialize, foreach": functools.partial(averaged, foreach=True),
}


@cases(SCRIPTS)
def test_diffusers(script: Script, tmp_path: Path):
    assert_equal(script, tmp_path)


def test_average_wants_materialize(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"with noria.materialize\(model\)"):
        averaged(Run(True, tmp_path), is_materialized=False)
