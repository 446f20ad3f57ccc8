"""How long does a step of Adafactor take by noria's kernel, beside torch's own code on the same home?

    python benchmarks/adafactor.py

Three optimizers take turns, step by step, in one process: torch.optim.Adafactor on a plain model, and that of wrapped
models with kernel="torch" and kernel="fused". Only `step()` is timed. It is whole inside of it, because
update="blocking". noria's pool has one thread less than torch, as always. `GiB/s` is what the fused kernel reads and
writes.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import _common
import noria
import torch
from noria.model.update_rules import rule_of
from torch import nn

FORMATS = {"fp32": None, "bf16": torch.bfloat16}


class Stack(nn.Module):
    """Blocks of a transformer's shapes, without its operators: gradients come cheaply."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width), (width,), (width,)]
        self.blocks = nn.ModuleList(
            nn.ParameterList(nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes) for _ in range(num_blocks)
        )

    def fill_gradients(self, generator: torch.Generator) -> None:
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def measure(args: Any, dtype: torch.dtype | None) -> tuple[dict[str, list[float]], dict[str, Any]]:
    torch.manual_seed(0)
    plain = Stack(2 if args.quick else args.blocks, 256 if args.quick else args.width)
    models = {name: copy.deepcopy(plain) for name in ("plain", "torch", "fused")}
    optimizers = {name: torch.optim.Adafactor(model.parameters(), lr=1e-3) for name, model in models.items()}
    for kernel in ("torch", "fused"):
        noria.wrap(models[kernel], optimizers[kernel], device="cpu", kernel=kernel, update="blocking", dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    samples: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    for number in range(args.steps + 2):
        for name in names[number % 3 :] + names[: number % 3]:
            models[name].fill_gradients(generator)
            taken = _common.seconds(optimizers[name].step)
            optimizers[name].zero_grad()
            if number >= 2:  # state is there
                samples[name].append(taken)
    parameters = sum(each.numel() for each in plain.parameters())
    moved = parameters * rule_of(torch.optim.Adafactor, {}).bytes_per_element(is_split=dtype is not None)
    seconds = _common.spread(samples["fused"])["median"]
    return samples, {
        "step_s": {name: _common.spread(values) for name, values in samples.items()},
        "torch_over_fused": _common.paired_ratio(samples["torch"], samples["fused"]),
        "plain_over_fused": _common.paired_ratio(samples["plain"], samples["fused"]),
        "fused_gib_s": moved / seconds / (1 << 30),
        "parameters": parameters,
    }


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--steps", type=int, help="measured steps of each optimizer")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    args.steps = args.steps or (2 if args.quick else 30)
    began = _common.hardware()
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    rows = []
    for name, dtype in FORMATS.items():
        samples[name], its = measure(args, dtype)
        summary[name] = its
        times = [1e3 * its["step_s"][each]["median"] for each in ("plain", "torch", "fused")]
        rows.append([name, *times, its["torch_over_fused"]["of_pairs"], its["fused_gib_s"]])
    columns = ["weights", "plain PyTorch (ms)", "torch's code (ms)", "fused (ms)", "torch's / fused", "GiB/s"]
    _common.show("a step of Adafactor", columns, rows)
    settings = {"steps": args.steps, "blocks": args.blocks, "width": args.width, "threads": torch.get_num_threads()}
    _common.Result("adafactor", samples, summary, settings).write(args, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
