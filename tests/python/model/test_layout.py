"""Layouts: aligned, in order, without overlap or needless holes, and regions add up to the byte."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from noria import _C
from noria.model.layout import HomeUnit, Region, Ring, describe_units
from noria.model.moment_formats import scale_bytes
from noria.model.partition import UnitSpec
from torch import nn

ALIGNMENT = _C.TENSOR_ALIGNMENT

tensors = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans()), max_size=20
)


def place(sizes: list[int]) -> tuple[list[int], int]:
    """The slow, obvious twin: one after the other, each on the next boundary."""
    offsets, end = [], 0
    for size in sizes:
        while end % ALIGNMENT:
            end += 1
        offsets.append(end)
        end += size
    while end % ALIGNMENT:
        end += 1
    return offsets, end


def described(tensors: list[tuple[int, torch.dtype, bool]], rank: int = 0, num_ranks: int = 1) -> HomeUnit:
    parameters = [
        nn.Parameter(torch.empty(count, dtype=dtype, device="meta"), requires_grad=trains)
        for count, dtype, trains in tensors
    ]
    names = [(f"p{number}",) for number in range(len(parameters))]
    [unit] = describe_units([UnitSpec("unit", parameters, names, True, None)], None, rank, num_ranks)
    return unit


@given(st.lists(st.tuples(st.integers(1, 9000), st.just(torch.float32), st.booleans()), min_size=1), st.integers(2, 4))
def test_ranks_that_share_a_unit_plan_the_same_memory_for_logs_and_scales(tensors, num_ranks):
    """Though one rank has parts of many parameters, and another one a part of one: each has blocks of its own."""
    units = [described(tensors, rank, num_ranks) for rank in range(num_ranks)]
    for slot in (slot for unit in units for slot in unit.parameters):
        slot.num_moments = 1
    assert len({(unit.undo_log, scale_bytes(unit, 0, "8bit")) for unit in units}) == 1
    for unit in units:
        parts = [slot.like.numel() for slot in unit.parameters if slot.trainable]
        elements, blocks, _ = unit.undo_log
        assert elements >= sum(parts) and blocks >= sum(_C.num_undo_blocks(part) for part in parts)
        assert scale_bytes(unit, 1, "8bit") == 0
        assert scale_bytes(unit, 0, "8bit") >= 4 * sum(slot.num_blocks for slot in unit.parameters)


@given(tensors)
def test_tensors_of_a_unit_lie_one_after_the_other_trained_ones_first(tensors):
    unit = described(tensors)
    order = sorted(tensors, key=lambda tensor: not tensor[2])
    sizes = [count * dtype.itemsize for count, dtype, _ in order]
    trained = sum(trains for *_, trains in tensors)
    offsets, end = place(sizes)
    _, gradients = place(sizes[:trained])
    if trained and not gradients:  # a unit of empty parameters is a unit too
        gradients = ALIGNMENT
        offsets = [0] * trained + [ALIGNMENT + offset for offset in offsets[trained:]]
        end += ALIGNMENT
    assert [slot.offset for slot in unit.parameters] == offsets
    assert [slot.gradient_offset for slot in unit.parameters] == offsets[:trained] + [-1] * (len(offsets) - trained)
    assert unit.gradients == (gradients if trained else 0)
    assert unit.weights == max(end, ALIGNMENT)


@given(st.lists(st.integers(0, 50).map(lambda blocks: blocks * ALIGNMENT), min_size=1, max_size=20))
def test_a_region_adds_up(sizes):
    region = Region.of("working copies", sizes)
    assert region.bytes == sum(sizes)
    end = 0
    for unit, size in enumerate(sizes):
        assert region.offsets[unit] == end
        end += size
    assert end == region.bytes


@pytest.mark.parametrize(("num_slots", "is_whole"), [(2, False), (3, True), (8, True)])
def test_a_gradient_ring_is_never_larger_than_all_gradients(num_slots, is_whole):
    units = [described([(256, torch.float32, True)]) for _ in range(3)]
    for number, unit in enumerate(units):
        unit.index = number
    ring = Ring.of(units, (), num_slots)
    assert ring.num_slots == (0 if is_whole else num_slots)
    assert ring.region.bytes == min(num_slots, 3) * units[0].gradients
