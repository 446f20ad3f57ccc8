"""Gathers tensors and adds up numbers on the calling thread, together with all ranks that share the model.

Before each such call, ranks tell each other what they are about to do. For that they use the engine's exchange of
numbers, which queues in order with the work of the collect lane. If a rank does something else, such as
`if rank == 0: model.state_dict()`, all ranks raise.
"""

from __future__ import annotations

import contextlib
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch

from noria._errors import UsageError, usage_error
from noria.dist.ranks import raised_by_all
from noria.host.limits import machine_name
from noria.model.layout import HomeParameter
from noria.runtime.context import Context

__all__ = ["RankSync"]

_TEXT_BYTES = 248
_NUM_WORDS = _TEXT_BYTES // 8 + 1  # and a checksum of the whole text


class RankSync:
    """Gathers tensors and adds up numbers over ranks. Without ranks nothing is exchanged."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._on_first: dict[int, torch.Tensor] | None = None  # by slot: values that have been gathered already

    def meet(self, what: str) -> None:
        """Waits until all ranks are about to do `what`. With find_unused_parameters=True it assists them until then."""
        if self.context.ranks is not None:
            self.numbers(what, ())

    def agree(self, what: str, lines: Sequence[str], *, expected: str, remedy: str) -> None:
        """As `meet`. Raises UsageError on all ranks if the lines of one rank differ."""
        if self.context.ranks is not None:
            self.numbers(what, ())
            self.context.ranks.agree(lines, expected=expected, remedy=remedy)

    def whole(self, slot: HomeParameter, part: torch.Tensor, what: str) -> torch.Tensor:
        """Returns the whole tensor on the CPU, gathered from all ranks. Without ranks it returns `part`."""
        ranks = self.context.ranks
        if ranks is None:
            return part
        self.numbers(f'gather {what} of "{slot.name}"', ())
        return ranks.whole(slot, part, on_first=self._on_first is not None)

    def whole_bytes(self, slot: HomeParameter, itemsize: int) -> int:
        """Returns the bytes that this rank takes for what `whole` returns."""
        ranks = self.context.ranks
        is_here = ranks is not None and (self._on_first is None or ranks.rank == 0)
        return slot.shape.numel() * itemsize if is_here else 0

    def refuse_copies(self, num_bytes: int, call: str) -> None:
        """Raises UsageError if host memory has no room for what this process takes to copy all that lies in files.

        Does nothing if nothing lies there. Collective if ranks share the model: if one must raise, all do. Those on one
        machine take their bytes at once.
        """
        if not self.context.plan.files.is_used:
            return
        ranks, together = self.context.ranks, num_bytes
        if ranks is not None:
            own = (zlib.crc32(machine_name().encode()), num_bytes)
            together = sum(its for place, its in self.numbers(call, own) if place == own[0])
        with raised_by_all([] if ranks is None else [ranks], call):
            self.context.files.refuse_copies(num_bytes, together)

    def values(self, slot: HomeParameter) -> torch.Tensor:
        """Returns the whole working copy."""
        known = None if self._on_first is None else self._on_first.get(slot.index)
        if known is None:
            known = self.whole(slot, self.context.home.working(slot), "values")
            if self._on_first is not None:
                self._on_first[slot.index] = known
        return known

    @contextlib.contextmanager
    def on_first(self) -> Iterator[None]:
        """Gathers whole tensors on rank 0 alone, tied ones once, while the block is open.

        Other ranks get tensors without memory.
        """
        self._on_first = {}
        try:
            yield
        finally:
            self._on_first = None

    def combine(
        self, parts: dict[int, float], what: str, by: Callable[[float, float], float] = operator.add
    ) -> dict[int, float]:
        """Combines numbers about gradients over the ranks of this rank's replica, in their order. Collective.

        All replicas have the same numbers.

        Args:
            parts: this rank's numbers, by slot.
            what: what ranks are about to do with these gradients, such as "clip {} to a norm of 1.0".
            by: combines two numbers; the default adds them up.

        Returns:
            The combined numbers, by slot. Without ranks, `parts`.
        """
        ranks = self.context.ranks
        if not parts or ranks is None:
            return parts  # all ranks return: they have agreed on which gradients exist
        bits = torch.tensor(list(parts.values()), dtype=torch.float64, device="cpu").view(torch.int64)
        totals = [0.0] * len(parts)
        gradients = f'the gradients of "{self.context.slots[min(parts)].name}" and {len(parts) - 1} more'
        gathered = self.numbers(what.format(gradients), bits.tolist())
        for rank in ranks.replica:
            numbers = torch.tensor(gathered[rank], dtype=torch.int64, device="cpu").view(torch.float64).tolist()
            totals = [by(total, each) for total, each in zip(totals, numbers, strict=True)]
        return dict(zip(parts, totals, strict=True))

    def numbers(self, what: str, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all ranks, by rank. Each rank gives the same count of numbers.

        Raises UsageError on all ranks if one rank is about to do something else.
        """
        own = _words(what)
        try:
            found = self.context.engine.ranks.exchange([*own, *numbers])
        except UsageError as error:
            error.add_note(f"noria: this rank was about to {what}")
            raise
        size = len(own) + len(numbers)
        gathered = [found[begin : begin + size] for begin in range(0, len(found), size)]
        for rank, its in enumerate(gathered):
            if its[: len(own)] != gathered[0][: len(own)]:
                first, other = (_text(each[: len(own)]) for each in (gathered[0], its))
                raise usage_error(
                    "ranks that do the same",
                    f"rank 0 about to {first} and rank {rank} to {other}",
                    "let all ranks call what is collective, in the same order: state_dict() and noria.save among it",
                )
        return [its[len(own) :] for its in gathered]


def _words(text: str) -> list[int]:
    data = text.encode()
    padded = data[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    words = [int.from_bytes(padded[at : at + 8], "little", signed=True) for at in range(0, _TEXT_BYTES, 8)]
    return [*words, zlib.crc32(data)]


def _text(words: Sequence[int]) -> str:
    data = b"".join(word.to_bytes(8, "little", signed=True) for word in words[:-1])
    return data.rstrip(b"\0").decode(errors="replace")
