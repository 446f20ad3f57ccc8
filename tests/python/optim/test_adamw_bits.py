"""The same bits from every instruction set, however the arrays are cut and whatever they hold."""

import hashlib
import os
import platform
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}
SETS = _C.adamw_instruction_sets()


def any_floats(rng, count):
    """Every pattern but NaN is as likely as any other: denormals, infinities, all exponents."""
    values = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    return np.where(np.isnan(values), np.float32(1), values)


def arrays(seed, count, wild):
    rng = np.random.default_rng(seed)
    if wild:
        p, m, v, g = (any_floats(rng, count) for _ in range(4))
        return p, m, np.abs(v), g
    p, m, v, g = (rng.standard_normal(count, dtype=np.float32) for _ in range(4))
    return p * 0.02, m * 1e-3, v**2 * 1e-6, g * 1e-3


def update_fp32(state, g, instruction_set="", steps=3, cut=()):
    p, m, v = (array.copy() for array in state)
    edges = [0, *sorted(cut), p.size]
    for step in range(1, steps + 1):
        scalars = _C.adamw_scalars(step, **HYPER)
        for begin, end in pairwise(edges):
            at = [array[begin:end].ctypes.data for array in (p, m, v, g)]
            _C.adamw_fp32(*at, end - begin, scalars, instruction_set)
    return p, m, v


def split(master):
    high, low = np.empty(master.size, np.uint16), np.empty(master.size, np.uint16)
    _C.split_master(master.ctypes.data, high.ctypes.data, low.ctypes.data, master.size)
    return high, low


def update_split(state, g, instruction_set="", steps=3):
    high, low = split(state[0])
    m, v = state[1].copy(), state[2].copy()
    for step in range(1, steps + 1):
        at = [array.ctypes.data for array in (high, low, m, v, g)]
        _C.adamw_split(*at, high.size, _C.adamw_scalars(step, **HYPER), instruction_set)
    return high, low, m, v


def assert_same_bits(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


@given(seed=st.integers(0, 2**32), count=st.integers(1, 300), wild=st.booleans())
@settings(max_examples=60, deadline=None)
def test_instruction_sets_give_the_same_bits(seed, count, wild):
    *state, g = arrays(seed, count, wild)
    bf16 = (g.view(np.uint32) >> 16).astype(np.uint16)
    for update, gradient in ((update_fp32, g), (update_split, bf16)):
        baseline = update(state, gradient, SETS[0])
        assert any((now.view(np.uint8) != np.zeros_like(now).view(np.uint8)).any() for now in baseline)
        for instruction_set in [*SETS[1:], ""]:
            assert_same_bits(update(state, gradient, instruction_set), baseline)


@given(seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=40, deadline=None)
def test_cutting_the_arrays_changes_no_bit(seed, data):
    *state, g = arrays(seed, 257, wild=False)
    cut = data.draw(st.lists(st.integers(0, 257), max_size=6))
    assert_same_bits(update_fp32(state, g, cut=cut), update_fp32(state, g))


@pytest.mark.parametrize("wild", [False, True])
def test_split_master_is_updated_as_the_fp32_master_is(wild):
    *state, g = arrays(5, 100_003, wild)
    bf16 = (g.view(np.uint32) >> 16).astype(np.uint16)
    widened = (bf16.astype(np.uint32) << 16).view(np.float32)
    p, m, v = update_fp32(state, widened)
    high, low, split_m, split_v = update_split(state, bf16)
    master = np.empty_like(p)
    _C.join_master(high.ctypes.data, low.ctypes.data, master.ctypes.data, master.size)
    assert_same_bits((master, split_m, split_v), (p, m, v))
    assert not np.array_equal(p.view(np.uint32), state[0].view(np.uint32))


def digest(instruction_set):
    sha = hashlib.sha256()
    for wild in (False, True):
        *state, g = arrays(6, 50_000, wild)
        for array in update_fp32(state, g, instruction_set):
            sha.update(array.tobytes())
    return sha.hexdigest()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="GLIBC_TUNABLES hides the instruction from libm")
def test_machine_without_fused_multiply_add_gives_the_same_bits():
    """There the baseline computes it in software, with denormals flushed all the same."""
    here = os.path.dirname(__file__)
    script = f"import sys; sys.path.insert(0, {here!r}); import test_adamw_bits as t; print(t.digest('baseline'))"
    env = os.environ | {
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    software = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert software.stdout.split()[-1] == digest(SETS[-1])


def test_denormals_are_flushed_inside_and_nowhere_else():
    tiny = np.float32(1e-40)
    p, m, v, g = (np.full(1000, x, np.float32) for x in (1.0, 1e-38, 1e-38, 0.0))
    for instruction_set in SETS:
        _, after_m, _ = update_fp32((p, m, v), g, instruction_set, steps=40)
        assert (after_m == 0).all()  # 1e-38 * 0.9^40 would be a denormal
    assert tiny * np.float32(1) == tiny > 0
    assert (np.full(1000, tiny) * np.float32(1) == tiny).all()


def test_unknown_instruction_set_is_refused_by_name():
    *state, g = arrays(0, 4, wild=False)
    with pytest.raises(_C.UsageError, match=r'expected .*baseline.*found "sse9"; remedy'):
        update_fp32(state, g, "sse9")


def test_steps_count_from_one():
    with pytest.raises(_C.UsageError, match="counts from 1"):
        _C.adamw_scalars(0, **HYPER)
