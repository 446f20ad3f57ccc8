"""The orders of forwards and backwards that a plan counts with are those that torch's own schedules make."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import noria
import pytest
import torch
from noria.pipeline.schedules import (
    SCHEDULES,
    SPLIT_BACKWARDS,
    Action,
    name_of_schedule,
    num_virtual_stages,
    orders,
    timed,
)
from torch.distributed import pipelining

THEIRS = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
}


def recording_stage(index: int, num_stages: int, rank: int, num_ranks: int, made: list[Action]) -> Any:
    """As much of a PipelineStage as a schedule asks for: it computes nothing and sends nothing."""
    stage = mock.MagicMock()
    stage.stage_index, stage.num_stages, stage.group_rank, stage.group_size = index, num_stages, rank, num_ranks
    stage.is_first, stage.is_last = index == 0, index == num_stages - 1
    for kind in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        setattr(stage, f"get_{kind}_ops", lambda micro_batch: [])

    def forward(micro_batch: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(Action(True, index, micro_batch))
        return torch.zeros(1)

    def backward(micro_batch: int, *args: Any, **kwargs: Any) -> None:
        made.append(Action(False, index, micro_batch))

    stage.forward_one_chunk, stage.backward_one_chunk = forward, backward
    return stage


def made_by_torch(
    schedule: str, rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int
) -> list[Action]:
    made: list[Action] = []
    num_stages = num_ranks * virtual_stages
    own = range(rank, num_stages, num_ranks)
    stages = [recording_stage(index, num_stages, rank, num_ranks, made) for index in own]
    given = stages if schedule == "interleaved-1f1b" else stages[0]
    play = THEIRS[schedule](given, num_micro_batches, loss_fn=lambda output, target: output)
    play._initialize_stage = play._initialize_stages = lambda *args, **kwargs: None
    each: list[Any] = [()] * num_micro_batches
    play._step_microbatches(each, [{}] * num_micro_batches, each, [])
    return made


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_do_what_the_schedule_of_torch_does_in_its_order(schedule):
    num_compared = num_refused = 0
    for num_ranks in (1, 2, 3, 4, 5):
        for num_micro_batches in (1, 2, 3, 4, 5, 6, 8, 9, 12):
            for virtual_stages in (1, 2, 3) if schedule == "interleaved-1f1b" else (1,):
                shape = (num_ranks, num_micro_batches, virtual_stages)
                try:
                    ours = orders(schedule, *shape)
                except noria.UsageError:
                    with pytest.raises(ValueError, match="icro"):
                        made_by_torch(schedule, 0, *shape)
                    num_refused += 1
                    continue
                for rank, own in enumerate(ours):
                    assert own == made_by_torch(schedule, rank, *shape), (rank, shape)
                    num_compared += 1
    assert num_compared > 90
    assert (num_refused > 0) == (schedule != "gpipe")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_made_before_what_it_needs_and_ranks_do_one_thing_at_a_time(schedule):
    virtual_stages = num_virtual_stages(schedule, None)
    order = orders(schedule, 3, 6, virtual_stages)
    found = timed(order)
    assert [[each.action for each in own] for own in found] == order
    ends = {each.action: each.end for own in found for each in own}
    last = 3 * virtual_stages - 1
    for own in found:
        for before, after in itertools.pairwise(own):
            assert before.begin < before.end <= after.begin
        for (is_forward, stage, micro_batch), begin, end in own:
            assert end - begin == (1 if is_forward else 2)
            if is_forward and stage > 0:
                assert begin >= ends[Action(True, stage - 1, micro_batch)]
            if not is_forward and stage < last:
                assert begin >= ends[Action(False, stage + 1, micro_batch)]
    # No schedule is slower than pipelines are: 1F1B's bubble is that of GPipe, and interleaving makes it smaller.
    assert max(ends.values()) <= 3 * 6 * virtual_stages + 3 * 2


def test_names_are_torchs_own_or_plain():
    assert [name_of_schedule(name) for name in ("GPipe", "1F1B", "Interleaved1F1B")] == [*SCHEDULES]
    assert name_of_schedule("interleaved-1f1b") == "interleaved-1f1b"


@pytest.mark.parametrize("name", [*SPLIT_BACKWARDS, "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_schedules_whose_backwards_are_split_are_refused_with_the_reason(name):
    told = f"gpipe, 1f1b, interleaved-1f1b, but found '{name}', whose backwards of inputs and of weights are apart"
    with pytest.raises(noria.UsageError, match=told):
        name_of_schedule(name)


def test_unknown_schedules_and_stages_that_no_schedule_has_are_refused():
    with pytest.raises(noria.UsageError, match=r"found '2f2b'\. Remedy"):
        name_of_schedule("2f2b")
    with pytest.raises(noria.UsageError, match="one stage of each rank under gpipe, but found 2"):
        num_virtual_stages("gpipe", 2)
    with pytest.raises(noria.UsageError, match="1 or more stages of each rank, but found 0"):
        num_virtual_stages("interleaved-1f1b", 0)
    with pytest.raises(noria.UsageError, match="4 micro-batches or more under 1f1b, as many as stages, but found 3"):
        orders("1f1b", 4, 3)
    with pytest.raises(noria.UsageError, match=r"2 rounds of 2 ranks or more .*, but found 5\. Remedy: choose 4"):
        orders("interleaved-1f1b", 2, 5, 2)
