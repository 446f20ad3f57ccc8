"""`make demo`: a GPT learns real text through a window that holds a quarter of it, to the same bits as plain PyTorch.

First a resident twin, plain PyTorch, does a few steps. Then noria trains the model, and has to repeat them bit for bit,
and to fetch exactly what its plan says. The exit status is 1 if it does not.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

# Both must be set before torch is loaded. Threads of torch that wait give their cores to noria's lanes and to
# other programs. Beside busy programs the demo takes many times as long without it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits every time, on CUDA too

import noria
import torch
from gpt import GPT, GPTConfig
from live_view import LiveView, PlainView
from noria.testing import first_difference, on_machine
from text import Tokenizer, batches, load_text
from torch import nn

CONTEXT, BATCH = 64, 4
NUM_UNCOUNTED = 3  # steps after which all kinds of passes are known, and fetches are as planned


def main() -> int:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(device.type == "cuda")

    text = load_text(args.text_bytes)
    tokenizer = Tokenizer(text, vocab_size=args.vocab)
    tokens = tokenizer.encode(text)
    torch.manual_seed(0)
    model = GPT(GPTConfig(tokenizer.vocab_size, CONTEXT, args.layers, num_heads=args.width // 64, width=args.width))
    optimizer = new_optimizer(model.parameters())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    weight_bytes = 4 * num_parameters

    # On CUDA half of device_memory is left to activations; on the CPU all of it is noria's.
    budget = weight_bytes // 4 * (2 if device.type == "cuda" else 1)
    trace = args.out / "trace.json"
    policy = noria.Policy(device=str(device), device_memory=budget, kernel=args.kernel, trace=trace)
    plan = noria.plan(model, optimizer, policy)
    assert plan.arena_bytes <= weight_bytes // 4, "the window would hold more than a quarter of the weights"
    print(f"{num_parameters / 1e6:.1f} M parameters in {len(plan.units)} units, on {device}; {len(tokens)} tokens")
    held = f"{plan.arena_bytes / 2**20:.1f} MiB for weights and gradients, {plan.arena_bytes / weight_bytes:.0%}"
    print(f"the window: {held} of the weights' {weight_bytes / 2**20:.1f} MiB\n")

    with PlainView() if args.plain or not sys.stdout.isatty() else LiveView() as view:
        twin = Twin(model, tokens, args, device, view)
        link, memory = (args.link_gib_s, 20.0), (8 * args.link_gib_s, 0.0)
        with on_machine(limits={"fetch": link, "drain": link, "update": memory}):  # 0: as fast as they are
            model, optimizer = noria.wrap(model, optimizer, policy)  # <- the one call
        view.begin("noria", args.steps, model, [unit.name for unit in plan.units])
        losses, num_fetches = train(model, optimizer, tokens, args, device, view, twin)

    prompt = tokenizer.encode("import ")[None].to(device)
    generator = torch.Generator(device).manual_seed(0)
    generated = model.eval().generate(prompt, args.generate, temperature=0.7, generator=generator)
    print("--- generated " + "-" * 60)
    print(tokenizer.decode(generated[0].cpu()))
    print("-" * 74 + "\n")

    plot = f"{args.out / 'loss.png'}, " if draw_losses(losses, twin.losses, args.out / "loss.png") else ""
    report = noria.report(model)  # writes the trace as well
    print(report)
    print(f"\nwritten: {plot}{trace} (open it in https://ui.perfetto.dev)\n")
    return 0 if all_kept(plan, report, twin, num_fetches, args) else 1


def train(model, optimizer, tokens, args, device, view, twin) -> tuple[list[float], int]:
    """The ordinary loop. Gives the losses, and the fetches of all steps but the first few."""
    scheduler = new_scheduler(optimizer, args.steps)
    losses, num_before = [], 0
    for inputs, targets in islice(batches(tokens, BATCH, CONTEXT), args.steps):
        if len(losses) == NUM_UNCOUNTED:
            num_before = noria.report(model, write_trace=False).num_fetches
        _, loss = model(inputs.to(device), targets.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        view.step(losses[-1], inputs.numel(), twin.compare(losses, model))
    return losses, noria.report(model, write_trace=False).num_fetches - num_before


class Twin:
    """The first steps in plain PyTorch: everything resident, the optimizer on the CPU (on CUDA by way of copies)."""

    def __init__(self, model: nn.Module, tokens: torch.Tensor, args: argparse.Namespace, device, view) -> None:
        self.losses: list[float] = []
        self.differences: list[str] = []
        self.num_steps = args.twin_steps
        if self.num_steps == 0:
            return
        view.begin("plain PyTorch", self.num_steps)
        model = copy.deepcopy(model).to(device)
        resident = dict(model.named_parameters())
        on_cpu = {name: p if p.is_cpu else nn.Parameter(p.detach().cpu()) for name, p in resident.items()}
        optimizer = new_optimizer(on_cpu.values())
        scheduler = new_scheduler(optimizer, args.steps)
        for inputs, targets in islice(batches(tokens, BATCH, CONTEXT), self.num_steps):
            _, loss = model(inputs.to(device), targets.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for name, parameter in resident.items():
                on_cpu[name].grad = parameter.grad.cpu()
            optimizer.step()
            scheduler.step()
            model.load_state_dict(on_cpu)  # onto itself, if it is on the CPU
            model.zero_grad()
            self.losses.append(loss.item())
            view.step(self.losses[-1], inputs.numel())
        self.weights = {name: value.detach() for name, value in on_cpu.items()}

    def compare(self, losses: list[float], model: nn.Module) -> str:
        """After every step; says how it stands."""
        step = len(losses)
        if self.num_steps == 0:
            return ""
        if step <= self.num_steps and losses[-1] != self.losses[step - 1]:
            self.differences.append(f"loss of step {step}: {losses[-1]!r}; the twin's: {self.losses[step - 1]!r}")
        if step == self.num_steps:
            ours = model.state_dict()
            difference = first_difference(list(ours.values()), [self.weights[name] for name in ours], list(ours))
            if difference is not None:
                self.differences.append(f"weights after step {step}: {difference}")
        if self.differences:
            return "BITS DIFFER from plain PyTorch"
        losses_so_far = f"same bits as plain PyTorch: {min(step, self.num_steps)} of {self.num_steps} losses"
        return losses_so_far + (", and then all weights" if step >= self.num_steps else "")


def new_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1)


def new_scheduler(optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Ten steps up, then a cosine down to a tenth."""

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / num_steps)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def all_kept(plan, report, twin: Twin, num_fetches: int, args: argparse.Namespace) -> bool:
    """Prints what was promised and whether it was kept."""
    forward, backward = plan.passes["forward"].num_fetches, plan.passes["backward"].num_fetches
    num_steps = args.steps - NUM_UNCOUNTED
    num_planned = num_steps * (forward + backward)
    promises = [
        (
            num_fetches == num_planned > 0,
            f"{num_fetches} fetches in {num_steps} steps; planned: {num_planned}, {forward} + {backward} in each",
        ),
        (report.ledger_agrees, "memory taken is memory planned, to the byte"),
    ]
    if twin.num_steps:
        exact = f"the first {twin.num_steps} losses, and all weights after them, have the bits of plain PyTorch"
        promises.append((not twin.differences, exact))
    for kept, promise in promises:
        print(f"{'yes' if kept else 'NO '}  {promise}")
    for difference in twin.differences[:3]:
        print(f"     {difference}")
    return all(kept for kept, _ in promises)


def draw_losses(losses: list[float], twin_losses: list[float], path: Path) -> bool:
    """Whether it could: without matplotlib there is no plot."""
    try:
        import matplotlib
    except ImportError:
        return False

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses, label="noria")
    axes.plot(range(1, len(twin_losses) + 1), twin_losses, "k.", markersize=4, label="plain PyTorch, resident")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return True


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--plain", action="store_true", help="no live view (nor is there one without a terminal)")
    parser.add_argument("--kernel", choices=["torch", "fused"], default="torch", help="fused: no twin to compare with")
    parser.add_argument("--link-gib-s", type=float, default=0.0, help="CPU: as if on such a link, memory 8 x as fast")
    parser.add_argument("--twin-steps", type=int, default=20, help="steps to compare with plain PyTorch")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--text-bytes", type=int, default=500_000)
    parser.add_argument("--generate", type=int, default=60, help="tokens to generate at the end")
    args = parser.parse_args()
    args.twin_steps = min(args.twin_steps, args.steps) if args.kernel == "torch" else 0
    if args.steps <= NUM_UNCOUNTED:
        parser.error(f"--steps {NUM_UNCOUNTED + 1} or more: fetches of the first {NUM_UNCOUNTED} are not counted")
    return args


if __name__ == "__main__":
    sys.exit(main())
