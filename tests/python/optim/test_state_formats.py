"""Moments in bf16 and in 8 bits: the bits of a slow twin, from every instruction set, cut and draft; rounded without
bias; and back from plain floats as they were.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

from tests.python.optim.units import (
    HYPER,
    MOMENTS,
    RULES,
    SETS,
    Unit,
    any_floats,
    bf16,
    decoded,
    encoded,
    make,
    widened,
)

BLOCK = _C.STATE_BLOCK
KEEPING = [rule for rule in RULES if MOMENTS[rule]]
REDUCED = ["bf16", "8bit"]
reduced = pytest.mark.parametrize("state", REDUCED)
rules = pytest.mark.parametrize("rule", KEEPING)


# ---- the twin: slow and obvious ------------------------------------------------------------------------------------


def key_of(seed, step):
    """Python's own integers."""
    mask = 2**64 - 1

    def mixed(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    odd = 0x9E3779B97F4A7C15
    return mixed((mixed((seed + odd) & mask) + step * odd) & mask) >> 32


def mixed(x):
    return ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF


def random_of(number, seed, step):
    """The random bits for the element with this number."""
    key = key_of(seed, step) ^ mixed(number >> 32)
    return mixed((key + (number & 0xFFFFFFFF) * 0x9E3779B9) & 0xFFFFFFFF)


def part_of(random, state, name):
    """The bits of an element's random number that round one of its moments."""
    if state == "bf16":
        return random & 0xFFFF if name == "m" else random >> 16
    return random & 0xFFFF8 if name == "m" else random >> (32 - CUT["v"])


def to_bf16(value, random):
    bits = int(np.float32(value).view(np.uint32))
    return (bits + random) >> 16


f32 = np.float32


# The floats of 3 bits behind the point up to 1, or of 4 bits for second moments. Less the first, and stretched so that
# the last is 1 again, they are the shares of a block's scale that codes from 0 on stand for.
CUT = {"m": 20, "v": 19}
ONE = {name: 0x3F800000 >> cut for name, cut in CUT.items()}
ZERO = {"m": ONE["m"] - 127, "v": ONE["v"] - 255}
FLOATS = {name: (np.arange(ZERO[name], ONE[name] + 1, dtype=np.uint32) << CUT[name]).view(f32) for name in CUT}
LARGEST = f32(2.0**125)  # of the magnitudes that have a code
LEVELS = {name: (floats - floats[0]) * (f32(1) / (f32(1) - floats[0])) for name, floats in FLOATS.items()}


def decode(code, scale, name):
    level = int(np.uint8(code).view(np.int8)) if name == "m" else int(code)
    return (-1 if level < 0 else 1) * LEVELS[name][abs(level)] * scale


def encode(value, scale, random, name):
    magnitude, first = abs(value), FLOATS[name][0]
    to_share = (f32(1) - first) / scale * f32(1 + 2**-22) if scale > 0 else f32(0)
    exact = np.longdouble(magnitude) * np.longdouble(to_share) + np.longdouble(first)
    raised = f32(exact) if name == "m" else min(f32(exact), f32(1))
    code = ((int(raised.view(np.uint32)) + random) >> CUT[name]) - ZERO[name]
    if name == "m":
        return (-code if value < 0 else code) % 256
    return max(code, 1) if value > 0 else code


def twin_step(unit, step, seed):
    """What the arrays are after a step: the fp32 kernel on widened moments, each rounded by itself."""
    names = "mv"[: MOMENTS[unit.rule]]
    moments = [unit.moment(name) for name in names]
    if unit.state == "8bit":
        for name, values in zip(names, moments, strict=True):
            codes, scales = unit.arrays[name], unit.arrays[f"{name}_scales"]
            by_twin = [decode(code, scales[i // BLOCK], name) for i, code in enumerate(codes)]
            np.testing.assert_array_equal(values, np.array(by_twin, f32))
    whole = Unit(unit.rule, unit.master, unit.gradient, moments=moments)
    whole.step(step)
    expected = {"master": whole.master}
    for name in names:
        values = whole.arrays[name]
        draws = [part_of(random_of(unit.first + i, seed, step), unit.state, name) for i in range(unit.count)]
        if unit.state == "bf16":
            expected[name] = np.array([to_bf16(x, r) for x, r in zip(values, draws, strict=True)], np.uint16)
            continue
        scales = np.array([np.abs(values[at : at + BLOCK]).max() for at in range(0, unit.count, BLOCK)], f32)
        codes = [encode(x, scales[i // BLOCK], r, name) for i, (x, r) in enumerate(zip(values, draws, strict=True))]
        expected[name], expected[f"{name}_scales"] = np.array(codes, np.uint8), scales
    return expected


@rules
@reduced
@pytest.mark.parametrize("first", [0, 7 * BLOCK, 2**32 - BLOCK, 2**40])
def test_every_element_is_that_of_the_slow_twin(rule, state, first):
    """Also where the numbers of elements outgrow 32 bits within a parameter."""
    unit = make(rule, 2 * BLOCK + 61, 3, state=state)
    unit.first = first
    for step in (1, 2, 3):
        expected = twin_step(unit, step, seed=5)
        unit.step(step, scalars=unit.scalars(step, seed=5))
        for name, array in expected.items():
            np.testing.assert_array_equal(unit.arrays[name], array, err_msg=name)


# ---- the same bits however it is done ------------------------------------------------------------------------------


def outcome(rule, state, count, seed, *, wild=False, split=False, factor=1.0, rounding_seed=0, **how):
    unit = make(rule, count, seed, wild=wild, split_master=split, state=state)
    for step in (1, 2, 3):
        unit.step(step, scalars=unit.scalars(step, factor=factor, seed=rounding_seed), **how)
    return unit.bits()


@rules
@reduced
@pytest.mark.parametrize("split", [False, True])
@given(seed=st.integers(0, 2**32), count=st.integers(1, 700), wild=st.booleans(), factor=st.sampled_from([1.0, 0.3]))
@settings(max_examples=8)
def test_instruction_sets_and_drafts_give_the_same_bits(rule, state, split, seed, count, wild, factor):
    def of(**how):
        return outcome(rule, state, count, seed, wild=wild, split=split, factor=factor, **how)

    baseline = of(instruction_set=SETS[0])
    for instruction_set in [*SETS, ""]:
        for draft in (False, True):
            assert of(instruction_set=instruction_set, draft=draft) == baseline, (instruction_set, draft)


@rules
@reduced
@given(seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=8)
def test_cutting_the_arrays_changes_no_bit(rule, state, seed, data):
    cut = data.draw(st.lists(st.integers(0, 5000), max_size=6))
    if state == "8bit":
        cut = [at // BLOCK * BLOCK for at in cut]
    for factor in (1.0, 0.7):
        whole = outcome(rule, state, 5000, seed, factor=factor)
        for draft in (False, True):
            assert outcome(rule, state, 5000, seed, factor=factor, cut=cut, draft=draft) == whole


@reduced
@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_threads_of_the_pool_change_no_bit(state, num_threads):
    count = 300_001
    by_hand, by_pool = (make("adamw", count, 2, split_master=True, state=state) for _ in range(2))
    pool = _C.HostOptimizer(num_threads)
    for step in (1, 2, 3):
        by_hand.step(step)
        pool.submit(by_pool.job(step)).wait_passed()
    pool.close()
    assert by_hand.bits() == by_pool.bits()


@rules
@reduced
def test_seed_step_and_number_each_make_other_bits_and_master_of_the_step_is_that_of_fp32(rule, state):
    def after(step=2, seed=0, first=0):
        unit = make(rule, 4 * BLOCK, 1, state=state)
        unit.first = first
        unit.step(step, scalars=unit.scalars(2, seed=seed) if step == 2 else None)
        return unit

    base = after()
    whole = make(rule, 4 * BLOCK, 1, state=state)
    exact = Unit(rule, whole.master, whole.gradient, moments=[whole.moment(n) for n in "mv"[: MOMENTS[rule]]])
    exact.step(2)
    np.testing.assert_array_equal(base.master, exact.master)
    assert after().bits() == base.bits()
    for other in (after(seed=1), after(first=BLOCK), after(first=2**32)):
        assert other.bits() != base.bits()
        np.testing.assert_array_equal(other.master, base.master)
    scalars = [make(rule, 1).scalars(step, seed=seed).rounding for step in range(1, 50) for seed in range(20)]
    assert len(set(scalars)) == len(scalars)


@reduced
def test_random_bits_are_spread_evenly_and_know_nothing_of_each_other(state):
    """The bits for m and for v, those of neighbours, and those of one element in two steps: the mean of n uniform
    numbers has a variance of 1 / 12 n, and that of n products of two independent ones 1 / 144 n."""
    numbers = np.arange(64, dtype=np.uint64)
    keys = np.array([key_of(seed, step) for seed in range(32) for step in range(1, 65)], np.uint64)
    x = (keys[:, None] + numbers * np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF)
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & np.uint64(0xFFFFFFFF)
    assert int(x[3, 5]) == random_of(5, 0, 4)
    x = x.astype(np.uint32)
    size = {"m": 2**16, "v": 2**16} if state == "bf16" else {name: 2**cut for name, cut in CUT.items()}
    low, high = (part_of(x, state, name) / size[name] - 0.5 for name in "mv")
    for draw in (low, high):
        assert abs(draw.mean()) * np.sqrt(12 * draw.size) < SIGMAS
    pairs = [(low, high)]
    for draw in (low, high):
        pairs += [(draw[:, :-1], draw[:, 1:]), (draw[:-1], draw[1:])]
    for a, b in pairs:
        assert abs((a * b).mean()) * 12 * np.sqrt(a.size) < SIGMAS


# ---- without bias --------------------------------------------------------------------------------------------------


def z_of(stored, exact, below, gap):
    """By how many standard deviations the mean of the rounding errors is off, if each is up with the probability of
    its distance: a sum of independent errors with mean 0 and variance p (1 - p) gap^2."""
    up = (exact - below) / gap
    return float(np.sum((stored - exact) / gap) / np.sqrt(np.sum(up * (1 - up))))


def bf16_case(rng, count):
    """A quarter of the way from one bf16 to the next, at all exponents. As the first momentum buffer it is stored as it
    is."""
    below = bf16(rng.standard_normal(count, dtype=f32) * f32(10.0) ** rng.integers(-6, 6, count).astype(f32))
    exact = ((below.astype(np.uint32) << 16) | 0x4000).view(f32)
    unit = Unit("sgd_momentum", np.zeros(count, f32), exact, state="bf16")
    return unit, exact.astype(np.float64), np.abs(widened(below)).astype(np.float64)


SIGMAS = 5.0  # of a normal variable that is further out once in 1.7 million draws; seeds are fixed


def test_bf16_is_rounded_without_bias_and_nearest_would_be_seen():
    rng = np.random.default_rng(0)
    unit, exact, below = bf16_case(rng, 1 << 18)
    gap = 4 * (np.abs(exact) - below)
    unit.step(1, weight_decay=0.0)
    stored = np.abs(unit.moment("m").astype(np.float64))
    assert set(np.round((stored - below) / gap, 6)) == {0.0, 1.0}
    assert abs(z_of(stored, np.abs(exact), below, gap)) < SIGMAS
    assert abs(z_of(below, np.abs(exact), below, gap)) > 50 * SIGMAS  # nearest: a quarter is always down


@pytest.mark.parametrize("name", ["m", "v"])
def test_8bit_is_rounded_without_bias_and_nearest_would_be_seen(name):
    """Values a quarter of the way from one code to the next, in blocks whose largest is 1."""
    rng = np.random.default_rng(1)
    count = 1 << 18
    level = LEVELS[name].astype(np.float64)
    # Half of them small, where a rounding that is unbiased in the root would not be so in the value.
    low = np.where(rng.random(count) < 0.5, rng.integers(1, 8, count), rng.integers(1, level.size - 1, count))
    exact = level[low] + 0.25 * (level[low + 1] - level[low])
    exact[::BLOCK] = 1.0
    exact = exact.astype(f32)
    inside = np.arange(count) % BLOCK != 0
    if name == "m":
        unit = Unit("sgd_momentum", np.zeros(count, f32), exact, state="8bit")
        unit.step(1, weight_decay=0.0)
    else:  # beta2 = 0: the second moment becomes the square of the gradient
        unit = Unit("adam", np.zeros(count, f32), np.sqrt(exact), state="8bit")
        unit.step(1, weight_decay=0.0, beta2=0.0)
        exact = np.sqrt(exact) * np.sqrt(exact)
    stored, low, exact = (np.asarray(a)[inside] for a in (unit.moment(name), low, exact))
    assert set(np.unique(unit.arrays[name][inside].astype(int) - low)) == {0, 1}
    below, gap = level[low], level[low + 1] - level[low]
    assert abs(z_of(level[low + (stored > below + gap / 2)], exact.astype(np.float64), below, gap)) < SIGMAS
    assert abs(z_of(below, exact.astype(np.float64), below, gap)) > 50 * SIGMAS


@reduced
def test_a_second_moment_decays_where_rounding_to_nearest_would_hold_it(state):
    """beta2 = 0.999 takes a thousandth off, far less than half a step of either format; gradients are zero from now
    on. The mean over n elements has a relative standard deviation of at most sqrt(steps) gap / sqrt(n)."""
    count, steps = 1 << 14, 200
    v = np.full(count, 1e-4, f32)
    v[::BLOCK] = 1.7e-4  # a largest one, so that others are between codes
    unit = Unit("adamw", np.ones(count, f32), np.zeros(count, f32), moments=(np.zeros(count, f32), v), state=state)
    before = unit.moment("v").astype(np.float64)
    for step in range(1, steps + 1):
        unit.step(step)
    inside = np.arange(count) % BLOCK != 0
    kept = np.mean(unit.moment("v")[inside] / before[inside])
    assert abs(kept / 0.999**steps - 1) < SIGMAS * np.sqrt(steps) / 16 / np.sqrt(count)


# ---- codes and floats ----------------------------------------------------------------------------------------------


@rules
@given(seed=st.integers(0, 2**32), wild=st.booleans(), count=st.integers(1, 900))
@settings(max_examples=20)
def test_codes_come_back_from_plain_floats_as_they_were(rule, seed, wild, count):
    unit = make(rule, count, seed, wild=wild, state="8bit")
    for step in range(3):
        for name in "mv"[: MOMENTS[rule]]:
            codes, scales = encoded(unit.moment(name), name == "m")
            np.testing.assert_array_equal(codes, unit.arrays[name])
            np.testing.assert_array_equal(scales, unit.arrays[f"{name}_scales"])
        unit.step(step + 1)


def test_tiny_and_huge_blocks_come_back_too():
    """Scales from the smallest normal number to the largest; a block of denormals is one of zeros."""
    rng = np.random.default_rng(2)
    for exponent in range(-44, 39):
        values = (rng.uniform(0, 1, BLOCK) ** 8 * 10.0**exponent).astype(f32)
        for is_first in (True, False):
            codes, scales = encoded(values, is_first)
            again, scales_again = encoded(decoded(codes, scales, is_first), is_first)
            np.testing.assert_array_equal(codes, again)
            np.testing.assert_array_equal(scales, scales_again)
            largest = values.max() if values.max() >= np.finfo(f32).tiny else f32(0)
            if largest > LARGEST:
                largest = values[values <= LARGEST].max() if is_first else f32(np.inf)
            assert scales[0] == largest


def test_all_codes_of_small_first_moments_come_back():
    """Lion flushes nothing, so denormal moments count there."""
    codes = np.arange(BLOCK, dtype=np.uint8)
    codes[0x80] = 0  # that of a NaN
    for exponent in range(-126, -99):
        scale = np.array([2.0**exponent], f32)
        again, scale_again = encoded(decoded(codes, scale, True), True)
        np.testing.assert_array_equal(codes, again)
        assert scale_again == scale


def test_a_second_moment_that_is_not_zero_never_becomes_zero():
    rng = np.random.default_rng(3)
    v = (10.0 ** rng.uniform(-30, 0, 8 * BLOCK)).astype(f32)
    v[::7] = 0
    codes, _ = encoded(v, is_first=False)
    np.testing.assert_array_equal(codes > 0, v > 0)
    unit = Unit("adamw", np.zeros(v.size, f32), np.where(v > 0, f32(1e-3), f32(0)), moments=(v, v), state="8bit")
    for step in range(1, 20):
        unit.step(step)
        np.testing.assert_array_equal(unit.moment("v") > 0, v > 0)


# ---- what is not finite --------------------------------------------------------------------------------------------


@rules
@reduced
@pytest.mark.parametrize("count", [BLOCK, 3 * BLOCK + 5])
def test_a_nan_gradient_spoils_its_element_and_no_other(rule, state, count):
    clean, spoilt = (make(rule, count, 1, state=state) for _ in range(2))
    at = count - 2
    clean.gradient[at] = 0.0  # so that the block's largest is another
    spoilt.gradient[at] = np.nan
    for step in (1, 2, 3):
        for unit in (clean, spoilt):
            unit.step(step)
    others = np.arange(count) != at
    assert rule == "lion" or np.isnan(spoilt.master[at])
    assert np.isnan(spoilt.moment("m")[at])
    np.testing.assert_array_equal(spoilt.master[others], clean.master[others])
    for name in "mv"[: MOMENTS[rule]]:
        np.testing.assert_array_equal(spoilt.moment(name)[others], clean.moment(name)[others])


@pytest.mark.parametrize("rule", ["adamw", "adam", "sgd_momentum"])
@reduced
def test_a_nan_moment_shows_in_the_working_copy_of_its_element(rule, state):
    m = np.ones(BLOCK, f32)
    m[3] = np.nan
    moments = (m, np.ones(BLOCK, f32))[: MOMENTS[rule]]
    unit = Unit(rule, np.ones(BLOCK, f32), np.ones(BLOCK, f32), moments=moments, split_master=True, state=state)
    unit.step(2)
    np.testing.assert_array_equal(np.isnan(widened(unit.arrays["working"])), np.isnan(m))


def test_an_overflowed_second_moment_stops_its_block_of_codes_and_its_element_in_bf16():
    for state, stopped in (("bf16", slice(3, 4)), ("8bit", slice(0, BLOCK))):
        unit = make("adamw", 2 * BLOCK, 1, state=state)
        unit.gradient[3] = 1e25
        unit.step(1)
        unit.gradient[3] = 1.0
        before = unit.master.copy()
        for step in (2, 3):
            unit.step(step, weight_decay=0.0)
        moves = unit.master != before
        expected = np.ones(2 * BLOCK, bool)
        expected[stopped] = False
        np.testing.assert_array_equal(moves, expected)
        assert np.isfinite(unit.master).all()


def test_any_floats_at_all_give_codes_that_stand_for_floats():
    values = any_floats(np.random.default_rng(5), 64 * BLOCK)
    for is_first in (True, False):
        codes, scales = encoded(values if is_first else np.abs(values), is_first)
        np.testing.assert_array_equal(
            np.isnan(decoded(codes, scales, is_first)), is_first & ~(np.abs(values) <= LARGEST)
        )


# ---- accounts and misuse -------------------------------------------------------------------------------------------


def test_bytes_are_those_that_are_read_and_written():
    def per_element(rule, state, split=True, count=1 << 12):
        return make(rule, count, state=state, split_master=split).job().bytes / count

    assert [per_element("adamw", state) for state in ("fp32", "bf16", "8bit")] == [26, 18, 14 + 16 / BLOCK]
    assert [per_element("lion", state, split=False) for state in ("fp32", "bf16", "8bit")] == [20, 16, 14 + 8 / BLOCK]
    assert make("adamw", 3, state="8bit").job().bytes == 3 * (12 + 4) + 16


def test_a_piece_that_cuts_a_block_of_codes_is_refused():
    unit = make("adamw", 1000, state="8bit")
    with pytest.raises(_C.InvariantError, match="cuts a block"):
        unit.job(cut=[100]).run()
    unit.state = "9bit"
    with pytest.raises(_C.UsageError, match=r'found "9bit"\. Remedy: use one of fp32, bf16, 8bit'):
        unit.job()


def test_every_rule_that_keeps_moments_is_tried():
    assert set(KEEPING) == {rule for rule in HYPER if rule != "sgd"}
