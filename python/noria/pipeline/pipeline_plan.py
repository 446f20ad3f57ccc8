"""Plans a pipeline: the bytes that each stage's blocks save for backward, and the loans between stages.

Nothing is computed. The model runs once on tensors without memory, and the plan counts each storage that a block would
save.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import nn

from noria import _C
from noria._errors import usage_error
from noria.model.inner_tensors import tensors_in
from noria.model.partition import Partition
from noria.pipeline.peer_memory import Loan
from noria.pipeline.schedules import Timed, orders, timed
from noria.planning.wrap_plan import LEAST_SAVED

__all__ = ["PipelinePlan", "Saved", "StagePlan", "drawing", "plan_pipeline", "run_without_memory", "saved_by_block"]

Saved = dict[int, int]
"""Bytes of one micro-batch, by storage. A storage that several blocks save has the same key in each."""


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """Plans the bytes that one rank's blocks save for backward.

    A rank has one stage, or several: with n ranks, rank r has the stages r, r + n, and so on.

    Units: bytes. `in_flight` and `saved` are taken when the rank saves most.
    """

    blocks: list[str]
    in_flight: list[int]
    """Micro-batches in flight, by stage of this rank, when the rank saves most."""
    weights: int
    """Weights of all units of this rank, in the dtype in which they are copied."""
    saved_over_time: list[int]
    """Bytes saved, by unit of time. A forward takes one unit of time, a backward two."""
    room: int | None
    """Bytes of the device for saved tensors. None means no limit."""
    borrowed: int
    lent: int

    @property
    def saved(self) -> int:
        return max(self.saved_over_time)

    @property
    def kept(self) -> int:
        """Bytes that the rank keeps on its own device."""
        return self.kept_of(self.saved)

    def kept_of(self, saved: int) -> int:
        return saved if self.room is None else min(saved, self.room)

    @property
    def at_host(self) -> int:
        return max(self.saved - self.kept - self.borrowed, 0)


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """Holds what each rank of a pipeline saves, lends and borrows."""

    schedule: str
    num_micro_batches: int
    virtual_stages: int
    """Stages of each rank."""
    stages: list[StagePlan]
    """By rank."""
    loans: list[Loan]

    @property
    def row_name(self) -> str:
        """Returns the word for one row in texts: "rank" if a rank has several stages."""
        return "stage" if self.virtual_stages == 1 else "rank"


def saved_by_block(parts: Partition, run: Callable[[], object]) -> list[Saved]:
    """Runs one forward by `run`. Returns the bytes that each block saves, in the order of the model."""
    blocks = [spec.module for spec in parts.hooks if spec.is_block]
    weights = {_C.storage_of(each) for root in parts.roots for each in tensors_in(root.parameters())}
    found: dict[int, Saved] = {id(block): {} for block in blocks}
    inside: list[tuple[int, torch.autograd.graph.saved_tensors_hooks]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        is_large = LEAST_SAVED <= size <= 4 * tensor.numel() * tensor.element_size()
        if inside and is_large and storage._cdata not in weights:
            kept[storage._cdata] = storage  # alive, so no other storage gets its address
            found[inside[-1][0]][storage._cdata] = size
        return tensor.detach()  # a node that saves its own output would form a reference cycle

    kept: dict[int, torch.UntypedStorage] = {}

    def enter(module: nn.Module, args: object) -> None:
        saving = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        saving.__enter__()
        inside.append((id(module), saving))

    def leave(module: nn.Module, args: object, output: object) -> None:
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


def run_without_memory(model: nn.Module, dtype: torch.dtype | None, batch: tuple[int, int]) -> Callable[[], object]:
    """Returns a forward for `saved_by_block`: it runs a model on tensors without memory, as the CPU would.

    `batch` is the shape of a micro-batch of token ids: (rows, length). A model that checks if it is traced may behave
    in another way. Some transformers models then make whole attention masks, and the result is larger than in
    training.

    Args:
        model: a model on the meta device.
        dtype: the dtype of floating-point weights, or None to keep theirs.
        batch: (rows, length) of a micro-batch.

    Raises:
        UsageError: when run, if the model does not take token ids of this shape.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def there(value: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=kind, device="cpu").requires_grad_(requires_grad)

    def run() -> object:
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
    """Plans a pipeline of `num_stages` ranks. Stages get the blocks in order, as evenly as possible.

    Args:
        parts: the model's blocks and units.
        saved: bytes that each block saves, by storage.
        weights: bytes of each unit.
        num_stages: number of ranks.
        schedule: one of SCHEDULES.
        num_micro_batches: micro-batches in one step.
        room: bytes of each rank's device for saved tensors, or None for no limit.
        virtual_stages: stages of each rank.

    Raises:
        UsageError: if there are fewer blocks than stages, fewer than 2 ranks, or no room for two blocks.
    """
    blocks = [spec for spec in parts.hooks if spec.is_block]
    num_parts = num_stages * virtual_stages
    if num_stages < 2 or num_parts > len(blocks):
        raise usage_error(
            f"2 ranks or more, with at most {len(blocks)} stages in all, one for each block",
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
        offers.append(("", *_C.need_and_spare(saved_most, largest, room), 0))
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
    """Returns the bytes that these blocks save together. A shared storage counts once."""
    return sum({storage: size for each in saved for storage, size in each.items()}.values())


def _walk(made: list[Timed], saved_by_part: list[int], num_units_of_time: int) -> tuple[list[int], list[int]]:
    """Returns one rank's saved bytes, by unit of time, and its micro-batches in flight at the peak, by stage.

    A forward counts as saved when it begins. A backward releases the saved bytes when it ends.
    """
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
    """Draws two lines for each rank, before and after lending: a bar at the peak, and the memory over time."""
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
    """Returns one digit for each of at most 40 spans of time: its peak in ninths of `most`, rounded up."""
    num = min(_TIME_WIDTH, len(amounts))
    cuts = [len(amounts) * nth // num for nth in range(num + 1)]
    return "".join(f"{-(-9 * max(amounts[a:b]) // max(most, 1))}" for a, b in itertools.pairwise(cuts))
