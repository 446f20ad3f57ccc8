"""Room store: the window's account agrees with a set of bytes, in any order of takes and returns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from noria import _C

from tests.python.engine.bare import bare

CELL, CELLS = 512, 12


@given(
    st.lists(st.tuples(st.integers(0, CELLS - 1), st.integers(1, 5), st.booleans()), max_size=60),
)
def test_a_lease_is_given_exactly_when_its_bytes_are_free(requests):
    leases = bare.Leases(arena=CELLS * CELL, capacity=1 << 20)
    live: dict[int, tuple[set[int], bool]] = {}  # by first cell: its cells, and whether weights lie there
    peak = peak_units = 0
    for first, cells, is_weights in requests:
        if first in live:
            leases.release(first * CELL)
            del live[first]
            continue
        wanted = set(range(first, first + cells))
        if max(wanted) >= CELLS or any(wanted & taken for taken, _ in live.values()):
            with pytest.raises(_C.InvariantError, match="lease"):
                leases.take(first * CELL, cells * CELL, is_weights)
        else:
            assert leases.take(first * CELL, cells * CELL, is_weights) == first * CELL
            live[first] = (wanted, is_weights)
            peak = max(peak, (first + cells) * CELL)
        num_units = sum(weights for _, weights in live.values())
        peak_units = max(peak_units, num_units)
        assert (leases.num_leases, leases.num_units) == (len(live), num_units)
        assert (leases.peak, leases.peak_units) == (peak, peak_units)


def test_what_was_not_taken_cannot_be_released():
    leases = bare.Leases(arena=CELLS * CELL, capacity=1 << 20)
    leases.take(0, 2 * CELL, True)
    with pytest.raises(_C.InvariantError, match="no lease at offset 512"):
        leases.release(CELL)


def test_a_window_that_the_device_has_no_room_for_is_refused_with_the_numbers():
    with pytest.raises(_C.MachineError, match=r"1\.0 MiB"):
        bare.Leases(arena=1 << 20, capacity=1 << 19)
