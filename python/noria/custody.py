"""One `wrap` call: the models' parameters in custody, the hooks that announce their use, and everything that is shared.

Hooks are thin: translate, call one verb, return. They are hidden from torch.compile, so blocks compile inside of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
from torch import nn

from noria import _C
from noria._errors import usage_error
from noria.home import GRADIENT_RING, UNSUMMED, Home, HomeParameter, Region, held_region
from noria.limits import check_fits, host_limits
from noria.modes import plainly
from noria.partition import HookSpec
from noria.policy import host_budget
from noria.record import OperatorWatch, tensors_of

if TYPE_CHECKING:
    from noria.plan import WrapPlan
    from noria.ranks import Ranks
    from noria.updates import Updates

__all__ = ["Wrapped", "in_backward", "wrapped_by"]

Given = ParamSpec("Given")

# By module, of every module of a wrapped model. Weak on both sides: a wrap call lives as long as its models.
_WRAPPED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Wrapped]] = weakref.WeakKeyDictionary()


def wrapped_by(module: nn.Module) -> Wrapped | None:
    """The wrap call that a model, or a module inside of one, belongs to."""
    found = _WRAPPED.get(module)
    return found() if found is not None else None


_PATIENCE = 8  # steps in which no draft was kept, or all would have been
_DRAFTS_STOPPED = (
    f"drafts have stopped: in {_PATIENCE} steps none was kept (gradients were clipped or edited after backward, or "
    "hyperparameters changed between forward and step)"
)


def in_backward() -> bool:
    """True on a thread that is running a backward: in a hook, or in what a checkpoint computes again."""
    return torch._C._current_graph_task_id() >= 0


def _num_calls_on_stack(module: nn.Module) -> int:
    """How many calls of this module are under way on this thread (0 where torch.compile has replaced their frames)."""
    count = 0
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count


@dataclasses.dataclass(frozen=True)
class _EnteredRoot:
    module: nn.Module
    is_visible: bool
    handled: BaseException | None  # what the caller was handling already: any other one was raised inside


class _Hook:
    """A hook of one wrap call. A copy of the module (`deepcopy`, `pickle`) gets one that does nothing: the copy is an
    ordinary model."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = torch._dynamo.disable(call)

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> Any:
        return (_unpickled_hook, ())


def _no_hook(*args: Any) -> None:
    pass


def _unpickled_hook() -> Callable[..., None]:
    return _no_hook


class _NoSync:
    """`model.no_sync`. That of a copy of the model does nothing: the copy is an ordinary model."""

    def __init__(self, wrapped: Wrapped) -> None:
        self._wrapped = weakref.ref(wrapped)

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        wrapped = self._wrapped()
        return contextlib.nullcontext() if wrapped is None else wrapped.no_sync()

    def __deepcopy__(self, memo: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext

    def __reduce__(self) -> Any:
        return (getattr, (contextlib, "nullcontext"))


class Wrapped:
    """Owns the home, the engine's Custody and the module hooks; knows every parameter by its object."""

    def __init__(
        self,
        plan: WrapPlan,
        home: Home,
        custody: _C.Custody,
        backend: _C.Backend,
        pool: _C.HostOptimizer | None,
        ranks: Ranks | None = None,
    ) -> None:
        self.plan = plan
        self.partition = plan.partition
        self.units = plan.units
        self.policy = plan.policy
        self.device = plan.device
        self.home = home
        self.custody = custody
        home.is_moved = custody.is_moved
        self.backend = backend
        self.pool = pool
        self.slots: list[HomeParameter] = [slot for unit in plan.units for slot in unit.parameters]
        self.slot_of: dict[nn.Parameter, HomeParameter] = {slot.parameter: slot for slot in self.slots}
        self.optimizers: list[Updates] = []
        self.num_accumulating = 0  # blocks of optimizer.accumulate() that are open
        self.updates_in_backward = plan.policy.update == "backward"
        self._to_load: set[Any] = set()  # of a torn home: slots and optimizers that have not been loaded since
        self._torn = ""
        self.ranks = ranks
        self._num_unsynced = 0  # blocks of model.no_sync() that are open
        if ranks is not None:
            for root in plan.partition.roots:
                root.__dict__["no_sync"] = _NoSync(self)
        self.shows_gradients = ranks is None and not self.updates_in_backward
        self.trace: _C.Trace | None = None
        self.pid = os.getpid()
        self.closed = False
        self._handles: list[Any] = []
        self._inner_handles: dict[int, list[Any]] = {}
        self._operator_hooks: dict[tuple[int, ...], int] = {}
        self._entered_roots: list[_EnteredRoot] = []
        self._known_roots: set[tuple[int, bool, bool]] = set()
        self._state_views: dict[int, torch.Tensor] = {}
        self._low_views: dict[int, torch.Tensor] = {}
        self.drafts_pay = True
        self._draft_counts = (0, 0)  # kept and lost, at the last step
        self._steps_in_vain = 0
        self._steps_that_would_hold = 0
        self._written_views: set[int] = set()  # by slot: the user has had write access to its view
        self._before_materialize: list[dict[int, torch.Tensor]] = []  # of the blocks that are open, by slot
        self._loads: list[list[int]] = []  # units whose home a load_state_dict has opened
        self.loaded_low_bits: set[int] = set()  # slots whose low bits were loaded, and that were not updated since
        storages = {slot.parameter.untyped_storage()._cdata: slot.unit for slot in self.slots}
        self.watch = OperatorWatch(storages, self._visit_for_operator, self._hook_operator_outputs)
        self._needs_watch = False
        for root in self.partition.roots:
            for module in root.modules():
                _WRAPPED[module] = weakref.ref(self)
        self._install_hooks()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit what this needs may be gone; atexit came before
            self.shutdown()

    # ---- hooks --------------------------------------------------------------------------------------------------

    def _install_hooks(self) -> None:
        for spec in self.partition.hooks:
            self._install_hook(spec)
        # Last, so that on a root with a hook of its own the pass is what begins first and ends last.
        for number, root in enumerate(self.partition.roots):
            enter, leave = self._root_hooks(number)
            self._handles.append(root.register_forward_pre_hook(_Hook(enter), prepend=True))
            self._handles.append(root.register_forward_hook(_Hook(leave), always_call=True))
            self._install_state_dict_hooks(root)

    def _root_hooks(self, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: nn.Module, args: Any) -> None:
            self._check_alive()
            if in_backward():
                return  # recomputed inside of a backward
            self._forget_dead_forward(module)
            self._settle_writes()
            self._entered_roots.append(_EnteredRoot(module, _num_calls_on_stack(module) > 0, sys.exception()))
            if len(self._entered_roots) > 1:
                return
            self._forget_inner_hooks()
            training, grad = module.training, torch.is_grad_enabled()
            self.custody.begin_forward(number, training, grad)
            if self._wants_watch(number, training, grad):
                self.watch.start()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward() or not self._entered_roots or self._entered_roots[-1].module is not module:
                return
            entered = self._entered_roots.pop()
            if self._entered_roots:
                return
            self.watch.stop()
            if sys.exception() is not entered.handled:  # it raised
                self.custody.abandon_forward()
                return
            self._known_roots.add((number, module.training, torch.is_grad_enabled()))
            self._needs_watch |= self.watch.num_seen > 0
            self.custody.end_forward(tensors_of(output))
            if torch.is_grad_enabled():
                for updates in self.optimizers:
                    updates.expect()

        return enter, leave

    def _forget_dead_forward(self, entering: nn.Module | None = None) -> None:
        """A forward that KeyboardInterrupt or SystemExit has ended called no hook. It is known by what is missing on
        the call stack; `entering` is being called just now."""
        if not self._entered_roots:
            return
        outermost = self._entered_roots[0]
        num_expected = 1 if entering is outermost.module else 0
        if _num_calls_on_stack(outermost.module) > num_expected or (not outermost.is_visible and not num_expected):
            return
        self._entered_roots.clear()
        self.watch.stop()
        self.custody.abandon_forward()

    def _wants_watch(self, number: int, training: bool, grad: bool) -> bool:
        if self.policy.check == "off":
            return False
        return (
            self.policy.check == "operators" or self._needs_watch or (number, training, grad) not in self._known_roots
        )

    def _install_hook(self, spec: HookSpec) -> None:
        custody, watch = self.custody, self.watch
        hook = custody.add_hook(spec.name, list(spec.needs))

        # Around blocks a module may use parameters of its own at any time: there the watch stays on.
        suspends = set(self.unit_indices(spec.module)) <= set(spec.needs)
        entered: list[int] = []
        with_more: dict[frozenset[int], int] = {}  # hooks for calls that are handed parameters of other units

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._check_alive()
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
            if suspends:
                watch.resume()
            custody.leave(entered.pop() if entered else hook, tensors_of(output))

        self._handles.append(spec.module.register_forward_pre_hook(_Hook(enter), prepend=True, with_kwargs=True))
        self._handles.append(spec.module.register_forward_hook(_Hook(leave), always_call=True))
        if self.policy.check == "off" or not spec.is_block:
            return

        def inner(module: nn.Module, args: Any, output: Any) -> None:
            custody.inner_outputs(hook, tensors_of(output))

        for module in spec.module.modules():
            if module is not spec.module and next(module.parameters(recurse=False), None) is not None:
                self._inner_handles.setdefault(hook, []).append(module.register_forward_hook(_Hook(inner)))

    def _forget_inner_hooks(self) -> None:
        """After the first backward: a block whose own outputs announce its backward needs no hooks inside."""
        if not self._inner_handles or self.policy.check == "operators":
            return
        if not any(done["phase"] == "backward" for done in self.custody.passes()):
            return
        for hook, handles in self._inner_handles.items():
            if not self.custody.inner_was_first(hook):
                for handle in handles:
                    handle.remove()
        self._inner_handles.clear()

    def _visit_for_operator(self, units: tuple[int, ...]) -> int:
        hook = self._operator_hooks.get(units)
        if hook is None:
            name = "operator on " + ", ".join(self.units[unit].name for unit in units)
            hook = self._operator_hooks[units] = self.custody.add_hook(name, list(units))
        self.custody.visit_for_operator(hook)
        return hook

    def _hook_operator_outputs(self, hook: int, outputs: list[torch.Tensor]) -> None:
        self.custody.inner_outputs(hook, outputs)

    def _check_alive(self) -> None:
        if os.getpid() != self.pid:
            raise usage_error(
                "a wrapped model used in the process that wrapped it",
                f"it in process {os.getpid()}, forked from {self.pid}",
                "wrap inside the child, or let data loader workers leave the model alone",
            )
        if self.closed:
            raise usage_error("a model that is wrapped", "one whose engine was shut down", "wrap it again")

    # ---- state_dict ---------------------------------------------------------------------------------------------

    def _install_state_dict_hooks(self, root: nn.Module) -> None:
        for module in root.modules():
            own = {
                name: self.slot_of[parameter]
                for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
                if parameter in self.slot_of
            }
            self._handles.append(module.register_load_state_dict_pre_hook(_Hook(self._refuse_assign)))
            if own:
                self._handles.append(module._register_state_dict_hook(_Hook(self._give_state(own))))
                self._handles.append(module.register_load_state_dict_pre_hook(_Hook(self._take_state(own))))
                self._handles.append(module.register_load_state_dict_post_hook(_Hook(self._state_taken(own))))

    def _give_state(self, own: dict[str, HomeParameter]) -> Callable[..., None]:
        def give(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
            for name, slot in own.items():
                replaced = module._parameters.get(name) is not slot.parameter
                if replaced or prefix + name not in state_dict or state_dict[prefix + name] is slot.parameter:
                    continue  # the user's own now, left out, or asked for as it is (keep_vars)
                state_dict[prefix + name] = self.current(slot)

        return give

    def _refuse_assign(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            raise usage_error(
                "load_state_dict(assign=False)",
                "assign=True, which would replace the parameters that noria holds",
                "leave assign out: values are copied into the home",
            )

    def _take_state(self, own: dict[str, HomeParameter]) -> Callable[..., None]:
        def take(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
            self.recover()
            self.refuse_between_steps("model.load_state_dict()", mends=True)
            units = sorted({slot.unit for slot in own.values()})
            if self.ranks is None:
                self.custody.open_home(units, True)
                self._loads.append(units)
            else:
                for unit in units:
                    self.custody.access_home(unit, True)
            for name, slot in own.items():
                value = state_dict.get(prefix + name)
                if isinstance(value, torch.Tensor) and value.shape == slot.shape:
                    self.write(slot, value)
                    self.is_loaded(slot.index)
                    # torch copies it onto itself
                    state_dict[prefix + name] = self.home.working(slot) if self.ranks is None else slot.parameter

        return take

    def _state_taken(self, own: dict[str, HomeParameter]) -> Callable[..., None]:
        def taken(module: nn.Module, incompatible_keys: Any) -> None:
            self._end_loads()

        return taken

    def _end_loads(self) -> None:
        """torch copies a module's own values as soon as its pre-hooks return: what is open now is done. A loader that
        raised, or one that goes around `load_state_dict`, does not get here by itself."""
        while self._loads:
            self.custody.close_home(self._loads.pop(), True)

    # ---- values -------------------------------------------------------------------------------------------------

    def current(self, slot: HomeParameter) -> torch.Tensor:
        """The parameter's current value: a CPU tensor that views the home, the same object for tied names. Where ranks
        share the model: a copy, from all of them."""
        self._check_alive()
        self.refuse_between_steps("a look at weights")
        self.custody.access_home(slot.unit, False)
        if self.ranks is not None:
            return self.whole(slot)
        view = self._state_views.get(slot.index)
        if view is None:
            view = self._state_views[slot.index] = self.home.watched(slot, self._before_write(slot.index))
        _C.watch(view)
        return view

    def whole(self, slot: HomeParameter) -> torch.Tensor:
        """The working copy; collective where ranks share the model."""
        working = self.home.working(slot)
        return working if self.ranks is None else self.ranks.whole(slot, working)

    def over_ranks(self, sums: dict[int, float]) -> dict[int, float]:
        """Each summed over the ranks, in their order. Collective."""
        if not sums:
            return sums  # on all ranks: whose gradient is there has been agreed on
        bits = torch.tensor(list(sums.values()), dtype=torch.float64).view(torch.int64)
        everybodys = torch.tensor(self.custody.exchange(bits.tolist()), dtype=torch.int64).view(torch.float64)
        totals = [0.0] * len(sums)
        for its in everybodys.view(-1, len(sums)).tolist():
            totals = [total + each for total, each in zip(totals, its, strict=True)]
        return dict(zip(sums, totals, strict=True))

    def move_views(self, slot: HomeParameter) -> None:
        """The unit lies elsewhere now; so do the bytes that the user's tensors show."""
        for purpose, views in (("working copies", self._state_views), ("low bits", self._low_views)):
            view = views.get(slot.index)
            if view is not None:
                _C.move_tensor(view, self.home.address(purpose, slot.unit) + slot.home_offset)

    def drops_draft(self, unit: int) -> Callable[[], None]:
        """For tensors that view the unit's state: their first write is an edit that no draft has seen."""
        return self._while_open(lambda wrapped: wrapped.custody.access_home(unit, False))

    def weakly(self, act: Callable[Concatenate[Wrapped, Given], None]) -> Callable[Given, None]:
        """`act` on this object, for whoever must not keep it alive. Once it is gone nothing happens."""
        reference = weakref.ref(self)

        def call(*args: Given.args, **kwargs: Given.kwargs) -> None:
            wrapped = reference()
            if wrapped is not None:
                act(wrapped, *args, **kwargs)

        return call

    def _while_open(self, act: Callable[[Wrapped], None]) -> Callable[[], None]:
        """For callbacks of tensors that outlive this object, its engine or its process."""

        def call(wrapped: Wrapped) -> None:
            if not wrapped.closed and os.getpid() == wrapped.pid:
                act(wrapped)

        return self.weakly(call)

    def judge_drafts(self, would_hold: bool) -> None:
        """After a step. Work that is thrown away at every step is not worth its memory traffic; `would_hold`: this step
        would not have thrown away any."""
        if not self.plan.drafted:
            return
        if not self.drafts_pay:
            self._steps_that_would_hold = self._steps_that_would_hold + 1 if would_hold else 0
            if self._steps_that_would_hold >= _PATIENCE:
                self.drafts_pay, self._steps_in_vain, self._steps_that_would_hold = True, 0, 0
                self.plan.unpredicted.remove(_DRAFTS_STOPPED)
            return
        counts = self.custody.draft_counts()
        kept = counts["kept"] + counts["unchanged"]
        lost = counts["changed"] + counts["redone"] + counts["dropped"]
        was_kept, was_lost = self._draft_counts
        self._draft_counts = (kept, lost)
        if kept > was_kept:
            self._steps_in_vain = 0
        elif lost > was_lost:
            self._steps_in_vain += 1
        if self._steps_in_vain >= _PATIENCE and self.drafts_pay:
            self.drafts_pay = False
            self.plan.unpredicted.append(_DRAFTS_STOPPED)

    def _before_write(self, index: int) -> Callable[[], None]:
        def note(wrapped: Wrapped) -> None:
            wrapped.refuse_between_steps("a write to weights", mends=True)
            wrapped.custody.access_home(wrapped.slots[index].unit, True)
            wrapped._written_views.add(index)

        return self._while_open(note)

    def _settle_writes(self) -> None:
        """Before the home is used: what was written through `state_dict()` reaches plain masters (a split one consists
        of the working copy and more), and what a broken load left open is closed."""
        self._end_loads()
        while self._written_views:
            slot = self.slots[self._written_views.pop()]
            _C.watch(self._state_views[slot.index])
            if slot.has_master and not slot.is_split:
                with torch.no_grad():
                    rounded = torch.empty_like(self.home.working(slot))
                    _C.split_master(self.home.master(slot).data_ptr(), rounded.data_ptr(), 0, rounded.numel())
                    self._follow_working_copy(slot, rounded)

    def write(self, slot: HomeParameter, value: torch.Tensor) -> None:
        """A new value into the home: the master exactly, the working copy rounded. The unit's home must be open."""
        value = slot.part_of(value)
        with torch.no_grad():
            if slot.has_master:
                self.set_master(slot, self._with_loaded_low_bits(slot, value.to(device="cpu", dtype=torch.float32)))
            else:
                self.home.working(slot).copy_(value)
        for before in self._before_materialize:
            if slot.index in before:  # the master has followed already
                before[slot.index] = self.home.working(slot).clone()

    def _with_loaded_low_bits(self, slot: HomeParameter, value: torch.Tensor) -> torch.Tensor:
        """A bfloat16 value that comes after its low bits, which the optimizer's state brought, is joined with them."""
        if slot.index not in self.loaded_low_bits:
            return value
        bits = value.view(torch.int32)
        if (bits & 0xFFFF).any():  # it has low bits of its own
            self.loaded_low_bits.discard(slot.index)
            return value
        return (bits + self.low_bits(slot)).view(torch.float32)

    def set_low_bits(self, slot: HomeParameter, low: torch.Tensor) -> None:
        """Low bits from a checkpoint. They belong to the working copy that is there, or to the one that is loaded next;
        which, the first update decides (`confirm_low_bits`). Both encodings of a master keep them as they are."""
        high = self.home.working(slot).view(torch.int16).to(torch.int32) << 16
        self.set_master(slot, (high + low.to(device="cpu", dtype=torch.int16)).view(torch.float32))
        self.loaded_low_bits.add(slot.index)

    def confirm_low_bits(self, slot: HomeParameter) -> None:
        """Before an update of a parameter whose low bits were loaded. With a working copy that is not theirs they may
        make a NaN of a zero: there they are dropped."""
        if slot.index not in self.loaded_low_bits:
            return
        self.loaded_low_bits.discard(slot.index)
        master, working = self.master(slot), self.home.working(slot)
        strange = master.isnan() & ~working.isnan()
        if strange.any():
            self.set_master(slot, torch.where(strange, working.float(), master))

    def low_bits(self, slot: HomeParameter) -> torch.Tensor:
        """What the master has beyond the working copy, whichever way it is kept: the same bits from both kernels."""
        if slot.is_split:
            view = self._low_views.get(slot.index)
            if view is None:
                view = self._low_views[slot.index] = self.home.low_bits(slot)
            return view
        with plainly():
            return self.home.master(slot).view(torch.int32).to(torch.int16)

    def set_master(self, slot: HomeParameter, master: torch.Tensor) -> None:
        """`master`: fp32 on the CPU, with the parameter's shape."""
        if not slot.is_split:
            self.home.master(slot).copy_(master)
            self.round_master(slot)
        else:
            dense = torch.empty_like(self.home.low_bits(slot), dtype=torch.float32)  # storage order of the parameter
            dense.copy_(master)
            _C.split_master(
                dense.data_ptr(), self.home.working(slot).data_ptr(), self.home.low_bits(slot).data_ptr(), dense.numel()
            )

    def round_master(self, slot: HomeParameter) -> None:
        """Working copy from the plain master: nearest, ties away from zero."""
        _C.split_master(self.home.master(slot).data_ptr(), self.home.working(slot).data_ptr(), 0, slot.like.numel())

    def master(self, slot: HomeParameter) -> torch.Tensor:
        """The fp32 master as a plain tensor: the home's own where it has one, rebuilt from the split one else."""
        if not slot.is_split:
            return self.home.master(slot)
        master = torch.empty_like(self.home.low_bits(slot), dtype=torch.float32)
        _C.join_master(
            self.home.working(slot).data_ptr(),
            self.home.low_bits(slot).data_ptr(),
            master.data_ptr(),
            master.numel(),
        )
        return master

    @contextlib.contextmanager
    def materialized(self, units: Sequence[int], read_only: bool) -> Iterator[None]:
        """Parameters of these units show the home itself, until the block ends."""
        self.recover()
        self.refuse_between_steps("noria.materialize")
        slots = [slot for unit in units for slot in self.units[unit].parameters]
        with plainly():
            self.custody.open_home(list(units), not read_only)
        was = {slot.index: self.home.working(slot).clone() for slot in slots if slot.has_master and not read_only}
        versions = {slot.index: slot.parameter._version for slot in slots}
        self._before_materialize.append(was)
        try:
            yield
        finally:
            self._before_materialize.pop()  # blocks nest
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.custody.bring_home(list(units))
            for index, before in was.items():
                self._follow_working_copy(self.slots[index], before)
            written = next((slot for slot in slots if slot.parameter._version != versions[slot.index]), None)
            if read_only and written is not None:  # take it, so that nothing is lost, and complain
                self.custody.access_home(written.unit, True)
            self.custody.close_home(list(units), not read_only or written is not None)
        if read_only and written is not None:
            raise usage_error(
                "no writes inside noria.materialize(..., read_only=True)",
                f'a write to "{written.name}"',
                "leave read_only out; the write was kept",
            )

    def _follow_working_copy(self, slot: HomeParameter, before: torch.Tensor) -> None:
        """Where the caller changed the working copy, the master becomes that value; elsewhere it keeps its low bits."""
        with torch.no_grad():
            working = self.home.working(slot)
            changed = working.view(torch.int16) != before.view(torch.int16)
            if not changed.any():
                return
            if not slot.is_split:
                self.home.master(slot)[changed] = working[changed].float()
            else:
                self.home.low_bits(slot)[changed] = 0

    def run_update(self, unit: int) -> None:
        """What the engine calls when somebody needs a unit whose update was deferred to the launching thread."""
        for updates in self.optimizers:
            updates.run(unit)

    def recover(self) -> None:
        """After a pass that raised: what it had begun is forgotten, gradients that had landed stay."""
        self._check_alive()
        if in_backward():
            return  # it is alive
        self._forget_dead_forward()
        self.custody.recover()
        self._settle_writes()

    def refuse_when_busy(self, call: str) -> None:
        self._forget_dead_forward()
        if self._entered_roots or in_backward() or self._before_materialize:
            raise usage_error(
                f"{call} between passes",
                "it inside of a forward, a backward or `with noria.materialize(...)`",
                "call it after backward(), outside of the block",
            )

    def hold_all_gradients(self) -> None:
        """update="backward" that accumulates: memory for all gradients, taken the first time, in place of the ring."""
        if self.custody.holds_all():
            return
        region = held_region(self.units)  # the ring is given back only after it
        self._take_later(region, self.custody.hold_all)
        self.home.give_back(GRADIENT_RING)
        self.plan.regions = [region if each.purpose == GRADIENT_RING else each for each in self.plan.regions]

    def _take_later(self, region: Region, use: Callable[[list[int]], None]) -> None:
        """More memory for gradients, once training has begun."""
        budget = host_budget(self.policy)
        more = [(region.purpose, region.bytes)]
        home = [(each.purpose, each.bytes) for each in self.plan.regions]
        if refusal := check_fits(home + more, budget, []) or check_fits(more, budget, host_limits()):
            raise refusal
        self.custody.idle()  # updates still read what it may replace
        held = self.home.take_held(region, self.backend)
        try:
            use(held)
        except BaseException:
            self.home.give_back(region.purpose)
            raise

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """`with model.no_sync():` around each backward of a step but its last: gradients stay this rank's own, whole,
        until that one sums them up. The first time it takes memory for all of them. Which backward runs inside counts;
        on all ranks alike."""
        if in_backward():
            raise usage_error("model.no_sync() around a backward", "it inside of one", "enter it before backward()")
        self.recover()
        if not self.custody.holds_unsummed():
            region = Region.of(UNSUMMED, (unit.gradients for unit in self.units))
            self._take_later(region, self.custody.hold_unsummed)
            self.plan.regions = [*self.plan.regions, region]
        self._num_unsynced += 1
        self.custody.set_unsynced(True)
        try:
            yield
        finally:
            self._num_unsynced -= 1
            self.custody.set_unsynced(self._num_unsynced > 0)

    def refuse_between_steps(self, what: str, *, mends: bool = False) -> None:
        """Between a backward that has updated and its step() nothing may look or write. Where that step will never
        come, the home is torn: then only who `mends` it may go on, by a value of its own."""
        if self.updates_in_backward:
            if not in_backward():
                self.custody.recover()  # from a backward that raised
            self.custody.refuse_unclaimed(what)
        if not mends and (torn := self.custody.torn()):
            raise usage_error(
                f"{what} of one step",
                f"weights and optimizer state of different steps: {torn}",
                "load a checkpoint of both: model.load_state_dict and optimizer.load_state_dict",
            )

    def is_loaded(self, part: Any) -> None:
        """A parameter or an optimizer has been loaded; once all have been, a torn home is whole again."""
        torn = self.custody.torn()
        if torn != self._torn:
            self._torn = torn
            self._to_load = (
                {*(slot.index for slot in self.slots if slot.trainable), *self.optimizers} if torn else set()
            )
        self._to_load.discard(part)
        if torn and not self._to_load:
            self.custody.mend()
            self._torn = ""

    def unit_indices(self, module: nn.Module) -> list[int]:
        return sorted({self.slot_of[p].unit for p in module.parameters() if p in self.slot_of})

    # ---- end ----------------------------------------------------------------------------------------------------

    def write_trace(self) -> None:
        if self.trace is not None and self.policy.trace is not None:
            path = os.fspath(self.policy.trace)
            with open(path, "w", encoding="utf-8") as file:
                file.write(self.trace.chrome_json([unit.name for unit in self.units]))

    def shutdown(self) -> None:
        """Ends the engine's threads. A forked child never joins what it does not have."""
        if self.closed or os.getpid() != self.pid:
            return
        self.closed = True
        with contextlib.suppress(Exception):
            self.custody.idle()
        self.write_trace()
        self.custody.close()
        self.custody.clear_callbacks()

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        for handles in self._inner_handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
        self._inner_handles.clear()
        for root in self.partition.roots:
            root.__dict__.pop("no_sync", None)
            for module in root.modules():
                _WRAPPED.pop(module, None)
