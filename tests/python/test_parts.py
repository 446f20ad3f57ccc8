"""Ranges of elements as boxes of the whole tensor."""

import itertools
import math

import noria
import pytest
import torch
from noria.dist.shard_tensor import ShardTensor, boxes

SHAPES = [(), (1,), (7,), (0, 3), (3, 0), (4, 5), (1, 5), (5, 1), (3, 1, 4), (2, 3, 4), (2, 2, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_are_the_elements_of_the_range_in_the_order_of_storage(shape):
    for order in itertools.permutations(range(len(shape))):
        numbers = torch.arange(math.prod(shape)).view([shape[dim] for dim in order])
        tensor = numbers.permute([order.index(dim) for dim in range(len(shape))])
        count = tensor.numel()
        for first, end in itertools.combinations_with_replacement(range(count + 1), 2):
            found = boxes(tensor.shape, tensor.stride(), first, end - first)
            assert len(found) <= max(2 * len(shape) - 1, 1)
            part = ShardTensor.of(
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
                first=first,
                count=end - first,
                read=lambda a=first, b=end: torch.arange(a, b),
                write=lambda flat: None,
            )
            for box in found:
                whole = tensor[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
                assert torch.equal(part._view(torch.arange(first, end), box), whole)
            assert sum(math.prod(box.sizes) for box in found) == end - first


def test_no_operator_works_on_a_part():
    part = ShardTensor.of((2, 3), (3, 1), torch.float32, read=lambda: torch.zeros(6), write=lambda flat: None)
    assert part.shape == (2, 3) and "6 of (2, 3)" in repr(part)
    with pytest.raises(noria.UsageError, match=r"torch\.distributed\.checkpoint"):
        part + 1
