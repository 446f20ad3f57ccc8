"""Hooks a wrapped model's modules: the hooks announce passes, and the use of parameters, to the engine.

Hooks are thin: they translate, call one verb, and return.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from noria import _C
from noria._errors import usage_error
from noria.forward.activations import Activations
from noria.forward.operator_watch import OperatorWatch, tensors_of
from noria.forward.tracer import Tracer
from noria.model.partition import HookSpec
from noria.runtime.context import Context
from noria.runtime.home_reads import HomeReads
from noria.runtime.hooks import (
    CompiledCall,
    Hook,
    call_pre_hooks,
    compiler_config_of,
    is_compiled,
    move_hooks,
    refuse_cuda_graphs,
    remove_hooks,
)
from noria.runtime.load_tracker import LoadTracker
from noria.runtime.rest import Rest
from noria.runtime.state import RunState
from noria.runtime.step_boundary import StepBoundary
from noria.torch_state import in_backward

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["ModuleHooks"]


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames of a stack, from this frame outward."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _callers_from(module: str) -> Iterator[object]:
    """Yields the object of each call on this thread's stack whose code is in this module; None if it is no method."""
    found = sys.modules.get(module)
    if found is None:
        return
    for frame in _frames(sys._getframe()):
        if frame.f_code.co_filename == found.__file__:
            yield frame.f_locals.get("self")


def _is_compiled_around() -> bool:
    """Returns True if a torch.compile is calling now. Refuses one for CUDA graphs; it may be made after the wrap."""
    is_around = False
    for caller in _callers_from("torch._dynamo.eval_frame"):
        refuse_cuda_graphs(getattr(caller, "compiler_config", None), "a model")
        is_around = is_around or type(caller).__name__ == "OptimizeContext"
    return is_around


def _num_calls_on_stack(module: nn.Module, stack: FrameType | None) -> int:
    """Counts the calls of this module that are under way on the stack. 0 if torch.compile replaced their frames."""
    code = nn.Module._call_impl.__code__
    return sum(frame.f_code is code and frame.f_locals.get("self") is module for frame in _frames(stack))


def _refuse_split_backwards() -> None:
    """Refuses a pipeline schedule that is calling now and splits backwards.

    It would take gradients by torch.autograd.grad, where no hook catches them. It would also compute gradients of
    weights after the weights have been evicted.
    """
    for caller in _callers_from("torch.distributed.pipelining.schedules"):
        order = getattr(caller, "pipeline_order", None) or {}  # None: the schedule does not tell its order
        actions = [each for row in order.values() for each in row if each is not None]
        if any(each.computation_type.name in ("BACKWARD_INPUT", "BACKWARD_WEIGHT") for each in actions):
            raise usage_error(
                "a schedule whose backwards are whole, such as GPipe, 1F1B or interleaved 1F1B",
                f"{type(caller).__name__}, whose backwards of inputs and of weights are apart",
                "choose another schedule",
            )


@dataclasses.dataclass(frozen=True)
class _EnteredRoot:
    """Describes a forward of a root that is under way."""

    module: nn.Module
    is_visible: bool  # on the call stack; torch.compile hides a forward that it has compiled whole
    thread: int
    handled: BaseException | None  # was being handled before the call; any other one was raised inside


class _Kind(NamedTuple):
    """Describes calls of a root that use the same weights: those of one kind are watched until one has ended."""

    root: int
    training: bool
    grad: bool
    keywords: frozenset[str]  # a patched forward may do something else if it is asked to


class ModuleHooks:
    """Installs the hooks and notes which forward is under way. The hooks keep `keeps_alive` alive."""

    def __init__(
        self,
        context: Context,
        run: RunState,
        loads: LoadTracker,
        reads: HomeReads,
        step: StepBoundary,
        activations: Activations,
        rest: Rest,
        on_leave: Callable[[HookSpec, object, list[torch.Tensor]], None],
        make_room: Callable[[], None],
        check_peers: Callable[[], None],
        expect_updates: Callable[[], None],
        wrap_anew: Callable[[], None],
    ) -> None:
        """Installs the hooks. `make_room` and `check_peers` run before a forward. `on_leave` runs when a module has
        returned, with its inputs and outputs.

        `expect_updates` runs after one that may train.

        `wrap_anew` plans again for parameters that are no longer frozen. It replaces these hooks by others.
        """
        self.context = context
        self.run = run
        self.loads = loads
        self.reads = reads
        self.step = step
        self.activations = activations
        self.rest = rest
        self._visits = context.engine.hooks
        self.keeps_alive: object = None
        self._on_leave = on_leave
        self._make_room = make_room
        self._check_peers = check_peers
        self._expect_updates = expect_updates
        self._wrap_anew = wrap_anew
        self._tracer = Tracer(context)
        self._frozen = [parameter for parameter, slot in context.slot_of.items() if not slot.trainable]
        run.in_forward = self.in_forward
        run.on_recover.append(self.forget_dead_forward)
        self._handles: list[RemovableHandle] = []
        self._inner_handles: dict[int, list[RemovableHandle]] = {}
        self._operator_hooks: dict[tuple[int, ...], int] = {}
        self._entered_roots: list[_EnteredRoot] = []
        self._entering = threading.Lock()
        self._thread: int | None = None  # runs the forward that is under way
        self._kind = _Kind(0, False, False, frozenset())  # of the forward that began last
        self._known_kinds: set[_Kind] = set()
        self._calls: list[object] = []  # what the modules with hooks call, as it was in the last pass
        self._compiled: dict[nn.Module, CompiledCall] = {}
        self._hook_of: dict[nn.Module, int] = {}
        storages = {_C.storage_of(slot.parameter): slot.unit for slot in self.context.slots}
        self.watch = OperatorWatch(storages, self._visit_for_operator, self._hook_operator_outputs)
        try:
            self._install()
        except BaseException:
            self.remove()
            raise

    def _install(self) -> None:
        partition = self.context.partition
        self._with_hooks = [*partition.roots, *(spec.module for spec in partition.hooks)]
        self._inside = [module for module in self._with_hooks if module not in partition.roots]
        inside = set(self._inside)
        self._places = [
            (parent, name, child)
            for parent in {id(each): each for root in partition.roots for each in root.modules()}.values()
            for name, child in parent._modules.items()
            if child in inside
        ]
        for spec in partition.hooks:
            self._install_hook(spec)
        # Installed last: on a root that has a hook of its own too, the pass begins first and ends last.
        for number, root in enumerate(partition.roots):
            enter, leave = self._root_hooks(number)
            self._handles.append(root.register_forward_pre_hook(Hook(enter), prepend=True, with_kwargs=True))
            self._handles.append(root.register_forward_hook(Hook(leave), always_call=True))
        self._leave_compiled_calls(self._with_hooks)

    def in_forward(self) -> bool:
        """Returns True while a forward of a root is under way."""
        self.forget_dead_forward()
        return bool(self._entered_roots)

    def remove(self) -> None:
        for module, call in self._compiled.items():
            if module._compiled_call_impl is call:
                module._compiled_call_impl = call.compiled
        self._compiled.clear()
        remove_hooks(self._handles)
        for handles in self._inner_handles.values():
            remove_hooks(handles)
        self._inner_handles.clear()

    def _root_hooks(self, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            self.run.check_alive()
            self.run.require_awake("a forward")
            self.loads.refuse_missing("a forward")
            if in_backward():
                return  # a checkpoint computes again inside of a backward
            is_compiled = _is_compiled_around()
            if not is_compiled and self._has_wrapped_anew(module):
                call_pre_hooks(module, args, kwargs)
                return
            if not self._entered_roots:
                self.rest.begin_forward()
                if self.rest.stands_still:
                    self._forget_inner_hooks()
                    return
                self._make_room()
            with self._entering:
                self.forget_dead_forward(module)
                self._refuse_beside_another_thread()
                self.reads.end()
                self.run.settle_writes()
                is_visible = _num_calls_on_stack(module, sys._getframe()) > 0
                self._thread = get_ident()
                self._entered_roots.append(_EnteredRoot(module, is_visible, get_ident(), sys.exception()))
            if len(self._entered_roots) > 1:
                return
            self._check_peers()
            self._tracer.meet_modules()
            if torch.is_grad_enabled():
                self.step.expect()
            self._forget_inner_hooks()
            if is_compiled:
                for hook in list(self._inner_handles):
                    self._remove_inner_hooks(hook)
            self._note_replaced_forwards()
            training, grad = module.training, torch.is_grad_enabled()
            self._kind = _Kind(number, training, grad, frozenset(kwargs))
            if self._kind not in self._known_kinds:
                _refuse_split_backwards()
            self._visits.begin_forward(number, training, grad)
            if self._wants_watch(self._kind):
                self.watch.start()

        def leave(module: nn.Module, args: object, output: object) -> None:
            if in_backward() or not self._entered_roots or self._entered_roots[-1].module is not module:
                return
            if self._entered_roots[-1].thread != get_ident():
                return  # another thread's forward; this one was refused beside it
            if len(self._entered_roots) > 1:
                self._entered_roots.pop()
                return
            # The outermost entry stays until the pass has ended: forget_dead_forward must see an interrupt before that.
            raised = sys.exception() is not self._entered_roots[-1].handled
            if not raised and self.watch.is_on():
                self.watch.watch_functions(tensors_of(output))
            self.watch.stop()
            if raised:
                self._visits.abandon_forward()
            else:
                self._known_kinds.add(self._kind)
                self._visits.end_forward(tensors_of(output))
            self._end_entry()
            if not raised and torch.is_grad_enabled():
                self._expect_updates()

        return enter, leave

    def _has_wrapped_anew(self, root: nn.Module) -> bool:
        """Returns True if parameters are no longer frozen and have got memory for gradients and updates.

        Inside another forward, and in a model that is compiled as a whole, it does nothing: the visit of their unit
        then raises.
        """
        if not torch.is_grad_enabled() or not any(each.requires_grad for each in self._frozen):
            return False
        self.forget_dead_forward(root)
        if self._entered_roots or any(each in self._compiled for each in self.context.partition.roots):
            return False
        self._wrap_anew()
        return True

    def forget_dead_forward(self, entering: nn.Module | None = None) -> None:
        """Forgets a forward that is no longer on the call stack: KeyboardInterrupt or SystemExit ends it without hooks.

        `entering`: a root that is being called just now.
        """
        if not self._entered_roots:
            return
        outermost = self._entered_roots[0]
        num_expected = 1 if entering is outermost.module else 0
        stack: FrameType | None = sys._getframe()
        if outermost.thread != get_ident():
            num_expected, stack = 0, sys._current_frames().get(outermost.thread)
        may_be_hidden = stack is not None and not outermost.is_visible and not num_expected
        if may_be_hidden or _num_calls_on_stack(outermost.module, stack) > num_expected:
            return
        self._end_entry()
        self.watch.stop()
        self.activations.abandon()
        self._visits.abandon_forward()

    def _end_entry(self) -> None:
        self._thread = None  # before the next line: who finds it still set finds an entry, too
        self._entered_roots.clear()

    def _other_thread(self) -> int | None:
        """Returns the thread that runs a forward, if it is another one.

        Returns None on autograd's threads: a checkpoint may run modules again there.
        """
        try:
            thread = self._entered_roots[0].thread
        except IndexError:  # that thread may end its forward meanwhile
            return None
        return None if thread == get_ident() or in_backward() else thread

    def _refuse_beside_another_thread(self) -> None:
        if (other := self._other_thread()) is not None:
            raise usage_error(
                "one forward of a wrapped model at a time",
                f"another one under way on thread {other}",
                "let threads take turns, or wrap a copy of the model for each",
            )

    def _enter_without_root(self) -> None:
        """Prepares a visit outside of this thread's forward: in a backward, or of a block that is called by itself."""
        if self._other_thread() is not None:
            self.forget_dead_forward()
            self._refuse_beside_another_thread()
        self.reads.end()

    def _remove_inner_hooks(self, hook: int) -> None:
        """Removes hooks inside of a block that is compiled: each would cut a graph."""
        for handle in self._inner_handles.pop(hook, []):
            handle.remove()

    def _leave_compiled_calls(self, modules: list[nn.Module]) -> None:
        """Moves noria's hooks out of what `module.compile()` compiles."""
        for module in modules:
            compiled, known = module._compiled_call_impl, self._compiled.get(module)
            if self._inner_handles and is_compiled(module):
                self._remove_inner_hooks(self._hook_of.get(module, -1))
            if compiled is known:
                continue
            if compiled is None:
                self._handles += self._compiled.pop(module).give_back(module)
            else:
                self._compiled[module] = module._compiled_call_impl = CompiledCall(module, compiled, known)

    def _note_replaced_forwards(self) -> None:
        """Has passes learnt anew if a forward was replaced on a module: by autocast, torch.compile or fused layers."""
        if self._calls_now() != self._calls:
            self._follow_compiled_blocks()
            self.activations.follow_compiled_forwards()
            self._leave_compiled_calls(self._inside)  # a root is being called
            self._known_kinds.clear()
            self._calls = self._calls_now()

    def _calls_now(self) -> list[object]:
        own = [vars(module) for module in self._with_hooks]
        calls = [each.get("forward") for each in own] + [each.get("_compiled_call_impl") for each in own]
        return calls + [parent._modules.get(name) for parent, name, _ in self._places]

    def _follow_compiled_blocks(self) -> None:
        """Moves hooks to what `torch.compile(block)` has put in a block's place, or back: inside they cut its graph."""
        found: dict[nn.Module, set[nn.Module | None]] = {}
        for parent, name, module in self._places:
            found.setdefault(module, set()).add(parent._modules.get(name))
        moved = {}
        for module, others in found.items():
            now = next(iter(others))
            if len(others) > 1 or now is None or now is module:  # in one of several places alone: hooks stay inside
                continue
            if now._modules.get("_orig_mod") is module or module._modules.get("_orig_mod") is now:
                moved[module] = now
        self._places = [(parent, name, moved.get(module, module)) for parent, name, module in self._places]
        for module, now in moved.items():
            refuse_cuda_graphs(compiler_config_of(now), type(module).__name__)
            self._remove_inner_hooks(self._hook_of.get(module, -1))
            self._handles += move_hooks(module, now)
            self._hook_of[now] = self._hook_of.pop(module)
            self.activations.follow(module, now)
        for modules in (self._with_hooks, self._inside):
            modules[:] = [moved.get(each, each) for each in modules]

    def _wants_watch(self, kind: _Kind) -> bool:
        check = self.context.policy.check
        if check == "off":
            return False
        return check == "operators" or self.watch.num_seen > 0 or kind not in self._known_kinds

    def _install_hook(self, spec: HookSpec) -> None:
        visits, watch = self._visits, self.watch
        enter_visit, leave_visit = visits.enter, visits.leave  # looked up once: called for each block
        hook = self._hook_of[spec.module] = visits.add_hook(spec.name, list(spec.needs))

        # A module around blocks may use its own parameters at any time: inside such a module the watch stays on.
        suspends = set(self.context.unit_indices(spec.module)) <= set(spec.needs)
        entered: list[tuple[int, bool]] = []  # the visit's hook, and whether the watch was suspended
        compiled: object = None  # the in-place compiled call that was checked last
        with_more: dict[frozenset[int], int] = {}  # hooks for calls whose arguments are parameters of other units

        def enter(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            nonlocal compiled
            self.run.check_alive()
            self.loads.refuse_missing("a forward")
            if self.rest.is_on:
                self.rest.refresh_if_stale()
            if self.rest.stands_still:
                return
            if self._thread != get_ident():
                self._enter_without_root()
            if module._compiled_call_impl is not compiled:
                refuse_cuda_graphs(compiler_config_of(module), type(module).__name__)
                compiled = module._compiled_call_impl
            chosen = hook
            handed = watch.units_handed((*args, *kwargs.values()))
            if handed and not handed.issubset(spec.needs):
                key = frozenset(handed)
                if key not in with_more:
                    with_more[key] = visits.add_hook(spec.name, sorted(handed.union(spec.needs)))
                chosen = with_more[key]
            has_to_suspend = suspends and watch.may_be_entered()
            entered.append((chosen, has_to_suspend))
            enter_visit(chosen)
            if has_to_suspend:
                if watch.is_on():  # what a custom function returned may come here at once
                    watch.watch_functions(tensors_of((args, kwargs)))
                watch.suspend()

        def leave(module: nn.Module, args: object, output: object) -> None:
            if self.rest.stands_still or (self._thread != get_ident() and self._other_thread() is not None):
                return  # in the second case this forward was refused
            chosen, is_suspended = entered.pop() if entered else (hook, False)
            if is_suspended:
                watch.resume()
            outputs = tensors_of(output)
            self._on_leave(spec, args, outputs)
            leave_visit(chosen, outputs)

        self._handles.append(spec.module.register_forward_pre_hook(Hook(enter), prepend=True, with_kwargs=True))
        self._handles.append(spec.module.register_forward_hook(Hook(leave), always_call=True))
        if self.context.policy.check == "off" or not spec.is_block or is_compiled(spec.module):
            return

        def inner(module: nn.Module, args: object, output: object) -> None:
            if not self.rest.stands_still:
                visits.inner_outputs(hook, tensors_of(output))

        for module in spec.module.modules():
            if module is not spec.module and next(module.parameters(recurse=False), None) is not None:
                self._inner_handles.setdefault(hook, []).append(module.register_forward_hook(Hook(inner)))

    def _forget_inner_hooks(self) -> None:
        """Removes hooks inside of blocks, after the first backward.

        A block needs them only if the outputs of a module inside it announce its backward first.
        """
        if not self._inner_handles or self.context.policy.check == "operators":
            return
        if not any(done["phase"] == "backward" for done in self.context.engine.statistics.passes()):
            return
        for hook, handles in self._inner_handles.items():
            if self._visits.inner_was_first(hook):
                self._handles += handles  # they stay until `remove`
                continue
            for handle in handles:
                handle.remove()
        self._inner_handles.clear()

    def _visit_for_operator(self, units: tuple[int, ...]) -> int:
        hook = self._operator_hooks.get(units)
        if hook is None:
            name = "operator on " + ", ".join(self.context.units[unit].name for unit in units)
            hook = self._operator_hooks[units] = self._visits.add_hook(name, list(units))
        self._visits.visit_for_operator(hook)
        return hook

    def _hook_operator_outputs(self, hook: int, outputs: list[torch.Tensor]) -> None:
        self._visits.inner_outputs(hook, outputs)
