"""Provides `optimizer.state` of a wrapped optimizer: a dict that finishes pending updates before it is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["OptimizerState"]


class OptimizerState(defaultdict[Any, Any]):
    """Settles a pending update of a parameter before its state is read or written."""

    unwatched = dict
    """The class whose methods read the values without settling, as in `unwatched.items(state)`."""

    def __init__(
        self,
        settle: Callable[[object], None],
        look: Callable[[object], None],
        plain: Callable[[], dict[Any, Any]],
        values: dict[Any, Any],
    ) -> None:
        """Both `settle` and `look` take a parameter, or None for all; `look` comes before values are returned. `plain`
        returns the state as a plain optimizer would have it."""
        super().__init__(dict, values)
        self._settle = settle
        self._look = look
        self._plain = plain

    def __getitem__(self, key: object) -> Any:
        self._look(key)
        return super().__getitem__(key)

    def get(self, key: object, default: object = None) -> Any:
        self._look(key)
        return super().get(key, default)

    def values(self) -> Any:
        self._look(None)
        return super().values()

    def items(self) -> Any:
        self._look(None)
        return super().items()

    def keys(self) -> Any:
        self._settle(None)
        return super().keys()

    def __iter__(self) -> Iterator[Any]:
        self._settle(None)  # the first update creates the state, and may still be pending
        return super().__iter__()

    def __len__(self) -> int:
        self._settle(None)
        return super().__len__()

    def __contains__(self, key: object) -> bool:
        self._settle(key)
        return super().__contains__(key)

    def __setitem__(self, key: object, value: object) -> None:
        self._settle(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: object) -> None:
        self._settle(key)
        super().__delitem__(key)

    def pop(self, key: object, *default: object) -> Any:
        self._look(key)
        return super().pop(key, *default)

    def clear(self) -> None:
        self._settle(None)
        super().clear()

    def unsettled(self, key: object) -> dict[str, Any]:
        """Returns the state without settling, for the update itself. Creates an empty one if there is none."""
        if not dict.__contains__(self, key):
            dict.__setitem__(self, key, {})
        return dict.__getitem__(self, key)

    def __reduce__(self) -> tuple[object, ...]:
        return (defaultdict, (dict, self._plain()))
