"""Describes the contents that ranks are about to load as lines, which they compare before they write anything.

A line has a checksum of a value's first and last element and of some between. A checksum of whole values would make
every rank read all of a mapped file, although each needs only its part. Buffers and a module's extra state may differ
between ranks. So of buffers only names, shapes and dtypes are compared, and of extra state only names and types.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from noria.dist.ranks import comparable
from noria.model.inner_tensors import inner_tensors

if TYPE_CHECKING:
    from noria.dist.ranks import Ranks

__all__ = ["lines_of_model", "lines_of_optimizer", "refuse_others"]

_NUM_SAMPLES = 1024


def refuse_others(everybody: Sequence[Ranks], lines: Sequence[str]) -> None:
    """Raises UsageError on all ranks if one of them has other lines. Collective, for ranks that have met.

    `everybody`: the ranks of each wrap call that takes part.
    """
    for ranks in everybody:
        ranks.agree(
            lines,
            expected="the same contents to load on all ranks",
            remedy="load the same checkpoint on all of them; what differs was not loaded on any",
        )


def lines_of_model(module: nn.Module, state_dict: Mapping[str, object], prefix: str = "") -> list[str]:
    """Returns a line for each entry of the state dict that `module.load_state_dict` gets."""
    own = {prefix + name for name, _ in module.named_buffers(remove_duplicate=False)}
    lines = []
    for name, value in state_dict.items():
        if name.endswith("_extra_state") or not isinstance(value, torch.Tensor):
            lines.append(f'"{name}", a {type(value).__qualname__}')
        else:
            told = _form if name in own else _checksum
            lines += [f'"{inner}" {told(tensor)}' for inner, tensor in inner_tensors(value, name)]
    return sorted(lines)


def lines_of_optimizer(names: list[str], state_dict: Mapping[str, Any]) -> list[str]:
    """Returns lines for an optimizer's state dict. `names`: the names of its parameters, in its order."""
    groups = state_dict.get("param_groups", ())
    numbers = [number for group in groups for number in group.get("params", ())]
    name_of = dict(zip(numbers, names, strict=False))
    lines = [
        f"param_groups[{at}][{key!r}] = {comparable(its)!r}"
        for at, group in enumerate(groups)
        for key, its in group.items()
    ]
    for number, values in state_dict.get("state", {}).items():
        entries = values.items() if isinstance(values, Mapping) else [("value", values)]
        for key, its in entries:
            told = _checksum(its) if isinstance(its, torch.Tensor) else f"= {comparable(its)!r}"
            lines.append(f'"{name_of.get(number, number)}", its {key} {told}')
    return sorted(lines)


def _form(value: torch.Tensor) -> str:
    return f"of shape {tuple(value.shape)}, {value.dtype}"


def _checksum(value: torch.Tensor) -> str:
    if value.layout != torch.strided or value.is_meta or value.is_quantized or not value.numel():
        return _form(value)
    last = value.numel() - 1
    count = min(value.numel(), _NUM_SAMPLES)
    with _reading():
        at = torch.arange(count, device="cpu") * last // max(count - 1, 1)
        some = value.detach().reshape(1) if not value.dim() else value.detach()[_places(at, value)]
        data = some.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return f"{_form(value)} with checksum {zlib.crc32(data):08x}"


def _places(numbers: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(each.to(value.device) for each in torch.unravel_index(numbers, value.shape))


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        yield
