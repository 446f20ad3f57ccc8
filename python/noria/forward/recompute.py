"""Makes blocks compute their activations again in backward: all blocks, or those for which it is cheaper than swapping.

activations="auto" measures before it chooses. The first step shows which activations have no room, and how much other
stages lend. The third step is measured, or a later one if units at other stages are tried first. The host's clock says
how long blocks compute. On a CUDA device it does not know, so there the choice waits for costs that the device's clock
has measured. If the other stages lack room for all, the choice also says which activations go there and which go to the
host (csrc/plan/swap.h).

Outside of pipelines the planner chooses anew when costs are known (planning/activation_choice.py). In pipelines other
stages add waits that the measurement cannot show, so noria then tries. If a step waits longer for
copies than it takes to compute one more block again, one more block computes again. If that has not paid, it is undone,
and the trials end.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from noria import _C
from noria.forward.operator_watch import tensors_of
from noria.pipeline.peer_cache import PeerCache, stalled_us
from noria.planning.measured_costs import MeasuredCosts
from noria.runtime.context import Context

__all__ = ["Recomputation", "Recomputed", "is_checkpointed"]

_LOOKED_AT = 3  # the number of the step that is measured
_UNKNOWN_US = 1e6  # for each byte, of a link that no copy has used: too slow to be tried
_ALIKE = 1.1  # times whose ratio is smaller count as equal


def is_checkpointed() -> bool:
    """Returns True if a checkpoint of torch handles the tensors that are saved now.

    It counts these tensors. When it computes again, at any later time, it must save the same ones.
    """
    if torch.compiler.is_compiling():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__module__


class Recomputed:
    """Replaces the `forward` of a block: it saves the inputs only. A copy of the block gets its own forward.

    `by_choice`: noria has chosen the block. It must not write buffers then, as BatchNorm does: a forward that is
    computed again would write them twice. So the first forward in each mode, training or not, runs as it is and shows
    whether it does.
    """

    def __init__(self, module: nn.Module, *, by_choice: bool) -> None:
        self.own: Callable[..., object] | None = module.__dict__.get("forward")
        self.encloses_call = False
        """The block or its forward was compiled: `enclose` stands around that call. So its graph, and its bits, are
        those of a block that keeps its activations."""
        self.is_off = False
        """It only calls the forward: the user has put another forward around it."""
        self._module = module
        self._forward = module.forward
        self._writers = [each for each in module.modules() if by_choice and each._buffers]
        self._is_pure: dict[tuple[bool, ...], bool] = {}  # by the modes of these modules

    def __call__(self, *args: object, **kwargs: Any) -> object:
        if self.encloses_call:
            return self._forward(*args, **kwargs)
        return self.enclose(self._forward, *args, **kwargs)

    def enclose(self, call: Callable[..., object], *args: object, **kwargs: Any) -> object:
        if self.is_off or not torch.is_grad_enabled() or is_checkpointed():
            return call(*args, **kwargs)
        modes = tuple(each.training for each in self._writers)
        if self._writers and not self._is_pure.get(modes, False) and not torch.compiler.is_compiling():
            before = _Buffers(self._module)
            output = call(*args, **kwargs)
            self._is_pure[modes] = self._is_pure.get(modes, True) and before.are_unwritten()
            return output
        return checkpoint(call, *args, use_reentrant=False, **kwargs)

    def writes(self) -> bool:
        """Returns True if the block has written buffers, in some mode."""
        return not all(self._is_pure.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., object] | None:
        copied = memo.get(id(self._module))
        if copied is None or self.own is not None:
            return copy.deepcopy(self.own, memo)
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[object, ...]:
        return (getattr, (self._module, "forward"))


class _Buffers:
    """Holds a module's buffers as they are before a forward. Not all writes raise a version: those of batch_norm."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers()]

    def are_unwritten(self) -> bool:
        now = list(self._module.buffers())
        return len(now) == len(self._before) and all(
            buffer is before and buffer._version == version and torch.equal(buffer, value)
            for buffer, (before, version, value) in zip(now, self._before, strict=True)
        )


@dataclasses.dataclass
class _Block:
    """Describes a block that may be computed again, and what that costs and saves in a step."""

    hook: int
    module: nn.Module
    forward: Recomputed | None = None
    """What replaces the module's own forward, while it is computed again."""
    input_bytes: int = 0
    buffers: _Buffers | None = None
    """Its buffers before the forward that is under way."""
    is_pure: bool = True
    """False once a forward has written a buffer, as BatchNorm does: computing it again would write it again."""
    price_us: float = 0.0
    """Time in a step to compute it again."""
    saving: int = 0
    """Bytes in a step that are then not swapped."""


@dataclasses.dataclass(frozen=True)
class _Compute:
    """Holds times in microseconds, without stalls: of a step, and by hook of one forward, and from its end to its
    backward."""

    forward_us: float
    backward_us: float
    by_hook: dict[int, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Holds counters as they are when a step begins."""

    saved: dict[str, int]
    by_hook: dict[int, tuple[int, int, int, int]]  # visits, most bytes of one, forward us, us to its backward
    lanes: dict[str, tuple[int, int]]  # busy us, bytes
    forward_us: int
    backward_us: int
    stalled_us: int  # how long compute has waited for offloads and reloads


class Recomputation:
    """Chooses blocks and replaces their `forward`."""

    def __init__(
        self,
        context: Context,
        peer_cache: PeerCache,
        costs: Callable[[], MeasuredCosts | None],
        chosen: frozenset[int] | None,
    ) -> None:
        """`chosen`: units of the blocks that compute again. None: measure first. `costs` returns what this run has
        measured."""
        self.context = context
        self.peer_cache = peer_cache
        self._costs = costs
        self._is_cpu = context.device.type == "cpu"
        self._blocks = {
            id(spec.module): _Block(hook, spec.module)
            for hook, spec in enumerate(self.context.partition.hooks)
            if spec.is_block
        }
        self._is_looking = chosen is None
        self._by_choice = context.policy.activations == "auto"
        self._tries = not context.plan.chooses_activations  # else the planner will choose, when costs are known
        self._num_steps = 0
        self._before: _Seen | None = None
        self._offered: list[_Block] | None = None  # after the choice: the blocks that it was made from
        self._tried: tuple[_Block, int] | None = None  # the block, and the wait in us before it was tried
        self._recomputed: list[_Block] = []
        if chosen is not None:
            self.take(chosen)

    def units(self) -> frozenset[int]:
        """Returns the units of the blocks that compute again: of each block the last one."""
        return frozenset(self._unit_of(block) for block in self._recomputed if not _writes(block))

    def writers(self) -> frozenset[int]:
        """Returns the units of blocks that were to compute again, but write buffers."""
        return frozenset(self._unit_of(block) for block in self._recomputed if _writes(block))

    def inputs(self) -> dict[int, int]:
        """Returns the bytes of inputs, by unit, of blocks that may run twice. They were seen while looking."""
        return {
            self._unit_of(block): block.input_bytes
            for block in self._blocks.values()
            if block.is_pure and block.input_bytes
        }

    def take(self, units: frozenset[int]) -> None:
        """Computes these blocks again from now on, and no others. Nothing else is looked at or tried any more."""
        self._is_looking = False
        for block in self._blocks.values():
            is_wanted = self._unit_of(block) in units
            if is_wanted and block not in self._recomputed:
                self._recompute([block])
            elif not is_wanted and block in self._recomputed:
                self._keep(block)

    def _unit_of(self, block: _Block) -> int:
        return self.context.partition.hooks[block.hook].needs[-1]

    def names(self) -> list[str]:
        """Returns the names of the blocks that compute again."""
        return [self.context.partition.hooks[block.hook].name for block in self._recomputed if not _writes(block)]

    def _recompute(self, blocks: Iterable[_Block]) -> None:
        for block in blocks:
            block.forward = block.module.__dict__["forward"] = Recomputed(block.module, by_choice=self._by_choice)
            self._recomputed.append(block)

    def _keep(self, block: _Block) -> None:
        self._recomputed.remove(block)
        if block.module.__dict__.get("forward") is not block.forward:  # the user has put another one around it
            assert block.forward is not None
            block.forward.is_off = True
            return
        forward = block.module.__dict__.pop("forward")
        if forward.own is not None:
            block.module.__dict__["forward"] = forward.own

    def follow(self, module: nn.Module, now: nn.Module) -> None:
        """Notes that a block is called by another module from now on."""
        block = self._blocks.pop(id(module), None)
        if block is None:
            return
        self._blocks[id(now)] = block
        is_recomputed = block in self._recomputed
        if is_recomputed:
            self._keep(block)
        block.module = now
        if is_recomputed:
            self._recompute([block])

    def follow_compiled_forwards(self) -> None:
        """Computes blocks again around a forward that was compiled with what had replaced it inside."""
        for block in self._recomputed:
            if hasattr(block.module.forward, "_torchdynamo_orig_callable"):
                assert block.forward is not None
                block.forward.encloses_call = True
                block.forward = block.module.__dict__["forward"] = Recomputed(block.module, by_choice=self._by_choice)

    # ---- measuring ----

    def enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Runs before a forward of a block after which a backward may come."""
        if self._is_looking:
            block = self._blocks[id(module)]
            block.input_bytes = max(block.input_bytes, sum(each.nbytes for each in tensors_of((args, kwargs))))
            block.buffers = _Buffers(module)

    def leave(self, module: nn.Module) -> None:
        if self._is_looking:
            block = self._blocks[id(module)]
            block.is_pure &= block.buffers is None or block.buffers.are_unwritten()
            block.buffers = None

    def begin_step(self) -> None:
        if not self._is_looking:
            return
        self._num_steps += 1
        if self._num_steps < _LOOKED_AT - 1 or not self.peer_cache.is_settled:
            return
        if not self._is_cpu and self._costs() is None:
            return
        if self._before is None:
            self._before = self._see()
            return
        now = self._see()
        if now.saved["saved"]:
            return  # something is saved: its backward is still to come
        before, self._before = self._before, now
        if self._offered is None:
            self._choose(before, now)
        else:
            self._look_again(now.stalled_us - before.stalled_us)

    def _see(self) -> _Seen:
        engine, stats = self.context.engine, self.context.backend.stats
        lanes = {lane: (stats(lane)["busy_us"], stats(lane)["bytes"]) for lane in ("drain", "fetch", "peer")}
        sums = engine.statistics.step_sums()
        compute = (sums["forward_us"], sums["backward_us"])
        stalled = stalled_us(self.context.backend, "offload", "reload")
        return _Seen(engine.saved.saved_stats(), engine.saved.saved_by_module(), lanes, *compute, stalled)

    def _choose(self, before: _Seen, now: _Seen) -> None:
        def more(name: str) -> int:
            return now.saved[name] - before.saved[name]

        def busy(lane: str) -> tuple[int, int]:
            (us, moved), (us_before, moved_before) = now.lanes[lane], before.lanes[lane]
            return us - us_before, moved - moved_before

        self._offered = []
        if not more("offloaded") or not more("reloaded"):
            self._is_looking = False
            return
        compute = self._compute(before, now)
        compute_us = compute.forward_us + compute.backward_us
        to_peers, from_peers = more("offloaded_to_peers"), more("reloaded_from_peers")
        speeds, free = [], []
        out, back = more("offloaded") - to_peers, more("reloaded") - from_peers
        for lane, own, behind_us in (("drain", out, compute.forward_us), ("fetch", back, compute.backward_us)):
            busy_us, moved = busy(lane)
            speeds.append(busy_us / moved if moved else _UNKNOWN_US)
            free.append(max(min(behind_us, compute_us - speeds[-1] * (moved - own)), 0.0) if moved else 0.0)
        peer_us, peer_moved = busy("peer")
        peer_us_per_byte = peer_us / max(peer_moved, 1)
        of_units = peer_moved - to_peers - from_peers
        peers = (to_peers, peer_us_per_byte, max(compute_us - peer_us_per_byte * of_units, 0.0))
        described = []
        for block in self._blocks.values():
            num_visits, size, *_ = now.by_hook.get(block.hook, (0, 0, 0, 0))
            num_visits -= before.by_hook.get(block.hook, (0,))[0]
            forward_us, gap_us = compute.by_hook.get(block.hook, (0, 0))
            if num_visits:
                self._offered.append(block)
                kept = block.input_bytes if block.is_pure else size  # size: nothing would be saved
                block.price_us, block.saving = num_visits * forward_us, num_visits * (size - kept)
                described.append((size, kept, num_visits, forward_us, gap_us))
        host = (speeds[0], speeds[1], free[0], free[1])
        ways = _C.choose_ways(described, more("offloaded"), host, peers)
        chosen = list(zip(self._offered, ways, strict=True))
        self._is_looking = self._tries
        self._recompute(block for block, way in chosen if way == "recompute")
        if to_peers:
            self.context.engine.saved.send_saved_home({block.hook for block, way in chosen if way == "host"})

    def _compute(self, before: _Seen, now: _Seen) -> _Compute:
        """Returns what the clock says that knows: the host's, or the device's."""
        if self._is_cpu:
            by_host = {hook: (float(forward), float(gap)) for hook, (_, _, forward, gap) in now.by_hook.items()}
            return _Compute(now.forward_us - before.forward_us, now.backward_us - before.backward_us, by_host)
        costs = self._costs()
        assert costs is not None
        found: dict[int, tuple[float, float]] = {}
        gap_us = 0.0
        for block in sorted(self._blocks.values(), key=lambda each: -each.hook):  # the last one's backward comes first
            units = self.context.unit_indices(block.module)
            forward_us = sum(costs.forward_us[unit] for unit in units)
            found[block.hook] = (forward_us, gap_us)
            gap_us += forward_us + sum(costs.backward_us[unit] for unit in units)
        return _Compute(costs.backwards * sum(costs.forward_us), costs.backwards * sum(costs.backward_us), found)

    def _look_again(self, stalled_us: int) -> None:
        """Tries one more block, or ends the trials. `stalled_us`: waits for copies in the last step."""
        if self._tried is not None:
            block, without_us = self._tried
            if without_us - stalled_us < block.price_us:
                self._keep(block)
                self._is_looking = False
                return
        others = [block for block in self._offered or () if block not in self._recomputed and block.saving > 0]
        cheapest = min((block.price_us / block.saving for block in others), default=0.0)
        first = next((block for block in others if block.price_us / block.saving <= _ALIKE * cheapest), None)
        if first is None or stalled_us <= first.price_us:
            self._is_looking = False
            return
        self._tried = (first, stalled_us)
        self._recompute([first])

    def remove(self) -> None:
        for block in list(self._recomputed):
            self._keep(block)


def _writes(block: _Block) -> bool:
    return block.forward is not None and block.forward.writes()
