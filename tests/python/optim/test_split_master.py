"""A split master loses nothing, and its high half is the bf16 that training sees."""

import numpy as np
import pytest
import torch
from noria import _C


def split(patterns):
    high, low = np.empty(patterns.size, np.uint16), np.empty(patterns.size, np.uint16)
    _C.split_master(patterns.ctypes.data, high.ctypes.data, low.ctypes.data, patterns.size)
    return high, low


def join(high, low):
    patterns = np.empty(high.size, np.uint32)
    _C.join_master(high.ctypes.data, low.ctypes.data, patterns.ctypes.data, patterns.size)
    return patterns


def check_lossless(patterns):
    assert np.array_equal(join(*split(patterns)), patterns)


def check_rounding(patterns):
    """Against torch, for all that is not NaN. Returns the number of ties that differ."""
    values = patterns.view(np.float32)
    patterns = patterns[~np.isnan(values)]
    high, _ = split(patterns)
    torchs = torch.from_numpy(patterns.view(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    differ = high != torchs
    is_tie = (patterns & 0xFFFF) == 0x8000
    to_even_rounds_down = ((patterns >> 16) & 1) == 0
    # Exactly the ties where torch rounds towards zero, and there by exactly one step.
    assert np.array_equal(differ, is_tie & to_even_rounds_down)
    assert np.array_equal(high[differ], torchs[differ] + 1)
    return int(differ.sum())


def test_split_is_lossless_on_a_sweep_of_all_patterns():
    check_lossless(np.arange(0, 2**32, 1021, dtype=np.uint64).astype(np.uint32))  # a prime stride: all low halves


def test_split_is_lossless_around_every_exponent():
    near = np.arange(-70_000, 70_000, 7, dtype=np.int64)
    edges = np.concatenate([(sign << 31) + (e << 23) + near for sign in (0, 1) for e in range(0, 256, 15)])
    check_lossless((edges % 2**32).astype(np.uint32))


def test_high_half_is_torchs_bfloat16_except_on_ties():
    assert check_rounding(np.arange(0, 2**32, 1021, dtype=np.uint64).astype(np.uint32)) > 0


def test_every_second_tie_differs_from_torch_and_nothing_else():
    """Of the 2 * 0x7f80 high halves below infinity, the even ones; a tie is one pattern in 65,536."""
    ties = (np.arange(0, 2**16, dtype=np.uint32) << 16) + 0x8000
    assert check_rounding(ties) == 0x7F80


def test_nan_masters_survive_and_these_high_halves_do_not_show_it():
    nan = np.concatenate(
        [(high << 16) + np.arange(2**16, dtype=np.uint32) for high in (0x7F80, 0x7FFF, 0xFF80, 0xFFFF)]
    )
    nan = nan[np.isnan(nan.view(np.float32))]
    high, low = split(nan)
    assert np.array_equal(join(high, low), nan)
    hidden = nan[~np.isnan((high.astype(np.uint32) << 16).view(np.float32))]
    payload = hidden & 0x7FFFFFFF
    reads_as_infinity = (payload > 0x7F800000) & (payload < 0x7F808000)
    carries_out = payload >= 0x7FFF8000
    assert (reads_as_infinity | carries_out).all() and hidden.size == 2 * (0x7FFF + 0x8000)
    default = np.array([0x7FC00000, 0xFFC00000], np.uint32)  # what arithmetic makes
    assert np.isnan((split(default)[0].astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.long
def test_split_is_lossless_on_all_patterns():
    ties, size = 0, 2**22  # larger arrays take longer: their memory is new each time
    for begin in range(0, 2**32, size):
        patterns = np.arange(begin, begin + size, dtype=np.uint64).astype(np.uint32)
        check_lossless(patterns)
        ties += check_rounding(patterns)
    assert ties == 0x7F80
