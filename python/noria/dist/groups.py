"""Makes noria's own process groups over some ranks of the world. The other ranks take no part.

torch's `new_group` does not work here. Without `use_local_synchronization`, the whole world must call it. With it, a
group's name is the number of groups in the process, which differs between ranks. Also, torch reuses the name of a
destroyed group while the store still has its socket addresses. So noria's names count the groups that exactly these
ranks have made.
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from noria import _C
from noria._errors import UsageError, usage_error
from noria.policy import format_bytes

__all__ = ["Group", "Line", "num_made", "timeout"]

Told = TypeVar("Told")
Line = str | tuple[str, Mapping[str, str]]
"""What ranks compare: a text, or (whose, values by name). Of the values an error shows those that differ."""

_made: Counter[tuple[int, ...]] = Counter()


def num_made() -> int:
    """Returns the number of groups that this process has made so far."""
    return _made.total()


class Group:
    """Holds a process group of some ranks of the world. It has the timeout of the default group.

    `ranks`: in rising order. `device`: the device of the memory that the group moves. gloo moves host memory, and NCCL
    moves CUDA memory.

    Order: all of its ranks make the group, equally often.
    """

    def __init__(self, ranks: Sequence[int], device: torch.device | None = None) -> None:
        c10d = dist.distributed_c10d
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)
        _made[self.ranks] += 1
        name = f"noria/{'_'.join(map(str, self.ranks))}/{_made[self.ranks]}"
        self.name = cast("dist.distributed_c10d.GroupName", name)
        store = dist.PrefixStore(f"{self.name}/", c10d._get_default_store())
        group = dist.ProcessGroup(store, self.rank, self.size)
        self._group: dist.ProcessGroup | None = group
        self._is_nccl = device is not None and device.type == "cuda"
        types = dist.ProcessGroup.BackendType
        if self._is_nccl:
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = _timeout() or options._timeout
            backend: torch._C._distributed_c10d.Backend = c10d.ProcessGroupNCCL(store, self.rank, self.size, options)
        else:
            backend = self._meet_by_gloo(store)
        kind = types.NCCL if self._is_nccl else types.GLOO
        backend._set_sequence_number_for_group()
        group._set_default_backend(kind)
        group._register_backend(torch.device("cuda" if self._is_nccl else "cpu"), kind, backend)
        group._set_group_name(self.name)
        c10d._register_process_group(self.name, group)  # C++ finds it by this name

    def _meet_by_gloo(self, store: dist.Store) -> torch._C._distributed_c10d.Backend:
        patience = timeout()
        try:
            return dist.distributed_c10d.ProcessGroupGloo(store, self.rank, self.size, timeout=patience)
        except RuntimeError as error:
            raise _C.MachineError(
                f"rank {self.rank} of {self.size}: a meeting of ranks {list(self.ranks)} of the world failed; a rank "
                f"has died, raised, or hung, or it did not come within {patience}. They call noria.wrap together, with "
                f"mesh= or stages= of the same ranks ({error})"
            ) from error

    @property
    def _open(self) -> dist.ProcessGroup:
        assert self._group is not None, "the group is closed"
        return self._group

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all ranks, by rank. They have the same shape and dtype. Collective."""
        gathered = [torch.empty_like(own) for _ in self.ranks]
        with self._together(f"an all-gather of {format_bytes(own.nbytes * self.size)}"):
            self._open.allgather([gathered], [own]).wait()
        return gathered

    def gather_on_first(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Returns what `gather` does on the first rank, and an empty list on the others. Collective."""
        gathered = [torch.empty_like(own) for _ in self.ranks] if self.rank == 0 else []
        with self._together(f"a gather of {format_bytes(own.nbytes * self.size)}"):
            self._open.gather([gathered] if gathered else [], [own], _to_first()).wait()
        return gathered

    def gather_objects(self, own: Told) -> list[Told]:
        """Returns the objects of all ranks, by rank. Collective."""
        data = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        counts = [int(count) for count in self.gather(torch.tensor([data.numel()], device="cpu"))]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        gathered = zip(self.gather(padded), counts, strict=True)
        return [pickle.loads(each[:count].numpy().tobytes()) for each, count in gathered]

    def agree(self, lines: Sequence[Line], *, expected: str, remedy: str) -> None:
        """Raises UsageError on all ranks if a line differs from rank 0's. The error names the first one. Collective."""
        gathered = self.gather_objects(list(lines))
        for rank, its in enumerate(gathered):
            if its == gathered[0]:
                continue
            number = next(
                (n for n, (a, b) in enumerate(zip(gathered[0], its, strict=False)) if a != b),
                min(len(gathered[0]), len(its)),
            )
            first, other = _told(*(each[number] if number < len(each) else "nothing" for each in (gathered[0], its)))
            raise usage_error(expected, f"on rank 0: {first}; on rank {rank}: {other}", remedy)

    def first_failure(self, own: Exception | None, call: str) -> Exception | None:
        """Returns this rank's failure, else that of the first rank that has one. Collective."""
        is_usage = isinstance(own, UsageError)
        gathered = self.gather_objects(
            None if own is None else (is_usage, str(own) if is_usage else f"{type(own).__name__}: {own}")
        )
        if own is not None:
            return own
        for rank, its in enumerate(gathered):
            if its is not None:
                is_usage, text = its
                told = f"{call} on rank {rank} failed: {text}"
                return UsageError(told) if is_usage else RuntimeError(told)
        return None

    def broadcast(self, value: torch.Tensor) -> None:
        """Copies the first rank's values into the tensors of all ranks. Collective."""
        with self._together(f"a broadcast of {format_bytes(value.nbytes)}"):
            self._open.broadcast(value, 0).wait()

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Runs a collective. If it fails, the error names the rank and the collective, as in the collect lane."""
        try:
            yield
        except RuntimeError as error:
            raise _C.MachineError(
                f"rank {self.rank} of {self.size}: {what} failed; a rank has died, raised, or hung for longer than "
                f"the process group's timeout ({error})"
            ) from error

    def close(self) -> None:
        """Closes the group without waiting for other ranks, so it also works after a failure and at process exit."""
        if self._group is None:
            return
        group, self._group = self._group, None
        with contextlib.suppress(Exception):  # torch has destroyed all groups, or is shutting down
            dist.distributed_c10d._unregister_process_group(self.name)
        if self._is_nccl:
            group.abort()


def _told(first: Line, other: Line) -> tuple[str, str]:
    """Returns two lines that differ as text. Of values of the same owner it has only those that differ."""
    names: set[str] | None = None
    if not isinstance(first, str) and not isinstance(other, str) and first[0] == other[0]:
        names = {name for name in {**first[1], **other[1]} if first[1].get(name) != other[1].get(name)}
    return _text_of(first, names), _text_of(other, names)


def _text_of(line: Line, names: set[str] | None) -> str:
    if isinstance(line, str):
        return line
    whose, values = line
    shown = sorted(values if names is None else names)
    return f"{whose} has " + ", ".join(f"{name}={values[name]}" if name in values else f"no {name}" for name in shown)


def _to_first() -> dist.distributed_c10d.GatherOptions:
    options = dist.distributed_c10d.GatherOptions()
    options.rootRank = 0
    return options


def timeout() -> datetime.timedelta:
    """Returns the timeout of the default group."""
    return _timeout() or dist.distributed_c10d.default_pg_timeout


def _timeout() -> datetime.timedelta | None:
    """Returns how long the default group waits for a rank. A new group would get torch's default instead."""
    world = dist.group.WORLD
    assert world is not None
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # it has no backend for this device
            options = getattr(world._get_backend(torch.device(device)), "options", None)
            if options is not None:
                timeout: datetime.timedelta = options._timeout
                return timeout
    return None
