"""Supervised fine-tuning with TRL: the trainer as it is, and noria by one base class. Nothing is downloaded.

    python examples/06_trainer.py
    python examples/06_trainer.py --model ~/models/llama --text my.txt --device-memory 20GiB

It needs `pip install trl`. Without arguments it trains a fresh Llama of 11 M parameters on Python's own sources. Under
torchrun the processes share the model. In one process it says what will fit before it trains.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import noria
import torch
from datasets import Dataset
from noria.integrations.transformers import NoriaTrainerMixin
from text import Tokenizer, load_text
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


class StreamingSFT(NoriaTrainerMixin, SFTTrainer):
    """TRL's trainer; its model streams."""


def main() -> None:
    args = parse_arguments()
    text = args.text.read_text() if args.text else load_text(300_000)
    model, tokenizer = load(args.model, text)
    policy = {"device_memory": args.device_memory}
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        print(noria.plan(model, torch.optim.AdamW(model.parameters()), dtype=masters_of(model), **policy))
    trainer = StreamingSFT(
        model,
        SFTConfig(
            output_dir=str(args.out),
            max_steps=args.steps,
            max_length=args.context,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=args.lr,
            logging_steps=1,
            save_steps=args.steps,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            seed=0,
        ),
        train_dataset=Dataset.from_list([{"text": piece} for piece in pieces(text)]),
        processing_class=tokenizer,
        noria=policy,
    )
    trainer.train(resume_from_checkpoint=args.resume)
    print(f"saved {args.out}/checkpoint-{args.steps}: from_pretrained loads it, with noria or without")


def masters_of(model: torch.nn.Module) -> torch.dtype | None:
    """The dtype= that the trainer gives to noria: a bfloat16 model gets fp32 masters."""
    return torch.bfloat16 if model.dtype is torch.bfloat16 else None


def load(path: Path | None, text: str) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """A local model directory, or a fresh model and a tokenizer that is learned from the text."""
    if path is not None:
        return (
            AutoModelForCausalLM.from_pretrained(path, local_files_only=True),
            AutoTokenizer.from_pretrained(path, local_files_only=True),
        )
    learned = Tokenizer(text, vocab_size=2046)._bpe
    learned.add_special_tokens(["<pad>", "<eos>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learned, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=12,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


def pieces(text: str, length: int = 800) -> list[str]:
    return [text[begin : begin + length] for begin in range(0, len(text), length)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory; default: a fresh model")
    parser.add_argument("--text", type=Path, help="a text file; default: Python's own sources")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--device-memory", default="16MiB", help='"8GiB"')
    parser.add_argument("--out", type=Path, default=Path("build/trainer"), help="where checkpoints go")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    return parser.parse_args()


if __name__ == "__main__":
    main()
