"""Norms that are taken while gradients land, and what is made of them: `max_grad_norm`, `optimizer.clip_grad_norm_`,
and scalers that leave unscaling to `step()`.
"""

from __future__ import annotations

import copy
import math

import noria
import pytest
import torch
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by

from tests.device import DEVICE
from tests.journeys.edits import replaced, taken_away
from tests.journeys.pairs import HOSTILE, Net, Side, adamw, assert_moved, both, loss_of, sgd, state_tensors

pytestmark = pytest.mark.usefixtures("one_thread", "keeps_plan")

STEPS = 6
BITES, BITES_SOMETIMES, NEVER = 0.05, 1.2, 1e6


def exact_norm(side: Side) -> torch.Tensor:
    """fp64 over every element, then once rounded."""
    return torch.tensor(math.sqrt(sum(float(g.double().square().sum()) for g in side.gradients())))


def clip_by_hand(side: Side, max_norm: float, scale: float = 1.0) -> torch.Tensor:
    """torch's arithmetic on the exact norm; one factor, as `step()` applies it."""
    norm = exact_norm(side) * scale
    factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0)) * scale
    with torch.no_grad():
        for gradient in side.gradients():
            gradient.mul_(factor)
    return norm


def built_in(max_norm: float, *, steps: int = STEPS, between=lambda side, number: None):
    """One side clips by hand, the other inside of `step()`."""

    def journey(side: Side) -> None:
        for number in range(steps):
            loss_of(side.model, number).backward()
            between(side, number)
            if side.is_wrapped:
                side.optimizer.step()
                norm = side.optimizer.grad_norm
            else:
                norm = clip_by_hand(side, max_norm)
                side.optimizer.step()
            side.keep(f"norm {number}", norm)
            side.optimizer.zero_grad()

    return journey


def both_clipping(journey, max_norm, **options):
    """The twin, which has to clip by hand, is wrapped without `max_grad_norm`."""
    dtype, optimizer = options.pop("dtype", None), options.pop("optimizer", adamw)
    torch.manual_seed(0)
    plain = Net()
    ours = copy.deepcopy(plain)
    twin = Side(plain, optimizer(plain.parameters()), False)
    side = Side(ours, optimizer(ours.parameters()), True)
    noria.wrap(twin.model, twin.optimizer, device=DEVICE, kernel="fused", update="blocking", dtype=dtype)
    with on_machine(hostility=options.pop("hostility", HOSTILE)):
        policy = {"kernel": "fused", "window": 3, "dtype": dtype, **options}
        noria.wrap(side.model, side.optimizer, device=DEVICE, max_grad_norm=max_norm, **policy)
    journey(twin)
    journey(side)
    assert_same_bits(side.kept, twin.kept)
    assert_same_bits(side.model.state_dict(), twin.model.state_dict())
    if twin.optimizer.state:
        assert_same_bits(state_tensors(side.optimizer), state_tensors(twin.optimizer))
    assert_moved(side.model, 3)
    wrapped_by(side.model).context.engine.idle()
    return noria.report(side.model).drafts


@pytest.mark.sampled(5)
@pytest.mark.parametrize("draft_memory", [0, "64MiB"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [BITES, BITES_SOMETIMES, NEVER])
def test_max_grad_norm_has_the_bits_of_scaled_gradients(max_norm, dtype, draft_memory):
    both_clipping(built_in(max_norm), max_norm, dtype=dtype, draft_memory=draft_memory)


def test_drafts_are_kept_where_the_clip_does_not_bite_and_redone_where_it_does():
    kept = both_clipping(built_in(NEVER), NEVER, draft_memory="64MiB")
    assert kept["kept"] > 0 and kept["looked_at"] == kept["redone"] == kept["dropped"] == 0
    bitten = both_clipping(built_in(BITES), BITES, draft_memory="64MiB")
    assert bitten["redone"] > 0 and bitten["kept"] == 0


def halved(side, number):
    with torch.no_grad():
        side.model.blocks[number % 5].expand.weight.grad.mul_(0.5)


def another_backward(side, number):
    if number % 2:
        loss_of(side.model, 100 + number).backward()


@pytest.mark.parametrize("draft_memory", [0, "64MiB"])
@pytest.mark.parametrize("edit", [halved, replaced, taken_away, another_backward])
def test_the_norm_is_that_of_the_gradients_at_step_after_any_edit(edit, draft_memory):
    both_clipping(built_in(BITES_SOMETIMES, between=edit), BITES_SOMETIMES, draft_memory=draft_memory)


def test_sums_that_are_late_are_waited_for():
    late = {**HOSTILE, "hold_us": {"sum": 3_000, "draft": 3_000, "drain": 3_000}}
    for draft_memory in (0, "64MiB"):
        both_clipping(built_in(BITES), BITES, draft_memory=draft_memory, hostility=late)


def untouched(side, number):
    pass


@pytest.mark.parametrize("edit", [untouched, replaced])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_clip_by_the_optimizer_is_a_clip_by_torch(dtype, edit):
    """Norms may differ by the order of summation, so the clipped gradients are compared with the exact norm's."""

    def journey(side: Side) -> None:
        for number in range(STEPS):
            loss_of(side.model, number).backward()
            edit(side, number)
            if side.is_wrapped:
                norm = side.optimizer.clip_grad_norm_(BITES_SOMETIMES)
            else:
                norm = clip_by_hand(side, BITES_SOMETIMES)
            side.keep(f"norm {number}", norm)
            side.keep_gradients(f"step {number}")
            side.optimizer.step()
            side.optimizer.zero_grad()

    for draft_memory in (0, "64MiB"):
        both_clipping(journey, None, dtype=dtype, draft_memory=draft_memory)


def test_a_clip_by_the_optimizer_that_does_not_bite_writes_nothing():
    def journey(side: Side) -> None:
        for number in range(STEPS):
            loss_of(side.model, number).backward()
            if side.is_wrapped:
                side.keep(f"norm {number}", side.optimizer.clip_grad_norm_(NEVER))
            else:
                side.keep(f"norm {number}", exact_norm(side))
            side.optimizer.step()
            side.optimizer.zero_grad()

    counts = both_clipping(journey, None, draft_memory="64MiB")
    assert counts["kept"] > 0 and counts["looked_at"] == counts["redone"] == counts["dropped"] == 0


def test_other_kernels_clip_with_torch_itself():
    """kernel="torch" and optimizers that run whole: the very bits of torch's call."""

    def journey(side: Side) -> None:
        for number in range(4):
            loss_of(side.model, number).backward()
            if side.is_wrapped:
                side.optimizer.step()
                norm = side.optimizer.grad_norm
            else:
                norm = torch.nn.utils.clip_grad_norm_(side.model.parameters(), BITES_SOMETIMES)
                side.optimizer.step()
            side.keep(f"norm {number}", norm)
            side.keep_gradients(f"step {number}")
            side.optimizer.zero_grad()

    class Whole(torch.optim.SGD):
        pass

    both(journey, kernel="torch", max_grad_norm=BITES_SOMETIMES)
    both(journey, optimizer=lambda ps: Whole(ps, lr=0.1), max_grad_norm=BITES_SOMETIMES)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
@pytest.mark.parametrize("edit", [untouched, replaced])
@pytest.mark.parametrize("kernel", ["fused", "torch", "whole"])
def test_norms_of_bfloat16_gradients_are_fp32(kernel, edit, norm_type):
    class Whole(torch.optim.SGD):
        pass

    torch.manual_seed(0)
    model = Net()
    optimizer = Whole(model.parameters(), lr=0.1) if kernel == "whole" else adamw(model.parameters())
    chosen = {} if kernel == "whole" else {"kernel": kernel}
    noria.wrap(model, optimizer, device=DEVICE, dtype=torch.bfloat16, window=2, max_grad_norm=BITES, **chosen)
    side = Side(model, optimizer, True)
    loss_of(model, 0).backward()
    edit(side, 0)
    exact = torch.cat([gradient.double().flatten() for gradient in side.gradients()])
    wanted = torch.linalg.vector_norm(exact, norm_type)
    norm = optimizer.clip_grad_norm_(1.0, norm_type)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm.double().to(DEVICE), wanted, rtol=1e-6, atol=0)  # noria's own sums lie on the CPU
    clipped = torch.cat([gradient.double().flatten() for gradient in side.gradients()])
    factor = torch.clamp(1.0 / (wanted + 1e-6), max=1.0)
    num_roundings = 1 if DEVICE == "cpu" else 2  # torch rounds the factor to the gradient's dtype on CUDA
    torch.testing.assert_close(clipped, exact * factor, rtol=num_roundings * 2**-8, atol=0)
    optimizer.step()
    left = optimizer.grad_norm
    assert left.dtype is torch.float32
    torch.testing.assert_close(left.double().to(DEVICE), torch.linalg.vector_norm(clipped), rtol=1e-6, atol=0)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    next(side.gradients())[0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)


def test_a_clip_of_another_norm_is_torch_s_own():
    def journey(side: Side) -> None:
        for number in range(3):
            loss_of(side.model, number).backward()
            if side.is_wrapped:
                norm = side.optimizer.clip_grad_norm_(0.1, norm_type=float("inf"))
            else:
                norm = torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.1, norm_type=float("inf"))
            side.keep(f"norm {number}", norm)
            side.optimizer.step()
            side.optimizer.zero_grad()

    both_clipping(journey, None)


def test_a_norm_that_is_not_finite_goes_through_as_in_torch():
    def journey(side: Side) -> None:
        loss_of(side.model, 0).backward()
        with torch.no_grad():
            side.model.head.bias.grad[3] = float("inf")
        if side.is_wrapped:
            with pytest.raises(RuntimeError, match="non-finite"):
                side.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
            norm = side.optimizer.clip_grad_norm_(1.0)
        else:
            norm = torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
        side.keep("norm", norm)
        side.keep_gradients("clipped")

    both_clipping(journey, None)


def test_the_norm_does_not_depend_on_units_threads_or_drafts():
    norms = []
    for fields in ({}, {"units": ["*.expand", "head"]}, {"draft_memory": "64MiB"}, {"device_memory": "64KiB"}):
        for threads in (1, 3):
            torch.manual_seed(0)
            model = Net()
            optimizer = adamw(model.parameters())
            with on_machine(update_threads=threads):
                noria.wrap(model, optimizer, device=DEVICE, max_grad_norm=1.0, **fields)
            seen = []
            for number in range(4):
                loss_of(model, number).backward()
                optimizer.step()
                seen.append(optimizer.grad_norm.item())
                optimizer.zero_grad()
            norms.append(seen)
    assert len(set(norms[0])) == 4
    assert all(seen == norms[0] for seen in norms)


def scaled_loop(scaler: torch.amp.GradScaler, side: Side, steps: int, unscale_first: bool) -> None:
    for number in range(steps):
        scaler.scale(loss_of(side.model, number)).backward()
        if number == 2:
            with torch.no_grad():
                side.model.head.bias.grad[0] = float("inf")
        if unscale_first:
            scaler.unscale_(side.optimizer)
        scaler.step(side.optimizer)
        scaler.update()
        side.keep(f"scale {number}", scaler.get_scale())
        side.optimizer.zero_grad()


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("draft_memory", [0, "64MiB"])
def test_a_scaler_leaves_unscaling_to_step_with_the_same_bits(draft_memory, unscale_first):
    def journey(side: Side) -> None:
        supported = side.optimizer._step_supports_amp_scaling
        assert supported
        if not side.is_wrapped:
            side.optimizer._step_supports_amp_scaling = False  # the twin is unscaled by the scaler
        scaled_loop(torch.amp.GradScaler(DEVICE, init_scale=2.0**10), side, STEPS, unscale_first)

    counts = both_clipping(journey, None, draft_memory=draft_memory)
    if draft_memory and not unscale_first:
        assert counts["unchanged"] > 0, "the scaler looks for infinities by multiplying by 1"


@pytest.mark.parametrize("draft_memory", [0, "64MiB"])
def test_a_scaler_leaves_gradients_unscaled_which_the_next_backward_adds_to(draft_memory):
    def journey(side: Side) -> None:
        if not side.is_wrapped:
            side.optimizer._step_supports_amp_scaling = False
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
        for number in range(STEPS):
            scaler.scale(loss_of(side.model, number)).backward()
            side.model.head.bias.grad = torch.full_like(side.model.head.bias.grad, 2.0**10)  # the loop's own tensor
            scaler.step(side.optimizer)
            scaler.update()
            if number % 2:
                side.keep_gradients(f"step {number}")

    both_clipping(journey, None, draft_memory=draft_memory)


def test_a_scaler_and_a_built_in_clip_go_together():
    def journey(side: Side) -> None:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**6)
        for number in range(STEPS):
            scaler.scale(loss_of(side.model, number)).backward()
            if side.is_wrapped:
                scaler.step(side.optimizer)
                scaler.update()
                norm = side.optimizer.grad_norm
            else:
                norm = clip_by_hand(side, BITES_SOMETIMES, 1 / scaler.get_scale())
                side.optimizer.step()
            side.keep(f"norm {number}", norm)
            side.optimizer.zero_grad()

    both_clipping(journey, BITES_SOMETIMES)


def test_drafts_come_back_when_the_clip_stops_biting():
    model = Net()
    optimizer = sgd(model.parameters(), momentum=0.0, lr=0.0)
    noria.wrap(model, optimizer, device=DEVICE, max_grad_norm=1.0, draft_memory="64MiB")
    wrapped, updates = wrapped_by(model), optimizer._noria

    def steps(count: int) -> None:
        for number in range(count):
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(3)
    updates.max_grad_norm = 1e-3
    steps(10)
    assert not wrapped.draft_policy.pay and any("drafts have stopped" in note for note in noria.report(model).notes)
    updates.max_grad_norm = 1e3
    steps(12)
    assert wrapped.draft_policy.pay and not any("drafts have stopped" in note for note in noria.report(model).notes)
    kept = noria.report(model).drafts["kept"]
    steps(2)
    assert noria.report(model).drafts["kept"] > kept


def test_a_closure_under_an_optimizer_that_runs_whole_is_refused():
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, max_grad_norm=1.0)
    with pytest.raises(noria.UsageError, match="closure"):
        optimizer.step(lambda: loss_of(model, 0))


def test_an_optimizer_that_is_unwrapped_is_the_scaler_s_again():
    model = Net()
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE)
    noria.unwrap(model, optimizer)
    assert optimizer._step_supports_amp_scaling is False
    model.to(DEVICE)
    loss_of(model, 0).backward()
    assert torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), NEVER))
