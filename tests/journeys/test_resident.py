"""Units that stay on the device from the second step on, all of them or some: all bits are those of a model that
streams."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
import torch.distributed.checkpoint
from noria import _C
from noria.forward.cost_recorder import CostRecorder
from noria.forward.link_paces import LinkPaces
from noria.planning.measured_costs import MeasuredCosts
from noria.planning.streamed import NUM_SLOTS
from noria.planning.wrap_plan import with_stays, with_streamed
from noria.runtime.rest import Rest
from noria.step.torch_on_device import TorchOnDevice
from noria.step.torch_step import TorchStep
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE, SHARES
from tests.journeys.pairs import OPTIMIZERS, Net, Side, adamw, loss_of, sgd, state_tensors
from tests.journeys.test_streamed import BY_TORCH as TORCHS

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        DEVICE == "cuda" and not _C.has_kernel_images(), reason="this build has no kernels for devices: it had no nvcc"
    ),
]


def sampled(parametrize: pytest.MarkDecorator) -> Callable[[Any], Any]:
    return lambda test: pytest.mark.sampled(3)(parametrize(test))


ROOM = "64MiB"
STAYED = 2
PART = "part"
"""In place of an amount: what about half of the units take. The others stream."""
MASTERS = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "masters"])
BY_TORCH: dict[str, Any] = {"kernel": "torch", "optimizer_device": "device"}
KINDS = sampled(
    pytest.mark.parametrize(
        "kind",
        [{}, {"dtype": torch.bfloat16}, BY_TORCH, {**BY_TORCH, "dtype": torch.bfloat16}],
        ids=["fp32", "masters", "by torch", "masters by torch"],
    )
)
BOTH = sampled(
    pytest.mark.parametrize("kind", [{}, {**BY_TORCH, "dtype": torch.bfloat16}], ids=["fp32", "masters by torch"])
)


@pytest.fixture(params=["all", PART])
def stay(request) -> str:
    return request.param


def resident(stay: str, model: Any, optimizer: Any, policy: dict[str, Any]) -> dict[str, Any]:
    """The fields of a policy under which all units stay, or some."""
    own = {"resident": "all", "device_memory": ROOM}
    if stay == "all":
        return own
    every = noria.plan(model, optimizer, device=DEVICE, **{"kernel": "fused", **policy, **own})
    some = {**own, "resident": int(0.6 * every.resident_bytes), "window": 2}
    planned = noria.plan(model, optimizer, device=DEVICE, **{"kernel": "fused", **policy, **some})
    assert 0 < len(planned.stays) < len(planned.units)
    return some


def rest_of(model: nn.Module) -> Rest:
    return wrapped_by(model).rest


def stayed(model: nn.Module) -> nn.Module:
    """A block that stays, if any of the model does."""
    block = model.blocks[STAYED]
    unit = wrapped_by(model).context.slot_of[block.norm.bias].unit
    assert rest_of(model).has(unit) == is_at_rest(model)
    return block


def is_at_rest(model: nn.Module) -> bool:
    return rest_of(model).is_on


def sides(
    stay: str,
    model: Callable[[], nn.Module] = Net,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = adamw,
    **policy: Any,
) -> list[Side]:
    """One that streams through two units, and one at rest."""
    torch.manual_seed(0)
    first = model().cpu()
    made = []
    for each, stays in ((first, False), (copy.deepcopy(first), True)):
        made.append(Side(each, optimizer(each.parameters()) if optimizer else None, True))
        own = resident(stay, each, made[-1].optimizer, policy) if stays else {"window": 2}
        with on_machine(hostility={"seed": 7, "poison": True}):
            noria.wrap(each, made[-1].optimizer, device=DEVICE, **{"kernel": "fused", **policy, **own})
    return made


def compare(stay: str, journey: Callable[[Side], Any], *, rests: bool = True, **options: Any) -> Side:
    """Leads both sides through the journey. Returns the one at rest."""
    streams, stays = sides(stay, **options)
    for side in (streams, stays):
        torch.manual_seed(1)
        journey(side)
    assert is_at_rest(stays.model) == rests and not is_at_rest(streams.model)
    if streams.kept or stays.kept:
        assert_same_bits(stays.kept, streams.kept)
    assert_same_bits(stays.model.state_dict(), streams.model.state_dict())
    if stays.optimizer is not None and state_tensors(streams.optimizer):
        assert_same_bits(state_tensors(stays.optimizer), state_tensors(streams.optimizer))
    report = noria.report(stays.model)
    assert report.ledger_agrees, str(report)
    return stays


def train(side: Side, between: Callable[[int], Any] = lambda number: None, steps: int = 5) -> None:
    for number in range(steps):
        loss = loss_of(side.model, number)
        loss.backward()
        side.keep_gradients(f"step {number}")
        between(number)
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.keep(f"loss {number}", loss)


def beside_a_choice() -> tuple[Side, Side]:
    """Returns a side that streams through two units, and one whose device has room for most units."""
    streams, side = (Side(model, adamw(model.parameters()), True) for model in (Net().cpu(), Net().cpu()))
    side.model.load_state_dict(streams.model.state_dict())
    every = noria.plan(side.model, side.optimizer, device=DEVICE, kernel="fused", resident="all")
    room = int(0.95 * SHARES * every.resident_bytes)
    noria.wrap(streams.model, streams.optimizer, device=DEVICE, kernel="fused", window=2)
    noria.wrap(side.model, side.optimizer, device=DEVICE, kernel="fused", device_memory=room)
    return streams, side


def adamw_of_trained(parameters: Any) -> torch.optim.Optimizer:
    return adamw([parameter for parameter in parameters if parameter.requires_grad])


def train_with_averages(side: Side, first: int) -> None:
    ema = noria.ema(side.model, 0.9)
    for number in range(first, first + 3):
        side.train(number, number + 1)
        ema.update()
    with ema.applied():
        side.keep("average", loss_of(side.model, 9))


# ---- bits ---------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_bits_are_those_of_a_model_that_streams(stay, rule, kind):
    stays = compare(stay, train, optimizer=OPTIMIZERS[rule], **kind)
    context = wrapped_by(stays.model).context
    before = context.engine.copies.times_fetched()
    train(Side(stays.model, stays.optimizer, True), steps=2)
    after = context.engine.copies.times_fetched()
    still = {unit for unit, number in enumerate(after) if number == before[unit]}
    assert still == context.plan.stays  # the others move
    assert len(noria.report(stays.model).at_rest) == len(still)


@pytest.mark.sampled(3)
@MASTERS
@pytest.mark.parametrize("name", TORCHS)
def test_torchs_optimizers_have_the_bits_of_the_device(stay, name, dtype, monkeypatch):
    """Also in steps in which nothing is at rest."""

    def at_home(self: TorchStep, unit: int, *args: Any) -> None:
        raise AssertionError(f"unit {unit} is updated at home")

    monkeypatch.setattr(TorchStep, "run_now", at_home)
    model, optimizer = TORCHS[name]

    def journey(side: Side) -> None:
        side.train(0, 3)
        rest_of(side.model).end()
        loss_of(side.model, 3).backward()
        rest_of(side.model).end()
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.train(4, 6)

    compare(stay, journey, model=model, optimizer=optimizer, dtype=dtype, **BY_TORCH)


@pytest.mark.skipif(DEVICE == "cpu", reason="the host has all kernels")
@pytest.mark.parametrize("resident", ["all", "auto"])
def test_torch_needs_no_kernels_of_norias(monkeypatch, resident):
    """As in a build without nvcc."""
    monkeypatch.setattr(_C, "has_kernel_images", lambda: False)
    model = Net().cpu()
    side = Side(model, adamw(model.parameters()), True)
    noria.wrap(model, side.optimizer, device=DEVICE, device_memory=ROOM, resident=resident, **BY_TORCH)
    side.train(0, 3)
    assert is_at_rest(model) == (resident == "all")
    model = Net().cpu()
    with pytest.raises(noria.UsageError, match="without nvcc"):
        noria.wrap(model, adamw(model.parameters()), device=DEVICE, resident="all", device_memory=ROOM)


def test_torch_gets_few_elements_at_once(stay, monkeypatch):
    sizes = []

    def run(self: TorchOnDevice, groups: Any, memory: Any, gradient: Any) -> None:
        if isinstance(memory, Rest):
            sizes.append([slot.like.numel() for _, slots in groups for slot in slots])
        whole(self, groups, memory, gradient)

    whole = TorchOnDevice.run
    monkeypatch.setattr(TorchOnDevice, "run", run)
    monkeypatch.setattr("noria.step.resident_step.PIECE_ELEMENTS", 200)
    compare(stay, train, **BY_TORCH)
    several = [each for each in sizes if len(each) > 1]
    assert several and all(sum(each) <= 200 for each in several) and any(sum(each) > 200 for each in sizes)


class Given(nn.Module):
    """Its weight gets the gradient that was given."""

    def __init__(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.gradient = gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.weight * self.gradient.to(self.weight)).sum()


@MASTERS
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_all_special_values_have_the_bits_of_the_host(rule, dtype):
    """Weight, moments and gradient: all combinations. A NaN counts as a NaN."""
    limits = torch.finfo(torch.float32)
    edges = [limits.max, limits.tiny, limits.smallest_normal * (1 - 2**-24), 2.0**-149, 77 * 2.0**-149]
    positive = [0.0, 1.0, 0.1, float("inf"), float("nan"), 1e20, 1e-38, 3e-5, 1 + 2.0**-7, *edges]
    special = torch.tensor([*positive, *(-each for each in positive)], device="cpu")
    weight, first, second, gradient = (each.flatten() for each in torch.meshgrid([special] * 4, indexing="ij"))
    found = []
    for policy in ({}, {"resident": "all"}):
        model = nn.Sequential(Given(torch.ones(weight.shape), gradient.to(DEVICE)), Given(torch.ones(4), torch.ones(4)))
        optimizer = OPTIMIZERS[rule](model.cpu().parameters())
        noria.wrap(model, optimizer, device=DEVICE, kernel="fused", dtype=dtype, device_memory="64MiB", **policy)
        for number in range(2):  # from the second forward on units stay
            model(torch.zeros((), device=DEVICE)).backward()
            if number:
                model.load_state_dict({**model.state_dict(), "0.weight": weight})
                state = optimizer.state[model[0].weight]
                for key, value in {"exp_avg": first, "exp_avg_sq": second, "momentum_buffer": first}.items():
                    if key in state:
                        state[key].copy_(value)
                assert is_at_rest(model) == bool(policy)
            optimizer.step()
            optimizer.zero_grad()
        named = {"weight": model.state_dict()["0.weight"], **state_tensors(optimizer)}
        found.append({key: torch.where(value.isnan(), torch.nan, value.detach()) for key, value in named.items()})
        assert ("0.low_bits" in named) == (dtype is not None and rule != "sgd")  # SGD's state has no entries
        noria.unwrap(model, optimizer)
    assert_same_bits(found[1], found[0])


def test_a_device_that_is_not_brought_up_to_date_has_other_bits(stay, monkeypatch):
    """The control arm: what is loaded while the model is at rest does not reach the device."""

    def journey(side: Side) -> None:
        train(side, steps=2)
        loss_of(side.model, 9).backward()
        side.optimizer.zero_grad()
        side.model.load_state_dict({key: value / 2 for key, value in side.model.state_dict().items()})
        side.train(2, 4)

    compare(stay, journey)
    monkeypatch.setattr(Rest, "_copy", lambda self, unit, purposes, to_device: None)
    with pytest.raises(AssertionError):
        compare(stay, journey)


@KINDS
def test_clips_and_accumulation(stay, kind):
    def journey(side: Side) -> None:
        def between(number: int) -> None:
            loss_of(side.model, 100 + number).backward()
            side.keep(f"norm {number}", nn.utils.clip_grad_norm_(side.model.parameters(), 0.05))

        train(side, between)

    compare(stay, journey, **kind)


@KINDS
@pytest.mark.parametrize("policy", [{"max_grad_norm": 0.05}, {}], ids=["policy", "call"])
def test_norias_own_clips_have_the_same_norms(stay, policy, kind):
    def journey(side: Side) -> None:
        def between(number: int) -> None:
            if not policy:
                side.keep(f"norm {number}", side.optimizer.clip_grad_norm_(0.05))

        train(side, between)
        if policy:
            side.keep("last norm", side.optimizer.grad_norm)

    compare(stay, journey, **kind, **policy)


@BOTH
def test_a_scaler_unscales_and_skips(stay, kind):
    def journey(side: Side) -> None:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=2)
        for number in range(6):
            loss = loss_of(side.model, number)
            scaler.scale(loss).backward()
            if number == 3:
                next(side.gradients()).fill_(float("inf"))
            scaler.step(side.optimizer)
            scaler.update()
            side.keep(f"scale {number}", scaler.get_scale())
            side.keep_gradients(f"step {number}")
            side.optimizer.zero_grad()

    compare(stay, journey, **kind)


@BOTH
def test_edited_and_foreign_gradients(stay, kind):
    def journey(side: Side) -> None:
        def between(number: int) -> None:
            first, second, *_ = side.model.parameters()
            first.grad.mul_(0.5)
            second.grad = torch.ones_like(second.grad).t().contiguous().t() if second.dim() > 1 else second.grad * 3
            side.model.head.bias.grad = None

        train(side, between)

    compare(stay, journey, optimizer=sgd, **kind)


@BOTH
def test_a_parameter_whose_first_gradient_comes_late(stay, kind):
    """Its state is made by a step that streams."""

    class Branch(Net):
        takes = False

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.embed(tokens))
            return self.head(self.blocks[1](x) if self.takes else x)

    def journey(side: Side) -> None:
        for number in range(6):
            side.model.takes = number >= 3
            side.train(number, number + 1)

    compare(stay, journey, model=Branch, **kind)


@BOTH
def test_closures_schedulers_and_param_groups(stay, kind):
    def journey(side: Side) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(side.optimizer, 0.5)
        for number in range(5):
            side.step_by_closure(number)
            side.optimizer.zero_grad()
            scheduler.step()

    def groups(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return adamw([{"params": [first], "lr": 0.1}, {"params": others, "weight_decay": 0.3}])

    compare(stay, journey, optimizer=groups, **kind)


@BOTH
def test_frozen_parameters_and_tied_weights(stay, kind):
    def tied() -> nn.Module:
        net = Net()
        net.head.weight = net.embed.weight
        net.blocks[1].requires_grad_(False)
        return net

    compare(stay, train, model=tied, optimizer=adamw_of_trained, **kind)


@BOTH
def test_gradients_that_are_there_when_it_begins(stay, kind):
    """And gradients that are zeroed, not dropped."""

    def journey(side: Side) -> None:
        for number in range(5):
            for micro in range(2):
                loss_of(side.model, 10 * number + micro).backward()
            side.keep_gradients(f"step {number}")
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=False)

    compare(stay, journey, **kind)


def test_two_models_whose_backward_comes_after_both_forwards(stay):
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(), Net()

    def journey(side: Side) -> None:
        for number in range(4):
            (loss_of(side.model.first, number) + loss_of(side.model.second, number)).backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    torch.manual_seed(0)
    pairs = [Pair()]
    pairs.append(copy.deepcopy(pairs[0]))
    states = []
    for pair in pairs:
        side, both = Side(pair, adamw(pair.parameters()), True), [pair.first, pair.second]
        own = resident(stay, both, side.optimizer, {}) if pair is pairs[1] else {"window": 2}
        noria.wrap(both, side.optimizer, device=DEVICE, kernel="fused", **own)
        journey(side)
        states.append({**pair.first.state_dict(), **{f"2 {k}": v for k, v in pair.second.state_dict().items()}})
    assert is_at_rest(pairs[1].first)
    assert_same_bits(states[1], states[0])


def test_evaluations_in_between(stay):
    def journey(side: Side) -> None:
        for number in range(4):
            side.train(number, number + 1)
            with torch.no_grad():
                side.keep(f"evaluation {number}", loss_of(side.model.eval(), 50))
            side.model.train()

    compare(stay, journey)


def test_inference_alone(stay):
    def journey(side: Side) -> None:
        with torch.no_grad():
            for number in range(3):
                side.keep(f"loss {number}", loss_of(side.model, number))

    compare(stay, journey, optimizer=None)


# ---- looks at the home --------------------------------------------------------------------------------------------


@KINDS
def test_looks_see_what_is_on_the_device(stay, kind):
    def journey(side: Side) -> None:
        for number in range(4):
            side.train(number, number + 1)
            side.keep(f"weights {number}", side.model.state_dict()["head.weight"])
            [state] = [side.optimizer.state[p] for n, p in side.model.named_parameters() if n == "head.weight"]
            side.keep(f"moment {number}", state["exp_avg"])
            with noria.materialize(side.model, read_only=True):
                side.keep(f"materialized {number}", side.model.embed.weight)

    compare(stay, journey, **kind)


@KINDS
def test_edits_reach_the_device(stay, kind):
    def journey(side: Side) -> None:
        side.train(0, 2)
        with torch.no_grad(), noria.materialize(side.model):
            side.model.embed.weight[3] = 0.5
        side.train(2, 4)
        kept = side.optimizer.state[side.model.head.weight]["exp_avg"]
        side.train(4, 5)
        wrapped_by(side.model).context.engine.idle()  # one that streams would update it meanwhile
        kept.mul_(0.25)  # a tensor that the user has held over a step
        side.train(5, 7)
        side.optimizer.state[side.model.head.bias]["exp_avg_sq"] = torch.ones(side.model.head.bias.shape)
        side.train(7, 9)
        side.model.state_dict()["embed.weight"].mul_(2)
        side.train(9, 11)

    compare(stay, journey, **kind)


@BOTH
def test_writes_to_weights_on_the_device_stay(stay, kind):
    """A model that streams takes them inside of noria.materialize."""

    def journey(side: Side) -> None:
        side.train(0, 2)
        loss_of(side.model, 0)
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if not is_at_rest(side.model):
                stack.enter_context(noria.materialize(side.model))
            stayed(side.model).contract.weight.data.mul_(1.5)
            stayed(side.model).norm.bias.zero_()
        side.train(2, 4)

    compare(stay, journey, **kind)


@KINDS
def test_a_write_to_state_and_one_to_a_weight_of_the_same_unit_both_count(stay, kind):
    """As dormant neurons are made anew."""

    def journey(side: Side) -> None:
        side.train(0, 3)
        loss_of(side.model, 0)
        for parameter in stayed(side.model).parameters():
            state = side.optimizer.state[parameter]
            with torch.no_grad(), contextlib.ExitStack() as stack:
                if not is_at_rest(side.model):
                    stack.enter_context(noria.materialize(side.model))
                state["exp_avg"].zero_()
                parameter.fill_(3.0)  # no element has this value
        side.train(3, 6)

    compare(stay, journey, **kind)


@BOTH
def test_looks_between_a_forward_and_its_backward(stay, kind):
    def journey(side: Side) -> None:
        for number in range(4):
            loss = loss_of(side.model, number)
            torch.save(side.model.state_dict(), io.BytesIO())
            with noria.materialize(side.model, read_only=True):
                side.keep(f"weights {number}", side.model.head.weight)
            loss.backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    compare(stay, journey, **kind)


@KINDS
def test_low_bits_that_do_not_belong_to_a_master_are_dropped(stay, kind):
    def journey(side: Side) -> None:
        side.train(0, 3)
        state = copy.deepcopy(side.optimizer.state_dict())
        for values in state["state"].values():
            if "low_bits" in values:
                values["low_bits"].fill_(-1)  # beside a zero this is a NaN
        side.model.load_state_dict({key: torch.zeros_like(value) for key, value in side.model.state_dict().items()})
        side.optimizer.load_state_dict(state)
        side.train(3, 6)
        assert not any(value.isnan().any() for value in side.model.state_dict().values())

    compare(stay, journey, **kind)


@KINDS
def test_loads_inside_of_an_open_home(stay, kind):
    def journey(side: Side) -> None:
        side.train(0, 3)
        saved = {key: value.clone() for key, value in side.model.state_dict().items()}
        side.train(3, 5)
        with torch.no_grad(), noria.materialize(side.model):
            side.model.load_state_dict(saved)
            side.model.head.bias.add_(1)
            with noria.materialize(side.model.blocks[0]):
                side.model.blocks[0].norm.weight.mul_(2)
        side.train(5, 7)

    compare(stay, journey, **kind)


@BOTH
def test_a_write_in_a_read_only_block_is_kept_and_told(stay, kind):
    def journey(side: Side) -> None:
        side.train(0, 3)
        with (
            pytest.raises(noria.UsageError, match="the write was kept"),
            torch.no_grad(),
            noria.materialize(side.model, read_only=True),
        ):
            side.model.head.bias.add_(1)
        side.train(3, 5)

    compare(stay, journey, **kind)


def test_momentum_that_is_turned_on_later_streams(stay):
    def journey(side: Side) -> None:
        side.train(0, 3)
        side.optimizer.param_groups[0]["momentum"] = 0.9
        side.train(3, 6)

    compare(stay, journey, rests=False, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def test_drafts_that_wait_are_undone_before_it_begins(stay):
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(), Net()

    torch.manual_seed(0)
    pairs = [Pair().cpu()]
    pairs.append(copy.deepcopy(pairs[0]))
    found = []
    for pair in pairs:
        optimizers = [adamw(each.parameters()) for each in (pair.first, pair.second)]
        both = [pair.first, pair.second]
        own = resident(stay, both, optimizers, {}) if pair is pairs[1] else {"window": 2}
        noria.wrap(both, optimizers, device=DEVICE, kernel="fused", draft_memory="64MiB", **own)
        for number in range(4):
            for model, optimizer in zip(both, optimizers, strict=True):
                (loss_of(pair.first, number) + loss_of(pair.second, number)).backward()
                optimizer.step()
                loss_of(model, number)
            for optimizer in optimizers:
                optimizer.zero_grad()
        found.append({f"{n} {k}": v for n, each in enumerate(both) for k, v in each.state_dict().items()})
    assert is_at_rest(pairs[1].first)
    assert_same_bits(found[1], found[0])


def test_nothing_of_it_outlives_the_model(stay):
    _, stays = sides(stay)
    stays.train(0, 3)
    gone = weakref.ref(rest_of(stays.model))
    backends = _C.living()["backends"]
    stays.model = stays.optimizer = None
    gc.collect()
    assert gone() is None and _C.living()["backends"] == backends - 1


@BOTH
def test_an_interrupted_sleep_loses_nothing(stay, kind, monkeypatch):
    streams, stays = sides(stay, **kind)
    copied: list[int] = []

    def interrupted(self: Rest, unit: Any, purposes: Any, *, to_device: bool) -> None:
        copied.append(unit.index)
        if len(copied) == 3:
            raise KeyboardInterrupt
        whole(self, unit, purposes, to_device=to_device)

    whole = Rest._copy
    for side in (streams, stays):
        side.train(0, 4)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Rest, "_copy", interrupted)
            with noria.asleep(side.model):
                pass
        side.train(4, 6)
    assert len(copied) >= 3 and noria.report(stays.model).ledger_agrees
    assert_same_bits(stays.kept, streams.kept)
    assert_same_bits(stays.model.state_dict(), streams.model.state_dict())


def test_a_written_split_master_becomes_what_is_shown(stay):
    _, stays = sides(stay, dtype=torch.bfloat16)
    stays.train(0, 3)
    bias = stayed(stays.model).contract.bias
    with torch.no_grad():
        bias.mul_(2)
    shown = bias.detach().clone()
    low = stays.optimizer.state_dict()["state"]
    [number] = [number for number, each in enumerate(stays.model.parameters()) if each is bias]
    assert not low[number]["low_bits"].any() and low[number - 1]["low_bits"].any()
    [name] = [name for name, each in stays.model.named_parameters() if each is bias]
    assert torch.equal(stays.model.state_dict()[name], shown.cpu())


@KINDS
def test_save_and_resume(stay, kind, tmp_path):
    def journey(side: Side) -> None:
        side.train(0, 3)
        noria.save(tmp_path / "checkpoint", side.model, side.optimizer)
        side.train(3, 5)
        noria.load(tmp_path / "checkpoint", side.model, side.optimizer)
        side.train(3, 6)

    compare(stay, journey, **kind)


@BOTH
def test_torch_save_of_both(stay, kind):
    def journey(side: Side) -> None:
        side.train(0, 3)
        file = io.BytesIO()
        torch.save({"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}, file)
        side.train(3, 5)
        file.seek(0)
        loaded = torch.load(file)
        side.model.load_state_dict(loaded["model"])
        side.optimizer.load_state_dict(loaded["optimizer"])
        side.train(3, 6)

    compare(stay, journey, **kind)


@BOTH
def test_unwrap_gives_the_current_values(stay, kind):
    streams, stays = sides(stay, **kind)
    for side in (streams, stays):
        side.train(0, 4)
        noria.unwrap(side.model, side.optimizer)
    assert_same_bits(stays.kept, streams.kept)
    assert_same_bits(stays.model.state_dict(), streams.model.state_dict())


# ---- the wheel turns again ----------------------------------------------------------------------------------------


@BOTH
def test_it_streams_with_the_same_bits_where_the_device_has_no_room_left(stay, kind):
    def journey(side: Side) -> None:
        side.train(0, 3)
        rest_of(side.model).give_up()  # as after an out-of-memory error
        side.train(3, 6)

    stays = compare(stay, journey, rests=False, **kind)
    assert noria.report(stays.model).ledger_agrees


@pytest.mark.parametrize("policy", ["auto", "an amount"])
def test_a_choice_for_which_the_device_has_no_room_is_given_up(monkeypatch, policy):
    """Under "auto", which the user did not ask for. What the user asks for raises."""
    streams, stays = sides(PART)
    context = wrapped_by(stays.model).context
    if policy == "auto":
        object.__setattr__(context.plan.policy, "resident", "auto")
        assert context.policy.resident == "auto"
    take = context.device_buffers.take

    def full(purpose: str, num_bytes: int) -> Any:
        if purpose.endswith("at rest"):
            raise _C.MachineError("the device is full")
        return take(purpose, num_bytes)

    monkeypatch.setattr(context.device_buffers, "take", full)
    if policy != "auto":
        stays.train(0, 1)
        with pytest.raises(_C.MachineError, match="the device is full"):
            stays.train(1, 2)
        return
    for side in (streams, stays):
        side.train(0, 5)
    assert_same_bits(stays.model.state_dict(), streams.model.state_dict())
    report = noria.report(stays.model)
    assert not report.at_rest and report.ledger_agrees
    assert any("all units stream: the device is full" in note for note in report.notes)


def test_a_new_choice_for_which_the_window_has_no_room_is_given_up(monkeypatch):
    """The plan of before goes on."""
    streams, side = beside_a_choice()
    plain = wrapped_by(side.model).context.plan
    size = plain.arena_bytes
    for each in (streams, side):
        each.train(0, 2)
    rest_of(side.model).adopt(with_stays(plain, frozenset(list(plain.may_stay)[:4])))
    own, calls = noria.runtime.rest.resize_window, []

    def full(context: Any, run: Any, num_bytes: int) -> int:
        calls.append(num_bytes)
        if len(calls) == 1:
            raise _C.MachineError("the device is full")
        return own(context, run, num_bytes)

    monkeypatch.setattr(noria.runtime.rest, "resize_window", full)
    for each in (streams, side):
        each.train(2, 6)
    assert_same_bits(side.model.state_dict(), streams.model.state_dict())
    report = noria.report(side.model)
    assert report.ledger_agrees and not report.at_rest and calls[1:] == [size]
    assert any("the plan of before goes on: the device is full" in note for note in report.notes)


def test_other_drafts_alone_do_not_end_the_rest(monkeypatch):
    _, side = sides(PART, draft_memory="1GiB")
    side.train(0, 3)
    rest = rest_of(side.model)
    assert rest.is_on
    plan = wrapped_by(side.model).context.plan
    rest.adopt(dataclasses.replace(plan, drafted=frozenset()))
    monkeypatch.setattr(Rest, "end", None)
    side.train(3, 6)
    assert rest.is_on and not wrapped_by(side.model).context.plan.drafted


@BOTH
def test_asleep_frees_all_of_it(stay, kind):
    """Also between a forward and its backward."""

    def journey(side: Side) -> None:
        for number in range(4):
            loss = loss_of(side.model, number)
            with noria.asleep(side.model):
                assert wrapped_by(side.model).context.backend.allocated == 0  # the window, too
                side.keep(f"weights {number}", side.model.state_dict()["head.weight"])
            loss.backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    compare(stay, journey, **kind)


@BOTH
def test_more_parameters_train(stay, kind):
    def journey(side: Side) -> None:
        side.train(0, 2)
        side.model.blocks[0].requires_grad_(True)
        side.optimizer.add_param_group({"params": list(side.model.blocks[0].parameters())})
        side.train(2, 5)

    def frozen() -> nn.Module:
        net = Net()
        net.blocks[0].requires_grad_(False)
        return net

    compare(stay, journey, model=frozen, optimizer=adamw_of_trained, **kind)


@pytest.mark.parametrize("own", [{"kernel": "torch"}, BY_TORCH], ids=["host", "device"])
def test_parameters_that_no_optimizer_held_are_updated_where_the_policy_says(own, monkeypatch):
    updated: set[tuple[str, int]] = set()

    def at_home(self: TorchStep, unit: int, *args: Any) -> None:
        updated.add(("host", unit))
        on_host(self, unit, *args)

    def there(self: TorchOnDevice, groups: Any, *args: Any) -> None:
        updated.update(("device", slot.unit) for _, slots in groups for slot in slots)
        on_device(self, groups, *args)

    on_host, on_device = TorchStep.run_now, TorchOnDevice.run
    monkeypatch.setattr(TorchStep, "run_now", at_home)
    monkeypatch.setattr(TorchOnDevice, "run", there)
    model = Net().cpu()
    side = Side(model, adamw([*model.embed.parameters(), *model.blocks.parameters()]), True)
    amount = 4 * sum(parameter.numel() for parameter in model.parameters())
    noria.wrap(model, side.optimizer, device=DEVICE, window=2, resident=amount, device_memory=ROOM, **own)
    head = wrapped_by(model).context.slot_of[model.head.weight].unit
    side.train(0, 3)
    assert rest_of(model).has(head)
    side.optimizer.add_param_group({"params": list(model.head.parameters())})
    side.train(3, 6)
    wrapped_by(model).context.engine.updates.run_all_deferred()
    where = "device" if own is BY_TORCH else "host"
    assert updated == {(where, unit.index) for unit in wrapped_by(model).context.units}


@BOTH
def test_a_parameter_without_elements(stay, kind):
    class Empty(Net):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.first = nn.Parameter(torch.zeros(0, 8))
                block.contract.last = nn.Parameter(torch.zeros(8, 0))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            nothing = sum(block.first.sum() + block.contract.last.sum() for block in self.blocks)
            return super().forward(tokens) + nothing

    compare(stay, train, model=Empty, **kind)


@BOTH
def test_an_optimizer_that_comes_later(stay, kind):
    def journey(side: Side) -> None:
        with torch.no_grad():
            for number in range(3):
                side.keep(f"evaluation {number}", loss_of(side.model, number))
        side.optimizer = adamw(side.model.parameters())
        noria.wrap(side.model, side.optimizer)
        side.train(3, 6)
        plan, taken = wrapped_by(side.model).context.plan, noria.report(side.model).ledger
        on_device = sum(row.taken for row in taken if row.place == DEVICE or row.place.startswith("cuda"))
        beside = plan.arena_bytes + plan.update_slot_bytes * NUM_SLOTS
        assert on_device == plan.resident_bytes + beside * (not plan.stands_still)

    compare(stay, journey, optimizer=None, **kind)


@BOTH
def test_averages_end_it(stay, kind):
    """They are moved at home after every step."""

    def journey(side: Side) -> None:
        side.train(0, 2)
        train_with_averages(side, 2)

    compare(stay, journey, rests=False, **kind)


def test_averages_end_a_choice_and_the_window_is_whole_again():
    """Under "auto". So later steps do not stream through what units that cannot stay had left."""
    streams, side = beside_a_choice()
    plain = wrapped_by(side.model).context.plan
    rest_of(side.model).adopt(with_stays(plain, frozenset(list(plain.may_stay)[:4])))
    for each in (streams, side):
        each.train(0, 3)
    assert is_at_rest(side.model) and wrapped_by(side.model).context.plan.arena_bytes < plain.arena_bytes
    for each in (streams, side):
        train_with_averages(each, 3)
    assert_same_bits({**side.kept, **side.model.state_dict()}, {**streams.kept, **streams.model.state_dict()})
    assert wrapped_by(side.model).context.plan.arena_bytes == plain.arena_bytes
    assert not is_at_rest(side.model) and noria.report(side.model).ledger_agrees


# ---- sharing and sharded state ------------------------------------------------------------------------------------


@BOTH
def test_weights_for_others_and_sharded_state_are_current(stay, kind, tmp_path):
    def journey(side: Side) -> None:
        for number in range(3):
            side.train(number, number + 1)
            for name, weight in noria.weights(side.model):
                side.keep(f"{number}: {name}", weight)
        state = noria.sharded_state(side.model, side.optimizer)
        folder = tmp_path / str(is_at_rest(side.model))
        torch.distributed.checkpoint.save(state, checkpoint_id=folder)
        side.train(3, 5)
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)
        side.train(3, 6)

    compare(stay, journey, **kind)


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, found",
    [
        ({"update": "backward"}, 'update="backward"'),
        ({"activations": "offload"}, 'activations="offload"'),
        ({"reads": "home"}, 'reads="home"'),
        ({"state_dtype": "bf16"}, 'state_dtype="bf16"'),
        ({"kernel": "torch"}, "which only the host updates"),
        ({"device_memory": "16KiB"}, "16.0 KiB"),
    ],
)
def test_it_is_refused_where_not_all_can_stay(policy, found):
    model = Net()
    with pytest.raises(noria.UsageError) as error:
        noria.wrap(model, adamw(model.parameters()), device=DEVICE, resident="all", **policy)
    assert found in str(error.value) and not noria.is_wrapped(model)


def test_a_forward_inside_of_materialize_is_refused(stay):
    _, stays = sides(stay)
    stays.train(0, 3)
    with noria.materialize(stays.model), pytest.raises(noria.UsageError, match="materialize"):
        loss_of(stays.model, 0)
    stays.train(3, 4)


@pytest.mark.parametrize("use", ["forward", "step"])
def test_a_parameter_that_was_given_other_data_is_put_back(stay, use):
    _, stays = sides(stay)
    stays.train(0, 3)
    loss_of(stays.model, 3).backward()
    bias, name = stayed(stays.model).norm.bias, f"blocks.{STAYED}.norm.bias"
    before = stays.model.state_dict()[name].clone()
    bias.data = torch.zeros(before.shape)
    with pytest.raises(noria.UsageError, match=name.replace(".", r"\.")):
        loss_of(stays.model, 0) if use == "forward" else stays.optimizer.step()
    assert torch.equal(stays.model.state_dict()[name], before)
    stays.optimizer.zero_grad()
    stays.train(3, 4)


def test_a_step_that_breaks_off_is_known_as_torn(stay, monkeypatch):
    _, stays = sides(stay)
    stays.train(0, 3)
    loss_of(stays.model, 3).backward()

    def broken(self: Rest, unit: int) -> None:
        raise KeyboardInterrupt  # one that streams has other units, whose updates are under way or not

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Rest, "note_newer", broken)
        stays.optimizer.step()
    with pytest.raises(noria.UsageError, match="different steps"):
        loss_of(stays.model, 4)
    with pytest.raises(noria.UsageError, match="different steps"):
        stays.model.state_dict()


def test_a_step_of_torchs_that_raises_is_broken_off_as_in_torch(stay, monkeypatch):
    """It may be made again."""
    streams, stays = sides(stay, **BY_TORCH)
    whole = TorchOnDevice.run
    runs: list[int] = []

    def broken(self: TorchOnDevice, *args: Any) -> None:
        if len(runs) == 2:
            raise ValueError("as the test wants it")
        runs.append(1)
        whole(self, *args)

    for side in (streams, stays):
        side.train(0, 3)
        loss_of(side.model, 3).backward()
        wrapped_by(side.model).context.engine.updates.run_all_deferred()
    before = copy.deepcopy(stays.model.state_dict())
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="as the test wants it") as caught:
        patch.setattr(TorchOnDevice, "run", broken)
        stays.optimizer.step()
    assert "where it stays" in caught.value.__notes__[0] and "broken off" in caught.value.__notes__[0]
    stays.model.load_state_dict(before)  # two units had made their step
    stays.optimizer.load_state_dict(copy.deepcopy(streams.optimizer.state_dict()))
    for side in (streams, stays):
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.train(4, 6)
    assert_same_bits(stays.model.state_dict(), streams.model.state_dict())


def test_the_plan_and_the_report_say_so(stay):
    _, stays = sides(stay)
    assert "stays on the device" in str(noria.plan(Net(), device=DEVICE, resident="all"))
    stays.train(0, 3)
    assert "at rest" in str(noria.report(stays.model))


# ---- the planner chooses ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Costs are kept. What torch takes does not count: these devices are so small that it would be most of them."""
    monkeypatch.setenv("NORIA_CACHE", str(tmp_path))
    monkeypatch.setattr(CostRecorder, "with_activations", lambda recorder, costs: costs)


def slow_updates(spans: Any, num_units: int, *args: Any) -> MeasuredCosts:
    rates = {"fetch": 1.0, "drain": 1.0, "update": 0.001}
    return MeasuredCosts([10.0] * num_units, [20.0] * num_units, rates, {})


@pytest.mark.parametrize("rate, is_faster", [(1000.0, True), (1e-6, False)], ids=["fast updates there", "slow ones"])
@pytest.mark.parametrize("share", [1.5, 0.5], ids=["room for all", "for some"])
def test_auto_lets_units_stay_where_that_is_faster(folder, monkeypatch, share, rate, is_faster):
    """From the step on in which costs are known. A later run begins with the choice. No bit changes."""
    monkeypatch.setattr("noria.forward.cost_recorder.device_update_gib_s", lambda context: rate)
    monkeypatch.setattr("noria.forward.cost_recorder.measured_costs", slow_updates)

    def kept_by(**policy: Any) -> tuple[dict[str, Any], Side]:
        torch.manual_seed(0)
        model = Net().cpu()
        side = Side(model, adamw(model.parameters()), True)
        with on_machine(hostility={"seed": 3, "poison": True}):
            noria.wrap(model, side.optimizer, device=DEVICE, kernel="fused", **policy)
        torch.manual_seed(1)
        side.train(0, 12)
        assert noria.report(model).ledger_agrees
        return {**side.kept, **model.state_dict()}, side

    model = Net()
    every = noria.plan(model, adamw(model.parameters()), device=DEVICE, kernel="fused", resident="all")
    shares = 2 if DEVICE == "cuda" else 1  # activations have the other one
    room = int(share * shares * every.resident_bytes)
    streams, _ = kept_by(window=2)
    for run in range(2):
        chosen, side = kept_by(resident="auto", device_memory=room)
        assert_same_bits(chosen, streams)
        plan = wrapped_by(side.model).context.plan
        assert is_at_rest(side.model) == bool(plan.stays) == is_faster
        assert plan.stands_still == (is_faster and share > 1)
        told = any("units stay on the device" in note for note in noria.report(side.model).notes)
        assert told == (is_faster and run == 0)


def test_auto_updates_on_the_device_where_few_units_can_stay(folder, monkeypatch):
    """The host's updates are slow, and there is room for pieces of units, but hardly for a unit with its state."""
    monkeypatch.setattr("noria.forward.cost_recorder.device_update_gib_s", lambda context: 1000.0)
    monkeypatch.setattr("noria.forward.cost_recorder.measured_costs", slow_updates)
    policy: dict[str, Any] = {"device": DEVICE, "kernel": "fused", "draft_memory": 0}
    model = Net()
    pieces = noria.plan(model, adamw(model.parameters()), optimizer_device="device", **policy)
    shares = 2 if DEVICE == "cuda" else 1
    room = shares * (pieces.least_device + 1024)
    seen = []
    for resident in ("none", "auto", "auto"):
        torch.manual_seed(0)
        model = Net().cpu()
        side = Side(model, adamw(model.parameters()), True)
        with on_machine(hostility={"seed": 3, "poison": True}):
            noria.wrap(model, side.optimizer, resident=resident, device_memory=room, **policy)
        torch.manual_seed(1)
        side.train(0, 12)
        plan, report = wrapped_by(model).context.plan, noria.report(model)
        assert report.ledger_agrees, str(report)
        assert bool(plan.streamed) == (resident == "auto") and not plan.stands_still
        seen.append({**side.kept, **model.state_dict()})
    assert not any("which updates" in note for note in report.notes)  # the last run began so
    assert_same_bits(seen[1], seen[0])
    assert_same_bits(seen[2], seen[0])


def test_auto_lets_units_stay_that_torch_updates_on_the_device(folder):
    """The first run chooses once costs are known, the second one begins so."""
    found = []
    for run, auto in enumerate((True, True, False)):
        torch.manual_seed(0)
        model, optimizer = TORCHS["muon"]
        side = Side(model().cpu(), optimizer, True)
        side.optimizer = optimizer(side.model.parameters())
        every = noria.plan(side.model, side.optimizer, device=DEVICE, resident="all", **BY_TORCH)
        room = 2 * SHARES * every.resident_bytes
        own = {"resident": "auto", "device_memory": room} if auto else {"resident": "none", "window": 2}
        noria.wrap(side.model, side.optimizer, device=DEVICE, **BY_TORCH, **own)
        torch.manual_seed(1)
        side.train(0, 2)
        assert is_at_rest(side.model) == (run == 1)
        side.train(2, 12)
        assert is_at_rest(side.model) == auto and noria.report(side.model).ledger_agrees
        found.append({**side.kept, **side.model.state_dict(), **state_tensors(side.optimizer)})
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])


def test_auto_counts_on_all_backwards_of_a_step(folder, monkeypatch):
    monkeypatch.setattr("noria.forward.cost_recorder.device_update_gib_s", lambda context: 1000.0)
    real = noria.planning.measured_costs.measured_costs

    def slow(spans: Any, num_units: int, *args: Any) -> MeasuredCosts:
        return dataclasses.replace(slow_updates(spans, num_units), backwards=real(spans, num_units, *args).backwards)

    monkeypatch.setattr("noria.forward.cost_recorder.measured_costs", slow)
    found = []
    for own in ({"window": 2}, {"resident": "auto", "device_memory": ROOM}):
        torch.manual_seed(0)
        model = Net().cpu()
        optimizer = adamw(model.parameters())
        noria.wrap(model, optimizer, device=DEVICE, kernel="fused", **own)
        torch.manual_seed(1)
        for _ in range(12):
            for number in range(3):
                (loss_of(model, number) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert noria.report(model).costs.backwards == 3
        assert is_at_rest(model) == ("resident" in own)
        found.append(model.state_dict())
    assert_same_bits(*found)


@pytest.mark.parametrize("batches", [[64] * 60, [64] * 4 + [1] * 50], ids=["alike", "smaller ones"])
def test_auto_chooses_again_for_other_inputs(folder, monkeypatch, batches):
    """The first run keeps costs of large batches, and chooses by them. The second one begins with that choice."""
    monkeypatch.setattr("noria.forward.cost_recorder.device_update_gib_s", lambda context: 1000.0)

    def slow_compute(spans: Any, num_units: int, *args: Any) -> MeasuredCosts:
        costs = slow_updates(spans, num_units)
        return dataclasses.replace(costs, forward_us=[2e4] * num_units, backward_us=[4e4] * num_units)

    monkeypatch.setattr("noria.forward.cost_recorder.measured_costs", slow_compute)

    def trained(sizes: list[int], **own: Any) -> tuple[nn.Module, list[tuple[Any, Any]]]:
        torch.manual_seed(0)
        model = Net().cpu()
        optimizer = adamw(model.parameters())
        with on_machine(hostility={"seed": 3, "poison": True}):
            noria.wrap(model, optimizer, device=DEVICE, kernel="fused", draft_memory=0, **own)
        torch.manual_seed(1)
        chosen = []
        for size in sizes:
            model(torch.randint(0, 23, (size, 5)).to(DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            plan = wrapped_by(model).context.plan
            chosen.append((plan.stays, frozenset(plan.streamed)))
        assert noria.report(model).ledger_agrees
        return model, chosen

    model = Net()
    every = noria.plan(model, adamw(model.parameters()), device=DEVICE, kernel="fused", resident="all")
    auto = {"resident": "auto", "device_memory": int(0.95 * (2 if DEVICE == "cuda" else 1) * every.resident_bytes)}
    trained([64] * 9, **auto)
    model, chosen = trained(batches, **auto)
    plain, _ = trained(batches, window=2)
    assert_same_bits(model.state_dict(), plain.state_dict())
    assert chosen[0][0] and not chosen[0][1]
    changes = [number for number, (one, other) in enumerate(itertools.pairwise(chosen)) if one != other]
    assert bool(changes) == (batches[-1] == 1), changes
    assert ("inputs of now" in noria.report(model).costs_measured) == bool(changes)


@pytest.mark.parametrize("slower", [20_000.0, 1.0])
def test_auto_chooses_again_if_links_become_slower(folder, monkeypatch, slower):
    """With fast links nothing stays: the host's updates hide, and the device's are slow."""
    monkeypatch.setattr("noria.forward.cost_recorder.device_update_gib_s", lambda context: 1e-2)

    def fast_links(spans: Any, num_units: int, *args: Any) -> MeasuredCosts:
        rates = {"fetch": 10.0, "drain": 10.0, "update": 10.0}
        return MeasuredCosts([1e3] * num_units, [2e3] * num_units, rates, {})

    monkeypatch.setattr("noria.forward.cost_recorder.measured_costs", fast_links)
    pace, ratio = LinkPaces._pace, 1.0
    monkeypatch.setattr(LinkPaces, "_pace", lambda *given: ratio * bool(pace(*given)))
    every = noria.plan((model := Net()), adamw(model.parameters()), device=DEVICE, kernel="fused", resident="all")
    room = int(0.7 * (2 if DEVICE == "cuda" else 1) * every.resident_bytes)
    found = []
    for policy in ({"resident": "auto", "device_memory": room}, {"window": 2}):
        torch.manual_seed(0)
        model = Net().cpu()
        side = Side(model, adamw(model.parameters()), True)
        noria.wrap(model, side.optimizer, device=DEVICE, kernel="fused", draft_memory=0, **policy)
        torch.manual_seed(1)
        ratio = 1.0
        side.train(0, 50)
        assert not wrapped_by(model).context.plan.stays
        ratio = slower
        side.train(50, 75)
        found.append({**side.kept, **model.state_dict()})
        chooses_again = "resident" in policy and slower > 1
        assert bool(wrapped_by(model).context.plan.stays) == chooses_again
        assert ("links of now" in noria.report(model).costs_measured) == chooses_again
    assert_same_bits(*found)


@pytest.mark.parametrize("policy", [{"update": "backward"}, {"kernel": "torch"}], ids=str)
def test_auto_streams_where_units_cannot_stay(folder, policy):
    model = Net().cpu()
    side = Side(model, adamw(model.parameters()), True)
    noria.wrap(model, side.optimizer, device=DEVICE, resident="auto", **policy)
    side.train(0, 10)
    assert not is_at_rest(model)


def test_one_choice_after_another_has_the_memory_of_each_and_the_same_bits():
    """The device has room for each alone. The last one is never taken up: memory runs out first."""
    model = Net()
    policy: dict[str, Any] = {"device": DEVICE, "kernel": "fused", "draft_memory": 0}
    every = noria.plan(model, adamw(model.parameters()), resident="all", **policy)
    shares = 2 if DEVICE == "cuda" else 1
    gradients = sum(unit.gradients for unit in every.units)
    room = shares * (every.resident_bytes + gradients)
    units = sorted(every.may_stay)
    found = []
    for chooses in (False, True):
        torch.manual_seed(0)
        model = Net().cpu()
        side = Side(model, adamw(model.parameters()), True)
        with on_machine(hostility={"seed": 3, "poison": True}):
            noria.wrap(side.model, side.optimizer, resident="auto", device_memory=room, **policy)
        wrapped = wrapped_by(side.model)
        wrapped.recorder.stop()
        plain = wrapped.context.plan
        side.train(0, 3)
        for number, (stays, streamed) in enumerate(
            (([], units), (units[:1], units[1:]), (units[:2], []), (units, []), ([], []), (units[1:3], []))
        ):
            if chooses:
                wrapped.rest.adopt(with_streamed(with_stays(plain, frozenset(stays)), streamed))
                if number == 5:
                    wrapped.rest.give_up()
            side.train(3 + 2 * number, 5 + 2 * number)
            report, plan = noria.report(side.model), wrapped.context.plan
            assert report.ledger_agrees, str(report)
            if chooses and number < 5:
                assert (plan.stays, set(plan.streamed)) == (set(stays), set(streamed) - set(stays))
        assert not is_at_rest(side.model)
        found.append({**side.kept, **side.model.state_dict()})
    assert_same_bits(*found)


def test_state_that_is_written_after_the_choice_counts(folder, monkeypatch):
    monkeypatch.setattr("noria.forward.cost_recorder.device_update_gib_s", lambda context: 1000.0)
    monkeypatch.setattr("noria.forward.cost_recorder.measured_costs", slow_updates)
    found = []
    for own in ({"window": 2}, {"resident": "auto", "device_memory": ROOM}):
        torch.manual_seed(0)
        model = Net().cpu()
        side = Side(model, adamw(model.parameters()), True)
        noria.wrap(model, side.optimizer, device=DEVICE, kernel="fused", **own)
        kept = None
        for number in range(14):
            side.train(number, number + 1)
            kept = side.optimizer.state[model.head.weight]["exp_avg"] if number == 2 else kept
            if number in (10, 12):
                wrapped_by(model).context.engine.idle()  # one that streams would update it meanwhile
                (kept if number == 10 else side.optimizer.state[model.embed.weight]["exp_avg"]).mul_(0.25)
        assert is_at_rest(model) == ("resident" in own)
        found.append(model.state_dict())
    assert_same_bits(*found)


@BOTH
def test_an_end_that_is_interrupted_loses_nothing(stay, kind, monkeypatch):
    streams, stays = sides(stay, **kind)

    def interrupted(context: Any) -> None:
        whole(context)
        raise KeyboardInterrupt

    for side in (streams, stays):
        side.train(0, 4)
        rest = rest_of(side.model)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            whole = noria.runtime.rest.give_window_back
            patch.setattr(noria.runtime.rest, "give_window_back", interrupted)
            rest.end()
        side.train(4, 6)
        rest.end()
        side.train(6, 8)
    assert_same_bits(stays.model.state_dict(), streams.model.state_dict())
    assert noria.report(stays.model).ledger_agrees


def test_a_window_that_finds_no_room_is_taken_later(monkeypatch):
    streams, stays = sides(PART)
    for side in (streams, stays):
        side.train(0, 3)
    calls: list[int] = []

    def full(context: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise _C.MachineError("no room now")
        whole(context)

    whole = noria.runtime.window.take_window
    context = wrapped_by(stays.model).context
    with monkeypatch.context() as patch, pytest.raises(_C.MachineError):
        patch.setattr(noria.runtime.window, "take_window", full)
        noria.runtime.window.resize_window(context, wrapped_by(stays.model).run, context.plan.arena_bytes)
    for side in (streams, stays):
        side.train(3, 5)
    assert_same_bits(stays.model.state_dict(), streams.model.state_dict())
    assert calls == [1, 1]
