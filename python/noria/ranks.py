"""Ranks that share a model: each has one part of every unit at home, and all of it on its device while it computes.

torch's process group decides: where one of several ranks has been made before `noria.wrap`, they share. noria makes
groups of its own from it, so that its collectives never meet the user's; all ranks call `wrap`, and whatever else is
said to be a collective, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from noria import _C
from noria._errors import UsageError, usage_error
from noria.policy import format_bytes

if TYPE_CHECKING:
    from noria.home import HomeParameter

__all__ = ["Ranks", "num_ranks", "own_rank"]


def num_ranks() -> int:
    """Of the process group that there is; 1 without."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    return dist.get_rank() if num_ranks() > 1 else 0


@contextlib.contextmanager
def collective(what: str) -> Iterator[None]:
    """Around a collective: that it fails is told with the rank and its name, as the collect lane does."""
    try:
        yield
    except RuntimeError as error:
        raise _C.MachineError(
            f"rank {dist.get_rank()} of {num_ranks()}: {what} failed; a rank has died, raised, or hung for longer than "
            f"the process group's timeout ({error})"
        ) from error


def _timeout() -> datetime.timedelta | None:
    """How long the default group waits for a rank: a new group would have torch's default instead."""
    world = dist.group.WORLD
    assert world is not None
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # it has no backend for this device
            options = getattr(world._get_backend(torch.device(device)), "options", None)
            if options is not None:
                timeout: datetime.timedelta = options._timeout
                return timeout
    return None


@dataclasses.dataclass(frozen=True)
class Ranks:
    """`lane_groups` are those of the collect lane, for device memory and for numbers; `group`, by gloo, is for what the
    calling thread moves from host memory to host memory. A group that two threads used would mix up what they do."""

    rank: int
    size: int
    group: dist.ProcessGroup
    lane_groups: tuple[dist.ProcessGroup, dist.ProcessGroup]

    @staticmethod
    def meet(device: torch.device) -> Ranks | None:
        """Groups over all ranks, or None where there is but one. Collective."""
        if num_ranks() == 1:
            return None
        patience = _timeout()
        with collective("a meeting of all ranks, in noria.wrap,"):
            group, numbers = (dist.new_group(backend="gloo", timeout=patience) for _ in range(2))
            memory = dist.new_group(backend="nccl", timeout=patience) if device.type == "cuda" else numbers
        return Ranks(dist.get_rank(), num_ranks(), group, (memory, numbers))

    def collectives(self, device: torch.device) -> _C.Collectives:
        memory, numbers = self.lane_groups
        return _C.make_c10d_collectives(memory.group_name, numbers.group_name, str(device))

    def agree(self, lines: Sequence[str]) -> None:
        """Raises UsageError on all ranks, with the first line that is not as on rank 0, if any. Collective."""
        everybodys: list[list[str]] = [[] for _ in range(self.size)]
        with collective("an all-gather of what ranks agree about"):
            dist.all_gather_object(everybodys, list(lines), self.group)
        for rank, its in enumerate(everybodys):
            if its == everybodys[0]:
                continue
            number = next(
                (n for n, (a, b) in enumerate(zip(everybodys[0], its, strict=False)) if a != b),
                min(len(everybodys[0]), len(its)),
            )
            first, other = (each[number] if number < len(each) else "nothing" for each in (everybodys[0], its))
            raise usage_error(
                "the same model, optimizer and policy on all ranks",
                f"on rank 0: {first}; on rank {rank}: {other}",
                "build them alike on all ranks, from the same seed and settings",
            )

    def raise_of_first(self, error: Exception | None, call: str) -> None:
        """What rank 0 failed with is raised on all ranks. None of them comes back before rank 0 is done. Collective."""
        is_usage = isinstance(error, UsageError)
        told = self.word_of_first(error and (is_usage, str(error) if is_usage else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        if told is not None:
            is_usage, text = told
            raise UsageError(text) if is_usage else RuntimeError(f"{call} on rank 0 failed: {text}")

    def word_of_first(self, word: Any) -> Any:
        """What rank 0 says. Collective."""
        told = [word]
        with collective("a broadcast of what rank 0 says"):
            dist.broadcast_object_list(told, 0, self.group)
        return told[0]

    def from_first(self, value: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, on the CPU; elsewhere only shape, strides and dtype of `value` count. Collective."""
        if self.rank == 0:
            value = value.detach().to("cpu", copy=True)
        else:
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        flat = value.as_strided((value.numel(),), (1,)).view(torch.uint8) if value.numel() else value
        with collective(f"a broadcast of {format_bytes(value.nbytes)}"):
            dist.broadcast(flat, 0, self.group)
        return value

    def whole(self, slot: HomeParameter, part: torch.Tensor, *, on_first: bool = False) -> torch.Tensor:
        """A full tensor on the CPU, from what each rank has of it. `on_first`: on rank 0 alone; elsewhere one without
        memory. Collective."""
        counts = [slot.count_on(rank) for rank in range(self.size)]
        padded = torch.zeros(max(counts), dtype=part.dtype)
        padded[: part.numel()] = part
        everybodys = [torch.empty_like(padded) for _ in counts] if not on_first or self.rank == 0 else []
        received = [each.view(torch.uint8) for each in everybodys]
        what = f"of {format_bytes(padded.nbytes * len(counts))}"
        if not on_first:
            with collective(f"an all-gather {what}"):
                dist.all_gather(received, padded.view(torch.uint8), self.group)
        else:
            with collective(f"a gather {what}"):
                dist.gather(padded.view(torch.uint8), received or None, 0, self.group)
        if not everybodys:
            return torch.empty_strided(slot.shape, slot.strides, dtype=part.dtype, device="meta")
        flat = torch.cat([each[:count] for each, count in zip(everybodys, counts, strict=True)])
        return flat.as_strided(slot.shape, slot.strides)
