"""Of every unit each rank has one part, and all parts together are the whole."""

import datetime
import warnings

import noria
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C
from noria.dist.groups import Group
from noria.dist.ranks import Ranks
from noria.model.layout import describe_units
from noria.model.partition import partition
from noria.wrapped import wrapped_by
from torch import nn

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 2000)),
    st.tuples(st.integers(0, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4)),
)
PARAMETERS = st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=8)
DTYPES = st.sampled_from([(torch.float32, None), (torch.float32, torch.bfloat16), (torch.float64, None)])


class Holder(nn.Module):
    def __init__(self, parameters, dtype):
        super().__init__()
        for number, (shape, trainable) in enumerate(parameters):
            value = torch.arange(float(torch.Size(shape).numel()), dtype=dtype).reshape(shape)
            if len(shape) == 4:
                value = value.to(memory_format=torch.channels_last)
            elif len(shape) == 2:
                value = value.t().contiguous().t()
            setattr(self, f"p{number}", nn.Parameter(value, requires_grad=trainable))


@settings(max_examples=150)
@given(PARAMETERS, DTYPES, st.integers(1, 5))
def test_the_parts_of_all_ranks_tile_every_parameter(parameters, dtypes, num_ranks):
    own, travels_in = dtypes
    units = partition([Holder(parameters, own)], "auto").units
    by_rank = [describe_units(units, travels_in, rank, num_ranks) for rank in range(num_ranks)]
    for its in zip(*by_rank, strict=True):
        unit = its[0]
        assert unit.weights % (num_ranks * _C.TENSOR_ALIGNMENT) == 0
        assert unit.gradients % (num_ranks * _C.TENSOR_ALIGNMENT) == 0
        for other in its:
            assert (other.weights, other.gradients) == (unit.weights, unit.gradients)
        part_of_trainable, part_of_frozen = unit.home_gradients, unit.home_weights - unit.home_gradients
        for rank, other in enumerate(its):
            used = 0
            for slot in other.parameters:
                begin, end = slot.home_offset, slot.home_offset + slot.like.numel() * slot.dtype.itemsize
                assert begin % slot.dtype.itemsize == 0 and begin >= used and end <= other.home_weights
                used = end
                if not slot.like.numel():
                    continue
                # Where the part lies in the home, it is what a gather puts in its place in the whole.
                if slot.trainable:
                    inside, whole = begin, rank * part_of_trainable + begin
                    assert slot.gradient_offset == slot.offset and end <= part_of_trainable
                else:
                    inside = begin - part_of_trainable
                    whole = unit.gradients + rank * part_of_frozen + inside
                assert inside >= 0
                assert whole == slot.offset + slot.first * slot.dtype.itemsize
                if slot.shard_ends and slot.dtype.itemsize <= 4:
                    assert slot.first % _C.STATE_BLOCK == 0
        for slots in zip(*(other.parameters for other in its), strict=True):
            value = slots[0].parameter.detach()
            assert sum(slot.like.numel() for slot in slots) == value.numel()
            if num_ranks == 1:
                assert slots[0].part_of(value) is value
                continue
            assert [slot.like.numel() for slot in slots] == [slots[0].count_on(rank) for rank in range(num_ranks)]
            assert all(slot.shard_ends == slots[0].shard_ends and slot.offset == slots[0].offset for slot in slots)
            parts = [slot.part_of(value) for slot in slots]
            assert all(part.shape == slot.like.shape for part, slot in zip(parts, slots, strict=True))
            rebuilt = torch.cat(parts).as_strided(slots[0].shape, slots[0].strides)
            assert torch.equal(rebuilt, value)


@settings(max_examples=50)
@given(PARAMETERS, DTYPES)
def test_one_rank_has_the_home_that_it_always_had(parameters, dtypes):
    own, travels_in = dtypes
    for unit in describe_units(partition([Holder(parameters, own)], "auto").units, travels_in):
        assert unit.home_weights == unit.weights and unit.home_gradients == unit.gradients
        for slot in unit.parameters:
            assert slot.home_offset == slot.offset and slot.first == 0 and slot.shard_ends == ()
            assert slot.offset % _C.TENSOR_ALIGNMENT == 0


def test_without_a_process_group_no_ranks_share(monkeypatch):
    monkeypatch.setattr("noria.dist.ranks.Group", None)  # none can be made
    assert Ranks.meet() is None


def test_a_group_of_one_shares_with_no_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = nn.Linear(3, 3)
        noria.wrap(model, device="cpu")
        wrapped = wrapped_by(model)
        assert wrapped is not None and wrapped.context.ranks is None
        noria.unwrap(model)
    finally:
        dist.destroy_process_group()


def warnings_of_wraps(number):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(number):
            noria.wrap(nn.Linear(3, 3), device="cpu")
    return [each for each in found if "WORLD_SIZE" in str(each.message)]


def test_launched_processes_without_a_process_group_are_told_once(monkeypatch):
    monkeypatch.setattr("noria.dist.ranks._WARNED", [])
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not warnings_of_wraps(1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    [warning] = warnings_of_wraps(2)
    assert "WORLD_SIZE=4" in str(warning.message) and "init_process_group before noria.wrap" in str(warning.message)
    assert warning.filename == __file__


def test_launched_processes_with_a_process_group_are_told_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("noria.dist.ranks._WARNED", [])
    monkeypatch.setenv("WORLD_SIZE", "4")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        assert not warnings_of_wraps(1)
    finally:
        dist.destroy_process_group()


def test_own_groups_have_the_timeout_of_the_users(tmp_path):
    timeout = datetime.timedelta(seconds=77)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, timeout=timeout)
    try:
        group = Group([0])
        assert group._group._get_backend(torch.device("cpu")).options._timeout == timeout
        group.close()
    finally:
        dist.destroy_process_group()


def ranks_that_say(gathered):
    ranks = object.__new__(Ranks)
    ranks.host = object.__new__(Group)
    ranks.host.gather_objects = lambda own: gathered
    return ranks


@pytest.mark.parametrize(
    "other, parts",
    [
        (["a", "c"], ("on rank 0: b; on rank 2: c",)),
        (["a"], ("on rank 0: b; on rank 2: nothing",)),
        (["a", "b", "c"], ("on rank 0: nothing; on rank 2: c",)),
    ],
)
def test_the_first_difference_is_named(other, parts):
    with pytest.raises(noria.UsageError) as caught:
        ranks_that_say([["a", "b"], ["a", "b"], other]).agree(["a", "b"])
    assert all(part in str(caught.value) for part in parts)


def test_of_values_by_name_only_those_that_differ_are_shown():
    gathered = [[("group 0", {"lr": "0.1", "eps": "1e-08"})], [("group 0", {"eps": "1e-08", "fused": "True"})]]
    with pytest.raises(noria.UsageError) as caught:
        ranks_that_say(gathered).agree(gathered[0])
    assert "on rank 0: group 0 has no fused, lr=0.1; on rank 1: group 0 has fused=True, no lr." in str(caught.value)
    gathered[1] = [("group 1", {"lr": "0.1"})]
    with pytest.raises(noria.UsageError) as caught:
        ranks_that_say(gathered).agree(gathered[0])
    assert "on rank 0: group 0 has eps=1e-08, lr=0.1; on rank 1: group 1 has lr=0.1." in str(caught.value)


def test_ranks_with_the_same_lines_agree():
    ranks_that_say([["a", "b"]] * 3).agree(["a", "b"])
