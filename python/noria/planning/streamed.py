"""Plans updates that the device runs though state lies at home: the pieces of units, and what of each is copied."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence

import torch

from noria import _C
from noria._errors import usage_error
from noria.model.layout import TORCH_STATE, HomeUnit, Region, StatePlace, aligned
from noria.model.moment_formats import MOMENTS
from noria.planning.kernels import Kernels
from noria.policy import Policy

__all__ = [
    "GRADIENTS_IN_FP32",
    "NUM_SLOTS",
    "PIECE_ELEMENTS",
    "StreamCopy",
    "StreamPiece",
    "bytes_moved",
    "bytes_of_ops",
    "choose_streamed",
    "pieces_of",
    "refuse_place",
    "slot_bytes",
]

NUM_SLOTS = 3
"""How many pieces have memory on the device at once: one is updated, one comes, and one goes home."""

PIECE_ELEMENTS = 8 << 20
"""How many elements of a unit make a piece. With AdamW in bfloat16 a slot then takes 112 MiB, and no copy is short."""

GRADIENTS_IN_FP32 = "gradients in fp32"
"""The part of a slot in which torch's update finds gradients, if masters are fp32 and gradients are not."""


@dataclasses.dataclass(frozen=True)
class StreamCopy:
    """Describes a range that is copied to a slot, or home, or both. `home_offset` is in the arena `purpose`."""

    purpose: str
    home_offset: int
    slot_offset: int
    num_bytes: int
    comes: bool
    goes: bool


@dataclasses.dataclass(frozen=True)
class StreamPiece:
    """Describes the bytes from `begin` to `end` of a unit's held gradients, and what its slot holds.

    `offsets`: where in the slot the piece's part of an arena begins, by purpose. Tensors of torch's state have entries
    by their offset in the arena TORCH_STATE. GRADIENTS_IN_FP32 is for torch's update beside masters.
    """

    unit: int
    begin: int
    end: int
    copies: tuple[StreamCopy, ...]
    offsets: dict[str | int, int]
    parameters: frozenset[int]
    """Indices of the trainable parameters that begin in the piece."""
    num_bytes: int


_ASKED = 'optimizer_device="device"'


def refuse_place(policy: Policy) -> None:
    """Raises UsageError if updates on the device do not go together with the policy's other options."""
    if policy.optimizer_device == "host":
        return
    if policy.update == "backward":
        raise usage_error(f'{_ASKED} with update="auto" or "blocking"', 'update="backward"', "choose one of the two")
    if policy.state_dtype != "fp32":
        found = f'state_dtype="{policy.state_dtype}"'
        raise usage_error(f'{_ASKED} with state_dtype="fp32"', found, "choose one of the two")


def choose_streamed(kernels: Kernels, stays: Container[int], device: torch.device) -> frozenset[int]:
    """Returns the units that the device updates in pieces, by the policy's `optimizer_device`.

    Units that torch updates are among them also if they stay: so they have the device's bits also while they are not at
    rest. So are units that no optimizer holds yet.

    Raises UsageError if the device cannot. Order: `refuse_place` comes first.
    """
    if kernels.policy.optimizer_device == "host":
        return frozenset()
    for optimizer, kernel in zip(kernels.optimizers, kernels.by_optimizer, strict=True):
        if kernel == "whole":
            raise usage_error(
                f"{_ASKED} with optimizers that work parameter by parameter",
                f"{type(optimizer).__name__}, which may look at all parameters",
                'use optimizer_device="host", or an optimizer of torch.optim other than LBFGS and SparseAdam',
            )
    if not kernels.optimizers:
        return frozenset()
    units = [
        unit
        for unit in kernels.units
        if (unit.index not in stays or unit.index not in kernels.fused)
        and any(slot.trainable for slot in unit.parameters)
    ]
    if device.type != "cpu" and not _C.has_kernel_images() and any(unit.index in kernels.fused for unit in units):
        raise usage_error(
            f"{_ASKED} in a build of noria with kernels for devices",
            "one that was built without nvcc",
            'build noria where there is an nvcc, or say kernel="torch"',
        )
    return frozenset(unit.index for unit in units)


def pieces_of(
    unit: HomeUnit,
    is_fused: bool,
    regions: Sequence[Region],
    states: Sequence[dict[tuple[int, str], StatePlace]],
) -> list[StreamPiece]:
    """Returns the pieces of a unit that is updated on the device.

    noria's kernels work element by element, so such pieces are cut anywhere. torch's pieces hold whole parameters: as
    many as are not larger than a piece of the other kind, and at least one.
    """
    sizes = {region.purpose: region.sizes[unit.index] for region in regions if len(region.sizes) > unit.index}
    offsets = {region.purpose: region.offsets[unit.index] for region in regions if len(region.sizes) > unit.index}
    trainable = sorted((slot for slot in unit.parameters if slot.trainable), key=lambda slot: slot.home_offset)
    item = min(slot.dtype.itemsize for slot in trainable)
    bounds = _bounds(unit, [slot.home_offset for slot in trainable], PIECE_ELEMENTS * item, cuts_anywhere=is_fused)
    has_masters = not is_fused and sizes.get("masters", 0) > 0
    pieces = []
    for begin, end in itertools.pairwise(bounds):
        made = _Slot()
        made.add("working copies", offsets["working copies"] + begin, end - begin, comes=True, goes=True)
        made.add("held gradients", offsets["held gradients"] + begin, end - begin, comes=True, goes=False)
        for purpose in ("low bits", *MOMENTS) if is_fused else ("masters",):
            scale = sizes.get(purpose, 0) // unit.home_gradients
            if scale:
                made.add(purpose, offsets[purpose] + begin * scale, (end - begin) * scale, comes=True, goes=True)
        is_last = end == unit.home_gradients  # parameters behind it are empty on this rank
        inside = {slot.index for slot in trainable if begin <= slot.home_offset and (slot.home_offset < end or is_last)}
        for places in states if not is_fused else ():
            for (index, _), place in places.items():
                if index in inside:
                    made.add(TORCH_STATE, place.offset, place.num_bytes, comes=True, goes=True, key=place.offset)
        if has_masters:
            made.offsets[GRADIENTS_IN_FP32] = made.leave(2 * (end - begin))
        copies, parameters = tuple(made.copies), frozenset(inside)
        pieces.append(StreamPiece(unit.index, begin, end, copies, made.offsets, parameters, made.end))
    return pieces


def slot_bytes(streamed: Mapping[int, Sequence[StreamPiece]]) -> int:
    """Returns the bytes of one slot, in which any piece of these units fits."""
    return max((piece.num_bytes for pieces in streamed.values() for piece in pieces), default=0)


def bytes_moved(pieces: Iterable[StreamPiece]) -> int:
    """Returns the bytes that come and that go home. An update by noria's kernels reads and writes the same number."""
    return sum(copy.num_bytes * (copy.comes + copy.goes) for piece in pieces for copy in piece.copies)


def bytes_of_ops(streamed: Mapping[int, Sequence[StreamPiece]]) -> dict[int, float]:
    """Returns the bytes that one update op of a unit reads and writes on the device, by unit."""
    return {unit: bytes_moved(pieces) / len(pieces) for unit, pieces in streamed.items()}


def _bounds(unit: HomeUnit, begins: list[int], most: int, *, cuts_anywhere: bool) -> list[int]:
    if cuts_anywhere:
        return [*range(0, unit.home_gradients, aligned(most)), unit.home_gradients]
    bounds = [0]
    for begin, end in zip(begins, [*begins[1:], unit.home_gradients], strict=True):
        if end - bounds[-1] > most and begin > bounds[-1]:
            bounds.append(begin)
    return [*bounds, unit.home_gradients]


class _Slot:
    """Lays out one slot."""

    def __init__(self) -> None:
        self.copies: list[StreamCopy] = []
        self.offsets: dict[str | int, int] = {}
        self.end = 0

    def add(
        self, purpose: str, home_offset: int, num_bytes: int, *, comes: bool, goes: bool, key: int | None = None
    ) -> None:
        at = self.offsets[purpose if key is None else key] = self.leave(num_bytes)
        self.copies.append(StreamCopy(purpose, home_offset, at, num_bytes, comes, goes))

    def leave(self, num_bytes: int) -> int:
        at = self.end
        self.end += aligned(num_bytes)
        return at
