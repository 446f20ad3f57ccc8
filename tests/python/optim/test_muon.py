"""Muon's fused update: torch's matrix products between two elementwise ends, which are as exact as torch's.

An update is compared with its parts, bit by bit. The ends are compared with fp64, with the bar of test_accuracy.py:
after 10 and 200 steps the root mean square error is at most 1.0 times, the largest error at most 1.5 times that of
torch's operators. Seeded mistakes must not pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from noria import _C
from noria.model.update_rules import rule_of
from torch.optim import _muon

from tests.python.optim.test_accuracy import errors, meets_the_bar
from tests.python.optim.units import any_floats, bf16, decoded, encoded, split, widened

HYPER: dict[str, Any] = {
    "lr": 2e-2,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
}
SHAPES = {"square": (64, 64), "tall": (300, 40), "wide": (24, 700), "one row": (1, 500), "chunks": (260, 300)}
STATES = ["fp32", "bf16", "8bit"]
NUM_STEPS = 4
RULE = rule_of(torch.optim.Muon, HYPER)


def scalars_of(rule: str, hyper: dict[str, Any], step: int = 1, factor: float = 1.0) -> _C.UpdateScalars:
    return _C.update_scalars(
        rule,
        step,
        lr=hyper["lr"],
        weight_decay=hyper["weight_decay"],
        momentum=hyper["momentum"],
        nesterov=hyper["nesterov"],
        factor=factor,
        seed=3,
    )


class Matrix:
    """A parameter with its momentum."""

    def __init__(self, start: np.ndarray, is_split: bool = False, state: str = "fp32") -> None:
        self.shape, self.is_split, self.state = start.shape, is_split, state
        flat = start.ravel().copy()
        self.master = {"master": flat} if not is_split else dict(zip(("working", "low"), split(flat), strict=True))
        zeros = np.zeros(flat.size, np.float32)
        self.momentum = {"fp32": {"m": zeros}, "bf16": {"m": bf16(zeros)}}.get(state) or dict(
            zip(("m", "m_scales"), encoded(zeros, True), strict=True)
        )

    def arrays(self, **others: np.ndarray) -> _C.UnitArrays:
        arrays = {**self.master, **self.momentum, **others}
        return _C.UnitArrays(**{key: array.ctypes.data for key, array in arrays.items()}, state=self.state)

    def piece(self, scalars: _C.UpdateScalars) -> tuple[Any, ...]:
        count = self.shape[0] * self.shape[1]
        return (0, count, scalars) if self.state == "fp32" else (0, count, scalars, 0, 0)

    def job(self, gradient: np.ndarray, step: int = 1, hyper: dict[str, Any] = HYPER, factor: float = 1.0) -> Any:
        """`gradient` is kept by the caller."""
        piece = self.piece(RULE.scalars(hyper, step, factor, seed=3, ratio=RULE.ratio(hyper, self.shape)))
        shape = (1, *self.shape, 0, 0)
        return _C.UpdateJob("muon", [piece], self.arrays(), gradient=gradient.ctypes.data, factored=[shape])

    def value(self) -> np.ndarray:
        if not self.is_split:
            return self.master["master"]
        joined = np.empty(self.master["low"].size, np.float32)
        addresses = (self.master[key].ctypes.data for key in ("working", "low"))
        _C.join_master(*addresses, joined.ctypes.data, joined.size)
        return joined

    def bits(self) -> bytes:
        return b"".join(array.tobytes() for array in (*self.master.values(), *self.momentum.values()))

    def moment(self) -> np.ndarray:
        if self.state == "8bit":
            return decoded(self.momentum["m"], self.momentum["m_scales"], True)
        return widened(self.momentum["m"]) if self.state == "bf16" else self.momentum["m"]


def inputs_of(shape: tuple[int, int], is_split: bool = False, seed: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    """A parameter, and gradients: fp32, or bf16 for a split master."""
    rng = np.random.default_rng(seed)
    start = np.array(rng.standard_normal(shape) * 0.02, np.float32)
    gradients = [np.array(rng.standard_normal(shape) * 10.0**step, np.float32) for step in range(NUM_STEPS)]
    return start, [bf16(gradient) if is_split else gradient for gradient in gradients]


# ---- an update and its parts ----------------------------------------------------------------------------------------


def orthogonal(matrix: torch.Tensor, hyper: dict[str, Any]) -> torch.Tensor:
    return _muon._zeropower_via_newtonschulz(matrix, hyper["ns_coefficients"], hyper["ns_steps"], hyper["eps"])


def by_parts(side: Matrix, gradient: np.ndarray, step: int, hyper: dict[str, Any], mistake: str) -> None:
    """The momentum by one job, torch's products, the parameter by another job."""
    count = gradient.size
    towards = np.empty(2 * count, np.uint16) if side.is_split else np.empty(count, np.float32)
    into = {"working": towards[:count], "low": towards[count:]} if side.is_split else {"master": towards}
    piece = side.piece(scalars_of("muon_momentum", hyper, step))
    _C.UpdateJob("muon_momentum", [piece], side.arrays(**into), gradient=gradient.ctypes.data).run()
    dtype = torch.bfloat16 if side.is_split else torch.float32
    matrix = torch.frombuffer(towards, dtype=dtype, count=count).view(side.shape)
    made = orthogonal(matrix.clone(), {**hyper, "ns_steps": 4} if mistake == "an iteration less" else hyper)
    matrix.copy_(matrix if mistake == "no products" else made)
    shape = side.shape[::-1] if mistake == "ratio of the transposed" else side.shape
    lr = _muon._adjust_lr(hyper["lr"], hyper["adjust_lr_fn"], torch.Size(shape))
    scalars = scalars_of("muon_step", {**hyper, "lr": lr, "weight_decay": hyper["weight_decay"] * hyper["lr"] / lr})
    pieces = [(0, count, scalars)]
    arrays = _C.UnitArrays(**{key: array.ctypes.data for key, array in side.master.items()})
    _C.UpdateJob("muon_step", pieces, arrays, gradient=towards.ctypes.data).run()


def train_twice(
    name: str, is_split: bool, state: str, hyper: dict[str, Any], mistake: str = ""
) -> tuple[Matrix, Matrix]:
    start, gradients = inputs_of(SHAPES[name], is_split)
    whole, parts = Matrix(start, is_split, state), Matrix(start, is_split, state)
    for number, gradient in enumerate(gradients):
        whole.job(gradient, number + 1, hyper).run()
        by_parts(parts, gradient, number + 1, hyper, mistake)
    assert np.mean(whole.value() != start.ravel()) > 0.9
    return whole, parts


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "changed", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}], ids=str
)
def test_an_update_is_torchs_products_between_its_two_ends(name, state, is_split, changed):
    whole, parts = train_twice(name, is_split, state, {**HYPER, **changed})
    assert whole.bits() == parts.bits()


@pytest.mark.parametrize("mistake", ["an iteration less", "no products", "ratio of the transposed"])
def test_a_mistake_between_the_ends_is_seen(mistake):
    whole, parts = train_twice("tall", False, "fp32", HYPER, mistake)
    assert not np.allclose(whole.value(), parts.value(), rtol=1e-3)


# ---- the two ends against fp64 ---------------------------------------------------------------------------------------


SNAPSHOTS = (10, 200)


def of_many_sizes(shape: tuple[int, int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """A parameter, and gradients whose elements have sizes of their own; step s reads gradient s % 8."""
    rng = np.random.default_rng(20)
    scale = (10.0 ** rng.uniform(-6, -1, shape)).astype(np.float32)
    start = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
    return start, [rng.standard_normal(shape, dtype=np.float32) * scale for _ in range(8)]


@pytest.mark.parametrize("momentum", [0.95, 0.3, 0.0])
@pytest.mark.parametrize("mistake", [0.0, 1e-6])
def test_momentum_is_as_close_to_fp64_as_torchs_after_10_and_200_steps(mistake, momentum):
    """Both what is kept, and what the products are made of: by Nesterov, the next value."""
    start, gradients = of_many_sizes(SHAPES["chunks"])
    side, share = Matrix(start), 1 - momentum
    kept, theirs, towards = np.zeros(start.shape), torch.zeros(start.shape), np.empty_like(start)
    for step in range(1, max(SNAPSHOTS) + 1):
        g = gradients[step % len(gradients)]
        piece = side.piece(scalars_of("muon_momentum", {**HYPER, "momentum": momentum + mistake}, step))
        arrays = side.arrays(master=towards)
        _C.UpdateJob("muon_momentum", [piece], arrays, gradient=g.ctypes.data).run()
        kept += share * (g.astype(np.float64) - kept)
        theirs.lerp_(torch.from_numpy(g), share)
        if step in SNAPSHOTS:
            ahead, exact = torch.from_numpy(g).lerp(theirs, momentum).numpy(), g + momentum * (kept - g)
            ours = side.moment().reshape(start.shape)
            meets = meets_the_bar(ours, theirs.numpy(), kept), meets_the_bar(towards, ahead, exact)
            assert all(meets) == (not mistake)


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_step_is_as_close_to_fp64_as_torchs_after_10_and_200_steps(weight_decay, is_wrong):
    start, _ = of_many_sizes(SHAPES["chunks"])
    rng, lr = np.random.default_rng(0), 2e-2
    ours, theirs, exact = start.copy(), torch.from_numpy(start.copy()), start.astype(np.float64)
    scalars = scalars_of("muon_step", {**HYPER, "lr": lr * (1 + 1e-5 * is_wrong), "weight_decay": weight_decay})
    for step in range(1, max(SNAPSHOTS) + 1):
        u = rng.standard_normal(start.shape, dtype=np.float32)
        arrays = _C.UnitArrays(master=ours.ctypes.data)
        _C.UpdateJob("muon_step", [(0, ours.size, scalars)], arrays, gradient=u.ctypes.data).run()
        theirs.mul_(1 - lr * weight_decay).add_(torch.from_numpy(u), alpha=-lr)
        exact = exact * (1 - lr * weight_decay) - lr * u.astype(np.float64)
        if step in SNAPSHOTS:
            assert meets_the_bar(ours, theirs.numpy(), exact) == (not is_wrong)


def orthogonal_in_fp64(matrix: np.ndarray, num_steps: int) -> np.ndarray:
    """What torch's products make in bf16."""
    a, b, c = HYPER["ns_coefficients"]
    x = (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T) / np.linalg.norm(matrix)
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if x.shape == matrix.shape else x.T


@pytest.mark.parametrize("name", ["square", "wide"])
def test_whole_updates_have_no_larger_errors_than_torchs_after_10_and_200_steps(name):
    """Products in bf16 make nearly all of the error, and are the same. A momentum that rounds to bf16 the other way
    changes the rms error by 1 % at most, to either side: docs/exactness.md. An iteration less must be seen."""
    start, gradients = of_many_sizes(SHAPES[name])
    side, parameter = Matrix(start), torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.Muon([parameter], **copy.deepcopy(HYPER))
    moment, exact, wrong = np.zeros(start.shape), start.astype(np.float64), start.astype(np.float64)
    lr, momentum = HYPER["lr"], HYPER["momentum"]
    adjusted = _muon._adjust_lr(lr, HYPER["adjust_lr_fn"], torch.Size(start.shape))
    for step in range(1, max(SNAPSHOTS) + 1):
        g = gradients[step % len(gradients)]
        side.job(g, step).run()
        parameter.grad = torch.from_numpy(g.copy())
        optimizer.step()
        moment += (1 - momentum) * (g.astype(np.float64) - moment)
        ahead = g + momentum * (moment - g)
        for p, num_steps in ((exact, HYPER["ns_steps"]), (wrong, HYPER["ns_steps"] - 1)):
            p *= 1 - lr * HYPER["weight_decay"]
            p -= adjusted * orthogonal_in_fp64(ahead, num_steps)
        if step in SNAPSHOTS:
            ours, theirs = side.value().reshape(start.shape), parameter.detach().numpy()
            assert errors(ours, exact)[1] <= 1.5 * errors(theirs, exact)[1]
            assert errors(wrong, exact)[1] > 1.5 * errors(theirs, exact)[1]


def test_moments_in_fewer_bits_are_unbiased():
    """Each element keeps its mean over many seeds: the momentum of one gradient, exactly (1 - momentum) * g."""
    rng = np.random.default_rng(0)
    gradient = np.array(rng.standard_normal((16, 256)), np.float32)
    for state in ("bf16", "8bit"):
        sums = np.zeros(gradient.size)
        for seed in range(400):
            side = Matrix(np.zeros((16, 256), np.float32), state=state)
            piece = side.piece(RULE.scalars({**HYPER, "ns_steps": 0}, 1, seed=seed))
            shape = (1, 16, 256, 0, 0)
            _C.UpdateJob("muon", [piece], side.arrays(), gradient=gradient.ctypes.data, factored=[shape]).run()
            sums += side.moment()
        exact = np.float32(1 - HYPER["momentum"]) * gradient.ravel().astype(np.float64)
        gap = {"bf16": 2.0**-7 * np.abs(exact), "8bit": np.maximum(0.125 * np.abs(exact), 1e-5)}[state]
        # A value between two levels has a standard deviation of at most half of their gap.
        assert np.mean(np.abs(sums / 400 - exact) <= 5 * gap / 2 / 400**0.5) == 1.0, state


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_instruction_sets_and_threads_change_no_bit(state, is_split):
    start, gradients = inputs_of(SHAPES["chunks"], is_split)

    def trained(run: Callable[[Any], None], factor: float = 0.3) -> Matrix:
        side = Matrix(start, is_split, state)
        for number, gradient in enumerate(gradients):
            run(side.job(gradient, number + 1, factor=factor))
        return side

    first, *others = [trained(lambda job, each=each: job.run(each)) for each in _C.instruction_sets()]
    for num_threads in (1, 2, 3):
        pool = _C.HostOptimizer(num_threads=num_threads)

        def on_pool(job: Any, pool: Any = pool) -> None:
            pool.submit(job)
            pool.idle()

        others.append(trained(on_pool))
        pool.close()
    assert others
    for other in others:
        assert first.bits() == other.bits()
    assert trained(lambda job: job.run(), factor=1.0).bits() != first.bits()


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("rule", ["muon_momentum", "muon_step"])
def test_instruction_sets_agree_on_any_floats(rule, is_split):
    rng = np.random.default_rng(1)
    p, m, g = (any_floats(rng, 4099) for _ in range(3))
    found = set()
    for name in _C.instruction_sets():
        side = Matrix(p.reshape(1, -1), is_split)
        side.momentum["m"][:] = m
        arrays = side.arrays() if rule == "muon_momentum" else None
        if arrays is None:
            arrays = _C.UnitArrays(**{key: array.ctypes.data for key, array in side.master.items()})
        gradient = bf16(g) if is_split else g
        job = _C.UpdateJob(rule, [(0, g.size, scalars_of(rule, HYPER))], arrays, gradient=gradient.ctypes.data)
        job.run(name)
        nans = np.isnan(side.value())  # which NaN an operation makes is the machine's own
        found.add(np.where(nans, np.float32(7), side.value()).tobytes() + np.nan_to_num(side.momentum["m"]).tobytes())
        assert job.bytes > 0
    assert len(found) == 1


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_a_matrix_inside_of_a_unit_has_the_bits_that_it_has_alone(state, is_split):
    """Its arrays and its blocks of codes begin behind those of another one, with gaps."""
    names, first, begins = ("wide", "tall"), 24 * 700, (0, 128 * 256)
    inputs = [inputs_of(SHAPES[name], is_split, seed) for seed, name in enumerate(names)]
    both = Matrix(np.zeros((1, begins[1] + first), np.float32), is_split, state)
    gradient = np.zeros(begins[1] + first, inputs[0][1][0].dtype)
    pieces, alone = [], []
    for begin, (start, gradients) in zip(begins, inputs, strict=True):
        its = Matrix(start, is_split, state)
        for key, array in its.master.items():
            both.master[key][begin : begin + start.size] = array
        gradient[begin : begin + start.size] = gradients[0].ravel()
        its.job(gradients[0]).run()
        alone.append(its)
        scalars = RULE.scalars(HYPER, 1, seed=3, ratio=RULE.ratio(HYPER, start.shape))
        piece = (begin, start.size, scalars)
        pieces.append(piece if state == "fp32" else (*piece, 0, begin // _C.STATE_BLOCK))
    shapes = [(1, *SHAPES[name], 0, 0) for name in names]
    _C.UpdateJob("muon", pieces, both.arrays(), gradient=gradient.ctypes.data, factored=shapes).run()
    for begin, its in zip(begins, alone, strict=True):
        for key, array in (its.master | its.momentum).items():
            at = begin // _C.STATE_BLOCK if key == "m_scales" else begin
            assert array.tobytes() == (both.master | both.momentum)[key][at : at + array.size].tobytes(), key
    assert not both.value()[begins[0] + inputs[0][0].size : begins[1]].any()


# ---- values of its own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_spreads_as_in_torch(value):
    start, gradients = inputs_of(SHAPES["square"])
    gradients[1].flat[17] = value
    side = Matrix(start)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.Muon([parameter], **copy.deepcopy(HYPER))
    for number, gradient in enumerate(gradients):
        side.job(gradient, number + 1).run()
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    assert np.isnan(side.value()).any()
    np.testing.assert_array_equal(np.isnan(side.value()), parameter.isnan().numpy().ravel())


def test_gradients_of_zero_only_decay():
    start, _ = inputs_of(SHAPES["square"])
    side = Matrix(start)
    gradient = np.zeros(start.shape, np.float32)
    side.job(gradient).run()
    np.testing.assert_allclose(side.value(), start.ravel() * (1 - 2e-3), rtol=1e-6)


def test_a_piece_without_its_shape_is_refused():
    start, gradients = inputs_of(SHAPES["square"])
    side = Matrix(start)
    job = _C.UpdateJob("muon", [side.piece(RULE.scalars(HYPER, 1))], side.arrays(), gradient=gradients[0].ctypes.data)
    with pytest.raises(_C.InvariantError, match="knows rows and columns"):
        job.run()


def test_it_cannot_be_drafted():
    start, gradients = inputs_of(SHAPES["square"])
    side = Matrix(start)
    size = (start.size, _C.num_undo_blocks(start.size), start.size)
    log = np.empty(_C.undo_log_bytes(*size) + 64, np.uint8)
    address = log.ctypes.data + -log.ctypes.data % 64
    with pytest.raises(_C.InvariantError, match="cannot be undone"):
        side.job(gradients[0]).drafting(address, *size).run()
