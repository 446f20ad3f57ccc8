"""How long does a step of an optimizer of whole matrices take by noria's kernel, beside torch's own code on the same
home?

    python benchmarks/matrix_optimizers.py --optimizer adafactor
    python benchmarks/matrix_optimizers.py --optimizer muon

Three optimizers take turns, step by step, in one process: torch's on a plain model, and that of wrapped models with
kernel="torch" and kernel="fused". Only `step()` is timed. It is whole inside of it, because update="blocking". noria's
pool has one thread less than torch, as always; Muon's products run on all of torch's. `GiB/s` is what the fused kernel
reads and writes. `home` is what parameters, gradients and state take there, in bytes a parameter.
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

FORMATS: dict[str, tuple[torch.dtype | None, str]] = {
    "fp32": (None, "fp32"),
    "bf16": (torch.bfloat16, "fp32"),
    "bf16, momentum in 8 bits": (torch.bfloat16, "8bit"),
}
OPTIMIZERS = {"adafactor": torch.optim.Adafactor, "muon": torch.optim.Muon}


class Stack(nn.Module):
    """Blocks of a transformer's shapes, without its operators: gradients come cheaply. Muon has matrices alone."""

    def __init__(self, num_blocks: int, width: int, has_vectors: bool) -> None:
        super().__init__()
        shapes: list[tuple[int, ...]] = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
        shapes += [(width,), (width,)] * has_vectors
        self.blocks = nn.ModuleList(
            nn.ParameterList(nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes) for _ in range(num_blocks)
        )

    def fill_gradients(self, generator: torch.Generator) -> None:
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def measure(args: Any, dtype: torch.dtype | None, state: str) -> tuple[dict[str, list[float]], dict[str, Any]]:
    torch.manual_seed(0)
    cls = OPTIMIZERS[args.optimizer]
    has_vectors = cls is not torch.optim.Muon
    plain = Stack(2 if args.quick else args.blocks, 256 if args.quick else args.width, has_vectors)
    models = {name: copy.deepcopy(plain) for name in ("plain", "torch", "fused")}
    optimizers = {name: cls(model.parameters(), lr=1e-3) for name, model in models.items()}
    for kernel in ("torch", "fused"):
        state_dtype = state if kernel == "fused" else "fp32"
        policy: Any = {"kernel": kernel, "update": "blocking", "dtype": dtype, "state_dtype": state_dtype}
        noria.wrap(models[kernel], optimizers[kernel], device="cpu", **policy)
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
    moved = parameters * rule_of(cls, {}).bytes_per_element(dtype is not None, state)
    seconds = _common.spread(samples["fused"])["median"]
    return samples, {
        "step_s": {name: _common.spread(values) for name, values in samples.items()},
        "torch_over_fused": _common.paired_ratio(samples["torch"], samples["fused"]),
        "plain_over_fused": _common.paired_ratio(samples["plain"], samples["fused"]),
        "fused_gib_s": moved / seconds / (1 << 30),
        "parameters": parameters,
        "home_bytes": {kernel: home_bytes(models[kernel]) / parameters for kernel in ("torch", "fused")},
    }


def home_bytes(model: nn.Module) -> int:
    return sum(row.planned for row in noria.report(model).ledger if row.place.startswith("host"))


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--optimizer", choices=[*OPTIMIZERS], required=True)
    parser.add_argument("--steps", type=int, help="measured steps of each optimizer")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    args = parser.parse_args()
    args.steps = args.steps or (2 if args.quick else 30)
    began = _common.hardware()
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    rows = []
    for name, (dtype, state) in FORMATS.items():
        if state != "fp32" and args.optimizer != "muon":
            continue  # Adafactor keeps no moment by element
        samples[name], its = measure(args, dtype, state)
        summary[name] = its
        times = [1e3 * its["step_s"][each]["median"] for each in ("plain", "torch", "fused")]
        homes = its["home_bytes"].values()
        rows.append([name, *times, its["torch_over_fused"]["of_pairs"], its["fused_gib_s"], *homes])
    columns = ["weights", "plain PyTorch (ms)", "torch's code (ms)", "fused (ms)", "torch's / fused", "GiB/s"]
    columns += ["home, torch's", "home, fused"]
    _common.show(f"a step of {OPTIMIZERS[args.optimizer].__name__}", columns, rows)
    settings = {"steps": args.steps, "blocks": args.blocks, "width": args.width, "threads": torch.get_num_threads()}
    _common.Result(args.optimizer, samples, summary, settings).write(args, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
