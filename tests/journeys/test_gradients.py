"""`p.grad` is what it is in torch: from backward() until it is cleared, a tensor to read, edit, replace and keep."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import warnings

import noria
import pytest
import torch
from noria.forward.operator_watch import OperatorWatch
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn
from torch.overrides import _get_current_function_mode

from tests.device import DEVICE, settle
from tests.journeys.pairs import (
    BLOCKS,
    HOSTILE,
    LATE_UPDATES,
    WIDTH,
    Block,
    Net,
    Side,
    adamw,
    both,
    halved_in_hooks,
    loss_of,
    sgd,
)

KERNELS = ["torch", "fused"]


pytestmark = pytest.mark.usefixtures("one_thread")


def loop(between, *, steps=4, after=None, set_to_none=True):
    """A training loop with `between(side, number)` between backward() and step(), `after` between step() and
    zero_grad()."""

    def journey(side: Side) -> None:
        for number in range(steps):
            loss_of(side.model, number).backward()
            between(side, number)
            side.keep_gradients(f"step {number}")
            side.optimizer.step()
            if after is not None:
                after(side, number)
            side.optimizer.zero_grad(set_to_none=set_to_none)

    return journey


def nothing(side, number):
    pass


# ---- between backward() and step() -------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm_gives_torchs_norm_and_torchs_gradients(norm_type):
    def clip(side, number):
        norm = nn.utils.clip_grad_norm_(side.model.parameters(), 0.05, norm_type)
        side.keep(f"norm {number}", norm)

    both(loop(clip))


def test_clip_grad_value_reaches_the_update():
    both(loop(lambda side, number: nn.utils.clip_grad_value_(side.model.parameters(), 1e-3)))


def edit_in_place(side):
    for gradient in side.gradients():
        gradient.mul_(0.5).add_(1e-3)


def edit_data(side):
    for parameter in side.model.parameters():
        parameter.grad.data.mul_(3.0)


def edit_by_numpy(side):
    for gradient in side.gradients():
        gradient.numpy()[...] *= 0.25


def edit_a_view(side):
    for gradient in side.gradients():
        gradient.view(-1)[::2] = 0.125


def edit_by_foreach(side):
    torch._foreach_mul_(list(side.gradients()), 0.75)


def replace(side):
    for parameter in side.model.parameters():
        parameter.grad = parameter.grad * 2 + 1e-3


def replace_by_another_layout(side):
    for parameter in side.model.parameters():
        if parameter.dim() == 2:
            parameter.grad = (parameter.grad * 2).t().contiguous().t()


def clear_some(side):
    for index, parameter in enumerate(side.model.parameters()):
        if index % 3 == 0:
            parameter.grad = None


def read_only(side):
    side.keep(f"sum {len(side.kept)}", sum(gradient.abs().sum() for gradient in side.gradients()))


EDITS = [
    edit_in_place,
    edit_data,
    pytest.param(edit_by_numpy, marks=pytest.mark.cpu_only("numpy has no device memory")),
    edit_a_view,
    edit_by_foreach,
    replace,
    replace_by_another_layout,
    clear_some,
    read_only,
]


@pytest.mark.parametrize("edit", EDITS)
def test_step_believes_what_p_grad_says(edit):
    both(loop(lambda side, number: edit(side)))


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_every_other_step_over_uncleared_gradients_accumulates_as_in_torch(edit):
    def journey(side):
        for number in range(6):
            loss_of(side.model, number).backward()
            if number % 2 == 0:
                edit(side)
            side.keep_gradients(f"step {number}")
            side.optimizer.step()
            if number % 3 == 2:
                side.optimizer.zero_grad()

    both(journey)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_several_backwards_accumulate(kernel, set_to_none):
    def journey(side):
        for step in range(4):
            for micro in range(3):
                (loss_of(side.model, 3 * step + micro) / 3).backward()
                side.keep_gradients(f"step {step}.{micro}")
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=set_to_none)

    both(journey, kernel=kernel, hostility=LATE_UPDATES)


def test_held_gradients_come_before_the_visit_that_adds_to_them(tmp_path):
    """While the visit before computes: they are sent for before its own gradients are. All weights stay there."""
    model = Net()
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, trace=tmp_path / "trace.json")
    trace = wrapped_by(model).context.trace
    for _ in range(2):
        optimizer.zero_grad()
        for number in range(2):
            settle()
            wrapped_by(model).context.backend.stats("fetch")  # adds to the trace what the device has done by now
            trace.clear()
            loss_of(model, number).backward()
        optimizer.step()
    wrapped_by(model).context.engine.idle()
    ops = sorted((span.op, span.lane, span.verb, span.unit) for span in trace.spans())
    visits = list(dict.fromkeys(unit for _, _, verb, unit in ops if verb == "backward"))
    drained, brought = {}, {}
    for op, lane, verb, unit in ops:
        if verb == "drain":
            drained.setdefault(unit, op)
        elif lane == "fetch":
            brought.setdefault(unit, op)
    blocks = visits[2:-1]  # the buffer before the first block's is that of the head, which is too small
    early = [brought[unit] < drained[before] for before, unit in itertools.pairwise(blocks)]
    assert len(early) == BLOCKS - 2 and all(early), (early, ops)


def test_a_parameters_own_zero_and_a_models_zero_grad_clear_too():
    def journey(side):
        for step in range(4):
            loss_of(side.model, step).backward()
            side.optimizer.step()
            if step % 2:
                side.model.zero_grad(set_to_none=False)
            else:
                for parameter in side.model.parameters():
                    parameter.grad.zero_()
            side.keep_gradients(f"step {step}")

    both(journey, optimizer=sgd)


# ---- aliases, and edits after step() -----------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("alias", ["tensor", "view", "storage"])
def test_an_alias_that_is_kept_keeps_its_values(alias, kernel):
    def take(gradient):
        if alias == "tensor":
            return gradient
        if alias == "view":
            return gradient.view(-1)[1:]
        return torch.empty(0).set_(gradient.untyped_storage())

    def journey(side):
        kept = []
        for step in range(4):
            loss_of(side.model, step).backward()
            kept.append([take(parameter.grad) for parameter in side.model.parameters()])
            side.optimizer.step()
            side.optimizer.zero_grad()
        for step, gradients in enumerate(kept):
            for index, gradient in enumerate(gradients):
                side.keep(f"step {step}, {index}", gradient)

    both(journey, kernel=kernel, hostility=LATE_UPDATES)


def test_a_gradient_that_is_not_kept_is_not_copied():
    """`zero_grad` has made a Python object of every gradient, and so has the loop; neither keeps it."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    optimizer = sgd(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2, units=[nn.Linear])

    def step():
        model(torch.ones(2, WIDTH)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad.untyped_storage().nbytes() > 0
        optimizer.step()
        optimizer.zero_grad()

    def num_copies():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        return sum(event.count for event in profile.key_averages() if event.key == "aten::clone")

    step()
    assert num_copies() == 0
    model(torch.ones(2, WIDTH)).square().mean().backward()
    kept = model[0].weight.grad, model[1].weight.grad.view(-1)
    optimizer.step()
    optimizer.zero_grad()
    assert num_copies() == len(kept)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("edit", [e for e in EDITS if e is not clear_some])
def test_edits_after_step_do_not_disturb_the_update_under_way(edit, kernel):
    both(loop(nothing, after=lambda side, number: edit(side)), kernel=kernel, hostility=LATE_UPDATES)


@pytest.mark.parametrize("kernel", KERNELS)
def test_zeroing_right_after_step_does_not_disturb_the_update_under_way(kernel):
    both(loop(nothing, set_to_none=False), kernel=kernel, hostility=LATE_UPDATES)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_second_edit_after_a_second_step_waits_again(kernel):
    """The storage calls back once: it must be told to after every step."""

    def journey(side):
        for number in range(4):
            loss_of(side.model, number).backward()
            for _ in range(2):
                side.optimizer.step()
                for gradient in side.gradients():
                    gradient.mul_(-0.5)
            side.optimizer.zero_grad()

    both(journey, kernel=kernel, hostility=LATE_UPDATES)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gradient_that_was_never_cleared_is_applied_again(kernel):
    def journey(side):
        loss_of(side.model, 0).backward()
        for _ in range(3):
            side.optimizer.step()
        side.keep_gradients("still")

    both(journey, kernel=kernel, hostility=LATE_UPDATES, moved=False)


# ---- ways of calling backward ------------------------------------------------------------------------------


def test_retain_graph_and_backward_twice_adds_the_gradient_twice():
    def journey(side):
        for number in range(3):
            loss = loss_of(side.model, number)
            loss.backward(retain_graph=True)
            side.keep_gradients(f"once {number}")
            loss.backward()
            side.keep_gradients(f"twice {number}")
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey)


def test_backward_with_inputs_leaves_the_other_gradients_alone():
    def journey(side):
        for number in range(4):
            chosen = [*side.model.blocks[1].parameters(), *side.model.embed.parameters()]
            loss_of(side.model, number).backward(inputs=chosen)
            side.keep_gradients(f"chosen {number}")
            loss_of(side.model, number).backward()
            side.keep_gradients(f"all {number}")
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey)


@pytest.mark.parametrize("order", ["F0 F1 B0 B1", "F0 F1 B1 B0", "F0 F1 F2 B1 B0 B2", "F0 B0 F1 F2 B2 B1"])
def test_micro_batches_in_flight(order):
    def journey(side):
        for step in range(4):
            losses = {}
            for action in order.split():
                number = int(action[1:])
                if action[0] == "F":
                    losses[number] = loss_of(side.model, 10 * step + number)
                else:
                    losses.pop(number).backward()
                    side.keep_gradients(f"step {step}, {action}")
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey)


def test_a_sum_of_two_forwards_has_one_backward():
    def journey(side):
        for step in range(4):
            (loss_of(side.model, step) + 2 * loss_of(side.model, step + 100)).backward()
            side.keep_gradients(f"step {step}")
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey)


def test_a_backward_of_an_older_graph_after_a_step_is_refused_as_in_torch():
    def journey(side):
        side.train(0, 2)
        old = loss_of(side.model, 5)
        loss_of(side.model, 6).backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        del old
        side.optimizer.zero_grad()
        side.train(2, 4)

    both(journey)


def test_gradients_with_respect_to_the_input_are_torchs():
    class FromVectors(Net):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def journey(side):
        for step in range(4):
            generator = torch.Generator(DEVICE).manual_seed(step)
            x = torch.randn(2, 16, generator=generator).requires_grad_()
            side.model(x).square().mean().backward()
            side.keep(f"input {step}", x.grad)
            (of_input,) = torch.autograd.grad(side.model(x).square().mean(), [x])
            side.keep(f"input by grad {step}", of_input)
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey, model=FromVectors)


# ---- hooks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_post_accumulate_grad_hooks_see_and_edit_what_torch_shows_them(micro_batches):
    def journey(side):
        seen = {}

        def hook(parameter):
            index = next(i for i, p in enumerate(side.model.parameters()) if p is parameter)
            seen.setdefault(index, []).append(parameter.grad.clone())
            parameter.grad.mul_(0.5)

        for index, parameter in enumerate(side.model.parameters()):
            if index % 2:
                parameter.register_post_accumulate_grad_hook(hook)
        for step in range(3):
            for micro in range(micro_batches):
                loss_of(side.model, 10 * step + micro).backward()
                side.keep_gradients(f"step {step}.{micro}")
            side.optimizer.step()
            side.optimizer.zero_grad()
        for index, values in seen.items():
            for number, value in enumerate(values):
                side.keep(f"hook {index} {number}", value)

    both(journey)


def test_a_post_accumulate_grad_hook_may_use_the_gradient_up():
    def journey(side):
        total = {}

        def hook(parameter):
            total[parameter] = parameter.grad.sum()
            parameter.grad = None

        for parameter in side.model.blocks.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        side.train(0, 3)
        for parameter in side.model.blocks.parameters():
            assert parameter.grad is None
        side.keep("totals", torch.stack([total[p] for p in side.model.blocks.parameters()]))

    both(journey)


def test_tensor_hooks_on_parameters_and_on_outputs_change_the_gradient():
    def journey(side):
        for index, parameter in enumerate(side.model.parameters()):
            if index % 2:
                parameter.register_hook(lambda gradient: gradient * 0.5)
        handles = [
            block.register_forward_hook(lambda module, args, output: output.register_hook(lambda g: g * 1.5) and None)
            for block in side.model.blocks
        ]
        side.train(0, 3)
        for handle in handles:
            handle.remove()
        side.train(3, 5)

    both(journey)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("late", ["expand", "embed"])
def test_hooks_may_write_an_accumulated_gradient_twice_however_late_it_is_drained(kernel, late):
    def journey(side):
        last = side.model.blocks[-1].expand if late == "expand" else side.model.embed
        for number in range(3):
            loss_of(side.model, 10 * number).backward()
            with halved_in_hooks(side.model.head.weight, last.weight):
                loss_of(side.model, 10 * number + 1).backward()
            side.keep_gradients(f"step {number}")
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey, kernel=kernel, hostility={**HOSTILE, "hold_us": {"drain": 20_000}})


def test_full_backward_hooks_on_blocks_see_torchs_gradients():
    def journey(side):
        def hook(module, grad_input, grad_output):
            side.keep(f"hook {len(side.kept)}", grad_output[0])

        for block in side.model.blocks:
            block.register_full_backward_hook(hook)
        side.train(0, 4)

    both(journey)


# ---- scaler, hyperparameters, schedulers, step hooks, closures ---------------------------------------------


def test_a_grad_scaler_unscales_skips_and_updates_as_in_torch():
    def journey(side):
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2)
        for number in range(6):
            loss = loss_of(side.model, number)
            scaler.scale(loss * (float("inf") if number == 3 else 1.0)).backward()
            if number % 2:
                scaler.unscale_(side.optimizer)
                side.keep(f"norm {number}", nn.utils.clip_grad_norm_(side.model.parameters(), 0.05))
            scaler.step(side.optimizer)
            scaler.update()
            side.keep(f"scale {number}", scaler.get_scale())
            side.optimizer.zero_grad()

    both(journey)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_hyperparameters_edited_after_step_affect_the_next_step_only(kernel, tensor_lr):
    def optimizer(parameters):
        return adamw(parameters, lr=torch.tensor(1e-2) if tensor_lr else 1e-2, foreach=False)

    def journey(side):
        for number in range(4):
            loss_of(side.model, number).backward()
            side.optimizer.step()
            for group in side.optimizer.param_groups:
                if tensor_lr:
                    group["lr"].mul_(0.5)
                else:
                    group["lr"] *= 0.5
                group["betas"] = (0.9 - 0.1 * number, 0.99)
                group["weight_decay"] += 0.1
            side.optimizer.zero_grad()

    both(journey, optimizer=optimizer, kernel=kernel, hostility=LATE_UPDATES)


@pytest.mark.parametrize("kernel", KERNELS)
def test_betas_that_are_tensors_may_be_edited_in_place_after_step(kernel):
    def journey(side):
        betas = torch.tensor(0.9), torch.tensor(0.99)
        side.optimizer.param_groups[0]["betas"] = betas
        for number in range(4):
            loss_of(side.model, number).backward()
            side.optimizer.step()
            betas[0].mul_(0.5)
            side.optimizer.zero_grad()

    def optimizer(parameters):
        return adamw(parameters, lr=torch.tensor(1e-2), foreach=False)

    both(journey, optimizer=optimizer, kernel=kernel, hostility=LATE_UPDATES)


SCHEDULERS = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.5, 1.0, 3),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, 10),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[2],
    ),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-3, 2),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("when", ["before wrap", "after wrap"])
def test_schedulers_give_torchs_rates_without_a_warning(name, when):
    made = {}

    def optimizer(parameters):
        o = adamw(parameters)
        if when == "before wrap":
            made[id(o)] = SCHEDULERS[name](o)
        return o

    def journey(side):
        scheduler = made.get(id(side.optimizer)) or SCHEDULERS[name](side.optimizer)
        for number in range(5):
            loss_of(side.model, number).backward()
            side.optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            side.keep(f"lr {number}", side.optimizer.param_groups[0]["lr"])
            side.optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        both(journey, optimizer=optimizer, model=lambda: Net(3), moved=False)


@pytest.mark.parametrize("when", ["before wrap", "after wrap"])
def test_step_hooks_run_once_a_step(when):
    counts = {}

    def hook(optimizer):
        def pre(o, args, kwargs):
            counts[id(optimizer), "pre"] = counts.get((id(optimizer), "pre"), 0) + 1

        def post(o, args, kwargs):
            counts[id(optimizer), "post"] = counts.get((id(optimizer), "post"), 0) + 1

        optimizer.register_step_pre_hook(pre)
        optimizer.register_step_post_hook(post)

    def make(parameters):
        o = adamw(parameters)
        if when == "before wrap":
            hook(o)
        return o

    def journey(side):
        if when == "after wrap":
            hook(side.optimizer)
        side.train(0, 3)
        assert counts[id(side.optimizer), "pre"] == counts[id(side.optimizer), "post"] == 3

    both(journey, optimizer=make)


def test_closures_run_once_and_give_the_loss_back():
    def journey(side):
        for number in range(4):
            side.step_by_closure(number)

    both(journey)


def test_a_parameter_frozen_after_wrap_stands_still_and_moves_again_when_it_thaws():
    def journey(side):
        side.train(0, 2)
        for parameter in side.model.blocks[: BLOCKS // 2].parameters():
            parameter.requires_grad_(False)
        side.train(2, 5)
        for parameter in side.model.parameters():
            parameter.requires_grad_(True)
        side.train(5, 7)

    both(journey)


@pytest.mark.parametrize("policy", [{}, {"kernel": "fused", "draft_memory": "8MiB"}], ids=str)
@pytest.mark.parametrize("part", ["blocks.1", ""])
def test_what_is_frozen_after_its_forward_gets_no_gradient(part, policy):
    def journey(side):
        side.train(0, 2)
        frozen = side.model.get_submodule(part)
        for number in (2, 3):
            loss = loss_of(side.model, number)
            frozen.requires_grad_(False)
            loss.backward()
            assert all(parameter.grad is None for parameter in frozen.parameters())
            side.keep_gradients(f"step {number}")
            if part:
                side.keep(f"norm {number}", torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.1))
            side.optimizer.step()
            side.optimizer.zero_grad()
            frozen.requires_grad_(True)
        side.train(4, 6)

    both(journey, **policy)


RESHAPED = {
    "transposed": lambda gradient: gradient.t_(),
    "of more dimensions": lambda gradient: gradient.unsqueeze_(0),
    "given a view of its data": lambda gradient: setattr(gradient, "data", gradient.data.t()),
    "made to require a gradient": lambda gradient: gradient.requires_grad_(True),
}


@pytest.mark.parametrize("change", RESHAPED)
def test_a_shape_that_a_gradient_was_left_in_is_gone_with_it(change):
    def journey(side):
        side.train(0, 1)
        for number in (1, 2):
            loss_of(side.model, number).backward()
            if number == 1:
                RESHAPED[change](side.model.blocks[1].expand.weight.grad)
                side.optimizer.zero_grad()
        gradient = side.model.blocks[1].expand.weight.grad
        assert gradient.shape == (2 * WIDTH, WIDTH) and gradient.is_contiguous() and not gradient.requires_grad
        side.keep_gradients("step 2")
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.train(3, 5)

    both(journey)


def test_a_compiled_step_runs_as_it_is():
    def journey(side):
        step, clear = side.optimizer.step, side.optimizer.zero_grad
        if side.is_wrapped:
            step, clear = (torch.compile(each, backend="eager") for each in (step, clear))
        for number in range(3):
            side.keep(f"loss {number}", loss_of(side.model, number))
            loss_of(side.model, number).backward()
            step()
            clear()

    both(journey)


def test_weights_hyperparameters_and_gradients_of_groups_are_kept_apart():
    def optimizer(parameters):
        parameters = list(parameters)
        return torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1], "lr": 1e-2, "weight_decay": 0.1},
                {"params": [p for p in parameters if p.dim() <= 1], "lr": 3e-2, "weight_decay": 0.0},
            ]
        )

    both(lambda side: side.train(0, 4), optimizer=optimizer)


@pytest.mark.parametrize("unwrapped", [False, True])
def test_a_gradient_that_was_kept_outlives_model_and_optimizer(unwrapped):
    model = Net()
    optimizer = adamw(model.parameters())
    with on_machine(hostility=LATE_UPDATES):
        noria.wrap(model, optimizer, device=DEVICE, window=2, kernel="fused")
    loss_of(model, 0).backward()
    kept = model.head.weight.grad
    expected = kept.clone()
    optimizer.step()
    assert noria.report(model).num_fetches > 0
    if unwrapped:
        noria.unwrap(model, optimizer)
    del model, optimizer
    gc.collect()
    assert_same_bits({"gradient": kept}, {"gradient": expected})
    kept.mul_(2)  # the first write after step() looks for readers: none is left
    assert_same_bits({"gradient": kept}, {"gradient": expected * 2})


def test_a_transposed_view_of_a_gradient_is_another_gradient():
    def journey(side):
        for step in range(3):
            loss_of(side.model, step).backward()
            square = side.model.blocks[1].square.weight
            square.grad = square.grad.t()
            side.optimizer.step()
            side.keep_gradients(f"step {step}")
            side.optimizer.zero_grad()

    class Square(Block):
        def __init__(self):
            super().__init__()
            self.square = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.square(super().forward(x))

    def make():
        model = Net()
        model.blocks[1] = Square()
        return model

    both(journey, model=make)


@pytest.mark.parametrize("when", ["before wrap", "after wrap"])
def test_hooks_on_accumulation_nodes_which_would_see_nothing_are_refused(when):
    """What DistributedDataParallel and old mixed-precision recipes do."""
    model = Net()
    optimizer = adamw(model.parameters())

    def hook_all():
        nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
        for node in nodes:
            node.register_hook(lambda *_: None)
        return nodes

    nodes = hook_all() if when == "before wrap" else []
    noria.wrap(model, optimizer, device=DEVICE, window=2)
    nodes += hook_all() if when == "after wrap" else []
    with pytest.raises(noria.UsageError, match="AccumulateGrad"):
        loss_of(model, 0).backward()


def test_an_edit_after_a_backward_that_raised_waits_for_what_was_on_its_way():
    def journey(side):
        side.train(0, 2)
        loss_of(side.model, 2).backward()
        fails = side.model.embed.weight.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(side.model, 3).backward()
        fails.remove()
        torch.nn.utils.clip_grad_value_(side.model.parameters(), 1e-3)
        side.keep_gradients("clipped")
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.train(4, 6)

    both(journey, hostility={**HOSTILE, "hold_us": {"drain": 5_000}})


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_a_forward_beside_one_of_another_thread_is_refused(activations):
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    noria.wrap(model, device=DEVICE, window=2, activations=activations)
    batch = torch.arange(6).view(1, 6)
    is_in_block, goes_on, found = threading.Event(), threading.Event(), []

    def hold(*_):
        is_in_block.set()
        assert goes_on.wait(60)

    held = model.blocks[0].register_forward_pre_hook(hold)

    def forward():
        with torch.device(DEVICE):
            found.append(model(batch).detach())
            found.append(torch._C._autograd._top_saved_tensors_default_hooks(True))

    other = threading.Thread(target=forward, daemon=True)
    other.start()
    assert is_in_block.wait(60)
    hidden = torch.ones(1, 16, device=DEVICE)
    for call in (lambda: model(batch), lambda: model.blocks[0](hidden), lambda: model.blocks[2](hidden)):
        with torch.no_grad(), pytest.raises(noria.UsageError, match="one forward of a wrapped model at a time"):
            call()
    goes_on.set()
    other.join(60)
    held.remove()
    assert found[1] is None, "its own hooks are off again"
    with torch.no_grad():
        assert torch.equal(found[0], plain(batch))
        assert torch.equal(model(batch), plain(batch))  # by this thread, now that the other one is done


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_a_forward_that_dies_on_another_thread_leaves_nothing_behind(activations):
    class Loose(Net):
        """Uses a block's weight outside of the block, which only a mode of the forward's thread sees."""

        def forward(self, tokens):
            return super().forward(tokens) * next(self.blocks[0].parameters()).mean()

    def journey(side):
        def die(*_):
            raise SystemExit

        def forward():
            with torch.device(DEVICE), contextlib.suppress(SystemExit):
                loss_of(side.model, 9)

        dies = side.model.blocks[1].register_forward_pre_hook(die)
        other = threading.Thread(target=forward)
        other.start()
        other.join(60)
        dies.remove()
        packed = []

        def pack(tensor):
            packed.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            side.train(2, 3)
        assert packed, "the user's own hooks are still there"
        side.train(4, 6)

    both(journey, model=Loose, activations=activations)


def test_a_watch_that_a_dead_thread_has_entered_is_entered_anew():
    watch = OperatorWatch({}, lambda units: 0, lambda hook, tensors: None)
    other = threading.Thread(target=watch.start)
    other.start()
    other.join(60)
    watch.stop()  # as the next forward does, before it starts
    watch.start()
    assert _get_current_function_mode() is watch
    watch.stop()
    assert _get_current_function_mode() is not watch


def test_a_forward_waits_for_a_backward_of_another_thread():
    """Begun there and not failed: what it does while the forward waits counts."""
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Net()
        sides.append((model, sgd(model.parameters())))
        noria.wrap(*sides[-1], device=DEVICE)
    (model, optimizer), (plain, its) = sides
    is_in_block, comes_forward, failures = threading.Event(), threading.Event(), []

    def stay(gradient):
        is_in_block.set()
        assert comes_forward.wait(60)

    def trained():
        try:
            torch.set_default_device(DEVICE)
            with model.blocks[-1].register_forward_hook(
                lambda module, args, output: output.register_hook(stay) and None
            ):
                loss = loss_of(model, 0)
            backward = threading.Thread(target=loss.backward)
            backward.start()
            assert is_in_block.wait(60)
            comes_forward.set()
            with torch.no_grad():
                loss_of(model, 1)
            backward.join()
        except BaseException as error:
            failures.append(error)

    training = threading.Thread(target=trained, daemon=True)
    training.start()
    training.join(120)
    assert not training.is_alive() and not failures, failures
    loss_of(plain, 0).backward()
    for updates in (optimizer, its):
        updates.step()
    assert_same_bits(model.state_dict(), plain.state_dict())
