"""Sums of squares: those of a slow twin to the bit, from any kernel; and never far from the truth."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

from tests.python.optim.units import SETS, any_floats, bf16, make, widened

CHUNK = 64 * 1024  # elements whose squares are summed by themselves


def job_of(gradient: np.ndarray, pieces: list[tuple[int, int]], task: str = "sum") -> _C.UpdateJob:
    """A sum looks at the gradient alone, so any address will do for the rest."""
    scalars = _C.update_scalars("sgd", 1, lr=0.0)
    address = gradient.ctypes.data
    whole = gradient.dtype == np.float32
    arrays = _C.UnitArrays(master=address) if whole else _C.UnitArrays(working=address, low=address)
    return _C.UpdateJob("sgd", [(*piece, scalars) for piece in pieces], arrays, gradient=address, task=task, sums=True)


def twin_of(values: np.ndarray) -> float:
    """32 sums, element i to sum i modulo 32, added in order; by chunks, whose sums are added in order."""
    total = 0.0
    for start in range(0, values.size, CHUNK):
        squares = values[start : start + CHUNK].astype(np.float64) ** 2
        lanes = [0.0] * 32
        for first in range(0, squares.size, 32):
            for lane, square in enumerate(squares[first : first + 32].tolist()):
                lanes[lane] += square
        total += sum(lanes)
    return total


def drawn(split: bool, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Gradients as they lie in memory, and as numbers."""
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return (bf16(values), widened(bf16(values))) if split else (values, values)


@pytest.mark.parametrize("split", [False, True])
@given(seed=st.integers(0, 2**32), count=st.integers(0, 300))
@settings(max_examples=30)
def test_every_instruction_set_gives_the_bits_of_the_slow_twin(split, seed, count):
    memory, values = drawn(split, count + 7, seed)
    for name in [*SETS, ""]:
        assert job_of(memory, [(7, count), (0, 7)]).sums(name) == [twin_of(values[7:]), twin_of(values[:7])]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_the_pool_gives_the_bits_of_the_slow_twin(split, num_threads):
    memory, values = drawn(split, 3 * CHUNK + 1001, num_threads)
    cuts = [0, 5, 5 + CHUNK, memory.size]
    pieces = [(start, end - start) for start, end in pairwise(cuts)]
    pool = _C.HostOptimizer(num_threads)
    job = job_of(memory, pieces)
    pool.submit(job, verb="sum").wait_passed()
    assert job.taken_sums == [twin_of(values[start : start + count]) for start, count in pieces]
    pool.close()


def test_an_update_that_sums_on_its_way_gives_the_same_sums_and_the_same_update():
    for split in (False, True):
        plain, summing = (make("adamw", 2 * CHUNK + 77, 3, split_master=split) for _ in range(2))
        pool = _C.HostOptimizer(2)
        pool.submit(plain.job(1)).wait_passed()
        job = summing.job(1, sums=True)
        pool.submit(job).wait_passed()
        pool.close()
        assert summing.bits() == plain.bits()
        gradient = summing.gradient
        assert job.taken_sums == [twin_of(widened(gradient) if split else gradient)]


def test_a_sum_is_as_exact_as_doubles_are():
    """n additions of doubles in 32 lanes: relative error below (n / 32 + 32) * 2^-53."""
    values = drawn(False, CHUNK, 9)[0]
    [found] = job_of(values, [(0, CHUNK)]).sums()
    exact = sum(Fraction(value) ** 2 for value in values.tolist())
    assert abs(Fraction(found) - exact) <= exact * (CHUNK // 32 + 32) * Fraction(1, 2**53)


@pytest.mark.parametrize("strange", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 31, 32, 998])
def test_one_element_that_is_not_finite_is_seen_and_large_ones_are_not_taken_for_it(strange, where):
    values = np.full(999, np.finfo(np.float32).max, np.float32)
    assert all(math.isfinite(each) for each in job_of(values, [(0, 999)]).sums())
    values[where] = strange
    for memory in (values, bf16(values)):
        assert not math.isfinite(job_of(memory, [(0, 999)]).sums()[0])


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_any_bits_are_summed_as_numpy_sums_them(seed):
    values = any_floats(np.random.default_rng(seed), 64)
    with np.errstate(all="ignore"):
        expected = twin_of(values)
    for name in SETS:
        [found] = job_of(values, [(0, values.size)]).sums(name)
        assert found == expected or (math.isnan(found) and math.isnan(expected))
