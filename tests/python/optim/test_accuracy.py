"""Each fused rule is at least as close to the exact result as torch's own code, element by element.

The bar: root mean square error at most 1.0 times, largest error at most 1.5 times that of torch on the same inputs
(fused=True where torch has it, noria.optim.Lion in plain PyTorch for Lion), both against fp64. Seeded mistakes must not
pass it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import noria
import numpy as np
import pytest
import torch

from tests.python.optim.units import HYPER, MOMENTS, RULES, Unit

COUNT = 1 << 18
NUM_GRADIENTS = 8  # step s reads gradient s % 8


@dataclass
class Inputs:
    start: np.ndarray
    gradients: list[np.ndarray]

    def of_step(self, step):
        return self.gradients[step % len(self.gradients)]


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(20)
    scale = (10.0 ** rng.uniform(-6, -1, COUNT)).astype(np.float32)
    return Inputs(
        start=rng.standard_normal(COUNT, dtype=np.float32) * np.float32(0.02),
        gradients=[rng.standard_normal(COUNT, dtype=np.float32) * scale for _ in range(NUM_GRADIENTS)],
    )


# ---- the exact result, as the papers and torch's documentation write it --------------------------------------------

Array = Any


def adam_step(p: Array, m: Array, v: Array, g: Array, step: int, h: dict[str, Any], wrong: str) -> None:
    m += (1 - h["beta1"]) * (g - m)
    v += (1 - h["beta2"]) * (g * g - v)
    late = step + (wrong == "step off by one")
    corrected = v / (1 - h["beta2"] ** late)
    root = np.sqrt(corrected + h["eps"]) if wrong == "eps inside root" else np.sqrt(corrected) + h["eps"]
    p -= h["lr"] / (1 - h["beta1"] ** late) * m / root


def exact_adamw(p: Array, m: Array, v: Array, g: Array, step: int, h: dict[str, Any], wrong: str) -> None:
    if wrong == "decay in the gradient":
        g = g + h["weight_decay"] * p
    elif wrong != "no decay":
        p *= 1 - h["lr"] * h["weight_decay"]
    adam_step(p, m, v, g, step, h, wrong)


def exact_adam(p: Array, m: Array, v: Array, g: Array, step: int, h: dict[str, Any], wrong: str) -> None:
    if wrong == "decay beside the gradient":
        p *= 1 - h["lr"] * h["weight_decay"]
    elif wrong != "no decay":
        g = g + h["weight_decay"] * p
    adam_step(p, m, v, g, step, h, wrong)


def exact_sgd(p: Array, m: Array, v: Array, g: Array, step: int, h: dict[str, Any], wrong: str) -> None:
    momentum, dampening = h.get("momentum", 0.0), h.get("dampening", 0.0)
    if wrong == "decay beside the gradient":
        p *= 1 - h["lr"] * 2 * h["weight_decay"]
    elif wrong != "no decay":
        g = g + h["weight_decay"] * p
    direction = g
    if momentum:
        damped = g if wrong == "no dampening" else (1 - dampening) * g
        first = step == 1 and wrong != "dampened first gradient"
        m[:] = g if first else momentum * m + damped
        ahead = h.get("nesterov", False) != (wrong == "nesterov the other way round")
        direction = g + momentum * m if ahead else m
    p -= h["lr"] * direction


def exact_lion(p: Array, m: Array, v: Array, g: Array, step: int, h: dict[str, Any], wrong: str) -> None:
    beta1, beta2 = (h["beta2"], h["beta1"]) if wrong == "betas swapped" else (h["beta1"], h["beta2"])
    before = m.copy()
    m += (1 - beta2) * (g - m)
    direction = np.sign(beta1 * (m if wrong == "moment first" else before) + (1 - beta1) * g)
    if wrong == "decay in the gradient":
        direction = np.sign(beta1 * before + (1 - beta1) * (g + h["weight_decay"] * p))
    elif wrong != "no decay":
        p *= 1 - h["lr"] * h["weight_decay"]
    p -= h["lr"] * direction


EXACT = {
    "adamw": exact_adamw,
    "adam": exact_adam,
    "sgd": exact_sgd,
    "sgd_momentum": exact_sgd,
    "lion": exact_lion,
}


def exact(rule, inputs, hyper, snapshots, wrong=""):
    """In blocks, so that a block stays in the cache for all of its steps."""
    results = {step: np.empty(inputs.start.size) for step in snapshots}
    sign = -1.0 if hyper.get("maximize") else 1.0
    for begin in range(0, inputs.start.size, 1 << 13):
        block = slice(begin, begin + (1 << 13))
        p = inputs.start[block].astype(np.float64)
        m, v = np.zeros_like(p), np.zeros_like(p)
        gradients = [sign * g[block].astype(np.float64) for g in inputs.gradients]
        for step in range(1, max(snapshots) + 1):
            EXACT[rule](p, m, v, gradients[step % len(gradients)], step, hyper, wrong)
            if step in results:
                results[step][block] = p
    return results


# ---- the two contestants -------------------------------------------------------------------------------------------


def torch_optimizer(rule, p, hyper):
    options = {key: value for key, value in hyper.items() if not key.startswith("beta")}
    if "beta1" in hyper:
        options["betas"] = (hyper["beta1"], hyper["beta2"])
    if rule == "lion":
        return noria.optim.Lion([p], **options)
    made = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}.get(rule, torch.optim.SGD)
    return made([p], **options, fused=True)


def by_torch(rule, inputs, hyper, snapshots):
    p = torch.nn.Parameter(torch.from_numpy(inputs.start.copy()))
    optimizer = torch_optimizer(rule, p, hyper)
    results = {}
    for step in range(1, max(snapshots) + 1):
        p.grad = torch.from_numpy(inputs.of_step(step).copy())
        optimizer.step()
        if step in snapshots:
            results[step] = p.detach().numpy().copy()
    return results


def by_noria(rule, inputs, hyper, snapshots, scalars_of=None):
    unit = Unit(rule, inputs.start, inputs.gradients[0])
    results = {}
    for step in range(1, max(snapshots) + 1):
        unit.gradient = inputs.of_step(step)
        unit.step(step, scalars=scalars_of(unit, step) if scalars_of else unit.scalars(step, hyper))
        if step in snapshots:
            results[step] = unit.master.copy()
    return results


def errors(result, reference):
    error = np.abs(result.astype(np.float64) - reference)
    return float(np.sqrt(np.mean(error**2))), float(error.max())


def meets_the_bar(result, rival, reference):
    """NaN meets nothing: a comparison with it is false."""
    (rms, largest), (rival_rms, rival_largest) = errors(result, reference), errors(rival, reference)
    return rms <= 1.0 * rival_rms and largest <= 1.5 * rival_largest


# ---- the bar -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_every_element_is_as_close_to_fp64_as_torch_after_10_and_200_steps(inputs, rule):
    hyper, steps = HYPER[rule], (10, 200)
    reference, rival = exact(rule, inputs, hyper, steps), by_torch(rule, inputs, hyper, steps)
    ours = by_noria(rule, inputs, hyper, steps)
    for step in steps:
        assert meets_the_bar(ours[step], rival[step], reference[step]), (
            errors(ours[step], reference[step]),
            errors(rival[step], reference[step]),
        )
        assert np.mean(ours[step] != inputs.start) > 0.99  # something moved


OTHERS = {
    "adamw": [
        {"beta2": 0.95, "weight_decay": 0.1},
        {"beta1": 0.0},
        {"beta1": 0.3, "beta2": 0.9, "lr": 1e-2},
        {"eps": 1e-15, "lr": 1e-4, "weight_decay": 0.5},
        {"maximize": True},
    ],
    "adam": [{"beta2": 0.95, "weight_decay": 0.1}, {"weight_decay": 0.0}, {"eps": 1e-15, "lr": 1e-2}],
    "sgd": [{"weight_decay": 0.0}, {"lr": 1e-3, "weight_decay": 0.5}, {"maximize": True}],
    "sgd_momentum": [
        {"nesterov": True, "dampening": 0.0},
        {"dampening": 0.0, "weight_decay": 0.0},
        {"momentum": 0.5, "dampening": 0.9},
        {"momentum": 0.99, "dampening": 0.0, "maximize": True, "lr": 1e-2},
    ],
    "lion": [{"weight_decay": 0.0}, {"beta1": 0.95, "beta2": 0.98, "lr": 3e-5}, {"maximize": True}],
}


@pytest.mark.parametrize(("rule", "changed"), [(rule, changed) for rule in RULES for changed in OTHERS[rule]], ids=str)
def test_bar_holds_for_other_hyperparameters(inputs, rule, changed):
    hyper = {**HYPER[rule], **changed}
    reference, rival = exact(rule, inputs, hyper, (10,))[10], by_torch(rule, inputs, hyper, (10,))[10]
    ours = by_noria(rule, inputs, hyper, (10,))[10]
    assert meets_the_bar(ours, rival, reference), (errors(ours, reference), errors(rival, reference))


# ---- what it must reject -------------------------------------------------------------------------------------------

_TEN: dict[str, Any] = {}


def ten_steps(rule, inputs):
    if rule not in _TEN:
        _TEN[rule] = exact(rule, inputs, HYPER[rule], (10,))[10], by_torch(rule, inputs, HYPER[rule], (10,))[10]
    return _TEN[rule]


def powers_in_float(unit, step):
    h, scalars = HYPER[unit.rule], unit.scalars(step)
    power1 = power2 = np.float32(1)
    for _ in range(step):
        power1, power2 = power1 * np.float32(h["beta1"]), power2 * np.float32(h["beta2"])
    scalars.negative_step = float(-np.float32(h["lr"]) / (np.float32(1) - power1))
    scalars.inverse_bias2_root = float(np.float32(1) / np.sqrt(np.float32(1) - power2))
    return scalars


def changed(**options):
    return lambda unit, step: unit.scalars(step, **options)


SCALARS = {
    "adamw": {
        "step off by one": lambda unit, step: unit.scalars(step + 1),
        "beta powers in float": powers_in_float,
        "no decay": changed(weight_decay=0.0),
        "eps 1.1e-8": changed(eps=1.1e-8),
        "beta2 0.9991": changed(beta2=0.9991),
        "maximize": changed(maximize=True),
        "factor 1.001": changed(factor=1.001),
    },
    "adam": {"eps 1.1e-8": changed(eps=1.1e-8), "no decay": changed(weight_decay=0.0)},
    "sgd": {"lr 0.1001": changed(lr=0.1001), "no decay": changed(weight_decay=0.0), "maximize": changed(maximize=True)},
    "sgd_momentum": {
        "momentum 0.9001": changed(momentum=0.9001),
        "no dampening": changed(dampening=0.0),
        "first twice": lambda unit, step: unit.scalars(max(1, step - 1)),
        "nesterov": changed(nesterov=True),
    },
    "lion": {
        "beta1 0.91": changed(beta1=0.91),
        "beta2 0.999": changed(beta2=0.999),
        "maximize": changed(maximize=True),
    },
}


@pytest.mark.parametrize(("rule", "mistake"), [(rule, mistake) for rule in RULES for mistake in SCALARS[rule]])
def test_bar_rejects_wrong_scalars(inputs, rule, mistake):
    reference, rival = ten_steps(rule, inputs)
    wrong = by_noria(rule, inputs, HYPER[rule], (10,), SCALARS[rule][mistake])[10]
    assert not meets_the_bar(wrong, rival, reference)


FORMULAS = {
    "adamw": ["eps inside root", "decay in the gradient", "no decay", "step off by one"],
    "adam": ["eps inside root", "decay beside the gradient", "no decay"],
    "sgd": ["decay beside the gradient", "no decay"],
    "sgd_momentum": ["no dampening", "dampened first gradient", "nesterov the other way round", "no decay"],
    "lion": ["betas swapped", "moment first", "decay in the gradient", "no decay"],
}


@pytest.mark.parametrize(("rule", "mistake"), [(rule, mistake) for rule in RULES for mistake in FORMULAS[rule]])
def test_bar_rejects_wrong_formulas_even_in_fp64(inputs, rule, mistake):
    reference, rival = ten_steps(rule, inputs)
    assert not meets_the_bar(exact(rule, inputs, HYPER[rule], (10,), mistake)[10], rival, reference)


@pytest.mark.parametrize("rule", RULES)
def test_bar_rejects_doing_nothing_and_accepts_what_is_exact(inputs, rule):
    reference, rival = ten_steps(rule, inputs)
    assert not meets_the_bar(inputs.start, rival, reference)
    assert meets_the_bar(reference.astype(np.float32), rival, reference)


# ---- nasty inputs --------------------------------------------------------------------------------------------------

NASTY = {
    "zeros": [0.0, -0.0],
    "denormals": [1e-40, -3e-39, 1.4e-45],
    "squares underflow": [1e-20, -1e-23],
    "products underflow": [1e-30, -1e-37],
    "huge": [1e10, -3e17],
}


# Where moments are tiny, Adam's decay multiplies p by lr * weight_decay / eps each step, and its error with it: less
# than one here.
NASTY_HYPER = HYPER | {"adam": HYPER["adam"] | {"weight_decay": 1e-6}}


def allowance(rule, steps, largest_p):
    """What is allowed on top, derived. Flushing: each step, less than the smallest normal number is lost of the
    gradient, and of the moment; the moment keeps at most what all steps lost; and p moves by that share. Lion is not
    flushed, but fp32 denormals are coarse, and each sign that they get wrong is a whole step: both lose the same ones,
    and differ in how p is rounded."""
    h, tiny = NASTY_HYPER[rule], float(np.finfo(np.float32).tiny)
    if rule == "lion":
        return steps * largest_p * 2.0**-24
    lost_of_moment = (steps + 1) * tiny
    per_moment = h["lr"] / (1 - h["beta1"]) / h["eps"] if "eps" in h else h["lr"] * (1 + h.get("momentum", 0.0))
    return steps * (per_moment * lost_of_moment + tiny)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", NASTY)
@pytest.mark.parametrize("start", [0.0, 1.0, -1e-3, 1e-38, 1e30])
def test_bar_holds_for_nasty_gradients(rule, kind, start):
    """Each element takes its own path: a mean over equal ones would be a throw of the dice. Where gradients move
    little, both sides show nothing but how p was rounded, as often in each: the rms over n elements then varies by
    1 / sqrt(2 n); three times that is allowed."""
    rng = np.random.default_rng(4)
    count = 16384

    def near(values):
        return (values * rng.uniform(0.9, 1.1, count)).astype(np.float32)

    gradients = [near(rng.choice(np.array(NASTY[kind]), count)) for _ in range(NUM_GRADIENTS)]
    inputs, hyper = Inputs(near(start), gradients), NASTY_HYPER[rule]
    reference, rival = exact(rule, inputs, hyper, (10,))[10], by_torch(rule, inputs, hyper, (10,))[10]
    ours = by_noria(rule, inputs, hyper, (10,))[10]
    (rms, largest), (rival_rms, rival_largest) = errors(ours, reference), errors(rival, reference)
    allowed = allowance(rule, 10, float(np.abs(reference).max()))
    assert rms <= (1 + 3 / (2 * count) ** 0.5) * rival_rms + allowed
    assert largest <= 1.5 * rival_largest + allowed


@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_finite_is_so_as_in_torch(rule):
    """Overflowing squares, infinities and NaN, in gradients and parameters (a mask of -inf stays one)."""
    starts = [0.0, 1.0, -np.inf, np.inf, np.nan, 3e38]
    grads = [0.0, 1.0, 1e25, -3e38, np.inf, -np.inf, np.nan]
    pairs = np.array([(p, g) for p in starts for g in grads], np.float32)
    inputs = Inputs(pairs[:, 0].copy(), [pairs[:, 1].copy(), np.zeros(len(pairs), np.float32)])
    nesterov = [{"nesterov": True, "dampening": 0.0}] if rule == "sgd_momentum" else []
    for other in [{}, {"weight_decay": 0.0}, *nesterov]:
        hyper = {**HYPER[rule], **other}
        ours, rival = by_noria(rule, inputs, hyper, (3,))[3], by_torch(rule, inputs, hyper, (3,))[3]
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(rival))
        np.testing.assert_array_equal(np.where(np.isinf(ours), ours, 0), np.where(np.isinf(rival), rival, 0))


def test_every_rule_has_its_moments():
    assert set(MOMENTS) == set(EXACT) == set(SCALARS) == set(FORMULAS) == set(OTHERS)
