"""Does a model learn as well when its optimizer keeps moments in fewer bits?

A GPT of the demo's kind learns the source of Python's standard library, with the moments of AdamW in fp32, bf16 and
8 bits: for each seed the same weights to begin with and the same batches. What counts is the loss on text that was
held out, and its difference to fp32 of the same seed, beside what another seed changes. `--model lstm` trains two
layers of an LSTM instead. `--optimizer muon` trains the matrices of the blocks by Muon, with its momentum in these
formats; AdamW trains the rest, in these formats, too.

The known bad control rounds moments to nearest after each fp32 step, in Python: noria itself never does.
"""

from __future__ import annotations

import os
import sys
from itertools import islice
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import _common
import noria
import torch
from noria import _C
from noria.testing import on_machine
from torch import nn
from undo import Recurrent

from examples.gpt import GPT, GPTConfig
from examples.text import Tokenizer, batches, load_text

CONTEXT, BATCH, HELD_OUT_BATCHES = 64, 8, 40
SHORT = 400  # steps
LR, WEIGHT_DECAY = 1.5e-3, 0.1
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
FORMATS = ["fp32", "bf16", "8bit"]
NEAREST = {"bf16 to nearest": "bf16", "8bit to nearest": "8bit"}


def make_model(vocab: int, args: Any) -> nn.Module:
    if args.model == "lstm":
        return Recurrent(vocab, args.width)
    return GPT(GPTConfig(vocab, CONTEXT, args.layers, num_heads=args.width // 32, width=args.width))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    found = model(*batch)
    return found if isinstance(found, torch.Tensor) else found[1]


def make_optimizers(model: nn.Module, args: Any) -> list[torch.optim.Optimizer]:
    parameters = dict(model.named_parameters())
    matrices = {}
    if args.optimizer == "muon":
        matrices = {name: each for name, each in parameters.items() if name.startswith("blocks.") and each.ndim == 2}
    others = [each for name, each in parameters.items() if name not in matrices]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=LR, betas=(0.9, args.beta2), weight_decay=WEIGHT_DECAY)
    ]
    if matrices:
        # A step of this kind is as large as AdamW's with the same lr.
        how: Any = {"lr": LR, "weight_decay": WEIGHT_DECAY, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(matrices.values(), **how))
    return optimizers


def round_to_nearest(optimizer: torch.optim.Optimizer, to: str) -> None:
    for values in optimizer.state.values():
        for key in [each for each in MOMENTS if each in values]:
            moment = values[key]
            if to == "bf16":
                moment.copy_(moment.bfloat16())
                continue
            codes = torch.empty_like(moment, dtype=torch.uint8)
            scales = torch.empty(-(-moment.numel() // _C.STATE_BLOCK))
            addresses = codes.data_ptr(), scales.data_ptr()
            is_first = key != "exp_avg_sq"
            _C.encode_moment(moment.data_ptr(), *addresses, moment.numel(), is_first=is_first)
            _C.decode_moment(*addresses, moment.data_ptr(), moment.numel(), is_first=is_first)


def train(state: str, seed: int, tokens: torch.Tensor, held_out: torch.Tensor, vocab: int, args: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = make_model(vocab, args)
    optimizers = make_optimizers(model, args)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: min(1.0, (step + 1) / 20) * (1 - 0.9 * step / args.steps))
        for each in optimizers
    ]
    with on_machine(update_threads=1):
        noria.wrap(model, optimizers, device="cpu", kernel="fused", state_dtype=state if state in FORMATS else "fp32")
    losses = []
    for batch in islice(batches(tokens, BATCH, CONTEXT, seed), args.steps):
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if state in NEAREST:
                round_to_nearest(optimizer, NEAREST[state])
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        of_batches = [
            loss_of(model, batch).item() for batch in islice(batches(held_out, BATCH, CONTEXT), HELD_OUT_BATCHES)
        ]
    noria.unwrap(model, optimizers)
    return {"losses": losses, "held_out": mean(of_batches)}


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--model", choices=["gpt", "lstm"], default="gpt")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--layers", type=int, help="of the GPT; default: 4. The LSTM has two")
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--without-nearest", action="store_true", help="leave the known bad control out")
    args = parser.parse_args()
    args.steps = args.steps or (30 if args.quick else SHORT)
    if args.model == "lstm" and args.layers not in (None, 2):
        parser.error("--layers is of the GPT: the LSTM has two")
    if args.model == "lstm" and args.optimizer == "muon":
        parser.error("--optimizer muon is for the GPT: Muon takes matrices of blocks")
    args.layers = args.layers or {"gpt": 4, "lstm": 2}[args.model]
    seeds = range(args.seeds or (2 if args.quick else 5))
    began = _common.hardware()
    text = load_text(200_000 if args.quick else 1_000_000)
    tokenizer = Tokenizer(text, vocab_size=512)
    tokens = tokenizer.encode(text)
    held_out = tokens[len(tokens) * 9 // 10 :]
    tokens = tokens[: len(tokens) * 9 // 10]
    states = FORMATS if args.without_nearest else [*FORMATS, *NEAREST]
    samples: dict[str, dict[str, Any]] = {state: {} for state in states}
    for seed in seeds:
        for state in states:
            samples[state][str(seed)] = train(state, seed, tokens, held_out, tokenizer.vocab_size, args)
            print(f"seed {seed}, {state}: {samples[state][str(seed)]['held_out']:.4f}", flush=True)
    held = {state: [found["held_out"] for found in of_seed.values()] for state, of_seed in samples.items()}
    summary = {}
    for state, values in held.items():
        differences = [a - b for a, b in zip(values, held["fp32"], strict=True)]
        summary[state] = {
            "held_out": values,
            "mean": mean(values),
            "spread_of_seeds": stdev(values),
            "difference_to_fp32": differences,
            "mean_difference": mean(differences),
            "standard_error": stdev(differences) / len(differences) ** 0.5,
        }
    rows = [
        [
            state,
            f"{found['mean']:.4f}",
            f"{found['spread_of_seeds']:.4f}",
            f"{found['mean_difference']:+.4f}",
            f"{found['standard_error']:.4f}",
            " ".join(f"{value:+.4f}" for value in found["difference_to_fp32"]),
        ]
        for state, found in summary.items()
    ]
    columns = ["moments", "held-out loss", "spread of seeds", "to fp32", "its error", "by seed"]
    _common.show(f"{args.steps} steps, {len(seeds)} seeds", columns, rows)
    settings = {
        "model": args.model,
        "optimizer": args.optimizer,
        "steps": args.steps,
        "seeds": len(seeds),
        "width": args.width,
        "layers": args.layers,
        "beta2": args.beta2,
        "tokens": len(tokens),
        "batch": BATCH,
        "context": CONTEXT,
    }
    long = f"_{args.steps}_steps" if args.steps > SHORT else ""
    kind = {"gpt": "", "lstm": "_lstm"}[args.model] + {"adamw": "", "muon": "_muon"}[args.optimizer]
    question = f"states{kind}{long}"
    _common.Result(question, samples, summary, settings).write(args, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
