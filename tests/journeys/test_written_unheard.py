"""Writes that no storage hears, to gradients and to weights inside a forward: on CUDA torch's kernels for lists of
tensors, fused optimizers and a scaler's unscaling take addresses for reading only, and write there. Nothing of that may
be lost, at any place in the loop, and an update that still reads a gradient is made with what was there at `step()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits
from torch import nn
from torch.nn import functional as F

from tests.journeys.gradient_pairs import DEVICES, GradientSide, deterministic, gradient_twins  # noqa: F401 - a fixture
from tests.journeys.pairs import LATE_UPDATES, WIDTH, Block, Net, sgd

pytestmark = [pytest.mark.usefixtures("one_thread", "deterministic"), pytest.mark.sampled(7), pytest.mark.own_device]

STEPS = 4
POLICIES: dict[str, dict[str, Any]] = {
    "torch": {"kernel": "torch"},
    "fused": {"kernel": "fused"},
    "drafts": {"kernel": "fused", "draft_memory": "64MiB"},
}
over_policies = pytest.mark.parametrize("policy", POLICIES)
over_devices = pytest.mark.parametrize("device", DEVICES)


def late(device: str) -> dict[str, Any] | None:
    return LATE_UPDATES if device == "cpu" else None


# ---- gradients ------------------------------------------------------------------------------------------------


def likes(gradients: list[torch.Tensor], value: float) -> list[torch.Tensor]:
    return [torch.full_like(each, value) for each in gradients]


def by_own_fused_optimizer(gradients: list[torch.Tensor]) -> None:
    """Of the user, on copies: under a scaler it unscales the gradients that it is given, which are ours."""
    copies = [nn.Parameter(torch.ones_like(each)) for each in gradients]
    for each, gradient in zip(copies, gradients, strict=True):
        each.grad = gradient
    optimizer = torch.optim.AdamW(copies, fused=True)
    device = gradients[0].device
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(3.0, device=device), torch.zeros((), device=device)
    optimizer.step()


def unscaled(gradients: list[torch.Tensor]) -> None:
    device = gradients[0].device
    found, inverse = torch.zeros((), device=device), torch.tensor(1 / 3, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)


def by_optimizers_zero(gradients: list[torch.Tensor], **how: bool) -> None:
    """Of an optimizer that noria does not know."""
    owners = [nn.Parameter(torch.ones_like(each)) for each in gradients]
    for each, gradient in zip(owners, gradients, strict=True):
        each.grad = gradient
    torch.optim.SGD(owners, lr=0.1, **how).zero_grad(set_to_none=False)


WRITES: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "mul": lambda found: torch._foreach_mul_(found, 0.75),
    "mul by tensor": lambda found: torch._foreach_mul_(found, torch.tensor(0.3, device=found[0].device)),
    "mul by list": lambda found: torch._foreach_mul_(found, likes(found, 1.3)),
    "mul by numbers": lambda found: torch._foreach_mul_(found, [0.1 * (i + 1) for i in range(len(found))]),
    "div": lambda found: torch._foreach_div_(found, 3.0),
    "add": lambda found: torch._foreach_add_(found, 1e-3),
    "add of list": lambda found: torch._foreach_add_(found, likes(found, 1e-2), alpha=0.3),
    "copy": lambda found: torch._foreach_copy_(found, likes(found, 1e-2)),
    "zero": torch._foreach_zero_,
    "neg": torch._foreach_neg_,
    "clamp": lambda found: torch._foreach_clamp_max_(found, 1e-4),
    "lerp": lambda found: torch._foreach_lerp_(found, likes(found, 1e-2), 0.3),
    "addcmul": lambda found: torch._foreach_addcmul_(found, likes(found, 0.1), likes(found, 0.2), 0.5),
    "of views": lambda found: torch._foreach_mul_([each.view(-1)[::2] for each in found], 0.5),
    "of data": lambda found: torch._foreach_add_([each.data for each in found], 1e-3),
    "of detached": lambda found: torch._foreach_add_([each.detach() for each in found], 1e-3),
    "fused optimizer": by_own_fused_optimizer,
    "unscale": unscaled,
    "zero_grad, foreach": lambda found: by_optimizers_zero(found, foreach=True),
    "zero_grad, fused": lambda found: by_optimizers_zero(found, fused=True),
    "clip by value": lambda found: [each.clamp_(-1e-4, 1e-4) for each in found],
}
over_writes = pytest.mark.parametrize("write", WRITES)


@over_devices
@over_policies
@over_writes
def test_the_update_is_made_with_what_was_written_before_step(write, policy, device):
    def journey(side: GradientSide) -> None:
        for number in range(STEPS):
            side.backward(number)
            WRITES[write](side.gradients()[::2])
            side.end_step()

    gradient_twins(journey, device, **POLICIES[policy])


@over_devices
def test_a_grad_scale_that_is_set_by_hand_may_lie_on_the_host(device):
    def journey(side: GradientSide) -> None:
        for number in range(STEPS):
            side.backward(number, 4.0)
            side.optimizer.grad_scale = torch.tensor(4.0)
            side.optimizer.step()
            side.keep_gradients(f"unscaled {number}")
            side.optimizer.zero_grad()

    gradient_twins(journey, device, kernel="fused")


@over_devices
@pytest.mark.parametrize("policy", ["torch", "drafts"])
@over_writes
def test_the_update_is_made_without_what_was_written_after_step(write, policy, device):
    def journey(side: GradientSide) -> None:
        for number in range(STEPS):
            side.backward(number)
            side.optimizer.step()
            WRITES[write](side.gradients()[::2])
            side.keep_gradients(f"step {number}")
            side.optimizer.zero_grad()

    gradient_twins(journey, device, hostility=late(device), **POLICIES[policy])


@over_devices
@pytest.mark.parametrize("policy", ["torch", "drafts"])
@over_writes
def test_the_next_backward_adds_to_what_was_written(write, policy, device):
    def journey(side: GradientSide) -> None:
        for number in range(STEPS):
            side.backward(number)
            WRITES[write](side.gradients()[::2])
            side.backward(100 + number)
            side.optimizer.step()
            WRITES[write](side.gradients()[::2])
            side.backward(200 + number)
            side.end_step()

    gradient_twins(journey, device, hostility=late(device), **POLICIES[policy])


@over_devices
@over_policies
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("clearer", ["optimizer", "model"])
def test_gradients_that_are_set_to_zero_after_step_were_updated_with_first(clearer, options, policy, device):
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **options)

    def journey(side: GradientSide) -> None:
        for number in range(STEPS):
            side.backward(number)
            side.optimizer.step()
            getattr(side, clearer).zero_grad(set_to_none=False)

    gradient_twins(journey, device, make=make, hostility=late(device), **POLICIES[policy])


# ---- weights --------------------------------------------------------------------------------------------------


def in_storage(weight: torch.Tensor) -> torch.Tensor:
    """The same elements, by the storage itself."""
    whole = torch.empty(0, dtype=weight.dtype, device=weight.device).set_(weight.untyped_storage())
    return whole.as_strided(weight.shape, weight.stride(), weight.storage_offset())


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda weight: weight,
    "data": lambda weight: weight.data,
    "detach": lambda weight: weight.detach(),
    "alias": lambda weight: torch.ops.aten.alias.default(weight.detach()),
    "view": lambda weight: weight.data.view(-1),
    "row": lambda weight: weight.detach()[0],
    "storage": in_storage,
    "view of bits": lambda weight: weight.data.view(torch.int32).view(torch.float32),
}


class Shrinking(Block):
    """Writes its own weights before it uses them."""

    way, write = "itself", "mul"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            ways = [WAYS[self.way](each) for each in (self.expand.weight, self.contract.weight)]
            if self.write == "mul":
                torch._foreach_mul_(ways, 0.99)
            elif self.write == "copy":
                torch._foreach_copy_(ways, [each * 0.99 for each in ways])
            elif self.write == "numpy":
                for each in ways:
                    each.detach().numpy()[...] *= 0.99
            else:
                for each in ways:
                    each.mul_(0.99)
        return x + self.contract(F.gelu(self.expand(self.norm(x))))


def shrinking(way: str, write: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net(blocks=0)
        net.blocks = nn.ModuleList(Shrinking(WIDTH) for _ in range(4))
        for block in net.blocks:
            block.way, block.write = way, write
        return net

    return make


@over_devices
@pytest.mark.parametrize("write", ["mul", "copy", "one by one"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_a_forward_writes_are_told_of_and_not_trained_with(way, write, device):
    """`step()` would go on from the weights in the home."""
    torch.manual_seed(0)
    model = shrinking(way, write)()
    side = GradientSide(model, sgd(model.parameters()), device, False)
    before = copy.deepcopy(model.state_dict())
    noria.wrap(model, side.optimizer, device=device, window=2)
    with pytest.raises(noria.UsageError, match=r"in-place write to .*blocks\.\d.*materialize"):
        side.backward(0)
        side.end_step()
        side.backward(1)
    assert_same_bits({name: value.cpu() for name, value in model.state_dict().items()}, before)
