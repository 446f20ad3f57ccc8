"""What the blocks of a pipeline's stages would save for backward, and which stage would lend which memory to which.

Nothing is computed: the model runs once on tensors without memory, and each storage that a block would save is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from noria import _C
from noria._errors import usage_error
from noria.custody.activations import LEAST_SAVED
from noria.lending import Loan, need_and_spare
from noria.partition import Partition

__all__ = ["SCHEDULES", "PipelinePlan", "StagePlan", "drawing", "plan_pipeline", "run_without_memory", "saved_by_block"]

# How many micro-batches a rank has in flight, at most: of (rank, ranks, micro-batches).
SCHEDULES: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda rank, size, num: num,
    "1f1b": lambda rank, size, num: min(num, size - rank),
}


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """Bytes of one stage's device, at its busiest; of what blocks save for backward."""

    blocks: list[str]
    in_flight: int
    """Micro-batches."""
    weights: int
    """Of all of its units, as they travel."""
    saved: int
    room: int | None
    """None: no limit."""
    borrowed: int
    lent: int

    @property
    def kept(self) -> int:
        """On its own device."""
        return self.saved if self.room is None else min(self.saved, self.room)

    @property
    def at_host(self) -> int:
        return max(self.saved - self.kept - self.borrowed, 0)


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    schedule: str
    num_micro_batches: int
    stages: list[StagePlan]
    loans: list[Loan]


def saved_by_block(parts: Partition, run: Callable[[], Any]) -> list[int]:
    """Bytes by block, in the order of the model, of one forward by `run`; a storage that several blocks save counts
    for the first."""
    blocks = [spec.module for spec in parts.hooks if spec.is_block]
    weights = {each.untyped_storage()._cdata for root in parts.roots for each in root.parameters()}
    bytes_of = dict.fromkeys(map(id, blocks), 0)
    inside: list[tuple[int, Any]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        is_large = LEAST_SAVED <= size <= 4 * tensor.numel() * tensor.element_size()
        if inside and is_large and storage._cdata not in weights and storage._cdata not in kept:
            kept[storage._cdata] = storage  # alive: its address is nobody else's
            bytes_of[inside[-1][0]] += size
        return tensor

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
    return [bytes_of[id(block)] for block in blocks]


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
    saved: list[int],
    weights: list[int],
    *,
    num_stages: int,
    schedule: str,
    num_micro_batches: int,
    room: int | None,
) -> PipelinePlan:
    """The blocks in order, as many on each stage as evenness allows. `saved`: bytes by block, of a micro-batch;
    `weights`: bytes by unit; `room`: bytes of each stage's device for what its blocks save."""
    blocks = [spec for spec in parts.hooks if spec.is_block]
    if not 1 < num_stages <= len(blocks):
        raise usage_error(
            f"stages, 2 to {len(blocks)}: the model's blocks", f"{num_stages}", "choose another number of stages"
        )
    cuts = [len(blocks) * stage // num_stages for stage in range(num_stages + 1)]
    of_stage = [list(range(cuts[stage], cuts[stage + 1])) for stage in range(num_stages)]
    in_flight = [SCHEDULES[schedule](stage, num_stages, num_micro_batches) for stage in range(num_stages)]
    most = [count * sum(saved[block] for block in own) for count, own in zip(in_flight, of_stage, strict=True)]
    offers = []
    for own, saved_most in zip(of_stage, most, strict=True):
        largest = max(saved[block] for block in own)
        if room is not None and saved_most > room and 2 * largest > room:
            raise usage_error(
                f"activation_memory for what two blocks save, {2 * largest} bytes", f"{room} bytes", "raise it"
            )
        offers.append(("", *need_and_spare(saved_most, largest, room)))
    loans = [Loan(*each) for each in _C.match_memory(offers, [[1.0] * num_stages] * num_stages)]
    of_blocks = {unit for spec in blocks for unit in spec.needs}
    before = [unit for unit in range(min(of_blocks)) if unit not in of_blocks]
    behind = [unit for unit in range(min(of_blocks), len(weights)) if unit not in of_blocks]
    stages = []
    for stage, own in enumerate(of_stage):
        units = {unit for block in own for unit in blocks[block].needs}
        units.update(before if stage == 0 else (), behind if stage == num_stages - 1 else ())
        stages.append(
            StagePlan(
                [blocks[block].name for block in own],
                in_flight[stage],
                sum(weights[unit] for unit in units),
                most[stage],
                room,
                sum(loan.bytes for loan in loans if loan.borrower == stage),
                sum(loan.bytes for loan in loans if loan.lender == stage),
            )
        )
    return PipelinePlan(schedule, num_micro_batches, stages, loans)


_WIDTH = 60


def drawing(planned: PipelinePlan) -> list[str]:
    """A bar for each stage's device before and after lending."""
    most = max([stage.saved for stage in planned.stages] + [stage.room or 0 for stage in planned.stages])

    def bar(*amounts: tuple[str, int]) -> str:
        return "".join(sign * round(_WIDTH * amount / max(most, 1)) for sign, amount in amounts).ljust(_WIDTH)

    lines = ["# what its blocks save, + what others' do, . free"]
    for number, stage in enumerate(planned.stages):
        room = stage.saved if stage.room is None else stage.room
        lines.append(f"stage {number}  before |{bar(('#', stage.saved), ('.', max(room - stage.saved, 0)))}|")
        left = max(room - stage.kept - stage.lent, 0)
        lines.append(f"         after  |{bar(('#', stage.kept), ('+', stage.lent), ('.', left))}|")
    return lines
