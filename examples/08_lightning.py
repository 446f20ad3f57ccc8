"""Trains a GPT with Lightning: the module as it is, and noria as the Trainer's strategy. Nothing is downloaded.

    python examples/08_lightning.py              # the window holds a few of 12 blocks
    python examples/08_lightning.py --devices 2  # two processes share the model

It needs `pip install lightning`. One process says what will fit before it trains.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import noria
import torch
from gpt import GPT, GPTConfig
from noria.integrations.lightning import NoriaEMA, NoriaStrategy
from text import Tokenizer, load_text
from torch.utils.data import DataLoader, TensorDataset


class Language(L.LightningModule):
    def __init__(self, config: GPTConfig, lr: float) -> None:
        super().__init__()
        self.model = GPT(config)
        self.lr = lr

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("held_out", self.loss_of(batch), prog_bar=True)

    def loss_of(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return self.model(inputs, targets)[1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Report(L.Callback):
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            print(noria.report(pl_module))


def main() -> None:
    args = parse_arguments()
    L.seed_everything(0)
    text = load_text(args.text_bytes)
    tokenizer = Tokenizer(text, vocab_size=args.vocab)
    config = GPTConfig(
        vocab_size=tokenizer.vocab_size, context=args.context, num_layers=args.layers, num_heads=4, width=args.width
    )
    module = Language(config, args.lr)
    if args.devices == 1:
        print(noria.plan(module, module.configure_optimizers(), device_memory=args.device_memory))  # what will fit
    tokens = tokenizer.encode(text)
    cut = len(tokens) * 9 // 10
    trainer = L.Trainer(
        strategy=NoriaStrategy(device_memory=args.device_memory),  # <- the one new line
        devices=args.devices,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        limit_val_batches=2,
        callbacks=[NoriaEMA(decay=0.99), Report()],
        default_root_dir=args.out,
        logger=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, windows(tokens[:cut], args, shuffle=True), windows(tokens[cut:], args), ckpt_path=args.resume)


def windows(tokens: torch.Tensor, args: argparse.Namespace, shuffle: bool = False) -> DataLoader[Any]:
    """Inputs and targets, one token later."""
    rows = tokens[: (len(tokens) - 1) // args.context * args.context + 1]
    data = TensorDataset(rows[:-1].view(-1, args.context), rows[1:].view(-1, args.context))
    return DataLoader(data, batch_size=args.batch, shuffle=shuffle)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--device-memory", default="16MiB", help='"8GiB"')
    parser.add_argument("--text-bytes", type=int, default=300_000, help="of Python's own sources")
    parser.add_argument("--out", type=Path, default=Path("build/lightning"), help="where checkpoints go")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    return parser.parse_args()


if __name__ == "__main__":
    main()
