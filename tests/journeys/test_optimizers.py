"""Optimizers as people use them and write them: several over one parameter, torch's faster flags, classes of one's own
that keep what they like. All give torch's bits.
"""

from __future__ import annotations

import copy

import noria
import pytest
import torch
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE
from tests.journeys.pairs import (
    HOSTILE,
    OPTIMIZERS,
    WIDTH,
    Net,
    Side,
    adamw,
    assert_moved,
    both,
    loss_of,
    state_tensors,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the same parameter in two optimizers --------------------------------------------------------------------


def in_turns(is_wrapped, **policy):
    torch.manual_seed(0)
    model = Net()
    optimizers = [adamw(model.parameters(), lr=1e-2), adamw(model.parameters(), lr=1e-3)]
    if is_wrapped:
        with on_machine(hostility=HOSTILE):
            noria.wrap(model, optimizers, device=DEVICE, window=2, **policy)
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
    assert (kernel == "fused") == all("shared with another optimizer" in each for each in report.kernels)
    assert_moved(ours)


@pytest.mark.parametrize("by", ["add_param_group", "its own list"])
def test_a_parameter_that_comes_into_a_second_optimizer_is_refused_by_the_fused_kernel(by):
    model = Net()
    held, other = list(model.parameters())[2:], list(model.parameters())[:2]
    optimizers = [adamw(held), adamw(other)]
    noria.wrap(model, optimizers, device=DEVICE, window=2, kernel="fused")
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
    as_usual = noria.plan(model, cls(model.parameters(), **options), device=DEVICE)
    faster = noria.plan(model, cls(model.parameters(), **options, **{flag: True}), device=DEVICE)
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
    planned = noria.plan(model, optimizer, device=DEVICE)
    noria.wrap(model, optimizer, device=DEVICE, window=2)
    assert optimizer.count == [0]
    assert planned.unpredicted == ["the state of Counting is not known before its first step"]
    assert noria.report(model).notes == planned.unpredicted


# ---- classes of one's own ------------------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    """Plain descent; `rate` says how far a parameter moves."""

    def __init__(self, parameters, lr=0.1, **defaults):
        super().__init__(parameters, {"lr": lr, **defaults})

    def rate(self, group, p):
        return group["lr"]

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(group, p)
        return loss

    def move(self, group, p):
        p.add_(p.grad, alpha=-self.rate(group, p))


class CountingInGroups(Own):
    def __init__(self, parameters):
        super().__init__(parameters, k=0)

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
        return super().step(closure)

    def rate(self, group, p):
        return group["lr"] / group["k"]


class CountingInState(Own):
    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)

    def rate(self, group, p):
        return group["lr"] / self.state["steps"]


class LookingAtState(Own):
    """Reads all of its state inside of its step, in each way that a dict has."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
        found = [values["seen"] for values in self.state.values()] + [each["seen"] for _, each in self.state.items()]
        self.mean = sum(found) / len(found)
        return super().step(closure)

    def rate(self, group, p):
        return group["lr"] / self.mean


class Scaled(Own):
    scale = 1.0

    def rate(self, group, p):
        return group["lr"] * self.scale


class ByAttribute(Own):
    """Also leaves a mark on the parameter."""

    def rate(self, group, p):
        p.seen = getattr(p, "seen", 0) + 1
        return group["lr"] * getattr(p, "lr_scale", 1.0) / p.seen


class Remembering(Own):
    """Knows some parameters by identity, in containers of every kind."""

    def __init__(self, parameters):
        super().__init__(parameters)
        held = [p for group in self.param_groups for p in group["params"]]
        self.slow, self.rates = held[:3], dict.fromkeys(held[3:5], 0.5)
        self.nested = {"pairs": [(held[6], {held[7]})]}
        self.first = held[0]

    def rate(self, group, p):
        (one, others), *_ = self.nested["pairs"]
        factor = 0.1 if any(p is each for each in self.slow) else self.rates.get(p, 1.0)
        return group["lr"] * factor * (2.0 if p is self.first or p is one or p in others else 1.0)


class WithPrevious(Own):
    """Keeps gradients by reference: in its state, and in a list of its own."""

    def step(self, closure=None):
        kept = [p.grad for group in self.param_groups for p in group["params"]]
        result = super().step(closure)
        self.kept = kept
        return result

    def move(self, group, p):
        previous = self.state[p].get("previous")
        p.add_(p.grad if previous is None else p.grad - 0.5 * previous, alpha=-group["lr"])
        for kept in getattr(self, "kept", []):
            if kept is not None and kept.shape == p.shape:
                p.add_(kept, alpha=-0.01)
        self.state[p]["previous"] = p.grad


class Halving(torch.optim.AdamW):
    """A class of torch's that edits gradients first."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return super().step(closure)


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization as it is written everywhere: steps up, computes gradients there, steps by another
    optimizer that shares its groups. Has state of its own beside that one's."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held if p.grad is not None]).norm()
        for p in held:
            self.state[p]["moved"] = None if p.grad is None else p.grad * (0.05 / norm)
            if p.grad is not None:
                p.add_(self.state[p]["moved"])
        before = [p.grad for p in held]
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        for p, old in zip(held, before, strict=True):
            if self.state[p]["moved"] is not None:
                p.sub_(self.state[p]["moved"])
                p.grad.add_(old, alpha=0.1)  # the old gradient is still what it was
        self.base.step()
        self.zero_grad()
        return loss

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups


def by_closure(side, number):
    def closure():
        loss = loss_of(side.model, number)
        loss.backward()
        return loss

    closure()
    side.keep(f"loss {len(side.kept)}", side.optimizer.step(closure))
    side.keep_gradients(f"step {number}")
    side.optimizer.zero_grad()


KEEPS_GRADIENTS = pytest.param(
    WithPrevious,
    marks=pytest.mark.cpu_only("a gradient that is kept in step() lies at home, and not where p.grad does"),
)
OWN = [CountingInGroups, CountingInState, LookingAtState, Counting, Remembering, KEEPS_GRADIENTS, Halving]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [*OWN, Sharpness])
def test_an_optimizer_of_ones_own_may_keep_what_it_likes_where_it_likes(optimizer, dtype):
    def journey(side):
        for step in range(5):
            if optimizer is Sharpness:
                by_closure(side, step)
            else:
                loss_of(side.model, step).backward()
                side.optimizer.step()
                side.keep_gradients(f"step {step}")
                side.optimizer.zero_grad(set_to_none=step != 2)
        side.keep("steps", side.optimizer.state_dict()["state"].get("steps", 0))

    both(journey, optimizer=optimizer, dtype=dtype)


def test_attributes_of_an_optimizer_count_whenever_they_are_set():
    def journey(side):
        for step in range(4):
            side.train(step, step + 1)
            side.optimizer.scale = 0.1 * step

    both(journey, optimizer=Scaled)


def test_attributes_of_parameters_are_those_of_the_user_both_ways():
    def journey(side):
        side.model.head.weight.lr_scale = 0.1
        for step in range(3):
            side.train(step, step + 1)
            side.model.embed.weight.lr_scale = 0.5
            side.keep(f"seen {step}", side.model.head.weight.seen)

    both(journey, optimizer=ByAttribute)


def test_a_parameter_appended_to_a_group_is_updated_from_then_on():
    def journey(side):
        late = side.optimizer.param_groups[0]["params"].pop()
        for step in range(4):
            side.train(step, step + 1)
            if step == 1:
                side.optimizer.param_groups[0]["params"].append(late)

    both(journey, optimizer=Own)


def test_a_step_that_raises_leaves_the_optimizer_with_its_own_parameters():
    class Raising(Own):
        def move(self, group, p):
            if self.state.get("stop"):
                raise ArithmeticError
            super().move(group, p)

    def journey(side):
        held = list(side.optimizer.param_groups[0]["params"])
        for step in range(3):
            side.train(step, step + 1)
            side.optimizer.state["stop"] = True
            loss_of(side.model, step).backward()
            with pytest.raises(ArithmeticError):
                side.optimizer.step()
            side.optimizer.zero_grad()
            assert all(a is b for a, b in zip(side.optimizer.param_groups[0]["params"], held, strict=True))
            del side.optimizer.state["stop"]

    both(journey, optimizer=Raising)


@pytest.mark.parametrize("where", ["forward", "backward", "after"])
def test_a_closure_that_raises_may_be_called_again(where):
    class Stubborn(Own):
        def step(self, closure=None):
            def again():
                try:
                    return closure()
                except ArithmeticError:
                    self.zero_grad()
                    return closure()

            return super().step(again)

    def fail(*_):
        raise ArithmeticError

    def journey(side):
        for step in range(4):
            calls = []

            def closure(step=step, calls=calls):
                calls.append(1)
                first = len(calls) == 1
                block = side.model.blocks[2].norm
                handle = block.register_forward_hook(fail) if first and where == "forward" else None
                try:
                    loss = loss_of(side.model, step)
                finally:
                    if handle is not None:
                        handle.remove()
                if first and where == "backward":
                    (loss * Failing.apply(torch.ones((), requires_grad=True))).backward()
                loss.backward()
                if first and where == "after":
                    fail()
                return loss

            side.keep(f"loss {step}", side.optimizer.step(closure))
            side.keep_gradients(f"step {step}")
            assert len(calls) == 2
            side.optimizer.zero_grad()

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            fail()

    both(journey, optimizer=Stubborn, moved=False)


@pytest.mark.parametrize("optimizer", [CountingInGroups, CountingInState, KEEPS_GRADIENTS, Sharpness])
def test_the_state_dict_of_an_optimizer_of_ones_own_takes_the_run_back(optimizer):
    def go(side, first, last):
        for step in range(first, last):
            by_closure(side, step)

    def journey(side):
        go(side, 0, 2)
        states = copy.deepcopy((side.model.state_dict(), side.optimizer.state_dict()))
        go(side, 5, 7)
        side.model.load_state_dict(states[0])
        side.optimizer.load_state_dict(states[1])
        side.kept.clear()
        go(side, 2, 4)

    both(journey, optimizer=optimizer)


@pytest.mark.parametrize("by", ["a module", "an object"])
def test_an_optimizer_that_keeps_parameters_out_of_reach_is_refused(by):
    class Keeper:
        def __init__(self, parameters):
            self.kept = {"all": list(parameters)}

    model = Net()
    optimizer = Own(model.parameters())
    optimizer.helper = model.blocks[1] if by == "a module" else Keeper(model.parameters())
    with pytest.raises(noria.UsageError, match=r"Own\.helper"):
        noria.wrap(model, optimizer, device=DEVICE, window=2)
    helper = optimizer.__dict__.pop("helper")
    noria.wrap(model, optimizer, device=DEVICE, window=2)
    loss_of(model, 0).backward()
    optimizer.helper = helper
    with pytest.raises(noria.UsageError, match=r"Own\.helper"):
        optimizer.step()


# ---- parameters without dimensions ---------------------------------------------------------------------------


class WithScale(Net):
    """As CLIP has it: a temperature without dimensions, here beside others of its unit."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.other = torch.nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale * self.other


UNKNOWN = (torch.optim.Adafactor, torch.optim.Rprop)  # their steps look at values, which a plan does not have
SEPARABLE = sorted(
    (cls for cls in noria.model.update_rules.SEPARABLE if cls.__name__ != "Muon"), key=lambda cls: cls.__name__
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cls", SEPARABLE, ids=lambda cls: cls.__name__)
def test_state_without_dimensions_is_planned_for_where_the_parameter_has_none(cls):
    counters = {"step", "eta", "mu", "mu_product"}

    def journey(side):
        side.train(0, 3)
        if side.is_wrapped:
            noria.unwrap(side.model, side.optimizer)
            with on_machine(hostility=HOSTILE):
                noria.wrap(side.model, side.optimizer, device=DEVICE, window=2, kernel="torch")
            assert len(noria.report(side.model).notes) == (cls in UNKNOWN)
            scale = wrapped_by(side.model).context.slot_of[side.model.scale]
            places = wrapped_by(side.model).context.plan.states[0]
            planned = {key: place.shape for (index, key), place in places.items() if index == scale.index}
            kept = {} if cls in UNKNOWN else dict(side.optimizer.state.get(side.model.scale, {}))
            assert planned == {key: () for key, value in kept.items() if value is not None and key not in counters}
        side.train(3, 5)

    both(journey, model=WithScale, optimizer=lambda ps: cls(ps, lr=1e-2))


@pytest.mark.parametrize("draft_memory", [0, "64MiB"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "lion"])
def test_a_moment_without_dimensions_goes_where_the_others_go(optimizer, draft_memory):
    """Into the home when a trained optimizer is wrapped, and with it into drafts; what is shown is what is there."""
    torch.manual_seed(0)
    plain = WithScale()
    theirs = OPTIMIZERS[optimizer](plain.parameters())
    train(plain, theirs, 0, 3)
    model, mine = copy.deepcopy((plain, theirs))
    noria.wrap(model, mine, device=DEVICE, kernel="fused", draft_memory=draft_memory)
    assert_same_bits(state_tensors(mine), state_tensors(theirs))
    for side in ((plain, theirs), (model, mine)):
        train(*side, 3, 6)
    for parameter, own in ((model.scale, plain.scale), (model.other, plain.other)):
        for key, value in theirs.state[own].items():
            torch.testing.assert_close(mine.state[parameter][key], value.cpu(), rtol=1e-5, atol=0)
    torch.testing.assert_close(model.state_dict()["scale"], plain.scale.detach().cpu(), rtol=1e-5, atol=0)
    if optimizer == "momentum":
        assert_same_bits(model.state_dict(), plain.state_dict())
        assert_same_bits(state_tensors(mine), state_tensors(theirs))
    if draft_memory:
        assert noria.report(model).drafts["kept"] > 0
    shown = mine.state[model.scale]["momentum_buffer" if optimizer == "momentum" else "exp_avg"]
    with torch.no_grad():
        shown.fill_(0.5)
    assert float(next(v for k, v in state_tensors(mine).items() if v is shown)) == 0.5
    before = float(model.state_dict()["scale"])
    train(model, mine, 6, 7)
    assert abs(float(model.state_dict()["scale"]) - before) > 1e-4


def train(model, optimizer, first, last):
    for number in range(first, last):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_subclass_of_a_wrapped_optimizers_class_goes_on_as_torchs():
    def journey(side):
        side.train(0, 2)
        if side.is_wrapped:
            own = type(side.optimizer)
            side.optimizer.__class__ = type("Mine", (own,), {})
        side.optimizer.state_dict()
        side.train(2, 4)
        if side.is_wrapped:
            plain = torch.nn.Linear(3, 3, device="cpu")
            mine = type(side.optimizer)(plain.parameters(), lr=0.1)  # without noria it is torch's
            plain(torch.ones(1, 3, device="cpu")).sum().backward()
            before = plain.weight.detach().clone()
            mine.step()
            assert not torch.equal(plain.weight, before)

    both(journey)


class EightBits(nn.Module):
    """A frozen weight in fp8 with its scale, and an adapter beside it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(WIDTH, WIDTH) * 0.1).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(()), requires_grad=False)
        self.down = nn.Parameter(torch.randn(WIDTH, 2) * 0.1)
        self.up = nn.Parameter(torch.randn(2, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ (self.weight.to(x.dtype) * self.scale).t() + x @ self.down @ self.up)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_frozen_weights_in_fp8_stream_as_they_are(dtype: torch.dtype):
    def journey(side: Side) -> None:
        for number in range(4):
            x = torch.randn(3, WIDTH, generator=torch.Generator(DEVICE).manual_seed(number), device=DEVICE)
            loss = side.model(x).square().mean()
            loss.backward()
            side.keep(f"loss {number}", loss)
            side.optimizer.step()
            side.optimizer.zero_grad()
        trained = [each for each in side.model.state_dict().items() if not each[0].endswith("weight")]
        for name, value in trained:
            side.keep(name, value)
        codes = [side.model.state_dict()[f"{number}.weight"].view(torch.uint8) for number in range(5)]
        side.keep("codes", torch.stack(codes))

    both(
        journey,
        model=lambda: nn.Sequential(*(EightBits(dtype) for _ in range(5))),
        optimizer=lambda parameters: adamw([each for each in parameters if each.requires_grad]),
    )
