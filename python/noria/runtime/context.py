"""Holds what one `wrap` call made: plan, home, engine, backend. Other parts read it and never assign to it.

Only the plan may be replaced. Optimizers may come after the model (`add_to_plan`), the window may get another size, and
other units may stay on the device.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import torch
from torch import nn

from noria import _C
from noria.dist.ranks import Ranks
from noria.host.device_buffers import DeviceBuffers
from noria.host.home import Home
from noria.model.inner_tensors import is_wrapper, tensors_in
from noria.model.layout import HomeParameter, HomeUnit
from noria.model.partition import Partition
from noria.planning.wrap_plan import WrapPlan
from noria.policy import Policy
from noria.runtime.file_state import FileState
from noria.runtime.ledger import Ledger

__all__ = ["Context"]


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """Holds the parts that one `wrap` call made, and what follows from its plan."""

    plan: WrapPlan
    home: Home
    engine: _C.TorchBridge
    backend: _C.Backend
    device_buffers: DeviceBuffers
    pool: _C.HostOptimizer | None
    ranks: Ranks | None
    trace: _C.Trace | None
    ledger: Ledger = dataclasses.field(init=False)
    files: FileState = dataclasses.field(init=False)
    notes: list[str] = dataclasses.field(init=False)
    """For the report: what the plan could not foresee, and what has turned out since."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ledger", Ledger(self.plan))
        object.__setattr__(self, "files", FileState(self.home, self.engine, self.ledger))
        object.__setattr__(self, "notes", list(self.plan.unpredicted))

    def add_to_plan(self, plan: WrapPlan) -> None:
        """Puts a plan in the place of the first one, with the same units: optimizers have come after the model."""
        object.__setattr__(self, "plan", plan)
        self.notes.extend(plan.unpredicted)

    def replace_plan(self, plan: WrapPlan) -> None:
        """Puts a plan in the place of another one, with the same home: other units stay on the device."""
        object.__setattr__(self, "plan", plan)

    def note_window(self, num_bytes: int) -> None:
        """The window has another size from now on."""
        object.__setattr__(self, "plan", dataclasses.replace(self.plan, arena_bytes=num_bytes))

    @functools.cached_property
    def policy(self) -> Policy:
        return self.plan.policy

    @functools.cached_property
    def partition(self) -> Partition:
        return self.plan.partition

    @functools.cached_property
    def units(self) -> list[HomeUnit]:
        return self.plan.units

    @functools.cached_property
    def device(self) -> torch.device:
        return self.plan.device

    @functools.cached_property
    def slots(self) -> list[HomeParameter]:
        return [slot for unit in self.plan.units for slot in unit.parameters]

    @functools.cached_property
    def slot_of(self) -> dict[torch.Tensor, HomeParameter]:
        """The slot of each parameter and of each tensor inside a wrapper. A wrapper itself has the first of these."""
        found = {slot.parameter: slot for slot in self.slots}
        for parameter in self.parameters_now():
            if is_wrapper(parameter):
                found[parameter] = found[next(tensors_in([parameter]))]
        return found

    @functools.cached_property
    def updates_in_backward(self) -> bool:
        return self.plan.policy.update == "backward"

    @functools.cached_property
    def shows_gradients(self) -> bool:
        """True if `p.grad` has values."""
        return self.ranks is None and not self.updates_in_backward

    def lies_apart(self, unit: int) -> bool:
        """Returns True if a file has frozen weights of the unit, and the device cannot read them there."""
        return self.device.type != "cpu" and unit in self.plan.files.weights

    def parameters_now(self) -> set[nn.Parameter]:
        """Returns the models' parameters, also those of modules that were added after the wrap call."""
        return {parameter for root in self.partition.roots for parameter in root.parameters()}

    def unit_indices(self, module: nn.Module) -> list[int]:
        known = self.slot_of
        return sorted({known[each].unit for each in tensors_in(module.parameters()) if each in known})

    def settle_units(self) -> None:
        """Undoes all drafts, and brings all units home: the user may look at the home, or edit it, from now on."""
        at_rest = {unit for unit in self.plan.stays if self.engine.rest.has(unit)}
        for unit in sorted(self.plan.drafted | self.plan.streamed.keys() | at_rest):
            self.engine.home.access_home(unit, False)

    def write_trace(self) -> None:
        if self.trace is not None and self.policy.trace is not None:
            self.backend.stats("fetch")  # adds to the trace what the device has done by now
            path = os.fspath(self.policy.trace)
            with open(path, "w", encoding="utf-8") as file:
                file.write(self.trace.chrome_json([unit.name for unit in self.units]))
