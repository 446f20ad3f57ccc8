"""Optimizers as people use them and write them: several over one parameter, torch's faster flags, classes of one's own
that keep what they like. All give torch's bits.
"""

from __future__ import annotations

import copy

import noria
import pytest
import torch
from noria.testing import assert_same_bits, on_machine

from tests.journeys.pairs import HOSTILE, Net, adamw, assert_moved, loss_of, state_tensors

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the same parameter in two optimizers --------------------------------------------------------------------


def in_turns(is_wrapped, **policy):
    torch.manual_seed(0)
    model = Net()
    optimizers = [adamw(model.parameters(), lr=1e-2), adamw(model.parameters(), lr=1e-3)]
    if is_wrapped:
        with on_machine(hostility=HOSTILE):
            noria.wrap(model, optimizers, device="cpu", window=2, **policy)
    for step in range(6):
        loss_of(model, step).backward()
        optimizers[step % 2].step()
        optimizers[step % 2].zero_grad()
    return model, optimizers


@pytest.mark.parametrize("kernel", ["torch", "fused"])
def test_two_optimizers_over_the_same_parameters_keep_moments_of_their_own(kernel):
    plain, theirs = in_turns(False)
    ours, mine = in_turns(True, kernel=kernel)
    assert_same_bits(ours.state_dict(), plain.state_dict())
    for a, b in zip(mine, theirs, strict=True):
        assert_same_bits(state_tensors(a), state_tensors(b))
    report = noria.report(ours)
    assert all("torch, unit by unit" in each for each in report.kernels)
    assert (kernel == "fused") == any("two of them" in note for note in report.notes)
    assert_moved(ours)


@pytest.mark.parametrize("by", ["add_param_group", "its own list"])
def test_a_parameter_that_comes_into_a_second_optimizer_is_refused_by_the_fused_kernel(by):
    model = Net()
    held, other = list(model.parameters())[2:], list(model.parameters())[:2]
    optimizers = [adamw(held), adamw(other)]
    noria.wrap(model, optimizers, device="cpu", window=2, kernel="fused")
    loss_of(model, 0).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(noria.UsageError, match='kernel="torch"'):
        if by == "add_param_group":
            optimizers[1].add_param_group({"params": held[:1]})
        else:
            optimizers[1].param_groups[0]["params"].append(held[0])
            optimizers[1].step()
    assert_same_bits(model.state_dict(), before)


# ---- what a plan knows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["fused", "foreach"])
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_flags_for_speed_change_nothing_in_the_plan(cls, flag):
    model = Net()
    options = {"lr": 0.1, **({"momentum": 0.9} if cls is torch.optim.SGD else {})}
    as_usual = noria.plan(model, cls(model.parameters(), **options), device="cpu")
    faster = noria.plan(model, cls(model.parameters(), **options, **{flag: True}), device="cpu")
    assert faster.unpredicted == as_usual.unpredicted == []
    assert faster.rows() == as_usual.rows()
    assert as_usual.home_bytes > 0


class Counting(torch.optim.Optimizer):
    """Counts its steps in a list of its own, and divides by the count."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.count = [0]

    @torch.no_grad()
    def step(self, closure=None):
        self.count[0] += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / self.count[0])


def test_a_plan_runs_no_step_of_the_users_own():
    model = Net()
    optimizer = Counting(model.parameters())
    planned = noria.plan(model, optimizer, device="cpu")
    noria.wrap(model, optimizer, device="cpu", window=2)
    assert optimizer.count == [0]
    assert planned.unpredicted == ["the state of Counting is not known before its first step"]
    assert noria.report(model).notes == planned.unpredicted
