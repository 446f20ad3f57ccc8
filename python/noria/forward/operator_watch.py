"""Watches the use of weights outside of modules with hooks, such as in a root that uses `self.embed.weight` directly.

While the watch is on, each torch function that gets a parameter (or a view of one) becomes a visit of that parameter's
unit. This holds in forward and, through the operator's output, in backward. Itineraries learn such visits like any
other. The watch is on in passes that are not known yet, and for models that need it. `check="operators"` keeps it on,
`check="off"` never turns it on.

Note [Modes and compilation]. A compiled block that is first called under a mode stays uncompiled for good. So the
mode is left while a module with a hook of its own runs, and entered again afterwards.

Note [Code inside of a backward]. Custom autograd functions and checkpoints run Python code in a backward, which may
use weights. The watch is on there, too:
- What autograd saves while the watch is on is unpacked by the watch. If others' hooks pack it, such as a checkpoint's,
  the watch calls theirs.
- Nodes of custom functions have a hook, but not those of compiled code: it runs no Python code of the user's. If a
  block is computed again inside of one, its compiled code must find the modes that it was compiled under.
Both turn the watch on until the node ends. Then the autograd engine restores the thread's modes. If a weight is
unpacked, its unit is visited at once, because C++ code may use it. All units of one node are visited together.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from noria import _C
from noria.model.inner_tensors import tensors_in
from noria.torch_state import in_backward

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


_PLAIN = torch.Tensor.__torch_dispatch__
_WATCHED = "noria watches"  # in a node's metadata


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Stands for a tensor that autograd saved. Autograd does not check the versions of what hooks have packed."""

    tensor: torch.Tensor
    version: int

    def unpacked(self) -> torch.Tensor:
        if (found := self.tensor._version) == self.version:
            return self.tensor
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {list(self.tensor.shape)} is at version {found}; expected version {self.version} instead."
        )


@dataclasses.dataclass
class _Suspension:
    """Counts the modules that have suspended the watch and have not ended."""

    depth: int = 0
    left: bool = False  # the mode, in a backward


class _Here(threading.local):
    """What a thread knows. A forward runs on one thread, a backward on one for each device."""

    def __init__(self) -> None:
        self.forward, self.backward = _Suspension(), _Suspension()
        self.node: tuple[int, int] | None = None  # the node of a backward that asked for units last
        self.units: set[int] = set()  # what it asked for


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
        self._entered: int | None = None  # the thread that has entered the mode in a forward: it is that thread's
        self._here = _Here()
        self._saving: saved_tensors_hooks | None = None  # on that thread; they may be left later than the mode
        self._pack, self._unpack = _saving_hooks(weakref.ref(self))
        self.num_seen = 0
        """Number of operators and saved tensors so far that used a unit outside of its modules."""

    def start(self) -> None:
        self._wanted, self._here.forward = True, _Suspension()
        self._enter()

    def stop(self) -> None:
        self._wanted = False
        self._leave()

    def is_on(self) -> bool:
        return self._wanted

    def may_be_entered(self) -> bool:
        """Returns False if there is nothing to suspend. Called at each visit."""
        return self._wanted or torch._C._len_torch_function_stack() > 0

    def suspend(self) -> None:
        """Leaves the mode until `resume`. See Note [Modes and compilation]."""
        suspension = self._suspension()
        suspension.depth += 1
        if suspension.depth > 1:
            return
        if suspension is self._here.forward:
            self._leave()
        elif _get_current_function_mode() is self:
            self.__exit__(None, None, None)
            suspension.left = True

    def resume(self) -> None:
        suspension = self._suspension()
        suspension.depth = max(0, suspension.depth - 1)
        if suspension.depth:
            return
        if suspension is self._here.forward and self._wanted:
            self._enter()
        elif suspension.left:
            suspension.left = False
            self.__enter__()  # type: ignore[no-untyped-call]

    def _suspension(self) -> _Suspension:
        return self._here.backward if in_backward() else self._here.forward

    def _enter(self) -> None:
        if self._entered == threading.get_ident():
            return
        self.__enter__()  # type: ignore[no-untyped-call]
        if self._entered is not None:  # another thread's forward has died in it, and its hooks are that thread's
            self._saving = None
        self._entered = threading.get_ident()
        if self._saving is None and _top_hooks() is None and _may_push_hooks():
            self._saving = saved_tensors_hooks(self._pack, self._unpack)
            self._saving.__enter__()

    def _leave(self) -> None:
        is_own = self._entered == threading.get_ident()
        if is_own and _get_current_function_mode() is self:  # else a user's mode is on top: ignore calls
            self.__exit__(None, None, None)
            self._entered = None
        if self._saving is not None and self._is_own(_top_hooks()):  # else others' hooks are on top
            self._saving.__exit__(None, None, None)
            self._saving = None

    @torch._disable_dynamo  # which would trace it for each operator anew
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        is_on = self._wanted or in_backward()
        if self._suspension().depth or not is_on or getattr(func, "__name__", "") in _METADATA:
            return func(*args, **kwargs)
        tensors = tensors_of((args, kwargs))
        if torch.is_grad_enabled():
            self.watch_functions(tensors)
        with self._around_other_hooks():
            units = self._units_of(tensors)
            if not units:
                return func(*args, **kwargs)
            hook = self._visit(tuple(sorted(units)))
            self.num_seen += 1
            result = func(*args, **kwargs)
        self._returned(hook, tensors_of(result))
        return result

    def units_handed(self, arguments: Iterable[object]) -> set[int]:
        """Returns the units of parameters, and of views of parameters, among a module's arguments."""
        if torch._C._len_torch_function_stack():
            with torch._C.DisableTorchFunction():  # hides this look from modes
                return self._units_handed(arguments)
        return self._units_handed(arguments)

    def _units_handed(self, arguments: Iterable[object]) -> set[int]:
        units = set()
        for value in arguments:
            if isinstance(value, torch.Tensor) and (type(value) is not torch.Tensor or value._is_view()):
                units |= self._units_of([value])
        return units

    def _units_of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        units = set()
        for tensor in tensors:
            if type(tensor).__torch_dispatch__ is not _PLAIN:  # has no storage of its own
                units |= self._units_of(each for each in tensors_in([tensor]) if each is not tensor)
            elif tensor.layout is torch.strided:
                unit = self._unit_of_storage.get(_C.storage_of(tensor))
                if unit is not None:
                    units.add(unit)
        return units

    # ---- in a backward: see Note [Code inside of a backward] ----

    def watch_functions(self, tensors: Iterable[torch.Tensor]) -> None:
        """Watches the backwards of the custom functions that have returned these tensors."""
        for tensor in tensors:
            node = tensor.grad_fn
            if isinstance(node, BackwardCFunction) and _WATCHED not in node.metadata and not _is_compiled(node):
                node.metadata[_WATCHED] = True
                node.register_prehook(functools.partial(_watch_node, weakref.ref(self)))

    def watch_node(self) -> None:
        """Watches until the end of the node that runs now."""
        self._here.backward = _Suspension()
        if in_backward() and _get_current_function_mode() is not self:
            self.__enter__()  # type: ignore[no-untyped-call]

    def pack(self, tensor: torch.Tensor) -> _Kept:
        with torch._C.DisableTorchFunction():
            if self._wanted and self._units_of([tensor]):
                self.num_seen += 1
            return _Kept(tensor.detach(), tensor._version)

    def unpacking(self, unpack: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Unpacks a tensor that was saved while the watch was on."""
        if not in_backward():
            return unpack()
        self.watch_node()
        tensor = unpack()
        with torch._C.DisableTorchFunction():
            node = torch._C._current_autograd_node()
            key = (torch._C._current_graph_task_id(), node._sequence_nr())
            here = self._here
            if here.node != key:
                here.node, here.units = key, set()
            here.units |= self._units_of([tensor])
            if here.units:  # a checkpoint may have visited others since
                self._visit(tuple(sorted(here.units)))
        return tensor

    @contextmanager
    def _around_other_hooks(self) -> Iterator[None]:
        """While others' hooks pack what is saved, they are called by the watch."""
        others = _top_hooks()
        if others is None or self._is_own(others) or not torch.is_grad_enabled():
            yield
            return
        pack, unpack = others
        watch = weakref.ref(self)
        with saved_tensors_hooks(pack, lambda packed: _unpacked(watch, lambda: unpack(packed))):
            yield

    def _is_own(self, hooks: tuple[object, object] | None) -> bool:
        return hooks is not None and hooks[0] is self._pack


def _is_compiled(node: torch.autograd.graph.Node) -> bool:
    return node.name() == "CompiledFunctionBackward"


def _top_hooks() -> tuple[Callable[..., object], Callable[..., torch.Tensor]] | None:
    """Returns the hooks that pack and unpack what autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _may_push_hooks() -> bool:
    """Returns False inside of torch.func's grad, vjp, jacrev and hessian, which forbid hooks."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None


# Autograd graphs keep these. They hold the watch weakly, because a graph may outlive it.


def _saving_hooks(
    watch: weakref.ref[OperatorWatch],
) -> tuple[Callable[[torch.Tensor], _Kept], Callable[[_Kept], torch.Tensor]]:
    def pack(tensor: torch.Tensor) -> _Kept:
        alive = watch()
        return _Kept(tensor.detach(), tensor._version) if alive is None else alive.pack(tensor)

    return pack, lambda kept: _unpacked(watch, kept.unpacked)


def _unpacked(watch: weakref.ref[OperatorWatch], unpack: Callable[[], torch.Tensor]) -> torch.Tensor:
    alive = watch()
    return unpack() if alive is None else alive.unpacking(unpack)


def _watch_node(watch: weakref.ref[OperatorWatch], gradients: object) -> None:
    if (alive := watch()) is not None:
        alive.watch_node()
