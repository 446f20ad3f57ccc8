"""What does it take to undo a draft, over a whole run?

Three models learn the source of Python's standard library with drafts of all units: a GPT, a recurrent network, and a
convolutional network that removes noise. The GPT does so with each rule and format of the moments. Before each step the
undo logs say how many old values were kept as they are (exceptions), and how many blocks had no room in the log.

The bytes per parameter are those that are used: a byte for each element, 4 for each slot of a list. The log's memory is
planned, and does not depend on what is used.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from statistics import mean
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import _common
import noria
import torch
import torch.nn.functional as F
from noria import _C
from noria.model.layout import SLOTS_PER_ELEMENT, UNDO_LOGS
from noria.wrapped import wrapped_by
from torch import nn

from examples.gpt import GPT, GPTConfig
from examples.text import Tokenizer, batches, load_text

CONTEXT, BATCH = 64, 8
PHASES = {"2": range(2, 3), "3 to 5": range(3, 6), "6 to 20": range(6, 21), "21 to 50": range(21, 51)}
"""Steps by their number. The first has no draft: it makes the state. The last phase is the rest."""


class Recurrent(nn.Module):
    """Two layers of LSTM cells over embedded tokens. Most rows of the embedding have no gradient in a step."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.tokens, self.cells = nn.Embedding(vocab, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.cells(self.tokens(inputs))[0]).flatten(0, 1), targets.flatten())


class Denoiser(nn.Module):
    """Predicts the noise in pictures of text: a line is a row of 64 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [1, width, 2 * width, 2 * width, width, 1]
        self.layers = nn.Sequential()
        for wide, wider in pairwise(sizes):
            self.layers.append(nn.Sequential(nn.GroupNorm(1, wide), nn.Conv2d(wide, wider, 3, padding=1), nn.SiLU()))
        self.out = nn.Conv2d(1, 1, 1)

    def forward(self, tokens: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        picture = (tokens % 256).float().div(128).sub(1).view(1, 1, BATCH, CONTEXT).repeat(4, 1, 4, 1)
        noise = torch.randn_like(picture)
        return F.mse_loss(self.out(self.layers(picture + noise)), noise)


class Language(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(vocab, CONTEXT, 4, num_heads=width // 32, width=width))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.gpt(inputs, targets)[1]


def optimizer_of(rule: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = model.parameters()
    if rule == "adamw":
        return torch.optim.AdamW(parameters, lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    if rule == "adamw, beta2 0.999":
        return torch.optim.AdamW(parameters, lr=1.5e-3, weight_decay=0.01)
    if rule == "adam":
        return torch.optim.Adam(parameters, lr=1.5e-3)
    if rule == "adam, weight decay":
        return torch.optim.Adam(parameters, lr=1.5e-3, weight_decay=1e-4)
    if rule == "lion":
        return noria.optim.Lion(parameters, lr=3e-4, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)


def run(
    make: Callable[[], nn.Module], rule: str, policy: dict[str, Any], tokens: torch.Tensor, steps: int
) -> list[Any]:
    """Returns, by step from the second on, the shares of slots used and of blocks left out, in all drafted units."""
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer_of(rule, model)
    noria.wrap(model, optimizer, device="cpu", kernel="fused", draft_memory="1GiB", **policy)
    context = wrapped_by(model).context
    drafted = [context.units[unit] for unit in sorted(context.plan.drafted)]
    elements = sum(unit.undo_log[0] for unit in drafted)
    blocks = sum(unit.undo_log[1] for unit in drafted)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
    )
    found = []
    for number, (inputs, targets) in zip(range(1, steps + 1), batches(tokens, BATCH, CONTEXT), strict=False):
        model(inputs, targets).backward()
        context.engine.idle()
        if number > 1:
            headers = [
                (ctypes.c_uint32 * 2).from_address(context.home.address(UNDO_LOGS, unit.index)) for unit in drafted
            ]
            found.append(
                [sum(header[0] for header in headers) / elements, sum(header[1] for header in headers) / blocks]
            )
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    drafts = noria.report(model).drafts
    assert drafts["kept"] == (steps - 1) * len(drafted), drafts
    noria.unwrap(model, optimizer)
    return found


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    args = parser.parse_args()
    steps = args.steps or (60 if args.quick else 400)
    began = _common.hardware()
    text = load_text(200_000 if args.quick else 1_000_000)
    tokenizer = Tokenizer(text, vocab_size=1024)
    tokens = tokenizer.encode(text)
    vocab = tokenizer.vocab_size

    def gpt() -> nn.Module:
        return Language(vocab, args.width)

    split = {"dtype": torch.bfloat16}
    cases: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
        "GPT, AdamW": (gpt, "adamw", {}),
        "LSTM, AdamW": (lambda: Recurrent(vocab, args.width), "adamw", {}),
        "denoiser, AdamW": (lambda: Denoiser(args.width // 2), "adamw", {}),
        "GPT, AdamW, bf16 weights": (gpt, "adamw", split),
        "GPT, AdamW, bf16 moments": (gpt, "adamw", {"state_dtype": "bf16"}),
        "GPT, AdamW, 8-bit moments": (gpt, "adamw", {"state_dtype": "8bit"}),
        "GPT, AdamW, beta2 0.999": (gpt, "adamw, beta2 0.999", {}),
        "GPT, Adam": (gpt, "adam", {}),
        "GPT, Adam, weight decay": (gpt, "adam, weight decay", {}),
        "GPT, Lion": (gpt, "lion", {}),
        "GPT, SGD, Nesterov": (gpt, "sgd", {}),
    }
    phases = {**PHASES, f"51 to {steps}": range(51, steps + 1)}
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for name, case in cases.items():
        samples[name] = run(*case, tokens, steps)
        summary[name] = {}
        for phase, numbers in phases.items():
            within = [samples[name][number - 2] for number in numbers]
            slots, left = mean(slots for slots, _ in within), mean(left for _, left in within)
            summary[name][phase] = {"slots": slots, "left_out": left, "bytes": 1 + 4 * slots}
        print(f"{name}: done", flush=True)
    rows = [
        [name, *(f"{100 * of[phase]['slots']:.2f} / {100 * of[phase]['left_out']:.1f}" for phase in phases)]
        for name, of in summary.items()
    ]
    _common.show("exceptions in % of the elements / blocks left out in %", ["steps", *phases], rows)
    planned = _C.undo_log_bytes(1 << 24, 1 << 14, int((1 << 24) * SLOTS_PER_ELEMENT)) / (1 << 24)
    settings = {"steps": steps, "width": args.width, "batch": BATCH, "context": CONTEXT, "planned_bytes": planned}
    _common.Result("undo", samples, summary, settings).write(args, began)
    last = f"51 to {steps}"
    used = max(of[last]["bytes"] for of in summary.values())
    print(f"verdict: at most {used:.3f} bytes per parameter from step 51 on; {planned:.3f} are planned")
    return 0


if __name__ == "__main__":
    sys.exit(main())
