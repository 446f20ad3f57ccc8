"""Does `p.grad` work as torch's own gradients do, where it is a CUDA tensor over registered host memory?

The first thing to run on a GPU. After one backward each operation is made on the gradients of a wrapped model, and on
those of a twin that lies on the device as a whole: results must have the same bits, and so must the gradients after
operations that write. Then `step()` must believe what was written. Nothing is timed.
"""

from __future__ import annotations

import copy
import ctypes
import os
import sys
from collections.abc import Callable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA begins; the twins need the same bits

import _common
import noria
import torch
from noria.testing import first_difference
from torch import nn
from torch.nn import functional as F

Gradients = list[torch.Tensor]


class Net(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- what users and libraries do with gradients: each gives tensors, which are compared ------------------------------


def host_reads(gradients: Gradients) -> Gradients:
    """By the address of data_ptr(). Of a resident twin on a device the bytes are taken by .cpu()."""
    found = []
    for each in gradients:
        assert each.data_ptr() != 0 and each.data_ptr() == each.data_ptr()
        if each.is_cuda and not getattr(each, "_is_registered", False):
            found.append(each.cpu())
            continue
        settle(each.device.type)
        found.append(torch.frombuffer(bytearray(ctypes.string_at(each.data_ptr(), each.nbytes)), dtype=each.dtype))
    return [each.flatten() for each in found]


def dlpack(gradients: Gradients) -> Gradients:
    found = [torch.from_dlpack(each.detach()) for each in gradients]
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(found, gradients, strict=True)), "a copy was made"
    return [each.clone() for each in found]


def copies_out(gradients: Gradients) -> Gradients:
    return [torch.empty_like(each, memory_format=torch.contiguous_format).copy_(each) for each in gradients]


def copies_to_pinned(gradients: Gradients) -> Gradients:
    is_cuda = gradients[0].is_cuda
    found = [torch.empty(each.shape, dtype=each.dtype, pin_memory=is_cuda) for each in gradients]
    for to, each in zip(found, gradients, strict=True):
        to.copy_(each, non_blocking=True)
    settle(gradients[0].device.type)
    return found


def copies_in(gradients: Gradients) -> Gradients:
    for number, each in enumerate(gradients):
        each.copy_(torch.full_like(each, 0.01 * (number + 1)).add_(each))
    return []


def copies_in_from_the_host(gradients: Gradients) -> Gradients:
    for each in gradients:
        each.copy_(each.cpu().neg_())
    return []


def scales(gradients: Gradients) -> Gradients:
    torch._foreach_mul_(gradients, torch.tensor(0.5, device=gradients[0].device))
    return []


def clips(gradients: Gradients) -> Gradients:
    parameters = [nn.Parameter(torch.empty_like(each)) for each in gradients]
    for parameter, each in zip(parameters, gradients, strict=True):
        parameter.grad = each
    return [torch.nn.utils.clip_grad_norm_(parameters, 0.1)]


def unscales(gradients: Gradients) -> Gradients:
    """As GradScaler does."""
    device = gradients[0].device
    found = torch.zeros(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor(0.25, device=device))
    return [found]


def on_another_stream(gradients: Gradients) -> Gradients:
    """Read there, once what wrote them here is over."""
    if not gradients[0].is_cuda:
        return [each.clone() for each in gradients]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [each * 2 for each in gradients]
    torch.cuda.current_stream().wait_stream(stream)
    return found


Act = Callable[[Gradients], Gradients]
ACTS: dict[str, Act] = {
    ".clone()": lambda gradients: [each.clone() for each in gradients],
    ".cpu()": lambda gradients: [each.cpu() for each in gradients],
    ".to(float64)": lambda gradients: [each.to(torch.float64) for each in gradients],
    "copy_ to the device": copies_out,
    "copy_ to pinned memory": copies_to_pinned,
    "host reads at data_ptr()": host_reads,
    "DLPack": dlpack,
    ".norm() of each": lambda gradients: [each.norm() for each in gradients],
    "_foreach_norm of the list": lambda gradients: list(torch._foreach_norm(gradients)),
    "_foreach_norm one by one": lambda gradients: [torch._foreach_norm([each])[0] for each in gradients],
    "matrix product": lambda gradients: [each @ each.T for each in gradients if each.dim() == 2],
    "sum of all": lambda gradients: [torch.stack([each.sum() for each in gradients]).sum()],
    "another stream": on_another_stream,
    "_foreach_mul_": scales,
    "copy_ from the device": copies_in,
    "copy_ from the host": copies_in_from_the_host,
    "mul_ of each": lambda gradients: [each.mul_(1.5) for each in gradients][:0],
    "clip_grad_norm_ that bites": clips,
    "the scaler's unscale": unscales,
}


# ---- both sides ------------------------------------------------------------------------------------------------------


def gradients_of(model: nn.Module) -> Gradients:
    found = [parameter.grad for parameter in model.parameters()]
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def difference(ours: Gradients, theirs: Gradients, what: str) -> str | None:
    names = [f"{what} {number}" for number in range(len(theirs))]
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors, the twin has {len(theirs)}"
    return first_difference([each.detach().cpu() for each in ours], [each.detach().cpu() for each in theirs], names)


def tried(act: Act, model: nn.Module, twin: nn.Module, device: str) -> str:
    """Empty, or what went wrong."""
    ours, theirs = gradients_of(model), gradients_of(twin)
    for each in ours:
        each._is_registered = True  # type: ignore[attr-defined] # `host_reads` asks
    try:
        found = act(ours)
        settle(device)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    expected = act(theirs)
    settle(device)
    return difference(found, expected, "result") or difference(gradients_of(model), theirs, "gradient after it") or ""


def main() -> int:
    parser = _common.parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    blocks, width = (3, 64) if args.quick else (6, 1024)
    began = _common.hardware()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    plain = Net(blocks, width)
    twin = copy.deepcopy(plain).to(args.device)
    masters = [nn.Parameter(each.detach().cpu().clone()) for each in twin.parameters()]
    twin_optimizer = torch.optim.AdamW(masters, lr=1e-2)
    model = plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    noria.wrap(model, optimizer, device=args.device, window=2, kernel="torch")
    x = torch.randn(32, width).to(args.device)
    target = torch.randint(0, 10, (32,)).to(args.device)
    for each in (model, twin):
        F.cross_entropy(each(x), target).backward()

    found: dict[str, str] = {}
    if wrong := difference(gradients_of(model), gradients_of(twin), "gradient"):
        found["backward"] = wrong
    for name, act in ACTS.items():
        found[name] = tried(act, model, twin, args.device)
        print(f"  {name:<28} {found[name] or 'ok'}", flush=True)
        if found[name]:  # what comes next begins equal again, if it can
            with torch.no_grad():
                for ours, theirs in zip(gradients_of(model), gradients_of(twin), strict=True):
                    theirs.copy_(ours)
    for master, parameter in zip(masters, twin.parameters(), strict=True):
        assert parameter.grad is not None
        master.grad = parameter.grad.cpu()
    twin_optimizer.step()
    optimizer.step()
    weights = list(model.state_dict().values())
    found["step() believes it"] = difference(weights, [each.detach() for each in masters], "weight") or ""
    print(f"  {'step() believes it':<28} {found['step() believes it'] or 'ok'}")
    one_by_one = torch._foreach_norm([gradients_of(twin)[0]])[0].item()
    of_the_list = torch._foreach_norm(gradients_of(twin))[0].item()
    noria.unwrap(model, optimizer)

    wrong_ones = [name for name, reason in found.items() if reason]
    # Of torch itself, not of noria: a library that takes one norm at a time may differ from one that takes a list.
    print(f"  _foreach_norm of the first gradient: {one_by_one!r} by itself, {of_the_list!r} in the list")
    summary = {"checks": found, "foreach_norm": {"one by one": one_by_one, "of the list": of_the_list}}
    _common.Result("first_touch", {}, summary, {"device": args.device, "width": width}).write(args, began)
    words = f"{len(found) - len(wrong_ones)} of {len(found)} as in torch, on {args.device}"
    print(f"verdict: {words}" + (f"; not: {', '.join(wrong_ones)}" if wrong_ones else ""))
    return 1 if wrong_ones else 0


if __name__ == "__main__":
    sys.exit(main())
