"""Twins that differ in what their `p.grad` is. A wrapped model's is known to noria, which puts off what it can. The
other is a plain tensor, and torch's own operators run on it.

The plain twin is a model of plain PyTorch, on the device, whose optimizer updates copies in the host's memory, as
noria's does. Noria's kernels and `dtype=` have no plain twin: there the other side is wrapped too, and its gradients
are made the user's own as soon as backward has left them.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn
from torch.nn import functional as F

from tests.journeys.pairs import HOSTILE, VOCAB, Net, sgd, state_tensors
from tests.pretend_gpu import vehicle

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

Make = Callable[[Any], torch.optim.Optimizer]


def skip_where_torch_cannot_unscale(device: str, policy: dict[str, Any]) -> None:
    if device == "cuda" and not vehicle.is_installed() and policy.get("dtype") is torch.bfloat16:
        pytest.skip("torch's scaler has no kernel for bfloat16 on CUDA devices")


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class OnHost(torch.optim.Optimizer):
    """What `make` makes, over copies of the parameters in the host's memory: weights and gradients go there, and
    weights come back."""

    def __init__(self, parameters: Any, make: Make) -> None:
        own = list(parameters)
        super().__init__(own, {})
        self.masters = [nn.Parameter(each.detach().cpu().clone()) for each in own]
        self.inner = make(self.masters)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        parameters = self.param_groups[0]["params"]
        for master, parameter in zip(self.masters, parameters, strict=True):
            master.copy_(parameter)  # a forward may have written there
            master.grad = None if parameter.grad is None else parameter.grad.cpu().clone()
        self.inner.step()
        for master, parameter in zip(self.masters, parameters, strict=True):
            parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


@dataclasses.dataclass
class GradientSide:
    """What a journey gets. `is_plain`: its gradients are plain tensors."""

    model: Any
    optimizer: Any
    device: str
    is_plain: bool
    kept: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def keep(self, name: str, value: Any) -> None:
        assert name not in self.kept
        self.kept[name] = torch.as_tensor(value).detach().cpu().clone()

    def keep_gradients(self, name: str) -> None:
        for key, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.keep(f"{name}: gradient of {key}", parameter.grad)

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def loss(self, number: int) -> torch.Tensor:
        batch = torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(number)).to(self.device)
        return F.cross_entropy(self.model(batch).flatten(0, 1).float(), batch.roll(1, 1).flatten())

    def own_gradients(self) -> None:
        """To be called after each backward: what noria shows becomes a tensor of the user's own."""
        wrapped = wrapped_by(self.model) if self.is_plain else None
        if wrapped is None:
            return
        for slot in wrapped.context.slots:
            if slot.parameter.grad is not None and wrapped.context.engine.gradients.gradient_is(slot.index) == "held":
                slot.parameter.grad = slot.parameter.grad.clone()

    def backward(self, number: int, scale: float = 1.0) -> None:
        (self.loss(number) * scale).backward()
        self.own_gradients()

    def end_step(self, **how: Any) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(**how)


Journey = Callable[[GradientSide], Any]


def gradient_twins(
    journey: Journey,
    device: str,
    *,
    make: Make = sgd,
    model: Callable[[], nn.Module] = Net,
    hostility: dict[str, Any] | None = None,
    **policy: Any,
) -> GradientSide:
    """Leads both sides through `journey`; all that they keep must have the same bits, and weights and state at the end.
    Returns the wrapped one."""
    policy.setdefault("kernel", "torch")
    has_plain_twin = policy["kernel"] == "torch" and policy.get("dtype") is None
    torch.manual_seed(0)
    plain = model()
    ours = copy.deepcopy(plain)
    before = copy.deepcopy(plain.state_dict())
    side = GradientSide(ours, make(ours.parameters()), device, False)
    with on_machine(hostility=HOSTILE if hostility is None else hostility):
        noria.wrap(side.model, side.optimizer, device=device, window=2, **policy)
    if has_plain_twin:
        plain.to(device)
        optimizer = make(plain.parameters()) if device == "cpu" else OnHost(plain.parameters(), make)
    else:
        optimizer = make(plain.parameters())
        others = {name: value for name, value in policy.items() if name != "draft_memory"}
        noria.wrap(plain, optimizer, device=device, **{**others, "update": "blocking"})
    twin = GradientSide(plain, optimizer, device, True)
    for each in (twin, side):
        torch.manual_seed(1)
        journey(each)
    if side.kept or twin.kept:
        assert_same_bits(side.kept, twin.kept)
    ours_now, plain_now = (
        {name: value.cpu() for name, value in each.model.state_dict().items()} for each in (side, twin)
    )
    assert_same_bits(ours_now, plain_now)
    if state_tensors(twin.optimizer):
        assert_same_bits(state_tensors(side.optimizer), state_tensors(twin.optimizer))
    assert any(not torch.equal(value, ours_now[name]) for name, value in before.items()), "nothing was trained"
    report = noria.report(side.model)
    assert report.num_fetches > 0 and report.ledger_agrees, str(report)
    return side
