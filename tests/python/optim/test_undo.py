"""The undo of a draft restores every bit of any values; and what it takes fits into the log."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from noria import _C

from tests.python.optim.units import HYPER, MOMENTS, RULES, SETS, STATES, Unit, make
from tests.roomy_logs import PLANNED_SLOTS

KINDS = [(rule, state) for rule in RULES for state in STATES if MOMENTS[rule] or state == "fp32"]


def undone(unit: Unit, step: int = 3, **job) -> tuple[int, int]:
    """Drafts and undoes, with room in the log for all, and with the room that is planned. Returns for the latter how
    many slots the log used, and how many blocks had no room."""
    before = unit.bits()
    for slots in (4 * unit.count, None):
        draft = unit.drafting(unit.job(step, **job), job.get("cut", ()), slots)
        draft.run()
        counts = draft.log_counts
        assert slots is None or counts[1] == 0
        draft.undoing().run()
        assert unit.bits() == before
    return counts


def pairs_of(patterns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of these bits, as floats."""
    first, second = np.meshgrid(patterns, patterns)
    return first.astype(np.uint32).ravel().view(np.float32), second.astype(np.uint32).ravel().view(np.float32)


def exponents(mantissa: int, sign: int = 0) -> np.ndarray:
    """One float of each exponent: zero or denormal, all normal ones, infinite or NaN."""
    return (np.arange(256, dtype=np.uint32) << 23) | np.uint32(mantissa | sign << 31)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("rule", "state"), KINDS)
@given(seed=st.integers(0, 2**32 - 1), wild=st.booleans(), factor=st.sampled_from([1.0, -1.0, 0.37, 0.0]))
def test_every_bit_comes_back(rule, state, split, seed, wild, factor):
    unit = make(rule, 3000, seed, wild=wild, split_master=split, state=state)
    for step in (1, 2, 30):
        undone(unit, step, factor=factor)
        unit.step(step, factor=factor)


@pytest.mark.parametrize("mantissas", [(0, 0), (1, 0x7FFFFF), (0x400000, 0x155555)])
@pytest.mark.parametrize("signs", [(0, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("rule", [rule for rule in RULES if MOMENTS[rule]])
def test_all_pairs_of_exponents_of_moment_and_gradient_come_back(rule, signs, mantissas):
    patterns = np.concatenate([exponents(mantissa, sign) for mantissa, sign in zip(mantissas, signs, strict=True)])
    m, g = pairs_of(patterns)
    p = np.resize(np.linspace(-2, 2, 1001, dtype=np.float32), m.size)
    moments = (m, np.abs(m))[: MOMENTS[rule]]
    undone(Unit(rule, p, g, moments=moments))


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_all_pairs_of_exponents_of_weight_and_gradient_come_back(rule, sign):
    p, g = pairs_of(np.concatenate([exponents(0x2AAAAA), exponents(0x7FFFFF, sign)]))
    zeros = np.zeros_like(p)
    undone(Unit(rule, p, g, moments=(zeros, zeros)[: MOMENTS[rule]]))


@pytest.mark.parametrize("rule", ["adamw", "adam", "sgd_momentum", "lion"])
def test_moments_that_cancel_come_back(rule):
    """m' is near zero because m and g nearly cancel each other: the worst case for the estimate of m."""
    rng = np.random.default_rng(1)
    m = rng.standard_normal(65_536).astype(np.float32) * np.float32(1e-3)
    near = (1 + rng.integers(-4, 5, m.size).astype(np.float32) * np.float32(2**-23)).astype(np.float32)
    share = np.float32({"sgd_momentum": -1.0, "lion": -99.0}.get(rule, -9.0))
    undone(Unit(rule, m * 10, m * share * near, moments=(m, m * m)[: MOMENTS[rule]]))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("rule", "state"), KINDS)
def test_a_log_has_the_same_bits_from_every_instruction_set(rule, state, split):
    logs = []
    for name in SETS:
        unit = make(rule, 5000, 3, split_master=split, state=state)
        unit.drafting(unit.job(3)).run(name)
        logs.append((unit.bits(), unit.log.tobytes()))
    assert all(log == logs[0] for log in logs)


@pytest.mark.parametrize(("rule", "state"), KINDS)
def test_in_steady_training_nothing_is_left_out(rule, state):
    rng = np.random.default_rng(5)
    unit = make(rule, 65_536, 5, state=state)
    scale = np.exp(rng.standard_normal(unit.count)).astype(np.float32) * np.float32(1e-3)
    hyper = {"beta2": 0.95} if rule == "adamw" else {}
    for step in range(1, 41):
        unit.gradient[:] = rng.standard_normal(unit.count, dtype=np.float32) * scale
        if step == 40:
            used, left = undone(unit, step, **hyper)
            assert left == 0 and used < unit.count / 32
            assert not MOMENTS[rule] or used > 0
        unit.step(step, **hyper)


def test_a_log_that_is_full_leaves_blocks_as_they_are():
    """A second moment that jumps by many orders of magnitude has no estimate."""
    unit = make("adamw", 50_000, 1)
    unit.arrays["v"][:] = np.float32(1e-20)
    before = unit.arrays["master"].copy()
    draft = unit.drafting(unit.job(3))
    draft.run()
    used, left = draft.log_counts
    assert 0 < left < _C.num_undo_blocks(unit.count) and used <= unit.count // 32
    moved = (unit.arrays["master"] != before).reshape(-1)[: 48 * 1024].reshape(48, 1024).any(axis=1)
    assert 0 < moved.sum() < 48, "a block is updated as a whole or not at all"


def test_a_wrong_log_shows():
    """The control: the log decides, and not the estimate alone."""
    unit = make("adamw", 5000, 2)
    before = unit.bits()
    draft = unit.drafting(unit.job(3))
    draft.run()
    unit.log[64 + 64 : 64 + 64 + 5000 : 7] ^= 1  # behind the header and the begins of five blocks
    draft.undoing().run()
    assert unit.bits() != before


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("rule", "state"), KINDS)
def test_a_draft_that_is_as_asked_has_the_bits_of_the_update_that_was_asked_for(rule, state, split):
    def unit():
        return make(rule, 10_000, 4, split_master=split, state=state)

    for changed in ({}, {"factor": 0.25}, {"lr": HYPER[rule]["lr"] * 2}, {"divisor": 4.0}):
        drafted, twin = unit(), unit()
        draft = drafted.drafting(drafted.job(3))
        draft.run()
        drafted.job(3, **changed).redoing(draft).run()
        twin.step(3, **changed)
        assert drafted.bits() == twin.bits() != unit().bits()


def test_a_log_takes_an_eighth_more_than_a_byte_for_each_element():
    count = 1 << 24
    slots = int(count * PLANNED_SLOTS)
    assert 1.12 < _C.undo_log_bytes(count, _C.num_undo_blocks(count), slots) / count < 1.13
