"""How many bytes of host memory does a trained parameter take?

GPTs of large Linear layers (a quarter and half a billion parameters) take three steps with AdamW, each way in a fresh
process: noria; plain torch with everything on the host; and, with --deepspeed, ZeRO-Offload from PyPI, installed into
an environment of its own. What counts is by how much the process has grown since its imports: after the last step
("steady"), at most in a step, and at most until the first step (the model itself included). On a machine without a
device that contains what would lie on one; it is known, and taken off: noria's window, DeepSpeed's weights
and buckets. The slope between the two sizes is free of what does not grow with the model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import _common
import _deepspeed
import _resident
import noria
import torch
from noria.testing import on_machine
from torch import nn

LAYERS = (5, 10)
NOTHING = {"built": 0, "steady": 0, "in_steps": 0}


def loop(model: nn.Module, optimizer: Any) -> Any:
    tokens = _resident.batch()

    def step() -> torch.Tensor:
        loss = model(tokens, tokens)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_noria(resident: _resident.Resident, num_layers: int, dtype: torch.dtype | None, **policy: Any) -> None:
    model = _resident.model_of(num_layers)
    num_elements = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with on_machine(hostility={"seed": 1, "poison": True}):  # the window's range is written at once, so that it counts
        policy = {"draft_memory": 0} | policy
        noria.wrap(model, optimizer, device="cpu", window=3, dtype=dtype, kernel="fused", **policy)

    def device_bytes() -> dict[str, int]:
        window = sum(row.taken for row in noria.report(model).ledger if row.place == "cpu")
        return {"built": window, "steady": window, "in_steps": window}

    _resident.measure(resident, loop(model, optimizer), num_elements, device_bytes)


def by_torch(resident: _resident.Resident, num_layers: int) -> None:
    model = _resident.model_of(num_layers)
    num_elements = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    _resident.measure(resident, loop(model, optimizer), num_elements, lambda: NOTHING)


class Masters:
    """bf16 weights and their fp32 masters, updated one by one, so that one fp32 gradient exists at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.pairs = []
        for parameter in model.parameters():
            master = nn.Parameter(parameter.detach().clone())
            parameter.data = parameter.data.bfloat16()
            self.pairs.append((parameter, master, torch.optim.AdamW([master], lr=1e-4, fused=True)))

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master, optimizer in self.pairs:
            master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            master.grad = None
            parameter.copy_(master)

    def zero_grad(self) -> None:
        pass  # step() has


def by_torch_with_masters(resident: _resident.Resident, num_layers: int) -> None:
    model = _resident.model_of(num_layers)
    num_elements = sum(p.numel() for p in model.parameters())
    masters = Masters(model)
    _resident.measure(resident, loop(model, masters), num_elements, lambda: NOTHING)


WAYS = {
    "noria, bf16": lambda resident, layers: by_noria(resident, layers, torch.bfloat16),
    "noria, bf16, all units drafted": lambda resident, layers: by_noria(
        resident, layers, torch.bfloat16, draft_memory="2GiB"
    ),
    "noria backward, bf16": lambda resident, layers: by_noria(resident, layers, torch.bfloat16, update="backward"),
    "noria backward, bf16, 8-bit moments": lambda resident, layers: by_noria(
        resident, layers, torch.bfloat16, update="backward", state_dtype="8bit"
    ),
    "noria, fp32": lambda resident, layers: by_noria(resident, layers, None),
    "torch, bf16 and fp32 masters": by_torch_with_masters,
    "torch, fp32": by_torch,
}
STAGES = {
    "DeepSpeed stage 2, optimizer offloaded, bf16": 2,
    "DeepSpeed stage 3, optimizer and weights offloaded, bf16": 3,
}


def available() -> int:
    row = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(row.split()[1]) * 1024


def run(way: str, num_layers: int) -> dict[str, Any]:
    needed = 32 * 51_000_000 * num_layers
    if available() < needed:
        raise SystemExit(f"expected {needed >> 30} GiB of free memory for {way!r}, found {available() >> 30}")
    if way in STAGES:
        return _deepspeed.run("_deepspeed_engine.py", str(STAGES[way]), str(num_layers))
    command = [sys.executable, str(Path(__file__).resolve()), "--child", way, str(num_layers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def summary_of(small: dict[str, Any], large: dict[str, Any]) -> dict[str, float]:
    """Bytes per parameter of the larger model, and the slope between the two."""

    def less_device(found: dict[str, Any], row: str, device: str) -> int:
        return found[row] - found["device"][device]

    steady = [less_device(found, "steady", "steady") for found in (small, large)]
    return {
        "steady": steady[1] / large["elements"],
        "most_in_a_step": less_device(large, "peak_in_steps", "in_steps") / large["elements"],
        "most_until_first_step": (large["peak_until_built"] - large["device"]["built"]) / large["elements"],
        "slope": (steady[1] - steady[0]) / (large["elements"] - small["elements"]),
        "taken_off": large["device"]["steady"] / large["elements"],
    }


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        resident = _resident.Resident()
        WAYS[sys.argv[2]](resident, int(sys.argv[3]))
        return 0
    parser = _common.parser_of(__doc__)
    parser.add_argument("--deepspeed", action="store_true", help="beside ZeRO-Offload; installs it")
    parser.add_argument("--only", nargs="+", help="some ways, by name")
    args = parser.parse_args()
    began = _common.hardware()
    layers = (1, 2) if args.quick else LAYERS
    ways = [way for way in (*WAYS, *(STAGES if args.deepspeed else ())) if not args.only or way in args.only]
    samples: dict[str, Any] = {}
    for way in ways:
        samples[way] = {str(each): run(way, each) for each in layers}
        print(way, samples[way], flush=True)
    summary = {way: summary_of(*found.values()) for way, found in samples.items()}
    columns = ["bytes per parameter", "steady", "most in a step", "most until first step", "slope", "taken off"]
    rows = [[way, *(f"{value:.2f}" for value in found.values())] for way, found in summary.items()]
    elements = [found["elements"] for found in samples[ways[0]].values()]
    _common.show(f"AdamW, {elements[1] / 1e6:.0f} M parameters; slope from {elements[0] / 1e6:.0f} M", columns, rows)
    settings = {"elements": elements, "deepspeed": _deepspeed.VERSION, "batch": [1, _resident.TOKENS], "window": 3}
    _common.Result("host_bytes", samples, summary, settings).write(args, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
