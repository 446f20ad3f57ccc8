"""resident="all": from the second step on nothing moves, and all bits are those of a model that streams."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
import torch.distributed.checkpoint
from noria import _C
from noria.runtime.rest import Rest
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE
from tests.journeys.pairs import OPTIMIZERS, Net, Side, adamw, loss_of, sgd, state_tensors

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        DEVICE == "cuda" and not _C.has_kernel_images(), reason="this build has no kernels for devices: it had no nvcc"
    ),
]

ROOM = "64MiB"
MASTERS = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "masters"])


def rest_of(model: nn.Module) -> Rest:
    return wrapped_by(model).rest


def is_at_rest(model: nn.Module) -> bool:
    return rest_of(model).is_on


def sides(
    model: Callable[[], nn.Module] = Net,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = adamw,
    **policy: Any,
) -> list[Side]:
    """One that streams through two units, and one at rest."""
    torch.manual_seed(0)
    first = model().cpu()
    made = []
    for each, own in ((first, {"window": 2}), (copy.deepcopy(first), {"resident": "all", "device_memory": ROOM})):
        made.append(Side(each, optimizer(each.parameters()) if optimizer else None, True))
        with on_machine(hostility={"seed": 7, "poison": True}):
            noria.wrap(each, made[-1].optimizer, device=DEVICE, **{"kernel": "fused", **policy, **own})
    return made


def compare(journey: Callable[[Side], Any], *, rests: bool = True, **options: Any) -> Side:
    """Leads both sides through the journey. Returns the one at rest."""
    streams, stays = sides(**options)
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


# ---- bits ---------------------------------------------------------------------------------------------------------


@MASTERS
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_bits_are_those_of_a_model_that_streams(rule, dtype):
    stays = compare(train, optimizer=OPTIMIZERS[rule], dtype=dtype)
    fetches = noria.report(stays.model).num_fetches
    train(Side(stays.model, stays.optimizer, True), steps=2)
    assert noria.report(stays.model).num_fetches == fetches  # nothing moves


def test_a_device_that_is_not_brought_up_to_date_has_other_bits(monkeypatch):
    """The control arm: what is loaded while the model is at rest does not reach the device."""

    def journey(side: Side) -> None:
        train(side, steps=2)
        loss_of(side.model, 9).backward()
        side.optimizer.zero_grad()
        side.model.load_state_dict({key: value / 2 for key, value in side.model.state_dict().items()})
        side.train(2, 4)

    compare(journey)
    monkeypatch.setattr(Rest, "_copy", lambda self, unit, purposes, to_device: None)
    with pytest.raises(AssertionError):
        compare(journey)


@MASTERS
def test_clips_and_accumulation(dtype):
    def journey(side: Side) -> None:
        def between(number: int) -> None:
            loss_of(side.model, 100 + number).backward()
            side.keep(f"norm {number}", nn.utils.clip_grad_norm_(side.model.parameters(), 0.05))

        train(side, between)

    compare(journey, dtype=dtype)


@MASTERS
@pytest.mark.parametrize("policy", [{"max_grad_norm": 0.05}, {}], ids=["policy", "call"])
def test_norias_own_clips_have_the_same_norms(policy, dtype):
    def journey(side: Side) -> None:
        def between(number: int) -> None:
            if not policy:
                side.keep(f"norm {number}", side.optimizer.clip_grad_norm_(0.05))

        train(side, between)
        if policy:
            side.keep("last norm", side.optimizer.grad_norm)

    compare(journey, dtype=dtype, **policy)


def test_a_scaler_unscales_and_skips():
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

    compare(journey)


def test_edited_and_foreign_gradients():
    def journey(side: Side) -> None:
        def between(number: int) -> None:
            first, second, *_ = side.model.parameters()
            first.grad.mul_(0.5)
            second.grad = torch.ones_like(second.grad).t().contiguous().t() if second.dim() > 1 else second.grad * 3
            side.model.head.bias.grad = None

        train(side, between)

    compare(journey, optimizer=sgd)


def test_a_parameter_whose_first_gradient_comes_late():
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

    compare(journey, model=Branch)


def test_closures_schedulers_and_param_groups():
    def journey(side: Side) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(side.optimizer, 0.5)
        for number in range(5):
            side.step_by_closure(number)
            side.optimizer.zero_grad()
            scheduler.step()

    def groups(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return adamw([{"params": [first], "lr": 0.1}, {"params": others, "weight_decay": 0.3}])

    compare(journey, optimizer=groups)


def test_frozen_parameters_and_tied_weights():
    def tied() -> nn.Module:
        net = Net()
        net.head.weight = net.embed.weight
        net.blocks[1].requires_grad_(False)
        return net

    compare(train, model=tied, optimizer=lambda parameters: adamw([p for p in parameters if p.requires_grad]))


def test_gradients_that_are_there_when_it_begins():
    """And gradients that are zeroed, not dropped."""

    def journey(side: Side) -> None:
        for number in range(5):
            for micro in range(2):
                loss_of(side.model, 10 * number + micro).backward()
            side.keep_gradients(f"step {number}")
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=False)

    compare(journey)


def test_two_models_whose_backward_comes_after_both_forwards():
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
    for pair, own in zip(pairs, ({"window": 2}, {"resident": "all", "device_memory": ROOM}), strict=True):
        side = Side(pair, adamw(pair.parameters()), True)
        noria.wrap([pair.first, pair.second], side.optimizer, device=DEVICE, kernel="fused", **own)
        journey(side)
        states.append({**pair.first.state_dict(), **{f"2 {k}": v for k, v in pair.second.state_dict().items()}})
    assert is_at_rest(pairs[1].first)
    assert_same_bits(states[1], states[0])


def test_evaluations_in_between():
    def journey(side: Side) -> None:
        for number in range(4):
            side.train(number, number + 1)
            with torch.no_grad():
                side.keep(f"evaluation {number}", loss_of(side.model.eval(), 50))
            side.model.train()

    compare(journey)


def test_inference_alone():
    def journey(side: Side) -> None:
        with torch.no_grad():
            for number in range(3):
                side.keep(f"loss {number}", loss_of(side.model, number))

    compare(journey, optimizer=None)


# ---- looks at the home --------------------------------------------------------------------------------------------


@MASTERS
def test_looks_see_what_is_on_the_device(dtype):
    def journey(side: Side) -> None:
        for number in range(4):
            side.train(number, number + 1)
            side.keep(f"weights {number}", side.model.state_dict()["head.weight"])
            [state] = [side.optimizer.state[p] for n, p in side.model.named_parameters() if n == "head.weight"]
            side.keep(f"moment {number}", state["exp_avg"])
            with noria.materialize(side.model, read_only=True):
                side.keep(f"materialized {number}", side.model.embed.weight)

    compare(journey, dtype=dtype)


@MASTERS
def test_edits_reach_the_device(dtype):
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

    compare(journey, dtype=dtype)


def test_writes_to_weights_on_the_device_stay():
    """A model that streams takes them inside of noria.materialize."""

    def journey(side: Side) -> None:
        side.train(0, 2)
        loss_of(side.model, 0)
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if not is_at_rest(side.model):
                stack.enter_context(noria.materialize(side.model))
            side.model.embed.weight.data.mul_(1.5)
            side.model.head.bias.zero_()
        side.train(2, 4)

    compare(journey)


@MASTERS
def test_a_write_to_state_and_one_to_a_weight_of_the_same_unit_both_count(dtype):
    """As dormant neurons are made anew."""

    def journey(side: Side) -> None:
        side.train(0, 3)
        loss_of(side.model, 0)
        for parameter in side.model.blocks[0].parameters():
            state = side.optimizer.state[parameter]
            with torch.no_grad(), contextlib.ExitStack() as stack:
                if not is_at_rest(side.model):
                    stack.enter_context(noria.materialize(side.model))
                state["exp_avg"].zero_()
                parameter.fill_(3.0)  # no element has this value
        side.train(3, 6)

    compare(journey, dtype=dtype)


def test_looks_between_a_forward_and_its_backward():
    def journey(side: Side) -> None:
        for number in range(4):
            loss = loss_of(side.model, number)
            torch.save(side.model.state_dict(), io.BytesIO())
            with noria.materialize(side.model, read_only=True):
                side.keep(f"weights {number}", side.model.head.weight)
            loss.backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    compare(journey)


@MASTERS
def test_loads_inside_of_an_open_home(dtype):
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

    compare(journey, dtype=dtype)


def test_a_write_in_a_read_only_block_is_kept_and_told():
    def journey(side: Side) -> None:
        side.train(0, 3)
        with (
            pytest.raises(noria.UsageError, match="the write was kept"),
            torch.no_grad(),
            noria.materialize(side.model, read_only=True),
        ):
            side.model.head.bias.add_(1)
        side.train(3, 5)

    compare(journey)


def test_momentum_that_is_turned_on_later_streams():
    def journey(side: Side) -> None:
        side.train(0, 3)
        side.optimizer.param_groups[0]["momentum"] = 0.9
        side.train(3, 6)

    compare(journey, rests=False, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def test_drafts_that_wait_are_undone_before_it_begins():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(), Net()

    torch.manual_seed(0)
    pairs = [Pair().cpu()]
    pairs.append(copy.deepcopy(pairs[0]))
    found = []
    for pair, own in zip(pairs, ({"window": 2}, {"resident": "all", "device_memory": ROOM}), strict=True):
        optimizers = [adamw(each.parameters()) for each in (pair.first, pair.second)]
        both = [pair.first, pair.second]
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


def test_nothing_of_it_outlives_the_model():
    _, stays = sides()
    stays.train(0, 3)
    gone = weakref.ref(rest_of(stays.model))
    backends = _C.living()["backends"]
    stays.model = stays.optimizer = None
    gc.collect()
    assert gone() is None and _C.living()["backends"] == backends - 1


def test_an_interrupted_sleep_loses_nothing(monkeypatch):
    streams, stays = sides()
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


def test_a_written_split_master_becomes_what_is_shown():
    _, stays = sides(dtype=torch.bfloat16)
    stays.train(0, 3)
    with torch.no_grad():
        stays.model.head.bias.mul_(2)
    shown = stays.model.head.bias.detach().clone()
    low = stays.optimizer.state_dict()["state"]
    number = [name for name, _ in stays.model.named_parameters()].index("head.bias")
    assert not low[number]["low_bits"].any() and low[number - 1]["low_bits"].any()
    assert torch.equal(stays.model.state_dict()["head.bias"], shown.cpu())


@MASTERS
def test_save_and_resume(dtype, tmp_path):
    def journey(side: Side) -> None:
        side.train(0, 3)
        noria.save(tmp_path / "checkpoint", side.model, side.optimizer)
        side.train(3, 5)
        noria.load(tmp_path / "checkpoint", side.model, side.optimizer)
        side.train(3, 6)

    compare(journey, dtype=dtype)


def test_torch_save_of_both():
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

    compare(journey)


def test_unwrap_gives_the_current_values():
    streams, stays = sides()
    for side in (streams, stays):
        side.train(0, 4)
        noria.unwrap(side.model, side.optimizer)
    assert_same_bits(stays.kept, streams.kept)
    assert_same_bits(stays.model.state_dict(), streams.model.state_dict())


# ---- the wheel turns again ----------------------------------------------------------------------------------------


def test_it_streams_with_the_same_bits_where_the_device_has_no_room_left():
    def journey(side: Side) -> None:
        side.train(0, 3)
        rest_of(side.model).give_up()  # as after an out-of-memory error
        side.train(3, 6)

    stays = compare(journey, rests=False)
    assert noria.report(stays.model).ledger_agrees


def test_asleep_frees_all_of_it():
    """Also between a forward and its backward."""

    def journey(side: Side) -> None:
        for number in range(4):
            loss = loss_of(side.model, number)
            with noria.asleep(side.model):
                assert wrapped_by(side.model).context.backend.allocated == 0
                side.keep(f"weights {number}", side.model.state_dict()["head.weight"])
            loss.backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    compare(journey)


def test_more_parameters_train():
    def journey(side: Side) -> None:
        side.train(0, 2)
        side.model.blocks[0].requires_grad_(True)
        side.optimizer.add_param_group({"params": list(side.model.blocks[0].parameters())})
        side.train(2, 5)

    def frozen() -> nn.Module:
        net = Net()
        net.blocks[0].requires_grad_(False)
        return net

    compare(journey, model=frozen, optimizer=lambda parameters: adamw([p for p in parameters if p.requires_grad]))


def test_an_optimizer_that_comes_later():
    def journey(side: Side) -> None:
        with torch.no_grad():
            for number in range(3):
                side.keep(f"evaluation {number}", loss_of(side.model, number))
        side.optimizer = adamw(side.model.parameters())
        noria.wrap(side.model, side.optimizer)
        side.train(3, 6)

    compare(journey, optimizer=None)


def test_averages_end_it():
    """They are moved at home after every step."""

    def journey(side: Side) -> None:
        side.train(0, 2)
        ema = noria.ema(side.model, 0.9)
        for number in range(2, 5):
            side.train(number, number + 1)
            ema.update()
        with ema.applied():
            side.keep("average", loss_of(side.model, 9))

    compare(journey, rests=False)


# ---- sharing and sharded state ------------------------------------------------------------------------------------


def test_weights_for_others_and_sharded_state_are_current(tmp_path):
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

    compare(journey)


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, found",
    [
        ({"update": "backward"}, 'update="backward"'),
        ({"activations": "offload"}, 'activations="offload"'),
        ({"reads": "home"}, 'reads="home"'),
        ({"state_dtype": "bf16"}, 'state_dtype="bf16"'),
        ({"kernel": "torch"}, "torch updates on the host"),
        ({"device_memory": "16KiB"}, "16.0 KiB"),
    ],
)
def test_it_is_refused_where_not_all_can_stay(policy, found):
    model = Net()
    with pytest.raises(noria.UsageError) as error:
        noria.wrap(model, adamw(model.parameters()), device=DEVICE, resident="all", **policy)
    assert found in str(error.value) and not noria.is_wrapped(model)


def test_a_forward_inside_of_materialize_is_refused():
    _, stays = sides()
    stays.train(0, 3)
    with noria.materialize(stays.model), pytest.raises(noria.UsageError, match="materialize"):
        loss_of(stays.model, 0)
    stays.train(3, 4)


@pytest.mark.parametrize("use", ["forward", "step"])
def test_a_parameter_that_was_given_other_data_is_put_back(use):
    _, stays = sides()
    stays.train(0, 3)
    loss_of(stays.model, 3).backward()
    before = stays.model.state_dict()["head.bias"].clone()
    stays.model.head.bias.data = torch.zeros(before.shape)
    with pytest.raises(noria.UsageError, match=r"head\.bias"):
        loss_of(stays.model, 0) if use == "forward" else stays.optimizer.step()
    assert torch.equal(stays.model.state_dict()["head.bias"], before)
    stays.optimizer.zero_grad()
    stays.train(3, 4)


def test_a_step_that_breaks_off_is_known_as_torn(monkeypatch):
    _, stays = sides()
    stays.train(0, 3)
    loss_of(stays.model, 3).backward()

    def broken(self: Rest, unit: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Rest, "note_newer", broken)
        stays.optimizer.step()
    with pytest.raises(noria.UsageError, match="different steps"):
        loss_of(stays.model, 4)
    with pytest.raises(noria.UsageError, match="different steps"):
        stays.model.state_dict()


def test_the_plan_and_the_report_say_so():
    _, stays = sides()
    assert "stays on the device" in str(noria.plan(Net(), device=DEVICE, resident="all"))
    stays.train(0, 3)
    assert "at rest" in str(noria.report(stays.model))
