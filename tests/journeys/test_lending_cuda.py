"""Two stages of one pipeline, two processes with one CUDA device: memory that one lends is opened by the other, which
swaps there."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import noria
import pytest
import torch
from noria.host.device_buffers import DeviceBuffers
from noria.planning import wrap_plan
from noria.testing import assert_same_bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from tests.journeys.pairs import WIDTH, Block, adamw, state_tensors
from tests.ranks import on_ranks

DEVICE = "cuda:0"
LENGTH, STEPS, NUM_MICRO_BATCHES = 128, 3, 4
BUNDLE = 100_352  # what a block saves of a micro-batch of 2 x 128 x 16
CACHED = 64 << 20
pytestmark = pytest.mark.gpu


class Stage(nn.Module):
    """NCCL takes one process for each device, and gloo sends what the host has: so that is what goes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(DEVICE, copy=True)
        for block in self.blocks:
            x = block(x)
        return x.cpu()


def trained(rank: int, size: int, **limits: Any) -> tuple[dict[str, torch.Tensor], noria.Report]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("stages",))
    torch.manual_seed(rank)
    model = Stage()
    optimizer, group = adamw(model.parameters()), mesh["stages"].get_group()
    stage = PipelineStage(model, rank, size, torch.device("cpu"), group=group)
    noria.wrap(model, optimizer, stages=mesh["stages"], device=DEVICE, window=2, kernel="torch", **limits)
    torch.empty(CACHED, dtype=torch.uint8, device=DEVICE)  # torch keeps it: the first steps need less
    schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=F.mse_loss)
    kept: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, target = (torch.randn(2 * NUM_MICRO_BATCHES, LENGTH, WIDTH, generator=generator) for _ in range(2))
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        kept |= {f"loss {step}.{nth}": loss.detach() for nth, loss in enumerate(losses)}
    report = noria.report(model)
    kept |= {name: value.clone() for name, value in model.state_dict().items()}
    kept |= {name: value.clone() for name, value in state_tensors(optimizer).items()}
    noria.unwrap(model, optimizer)
    return kept, report


take_shared_of_noria = DeviceBuffers.take_shared


def take_shared(buffers: DeviceBuffers, purpose: str, size: int) -> int:
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert unused < CACHED, "torch keeps memory that this stage could lend"
    return take_shared_of_noria(buffers, purpose, size)


def swaps_to_the_other(rank: int, size: int) -> None:
    """The first stage saves of two micro-batches at once, and has room for less; the last one of one."""
    wrap_plan.LEAST_SAVED = 64
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    with mock.patch.object(DeviceBuffers, "take_shared", take_shared):
        ours, report = trained(rank, size, activations="auto", activation_memory=5 * BUNDLE)
    twin, without_limits = trained(rank, size)
    assert [(loan.lender, loan.borrower) for loan in report.loans if loan.for_saved] == [(1, 0)], str(report)
    if rank == 0:
        assert report.saved["offloaded_to_peers"] > 0 and report.saved["reloaded_from_peers"] > 0, str(report)
    assert report.ledger_agrees and report.num_fetches > 0, str(report)
    assert without_limits.saved["num_offloaded"] == 0, str(without_limits)
    assert_same_bits(ours, twin)


def test_two_stages_on_one_device_swap_to_each_other_and_have_the_bits_of_stages_without_limits():
    on_ranks(2, swaps_to_the_other)
