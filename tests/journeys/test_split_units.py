"""Blocks that the device has no room for move in parts, between modules. No bit changes."""

from __future__ import annotations

import re
from typing import Any

import noria
import pytest
import torch
from noria.wrapped import wrapped_by
from torch import nn
from torch.nn import functional as F

from tests.device import DEVICE
from tests.journeys.pairs import Side, adamw, both, sgd

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 16


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Its last expert is much larger than the rest. It has a parameter of its own."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.experts = nn.ModuleList(Expert(size) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for expert in self.experts:
            x = x + expert(x)
        return x


class Net(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = (16, 16, 64)) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, WIDTH)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(3))
        self.head = nn.Linear(WIDTH, 23)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def least_of(model: nn.Module, **policy: Any) -> int:
    """The least device memory that noria takes, as its refusal says."""
    optimizer = adamw(model.parameters())
    with pytest.raises(noria.UsageError, match="the largest unit is blocks") as caught:
        noria.plan(model, optimizer, device_memory=1, **policy)
    found = re.search(r"\((\d+) bytes\)", str(caught.value))
    assert found is not None
    return int(found[1])


def units_of(**policy: Any) -> list[str]:
    model = Net()
    return [unit.name for unit in noria.plan(model, adamw(model.parameters()), device="cpu", **policy).units]


BUDGETS = {"least": 1.0, "a little more": 1.3}


@pytest.mark.parametrize("share", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"kernel": "fused"},
        {"update": "backward"},
        {"update": "blocking", "kernel": "fused", "dtype": torch.bfloat16},
        {"activations": "offload"},
        {"activations": "recompute"},
        {"draft_memory": "1MiB", "kernel": "fused"},
    ],
    ids=str,
)
def test_bits_are_those_of_plain_pytorch(policy, share):
    optimizer = sgd if policy.get("update") == "backward" else adamw
    least = least_of(Net(), device=DEVICE, **{name: value for name, value in policy.items() if name == "dtype"})
    names: list[str] = []

    def journey(side: Side) -> None:
        side.train(0, 4)
        if side.is_wrapped:
            names.extend(unit.name for unit in wrapped_by(side.model).context.units)

    both(journey, model=Net, optimizer=optimizer, window=None, device_memory=int(share * least), **policy)
    assert any("experts.2.up" in name for name in names)


def test_only_what_does_not_fit_is_split():
    whole = units_of()
    assert sum("blocks" in name for name in whole) == 3
    least = least_of(Net(), device="cpu")
    finest = units_of(device_memory=least)
    assert "blocks.0.attention" in finest  # torch's own modules stay whole
    assert {"blocks.0 (direct)", "blocks.0.experts.0", "blocks.0.experts.2.up"} <= set(finest)
    some = units_of(device_memory=3 * least)
    assert "blocks.0.experts.2" in some and len(whole) < len(some) < len(finest)
    assert units_of(device_memory=8 * least) == whole


def test_every_budget_from_the_least_on_is_taken():
    least, numbers = least_of(Net(), device="cpu"), []
    for budget in range(least, 10 * least, 512):
        numbers.append(len(units_of(device_memory=budget)))
    assert numbers == sorted(numbers, reverse=True)
    with pytest.raises(
        noria.UsageError, match=rf"at least .* \({least} bytes\).*the largest unit is blocks.0.attention"
    ):
        units_of(device_memory=least - 1)


def test_units_that_the_user_names_stay_whole():
    with pytest.raises(noria.UsageError, match=r"the largest unit is blocks.0\W"):
        units_of(device_memory=2 * least_of(Net(), device="cpu"), units=[Block])
