"""Takes the home in host memory, and makes the tensors that view it.

The home is one arena of exact size for each purpose. `noria.model.layout` gives each parameter's place in its unit.

Order: the plan is checked against `host_memory` and the machine's limits first. Then all arenas are mapped at once, in
the device's NUMA node, and those that its copy engines touch are registered with it. Pages for masters and low bits are
taken while the weights move. Pages for optimizer state are taken after that, when the old memory of the weights is
free. So the model and its whole home never exist together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from noria import _C
from noria._errors import usage_error
from noria._progress import Bar
from noria.host.limits import numa_node
from noria.host.machine import machine
from noria.model.file_layout import WEIGHTS, WEIGHTS_SLOTS, FilePlan
from noria.model.layout import (
    AVERAGES,
    FACTORED,
    GRADIENT_RING,
    GRADIENT_SCALES,
    TORCH_STATE,
    UNDO_LOGS,
    HomeParameter,
    HomeUnit,
    Region,
    factored_shapes,
    factored_size,
)
from noria.model.moment_formats import MOMENTS, SCALES
from noria.policy import format_bytes
from noria.torch_state import plainly

__all__ = ["LATE", "Home"]

# Arenas that the copy engines touch. "device": the device's own kernels do too, as p.grad is a device tensor over them.
_USES = {
    WEIGHTS: "copies",
    WEIGHTS_SLOTS: "copies",
    "held gradients": "device",
    GRADIENT_SCALES: "device",
    GRADIENT_RING: "device",
}

LATE = ("low bits", "masters", *MOMENTS, *SCALES, FACTORED, TORCH_STATE, UNDO_LOGS)
"""Purposes whose pages are taken while the weights move (the first two), or after that."""

# Purposes that only the host reads and writes: their arenas are not registered, unless updates run on the device.
_HOST_ONLY = (*LATE, "update scratch", AVERAGES)


class Home:
    """Holds the arenas of one `wrap` call.

    `notes` says what the machine did not grant; noria works without it. `staged` lists the purposes whose memory the
    driver refused to pin. Raises UsageError if the driver refuses memory that must be pinned. After this or
    any other exception (Ctrl-C), nothing is taken.

    Ownership: an arena lives as long as any tensor in it.
    """

    def __init__(
        self, units: list[HomeUnit], regions: list[Region], backend: _C.Backend, file_plan: FilePlan | None = None
    ) -> None:
        self.units = units
        self.file_plan = file_plan or FilePlan()
        self.files: _C.FileHome | None = None
        self.weight_files: _C.FileStore | None = None
        self.regions = {region.purpose: region for region in regions}
        self.arenas: dict[str, _C.Arena] = {}
        self.notes: list[str] = []
        self.staged: list[str] = []
        self._pinned: set[str] = set()
        self._records = {unit: number for number, unit in enumerate(self.file_plan.sizes)}
        self._weights_records = {unit: number for number, unit in enumerate(sorted(self.file_plan.weights))}
        folders = self.file_plan.folders
        try:
            if self.file_plan.sizes:
                self.files = machine().files(folders, list(self.file_plan.sizes.values()), self.file_plan.num_slots)
                self.notes += self.files.notes
            if self.file_plan.weights:
                self.weight_files = machine().file_store(folders)
                sizes = self.file_plan.weights_sizes
                for index in self._weights_records:
                    self.weight_files.add_mapped(sizes[index])
                self.weight_files.reserve()
            self._take(backend)
            if self.weight_files is not None:
                self._map_weights(self.weight_files)
                self.notes += (note for note in self.weight_files.notes if note not in self.notes)
        except BaseException:
            for arena in self.arenas.values():
                arena.close()
            raise
        for unit in units:
            unit.working_address = self.address(WEIGHTS, unit.index)
            unit.in_file = self.file_plan.weights.get(unit.index, (0, 0))
            unit.scales_address = self.address(GRADIENT_SCALES, unit.index)
            for purpose in ("held gradients", GRADIENT_RING):
                if purpose in self.arenas and self.regions[purpose].sizes[unit.index]:
                    unit.held_address = self.address(purpose, unit.index)

    def _take(self, backend: _C.Backend) -> None:
        for region in self.regions.values():
            if region.addresses:
                self._map(region, backend)
        self._populate([purpose for purpose in self.arenas if purpose not in LATE])
        self.pin(_USES, backend)

    def _map_weights(self, files: _C.FileStore) -> None:
        arena = self.arenas[WEIGHTS]
        for record, (begin, _) in enumerate(self.regions[WEIGHTS].in_files):
            files.map(record, arena, begin)
        slots = self.arenas[WEIGHTS_SLOTS]
        files.expect_memory(slots.data, slots.bytes)

    def take_in_weights(self) -> None:
        """Takes memory for all weights that lie in files, and reads them. If that raises, they lie there still."""
        if self.weight_files is not None:
            self.weight_files.take_in(self.arenas[WEIGHTS])
            self.weight_files = None

    def take_rest(self) -> None:
        """Takes the pages that are not needed before the weights have moved.

        If it is interrupted, each remaining page is taken by the first write to it.
        """
        self._populate([purpose for purpose in self.arenas if purpose in LATE])

    def pin(self, purposes: Iterable[str], backend: _C.Backend) -> None:
        """Registers arenas that the copy engines touch. Order: their pages have been taken."""
        new = [purpose for purpose in purposes if purpose in self.arenas and purpose not in self._pinned]
        self._register_all(new, backend)
        self._pinned.update(new)

    def _map(self, region: Region, backend: _C.Backend) -> _C.Arena:
        """Maps an arena in the device's NUMA node. It has no pages yet, and is not registered."""
        arena = self.arenas[region.purpose] = _C.Arena(region.addresses, region.in_files)
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
        """Registers the arenas in parallel, because the driver looks up every page on the calling thread.

        Each arena is one registration, because a copy may not span two. One with parts in files has one between them.
        """
        done = 0
        with (
            Bar("registering the home", sum(self.arenas[purpose].bytes for purpose in purposes)) as bar,
            ThreadPoolExecutor(
                max(len(purposes), 1), initializer=_C.begin_own_thread, initargs=("register",)
            ) as threads,
        ):
            under_way = {
                threads.submit(self._register, each, _USES.get(each, "copies"), backend): each for each in purposes
            }
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
        """Takes one more arena after training has begun.

        The device's own kernels may use it too, if its purpose is none that only the host works on.

        Returns an address for each unit, or 0 if the unit has no part in it.
        """
        before = self.regions.get(region.purpose)  # a plan may name a purpose that takes nothing yet
        self.regions[region.purpose] = region
        try:
            self._map(region, backend).populate(lambda done: None)
            if not region.purpose.startswith(_HOST_ONLY):
                self._register(region.purpose, "device", backend)
        except BaseException:
            del self.regions[region.purpose]
            if before is not None:
                self.regions[region.purpose] = before
            if (taken := self.arenas.pop(region.purpose, None)) is not None:
                taken.close()
            raise
        return [self.address(region.purpose, unit) if size else 0 for unit, size in enumerate(region.sizes)]

    def let_go(self) -> None:
        """Leaves the memory to the user. Forked child processes have it too from now on."""
        for arena in self.arenas.values():
            arena.allow_fork()

    def give_back(self, purpose: str) -> None:
        self._pinned.discard(purpose)
        self.regions.pop(purpose)
        self.arenas.pop(purpose).close()

    def leave(self, purpose: str) -> None:
        """Forgets an arena, which now lives as long as any tensor in it."""
        self.regions.pop(purpose)
        self.arenas.pop(purpose)

    def address(self, purpose: str, unit: int) -> int:
        """Returns the address of the unit's part of an arena, or 0 if there is no such arena."""
        if purpose not in self.arenas and not self.in_file(purpose, unit):
            return 0
        arena, offset = self._place(purpose, unit)
        return arena.data + offset

    def in_file(self, purpose: str, unit: int) -> bool:
        """Returns True if the unit's part of an arena lies in a file. It has memory while the engine has brought it."""
        return purpose in self.file_plan.offsets.get(unit, ())

    def record(self, unit: int) -> int:
        """Returns the number of the unit's record in files; -1 if it has none."""
        return self._records.get(unit, -1)

    def weights_record(self, unit: int) -> int:
        """Returns the number of the record that has the unit's frozen weights; -1 if no file has them."""
        return self._weights_records.get(unit, -1)

    def _place(self, purpose: str, unit: int) -> tuple[_C.Arena, int]:
        """Returns the arena that has the unit's part, and where the part begins there."""
        if self.files is not None and self.in_file(purpose, unit):
            begin = self.files.offset_of(self._records[unit])
            return self.files.addresses, begin + self.file_plan.offsets[unit][purpose]
        return self.arenas[purpose], self.regions[purpose].offsets[unit]

    def tensor(self, purpose: str, unit: int, offset: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns a CPU tensor with the shape and strides of `like`, `offset` bytes into the unit's part."""
        arena, base = self._place(purpose, unit)
        with plainly():  # the tensor may be kept, so the caller's torch modes must not affect it
            return _C.tensor_in(arena, base + offset, dtype, list(like.shape), list(like.stride()))

    def watched(self, slot: HomeParameter, before_write: Callable[[], None]) -> torch.Tensor:
        """Returns the tensor of `working`, for the user. After `_C.watch`, its first write calls `before_write`."""
        arena, base = self._place("working copies", slot.unit)
        with plainly():
            return _C.watched_tensor_in(arena, base + slot.home_offset, slot.like, slot.dtype, before_write)

    def working(self, slot: HomeParameter) -> torch.Tensor:
        return self.tensor("working copies", slot.unit, slot.home_offset, slot.like, slot.dtype)

    def held(self, slot: HomeParameter) -> torch.Tensor:
        return self.tensor("held gradients", slot.unit, slot.home_offset, slot.like, slot.dtype)

    def master(self, slot: HomeParameter) -> torch.Tensor:
        """Returns the plain fp32 master, which exists if torch updates under a bfloat16 policy."""
        scale = 4 // slot.dtype.itemsize
        return self.tensor("masters", slot.unit, slot.home_offset * scale, slot.like, torch.float32)

    def low_bits(self, slot: HomeParameter) -> torch.Tensor:
        """Returns the low 16 bits of a split master, as int16."""
        return self.tensor("low bits", slot.unit, slot.home_offset, slot.like, torch.int16)

    def has(self, purpose: str, unit: int) -> bool:
        """Returns True if the unit has a part in this arena."""
        return self.in_file(purpose, unit) or (purpose in self.arenas and self.regions[purpose].sizes[unit] > 0)

    def moment(
        self,
        purpose: str,
        slot: HomeParameter,
        dtype: torch.dtype,
        before_write: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Returns a moment of the fused kernels. `before_write` is as in `watched`."""
        return self._state(purpose, slot, self.moment_offset(slot, dtype), slot.like, dtype, before_write)

    def scales(self, purpose: str, slot: HomeParameter, before_write: Callable[[], None] | None = None) -> torch.Tensor:
        """Returns the scales of a moment that is stored as codes, one for each block."""
        like = torch.empty(slot.num_blocks, device="meta")
        return self._state(purpose, slot, self.scales_offset(slot), like, torch.float32, before_write)

    def factored(self, slot: HomeParameter, key: str, before_write: Callable[[], None] | None = None) -> torch.Tensor:
        """Returns second moments that Adafactor keeps of a parameter, by key of its state."""
        like = torch.empty(factored_shapes(slot.like.shape)[key], device="meta")
        return self._state(FACTORED, slot, self._factored_offset(slot, key), like, torch.float32, before_write)

    def factored_address(self, slot: HomeParameter, key: str) -> int:
        return self.address(FACTORED, slot.unit) + self._factored_offset(slot, key)

    @staticmethod
    def _factored_offset(slot: HomeParameter, key: str) -> int:
        shapes = factored_shapes(slot.like.shape)
        before = itertools.takewhile(lambda other: other != key, shapes)
        return slot.factored_offset + sum(factored_size(shapes[other]) for other in before)

    @staticmethod
    def moment_offset(slot: HomeParameter, dtype: torch.dtype) -> int:
        """Returns the offset in the unit's moments: it counts as many elements as the offset of the parameter."""
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
        arena, base = self._place(purpose, slot.unit)
        with plainly():
            return _C.watched_tensor_in(arena, base + offset, like, dtype, before_write)
