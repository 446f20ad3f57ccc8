"""In which form the fused kernels keep their moments, and where: what `Policy.state_dtype` chooses.

"8bit" keeps codes, with a scale for each block of 256 elements of a parameter (csrc/optim/update.h, Note [State
formats]). `optimizer.state` then shows both; whoever takes state away, to a file or a plain optimizer, gets floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from noria import _C

if TYPE_CHECKING:
    from noria.home import HomeUnit

__all__ = [
    "MOMENTS",
    "MOMENT_OF",
    "PURPOSE_OF",
    "ROUNDING_STEP",
    "SCALES",
    "SCALES_KEY",
    "are_low_bits",
    "encode",
    "keys_of",
    "moment_bytes",
    "moment_dtype",
    "plain_values",
    "scale_bytes",
]

MOMENTS = ("first moments", "second moments")
"""The home's arenas for what the fused kernels keep."""

SCALES = ("first moment scales", "second moment scales")
"""The arenas beside them, where moments are codes."""

MOMENT_OF = {"exp_avg": 0, "exp_avg_sq": 1, "momentum_buffer": 0}
"""By key of the optimizer's state: which of MOMENTS."""

SCALES_KEY = {key: f"{key}_scales" for key in MOMENT_OF}
"""By key of codes in the optimizer's state: the key of their scales."""

PURPOSE_OF = {key: MOMENTS[number] for key, number in MOMENT_OF.items()} | {
    SCALES_KEY[key]: SCALES[number] for key, number in MOMENT_OF.items()
}
"""By key of the optimizer's state: its arena."""

ROUNDING_STEP = "rounding_step"
"""Key of noria's own count of steps, beside moments that are rounded at random for a rule that keeps no count."""

_DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "8bit": (torch.int8, torch.uint8),
}


def moment_dtype(state_dtype: str, key: str) -> torch.dtype:
    """Of what the home keeps under a key of MOMENT_OF."""
    return _DTYPES[state_dtype][MOMENT_OF[key]]


def keys_of(keys: tuple[str, ...], state_dtype: str) -> tuple[str, ...]:
    """The state's tensors of a rule with these moments."""
    return keys if state_dtype != "8bit" else (*keys, *(SCALES_KEY[key] for key in keys))


def moment_bytes(unit: HomeUnit, dtype: torch.dtype | None, state_dtype: str) -> int:
    """Of one moment of a fused unit; `dtype` is `Policy.dtype`."""
    elements = unit.home_gradients // (2 if dtype is not None else 4)
    return elements * _DTYPES[state_dtype][0].itemsize


def scale_bytes(unit: HomeUnit, state_dtype: str) -> int:
    """Of the scales beside one moment; some also where a rank's part of the unit has no elements."""
    if state_dtype != "8bit" or not unit.home_gradients:
        return 0
    num_bytes = max(4 * sum(slot.num_blocks for slot in unit.parameters), 1)
    return -(-num_bytes // _C.TENSOR_ALIGNMENT) * _C.TENSOR_ALIGNMENT


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Floats to the nearest codes, block by block in the storage order of `codes`."""
    dense = torch.empty_like(codes, dtype=torch.float32).copy_(values)
    is_first = codes.dtype is torch.int8
    _C.encode_moment(dense.data_ptr(), codes.data_ptr(), scales.data_ptr(), dense.numel(), is_first=is_first)


def _decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = torch.empty_like(codes, dtype=torch.float32)
    is_first = codes.dtype is torch.int8
    _C.decode_moment(codes.data_ptr(), scales.data_ptr(), values.data_ptr(), values.numel(), is_first=is_first)
    return values


def are_low_bits(value: Any) -> TypeGuard[torch.Tensor]:
    """A plain optimizer's `load_state_dict` casts them to its parameters' dtype, and what they were is lost."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.int16


def plain_values(values: Mapping[str, Any], *, widen: bool = False) -> dict[str, Any]:
    """A parameter's state without codes: the floats that they stand for. `widen`: bf16 becomes fp32 too."""
    plain = dict(values)
    for key in MOMENT_OF:
        value, scales = plain.get(key), plain.pop(SCALES_KEY[key], None)
        if not isinstance(value, torch.Tensor):
            continue
        if scales is not None and not value.is_floating_point():
            plain[key] = _decode(value, scales)
        elif widen and value.dtype is torch.bfloat16:
            plain[key] = value.float()
    return plain
