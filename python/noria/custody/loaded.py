"""Which of a torn home has been loaded since: weights and state of different steps go on only once all have been."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["Loaded"]


class Loaded:
    """Of one wrap call."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self._torn = ""
        self._to_load: set[Any] = set()  # slots and optimizers that have not been loaded since

    def note(self, part: Any) -> None:
        """A parameter or an optimizer has been loaded; once all have been, a torn home is whole again."""
        torn = self.wrapped.custody.torn()
        if torn != self._torn:
            self._torn = torn
            trainable = (slot.index for slot in self.wrapped.slots if slot.trainable)
            self._to_load = {*trainable, *self.wrapped.optimizers} if torn else set()
        self._to_load.discard(part)
        if torn and not self._to_load:
            self.wrapped.custody.mend()
            self._torn = ""
