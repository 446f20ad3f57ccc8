"""Describes how and where the fused kernels store their moments, as `Policy.state_dtype` chooses.

"8bit" stores codes, with a scale for each block of 256 elements of a parameter (csrc/optim/update.h, Note [State
formats]). `optimizer.state` then shows both. State that goes to a file or to a plain optimizer is floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from noria import _C
from noria.model.layout import aligned

if TYPE_CHECKING:
    from noria.model.layout import HomeUnit

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
"""The home's arenas for the moments of the fused kernels."""

SCALES = ("first moment scales", "second moment scales")
"""The home's arenas for the scales, if moments are codes."""

MOMENT_OF = {"exp_avg": 0, "exp_avg_sq": 1, "momentum_buffer": 0}
"""The index into MOMENTS, by key of the optimizer's state."""

SCALES_KEY = {key: f"{key}_scales" for key in MOMENT_OF}
"""The key of the scales, by key of the codes in the optimizer's state."""

PURPOSE_OF = {key: MOMENTS[number] for key, number in MOMENT_OF.items()} | {
    SCALES_KEY[key]: SCALES[number] for key, number in MOMENT_OF.items()
}
"""The arena, by key of the optimizer's state."""

ROUNDING_STEP = "rounding_step"
"""The key of noria's own step count. Random rounding needs it if the rule keeps no count itself."""

_DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "8bit": (torch.int8, torch.uint8),
}


def moment_dtype(state_dtype: str, key: str) -> torch.dtype:
    """Returns the dtype in which the home stores the moment of a key in MOMENT_OF."""
    return _DTYPES[state_dtype][MOMENT_OF[key]]


def keys_of(keys: tuple[str, ...], state_dtype: str) -> tuple[str, ...]:
    """Returns the keys of all state tensors of a rule with these moments."""
    return keys if state_dtype != "8bit" else (*keys, *(SCALES_KEY[key] for key in keys))


def moment_bytes(unit: HomeUnit, dtype: torch.dtype | None, state_dtype: str) -> int:
    """Returns the bytes of one moment of a fused unit. `dtype` is `Policy.dtype`."""
    elements = unit.home_gradients // (2 if dtype is not None else 4)
    return elements * _DTYPES[state_dtype][0].itemsize


def scale_bytes(unit: HomeUnit, state_dtype: str) -> int:
    """Returns the bytes of the scales of one moment.

    They are more than 0 even if a rank's shard of a trainable unit has no elements.
    """
    if state_dtype != "8bit" or not unit.home_gradients:
        return 0
    return aligned(max(4 * sum(slot.num_blocks for slot in unit.parameters), 1))


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Rounds floats to the nearest codes, block by block in the storage order of `codes`."""
    dense = torch.empty_like(codes, dtype=torch.float32).copy_(values)
    is_first = codes.dtype is torch.int8
    _C.encode_moment(dense.data_ptr(), codes.data_ptr(), scales.data_ptr(), dense.numel(), is_first=is_first)


def _decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = torch.empty_like(codes, dtype=torch.float32)
    is_first = codes.dtype is torch.int8
    _C.decode_moment(codes.data_ptr(), scales.data_ptr(), values.data_ptr(), values.numel(), is_first=is_first)
    return values


def are_low_bits(value: object) -> TypeGuard[torch.Tensor]:
    """Returns True if `value` still has the low bits of a master.

    A plain optimizer's `load_state_dict` casts them to its parameters' dtype, which destroys them.
    """
    return isinstance(value, torch.Tensor) and value.dtype is torch.int16


def plain_values(values: Mapping[str, Any], *, widen: bool = False) -> dict[str, Any]:
    """Returns a parameter's state with floats instead of codes. `widen`: moments in bf16 become fp32 too."""
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
