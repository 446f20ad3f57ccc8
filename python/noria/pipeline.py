"""What the blocks of a pipeline's stages would save for backward, and which stage would lend which memory to which.

Nothing is computed: the model runs once on tensors without memory, and each storage that a block would save is counted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from noria import _C
from noria._errors import usage_error
from noria.custody.activations import LEAST_SAVED
from noria.lending import Loan, need_and_spare
from noria.partition import Partition
from noria.schedules import Timed, orders, timed

__all__ = ["PipelinePlan", "Saved", "StagePlan", "drawing", "plan_pipeline", "run_without_memory", "saved_by_block"]

Saved = dict[int, int]
"""Bytes by storage, of a micro-batch. What several blocks save has one number."""


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """Bytes of one rank's device, at its busiest; of what blocks save for backward. A rank has one stage, or several of
    which each is some way behind the one before it."""

    blocks: list[str]
    in_flight: list[int]
    """Micro-batches, by stage of this rank, when it saves most."""
    weights: int
    """Of all of its units, as they travel."""
    saved_over_time: list[int]
    """By unit of time, of which a forward takes one and a backward two."""
    room: int | None
    """None: no limit."""
    borrowed: int
    lent: int

    @property
    def saved(self) -> int:
        return max(self.saved_over_time)

    @property
    def kept(self) -> int:
        """On its own device."""
        return self.kept_of(self.saved)

    def kept_of(self, saved: int) -> int:
        return saved if self.room is None else min(saved, self.room)

    @property
    def at_host(self) -> int:
        return max(self.saved - self.kept - self.borrowed, 0)


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    schedule: str
    num_micro_batches: int
    virtual_stages: int
    """Of each rank."""
    stages: list[StagePlan]
    """By rank."""
    loans: list[Loan]

    @property
    def row_name(self) -> str:
        """What there is one of for each process."""
        return "stage" if self.virtual_stages == 1 else "rank"


def saved_by_block(parts: Partition, run: Callable[[], Any]) -> list[Saved]:
    """By block, in the order of the model, of one forward by `run`."""
    blocks = [spec.module for spec in parts.hooks if spec.is_block]
    weights = {_C.storage_of(each) for root in parts.roots for each in root.parameters()}
    found: dict[int, Saved] = {id(block): {} for block in blocks}
    inside: list[tuple[int, Any]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        is_large = LEAST_SAVED <= size <= 4 * tensor.numel() * tensor.element_size()
        if inside and is_large and storage._cdata not in weights:
            kept[storage._cdata] = storage  # alive: its address is nobody else's
            found[inside[-1][0]][storage._cdata] = size
        return tensor.detach()  # else what is a node's own output would keep the node, and it that, for good

    kept: dict[int, Any] = {}

    def enter(module: nn.Module, args: Any) -> None:
        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        saving.__enter__()
        inside.append((id(module), saving))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        inside.pop()[1].__exit__(None, None, None)

    handles = [block.register_forward_pre_hook(enter) for block in blocks]
    handles += [block.register_forward_hook(leave, always_call=True) for block in blocks]
    try:
        with torch.enable_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return [found[id(block)] for block in blocks]


def run_without_memory(model: nn.Module, dtype: torch.dtype | None, batch: tuple[int, int]) -> Callable[[], Any]:
    """A forward of a model on the meta device, for `saved_by_block`: as the CPU would do it, on tensors that have no
    memory. `batch`: of a micro-batch, (rows, length), of token ids. A model that looks whether it is traced may do
    something else: some of transformers make their masks whole then, and more is told than will be saved."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def there(value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=kind, device="cpu").requires_grad_(requires_grad)

    def run() -> Any:
        with mode:
            state = {name: there(each, each.requires_grad) for name, each in model.named_parameters()}
            state |= {name: there(each, False) for name, each in model.named_buffers()}
            tokens = torch.zeros(batch, dtype=torch.int64, device="cpu")
            try:
                return torch.func.functional_call(model, state, (tokens,))
            except (TypeError, RuntimeError, ValueError, IndexError) as error:
                raise usage_error(
                    f"a model whose forward takes token ids of shape {batch}",
                    f"{type(error).__name__}: {str(error).splitlines()[0]}",
                    "give a --micro-batch-size and --length that it takes",
                ) from error

    return run


def plan_pipeline(
    parts: Partition,
    saved: list[Saved],
    weights: list[int],
    *,
    num_stages: int,
    schedule: str,
    num_micro_batches: int,
    room: int | None,
    virtual_stages: int = 1,
) -> PipelinePlan:
    """For `num_stages` ranks with `virtual_stages` each; the blocks in order, as many on each stage as evenness allows.
    `saved`: by block; `weights`: bytes by unit; `room`: bytes of each rank's device for what its blocks save."""
    blocks = [spec for spec in parts.hooks if spec.is_block]
    num_parts = num_stages * virtual_stages
    if num_stages < 2 or num_parts > len(blocks):
        raise usage_error(
            f"2 ranks or more, and a block for each of their stages, of which there are {len(blocks)}",
            f"{num_stages} ranks with {num_parts} stages",
            "choose another number of stages",
        )
    cuts = [len(blocks) * part // num_parts for part in range(num_parts + 1)]
    of_part = [range(cuts[part], cuts[part + 1]) for part in range(num_parts)]
    saved_by_part = [_bytes_of([saved[block] for block in own]) for own in of_part]
    of_stage = [[block for part in of_part[rank::num_stages] for block in part] for rank in range(num_stages)]
    made = timed(orders(schedule, num_stages, num_micro_batches, virtual_stages))
    num_units_of_time = max(own[-1].end for own in made)
    walks = [_walk(own, saved_by_part, num_units_of_time) for own in made]
    offers = []
    for own, (over_time, _) in zip(of_stage, walks, strict=True):
        largest, saved_most = max(sum(saved[block].values()) for block in own), max(over_time)
        if room is not None and saved_most > room and 2 * largest > room:
            raise usage_error(
                f"activation_memory for what two blocks save, {2 * largest} bytes", f"{room} bytes", "raise it"
            )
        offers.append(("", *need_and_spare(saved_most, largest, room), 0))
    loans = [Loan(*each) for each in _C.match_memory(offers, [[1.0] * num_stages] * num_stages)]
    of_blocks = {unit for spec in blocks for unit in spec.needs}
    before = [unit for unit in range(min(of_blocks)) if unit not in of_blocks]
    behind = [unit for unit in range(min(of_blocks), len(weights)) if unit not in of_blocks]
    stages = []
    for stage, (own, (over_time, in_flight)) in enumerate(zip(of_stage, walks, strict=True)):
        units = {unit for block in own for unit in blocks[block].needs}
        units.update(before if stage == 0 else (), behind if stage == num_stages - 1 else ())
        stages.append(
            StagePlan(
                [blocks[block].name for block in own],
                in_flight,
                sum(weights[unit] for unit in units),
                over_time,
                room,
                sum(loan.bytes for loan in loans if loan.borrower == stage),
                sum(loan.bytes for loan in loans if loan.lender == stage),
            )
        )
    return PipelinePlan(schedule, num_micro_batches, virtual_stages, stages, loans)


def _bytes_of(saved: list[Saved]) -> int:
    """Together."""
    return sum({storage: size for each in saved for storage, size in each.items()}.values())


def _walk(made: list[Timed], saved_by_part: list[int], num_units_of_time: int) -> tuple[list[int], list[int]]:
    """Of one rank: the bytes that its blocks have saved, by unit of time, and its micro-batches in flight when they are
    most. A forward has saved all that it will when it begins, and a backward lets go of it when it ends."""
    in_flight = dict.fromkeys(sorted({each.action.stage for each in made}), 0)
    over_time = [0] * num_units_of_time
    saved, most, at_most = 0, -1, [0]

    def is_saved(change: int, stage: int, begin: int) -> None:
        nonlocal saved
        in_flight[stage] += change
        saved += change * saved_by_part[stage]
        over_time[begin:] = [saved] * (num_units_of_time - begin)

    for each in made:
        if each.action.is_forward:
            is_saved(1, each.action.stage, each.begin)
        else:
            is_saved(-1, each.action.stage, each.end)
        if saved > most:
            most, at_most = saved, list(in_flight.values())
    return over_time, at_most


_WIDTH, _TIME_WIDTH = 50, 40


def drawing(planned: PipelinePlan) -> list[str]:
    """For each rank's device before and after lending a bar, of when it has most, and what is there over time."""
    most = max([stage.saved for stage in planned.stages] + [stage.room or 0 for stage in planned.stages])

    def bar(*amounts: tuple[str, int]) -> str:
        return "".join(sign * round(_WIDTH * amount / max(most, 1)) for sign, amount in amounts).ljust(_WIDTH)

    lines = ["# what its blocks save, + what others' do, . free; over time, in ninths of the longest bar"]
    for number, stage in enumerate(planned.stages):
        room = stage.saved if stage.room is None else stage.room
        after = [stage.kept_of(saved) + stage.lent for saved in stage.saved_over_time]
        name = f"{planned.row_name} {number}"
        lines.append(
            f"{name}  before |{bar(('#', stage.saved), ('.', max(room - stage.saved, 0)))}| "
            + _over_time(stage.saved_over_time, most)
        )
        left = max(room - stage.kept - stage.lent, 0)
        lines.append(
            f"{' ' * len(name)}  after  |{bar(('#', stage.kept), ('+', stage.lent), ('.', left))}| "
            + _over_time(after, most)
        )
    return lines


def _over_time(amounts: list[int], most: int) -> str:
    """A digit for each stretch of time: the most of it in ninths of `most`, rounded up."""
    num = min(_TIME_WIDTH, len(amounts))
    cuts = [len(amounts) * nth // num for nth in range(num + 1)]
    return "".join(f"{-(-9 * max(amounts[a:b]) // max(most, 1))}" for a, b in itertools.pairwise(cuts))
