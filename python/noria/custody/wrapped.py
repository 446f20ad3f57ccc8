"""One `wrap` call: what its parts share, and when nothing may look or write."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from torch import nn

from noria import _C
from noria._errors import usage_error
from noria._lists import as_list
from noria.custody.activations import Activations
from noria.custody.copies import PeerCopies
from noria.custody.drafts import DraftJudge
from noria.custody.following import Following
from noria.custody.gradients import LaterGradients
from noria.custody.hooks import NoSync, in_backward
from noria.custody.later import LaterMemory
from noria.custody.loaded import Loaded
from noria.custody.passes import Passes
from noria.custody.state_dicts import StateDicts
from noria.custody.together import Together
from noria.custody.values import Values
from noria.home import Home, HomeParameter
from noria.lending import Lending
from noria.stages import module_of

if TYPE_CHECKING:
    from noria.beside import Beside
    from noria.lending import Stages
    from noria.plan import WrapPlan
    from noria.ranks import Ranks
    from noria.updates import Updates

__all__ = ["Wrapped", "wrapped_by", "wrapped_together"]

Given = ParamSpec("Given")

# By module, of every module of a wrapped model. Weak on both sides: a wrap call lives as long as its models.
_WRAPPED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Wrapped]] = weakref.WeakKeyDictionary()


def wrapped_by(module: Any) -> Wrapped | None:
    """The wrap call that a model, a stage, or a module inside of one, belongs to."""
    module = module_of(module)
    found = _WRAPPED.get(module) if isinstance(module, nn.Module) else None
    return found() if found is not None else None


def wrapped_together(given: Any) -> Wrapped:
    """The one wrap call of all that is given: a model, a stage, a module inside of one, or a list of such."""
    owners = {}
    for each in as_list(given) or [given]:
        owner = wrapped_by(each)
        if owner is None:
            kind = type(each).__qualname__
            raise usage_error("a wrapped model, or a module inside of one", kind, "noria.wrap it first")
        owners[id(owner)] = owner
    if len(owners) > 1:
        raise usage_error("models of one noria.wrap call", f"of {len(owners)}", "give those of one call at a time")
    [wrapped] = owners.values()
    return wrapped


class Wrapped:
    """Owns the home, the engine's Custody and the module hooks; knows every parameter by its object."""

    def __init__(
        self,
        plan: WrapPlan,
        home: Home,
        custody: _C.Custody,
        backend: _C.Backend,
        beside: Beside,
        pool: _C.HostOptimizer | None,
        ranks: Ranks | None = None,
        stages: Stages | None = None,
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
        self.beside = beside
        self.pool = pool
        self.slots: list[HomeParameter] = [slot for unit in plan.units for slot in unit.parameters]
        self.slot_of: dict[nn.Parameter, HomeParameter] = {slot.parameter: slot for slot in self.slots}
        self.optimizers: list[Updates] = []
        self.updates_in_backward = plan.policy.update == "backward"
        self.ranks = ranks
        self.shows_gradients = ranks is None and not self.updates_in_backward
        self.trace: _C.Trace | None = None
        self.pid = os.getpid()
        self.closed = False
        self.has_begun_step = False
        self.together = Together(self)
        self.later = LaterMemory(self)
        self.values = Values(self)
        self.gradients = LaterGradients(self)
        self.drafts = DraftJudge(self)
        self.loaded = Loaded(self)
        self.activations = Activations(self)
        self.lending = Lending(self, stages)
        self.following = Following(self)
        self.copies = PeerCopies(self)
        self.passes = Passes(self)  # after it: what a block saves is known when its visit ends
        self.state_dicts = StateDicts(self)
        for root in self.partition.roots:
            if ranks is not None or not hasattr(root, "no_sync"):  # a loop need not know whether ranks share
                root.__dict__["no_sync"] = NoSync(self)
            for module in root.modules():
                _WRAPPED[module] = weakref.ref(self)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit what this needs may be gone; atexit came before
            self.shutdown()

    def unit_indices(self, module: nn.Module) -> list[int]:
        return sorted({self.slot_of[p].unit for p in module.parameters() if p in self.slot_of})

    # ---- when nothing may look or write ----

    def check_alive(self) -> None:
        if os.getpid() != self.pid:
            raise usage_error(
                "a wrapped model used in the process that wrapped it",
                f"it in process {os.getpid()}, forked from {self.pid}",
                "wrap inside the child, or let data loader workers leave the model alone",
            )
        if self.closed:
            raise usage_error("a model that is wrapped", "one whose engine was shut down", "wrap it again")

    def refuse_when_busy(self, call: str) -> None:
        if self.passes.in_forward() or in_backward() or self.values.is_materialized:
            raise usage_error(
                f"{call} between passes",
                "it inside of a forward, a backward or `with noria.materialize(...)`",
                "call it after backward(), outside of the block",
            )

    def refuse_between_steps(self, what: str, *, mends: bool = False) -> None:
        """Between a backward that has updated and its step() nothing may look or write. Where that step will never
        come, the home is torn: then only who `mends` it may go on, by a value of its own."""
        if self.updates_in_backward:
            if not in_backward():
                self.custody.recover()  # from a backward that raised
            self.custody.refuse_unclaimed(what)
        if not mends:
            self.loaded.refuse_missing(what)
        if not mends and (torn := self.custody.torn()):
            raise usage_error(
                f"{what} of one step",
                f"weights and optimizer state of different steps: {torn}",
                "load a checkpoint of both: model.load_state_dict and optimizer.load_state_dict",
            )

    def recover(self) -> None:
        """After a pass that raised: what it had begun is forgotten, gradients that had landed stay."""
        self.check_alive()
        if in_backward():
            return  # it is alive
        self.passes.forget_dead_forward()
        self.custody.recover()
        self.settle_writes()

    def settle_writes(self) -> None:
        """Before the home is used: what has been written to it is known, and what a broken load left open closed."""
        self.state_dicts.end_loads()
        self.values.settle_writes()

    def begin_step(self) -> None:
        """By each optimizer; the first one after a forward that may train begins a step."""
        self.following.begin_step()
        self.lending.begin_step()
        if not self.has_begun_step:
            self.has_begun_step = True
            self.copies.begin_step()
            self.activations.begin_step()

    # ---- what others call back ----

    def run_update(self, unit: int) -> None:
        """What the engine calls when somebody needs a unit whose update was deferred to the launching thread."""
        for updates in self.optimizers:
            updates.run(unit)

    def drops_draft(self, unit: int) -> Callable[[], None]:
        """For tensors that view the unit's state: their first write is an edit that no draft has seen."""
        return self.while_open(lambda wrapped: wrapped.custody.access_home(unit, False))

    def weakly(self, act: Callable[Concatenate[Wrapped, Given], None]) -> Callable[Given, None]:
        """`act` on this object, for whoever must not keep it alive. Once it is gone nothing happens."""
        reference = weakref.ref(self)

        def call(*args: Given.args, **kwargs: Given.kwargs) -> None:
            wrapped = reference()
            if wrapped is not None:
                act(wrapped, *args, **kwargs)

        return call

    def while_open(self, act: Callable[[Wrapped], None]) -> Callable[[], None]:
        """For callbacks of tensors that outlive this object, its engine or its process."""

        def call(wrapped: Wrapped) -> None:
            if not wrapped.closed and os.getpid() == wrapped.pid:
                act(wrapped)

        return self.weakly(call)

    # ---- end ----

    def write_trace(self) -> None:
        if self.trace is not None and self.policy.trace is not None:
            self.backend.stats("fetch")  # looks up what the device has done by now, and adds it to the trace
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
        with contextlib.ExitStack() as ends:  # each comes, whatever another one raises; the last one first
            if self.ranks is not None:
                ends.callback(self.ranks.close)
            ends.callback(self.beside.close)
            ends.callback(self.lending.close)
            ends.callback(self.custody.clear_callbacks)
            ends.callback(self.custody.close)
            ends.callback(self.write_trace)

    def remove_hooks(self) -> None:
        self.following.remove()
        self.passes.remove()
        self.activations.remove()
        self.state_dicts.remove()
        for root in self.partition.roots:
            if isinstance(root.__dict__.get("no_sync"), NoSync):
                del root.__dict__["no_sync"]
            for module in root.modules():
                _WRAPPED.pop(module, None)
