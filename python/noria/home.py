"""The home: where every byte of the wrapped parameters lies in host memory, and the tensors that view it.

A unit's parameters lie behind each other, trainable ones first, each at a multiple of 512 bytes; its held gradients
have the layout of that first part, so one offset serves both. Arenas are of exact size, one for each purpose, and
nothing is taken before the plan has been checked against `host_memory` and the limits of the machine; then all of it is
mapped at once, next to the device, and what the copy engines touch is registered with it. Pages for the optimizer's
state are taken when the weights have moved and their old memory is free: the model and all of its home are never there
together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from torch import nn

from noria import _C
from noria._errors import usage_error
from noria._progress import Bar
from noria.limits import numa_node
from noria.modes import plainly
from noria.moments import MOMENTS, SCALES
from noria.partition import UnitSpec
from noria.policy import format_bytes

__all__ = [
    "GRADIENT_RING",
    "SHOWN",
    "UNSUMMED",
    "Home",
    "HomeParameter",
    "HomeUnit",
    "Region",
    "StatePlace",
    "describe_units",
    "held_region",
    "scales_region",
    "travel_dtype",
]

GRADIENT_RING = "gradient ring"
"""Purpose of the arena that update="backward" has in place of held gradients."""

UNSUMMED = "unsummed gradients"
"""Purpose of the arena for whole gradients of one rank, which `model.no_sync()` wants."""

GRADIENT_SCALES = "gradient scales"
"""Purpose of the arena for what gradients have been multiplied by since they were held."""

SHOWN = "materialized weights"
"""Purpose of the arena for whole weights of ranks that share them, while a block of `noria.materialize` is open."""


@dataclasses.dataclass
class HomeParameter:
    """One parameter's place in its unit. `like`: a tensor without memory, of the shape and strides that its tensors at
    home have, as they were planned for; the parameter's own are others where the user gave it other data. Offsets in
    bytes; `gradient_offset` -1 means frozen. `is_split`: its master is the working copy with the low bits; a master
    that is not is plain. Blocks are those that share a scale where moments are codes, counted in the unit.

    `scales_offset`: in the unit's part of the arena of that name, -1 where it is frozen.

    Where ranks share the model, the home has a part of it: `like` has one dimension, `first` is the number of its first
    element in the order of storage, and `home_offset`, else as `offset`, where it lies in the unit's part. `cuts`: by
    rank, the number of the element with which that rank's part ends."""

    parameter: nn.Parameter
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
    first_block: int = 0
    num_blocks: int = 0
    home_offset: int = 0
    scales_offset: int = -1
    first: int = 0
    cuts: tuple[int, ...] = ()

    @property
    def trainable(self) -> bool:
        return self.gradient_offset >= 0

    def count_on(self, rank: int) -> int:
        """Elements that a rank has of it at home."""
        return self.cuts[rank] - (self.cuts[rank - 1] if rank else 0)

    @staticmethod
    def flat(value: torch.Tensor) -> torch.Tensor:
        """A dense tensor's elements in the order of storage."""
        return value.as_strided((value.numel(),), (1,)) if value.numel() else value.flatten()

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        """What the home has of a whole value."""
        if not self.cuts:
            return value
        dense = value
        if value.stride() != self.strides or value.device.type != "cpu":
            dense = torch.empty_strided(self.shape, self.strides, dtype=value.dtype, device="cpu").copy_(value)
        return self.flat(dense)[self.first : self.first + self.like.numel()]


@dataclasses.dataclass
class HomeUnit:
    """What the engine must know of a unit: sizes in bytes, addresses once the home has been taken."""

    name: str
    index: int
    is_block: bool
    weights: int
    gradients: int
    parameters: list[HomeParameter]
    num_parts: int = 1
    working_address: int = 0
    held_address: int = 0
    scales_address: int = 0
    spare_address: int = 0  # of the working copy, where drafts are written; 0: none are

    @property
    def home_weights(self) -> int:
        """Bytes at home: all, or one part of as many as there are ranks."""
        return self.weights // self.num_parts

    @property
    def home_gradients(self) -> int:
        return self.gradients // self.num_parts


@dataclasses.dataclass(frozen=True)
class StatePlace:
    """A place in the arena "optimizer state", and what it was planned for."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Region:
    """One arena: a purpose as the ledger calls it, and for each unit its offset and size in bytes. `spares`: by drafted
    unit, the offset of as much again."""

    purpose: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    spares: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.sizes) + self.spare_bytes

    @property
    def spare_bytes(self) -> int:
        return sum(self.sizes[unit] for unit in self.spares)

    @staticmethod
    def of(purpose: str, sizes: Iterable[int], drafted: Iterable[int] = ()) -> Region:
        sizes = tuple(sizes)
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += size
        spares = {}
        for unit in drafted:
            if sizes[unit]:
                spares[unit] = end
                end += sizes[unit]
        return Region(purpose, tuple(offsets), sizes, spares)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The arena GRADIENT_RING: places of their own for units whose gradients come in parts, then slots for the others,
    each as large as the largest of them."""

    region: Region  # of the units' own places; the last entry is the slots'
    slot_bytes: int
    num_slots: int

    @staticmethod
    def of(units: Sequence[HomeUnit], in_parts: Container[int], num_slots: int) -> Ring:
        """No slots where there is room for all in as much memory."""
        sizes = [unit.home_gradients if unit.index in in_parts else 0 for unit in units]
        slot_bytes = max((unit.home_gradients for unit in units if unit.index not in in_parts), default=0)
        if sum(sizes) + num_slots * slot_bytes >= sum(unit.home_gradients for unit in units):
            sizes, num_slots = [unit.home_gradients for unit in units], 0
        return Ring(Region.of(GRADIENT_RING, [*sizes, num_slots * slot_bytes]), slot_bytes, num_slots)


def held_region(units: Iterable[HomeUnit]) -> Region:
    return Region.of("held gradients", (unit.home_gradients for unit in units))


def scales_region(units: Iterable[HomeUnit]) -> Region:
    """What held gradients are multiplied by when they are used: by a scaler and a clip, say."""
    return Region.of(GRADIENT_SCALES, (_SCALES_BYTES * _num_trainable(unit) for unit in units))


def _num_trainable(unit: HomeUnit) -> int:
    return sum(slot.trainable for slot in unit.parameters)


def describe_units(
    units: list[UnitSpec], dtype: torch.dtype | None, rank: int = 0, num_parts: int = 1
) -> list[HomeUnit]:
    """Lays out the units; `dtype` is `Policy.dtype`: what floating parameters travel in. `num_parts`: of ranks that
    share them, of which this one is `rank`."""
    described: list[HomeUnit] = []
    index = 0
    # A part is not to end inside of a block of codes: then moments are the same however many ranks share them.
    alignment = _C.TENSOR_ALIGNMENT if num_parts == 1 else max(_C.TENSOR_ALIGNMENT, _SHARED_ALIGNMENT)
    for spec in units:
        order = sorted(range(len(spec.parameters)), key=lambda i: not spec.parameters[i].requires_grad)
        parameters: list[HomeParameter] = []
        gradients = weights = 0
        for trainable in (True, False):
            members = [i for i in order if spec.parameters[i].requires_grad == trainable]
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
                weights = _align(weights + parameter.numel() * travels_in.itemsize, alignment)
            if trainable and members:
                weights = max(weights, _C.TENSOR_ALIGNMENT)  # a unit of empty parameters is a unit too
            weights = begin + _align(-(-(weights - begin) // num_parts), alignment) * num_parts
            if trainable:
                gradients = weights
            if num_parts > 1:
                part = (weights - begin) // num_parts
                _cut(parameters[-len(members) :] if members else [], begin, part, rank, num_parts)
        first_block = 0
        for number, slot in enumerate(slot for slot in parameters if slot.trainable):
            slot.scales_offset = number * _SCALES_BYTES
        for slot in parameters:
            slot.first_block = first_block
            slot.num_blocks = -(-slot.like.numel() // _C.STATE_BLOCK) if slot.trainable else 0
            first_block += slot.num_blocks
        weights = max(weights, alignment * num_parts)
        described.append(HomeUnit(spec.name, len(described), spec.is_block, weights, gradients, parameters, num_parts))
    return described


def _cut(slots: list[HomeParameter], begin: int, part: int, rank: int, num_parts: int) -> None:
    """Of the bytes from `begin` on, each rank has `part` of them."""
    for slot in slots:
        itemsize, count = slot.dtype.itemsize, slot.shape.numel()
        ends = [begin + (number + 1) * part - slot.offset for number in range(num_parts)]
        slot.cuts = tuple(min(max(end // itemsize, 0), count) for end in ends)
        slot.first = slot.cuts[rank - 1] if rank else 0
        slot.like = torch.empty(slot.count_on(rank), device="meta")
        inside = slot.offset + slot.first * itemsize - begin - rank * part
        slot.home_offset = begin // num_parts + min(max(inside, 0), part)


def travel_dtype(parameter: nn.Parameter, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype


def _align(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


_SHARED_ALIGNMENT = _C.STATE_BLOCK * torch.float32.itemsize

# What the copy engines touch, and whether the device's own kernels do too: p.grad is a device tensor over the home.
_USES = {
    "working copies": "copies",
    "held gradients": "device",
    GRADIENT_SCALES: "device",
    GRADIENT_RING: "device",
}

_SCALES_BYTES = _C.MOST_LATE_SCALES * torch.float32.itemsize  # of one parameter

# Purposes whose pages are taken when the weights have moved.
_LATE = (*MOMENTS, *SCALES, "optimizer state")


class Home:
    """The arenas of one `wrap` call. Arenas live as long as any tensor in them.

    `notes`: what the machine did not grant, though nothing depends on it. `staged`: purposes whose memory the driver
    refused to pin. Raises UsageError when it refuses what must be pinned, and whatever interrupts it (Ctrl-C): nothing
    is taken then.
    """

    def __init__(self, units: list[HomeUnit], regions: list[Region], backend: _C.Backend) -> None:
        self.units = units
        self.regions = {region.purpose: region for region in regions}
        self.arenas: dict[str, _C.Arena] = {}
        self.notes: list[str] = []
        self.staged: list[str] = []
        self.is_moved: Callable[[int], bool] = lambda unit: (
            False
        )  # its state lies where the spare was; the engine knows
        try:
            self._take(backend)
        except BaseException:
            for arena in self.arenas.values():
                arena.close()
            raise
        for unit in units:
            unit.working_address = self.address("working copies", unit.index)
            if unit.index in self.regions["working copies"].spares:
                unit.spare_address = self.address("working copies", unit.index, spare=True)
            unit.scales_address = self.address(GRADIENT_SCALES, unit.index)
            for purpose in ("held gradients", GRADIENT_RING):
                if purpose in self.arenas and self.regions[purpose].sizes[unit.index]:
                    unit.held_address = self.address(purpose, unit.index)

    def _take(self, backend: _C.Backend) -> None:
        for region in self.regions.values():
            if region.bytes:
                self._map(region, backend)
        self._populate([purpose for purpose in self.arenas if purpose not in _LATE])
        self._register_all([purpose for purpose in _USES if purpose in self.arenas], backend)

    def take_rest(self) -> None:
        """The pages that are not needed before weights have moved. What interrupts it leaves them to who writes them
        first."""
        self._populate([purpose for purpose in self.arenas if purpose in _LATE])

    def _map(self, region: Region, backend: _C.Backend) -> _C.Arena:
        """Next to the device; without pages yet, and not registered."""
        arena = self.arenas[region.purpose] = _C.Arena(region.bytes)
        node = numa_node(backend.pci_bus_id)
        if node is not None and (refused := arena.prefer_node(node)):
            self.notes.append(f"{region.purpose} may lie far from the device: {refused}")
        return arena

    def _populate(self, purposes: list[str]) -> None:
        done = 0
        with Bar("taking the home", sum(self.arenas[purpose].bytes for purpose in purposes)) as bar:
            for purpose in purposes:
                self.arenas[purpose].populate(functools.partial(bar.tell, done))
                done += self.arenas[purpose].bytes

    def _register_all(self, purposes: list[str], backend: _C.Backend) -> None:
        """Beside each other: the driver looks up every page, on the thread that calls. A copy may not span two
        registrations, so an arena is one."""
        done = 0
        with (
            Bar("registering the home", sum(self.arenas[purpose].bytes for purpose in purposes)) as bar,
            ThreadPoolExecutor(max(len(purposes), 1), thread_name_prefix="noria-register") as threads,
        ):
            under_way = {threads.submit(self._register, each, _USES[each], backend): each for each in purposes}
            for registered in as_completed(under_way):
                registered.result()
                done += self.arenas[under_way[registered]].bytes
                bar.tell(done, 0)

    def _register(self, purpose: str, use: str, backend: _C.Backend) -> None:
        arena = self.arenas[purpose]
        try:
            refused = arena.register_with(backend, use)
        except _C.MachineError as error:
            raise usage_error(
                f"{format_bytes(arena.bytes)} of pinned host memory for {purpose}, which the device reads as p.grad",
                f"the driver's refusal: {error}",
                "allow this process to pin more memory (ulimit -l unlimited, or the container's --ulimit memlock=-1), "
                "or freeze parameters",
            ) from error
        if refused:
            self.staged.append(purpose)
            self.notes.append(
                f"{purpose} are not pinned and go through a staging ring of {format_bytes(backend.staging_bytes)}, "
                f"at the pace of one host thread's copies: {refused}"
            )

    def take_later(self, region: Region, backend: _C.Backend) -> list[int]:
        """One more arena, once training has begun, for the device's own kernels too; addresses by unit, or 0."""
        self.regions[region.purpose] = region
        try:
            self._map(region, backend).populate(lambda done: None)
            self._register(region.purpose, "device", backend)
        except BaseException:
            del self.regions[region.purpose]
            if (taken := self.arenas.pop(region.purpose, None)) is not None:
                taken.close()
            raise
        return [self.address(region.purpose, unit) if size else 0 for unit, size in enumerate(region.sizes)]

    def let_go(self) -> None:
        """The user has the memory from now on, and so have children that are forked."""
        for arena in self.arenas.values():
            arena.allow_fork()

    def give_back(self, purpose: str) -> None:
        self.regions.pop(purpose)
        self.arenas.pop(purpose).close()

    def address(self, purpose: str, unit: int, spare: bool = False) -> int:
        """Of the unit's part of an arena, as it lies now; `spare`: of where a draft of it is written."""
        if purpose not in self.arenas:
            return 0
        return self.arenas[purpose].data + self._offset(purpose, unit, spare)

    def _offset(self, purpose: str, unit: int, spare: bool = False) -> int:
        region = self.regions[purpose]
        other = unit in region.spares and self.is_moved(unit) != spare
        return region.spares[unit] if other else region.offsets[unit]

    def tensor(self, purpose: str, unit: int, offset: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A CPU tensor with the shape and strides of `like`, `offset` bytes into the unit's part of an arena."""
        base = self._offset(purpose, unit)
        with plainly():  # whoever asks first, it may be kept
            return _C.tensor_in(self.arenas[purpose], base + offset, dtype, list(like.shape), list(like.stride()))

    def watched(self, slot: HomeParameter, before_write: Callable[[], None]) -> torch.Tensor:
        """As `working`, for the user's hands: after `_C.watch` of it, its first write calls `before_write`."""
        offset = self._offset("working copies", slot.unit) + slot.home_offset
        with plainly():
            return _C.watched_tensor_in(self.arenas["working copies"], offset, slot.like, slot.dtype, before_write)

    def working(self, slot: HomeParameter) -> torch.Tensor:
        return self.tensor("working copies", slot.unit, slot.home_offset, slot.like, slot.dtype)

    def held(self, slot: HomeParameter) -> torch.Tensor:
        return self.tensor("held gradients", slot.unit, slot.home_offset, slot.like, slot.dtype)

    def master(self, slot: HomeParameter) -> torch.Tensor:
        """The plain fp32 master (where torch updates, under a bfloat16 policy)."""
        scale = 4 // slot.dtype.itemsize
        return self.tensor("masters", slot.unit, slot.home_offset * scale, slot.like, torch.float32)

    def low_bits(self, slot: HomeParameter) -> torch.Tensor:
        """The low 16 bits of a split master, as int16."""
        return self.tensor("low bits", slot.unit, slot.home_offset, slot.like, torch.int16)

    def has(self, purpose: str, unit: int) -> bool:
        """Whether the unit has a part of this arena."""
        return purpose in self.arenas and self.regions[purpose].sizes[unit] > 0

    def moment(
        self,
        purpose: str,
        slot: HomeParameter,
        dtype: torch.dtype,
        before_write: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """A moment of the fused kernels, with the parameter's element offset. `before_write`: as in `watched`."""
        return self._state(purpose, slot, self.moment_offset(slot, dtype), slot.like, dtype, before_write)

    def scales(self, purpose: str, slot: HomeParameter, before_write: Callable[[], None] | None = None) -> torch.Tensor:
        """Of a moment that is kept as codes: one for each block."""
        like = torch.empty(slot.num_blocks, device="meta")
        return self._state(purpose, slot, self.scales_offset(slot), like, torch.float32, before_write)

    @staticmethod
    def moment_offset(slot: HomeParameter, dtype: torch.dtype) -> int:
        return slot.home_offset // slot.dtype.itemsize * dtype.itemsize

    @staticmethod
    def scales_offset(slot: HomeParameter) -> int:
        return slot.first_block * torch.float32.itemsize

    def _state(
        self,
        purpose: str,
        slot: HomeParameter,
        offset: int,
        like: torch.Tensor,
        dtype: torch.dtype,
        before_write: Callable[[], None] | None,
    ) -> torch.Tensor:
        if before_write is None:
            return self.tensor(purpose, slot.unit, offset, like, dtype)
        offset += self._offset(purpose, slot.unit)
        with plainly():
            return _C.watched_tensor_in(self.arenas[purpose], offset, like, dtype, before_write)
