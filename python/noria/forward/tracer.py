"""Lets torch.profiler.profile(with_stack=True) read the addresses of weights without an error.

torch's tracer writes down the addresses of a module's weights when the module is called first, before any hook runs
(torch/csrc/autograd/profiler_python.cpp). That raises if they are evicted. So before the first forward of a recording
each module is called while its weights show the home. The call runs no code of the module's.

A root's own weights are written down before noria's hook on the root runs. Under reads="home" they show the home then.
"""

from __future__ import annotations

import sys

from torch import nn

from noria.runtime.context import Context
from noria.torch_state import plainly

__all__ = ["Tracer"]


class Tracer:
    """Shows modules to torch's tracer once for each recording, and for each thread that it records."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._met: list[object] = []  # by which the tracer is known on a thread

    def meet_modules(self) -> None:
        """Called between passes, before a forward. The first time it waits for all updates."""
        tracer = sys.getprofile()
        if tracer is None:  # no profiler with stacks runs
            self._met.clear()
            return
        context, home = self._context, self._context.engine.home
        is_known = any(tracer is each for each in self._met)
        is_reachable = "working copies" not in context.home.staged and not context.home.file_plan.weights
        if is_known or type(tracer).__name__ != "TraceContext" or not is_reachable:
            return
        self._met.append(tracer)
        units = range(len(context.units))
        # Ranks have parts of weights. Only an address is wanted here, so that of this rank's part will do.
        parts = [context.home.address("working copies", unit) for unit in units] if context.ranks is not None else []
        num_open = home.num_open()
        try:
            with plainly():
                home.open_home(list(units), False, parts)
            for root in context.partition.roots:
                for module in root.modules():
                    _call_without_code(module)
        finally:
            home.close_home(num_open, False)


def _call_without_code(module: nn.Module) -> None:
    own = vars(module)
    before = own.get("_compiled_call_impl")
    own["_compiled_call_impl"] = _nothing
    try:
        nn.Module.__call__(module)  # by this code the tracer knows calls; some classes have others
    finally:
        del own["_compiled_call_impl"]
        if before is not None:
            own["_compiled_call_impl"] = before


def _nothing() -> None:
    """Takes the place of what `nn.Module.__call__` calls."""
