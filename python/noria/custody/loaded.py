"""What must be loaded before the model may be used: all of a torn home, and what was built without values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from noria._errors import usage_error

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["Loaded"]


class Loaded:
    """Of one wrap call. `missing`: names of parameters (by slot index) and buffers (by module and name) that were on
    the meta device and have no values yet."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self.missing: dict[Any, str] = {}
        self._torn = ""
        self._to_load: set[Any] = set()  # slots and optimizers of a torn home that have not been loaded since

    def refuse_missing(self, what: str) -> None:
        if self.missing:
            more = f" and {len(self.missing) - 1} more" if len(self.missing) > 1 else ""
            raise usage_error(
                f"{what} of a model all of which has values",
                f'"{next(iter(self.missing.values()))}"{more}, built on the meta device and not loaded since',
                "load a checkpoint first: noria.load, model.load_state_dict, or torch.distributed.checkpoint.load",
            )

    def note(self, part: Any) -> None:
        """A parameter, a buffer or an optimizer has been loaded; once all have been, a torn home is whole again."""
        self.missing.pop(part, None)
        torn = self.wrapped.custody.torn()
        if torn != self._torn:
            self._torn = torn
            trainable = (slot.index for slot in self.wrapped.slots if slot.trainable)
            self._to_load = {*trainable, *self.wrapped.optimizers} if torn else set()
        self._to_load.discard(part)
        if torn and not self._to_load:
            self.wrapped.custody.mend()
            self._torn = ""
