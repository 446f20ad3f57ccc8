"""Counts what autograd keeps of forwards for their backwards, by looking at the graphs that they have made.

It only looks: no hook is called, no saved tensor is unpacked, and no graph is kept alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch.autograd.graph import Node

from noria import _C

__all__ = ["SavedBytes"]

_names: dict[type, list[str]] = {}


class SavedBytes:
    """Counts bytes by unit, and by operator, such as "TanhBackward0".

    Modules are counted in the order of their forwards. So what is new in the graph of one's outputs belongs to it:
    autograd numbers nodes as it makes them. A storage counts once, for the first that keeps it.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        """`weights`: parameters, which count for no unit. Their storages are compared by address, and not touched."""
        self.by_unit: dict[int, int] = {}
        self.by_operator: Counter[str] = Counter()
        self._seen = {_C.storage_of(each) for each in weights}
        self._last = -1  # the number of the newest node that was counted

    def count(self, unit: int, outputs: Iterable[torch.Tensor]) -> None:
        """Counts a forward of a unit that has just ended."""
        is_again = unit in self.by_unit  # in a later micro-batch, or used twice
        total, newest, done = 0, self._last, set[Node]()
        left = [each.grad_fn for each in outputs if each.grad_fn is not None]
        while left:
            node = left.pop()
            number = node._sequence_nr()
            if node in done or number <= self._last or not node.next_functions:  # no next ones: a parameter's
                continue
            done.add(node)
            newest = max(newest, number)
            left += [each for each, _ in node.next_functions if each is not None]
            for tensor in _kept_by(node) if not is_again else ():
                address = _C.storage_of(tensor)
                if address not in self._seen:
                    self._seen.add(address)
                    size = tensor.untyped_storage().nbytes()
                    total += size
                    self.by_operator[node.name()] += size
        self._last = newest
        self.by_unit.setdefault(unit, total)


def _kept_by(node: Node) -> Iterator[torch.Tensor]:
    """Yields the tensors that a node keeps. What a hook has packed, such as a checkpoint's, does not count."""
    kind = type(node)
    if kind not in _names:
        _names[kind] = [name for name in dir(node) if name.startswith("_raw_saved_")]
    for name in _names[kind]:
        try:
            value = getattr(node, name)
        except RuntimeError:  # its backward has run already
            continue
        for saved in value if isinstance(value, list | tuple) else [value]:
            data = getattr(saved, "data", None)
            if isinstance(data, torch.Tensor):
                yield data
