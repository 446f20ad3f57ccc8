"""Adafactor's fused update: as exact as torch's, the same bits in any instruction set and on any threads.

Kernel and torch.optim.Adafactor take the steps of test_accuracy.py. An error is the distance from a reference in fp64.
noria's root mean square error must be at most torch's. Its largest error must be at most 1.5 times torch's largest.
Seeded mistakes must not pass.
"""

from __future__ import annotations

import math

import noria
import numpy as np
import pytest
import torch
from noria import _C
from noria.model.layout import factored_shapes

HYPER = {"lr": 1e-2, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.1}
SHAPES = {
    "matrix": (300, 700),
    "one row": (1, 5000),
    "one column": (5000, 1),
    "tall": (9000, 12),
    "wide": (6, 4500),
    "convolution": (24, 16, 3, 3),
    "vector": (5000,),
    "number": (),
}
NUM_STEPS = 6


def split(values):
    working, low = np.empty(values.shape, np.uint16), np.empty(values.shape, np.uint16)
    _C.split_master(values.ctypes.data, working.ctypes.data, low.ctypes.data, values.size)
    return working, low


class Updated:
    """A parameter with the state that noria's kernel updates."""

    def __init__(self, start, is_split=False):
        self.shape, self.is_split = start.shape, is_split
        self.master = start.copy()
        self.working, self.low = split(start) if is_split else (None, None)
        self.state = {key: np.zeros(shape, np.float32) for key, shape in factored_shapes(start.shape).items()}

    def arrays(self):
        if self.is_split:
            return _C.UnitArrays(working=self.working.ctypes.data, low=self.low.ctypes.data)
        return _C.UnitArrays(master=self.master.ctypes.data)

    def job(self, gradient, step, hyper, factor=1.0):
        """`gradient` is kept by the caller: floats, or bf16 as uint16 for a split master."""
        count = math.prod(self.shape)
        if len(self.shape) < 2:
            factored = (1, 1, count, 0, self.state["variance"].ctypes.data)
        else:
            by_row, by_column = (self.state[key].ctypes.data for key in ("row_var", "col_var"))
            factored = (math.prod(self.shape[:-2]), *self.shape[-2:], by_row, by_column)
        rule = noria.model.update_rules.rule_of(torch.optim.Adafactor, hyper)
        piece = (0, count, rule.scalars(hyper, step, factor))
        return _C.UpdateJob("adafactor", [piece], self.arrays(), gradient=gradient.ctypes.data, factored=[factored])

    def value(self):
        if not self.is_split:
            return self.master
        high, low = self.working.astype(np.uint32) << 16, self.low.astype(np.int16).astype(np.int32).astype(np.uint32)
        return (high + low).view(np.float32)


def inputs_of(shape, seed=0):
    """A parameter, and gradients whose rows and columns have sizes of their own."""
    rng = np.random.default_rng(seed)
    start = np.array(rng.standard_normal(shape) * 0.02, np.float32)
    sizes = 1.0
    for axis in range(len(shape)):
        of_axis = 10.0 ** rng.uniform(-3, 0, shape[axis])
        sizes = sizes * of_axis.reshape([-1 if other == axis else 1 for other in range(len(shape))])
    # They grow from step to step, so that updates are clipped.
    gradients = [np.array(rng.standard_normal(shape) * sizes * 2.0**step, np.float32) for step in range(NUM_STEPS)]
    return start, gradients


def exact(start, gradients, hyper, wrong=""):
    """Shazeer and Stern 2018, algorithms 4 and 5, with the limits of torch.optim.Adafactor. Also returns the state."""
    p = start.astype(np.float64)
    state = {key: np.zeros(shape) for key, shape in factored_shapes(start.shape).items()}
    least = 2.0**-23 if hyper["eps"][0] is None else hyper["eps"][0]
    for number, gradient in enumerate(gradients):
        step, g = number + 1, gradient.astype(np.float64)
        g = -g if hyper.get("maximize") else g
        share = (step + (wrong == "step off by one")) ** hyper["beta2_decay"]
        rms = np.sqrt(np.mean(p**2))
        alpha = max(hyper["eps"][1], 1.0 if wrong == "absolute step" else rms) * min(hyper["lr"], step**-0.5)
        if wrong != "no decay":
            p = p * (1 - hyper["lr"] * hyper["weight_decay"])
        if g.ndim > 1:
            state["row_var"] += share * (np.mean(g * g, axis=-1, keepdims=True) - state["row_var"])
            state["col_var"] += share * (np.mean(g * g, axis=-2, keepdims=True) - state["col_var"])
            mean = np.mean(state["row_var"], axis=-2, keepdims=True)
            if wrong != "mean without a limit":
                mean = np.maximum(mean, least)
            estimate = state["row_var"] * state["col_var"] / mean
        else:
            state["variance"] += share * (g * g - state["variance"])
            estimate = state["variance"]
        update = g / np.sqrt(np.maximum(estimate, least * least))
        clipped = 1.0 if wrong == "no clip" else max(1.0, np.sqrt(np.mean(update**2)) / hyper["d"])
        p = p - alpha / clipped * update
    return p, state


def by_torch(start, gradients, hyper):
    p = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.Adafactor([p], **hyper)
    for gradient in gradients:
        p.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    return p.detach().numpy(), {key: value.numpy() for key, value in optimizer.state[p].items() if key != "step"}


def by_noria(start, gradients, hyper, instruction_set="", factor=1.0):
    side = Updated(start)
    for number, gradient in enumerate(gradients):
        side.job(gradient, number + 1, {**hyper, "maximize": hyper.get("maximize", False)}, factor).run(instruction_set)
    return side


def errors(result, reference):
    error = np.abs(result.astype(np.float64) - reference)
    return float(np.sqrt(np.mean(error**2))), float(error.max())


def meets_the_bar(result, rival, reference, by_chance=0.0):
    """NaN meets nothing: a comparison with it is false."""
    (rms, largest), (rival_rms, rival_largest) = errors(result, reference), errors(rival, reference)
    return rms <= (1.0 + by_chance) * rival_rms and largest <= 1.5 * rival_largest


def relative(result, reference):
    return result.astype(np.float64) / reference


OTHERS = [
    {"weight_decay": 0.0, "lr": 1e-3},
    {"beta2_decay": -0.5, "d": 2.0},
    {"eps": (1e-30, 0.1)},
    {"eps": (1e-3, 1e-3)},  # as limits that bite
    {"maximize": True, "lr": 1.0},
]


@pytest.mark.parametrize(
    ("changed", "num_steps"), [({}, 10), ({}, 200), *((changed, 10) for changed in OTHERS)], ids=str
)
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if math.prod(shape) > 1000])
def test_every_element_is_as_close_to_fp64_as_torch_after_10_and_200_steps(name, changed, num_steps):
    """Without decay, both sides show nothing but how p was rounded: the rms over n elements then varies by
    1 / sqrt(2 n), and three times that is allowed, as in test_accuracy.py."""
    start, few = inputs_of(SHAPES[name])
    gradients = [few[number % len(few)] for number in range(num_steps)]
    hyper = {**HYPER, **changed}
    (reference, state), (rival, its_state) = exact(start, gradients, hyper), by_torch(start, gradients, hyper)
    ours = by_noria(start, gradients, hyper)
    by_chance = 0.0 if hyper["weight_decay"] else 3 / (2 * start.size) ** 0.5
    assert meets_the_bar(ours.master, rival, reference, by_chance), (
        errors(ours.master, reference),
        errors(rival, reference),
    )
    assert np.mean(ours.master != start) > 0.99
    assert its_state.keys() == ours.state.keys()
    for key, value in state.items():
        found, its = (errors(relative(each[key], value), np.ones(value.shape)) for each in (ours.state, its_state))
        assert found[1] <= max(1.5 * its[1], num_steps * 2.0**-24), (key, found, its)


@pytest.mark.parametrize("name", ["vector", "matrix"])
@pytest.mark.parametrize("scale", [0.0, 1e-22, 1e-9])
def test_bar_holds_for_tiny_gradients(name, scale):
    start, gradients = inputs_of(SHAPES[name])
    small = [gradient * np.float32(scale) for gradient in gradients]
    ours, rival = by_noria(start, small, HYPER).master, by_torch(start, small, HYPER)[0]
    assert meets_the_bar(ours, rival, exact(start, small, HYPER)[0], 3 / (2 * start.size) ** 0.5)


def test_a_number_moves_as_in_torch():
    start, gradients = inputs_of(SHAPES["number"])
    ours, rival = by_noria(start, gradients, HYPER).master, by_torch(start, gradients, HYPER)[0]
    assert start != ours
    np.testing.assert_allclose(ours, rival, rtol=4 * NUM_STEPS * 2.0**-24)


@pytest.mark.parametrize("name", ["vector", "matrix"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_is_so_as_in_torch(name, value):
    start, gradients = inputs_of(SHAPES[name])
    gradients[1].flat[17] = value
    ours, rival = by_noria(start, gradients, HYPER).master, by_torch(start, gradients, HYPER)[0]
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(rival))
    np.testing.assert_array_equal(np.isinf(ours), np.isinf(rival))


MISTAKES = ["step off by one", "absolute step", "no decay", "no clip"]


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", ["matrix", "vector"])
def test_bar_rejects_wrong_formulas_even_in_fp64(name, mistake):
    start, gradients = inputs_of(SHAPES[name])
    (reference, _), (rival, _) = exact(start, gradients, HYPER), by_torch(start, gradients, HYPER)
    assert not meets_the_bar(exact(start, gradients, HYPER, mistake)[0], rival, reference)
    assert not meets_the_bar(start, rival, reference)
    assert meets_the_bar(reference.astype(np.float32), rival, reference)


def test_bar_rejects_a_mean_without_its_limit():
    start, gradients = inputs_of(SHAPES["matrix"])
    small = [gradient * np.float32(1e-4) for gradient in gradients]
    (reference, _), (rival, _) = exact(start, small, HYPER), by_torch(start, small, HYPER)
    assert not meets_the_bar(exact(start, small, HYPER, "mean without a limit")[0], rival, reference)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_bits_are_the_same_in_every_instruction_set_and_on_any_number_of_threads(name, is_split):
    start, gradients = inputs_of(SHAPES[name])
    if is_split:
        start = start.reshape(SHAPES[name])
        gradients = [np.ascontiguousarray(gradient.view(np.uint32) >> 16).astype(np.uint16) for gradient in gradients]
    sides = []
    for instruction_set in _C.instruction_sets():
        for factor in (1.0, 0.3):
            side = Updated(start, is_split)
            for number, gradient in enumerate(gradients):
                side.job(gradient, number + 1, HYPER, factor).run(instruction_set)
            sides.append((factor, side))
    for num_threads in (1, 2, 3):
        pool = _C.HostOptimizer(num_threads=num_threads)
        side = Updated(start, is_split)
        for number, gradient in enumerate(gradients):
            pool.submit(side.job(gradient, number + 1, HYPER))
            pool.idle()
        pool.close()
        sides.append((1.0, side))
    for factor in (1.0, 0.3):
        first, *others = [side for its, side in sides if its == factor]
        for other in others:
            assert first.value().tobytes() == other.value().tobytes()
            for key, value in first.state.items():
                assert value.tobytes() == other.state[key].tobytes()
    assert not np.array_equal(sides[0][1].value(), start)


@pytest.mark.parametrize("name", ["matrix", "vector"])
def test_split_masters_have_the_bits_of_whole_ones_on_the_same_gradients(name):
    start, gradients = inputs_of(SHAPES[name])
    cut = [np.ascontiguousarray(gradient.view(np.uint32) >> 16).astype(np.uint16) for gradient in gradients]
    wide = [(gradient.astype(np.uint32) << 16).view(np.float32) for gradient in cut]
    whole, halves = Updated(start), Updated(start, is_split=True)
    for number in range(NUM_STEPS):
        whole.job(wide[number], number + 1, HYPER).run()
        halves.job(cut[number], number + 1, HYPER).run()
    assert whole.value().tobytes() == halves.value().tobytes()


def test_pieces_of_one_job_do_not_see_each_other():
    """Two parameters in one job have the bits that each has alone."""
    shapes = (SHAPES["matrix"], SHAPES["vector"])
    inputs = [inputs_of(shape, seed) for seed, shape in enumerate(shapes)]
    alone = [by_noria(start, gradients[:1], HYPER) for start, gradients in inputs]
    counts = [math.prod(shape) for shape in shapes]
    master = np.concatenate([start.ravel() for start, _ in inputs])
    gradient = np.concatenate([gradients[0].ravel() for _, gradients in inputs])
    by_row, by_column = np.zeros(shapes[0][0], np.float32), np.zeros(shapes[0][1], np.float32)
    variance = np.zeros(counts[1], np.float32)
    scalars = noria.model.update_rules.rule_of(torch.optim.Adafactor, HYPER).scalars(HYPER, 1)
    job = _C.UpdateJob(
        "adafactor",
        [(0, counts[0], scalars), (counts[0], counts[1], scalars)],
        _C.UnitArrays(master=master.ctypes.data),
        gradient=gradient.ctypes.data,
        factored=[
            (1, *shapes[0], by_row.ctypes.data, by_column.ctypes.data),
            (1, 1, counts[1], 0, variance.ctypes.data),
        ],
    )
    job.run()
    assert master.tobytes() == b"".join(side.master.tobytes() for side in alone)
    assert variance.tobytes() == alone[1].state["variance"].tobytes()


def test_a_piece_whose_moments_are_missing_is_refused():
    start, gradients = inputs_of(SHAPES["vector"])
    scalars = noria.model.update_rules.rule_of(torch.optim.Adafactor, HYPER).scalars(HYPER, 1)
    job = _C.UpdateJob(
        "adafactor", [(0, start.size, scalars)], Updated(start).arrays(), gradient=gradients[0].ctypes.data
    )
    with pytest.raises(noria._C.InvariantError, match="knows rows and columns"):
        job.run()
