"""Training while torch's profiler records, with stacks: its tracer writes down the addresses of weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from noria.testing import assert_same_bits
from noria.wrapped import wrapped_by
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from tests.journeys.pairs import BLOCKS, Net, Side, both, loss_of, new_side, wrap_side
from tests.ranks import on_ranks
from tests.torch_versions import TORCH

pytestmark = pytest.mark.usefixtures("one_thread")

STACKS = {"activities": [ProfilerActivity.CPU], "with_stack": True, "with_modules": True}


def profiled(side: Side, **options: Any) -> profile:
    """Two recordings. The first one begins between a backward and its step."""
    plan = schedule(wait=1, warmup=1, active=2, repeat=2)
    with profile(schedule=plan, **STACKS, **options) as recorded:
        for number in range(10):
            loss = loss_of(side.model, number)
            loss.backward()
            recorded.step()
            side.optimizer.step()
            side.optimizer.zero_grad()
            side.keep(f"loss {number}", loss)
    return recorded


class WithOwnWeights(Net):
    """A root that uses parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"update": "backward"},
        {"kernel": "fused"},
        {"activations": "recompute"},
        {"activations": "offload"},
        {"reads": "home"},
        {"check": "operators"},
    ],
    ids=str,
)
def test_a_profiler_with_stacks_changes_no_bit(policy: dict[str, Any]):
    both(profiled, **policy)


def test_memory_and_shapes_are_recorded_too():
    both(functools.partial(profiled, profile_memory=True, record_shapes=True))


def test_a_root_with_weights_of_its_own_is_recorded_under_reads_at_home():
    both(profiled, model=WithOwnWeights, reads="home")


@pytest.mark.skipif(TORCH < (2, 13), reason=f"torch {torch.__version__} ends the process: its tracer lets no error out")
def test_a_root_with_weights_of_its_own_needs_reads_at_home():
    side = wrap_side(new_side(model=WithOwnWeights), window=2)
    with pytest.raises(RuntimeError, match='reads="home"'):
        profiled(side)


class Listed(Net):
    """Has modules that cannot be called, as adapters have. Their weights belong to the module around them."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(())])
            self.by_name = nn.ParameterDict({"bias": torch.zeros(())})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scales[0] + self.by_name["bias"]

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(Listed.Scaled(), self.head)


def test_modules_that_cannot_be_called():
    both(profiled, model=Listed)


def test_compiled_blocks_are_met_too():
    def journey(side: Side) -> None:
        for block in side.model.blocks:
            block.compile(backend="eager")
        profiled(side)
        assert all(block._compiled_call_impl is not None for block in side.model.blocks)

    both(journey)


def test_the_recording_names_the_modules(tmp_path: Path):
    side = wrap_side(new_side(), window=2)
    recorded = profiled(side)
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    text = (tmp_path / "trace.json").read_text()
    assert all(f"Block_{number}" in text for number in range(BLOCKS))


def shared(rank: int, size: int) -> None:
    plain, side = new_side(), wrap_side(new_side(), window=2, kernel="torch")
    profiled(plain)
    profiled(side)
    assert_same_bits(side.kept, plain.kept)


def test_ranks_that_share_a_model():
    """They have the same batches."""
    on_ranks(2, shared)


def test_modules_are_met_once_for_each_recording(monkeypatch: pytest.MonkeyPatch):
    side = wrap_side(new_side(), window=2)
    home = type(wrapped_by(side.model).context.engine.home)
    own, opened = home.open_home, []

    def open_home(self: Any, *args: Any) -> None:
        opened.append(args)
        own(self, *args)

    monkeypatch.setattr(home, "open_home", open_home)
    profiled(side)
    assert len(opened) == 2
