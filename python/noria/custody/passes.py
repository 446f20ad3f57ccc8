"""The hooks of a wrapped model's modules: they announce passes, and the use of parameters, to the engine.

Hooks are thin: translate, call one verb, return.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from noria import _C
from noria._errors import usage_error
from noria.custody.hooks import Hook, compiler_config_of, in_backward, refuse_cuda_graphs
from noria.partition import HookSpec
from noria.record import OperatorWatch, tensors_of

if TYPE_CHECKING:
    from noria.custody.wrapped import Wrapped

__all__ = ["Passes"]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Of a stack, from this frame outward."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _callers_from(module: str) -> Iterator[Any]:
    """The objects whose methods, written in this module, are on this thread's stack; None: no method."""
    found = sys.modules.get(module)
    if found is None:
        return
    for frame in _frames(sys._getframe()):
        if frame.f_code.co_filename == found.__file__:
            yield frame.f_locals.get("self")


def _refuse_cuda_graphs() -> None:
    """By a torch.compile that is calling: it may have been asked for after the wrap."""
    for caller in _callers_from("torch._dynamo.eval_frame"):
        refuse_cuda_graphs(getattr(caller, "compiler_config", None), "a model")


def _num_calls_on_stack(module: nn.Module, stack: FrameType | None) -> int:
    """How many calls of this module are under way there (0 where torch.compile has replaced their frames)."""
    code = nn.Module._call_impl.__code__
    return sum(frame.f_code is code and frame.f_locals.get("self") is module for frame in _frames(stack))


def _refuse_split_backwards() -> None:
    """By a pipeline schedule that is calling: it would take gradients by torch.autograd.grad, which nobody catches, and
    those of weights once the weights have left."""
    for caller in _callers_from("torch.distributed.pipelining.schedules"):
        order = getattr(caller, "pipeline_order", None) or {}  # None: a schedule that does not tell
        actions = [each for row in order.values() for each in row if each is not None]
        if any(each.computation_type.name in ("BACKWARD_INPUT", "BACKWARD_WEIGHT") for each in actions):
            raise usage_error(
                "a schedule whose backwards are whole, such as GPipe, 1F1B or interleaved 1F1B",
                f"{type(caller).__name__}, whose backwards of inputs and of weights are apart",
                "choose another schedule",
            )


@dataclasses.dataclass(frozen=True)
class _EnteredRoot:
    module: nn.Module
    is_visible: bool
    thread: int
    handled: BaseException | None  # what the caller was handling already: any other one was raised inside


class Passes:
    """Of one wrap call."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.wrapped = wrapped
        self.custody = wrapped.custody
        self._handles: list[Any] = []
        self._inner_handles: dict[int, list[Any]] = {}
        self._operator_hooks: dict[tuple[int, ...], int] = {}
        self._entered_roots: list[_EnteredRoot] = []
        self._entering = threading.Lock()
        self._known_roots: set[tuple[int, bool, bool]] = set()
        storages = {_C.storage_of(slot.parameter): slot.unit for slot in wrapped.slots}
        self.watch = OperatorWatch(storages, self._visit_for_operator, self._hook_operator_outputs)
        self._needs_watch = False
        for spec in wrapped.partition.hooks:
            self._install_hook(spec)
        # Last, so that on a root with a hook of its own the pass is what begins first and ends last.
        for number, root in enumerate(wrapped.partition.roots):
            enter, leave = self._root_hooks(number)
            self._handles.append(root.register_forward_pre_hook(Hook(enter), prepend=True))
            self._handles.append(root.register_forward_hook(Hook(leave), always_call=True))

    def in_forward(self) -> bool:
        self.forget_dead_forward()
        return bool(self._entered_roots)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for handles in self._inner_handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
        self._inner_handles.clear()

    def _root_hooks(self, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: nn.Module, args: Any) -> None:
            self.wrapped.check_alive()
            self.wrapped.loaded.refuse_missing("a forward")
            if in_backward():
                return  # recomputed inside of a backward
            _refuse_cuda_graphs()
            with self._entering:
                self.forget_dead_forward(module)
                self._refuse_beside_another_thread()
                self.wrapped.settle_writes()
                is_visible = _num_calls_on_stack(module, sys._getframe()) > 0
                self._entered_roots.append(_EnteredRoot(module, is_visible, threading.get_ident(), sys.exception()))
            if len(self._entered_roots) > 1:
                return
            self.wrapped.lending.check()
            if torch.is_grad_enabled():
                self.wrapped.has_begun_step = False
            self._forget_inner_hooks()
            training, grad = module.training, torch.is_grad_enabled()
            if (number, training, grad) not in self._known_roots:
                _refuse_split_backwards()
            self.custody.begin_forward(number, training, grad)
            if self._wants_watch(number, training, grad):
                self.watch.start()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward() or not self._entered_roots or self._entered_roots[-1].module is not module:
                return
            if self._entered_roots[-1].thread != threading.get_ident():
                return  # that of another thread, beside which this one was refused
            if len(self._entered_roots) > 1:
                self._entered_roots.pop()
                return
            # The outermost stays until the pass has ended: an interrupt before that is seen by forget_dead_forward.
            self.watch.stop()
            raised = sys.exception() is not self._entered_roots[-1].handled
            if raised:
                self.custody.abandon_forward()
            else:
                self._known_roots.add((number, module.training, torch.is_grad_enabled()))
                self._needs_watch |= self.watch.num_seen > 0
                self.custody.end_forward(tensors_of(output))
            self._entered_roots.clear()
            if raised:
                return
            if torch.is_grad_enabled():
                for updates in self.wrapped.optimizers:
                    updates.expect()

        return enter, leave

    def forget_dead_forward(self, entering: nn.Module | None = None) -> None:
        """A forward that KeyboardInterrupt or SystemExit has ended called no hook. It is known by what is missing on
        the call stack; `entering` is being called just now."""
        if not self._entered_roots:
            return
        outermost = self._entered_roots[0]
        num_expected = 1 if entering is outermost.module else 0
        stack: FrameType | None = sys._getframe()
        if outermost.thread != threading.get_ident():
            num_expected, stack = 0, sys._current_frames().get(outermost.thread)
        may_be_hidden = stack is not None and not outermost.is_visible and not num_expected
        if may_be_hidden or _num_calls_on_stack(outermost.module, stack) > num_expected:
            return
        self._entered_roots.clear()
        self.watch.stop()
        self.wrapped.activations.abandon()
        self.custody.abandon_forward()

    def _other_thread(self) -> int | None:
        """The thread that runs a forward, if it is not this one. Autograd's threads may run modules once more."""
        outermost = self._entered_roots[:1]  # that thread may end its forward meanwhile
        is_other = outermost and outermost[0].thread != threading.get_ident() and not in_backward()
        return outermost[0].thread if is_other else None

    def _refuse_beside_another_thread(self) -> None:
        if (other := self._other_thread()) is not None:
            raise usage_error(
                "one forward of a wrapped model at a time",
                f"another one under way on thread {other}",
                "let threads take turns, or wrap a copy of the model for each",
            )

    def _wants_watch(self, number: int, training: bool, grad: bool) -> bool:
        check = self.wrapped.policy.check
        if check == "off":
            return False
        return check == "operators" or self._needs_watch or (number, training, grad) not in self._known_roots

    def _install_hook(self, spec: HookSpec) -> None:
        custody, watch = self.custody, self.watch
        hook = custody.add_hook(spec.name, list(spec.needs))

        # Around blocks a module may use parameters of its own at any time: there the watch stays on.
        suspends = set(self.wrapped.unit_indices(spec.module)) <= set(spec.needs)
        entered: list[int] = []
        compiled: Any = None  # in place, when it was looked at last
        with_more: dict[frozenset[int], int] = {}  # hooks for calls that are handed parameters of other units

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal compiled
            self.wrapped.check_alive()
            self.wrapped.loaded.refuse_missing("a forward")
            if self._other_thread() is not None:
                self.forget_dead_forward()
                self._refuse_beside_another_thread()
            if module._compiled_call_impl is not compiled:
                refuse_cuda_graphs(compiler_config_of(module), type(module).__name__)
                compiled = module._compiled_call_impl
            chosen = hook
            handed = watch.units_handed((*args, *kwargs.values()))
            if handed and not handed.issubset(spec.needs):
                key = frozenset(handed)
                if key not in with_more:
                    with_more[key] = custody.add_hook(spec.name, sorted(handed.union(spec.needs)))
                chosen = with_more[key]
            entered.append(chosen)
            custody.enter(chosen)
            if suspends:
                watch.suspend()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._other_thread() is not None:
                return  # it was refused
            if suspends:
                watch.resume()
            custody.leave(entered.pop() if entered else hook, tensors_of(output))

        self._handles.append(spec.module.register_forward_pre_hook(Hook(enter), prepend=True, with_kwargs=True))
        self._handles.append(spec.module.register_forward_hook(Hook(leave), always_call=True))
        if self.wrapped.policy.check == "off" or not spec.is_block:
            return

        def inner(module: nn.Module, args: Any, output: Any) -> None:
            custody.inner_outputs(hook, tensors_of(output))

        for module in spec.module.modules():
            if module is not spec.module and next(module.parameters(recurse=False), None) is not None:
                self._inner_handles.setdefault(hook, []).append(module.register_forward_hook(Hook(inner)))

    def _forget_inner_hooks(self) -> None:
        """After the first backward: a block whose own outputs announce its backward needs no hooks inside."""
        if not self._inner_handles or self.wrapped.policy.check == "operators":
            return
        if not any(done["phase"] == "backward" for done in self.custody.passes()):
            return
        for hook, handles in self._inner_handles.items():
            if self.custody.inner_was_first(hook):
                self._handles += handles  # for good, which ends with `remove`
                continue
            for handle in handles:
                handle.remove()
        self._inner_handles.clear()

    def _visit_for_operator(self, units: tuple[int, ...]) -> int:
        hook = self._operator_hooks.get(units)
        if hook is None:
            name = "operator on " + ", ".join(self.wrapped.units[unit].name for unit in units)
            hook = self._operator_hooks[units] = self.custody.add_hook(name, list(units))
        self.custody.visit_for_operator(hook)
        return hook

    def _hook_operator_outputs(self, hook: int, outputs: list[torch.Tensor]) -> None:
        self.custody.inner_outputs(hook, outputs)
