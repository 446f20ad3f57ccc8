"""Watches operators outside of hooked modules, such as in a root that uses `self.embed.weight` directly.

While the watch is on, each torch function that gets a parameter (or a view of one) becomes a visit of that parameter's
unit. This holds in forward and, through the operator's output, in backward. Itineraries learn such visits like any
other. The watch is on in passes that are not known yet, and for models that need it. `check="operators"` keeps it on,
`check="off"` never turns it on.

Note [Modes and compilation]. A compiled block that is first called under a mode stays uncompiled for good. So the
mode is left while a module with a hook of its own runs, and entered again afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from noria import _C

__all__ = ["OperatorWatch", "tensors_of"]


def tensors_of(value: object) -> list[torch.Tensor]:
    """Returns all tensors in a module's output: in containers, ModelOutput, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    _collect(value, found, set())
    return found


def _collect(value: object, found: list[torch.Tensor], seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    if value is None or isinstance(value, str | bytes | int | float | bool | torch.nn.Module) or id(value) in seen:
        return
    seen.add(id(value))
    children: Iterable[object]
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        children = value
    elif hasattr(value, "__dict__"):
        children = vars(value).values()
    else:
        return
    for child in children:
        _collect(child, found, seen)


_METADATA = frozenset(
    """
    __get__ __set__ __len__ __repr__ __format__ __hash__ size dim ndimension numel nelement
    stride storage_offset element_size is_floating_point is_complex is_contiguous get_device
    has_names untyped_storage storage requires_grad_ register_hook backward
    """.split()  # noqa: SIM905
)
"""Functions that use a tensor without reading its values."""


class OperatorWatch(TorchFunctionMode):
    """Turns operators on parameters into visits.

    `unit_of_storage`: the unit of each storage. `visit(units)` brings units to the device and returns a hook's number.
    `returned(hook, tensors)` gets the operator's outputs.
    """

    def __init__(
        self,
        unit_of_storage: dict[int, int],
        visit: Callable[[tuple[int, ...]], int],
        returned: Callable[[int, list[torch.Tensor]], None],
    ) -> None:
        super().__init__()
        self._unit_of_storage = unit_of_storage
        self._visit = visit
        self._returned = returned
        self._wanted = False
        self._entered: int | None = None  # the thread that has entered the mode: it is that thread's
        self._suspended = 0
        self.num_seen = 0
        """Number of operators so far that used a unit outside of its modules."""

    def start(self) -> None:
        self._wanted, self._suspended = True, 0
        self._enter()

    def stop(self) -> None:
        self._wanted = False
        self._leave()

    def suspend(self) -> None:
        """Leaves the mode until `resume`. See Note [Modes and compilation]."""
        self._suspended += 1
        if self._suspended == 1:
            self._leave()

    def resume(self) -> None:
        self._suspended = max(0, self._suspended - 1)
        if self._suspended == 0 and self._wanted:
            self._enter()

    def _enter(self) -> None:
        if self._entered != threading.get_ident():  # another thread's forward may have died in it
            self.__enter__()  # type: ignore[no-untyped-call]
            self._entered = threading.get_ident()

    def _leave(self) -> None:
        is_own = self._entered == threading.get_ident()
        if is_own and _get_current_function_mode() is self:  # else a user's mode is on top: ignore calls
            self.__exit__(None, None, None)
            self._entered = None

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self._suspended or not self._wanted or getattr(func, "__name__", "") in _METADATA:
            return func(*args, **kwargs)
        units = self._units_in((args, kwargs))
        if not units:
            return func(*args, **kwargs)
        hook = self._visit(tuple(sorted(units)))
        self.num_seen += 1
        result = func(*args, **kwargs)
        self._returned(hook, tensors_of(result))
        return result

    def units_handed(self, arguments: Iterable[object]) -> set[int]:
        """Returns the units of parameters, and of views of parameters, among a module's arguments."""
        units = set()
        with torch._C.DisableTorchFunction():  # hides this look from the user's modes
            for value in arguments:
                if isinstance(value, torch.Tensor) and (type(value) is torch.nn.Parameter or value._is_view()):
                    units |= self._units_in(value)
        return units

    def _units_in(self, arguments: object) -> set[int]:
        units = set()
        for tensor in tensors_of(arguments):
            if tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter):
                unit = self._unit_of_storage.get(_C.storage_of(tensor))
                if unit is not None:
                    units.add(unit)
        return units
