"""Fine-tunes a Hugging Face causal language model from a local directory or a config file; nothing is downloaded.

    python examples/03_hf_finetune.py --model ~/models/llama --text my.txt --bf16 --device-memory 8GiB
    python examples/03_hf_finetune.py --model config.json --steps 50          # a fresh model, Python's own sources

The loop is the one from PyTorch's tutorials: micro-batches, clipping, a schedule, evaluation, generation, checkpoints.
Only the marked line is noria's, and noria.save and noria.load.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import noria
import torch
from text import Tokenizer, batches, load_text
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup


def main() -> None:
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    model = load_model(args.model)
    encode, decode = load_tokenizer(args.model, args.text, model.config.vocab_size)
    tokens = encode(args.text)
    learned, held_out = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    if args.gradient_checkpointing:
        # transformers 5 has renamed it
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    model, optimizer = noria.wrap(  # <- the one call
        model,
        optimizer,
        device=device,
        device_memory=args.device_memory,
        dtype=torch.bfloat16 if args.bf16 else None,
    )
    begin = 0
    if args.resume:
        saved = noria.load(args.resume, model, optimizer)
        scheduler.load_state_dict(saved["scheduler"])
        begin = saved["step"]
        print(f"resumed after step {begin}")

    micro_batches = batches(learned, args.batch, args.context, seed=args.seed)
    micro_batches = islice(micro_batches, begin * args.accumulate, None)
    for step in range(begin + 1, args.steps + 1):
        model.train()
        mean_loss = 0.0
        for inputs, _ in islice(micro_batches, args.accumulate):
            inputs = inputs.to(device)
            loss = model(input_ids=inputs, labels=inputs, use_cache=False).loss / args.accumulate
            loss.backward()
            mean_loss += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step:>4}  loss {mean_loss:.4f}  gradient norm {norm:.3f}  lr {scheduler.get_last_lr()[0]:.2e}")
        if step % args.eval_every == 0 or step == args.steps:
            print(f"step {step:>4}  held-out loss {evaluate(model, held_out, args, device):.4f}")
        if args.out and (step % args.save_every == 0 or step == args.steps):
            args.out.mkdir(parents=True, exist_ok=True)
            path = args.out / f"step{step}.pt"
            noria.save(path, model, optimizer, scheduler=scheduler.state_dict(), step=step)
            print(f"step {step:>4}  saved {path}")

    model.eval()
    prompt = encode(args.prompt)[None].to(device)
    settings = {"do_sample": False, "max_new_tokens": args.generate, "pad_token_id": 0}
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    print(f"--- generated\n{decode(generated[0].cpu())}\n---")
    print(noria.report(model))


@torch.no_grad()
def evaluate(model: torch.nn.Module, tokens: torch.Tensor, args: argparse.Namespace, device: str) -> float:
    """Mean loss over a few windows, the same ones every time."""
    model.eval()
    losses = []
    for inputs, _ in islice(batches(tokens, args.batch, args.context, seed=1), 4):
        inputs = inputs.to(device)
        losses.append(model(input_ids=inputs, labels=inputs, use_cache=False).loss.item())
    return sum(losses) / len(losses)


def load_model(path: Path) -> torch.nn.Module:
    """Pretrained weights if the directory has them, else fresh ones of that config."""
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    if has_weights:
        return AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True))


def load_tokenizer(path: Path, text: str, vocab_size: int):
    """The model's own tokenizer if its directory has one, else one learned from the text: (encode, decode)."""
    if path.is_dir() and any(path.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        return lambda text: tokenizer(text, return_tensors="pt").input_ids[0], tokenizer.decode
    own = Tokenizer(text, vocab_size=min(vocab_size, 4096))
    return own.encode, own.decode


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model directory, or a config JSON")
    parser.add_argument("--text", type=Path, help="a text file; default: Python's own sources")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 with fp32 masters")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--device-memory", default="auto", help='"8GiB"')
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--out", type=Path, help="where checkpoints go; none are written without it")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from; give the same other arguments again")
    parser.add_argument("--prompt", default="import ")
    parser.add_argument("--generate", type=int, default=40)
    args = parser.parse_args()
    args.text = args.text.read_text() if args.text else load_text(1_000_000)
    return args


if __name__ == "__main__":
    main()
