"""Layouts: aligned, in order, without overlap or needless holes, and the ledger adds up to the byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from noria import _C

ALIGNMENT = _C.TENSOR_ALIGNMENT
tensors = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8]), st.integers(0, 300)).map(
        lambda t: (t[0], t[1], t[0] + t[2])  # strides may leave holes
    ),
    max_size=20,
)
arrays = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["working copy", "held gradients", "m"]), st.integers(0, 5000)),
    max_size=20,
)


def padded(num_bytes):
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def place(sizes):
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


@given(tensors)
def test_tensors_of_a_unit_lie_one_after_the_other_on_the_next_boundary(tensors):
    layout = _C.lay_out_unit(tensors)
    sizes = [storage * item for _, item, storage in tensors]
    offsets, total = place(sizes)
    assert layout.slots == list(zip(offsets, sizes, strict=True))
    assert layout.total == total


@given(arrays)
def test_ledger_of_a_home_adds_up_to_its_total(arrays):
    layout = _C.lay_out_home(arrays)
    offsets, total = place([size for *_, size in arrays])
    assert layout.slots == [(*array[:2], at, array[2]) for array, at in zip(arrays, offsets, strict=True)]
    assert layout.total == total == sum(size for _, size in layout.ledger)
    purposes = list(dict.fromkeys(purpose for _, purpose, _ in arrays))
    assert [purpose for purpose, _ in layout.ledger] == purposes
    for purpose, size in layout.ledger:
        assert size == sum(padded(array[2]) for array in arrays if array[1] == purpose)


def test_expanded_tensor_is_refused():
    with pytest.raises(_C.InvariantError, match="shares some of them"):
        _C.lay_out_unit([(12, 4, 3)])  # torch.zeros(3).expand(4, 3)
