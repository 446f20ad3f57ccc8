"""Several processes share one GPT: each has its part of weights and optimizer state at home, and data of its own.

    torchrun --nproc-per-node 2 examples/04_sharded_gpt.py

Kill it at any time; the same line goes on from its last checkpoint, to the bits of a run that was never killed. With
gloo on the CPU, with NCCL if each process has a GPU. The loop is the one of a single process.
"""

from __future__ import annotations

import argparse
import os
from itertools import islice
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded; the processes share the cores

import noria
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from text import Tokenizer, batches, load_text

CONTEXT, BATCH = 64, 4


def main() -> None:
    args = parse_arguments()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # NCCL takes one process for each
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

    def say(what: str) -> None:
        if rank == 0:
            print(what, flush=True)

    text = load_text(args.text_bytes)
    tokenizer = Tokenizer(text, vocab_size=args.vocab)
    tokens = tokenizer.encode(text)
    torch.manual_seed(0)
    model = GPT(GPTConfig(tokenizer.vocab_size, CONTEXT, args.layers, num_heads=args.width // 64, width=args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    say(f"{dist.get_world_size()} ranks share {weight_bytes / 2**20:.1f} MiB of weights, on {device.type}")

    # A third of the weights; on CUDA as much again is left to activations. All ranks say the same, so `device` is a
    # kind, and which GPU is torch's current one.
    budget = weight_bytes // 3 * (2 if device.type == "cuda" else 1)
    model, optimizer = noria.wrap(  # <- the one call
        model, optimizer, device=device.type, device_memory=budget, max_grad_norm=1.0
    )

    begin = 0
    if args.checkpoint.exists():
        saved = noria.load(args.checkpoint, model, optimizer)
        scheduler.load_state_dict(saved["scheduler"])
        begin = saved["step"]
        say(f"resumed after step {begin}")

    # Each rank draws windows of its own; how many it has drawn is its position in the data.
    for step, (inputs, targets) in enumerate(
        islice(batches(tokens, BATCH, CONTEXT, seed=rank), begin, args.steps), start=begin + 1
    ):
        _, loss = model(inputs.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == args.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            say(f"step {step:>4}  loss {mean.item() / dist.get_world_size():.4f}, the mean over the ranks")
        if step % args.save_every == 0 or step == args.steps:
            args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            noria.save(args.checkpoint, model, optimizer, scheduler=scheduler.state_dict(), step=step)
            say(f"step {step:>4}  saved {args.checkpoint}")

    lines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(lines, summary(noria.report(model)))
    for number, line in enumerate(lines):
        say(f"rank {number}: {line}")
    dist.destroy_process_group()


def summary(report: noria.Report) -> str:
    """What one rank has at home, beside the plan, and what it has moved between there and its device."""
    home = [row for row in report.ledger if row.place == "host"]
    taken, planned = sum(row.taken for row in home), sum(row.planned for row in home)
    moved = {lane.lane: lane.bytes / 2**20 for lane in report.lanes}
    return f"{taken} bytes at home, {planned} planned; {moved['fetch']:.1f} MiB fetched, {moved['drain']:.1f} drained"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/sharded_gpt.pt"), help="a path all ranks see")
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--width", type=int, default=192, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--text-bytes", type=int, default=500_000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
