"""What the calling thread does together with all ranks that share the model: gathering tensors, adding up numbers.

Each time they first tell each other what, by the engine's exchange of numbers, which stands in one line with what its
lane does: a rank that does something else, such as `if rank == 0: model.state_dict()`, makes all of them raise.
"""

from __future__ import annotations

import contextlib
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from noria._errors import UsageError, usage_error
from noria.home import HomeParameter

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["Together"]

_TEXT_BYTES = 248
_NUM_WORDS = _TEXT_BYTES // 8 + 1  # and a checksum of all of it


class Together:
    """Of one wrap call. Without ranks nothing is exchanged."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self._on_first: dict[int, torch.Tensor] | None = None  # by slot, values that are there already

    def meet(self, what: str) -> None:
        """Waits until all ranks are about to do this, and assists them until they are."""
        if self.wrapped.ranks is not None:
            self.numbers(what, ())

    def agree(self, what: str, lines: Sequence[str], *, expected: str, remedy: str) -> None:
        """As `meet`; raises UsageError on all ranks where one has other lines."""
        if self.wrapped.ranks is not None:
            self.numbers(what, ())
            self.wrapped.ranks.agree(lines, expected=expected, remedy=remedy)

    def whole(self, slot: HomeParameter, part: torch.Tensor, what: str) -> torch.Tensor:
        """The whole tensor on the CPU, of this rank's part; what it has at home where there are no ranks."""
        ranks = self.wrapped.ranks
        if ranks is None:
            return part
        self.numbers(f'gather {what} of "{slot.name}"', ())
        return ranks.whole(slot, part, on_first=self._on_first is not None)

    def values(self, slot: HomeParameter) -> torch.Tensor:
        """The whole working copy."""
        known = None if self._on_first is None else self._on_first.get(slot.index)
        if known is None:
            known = self.whole(slot, self.wrapped.home.working(slot), "values")
            if self._on_first is not None:
                self._on_first[slot.index] = known
        return known

    @contextlib.contextmanager
    def on_first(self) -> Iterator[None]:
        """Inside, whole tensors are gathered on rank 0 alone, tied ones once; elsewhere they are without memory."""
        self._on_first = {}
        try:
            yield
        finally:
            self._on_first = None

    def combine(
        self, parts: dict[int, float], what: str, by: Callable[[float, float], float] = operator.add
    ) -> dict[int, float]:
        """Of gradients, by slot: what the ranks of this one's replica have, added up in their order, or combined by
        another function; replicas have the same. `what` they are about to do with these gradients: "clip {} to a
        norm of 1.0"."""
        ranks = self.wrapped.ranks
        if not parts or ranks is None:
            return parts  # on all ranks: whose gradient is there has been agreed on
        bits = torch.tensor(list(parts.values()), dtype=torch.float64, device="cpu").view(torch.int64)
        totals = [0.0] * len(parts)
        gradients = f'the gradients of "{self.wrapped.slots[min(parts)].name}" and {len(parts) - 1} more'
        everybodys = self.numbers(what.format(gradients), bits.tolist())
        for rank in ranks.replica:
            numbers = torch.tensor(everybodys[rank], dtype=torch.int64, device="cpu").view(torch.float64).tolist()
            totals = [by(total, each) for total, each in zip(totals, numbers, strict=True)]
        return dict(zip(parts, totals, strict=True))

    def numbers(self, what: str, numbers: Sequence[int]) -> list[list[int]]:
        """Everybody's numbers, by rank; as many on all. Raises UsageError on all ranks where one is about to do
        something else."""
        own = _words(what)
        try:
            found = self.wrapped.custody.exchange([*own, *numbers])
        except UsageError as error:
            error.add_note(f"noria: this rank was about to {what}")
            raise
        size = len(own) + len(numbers)
        everybodys = [found[begin : begin + size] for begin in range(0, len(found), size)]
        for rank, its in enumerate(everybodys):
            if its[: len(own)] != everybodys[0][: len(own)]:
                first, other = (_text(each[: len(own)]) for each in (everybodys[0], its))
                raise usage_error(
                    "ranks that do the same",
                    f"rank 0 about to {first} and rank {rank} to {other}",
                    "let all ranks call what is collective, in the same order: state_dict() and noria.save among it",
                )
        return [its[len(own) :] for its in everybodys]


def _words(text: str) -> list[int]:
    data = text.encode()
    padded = data[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    words = [int.from_bytes(padded[at : at + 8], "little", signed=True) for at in range(0, _TEXT_BYTES, 8)]
    return [*words, zlib.crc32(data)]


def _text(words: Sequence[int]) -> str:
    data = b"".join(word.to_bytes(8, "little", signed=True) for word in words[:-1])
    return data.rstrip(b"\0").decode(errors="replace")
