"""Describes how and where the fused kernels store their moments, as `Policy.state_dtype` chooses.

"8bit" stores codes, with a scale for each block of 256 elements of a parameter (csrc/optim/update.h, Note [State
formats]). `optimizer.state` then shows both. State that goes to a plain optimizer is floats.

In files codes have keys of their own, and a mark in the state dict names their format. A plain optimizer that loads
such a file finds words in place of moments, and raises at its step: it never takes codes for values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from noria import _C
from noria._errors import usage_error
from noria.model.layout import FACTORED, aligned

if TYPE_CHECKING:
    from noria.model.layout import HomeParameter, HomeUnit

__all__ = [
    "MOMENTS",
    "MOMENT_OF",
    "NUMBER_OF",
    "PURPOSE_OF",
    "ROUNDING_STEP",
    "SCALES",
    "SCALES_KEY",
    "are_low_bits",
    "coded_state_dict",
    "encode",
    "keys_of",
    "moment_bytes",
    "moment_dtype",
    "named_codes",
    "plain_state_dict",
    "plain_values",
    "scale_bytes",
]

MOMENTS = ("first moments", "second moments")
"""The home's arenas for the moments of the fused kernels."""

SCALES = ("first moment scales", "second moment scales")
"""The home's arenas for the scales, if moments are codes."""

MOMENT_OF = {"exp_avg": 0, "exp_avg_sq": 1, "momentum_buffer": 0}
"""The index into MOMENTS, by key of the optimizer's state."""

NUMBER_OF = {**MOMENT_OF, **{f"{key}_scales": number for key, number in MOMENT_OF.items()}}
"""The same, also by key of the scales."""

SCALES_KEY = {key: f"{key}_scales" for key in MOMENT_OF}
"""The key of the scales, by key of the codes in the optimizer's state."""

_CODES_KEY = {key: f"{key}_codes" for key in MOMENT_OF}
"""The key of the codes in files, by key of the moment."""

_MARK = "noria"
"""The key of the mark in a state dict that has codes."""

_KEPT_AS_CODES = "kept as codes: noria.plain_state_dict makes floats of them"
"""Stands under the key of the moment: a plain optimizer's step raises because of it."""

_FORMAT = {"moments": "8bit", "block": _C.STATE_BLOCK, "version": 2}
"""The mark. Another version has other codes or keys."""

_ROOTS = {**_FORMAT, "version": 1}
"""The mark of files whose codes stand for roots. They become floats when they are read."""

PURPOSE_OF = {key: MOMENTS[number] for key, number in MOMENT_OF.items()} | {
    SCALES_KEY[key]: SCALES[number] for key, number in MOMENT_OF.items()
}
PURPOSE_OF |= dict.fromkeys(("row_var", "col_var", "variance"), FACTORED)
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
    """Returns the keys of all state tensors of a rule with these moments. Factored moments are always fp32."""
    return keys if state_dtype != "8bit" else (*keys, *(SCALES_KEY[key] for key in keys if key in SCALES_KEY))


def moment_bytes(unit: HomeUnit, number: int, dtype: torch.dtype | None, state_dtype: str) -> int:
    """Returns the bytes of a moment of a fused unit, up to the last parameter that has it.

    `number` is that in MOMENTS, and `dtype` is `Policy.dtype`.
    """
    _, last = _that_have(unit, number)
    itemsize = 2 if dtype is not None else 4
    if last is None:
        return 0
    end = unit.home_gradients
    if last is not _trainable(unit)[-1]:
        end = last.home_offset + aligned(last.like.numel() * itemsize)
    return end // itemsize * _DTYPES[state_dtype][0].itemsize


def scale_bytes(unit: HomeUnit, number: int, state_dtype: str) -> int:
    """Returns the bytes of the scales of a moment, likewise.

    They are more than 0 even if a rank's shard of a trainable unit has no elements.
    """
    slots, last = _that_have(unit, number)
    if state_dtype != "8bit" or last is None:
        return 0
    blocks = sum(-(-slot.most_elements // _C.STATE_BLOCK) for slot in slots)
    return aligned(max(4 * blocks, 1))


def _trainable(unit: HomeUnit) -> list[HomeParameter]:
    return [slot for slot in unit.parameters if slot.trainable]


def _that_have(unit: HomeUnit, number: int) -> tuple[list[HomeParameter], HomeParameter | None]:
    """Returns the trainable parameters up to the last one that has the moment, and that one."""
    slots = _trainable(unit)
    while slots and slots[-1].num_moments <= number:
        slots.pop()
    return slots, slots[-1] if slots else None


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Rounds floats to the nearest codes, block by block in the storage order of `codes`."""
    dense = torch.empty_like(codes, dtype=torch.float32).copy_(values)
    is_first = codes.dtype is torch.int8
    _C.encode_moment(dense.data_ptr(), codes.data_ptr(), scales.data_ptr(), dense.numel(), is_first=is_first)


def _checked(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both on the CPU. Raises UsageError if a block has no scale."""
    codes, scales = codes.cpu(), scales.cpu().contiguous()
    num_blocks = -(-codes.numel() // _C.STATE_BLOCK)
    if scales.numel() < num_blocks or scales.dtype is not torch.float32:
        raise usage_error(
            f"{num_blocks} scales in fp32 for {codes.numel()} codes of a moment",
            f"{scales.numel()} in {scales.dtype}",
            "load a state that noria.save has written",
        )
    return codes, scales


def _decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    codes, scales = _checked(codes, scales)
    values = torch.empty_like(codes, dtype=torch.float32)
    is_first = codes.dtype is torch.int8
    _C.decode_moment(codes.data_ptr(), scales.data_ptr(), values.data_ptr(), values.numel(), is_first=is_first)
    return values


def _decode_roots(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Computes floats from codes of version 1: signed square roots, or fourth roots, of shares of the scale."""
    codes, scales = _checked(codes, scales)
    values = torch.empty_like(codes, dtype=torch.float32)
    in_order = torch.as_strided(values, (values.numel(),), (1,))  # as scales count
    in_order.copy_(torch.as_strided(codes, (codes.numel(),), (1,)))
    scale = scales.repeat_interleave(_C.STATE_BLOCK)[: in_order.numel()]
    if codes.dtype is torch.int8:
        root = in_order * (1 / 127)
        in_order.copy_(torch.where(in_order == -128, torch.nan, root * root.abs() * scale))
    else:
        square = (in_order * (1 / 255)).square()
        in_order.copy_(square * square * scale)
    return values


def coded_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state dict, whose moments may be codes, as files have it."""
    state = {}
    for number, values in state_dict["state"].items():
        state[number] = dict(values) if isinstance(values, dict) else values
        for key, name in _CODES_KEY.items():
            value = values.get(key) if isinstance(values, dict) else None
            if isinstance(value, torch.Tensor) and not value.is_floating_point():
                state[number][name] = value
                state[number][key] = _KEPT_AS_CODES
    return {**state_dict, "state": state, _MARK: dict(_FORMAT)}


def named_codes(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict of a file with its codes under the keys of the moments, as `optimizer.state` shows them.

    Codes of the first version come back as the floats that they stand for. Raises UsageError if the file has an unknown
    format.
    """
    if not isinstance(state_dict, dict) or _MARK not in state_dict:
        return state_dict
    mark = state_dict[_MARK]
    if mark not in (_FORMAT, _ROOTS):
        raise usage_error(
            f"an optimizer's state in the format {_FORMAT}", str(mark), "load it by the version of noria that saved it"
        )
    moments = {name: key for key, name in _CODES_KEY.items()}
    state = dict(state_dict["state"])
    for number, values in state.items():
        if isinstance(values, dict):
            kept = {key: value for key, value in values.items() if not _stands_for_codes(value)}
            named = {moments.get(key, key): value for key, value in kept.items()}
            state[number] = named if mark == _FORMAT else plain_values(named, decode=_decode_roots)
    return {**{key: value for key, value in state_dict.items() if key != _MARK}, "state": state}


def _stands_for_codes(value: object) -> bool:
    return isinstance(value, str) and value == _KEPT_AS_CODES


def plain_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state dict with floats in place of codes, as plain PyTorch writes it.

    It makes 4 bytes for each code. A state dict without codes comes back as it is.

    Args:
        state_dict: One optimizer's. It is the entry "optimizer" of a file by `noria.save` (of several optimizers, an
            element of that list), or what an integration's checkpoint has.

    Returns:
        A state dict that any optimizer of the same class loads.

    Raises:
        UsageError: if its codes are of a format that this version does not know.

    Example:
        >>> noria.save("run.pt", model, optimizer)
        >>> plain = noria.plain_state_dict(torch.load("run.pt")["optimizer"])
    """
    named = named_codes(state_dict)
    if named is state_dict:
        return state_dict
    states = named["state"].items()
    plain = {number: plain_values(values) if isinstance(values, dict) else values for number, values in states}
    return {**named, "state": plain}


def are_low_bits(value: object) -> TypeGuard[torch.Tensor]:
    """Returns True if `value` still has the low bits of a master.

    A plain optimizer's `load_state_dict` casts them to its parameters' dtype, which destroys them.
    """
    return isinstance(value, torch.Tensor) and value.dtype is torch.int16


def plain_values(
    values: Mapping[str, Any],
    *,
    widen: bool = False,
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _decode,
) -> dict[str, Any]:
    """Returns a parameter's state with floats instead of codes. `widen`: moments in bf16 become fp32 too."""
    plain = dict(values)
    for key in MOMENT_OF:
        value, scales = plain.get(key), plain.pop(SCALES_KEY[key], None)
        if not isinstance(value, torch.Tensor):
            continue
        if scales is not None and not value.is_floating_point():
            plain[key] = decode(value, scales)
        elif widen and value.dtype is torch.bfloat16:
            plain[key] = value.float()
    return plain
