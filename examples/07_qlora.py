"""QLoRA: adapters train over a base in four bits that streams. Nothing is downloaded.

    python examples/07_qlora.py
    python examples/07_qlora.py --model ~/models/llama --text my.txt --device-memory 6GiB

It needs `pip install transformers accelerate peft bitsandbytes`. Without arguments the base is a fresh Llama of 26 M
parameters, and the adapters learn Python's own sources. Before it trains it says what will fit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import noria
import torch
from noria.integrations.transformers import NoriaTrainer
from peft import LoraConfig, get_peft_model
from text import Tokenizer, load_text
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)


def main() -> None:
    args = parse_arguments()
    text = args.text.read_text() if args.text else load_text(300_000)
    if args.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
        tokens = torch.tensor(tokenizer(text)["input_ids"])
        base = quantised(args.model)
    else:
        learned = Tokenizer(text, vocab_size=2048)
        tokens = learned.encode(text)
        fresh(learned.vocab_size).save_pretrained(args.out / "base")
        base = quantised(args.out / "base")
    torch.manual_seed(0)
    lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    model.print_trainable_parameters()
    policy = {"device_memory": args.device_memory}
    trained = [p for p in model.parameters() if p.requires_grad]
    print(noria.plan(model, torch.optim.AdamW(trained), **policy))  # what will fit
    trainer = NoriaTrainer(
        model,
        TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            seed=0,
        ),
        train_dataset=rows(tokens, args.context),
        noria=policy,  # <- the one new line, beside the class's name
    )
    trainer.train()
    trainer.save_model()  # the adapters alone
    print(f"saved {args.out}: PeftModel.from_pretrained(base, {str(args.out)!r}) loads the adapters")


def fresh(vocab_size: int) -> nn.Module:
    """A model that has learned nothing yet, so that the example needs no download."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def quantised(folder: Path) -> nn.Module:
    """Reads a base in four bits, on the CPU: a model that is larger than the device must not go there."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu", local_files_only=True
    )


def rows(tokens: torch.Tensor, length: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of the text, each its own labels."""
    pieces = tokens[: len(tokens) // length * length].view(-1, length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory; default: a fresh model")
    parser.add_argument("--text", type=Path, help="a text file; default: Python's own sources")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device-memory", default="16MiB", help='"8GiB"')
    parser.add_argument("--out", type=Path, default=Path("build/qlora"), help="where the adapters go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
