"""Lays out the parameters of each unit in bytes, before any memory is taken.

A unit's parameters follow each other, each at a multiple of 512 bytes: trainable vectors first, then trainable
matrices, then what is frozen. Held gradients and moments have the layout of the trainable parameters, so one offset
serves all. Under Muon matrices have fewer moments than vectors. The home then has those of the vectors, the first part.
Ranks that share a model have no Muon, and keep the order of the module.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Sequence

import torch
from torch import nn

from noria import _C
from noria.model.partition import UnitSpec

__all__ = [
    "AVERAGES",
    "FACTORED",
    "GRADIENT_RING",
    "GRADIENT_SCALES",
    "LEAST_RING_SLOTS",
    "SHOWN",
    "TORCH_STATE",
    "UNDO_LOGS",
    "UNSUMMED",
    "HomeParameter",
    "HomeUnit",
    "Region",
    "Ring",
    "StatePlace",
    "aligned",
    "describe_units",
    "factored_region",
    "factored_shapes",
    "factored_size",
    "held_region",
    "scales_region",
    "travel_dtype",
]

GRADIENT_RING = "gradient ring"
"""The purpose of the arena that update="backward" uses instead of held gradients."""

UNSUMMED = "unsummed gradients"
"""The purpose of the arena for whole gradients of one rank, which `model.no_sync()` needs."""

GRADIENT_SCALES = "gradient scales"
"""The purpose of the arena for late scales: factors that `p.grad` was multiplied by, kept beside held gradients."""

UNDO_LOGS = "undo logs"
TORCH_STATE = "optimizer state"
"""The purpose of the arena for what undoes drafts."""

SLOTS_PER_ELEMENT = 1 / 32
"""How many old values an undo log can keep whole. In steady training 1 to 2 % of the elements need it."""

AVERAGES = "averaged weights"
"""The purpose of the arena for averages of weights. A second one has a number behind it."""

FACTORED = "factored moments"
"""The purpose of the arena for second moments by row and by column."""

SHOWN = "materialized weights"
"""The purpose of the arena for whole weights that ranks share, while a block of `noria.materialize` is open."""


@dataclasses.dataclass
class HomeParameter:
    """Describes one parameter's place in its unit. Variables for it are named `slot`.

    - `parameter`: or a tensor inside of a wrapper, which is a parameter (model/inner_tensors.py).
    - `like`: a meta tensor with the planned shape and strides of the parameter's tensors at home. The parameter itself
      has other ones if the user gave it other data.
    - `gradient_offset`: -1 if the parameter is frozen.
    - `is_split`: the master consists of the working copy and the low bits. Otherwise a master is plain.
    - `num_moments`: how many moments the home has of it, by noria's kernels.
    - `first_block`, `num_blocks`: the blocks that share a scale if moments are codes. They are counted per unit.
    - `factored_offset`: in the unit's part of the arena FACTORED.
    - `scales_offset`: in the unit's part of the arena GRADIENT_SCALES; -1 if the parameter is frozen.

    If ranks share the model, the home has one part of the parameter:

    - `like` has one dimension.
    - `first`: the number of the part's first element in storage order.
    - `home_offset`: the part's offset in the unit's part of the home. Without ranks it equals `offset`.
    - `shard_ends`: for each rank, the number of the element behind its part.

    Units: offsets are in bytes.
    """

    parameter: torch.Tensor
    like: torch.Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    name: str
    names: tuple[str, ...]
    index: int
    unit: int
    dtype: torch.dtype
    offset: int
    gradient_offset: int
    has_master: bool
    is_split: bool = False
    num_moments: int = 0
    first_block: int = 0
    num_blocks: int = 0
    factored_offset: int = 0
    home_offset: int = 0
    scales_offset: int = -1
    first: int = 0
    shard_ends: tuple[int, ...] = ()

    @property
    def trainable(self) -> bool:
        return self.gradient_offset >= 0

    def count_on(self, rank: int) -> int:
        """Returns how many elements of the parameter this rank has at home."""
        return self.shard_ends[rank] - (self.shard_ends[rank - 1] if rank else 0)

    @property
    def most_elements(self) -> int:
        """Returns how many elements the rank with the largest part has at home. So all ranks plan the same memory."""
        return max(map(self.count_on, range(len(self.shard_ends))), default=self.like.numel())

    @staticmethod
    def flat(value: torch.Tensor) -> torch.Tensor:
        """Returns a dense tensor's elements in storage order."""
        return value.as_strided((value.numel(),), (1,)) if value.numel() else value.flatten()

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the part of a whole value that the home has."""
        if not self.shard_ends:
            return value
        dense = value
        if value.stride() != self.strides or value.device.type != "cpu":
            dense = torch.empty_strided(self.shape, self.strides, dtype=value.dtype, device="cpu").copy_(value)
        return self.flat(dense)[self.first : self.first + self.like.numel()]


@dataclasses.dataclass
class HomeUnit:
    """Describes a unit and its place in the home. Sizes are in bytes. Addresses are 0 until the home is taken.

    `in_file`: where the part of the weights at home begins and ends that is mapped from a file.
    """

    name: str
    index: int
    is_block: bool
    weights: int
    gradients: int
    parameters: list[HomeParameter]
    num_shards: int = 1
    working_address: int = 0
    in_file: tuple[int, int] = (0, 0)
    held_address: int = 0
    scales_address: int = 0

    @property
    def home_weights(self) -> int:
        """Returns the bytes of weights at home: all of them, or one part if ranks share the unit."""
        return self.weights // self.num_shards

    @property
    def home_gradients(self) -> int:
        return self.gradients // self.num_shards

    @property
    def undo_log(self) -> tuple[int, int, int]:
        """Returns the size of the unit's undo log.

        That is the elements at home, the blocks of all parameters, and the slots of the list of old values.
        """
        trainable = [slot for slot in self.parameters if slot.trainable]
        elements = self.home_gradients // trainable[0].dtype.itemsize if trainable else 0
        blocks = sum(_C.num_undo_blocks(slot.most_elements) for slot in trainable)
        return elements, blocks, int(elements * SLOTS_PER_ELEMENT)

    def spec(self) -> _C.UnitSpec:
        """Returns what the engine must know."""
        return _C.UnitSpec(
            name=self.name,
            weights=self.weights,
            gradients=self.gradients,
            working=self.working_address,
            held=self.held_address,
            in_file=self.in_file,
            parameters=[
                _C.ParameterSpec(
                    parameter=slot.parameter,
                    name=slot.name,
                    dtype=slot.dtype,
                    offset=slot.offset,
                    gradient_offset=slot.gradient_offset,
                    scales=self.scales_address + slot.scales_offset
                    if self.scales_address and slot.scales_offset >= 0
                    else 0,
                )
                for slot in self.parameters
            ],
        )


@dataclasses.dataclass(frozen=True)
class StatePlace:
    """Describes a place in the arena TORCH_STATE, and the tensor that it was planned for."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Region:
    """Describes one arena: its purpose as the ledger names it, and each unit's offset and size in bytes.

    `in_files`: where the parts of the arena begin and end that are mapped from files. They take no memory.
    """

    purpose: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    in_files: tuple[tuple[int, int], ...] = ()

    @property
    def addresses(self) -> int:
        """Returns the bytes of the arena, with those in files."""
        return sum(self.sizes)

    @property
    def bytes(self) -> int:
        """Returns the bytes of memory that the arena takes."""
        return self.addresses - sum(end - begin for begin, end in self.in_files)

    @staticmethod
    def of(purpose: str, sizes: Iterable[int]) -> Region:
        sizes = tuple(sizes)
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += size
        return Region(purpose, tuple(offsets), sizes)


LEAST_RING_SLOTS = 4
"""Of the gradient ring: one drains, one is updated, and both may be late."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """Describes the arena GRADIENT_RING.

    Units whose gradients come in parts have places of their own. Behind them are ring slots, which the other units
    take in turn. Each is as large as the largest of these units.
    """

    region: Region  # the units' own places; the last entry is for the ring slots
    slot_bytes: int
    num_slots: int
    in_parts: int  # bytes of the places of units whose gradients come in parts
    most_postponed: int  # updates that may wait for the end of the backward, if their moments lie in files

    @staticmethod
    def of(units: Sequence[HomeUnit], in_parts: Container[int], num_slots: int) -> Ring:
        """Builds the ring. If places for all units take no more memory than the slots, there are no slots."""
        sizes = [unit.home_gradients if unit.index in in_parts else 0 for unit in units]
        slot_bytes = max((unit.home_gradients for unit in units if unit.index not in in_parts), default=0)
        bytes_in_parts = sum(sizes)
        most_postponed = max(num_slots - LEAST_RING_SLOTS, 0)
        if bytes_in_parts + num_slots * slot_bytes >= sum(unit.home_gradients for unit in units):
            sizes, num_slots = [unit.home_gradients for unit in units], 0
        region = Region.of(GRADIENT_RING, [*sizes, num_slots * slot_bytes])
        return Ring(region, slot_bytes, num_slots, bytes_in_parts, most_postponed)


def held_region(units: Iterable[HomeUnit]) -> Region:
    return Region.of("held gradients", (unit.home_gradients for unit in units))


def scales_region(units: Iterable[HomeUnit]) -> Region:
    """Returns the arena for late scales, of a scaler or a clip for example. Updates apply them to held gradients."""
    return Region.of(GRADIENT_SCALES, (_SCALES_BYTES * _num_trainable(unit) for unit in units))


def factored_shapes(shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the second moments that Adafactor keeps, by key of its state.

    A matrix, in the last two dimensions, has one for each row and one for each column. Other parameters have one for
    each element.
    """
    if len(shape) < 2:
        return {"variance": tuple(shape)}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def factored_bytes(slot: HomeParameter) -> int:
    """Returns the bytes of a parameter's second moments in the arena FACTORED."""
    if not slot.trainable:
        return 0
    return sum(map(factored_size, factored_shapes(slot.like.shape).values()))


def factored_size(shape: Sequence[int]) -> int:
    """Returns the bytes of one tensor there. An empty one has some, too."""
    return aligned(max(4 * math.prod(shape), 1))


def factored_region(units: Iterable[HomeUnit], kept: Container[int]) -> Region:
    """Returns the arena FACTORED, with a part for each unit in `kept`."""
    sizes = (sum(map(factored_bytes, unit.parameters)) if unit.index in kept else 0 for unit in units)
    return Region.of(FACTORED, sizes)


def _num_trainable(unit: HomeUnit) -> int:
    return sum(slot.trainable for slot in unit.parameters)


def describe_units(
    units: list[UnitSpec],
    dtype: torch.dtype | None,
    rank: int = 0,
    num_shards: int = 1,
    trained: Container[torch.Tensor] = (),
) -> list[HomeUnit]:
    """Lays out the units.

    `dtype` is `Policy.dtype`, in which floating parameters travel. `num_shards` is the number of ranks that share the
    units, and `rank` is this one. `trained`: parameters that count as trainable although they are frozen now.
    """

    def is_trainable(parameter: torch.Tensor) -> bool:
        return parameter.requires_grad or parameter in trained

    described: list[HomeUnit] = []
    index = 0
    # No part ends inside a block of codes, so moments are the same for any number of ranks.
    alignment = _C.TENSOR_ALIGNMENT if num_shards == 1 else max(_C.TENSOR_ALIGNMENT, _SHARED_ALIGNMENT)
    for spec in units:
        order = sorted(range(len(spec.parameters)), key=lambda i: num_shards == 1 and spec.parameters[i].dim() > 1)
        parameters: list[HomeParameter] = []
        gradients = weights = 0
        for trainable in (True, False):
            members = [i for i in order if is_trainable(spec.parameters[i]) == trainable]
            begin = weights
            for i in members:
                parameter, names = spec.parameters[i], spec.names[i]
                travels_in = travel_dtype(parameter, dtype)
                parameters.append(
                    HomeParameter(
                        parameter=parameter,
                        like=torch.empty_strided(parameter.shape, parameter.stride(), device="meta"),
                        shape=parameter.shape,
                        strides=parameter.stride(),
                        name=names[0],
                        names=names,
                        index=index,
                        unit=len(described),
                        dtype=travels_in,
                        offset=weights,
                        gradient_offset=weights if trainable else -1,
                        has_master=trainable and dtype is not None and parameter.is_floating_point(),
                        home_offset=weights,
                    )
                )
                index += 1
                weights = aligned(weights + parameter.numel() * travels_in.itemsize, alignment)
            if trainable and members:
                weights = max(weights, _C.TENSOR_ALIGNMENT)  # a unit of empty parameters has bytes too
            weights = begin + aligned(-(-(weights - begin) // num_shards), alignment) * num_shards
            if trainable:
                gradients = weights
            if num_shards > 1:
                part = (weights - begin) // num_shards
                _set_shards(parameters[-len(members) :] if members else [], begin, part, rank, num_shards)
        first_block = factored = 0
        for number, slot in enumerate(slot for slot in parameters if slot.trainable):
            slot.scales_offset = number * _SCALES_BYTES
        for slot in parameters:
            slot.first_block = first_block
            slot.num_blocks = -(-slot.like.numel() // _C.STATE_BLOCK) if slot.trainable else 0
            first_block += slot.num_blocks
            slot.factored_offset = factored
            factored += factored_bytes(slot)
        weights = max(weights, alignment * num_shards)
        described.append(HomeUnit(spec.name, len(described), spec.is_block, weights, gradients, parameters, num_shards))
    return described


def _set_shards(slots: list[HomeParameter], begin: int, part: int, rank: int, num_shards: int) -> None:
    """Splits the bytes from `begin` on over the ranks: each gets `part` bytes."""
    for slot in slots:
        itemsize, count = slot.dtype.itemsize, slot.shape.numel()
        ends = [begin + (number + 1) * part - slot.offset for number in range(num_shards)]
        slot.shard_ends = tuple(min(max(end // itemsize, 0), count) for end in ends)
        slot.first = slot.shard_ends[rank - 1] if rank else 0
        slot.like = torch.empty(slot.count_on(rank), device="meta")
        inside = slot.offset + slot.first * itemsize - begin - rank * part
        slot.home_offset = begin // num_shards + min(max(inside, 0), part)


def travel_dtype(parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the working copy. Tensors inside wrappers keep theirs."""
    is_cast = isinstance(parameter, nn.Parameter) and parameter.is_floating_point()
    return dtype if dtype is not None and is_cast else parameter.dtype


def aligned(num_bytes: int, alignment: int = _C.TENSOR_ALIGNMENT) -> int:
    """Returns the bytes up to the next multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


_SHARED_ALIGNMENT = _C.STATE_BLOCK * torch.float32.itemsize

_SCALES_BYTES = _C.MOST_LATE_SCALES * torch.float32.itemsize  # for one parameter
