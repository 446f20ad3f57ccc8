"""Gradients that a CUDA kernel for lists of tensors has written.

torch's `_foreach_*` and fused kernels, and the scaler's unscale, take addresses by `const_data_ptr()` there, for what
they write too: no storage calls back, and the scaler's raises no version either. Updates must use what was written all
the same.
"""

from __future__ import annotations

import math
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits
from noria.wrapped import wrapped_by
from torch import nn

from tests.journeys.pairs import adamw
from tests.journeys.test_cuda import DEVICE, STEPS, deterministic, loss_of, made  # noqa: F401 - a fixture

BITES, SCALE = 0.05, 1024.0
pytestmark = pytest.mark.gpu


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def left_by(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {f"loss {number}": loss.detach().cpu() for number, loss in enumerate(losses)}
    found |= {name: value.clone() for name, value in model.state_dict().items()}
    noria.unwrap(model, optimizer)
    return found


def clipped(drafted_first: bool = False, **policy: Any) -> dict[str, torch.Tensor]:
    model = made()
    optimizer, losses = adamw(model.parameters()), []
    noria.wrap(model, optimizer, device=DEVICE, window=2, kernel="fused", **policy)
    for number in range(STEPS):
        losses.append(loss_of(model, number))
        losses[-1].backward()
        if drafted_first:  # the drafts have read the gradients when the clip writes them
            wrapped_by(model).context.engine.idle()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), BITES).item() > BITES
        optimizer.step()
        optimizer.zero_grad()
    return left_by(model, optimizer, losses)


@pytest.mark.parametrize("drafted_first", [True, False])
def test_drafts_of_gradients_that_torch_has_clipped_are_made_again(drafted_first):
    assert_same_bits(clipped(drafted_first, draft_memory="64MiB"), clipped(update="blocking"))


def unscaled(by_scaler: bool, **policy: Any) -> dict[str, torch.Tensor]:
    """The loss is scaled by a power of two, so that dividing by hand has the same bits."""
    model = made()
    optimizer, losses, norms = adamw(model.parameters()), [], []
    noria.wrap(model, optimizer, device=DEVICE, window=2, kernel="fused", **policy)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=SCALE)
    for number in range(STEPS):
        losses.append(loss_of(model, number))
        if by_scaler:
            scaler.scale(losses[-1]).backward()
            scaler.unscale_(optimizer)
        else:
            (losses[-1] * SCALE).backward()
            for each in gradients(model):
                each.mul_(1 / SCALE)
        exact = math.sqrt(sum(float(each.cpu().double().square().sum()) for each in gradients(model)))
        norms.append(torch.as_tensor(optimizer.clip_grad_norm_(BITES)).cpu())
        assert norms[-1].item() == torch.tensor(exact).item() > BITES
        if by_scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return left_by(model, optimizer, losses) | {f"norm {number}": each for number, each in enumerate(norms)}


@pytest.mark.parametrize("draft_memory", [0, "64MiB"])
def test_norms_are_those_of_gradients_that_the_scaler_has_unscaled(draft_memory):
    assert_same_bits(unscaled(True, draft_memory=draft_memory), unscaled(False, update="blocking"))


def cleared(set_to_none: bool, kernel: str) -> dict[str, torch.Tensor]:
    model = made()
    optimizer, losses = adamw(model.parameters(), fused=True), []
    noria.wrap(model, optimizer, device=DEVICE, window=2, kernel=kernel, draft_memory=0)
    for number in range(STEPS):
        losses.append(loss_of(model, number))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return left_by(model, optimizer, losses)


@pytest.mark.parametrize("kernel", ["torch", "fused"])
def test_gradients_that_are_set_to_zero_after_step_are_updated_with_first(kernel):
    assert_same_bits(cleared(False, kernel), cleared(True, kernel))
