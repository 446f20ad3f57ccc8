"""Lets ranks share a model: each has one part of every unit at home, and the whole unit on its device to compute.

If `noria.wrap` gets a mesh, its ranks share. Otherwise all ranks of torch's default process group share, if it exists
before `noria.wrap` and has several ranks. noria makes its own groups over these ranks, so its collectives never mix
with the user's.

Order: all of these ranks call `wrap`, and every function whose text says "Collective", in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from noria import _C
from noria._errors import usage_error
from noria.dist.groups import Group, Line, Told

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from noria.model.layout import HomeParameter

__all__ = ["SAME_MESHES", "Grid", "Ranks", "comparable", "grid_of", "raised_by_all", "warn_of_no_group"]

SAME_MESHES = {
    "expected": "the same mesh= and stages= on all ranks of them",
    "remedy": "call noria.wrap with the same ones there",
}


_WARNED: list[bool] = []


class Met(Protocol):
    """Stands for ranks that tell each other their failures."""

    def first_failure(self, own: Exception | None, call: str) -> Exception | None: ...


@dataclasses.dataclass(frozen=True)
class Grid:
    """Says which ranks of the world share a model, and which of them this process is.

    Each row is a replica, and each of its ranks has one part. Ranks of a column have the same part. `rank` and `size`
    count all ranks of the grid, in the world's order.
    """

    rows: tuple[tuple[int, ...], ...]
    own: int

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted(each for row in self.rows for each in row))

    @property
    def row(self) -> tuple[int, ...]:
        return next(row for row in self.rows if self.own in row)

    @property
    def column(self) -> tuple[int, ...]:
        return tuple(sorted(row[self.shard_rank] for row in self.rows))

    @property
    def rank(self) -> int:
        return self.members.index(self.own)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def shard_rank(self) -> int:
        return self.row.index(self.own)

    @property
    def num_shards(self) -> int:
        return len(self.rows[0])

    @property
    def num_replicas(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return f"a mesh of {self.num_replicas} x {self.num_shards} ranks, {[list(row) for row in self.rows]}"


def num_ranks() -> int:
    """Returns the number of ranks of the default process group, or 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def warn_of_no_group(stacklevel: int) -> None:
    """Warns, once in a process, if a launcher has started several processes and they have no process group."""
    size = os.environ.get("WORLD_SIZE", "")
    if _WARNED or not size.isdigit() or int(size) < 2 or not dist.is_available() or dist.is_initialized():
        return
    warnings.warn(
        f"noria.wrap found WORLD_SIZE={size} in the environment, but no process group: each of these processes trains "
        "a model of its own. Remedy: call torch.distributed.init_process_group before noria.wrap, if they share one",
        stacklevel=stacklevel + 1,
    )
    _WARNED.append(True)


def grid_of(mesh: DeviceMesh | None = None) -> Grid | None:
    """Returns the grid of a mesh, or None if no ranks share.

    `mesh`: a DeviceMesh of one dimension, the shards, or of two, (replicas, shards). None puts all ranks in one row.
    Ranks of a row are in rising order, in any mesh, because groups need that order.
    """
    if mesh is None:
        return Grid((tuple(range(num_ranks())),), dist.get_rank()) if num_ranks() > 1 else None
    if not dist.is_available() or not dist.is_initialized():
        raise usage_error("a process group before mesh=", "none", "call torch.distributed.init_process_group first")
    from torch.distributed.device_mesh import DeviceMesh

    expected = "mesh=None or a torch.distributed.device_mesh.DeviceMesh"
    if not isinstance(mesh, DeviceMesh):
        raise usage_error(expected, f"mesh={mesh!r}", "make one by torch.distributed.device_mesh.init_device_mesh")
    if mesh.ndim not in (1, 2):
        raise usage_error(
            "a mesh of one dimension, the shards, or of two, (replicas, shards)",
            f"one of {mesh.ndim}",
            'give the dimensions that share the model: mesh["dp"], or mesh["replicas", "shards"]',
        )
    rows = mesh.mesh.view(-1, mesh.mesh.shape[-1]).tolist()
    if mesh.get_coordinate() is None:
        raise usage_error(
            f"a mesh with rank {dist.get_rank()} in it", f"one of the ranks {rows}", "let those ranks alone call it"
        )
    grid = Grid(tuple(sorted(tuple(sorted(row)) for row in rows)), dist.get_rank())
    return grid if grid.size > 1 else None


class Ranks:
    """Holds the groups of a grid's ranks, which have met.

    `host` moves data between the host memories of all ranks, `host_shards` between those of this rank's row. `replica`
    has the ranks of that row.

    Threads: both belong to the calling thread. The collect lane has its own groups, because two threads would mix up
    the collectives of one group.
    """

    def __init__(self, grid: Grid) -> None:
        """Meets the other ranks. Collective."""
        self.grid = grid
        self.rank, self.size = grid.rank, grid.size
        self.shard_rank, self.num_shards, self.num_replicas = grid.shard_rank, grid.num_shards, grid.num_replicas
        self.replica = [grid.members.index(each) for each in grid.row]
        self._groups: list[Group] = []
        self.host = self._group(grid.members)
        try:
            self.agree([str(grid)], **SAME_MESHES)
            apart = self.num_replicas > 1 and self.num_shards > 1
            self.host_shards = self._group(grid.row) if apart else self.host
        except BaseException:
            self.close()
            raise

    @staticmethod
    def meet(mesh: DeviceMesh | None = None) -> Ranks | None:
        """Returns the ranks, or None if no ranks share. Collective."""
        grid = grid_of(mesh)
        return None if grid is None else Ranks(grid)

    def _group(self, ranks: Sequence[int], device: torch.device | None = None) -> Group:
        self._groups.append(Group(ranks, device))
        return self._groups[-1]

    def close(self) -> None:
        """Closes all groups. Waits for no other rank."""
        for group in self._groups:
            group.close()

    def collectives(self, device: torch.device) -> _C.Collectives:
        """Makes the groups of the collect lane. Collective.

        Numbers have a group of their own, because a thread exchanges them while the lane gathers and sums.
        """
        numbers = self._group(self.grid.members).name
        shards = self._group(self.grid.row, device).name if self.num_shards > 1 else ""
        across = self._group(self.grid.column, device).name if self.num_replicas > 1 else ""
        return _C.make_c10d_collectives(shards, across, numbers, self.replica, str(device))

    def agree(
        self,
        lines: Sequence[Line],
        *,
        expected: str = "the same model, optimizer and policy on all ranks",
        remedy: str = "build them alike on all ranks, from the same seed and settings",
    ) -> None:
        """As `Group.agree`, over all ranks of the grid. Collective."""
        self.host.agree(lines, expected=expected, remedy=remedy)

    def first_failure(self, own: Exception | None, call: str) -> Exception | None:
        """Returns this rank's failure, else that of the first rank that has one. Collective."""
        return self.host.first_failure(own, call)

    def word_of_first(self, word: Told) -> Told:
        """Returns rank 0's `word`. Collective."""
        return self.host.gather_objects(word)[0]

    def from_first(self, value: torch.Tensor) -> torch.Tensor:
        """Returns rank 0's values, on the CPU. Collective.

        On other ranks only the shape, strides and dtype of `value` matter.
        """
        if self.rank == 0:
            value = value.detach().to("cpu", copy=True)
        else:
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        flat = value.as_strided((value.numel(),), (1,)).view(torch.uint8) if value.numel() else value
        self.host.broadcast(flat)
        return value

    def whole(self, slot: HomeParameter, part: torch.Tensor, *, on_first: bool = False) -> torch.Tensor:
        """Returns a whole tensor on the CPU, from the parts on the ranks of this rank's replica. Collective.

        `on_first`: only rank 0 gets it. Other ranks get a tensor without memory.
        """
        if not on_first or self.rank == 0:
            if self.num_shards == 1:
                return part.clone()
        elif 0 not in self.replica or self.num_shards == 1:
            return _without_memory(slot, part)
        counts = [slot.count_on(shard) for shard in range(self.num_shards)]
        padded = torch.zeros(max(counts), dtype=part.dtype, device="cpu")
        padded[: part.numel()] = part
        gather = self.host_shards.gather_on_first if on_first else self.host_shards.gather
        gathered = [each.view(part.dtype) for each in gather(padded.view(torch.uint8))]
        if not gathered:
            return _without_memory(slot, part)
        flat = torch.cat([each[:count] for each, count in zip(gathered, counts, strict=True)])
        return flat.as_strided(slot.shape, slot.strides)


def comparable(value: object) -> object:
    """Returns hyperparameters in a form that ranks compare by `repr`.

    Numbers keep all digits that a kernel gets. Of other objects only the type is compared, because their addresses
    differ between processes.
    """
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: comparable(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, tuple | list):
        return [comparable(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__qualname__


@contextlib.contextmanager
def raised_by_all(everybody: Sequence[Met], call: str) -> Iterator[None]:
    """Makes all ranks raise at the end of the block if one rank raised inside it.

    The ranks wait for each other there, so no rank continues alone. Nothing inside the block may be collective.
    `everybody`: the ranks of each wrap call that takes part.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    for ranks in everybody:
        try:
            failure = ranks.first_failure(failure, call)
        except _C.MachineError as error:
            raise error from failure
    try:
        if failure is not None:
            raise failure
    finally:
        failure = None  # its traceback refers to this frame: the cycle would keep the block's objects alive


def _without_memory(slot: HomeParameter, part: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(slot.shape, slot.strides, dtype=part.dtype, device="meta")
