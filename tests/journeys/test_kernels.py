"""noria's own kernels as a user meets them: chosen by themselves, the same bits in any window, torch's own state."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits, on_machine
from torch import nn

from tests.device import DEVICE
from tests.journeys.pairs import HOSTILE, LATE_UPDATES, Net, Side, adamw, assert_moved, both, loss_of, state_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

COVERED: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "AdamW without decay": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.0, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam as AdamW": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "SGD with Nesterov's": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Lion": (noria.optim.Lion, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
}
NUM_MOMENTS = {"SGD": 0, "SGD with momentum": 1, "SGD with Nesterov's": 1, "Lion": 1, "Adafactor": 0}  # others: 2
covered = pytest.mark.parametrize("name", COVERED)
dtypes = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])


def make(name: str, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    cls, fixed = COVERED[name]
    return cls(parameters, **{**fixed, **options})


def clipped(side: Side) -> None:
    for number in range(5):
        loss = loss_of(side.model, number)
        loss.backward()
        if number % 2:
            side.keep(f"norm {number}", nn.utils.clip_grad_norm_(side.model.parameters(), 0.05))
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.keep(f"loss {number}", loss)


# ---- every rule, in any window -------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@covered
@dtypes
def test_every_rule_has_the_same_bits_in_a_small_window_as_with_everything_resident(name, dtype):
    models = []

    def journey(side):
        before = {key: value.clone() for key, value in side.model.state_dict().items()}
        clipped(side)
        moved = sum(not torch.equal(before[key], value) for key, value in side.model.state_dict().items())
        assert moved > len(before) / 2
        models.append(side.model)

    both(journey, optimizer=lambda ps: make(name, ps), kernel="fused", dtype=dtype, hostility=LATE_UPDATES)
    report = noria.report(models[1])
    assert ["fused kernel" in kernel for kernel in report.kernels] == [True]
    rows = {row.purpose: row.planned for row in report.ledger}
    moments = sum(purpose in rows for purpose in ("first moments", "second moments"))
    assert moments == NUM_MOMENTS.get(name, 2)
    assert ("low bits" in rows) == (dtype is not None)
    assert rows.keys().isdisjoint({"masters", "optimizer state", "update scratch"})


@covered
def test_every_rule_trains_as_plain_torch_does_and_shares_its_checkpoints(name):
    """Close to plain PyTorch after steps of its own; and the state of either, loaded into the other, goes on as if
    nothing had happened."""
    torch.manual_seed(0)
    plain = Side(Net(), None, False)
    ours = Side(copy.deepcopy(plain.model), None, True)
    for side in (plain, ours):
        side.optimizer = make(name, side.model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(ours.model, ours.optimizer, device=DEVICE, window=2)
    for first, last in ((0, 3), (3, 6)):
        for side in (plain, ours):
            side.train(first, last)
        one, other = plain.optimizer.state_dict()["state"], ours.optimizer.state_dict()["state"]
        assert one.keys() == other.keys()
        for values, same_values in zip(one.values(), other.values(), strict=True):
            assert list(values) == list(same_values)  # the same keys in the same order
            for key, value in values.items():
                assert (value.dtype, value.shape) == (same_values[key].dtype, same_values[key].shape)
                torch.testing.assert_close(value.cpu(), same_values[key].cpu(), rtol=1e-4, atol=1e-6)
        for key, value in ours.model.state_dict().items():
            torch.testing.assert_close(value, plain.model.state_dict()[key].to(value.device), rtol=1e-3, atol=1e-4)
        # Swapped: each goes on with what the other has.
        theirs = through_a_file(plain), through_a_file(ours)
        for side, (model, optimizer) in zip((ours, plain), theirs, strict=True):
            side.model.load_state_dict(model)
            side.optimizer.load_state_dict(optimizer)
        assert_same_bits(ours.model.state_dict(), theirs[0][0])
        assert_same_bits(plain.model.state_dict(), theirs[1][0])
    assert_moved(ours.model)


def through_a_file(side: Side) -> Any:
    file = io.BytesIO()
    torch.save((side.model.state_dict(), side.optimizer.state_dict()), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.skipif("avx2" not in noria._C.instruction_sets(), reason="torch has no fused multiply-add here")
@pytest.mark.parametrize("name", [name for name in COVERED if name.startswith("SGD")])
def test_sgd_has_the_very_bits_of_torch(name):
    results = []
    for kernel in (None, "fused"):
        torch.manual_seed(0)
        side = Side(Net(), None, kernel is not None)
        side.optimizer = make(name, side.model.parameters())
        if kernel is not None:
            noria.wrap(side.model, side.optimizer, device=DEVICE, window=2, kernel=kernel)
        clipped(side)
        results.append({**side.kept, **side.model.state_dict(), **state_tensors(side.optimizer)})
    assert_same_bits(*results)


@covered
def test_tensor_valued_learning_rates_are_read_at_the_step(name):
    def journey(side):
        for number in range(4):
            loss_of(side.model, number).backward()
            side.optimizer.step()
            side.optimizer.param_groups[0]["lr"].mul_(0.5)
            side.optimizer.zero_grad()

    def optimizer(parameters):
        lr = torch.tensor(1e-2)
        return make(name, parameters, lr=lr)

    both(journey, optimizer=optimizer, kernel="fused", hostility=LATE_UPDATES)


def test_a_nan_of_a_gpu_that_is_loaded_stays_a_nan_in_bf16():
    """It has all bits set. Rounded to bf16 it would carry, and become zero. A moment's NaN reaches the weight, too."""
    side = Side(Net(), None, True)
    side.optimizer = adamw(side.model.parameters())
    noria.wrap(side.model, side.optimizer, device=DEVICE, window=2, kernel="fused", dtype=torch.bfloat16)
    strange = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    first = next(iter(side.model.state_dict()))

    def step() -> torch.Tensor:
        loss_of(side.model, 0).nan_to_num().backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return side.model.state_dict()[first].isnan().view(-1)

    assert not step().any()
    state = copy.deepcopy(side.optimizer.state_dict())
    state["state"][0]["exp_avg"].view(-1)[:2] = strange
    side.optimizer.load_state_dict(state)
    is_nan = step()
    assert is_nan[:2].all()
    assert not is_nan[2:].any()
    weights = {name: value.float() for name, value in side.model.state_dict().items()}
    weights[first].view(-1)[2:4] = strange
    side.model.load_state_dict(weights)
    assert side.model.state_dict()[first].view(-1)[:4].isnan().all()


def test_plain_sgd_leaves_no_entry_in_the_state_as_in_torch():
    def journey(side):
        side.train(0, 2)
        assert len(side.optimizer.state) == 0
        assert side.optimizer.state_dict()["state"] == {}

    for kernel in ("fused", "torch"):
        both(journey, optimizer=lambda ps: make("SGD", ps), kernel=kernel)


def test_momentum_that_a_schedule_turns_on_later_is_kept_outside_of_the_home_and_named():
    models = []

    def journey(side):
        side.train(0, 2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(side.optimizer, 0.1, total_steps=10)
        for number in range(2, 5):
            loss_of(side.model, number).backward()
            side.optimizer.step()
            scheduler.step()
            side.optimizer.zero_grad()
        assert len(side.optimizer.state) == len(list(side.model.parameters()))
        models.append(side.model)

    both(journey, optimizer=lambda ps: make("SGD", ps), kernel="fused", hostility=LATE_UPDATES)
    assert any("momentum_buffer that was not planned" in note for note in noria.report(models[1]).notes)


# ---- who updates what ----------------------------------------------------------------------------------------------


class OfMyOwn(torch.optim.AdamW):
    """A subclass may look further than its parameter."""


@pytest.mark.parametrize("kernel", ["auto", "fused", "torch"])
@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        (lambda ps: torch.optim.AdamW(ps), "fused"),
        (lambda ps: torch.optim.Adam(ps, fused=True), "fused"),
        (lambda ps: torch.optim.SGD(ps, lr=0.1), "fused"),
        (lambda ps: noria.optim.Lion(ps), "fused"),
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), "unit by unit"),
        (lambda ps: torch.optim.Adagrad(ps), "unit by unit"),
        (OfMyOwn, "all at once"),
    ],
)
def test_the_kernel_is_chosen_by_itself_and_named_in_plan_and_report(optimizer, wanted, kernel):
    model = Net()
    made = optimizer(model.parameters())
    planned = noria.plan(model, made, device=DEVICE, kernel=kernel)
    noria.wrap(model, made, device=DEVICE, window=2, kernel=kernel)
    report = noria.report(model)
    if kernel == "torch" and wanted == "fused":
        wanted = "unit by unit"
    (name,) = report.kernels
    assert wanted in name and f"updates: {name}" in str(planned) and f"updates: {name}" in str(report)
    if wanted == "unit by unit" and kernel != "torch":
        assert ("amsgrad" in name) or ("Adagrad has none" in name)
    side = Side(model, made, True)
    side.train(0, 2)
    assert_moved(model)
    assert (report.kernels[0] in str(noria.report(model))) and noria.report(model).ledger_agrees


def test_a_parameter_in_bfloat16_without_a_master_is_updated_by_torch():
    model = Net()
    model.blocks[1].bfloat16()

    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model.blocks[1]

        def forward(self, x):
            return self.inner(x.bfloat16()).float()

    model.blocks[1] = Casting()
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE)
    report = noria.report(model)
    assert "1 of" in report.kernels[0] and "units by torch" in report.kernels[0]
    side = Side(model, optimizer, True)
    side.train(0, 3)
    assert optimizer.state_dict()["state"][9]["exp_avg"].dtype is torch.bfloat16
    assert_moved(model, None)


# ---- several optimizers in one call --------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@dtypes
@pytest.mark.parametrize("split", ["by block", "inside every block"])
@pytest.mark.parametrize("second", ["Adagrad", "Lion", "SGD"])
def test_optimizers_with_different_kernels_beside_each_other(split, second, dtype):
    """A unit that a fused optimizer shares with torch's goes to torch for both; nothing else does."""
    second_class = noria.optim.Lion if second == "Lion" else getattr(torch.optim, second)
    results, reports = [], []
    for window, update in ((2, "auto"), (7, "blocking")):
        torch.manual_seed(0)
        model = Net()
        named = dict(model.named_parameters())
        chosen = [p for n, p in named.items() if ("blocks.1" in n if split == "by block" else "expand" in n)]
        others = [p for p in named.values() if all(p is not each for each in chosen)]
        optimizers = [adamw(others), second_class(chosen, lr=0.01)]
        with on_machine(hostility=LATE_UPDATES if window == 2 else {}):
            noria.wrap(model, optimizers, device=DEVICE, window=window, update=update, dtype=dtype)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        for step in range(4):
            loss_of(model, step).backward()
            for optimizer in optimizers[: 1 + (step != 2)]:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        states = {f"{i} {k}": v for i, each in enumerate(optimizers) for k, v in state_tensors(each).items()}
        after = {key: value.clone() for key, value in model.state_dict().items()}
        results.append(after | {key: value.clone() for key, value in states.items()})
        reports.append(noria.report(model))
        assert any(not torch.equal(before[f"blocks.1.{n}"], after[f"blocks.1.{n}"]) for n in ("expand.weight",))
        assert_moved(model, None)
    assert_same_bits(*results)
    report = reports[0]
    rows = {row.purpose for row in report.ledger}
    if second == "Adagrad":
        assert "unit by unit" in report.kernels[1] and "fused kernel" in report.kernels[0]
        assert ("units by torch" in report.kernels[0]) == (split != "by block")
        assert {"first moments", "second moments", "optimizer state"} <= rows
        assert (dtype is None) == rows.isdisjoint({"masters", "low bits"})
        assert dtype is None or {"masters", "low bits", "update scratch"} <= rows
    else:
        assert all("fused kernel" in kernel and "units by torch" not in kernel for kernel in report.kernels)
        assert "optimizer state" not in rows


@dtypes
def test_checkpoints_of_a_mixed_wrap_are_those_of_one_by_torch_alone(dtype):
    """Low bits come from split and from plain masters alike, and go back into either."""

    def build(**policy):
        torch.manual_seed(0)
        model = Net()
        chosen = list(model.blocks[1].parameters())
        others = [p for p in model.parameters() if all(p is not each for each in chosen)]
        optimizers = [adamw(others), torch.optim.Adagrad(chosen, lr=0.01)]
        noria.wrap(model, optimizers, device=DEVICE, window=2, dtype=dtype, **policy)
        return model, optimizers

    def train(model, optimizers, first, last):
        for step in range(first, last):
            loss_of(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    straight, straight_optimizers = build()
    train(straight, straight_optimizers, 0, 4)
    first, first_optimizers = build()
    train(first, first_optimizers, 0, 2)
    again, again_optimizers = build()
    train(again, again_optimizers, 5, 6)
    by_torch, by_torch_optimizers = build(kernel="torch")
    saved = first.state_dict(), [optimizer.state_dict() for optimizer in first_optimizers]
    saved = copy.deepcopy(saved)
    for model, optimizers in ((again, again_optimizers), (by_torch, by_torch_optimizers)):
        model.load_state_dict(saved[0])
        for optimizer, state in zip(optimizers, saved[1], strict=True):
            optimizer.load_state_dict(state)
            loaded = {f"{n}.{key}": value for n, each in state["state"].items() for key, value in each.items()}
            assert_same_bits(state_tensors(optimizer), loaded)
        assert_same_bits(model.state_dict(), saved[0])
    train(again, again_optimizers, 2, 4)
    assert_same_bits(again.state_dict(), straight.state_dict())
    for mine, theirs in zip(again_optimizers, straight_optimizers, strict=True):
        assert_same_bits(state_tensors(mine), state_tensors(theirs))


def test_masters_of_a_mixed_wrap_are_the_values_that_they_were_made_from():
    """After a step that moves nothing, working copy and low bits together are the fp32 value, split or plain."""
    torch.manual_seed(0)
    model = Net()
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    chosen = list(model.blocks[1].parameters())
    others = [p for p in model.parameters() if all(p is not each for each in chosen)]
    optimizers = [adamw(others, lr=0.0), torch.optim.Adagrad(chosen, lr=0.0)]
    noria.wrap(model, optimizers, device=DEVICE, window=2, dtype=torch.bfloat16)
    loss_of(model, 0).backward()
    for optimizer in optimizers:
        optimizer.step()
    low = {
        parameter: each["low_bits"]
        for optimizer, parameters in zip(optimizers, (others, chosen), strict=True)
        for parameter, each in zip(parameters, optimizer.state_dict()["state"].values(), strict=True)
    }
    working = model.state_dict()
    for name, parameter in model.named_parameters():
        high = working[name].view(torch.int16).to(torch.int32) << 16
        master = (high + low[parameter].to(torch.int32)).view(torch.float32)
        assert_same_bits({name: master}, {name: first[name]})


@dtypes
def test_groups_that_are_added_later_find_their_place(dtype):
    def journey(side):
        side.optimizer.param_groups[0]["params"], rest = (
            list(side.model.embed.parameters()),
            [p for p in side.model.parameters() if p is not side.model.embed.weight],
        )
        side.train(0, 2)
        side.optimizer.add_param_group({"params": rest, "lr": 1e-3})
        side.train(2, 5)

    both(journey, optimizer=adamw, kernel="fused", dtype=dtype)

    def late(side):
        side.train(0, 2)
        held = {p for group in side.optimizer.param_groups for p in group["params"]}
        side.optimizer.add_param_group({"params": [p for p in side.model.parameters() if p not in held], "lr": 1e-3})
        side.train(2, 5)

    class Holder:
        """The head alone at first."""

        def __call__(self, parameters):
            return adamw(list(parameters)[-2:])

    both(late, optimizer=Holder(), kernel="fused", dtype=dtype)


# ---- Lion by itself ------------------------------------------------------------------------------------------------


def test_lion_by_torch_has_its_own_bits_through_a_window():
    both(clipped, optimizer=lambda ps: make("Lion", ps), kernel="torch")


def test_lion_survives_pickling_wrapped_or_not():
    model = Net(2)
    optimizer = make("Lion", model.parameters())
    plain = pickle.loads(pickle.dumps(optimizer))
    assert type(plain) is noria.optim.Lion and plain.param_groups[0]["betas"] == (0.9, 0.99)
    noria.wrap(model, optimizer, device=DEVICE, window=2)
    assert isinstance(optimizer, noria.optim.Lion)
    Side(model, optimizer, True).train(0, 1)
    noria.unwrap(model, optimizer)
    assert type(optimizer) is noria.optim.Lion and all(list(s) == ["exp_avg"] for s in optimizer.state.values())


def test_lion_refuses_nonsense():
    parameters = [nn.Parameter(torch.zeros(2, device="cpu"))]
    for wrong in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match="Invalid"):
            noria.optim.Lion(parameters, **wrong)
    optimizer = noria.optim.Lion(parameters)
    parameters[0].grad = torch.zeros(2, device="cpu").to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    closure_value = noria.optim.Lion([nn.Parameter(torch.zeros(2))]).step(lambda: torch.tensor(3.0))
    assert closure_value == 3.0
