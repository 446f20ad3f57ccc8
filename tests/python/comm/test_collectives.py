"""Collectives of torch's process groups: torch's own bits, agreement, and errors in place of waiting."""

from __future__ import annotations

import os
import time

import noria
import pytest
import torch
import torch.distributed as dist
from noria import _C
from noria.dist.groups import Group

from tests.ranks import on_ranks

COUNT = 1000
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before torch 2.13
TYPES = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}


def new_lane(assists: bool = False) -> _C.CollectLane:
    ranks = range(dist.get_world_size())
    shards, numbers = Group(ranks), Group(ranks)
    collectives = _C.make_c10d_collectives(shards.name, "", numbers.name, ranks, "cpu")
    return _C.CollectLane(_C.make_host_backend(1 << 20), collectives, ["head", "tail"], assists)


def values_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size * COUNT, generator=torch.Generator().manual_seed(rank)).to(dtype)


def gather_and_reduce(rank: int, size: int, assists: bool) -> None:
    lane = new_lane(assists)
    op = 0
    for name, dtype in TYPES.items():
        shard = COUNT * dtype.itemsize
        own = slice(rank * COUNT, (rank + 1) * COUNT)

        gathered = torch.zeros(size * COUNT, dtype=dtype)
        gathered[own] = values_of(rank, size, dtype)[own]
        lane.gather(op, 0, gathered.data_ptr(), shard).wait_passed()
        for other in range(size):
            its = slice(other * COUNT, (other + 1) * COUNT)
            assert torch.equal(gathered[its], values_of(other, size, dtype)[its])

        onto = values_of(rank, size, dtype)[:COUNT]
        for wide in (False, True):
            summed = values_of(rank, size, dtype)
            scratch, part = torch.empty(size * COUNT), torch.empty(COUNT, dtype=dtype)
            op += 1
            address = scratch.data_ptr() if wide else 0
            memory = (address, onto.data_ptr(), part.data_ptr())
            lane.reduce(op, 1, summed.data_ptr(), shard, name, *memory).wait_passed()
            twin = values_of(rank, size, dtype)
            twin = (twin.float() if wide else twin).mul_(1 / size)
            torchs_own = torch.empty(COUNT, dtype=twin.dtype)
            REDUCE_SCATTER(torchs_own, twin.clone())
            assert torch.equal(summed[own], torchs_own.to(dtype) + onto)
            dist.all_reduce(twin)  # as DistributedDataParallel sums
            if size == 2:  # of two terms there is one order
                assert torch.equal(torchs_own, twin[own])
        op += 1
    assert lane.exchange([rank, 7]) == [number for other in range(size) for number in (other, 7)]


@pytest.mark.parametrize(("size", "assists"), [(1, False), (2, False), (3, False), (2, True)])
def test_shards_are_gathered_and_gradients_summed_to_torchs_bits(size, assists):
    on_ranks(size, gather_and_reduce, assists)


def do_different_things(rank: int, size: int) -> str:
    lane = new_lane()
    memory = torch.zeros(size * COUNT)
    ticket = lane.gather(0, rank, memory.data_ptr(), 4 * COUNT)
    with pytest.raises(noria.UsageError) as raised:
        ticket.wait_passed()
    again = lane.gather(1, 0, memory.data_ptr(), 4 * COUNT)
    with pytest.raises(noria.UsageError):
        again.wait_passed()
    return str(raised.value)


def test_ranks_that_do_not_do_the_same_all_raise_with_the_difference():
    for said in on_ranks(2, do_different_things):
        assert 'rank 0 about to gather "head"' in said
        assert 'rank 1 to gather "tail"' in said


def one_leaves(rank: int, size: int, hangs: bool) -> str:
    lane = new_lane()
    memory = torch.zeros(size * COUNT)
    lane.gather(0, 0, memory.data_ptr(), 4 * COUNT).wait_passed()
    if rank == 1 and hangs:
        time.sleep(3600)
    if rank == 1:
        os._exit(1)
    with pytest.raises(noria._C.MachineError) as raised:
        lane.gather(1, 0, memory.data_ptr(), 4 * COUNT).wait_passed()
    return str(raised.value)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_rank_that_dies_or_hangs_fails_the_others_within_the_timeout(hangs):
    said = on_ranks(2, one_leaves, hangs, timeout_s=5.0, dying=(1,))[0]  # which waits for minutes at most
    assert "rank 0 of 2" in said and "timeout" in said
