"""Trains a diffusion transformer of diffusers on drawn letters, and lets it write a word. Nothing is downloaded.

    python examples/09_diffusion.py
    python examples/09_diffusion.py --steps 2000 --width 384 --device-memory 32MiB

It needs `pip install diffusers pillow`. The loop is that of diffusers' own examples, and `noria.wrap` is the one new
line. Before it trains it says what will fit.
"""

from __future__ import annotations

import argparse
import string
import time
from pathlib import Path

import noria
import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel
from PIL import Image, ImageDraw, ImageFont
from torch import nn

LETTERS = string.ascii_letters + string.digits
HEADS = 4


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    if args.resume:
        model = DiTTransformer2DModel.from_pretrained(args.resume, local_files_only=True).train()
    else:
        model = fresh(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    print(noria.plan(model, optimizer, device_memory=args.device_memory))  # what will fit
    model, optimizer = noria.wrap(model, optimizer, device_memory=args.device_memory)  # <- the one new line
    scheduler = DDPMScheduler(num_train_timesteps=args.noise_levels)
    images = torch.stack([drawn(letter, args.size) for letter in LETTERS])
    torch.manual_seed(0)
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        labels = torch.randint(len(LETTERS), (args.batch,))
        noise = torch.randn_like(images[labels])
        times = torch.randint(args.noise_levels, (args.batch,))
        noisy = scheduler.add_noise(images[labels], noise, times)
        found = model(noisy.to(model.device), times.to(model.device), class_labels=labels.to(model.device)).sample
        loss = nn.functional.mse_loss(found, noise.to(model.device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:4}  loss {loss.item():.4f}  {time.perf_counter() - began:6.1f} s", flush=True)
    print(noria.report(model))

    args.out.mkdir(parents=True, exist_ok=True)
    picture(written(model, scheduler, args)).save(args.out / "word.png")
    model.save_pretrained(args.out)
    print(f"saved {args.out}: word.png, and a model that from_pretrained loads, with noria or without")


def fresh(args: argparse.Namespace) -> nn.Module:
    return DiTTransformer2DModel(
        sample_size=args.size,
        patch_size=2,
        in_channels=1,
        num_layers=args.layers,
        num_attention_heads=HEADS,
        attention_head_dim=args.width // HEADS,
        num_embeds_ada_norm=len(LETTERS),
    )


def drawn(letter: str, size: int) -> torch.Tensor:
    """A letter in white on black: float32 [1, size, size], from -1 to 1."""
    image = Image.new("L", (size, size))
    font = ImageFont.load_default(size=size)
    ImageDraw.Draw(image).text((size // 2, size // 2), letter, fill=255, font=font, anchor="mm")
    return torch.tensor(list(image.tobytes()), dtype=torch.float32).view(1, size, size) / 127.5 - 1


@torch.no_grad()
def written(model: nn.Module, scheduler: DDPMScheduler, args: argparse.Namespace) -> torch.Tensor:
    """Images of the word's letters, out of noise, through the same window: float32 [letters, 1, size, size]."""
    model.eval()
    labels = torch.tensor([LETTERS.index(letter) for letter in args.word], device=model.device)
    images = torch.randn(len(labels), 1, args.size, args.size)
    scheduler.set_timesteps(args.sampling_steps)
    for at in scheduler.timesteps:
        times = at.expand(len(labels)).to(model.device)
        noise = model(images.to(model.device), times, class_labels=labels).sample.cpu()
        images = scheduler.step(noise, at, images).prev_sample
    return images


def picture(images: torch.Tensor) -> Image.Image:
    """The images side by side, four times as large."""
    number, _, height, width = images.shape
    row = (images.clamp(-1, 1) * 127.5 + 127.5).byte().permute(1, 2, 0, 3).reshape(height, number * width)
    return Image.fromarray(row.numpy()).resize((4 * number * width, 4 * height), Image.Resampling.NEAREST)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=16, help="of an image, in pixels")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128, help=f"a multiple of {HEADS}")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--noise-levels", type=int, default=1000)
    parser.add_argument("--sampling-steps", type=int, default=25)
    parser.add_argument("--word", default="noria", help="of letters and digits")
    parser.add_argument("--device-memory", default="4MiB", help='"8GiB"')
    parser.add_argument("--out", type=Path, default=Path("build/diffusion"), help="where the picture and the model go")
    parser.add_argument("--resume", type=Path, help="a model that was saved, to go on from")
    return parser.parse_args()


if __name__ == "__main__":
    main()
