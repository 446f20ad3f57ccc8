"""The same bits from every instruction set, for all cuts and contents of the arrays, in place or as a draft."""

import hashlib
import math
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

from tests.python.optim.units import HYPER, MOMENTS, RULES, SETS, Unit, aligned, any_floats, bf16, make, widened

VARIANTS = {
    "adamw": [{}, {"weight_decay": 0.0, "maximize": True}],
    "adam": [{}, {"weight_decay": 0.0}],
    "sgd": [{}, {"weight_decay": 0.0, "maximize": True}],
    "sgd_momentum": [{}, {"weight_decay": 0.0}, {"nesterov": True, "dampening": 0.0}],
    "lion": [{}, {"weight_decay": 0.0, "maximize": True}],
}
KEPT = [(rule, state) for rule in RULES for state in ("fp32", "bf16", "8bit") if MOMENTS[rule] or state == "fp32"]
EVERY = [(rule, changed, split) for rule in RULES for changed in VARIANTS[rule] for split in (False, True)]


def steps_of(unit: Unit, count: int = 3, *, may_stay: bool = False, **how) -> bytes:
    """`may_stay`: of a few wild elements none may change."""
    before = unit.bits()
    for step in range(1, count + 1):
        unit.step(step, **how)
    assert may_stay or unit.count < 4 or unit.bits() != before
    return unit.bits()


@pytest.mark.parametrize(("rule", "changed", "split"), EVERY, ids=str)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 300), wild=st.booleans(), factor=st.sampled_from([1.0, 0.3]))
@settings(max_examples=12)
def test_instruction_sets_and_drafts_give_the_same_bits(rule, changed, split, seed, count, wild, factor):
    def outcome(**how):
        unit = make(rule, count, seed, wild=wild, split_master=split)
        return steps_of(unit, may_stay=wild and count < 64, factor=factor, **changed, **how)

    baseline = outcome(instruction_set=SETS[0])
    for instruction_set in [*SETS, ""]:
        for draft in (False, True):
            assert outcome(instruction_set=instruction_set, draft=draft) == baseline, (instruction_set, draft)


@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=15)
def test_cutting_the_arrays_changes_no_bit(rule, seed, data):
    """Also where pieces begin at addresses that no vector is aligned to."""
    cut = data.draw(st.lists(st.integers(0, 5000), max_size=6))
    for factor in (1.0, 0.7):
        whole = steps_of(make(rule, 5000, seed), factor=factor)
        for draft in (False, True):
            assert steps_of(make(rule, 5000, seed), cut=cut, draft=draft, factor=factor) == whole


@pytest.mark.parametrize(("rule", "state"), KEPT)
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("spoilt", [False, True])
def test_split_master_is_updated_as_the_fp32_master_is(rule, state, wild, spoilt):
    """Moments in fewer bits too, with loops of their own for arrays of halves. A NaN stays with its element."""
    halves = make(rule, 100_003, 5, wild=wild, split_master=True, state=state)
    whole = make(rule, 100_003, 5, wild=wild, state=state)
    if spoilt:
        halves.gradient[100:60_000:1009] = 0x7FC0
    whole.gradient = widened(halves.gradient)
    before = whole.master.copy()
    for step in (1, 2, 3):
        halves.step(step)
        whole.step(step)
    is_nan = np.isnan(whole.master)
    np.testing.assert_array_equal(is_nan, np.isnan(halves.master))
    np.testing.assert_array_equal(halves.master[~is_nan].view(np.uint32), whole.master[~is_nan].view(np.uint32))
    for name in whole.arrays.keys() - {"master"}:
        ours, theirs = halves.arrays[name], whole.arrays[name]
        if ours.dtype == np.float32:
            np.testing.assert_array_equal(ours, theirs)  # as floats: NaNs are alike
            ours, theirs = (np.where(np.isnan(each), 0, each).view(np.uint32) for each in (ours, theirs))
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(whole.master.view(np.uint32), before.view(np.uint32))


@pytest.mark.parametrize("rule", ["adamw", "lion"])
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "changed", [{"weight_decay": math.nan}, {"weight_decay": math.inf}, {"weight_decay": -math.inf}, {"lr": math.inf}]
)
def test_decay_that_is_no_number_has_the_same_effect_on_every_set(rule, state, split, changed):
    """Also on weights that are infinite or NaN. NaNs are alike."""
    p = np.resize(np.array([1, 0, -0.0, np.inf, -np.inf, np.nan, -3e38, 1e-30], np.float32), 603)
    moments = [np.resize(np.array([1e-3, -1e-3, 0], np.float32), p.size), np.full_like(p, 1e-6)][: MOMENTS[rule]]
    g = np.resize(np.array([1e-3, -2e-3, 0, np.nan], np.float32), p.size)

    def outcome(instruction_set):
        unit = Unit(rule, p, g, moments=moments, split_master=split, state=state)
        unit.step(30, instruction_set=instruction_set, **changed)
        return np.where(np.isnan(unit.master), np.float32(math.nan), unit.master).view(np.uint32)

    baseline = outcome(SETS[0])
    for instruction_set in SETS[1:]:
        np.testing.assert_array_equal(outcome(instruction_set), baseline)


# ---- factor -------------------------------------------------------------------------------------------------------

FACTORS = [0.5, 1 / 3, -1.0, -0.7, 1e-30, 1e30, 2.0**-16, 65536.0]


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("split", [False, True])
def test_factor_is_the_update_after_mul_of_the_gradient_to_the_bit(split, factor):
    """Every bf16 gradient, and floats of every kind. With lr = -1 from zero, plain SGD shows the very gradient that the
    rule saw, up to denormals, which it flushes; Lion flushes nothing, and shows it in its moment."""
    if split:
        bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
        g = widened(bits[~np.isnan(widened(bits))])
    else:
        g = any_floats(np.random.default_rng(3), 200_000)
    like_torch = torch.from_numpy(g.copy())
    like_torch = (like_torch.bfloat16() if split else like_torch).mul_(factor)
    seen = like_torch.float().numpy()
    zeros = np.zeros_like(g)

    unit = Unit("sgd", zeros, g, split_master=split)
    unit.step(lr=-1.0, weight_decay=0.0, factor=factor)
    normal = np.abs(seen) >= np.finfo(np.float32).tiny
    np.testing.assert_array_equal(unit.master[normal], seen[normal])
    assert (unit.master[~normal] == 0).all()

    moved = Unit("lion", zeros, g, split_master=split)
    moved.step(beta2=0.0, factor=factor)  # the moment becomes the gradient
    finite = np.isfinite(seen)
    np.testing.assert_array_equal(moved.arrays["m"][finite], seen[finite])

    for rule in RULES:
        by_factor, by_hand = (make(rule, g.size, 1, split_master=split) for _ in range(2))
        by_factor.gradient = bf16(g) if split else g
        by_hand.gradient = bf16(seen) if split else seen
        assert steps_of(by_factor, factor=factor) == steps_of(by_hand), rule


@pytest.mark.parametrize("changed", [(3.0, 1.0, 1.0), (7.0, 1.0, -0.7), (1.0, 1 / 3, 1 / 3), (1000.0, 3.0, 1.0)])
@pytest.mark.parametrize("split", [False, True])
def test_divisor_and_prefactor_come_before_the_factor_each_rounded_as_torch_does(split, changed):
    """Found in Lion's moment, which becomes the gradient, denormals and all; by all instruction sets, and in drafts."""
    divisor, prefactor, factor = changed
    g = any_floats(np.random.default_rng(3), 200_000)
    g = np.where(np.isfinite(g), g, 1.0).astype(np.float32)
    g = widened(bf16(g)) if split else g
    like_torch = torch.from_numpy(g.copy())
    like_torch = (like_torch.bfloat16() if split else like_torch).div_(divisor).mul_(prefactor).mul_(factor)
    by = {"divisor": divisor, "prefactor": prefactor, "factor": factor}
    for how in [{"instruction_set": name} for name in SETS] + [{"draft": True}]:
        moved = Unit("lion", np.zeros_like(g), g, split_master=split)
        moved.step(beta2=0.0, **by, **how)
        np.testing.assert_array_equal(moved.arrays["m"], like_torch.float().numpy())


def test_factor_keeps_what_is_not_finite():
    g = np.array([np.inf, -np.inf, np.nan, 3e38, 1.0], np.float32)
    for split in (False, True):
        unit = Unit("sgd", np.zeros_like(g), g, split_master=split)
        unit.step(lr=-1.0, weight_decay=0.0, factor=2.0)
        seen = unit.master
        assert seen[0] == np.inf and seen[1] == -np.inf and np.isnan(seen[2]) and seen[3] == np.inf and seen[4] == 2


def test_factor_one_changes_nothing():
    for rule in RULES:
        assert steps_of(make(rule, 3000), factor=1.0) == steps_of(make(rule, 3000))


# ---- denormals ----------------------------------------------------------------------------------------------------


def test_machine_without_fused_multiply_add_gives_the_same_bits():
    """There the baseline computes it in software, with denormals flushed all the same."""
    if "baseline" not in SETS:
        pytest.skip("every machine of this architecture has the instruction")
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("GLIBC_TUNABLES hides the instruction from libm")
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../.."))
    script = "from tests.python.optim import test_update_bits as t; print(t.digest('baseline'))"
    env = os.environ | {
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4",
        "PYTHONPATH": os.pathsep.join([root, *sys.path]),
    }
    software = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert software.stdout.split()[-1] == digest(SETS[-1])


def digest(instruction_set: str) -> str:
    sha = hashlib.sha256()
    for rule in RULES:
        for wild in (False, True):
            sha.update(steps_of(make(rule, 20_000, 6, wild=wild), instruction_set=instruction_set))
    return sha.hexdigest()


def test_denormals_are_flushed_inside_and_nowhere_else():
    tiny = np.float32(1e-40)
    for instruction_set in SETS:
        p, m, v, g = (np.full(1000, x, np.float32) for x in (1.0, 1e-38, 1e-38, 0.0))
        unit = Unit("adamw", p, g, moments=(m, v))
        for step in range(1, 41):
            unit.step(step, instruction_set=instruction_set)
        assert (unit.arrays["m"] == 0).all()  # 1e-38 * 0.9^40 would be a denormal
    assert tiny * np.float32(1) == tiny > 0
    assert (np.full(1000, tiny) * np.float32(1) == tiny).all()


def test_lion_steps_by_the_sign_of_a_denormal_as_torch_does():
    for instruction_set in SETS:
        for gradient in (1e-40, -1e-44):
            unit = Unit("lion", np.ones(100, np.float32), np.full(100, gradient, np.float32))
            unit.step(weight_decay=0.0, instruction_set=instruction_set)
            expected = np.float32(1) - np.float32(HYPER["lion"]["lr"]) * np.sign(np.float32(gradient))
            assert (unit.master == expected).all()


# ---- misuse -------------------------------------------------------------------------------------------------------


def test_unknown_words_are_refused_by_name():
    unit = make("adamw", 4)
    with pytest.raises(_C.UsageError, match=r'expected .*baseline.*found "sse9"\. Remedy'):
        unit.step(instruction_set="sse9")
    with pytest.raises(
        _C.UsageError, match=r'found "adagrad"\. Remedy: use one of adamw, adam, sgd, sgd_momentum, lion'
    ):
        _C.update_scalars("adagrad", 1, lr=1.0)


@pytest.mark.parametrize("rule", RULES)
def test_steps_count_from_one(rule):
    with pytest.raises(_C.UsageError, match="counts from 1"):
        make(rule, 4).scalars(0)


def test_momentum_buffer_becomes_the_first_gradient_even_if_it_held_nan():
    g = np.array([1.0, -2.0, 3.0], np.float32)
    unit = Unit("sgd_momentum", np.zeros(3, np.float32), g, moments=(np.full(3, np.nan, np.float32),))
    unit.step(1, weight_decay=0.0, dampening=0.5)
    np.testing.assert_array_equal(unit.arrays["m"], g)
    unit.step(2, weight_decay=0.0, dampening=0.5)
    np.testing.assert_array_equal(unit.arrays["m"], np.float32(0.9) * g + np.float32(0.5) * g)


def test_plain_sgd_reads_and_writes_no_state():
    p = aligned(10, np.float32)
    p[:] = 1
    unit = Unit("sgd", p, np.ones(10, np.float32))
    assert unit.arrays.keys() == {"master"} and unit.job().bytes == 12 * 10
    unit.step(weight_decay=0.0)
    assert (unit.master == np.float32(1) - np.float32(0.1)).all()
