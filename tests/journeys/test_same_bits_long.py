"""The same claims as test_same_bits.py over far more cases: minutes, not seconds."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import noria
import pytest
import torch
from noria.model.update_rules import SEPARABLE
from noria.testing import assert_same_bits
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE
from tests.journeys.models import ZOO, batch_for
from tests.journeys.twins import (
    AXES,
    Case,
    Side,
    assert_same_state,
    check_memory,
    end,
    is_possible,
    make_model,
    run,
    trainable,
    twin_side,
    values_of,
    wrapped_side,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("error:Detected call of `lr_scheduler"),
    pytest.mark.long,
]

WHOLE = ("model", "optimizer", "kernel", "dtype", "update")
"""Axes whose every combination is run; the others are drawn for each."""


def product() -> Iterator[Case]:
    axes = AXES | {"model": tuple(ZOO)}
    for number, values in enumerate(itertools.product(*(axes[name] for name in WHOLE))):
        draw = random.Random(number)
        row: dict[str, Any] = dict(zip(WHOLE, values, strict=True))
        if not is_possible(row):
            continue
        row |= {name: draw.choice(axes[name]) for name in axes if name not in WHOLE}
        for name in ("resident", "clear"):
            if not is_possible(row):
                row[name] = "none"
        yield Case(**row, seed=number, held=draw.choice(("", "fetch", "drain", "update", "poison")))


@pytest.mark.parametrize("case", list(product()), ids=str)
def test_a_run_has_the_bits_of_its_twin_and_really_streams(case: Case):
    run(case)


# ---- every optimizer ----------------------------------------------------------------------------------------------

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.05}, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}],
    "Adam": [{"amsgrad": True, "lr": 1e-2}, {"lr": torch.tensor(1e-2), "weight_decay": 0.1}],
    "AdamW": [{"amsgrad": True, "maximize": True}, {"foreach": True}, {"fused": True}],
    "Adagrad": [{"initial_accumulator_value": 0.1}],
    "ASGD": [{"t0": 5.0, "lr": 0.05}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "Rprop": [{"lr": 0.01}],
    "Muon": [{"lr": 0.02}],
}
SETTINGS = [
    (cls.__name__, number, window, update, dtype)
    for cls in sorted(SEPARABLE, key=lambda cls: cls.__name__)
    for number in range(len(OPTIONS.get(cls.__name__, [{}])))
    for window, update in (("least", "auto"), ("two", "blocking"), ("half", "auto"))
    for dtype in ("fp32", "bf16", "master")
    if cls.__name__ != "Muon" or dtype != "master"  # a MasterTwin clears what Muon does not hold
]


@pytest.mark.parametrize(("name", "number", "window", "update", "dtype"), SETTINGS)
def test_every_separable_optimizer_has_its_own_bits_unit_by_unit(
    name: str, number: int, window: str, update: str, dtype: str
):
    """Muon holds matrices alone: what it does not hold keeps its gradient and its value, as in torch."""
    options = OPTIONS.get(name, [{}])[number]

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        wanted = [p for p in parameters if p.dim() == 2] if name == "Muon" else parameters
        fresh = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        cls = getattr(torch.optim, name, None) or getattr(noria.optim, name)
        return cls(wanted, **fresh)

    clip = name != "Muon"  # gradients that are not cleared grow
    case = Case(model="gpt_tied", window=window, update=update, dtype=dtype, micro_batches=2, clip=clip, seed=number)
    report = run(case, make)
    assert "torch, unit by unit" in report.kernels[0]


# ---- optimizers that are not separable ------------------------------------------------------------------------------


class NormedSGD(torch.optim.Optimizer):
    """Looks at all gradients before it moves any parameter: each step is as long. Keeps a tensor of its own."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [(group["lr"], p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        length = torch.stack([p.grad.float().norm() for _, p in moving]).norm()
        for lr, p in moving:
            state = self.state[p]
            if not state:
                state["moved"] = torch.zeros_like(p)
            state["moved"].add_(p.grad / length)
            p.sub_(lr * (p.grad / length) + 1e-3 * state["moved"])
        return loss


@pytest.mark.parametrize("dtype", AXES["dtype"])
@pytest.mark.parametrize("window", AXES["window"])
@pytest.mark.parametrize("model", ["gpt", "qwen3"])
def test_an_optimizer_of_the_users_own_runs_whole_and_has_its_bits(model: str, window: str, dtype: str):
    case = Case(model=model, window=window, dtype=dtype, micro_batches=2, scheduler="before", interlude=True, seed=5)
    report = run(case, NormedSGD)
    assert "not known to be separable" in report.kernels[0]


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("window", AXES["window"])
def test_lbfgs_with_its_closure_has_the_bits_of_torch(window: str, search: str | None):
    case = Case(window=window, seed=7, steps=6)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, history_size=3, line_search_fn=search)

    def closure(side: Side, batch: dict[str, torch.Tensor], losses: list[torch.Tensor]) -> torch.Tensor:
        side.optimizer.zero_grad()
        loss = ZOO[case.model].loss(side.model, batch)
        loss.backward()
        losses.append(loss.detach())
        return loss

    ours, twin = wrapped_side(case, make), twin_side(case, make)
    first = values_of(ours.model)
    for step in range(case.steps):
        batch = batch_for(case.model, step)
        seen: list[list[torch.Tensor]] = [[], []]
        for side, losses in zip((ours, twin), seen, strict=True):
            losses.append(side.optimizer.step(functools.partial(closure, side, batch, losses)).detach())
        assert len(seen[0]) > 2
        assert_same_bits({"losses": torch.stack(seen[0])}, {"losses": torch.stack(seen[1])})
        assert_same_bits(ours.gradients(), twin.gradients())
    assert_same_bits(ours.model.state_dict(), twin.model.state_dict())
    assert all(not torch.equal(first[name], p) for name, p in twin.model.named_parameters())
    report = noria.report(ours.model)
    check_memory(wrapped_by(ours.model), report)
    assert report.num_fetches > report.num_units * case.steps
    end(ours, twin)


def test_two_optimizers_may_share_a_model():
    """Muon for matrices, AdamW for the rest."""

    def make(parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        flat = [p for p in parameters if p.dim() == 2]
        rest = [p for p in parameters if p.dim() != 2]
        return torch.optim.Muon(flat, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)

    case = Case(seed=3)
    ours, twin = Side(case, make_model(case)), Side(case, make_model(case))
    sides = (ours, twin)
    pairs = [make(trainable(side.model)) for side in sides]
    with noria.testing.on_machine(hostility={"seed": case.seed, "max_delay_us": 300, "poison": True}):
        noria.wrap(ours.model, list(pairs[0]), device=DEVICE, window=2, kernel="torch")
    for step in range(20):
        for side in sides:
            ZOO[case.model].loss(side.model, batch_for(case.model, step)).backward()
        assert_same_bits(ours.gradients(), twin.gradients())
        for pair in pairs:
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_bits(ours.model.state_dict(), twin.model.state_dict())
    for mine, theirs in zip(*pairs, strict=True):
        assert_same_state(mine, theirs)
    report = noria.report(ours.model)
    assert report.num_fetches > 20 * report.num_units
    assert report.peak_units == 2
    assert report.ledger_agrees
    end(ours)
