"""A GPT in pipeline stages: the first has more to remember than it has room for, and the last lends it what it lacks.

    torchrun --nproc-per-node 2 examples/05_pipeline_d2d.py

Under 1F1B stage i of n has n - i micro-batches in flight. All have the same `activation_memory`, less than the first
one needs and more than the last one does. First the same stages train by plain PyTorch, without any limit. Then noria
trains them, and has to repeat every loss and all weights bit for bit. The exit status is 1 if it does not.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

# Both must be set before torch is loaded; the processes share the cores, and CUDA shall give the same bits every time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import noria
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from noria.testing import first_difference
from text import Tokenizer, batches, load_text
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

CONTEXT, BATCH = 64, 4  # of a micro-batch


@dataclasses.dataclass
class Found:
    """About one stage: what it saved for backward, in the first step and in all, and the first bits that differ."""

    first: dict[str, int]
    saved: dict[str, int]
    difference: str | None


class Stage(nn.Module):
    """One stage's part of a GPT: the first has the embeddings, the last the head, and each as many blocks."""

    def __init__(self, gpt: GPT, rank: int, size: int) -> None:
        super().__init__()
        share = len(gpt.blocks) // size
        self.tokens, self.positions = (gpt.tokens, gpt.positions) if rank == 0 else (None, None)
        self.blocks = gpt.blocks[rank * share : (rank + 1) * share]
        self.norm, self.head = (gpt.norm, gpt.head) if rank == size - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


class Run:
    """Trains this rank's stage; `losses` of all micro-batches so far are the last stage's to know."""

    def __init__(self, name: str, tokens: torch.Tensor, args: argparse.Namespace, grid, device: torch.device) -> None:
        self.name, self.tokens, self.args, self.grid, self.device = name, tokens, args, grid, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.losses: list[torch.Tensor] = []

    def stage(self, model: nn.Module) -> PipelineStage:
        return PipelineStage(model, self.rank, self.size, self.device, group=self.grid["stages"].get_group())

    def train(self, stage: PipelineStage, step: Callable[[], None]) -> None:
        """`step` updates, and clears the gradients."""
        schedule = Schedule1F1B(stage, self.args.micro_batches, loss_fn=loss_of)
        drawn = batches(self.tokens, self.args.micro_batches * BATCH, CONTEXT)  # the same on all ranks
        began = time.perf_counter()
        for number, (inputs, targets) in enumerate(islice(drawn, self.args.steps), start=1):
            losses: list[torch.Tensor] = []
            if self.rank == 0:
                schedule.step(inputs.to(self.device).contiguous())  # torch 2.11 takes no others
            elif self.rank == self.size - 1:
                schedule.step(target=targets.to(self.device), losses=losses)
            else:
                schedule.step()
            step()
            self.losses += [loss.detach().cpu() for loss in losses]
            if number % 5 == 0 or number in (1, self.args.steps):
                mean = torch.stack(losses).detach().mean() if losses else torch.zeros((), device=self.device)
                dist.broadcast(mean, src=self.size - 1)
                speed = number * inputs.numel() / (time.perf_counter() - began)
                say(f"{self.name}: step {number:>3}  loss {mean.item():.4f}  {speed:.0f} tokens/s")


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def say(what: str) -> None:
    if dist.get_rank() == 0:
        print(what, flush=True)


def main() -> int:
    args = parse_arguments()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(device.type == "cuda")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 2 or args.layers % size:
        raise SystemExit(f"--layers {args.layers} for {size} stages: two stages or more, with as many layers each")
    grid = init_device_mesh(device.type, (size, 1), mesh_dim_names=("stages", "replicas"))

    text = load_text(args.text_bytes)
    tokenizer = Tokenizer(text, vocab_size=args.vocab)
    tokens = tokenizer.encode(text)
    torch.manual_seed(0)
    config = GPTConfig(tokenizer.vocab_size, CONTEXT, args.layers, num_heads=args.width // 64, width=args.width)
    model = Stage(GPT(config), rank, size)
    plain = copy.deepcopy(model)
    room = args.activation_memory or default_room(model, args, size)
    say(f"{size} stages of {args.layers // size} blocks on {device.type}, {args.micro_batches} micro-batches")

    twin = Run("plain PyTorch", tokens, args, grid, device)
    train_plain(twin, plain)

    ours = Run("noria", tokens, args, grid, device)
    optimizer = new_optimizer(model)
    stage, optimizer = noria.wrap(  # <- the one call
        ours.stage(model),
        optimizer,
        mesh=grid["replicas"],
        stages=grid["stages"],
        device=device.type,
        kernel="torch",
        activations="auto",
        activation_memory=room,
        trace=args.trace / f"stage{rank}.json" if args.trace else None,
    )
    first: list[dict[str, int]] = []  # what was saved in the first step

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        if not first:  # inside of that `step()` stages have told each other what they need and have
            report = noria.report(stage, write_trace=False)
            first.append(report.saved)
            for loan in report.loans:
                say(f"noria: stage {loan.lender} lends {mib(loan.bytes)} to stage {loan.borrower}")

    ours.train(stage, step)
    report = noria.report(stage)  # writes the trace as well
    names = [f"loss of micro-batch {number}" for number in range(len(ours.losses))]
    difference = first_difference(ours.losses, twin.losses, names)
    if difference is None:
        trained, theirs = model.state_dict(), plain.state_dict()
        difference = first_difference(list(trained.values()), [theirs[name].cpu() for name in trained], list(trained))
    found: list[Any] = [None] * size
    dist.all_gather_object(found, Found(first[0], report.saved, difference))
    is_kept = all_kept(found, report, room, args)
    dist.destroy_process_group()
    return 0 if is_kept else 1


def train_plain(run: Run, model: nn.Module) -> None:
    """The optimizer is on the CPU, as noria's is; on CUDA by way of copies."""
    model.to(run.device)
    masters = {name: p if p.is_cpu else nn.Parameter(p.detach().cpu()) for name, p in model.named_parameters()}
    optimizer = new_optimizer(masters)

    def step() -> None:
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad.cpu()
        optimizer.step()
        model.load_state_dict(masters)  # onto itself, if it is on the CPU
        model.zero_grad()

    run.train(run.stage(model), step)


def new_optimizer(model: nn.Module | dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    parameters = model.values() if isinstance(model, dict) else model.parameters()
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def default_room(model: Stage, args: argparse.Namespace, size: int) -> int:
    """The stages' mean need, and what two blocks save for what is under way; the same on all of them."""
    share = args.layers // size
    kept: dict[int, torch.UntypedStorage] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights and storage.nbytes() >= 64 * 1024:  # noria leaves smaller ones there
            kept[storage.data_ptr()] = storage
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model.blocks[0](torch.zeros(BATCH, CONTEXT, args.width))
    bundle = sum(storage.nbytes() for storage in kept.values())
    return int(bundle * (share * (min(size, args.micro_batches) + 1) / 2 + 2))


def all_kept(found: list[Found], report: noria.Report, room: int, args: argparse.Namespace) -> bool:
    """Prints what each stage had, what was promised, and whether it was kept."""
    say(f"\neach stage has room for {mib(room)}")
    lent = [sum(loan.bytes for loan in report.loans if loan.lender == rank) for rank in range(len(found))]
    for rank, each in enumerate(found):
        saved, before = each.saved, each.first["offloaded"] - each.first["offloaded_to_peers"]
        later = saved["offloaded"] - saved["offloaded_to_peers"] - before
        say(
            f"stage {rank}: saves up to {mib(saved['most_saved'])}; had up to {mib(saved['most_there'])} there, "
            f"{mib(saved['most_at_peers'])} at other stages; lent {mib(lent[rank])}"
        )
        say(
            f"         sent to the host {mib(before)} in the first step, {mib(later)} after it; "
            f"to other stages {mib(saved['offloaded_to_peers'])}"
        )
    lacking = {rank for rank, each in enumerate(found) if each.saved["most_saved"] > room}
    differences = [each.difference for each in found if each.difference is not None]
    fits = all(each.saved["most_there"] + amount <= room for each, amount in zip(found, lent, strict=True))
    promises = [
        (fits, "no stage had more on its device than it has room for, what it lent included"),
        (
            bool(lacking) and lacking == {loan.borrower for loan in report.loans},
            f"stages save more than that ({sorted(lacking)}), and others lent them memory",
        ),
        (
            not differences,
            f"the losses of {args.steps * args.micro_batches} micro-batches, and all weights after them, have the bits "
            "of plain PyTorch without limits",
        ),
    ]
    say("")
    for kept, promise in promises:
        say(f"{'yes' if kept else 'NO '}  {promise}")
    for difference in differences:
        say(f"     {difference}")
    return all(kept for kept, _ in promises)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--layers", type=int, default=16, help="a multiple of the number of stages")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--text-bytes", type=int, default=500_000)
    parser.add_argument("--activation-memory", type=int, help="bytes for what blocks save; default: the stages' mean")
    has_one_each = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as NCCL asks for
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if has_one_each else "cpu")
    parser.add_argument("--trace", type=Path, help="folder for a trace of each stage")
    args = parser.parse_args()
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    sys.exit(main())
