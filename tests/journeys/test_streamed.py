"""Updates that run on the device though state lies at home have the bits of noria's kernels on the host, or those of
torch's optimizers on the device."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from typing import Any

import noria
import pytest
import torch
from noria import _C
from noria.host.device_buffers import DeviceBuffers
from noria.planning import streamed as planned
from noria.runtime.masters import follow_there, round_there
from noria.step import streamed_step, torch_on_device
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by
from torch import nn

from tests import device
from tests.device import DEVICE
from tests.journeys.pairs import (
    HOSTILE,
    OPTIMIZERS,
    WIDTH,
    Net,
    Side,
    adamw,
    loss_of,
    new_side,
    sgd,
    state_tensors,
)

pytestmark = pytest.mark.usefixtures("one_thread")
NEEDS_KERNELS = pytest.mark.skipif(
    DEVICE == "cuda" and not _C.has_kernel_images(), reason="this build has no kernels for devices: it had no nvcc"
)
MASTERS = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "masters"])
WHOLE, CUT = 8 << 20, 200


@pytest.fixture(params=[WHOLE, CUT], ids=["whole", "cut"], autouse=True)
def piece(request, monkeypatch) -> int:
    """How many elements make a piece: all of a unit, or few, so that a unit has more pieces than there are slots."""
    monkeypatch.setattr(planned, "PIECE_ELEMENTS", request.param)
    return request.param


@pytest.fixture
def stepping_there(monkeypatch):
    """Plain optimizers step on the device."""
    monkeypatch.setattr(device, "steps_at_home", False)


class Matrices(nn.Module):
    """All parameters are matrices, as Muon wants."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH, bias=False))
            for _ in range(5)
        )
        self.head = nn.Linear(WIDTH, 23, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Idle(Net):
    """Some parameters of blocks never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.idle = nn.Parameter(torch.randn(37))
            block.idle_too = nn.Parameter(torch.randn(300))


BY_TORCH: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer]]] = {
    "muon": (Matrices, lambda parameters: torch.optim.Muon(parameters, lr=0.02)),
    "adamw": (Net, adamw),
    "adamw amsgrad, one by one": (Net, lambda parameters: adamw(parameters, amsgrad=True, foreach=False)),
    "momentum": (Net, sgd),
    "adafactor": (Net, lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2)),
    "adagrad": (Net, lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2)),
    "nadam": (Net, lambda parameters: torch.optim.NAdam(parameters, lr=1e-2)),
}


def train(side: Side, steps: int = 5) -> None:
    """Every second step clips."""
    for number in range(steps):
        loss = loss_of(side.model, number)
        loss.backward()
        if number % 2:
            side.keep(f"norm {number}", nn.utils.clip_grad_norm_(side.model.parameters(), 0.1))
        side.optimizer.step()
        side.keep_gradients(f"step {number}")
        side.optimizer.zero_grad()
        side.keep(f"loss {number}", loss)


def wrapped_side(
    model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer], hostility: Any = HOSTILE, **policy: Any
) -> Side:
    side = Side(model, optimizer(model.parameters()), True)
    with on_machine(hostility=hostility):
        noria.wrap(side.model, side.optimizer, device=DEVICE, **{"window": 2, **policy})
    return side


def streams(side: Side) -> None:
    """All that trains was updated on the device, as planned."""
    context = wrapped_by(side.model).context
    trained = {slot.unit for slot in context.slots if slot.trainable}
    assert trained == context.plan.streamed.keys() != set()
    assert "update -> drain_state on update_slot (RAW)" in context.engine.wait_kinds()
    report = noria.report(side.model)
    assert report.ledger_agrees, str(report)


def compare(
    journey: Callable[[Side], Any],
    *,
    model: Callable[[], nn.Module] = Net,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    **policy: Any,
) -> Side:
    """Leads a model that is updated on the host through the journey, and one that is updated on the device."""
    torch.manual_seed(0)
    first = model().cpu()
    host = wrapped_side(copy.deepcopy(first), optimizer, **policy)
    there = wrapped_side(first, optimizer, **{**policy, "optimizer_device": "device"})
    for side in (host, there):
        torch.manual_seed(1)
        journey(side)
    assert_same_bits(there.kept, host.kept)
    assert_same_bits(there.model.state_dict(), host.model.state_dict())
    if state_tensors(host.optimizer):
        assert_same_bits(state_tensors(there.optimizer), state_tensors(host.optimizer))
    streams(there)
    return there


# ---- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@NEEDS_KERNELS
@MASTERS
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_norias_kernels_have_the_bits_of_the_host(rule, dtype):
    compare(train, optimizer=OPTIMIZERS[rule], dtype=dtype, kernel="fused")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("update", ["auto", "blocking"])
@pytest.mark.parametrize("name", BY_TORCH)
def test_torchs_optimizers_have_the_bits_of_plain_pytorch_on_the_device(name, update, stepping_there):
    make, optimizer = BY_TORCH[name]
    torch.manual_seed(0)
    plain = make()
    side = wrapped_side(copy.deepcopy(plain).cpu(), optimizer, kernel="torch", update=update, optimizer_device="device")
    twin = Side(plain, optimizer(plain.parameters()), False)
    for each in (twin, side):
        train(each)
    assert_same_bits(side.kept, twin.kept)
    assert_same_bits(side.model.state_dict(), twin.model.state_dict())
    assert_same_bits(state_tensors(side.optimizer), state_tensors(twin.optimizer))
    streams(side)


@pytest.mark.skipif(device.DEVICE == "cuda" and not device.IS_PRETEND, reason="a GPU and the host differ in last bits")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BY_TORCH)
def test_beside_masters_torchs_optimizers_have_the_bits_of_the_host_if_the_device_is_one(name):
    model, optimizer = BY_TORCH[name]
    compare(train, model=model, optimizer=optimizer, kernel="torch", dtype=torch.bfloat16)


def test_a_device_that_does_not_bring_updates_home_has_other_bits(monkeypatch):
    """The control arm."""
    whole = planned.StreamCopy

    def lost(purpose: str, *args: Any, **ways: Any) -> planned.StreamCopy:
        return whole(purpose, *args, **{**ways, "goes": False} if purpose == "working copies" else ways)

    monkeypatch.setattr(planned, "StreamCopy", lambda *args: lost(*args[:4], comes=args[4], goes=args[5]))
    with pytest.raises(AssertionError, match="norm 1"):
        compare(train, kernel="torch")


@MASTERS
@pytest.mark.parametrize("kernel", ["torch", pytest.param("fused", marks=NEEDS_KERNELS)])
def test_parameters_without_a_gradient_keep_their_bits(kernel, dtype):
    compare(train, model=Idle, kernel=kernel, dtype=dtype)


@MASTERS
@pytest.mark.parametrize("kernel", ["torch", pytest.param("fused", marks=NEEDS_KERNELS)])
def test_accumulation_looks_and_edits_between_steps(kernel, dtype):
    def journey(side: Side) -> None:
        kept = None
        for number in range(4):
            for micro_batch in range(2):
                loss_of(side.model, 10 * number + micro_batch).backward()
            torch._foreach_mul_(list(side.gradients()), 0.5)
            side.optimizer.step()
            if kept is not None:
                if not wrapped_by(side.model).context.plan.streamed:
                    len(side.optimizer.state)  # on the host the loop has to wait for the update
                kept.mul_(0.5)
            state = side.optimizer.state[side.model.blocks[number].expand.weight]
            kept = state["exp_avg"]
            side.keep(f"moment {number}", kept)
            state["exp_avg_sq"] = torch.full_like(state["exp_avg_sq"], 0.01)
            for name, value in side.model.state_dict().items():
                side.keep(f"step {number}: {name}", value)
            with noria.materialize(side.model), torch.no_grad():
                side.model.head.weight.mul_(0.9)
            side.optimizer.zero_grad()

    compare(journey, kernel=kernel, dtype=dtype)


@pytest.mark.parametrize("kernel", ["torch", pytest.param("fused", marks=NEEDS_KERNELS)])
def test_a_run_that_is_saved_on_the_device_goes_on_on_the_host(kernel, tmp_path):
    def journey(side: Side) -> None:
        side.train(0, 2)
        noria.save(tmp_path / "run.pt", side.model, side.optimizer)
        side.train(2, 4)
        noria.load(tmp_path / "run.pt", side.model, side.optimizer)
        side.train(4, 6)

    compare(journey, kernel=kernel)


@pytest.mark.parametrize("kernel", ["torch", pytest.param("fused", marks=NEEDS_KERNELS)])
def test_unwrapped_it_is_plain_pytorch(kernel):
    def journey(side: Side) -> None:
        side.train(0, 3)
        copied = copy.deepcopy(side.optimizer.state_dict())
        for number, values in copied["state"].items():
            for key, value in values.items():
                side.keep(f"{number}.{key}", value)

    there = compare(journey, kernel=kernel)
    noria.unwrap(there.model, there.optimizer)
    assert all(each.device.type == "cpu" for each in there.model.parameters())
    assert all(value.device.type == "cpu" for value in state_tensors(there.optimizer).values())


@NEEDS_KERNELS
def test_two_optimizers_of_several_rules_share_units():
    def both(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=1e-2)

    torch.manual_seed(0)
    first = Net().cpu()
    made = []
    for where in ("host", "device"):
        model = copy.deepcopy(first)
        decayed = [each for each in model.parameters() if each.ndim > 1]
        others = [each for each in model.parameters() if each.ndim <= 1]
        optimizers = [both(decayed), sgd(others)]
        with on_machine(hostility=HOSTILE):
            noria.wrap(model, optimizers, device=DEVICE, window=2, kernel="fused", optimizer_device=where)
        for number in range(4):
            loss_of(model, number).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        made.append(model.state_dict())
    assert_same_bits(made[1], made[0])


# ---- what moves, and what is taken --------------------------------------------------------------------------------


def test_pieces_are_fetched_ahead_in_few_slots(tmp_path, piece):
    path = tmp_path / "trace.json"
    torch.manual_seed(0)
    side = wrapped_side(Net().cpu(), adamw, {}, kernel="torch", optimizer_device="device", trace=path)
    side.train(0, 3)
    context = wrapped_by(side.model).context
    context.write_trace()
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("ph") == "X"]
    number = {verb: sum(each["name"].startswith(verb) for each in events) for verb in ("fetch_state", "drain_state")}
    pieces = sum(map(len, context.plan.streamed.values()))
    assert number["drain_state"] in (2 * pieces, 3 * pieces)  # the last step's may still wait
    assert number["fetch_state"] >= number["drain_state"]
    assert (pieces > len(context.units)) == (piece == CUT)
    [row] = [each for each in noria.report(side.model).ledger if each.purpose == "pieces that are updated"]
    assert row.planned == row.taken == context.plan.update_slot_bytes * planned.NUM_SLOTS


def test_the_window_leaves_room_for_the_slots():
    torch.manual_seed(0)
    model = Net().cpu()
    least = 0
    for _ in range(2):
        try:
            noria.plan(
                model,
                adamw(model.parameters()),
                device=DEVICE,
                device_memory=max(least, 1024),
                optimizer_device="device",
                kernel="torch",
            )
            break
        except noria.UsageError as error:
            least = int(str(error).split("(")[1].split(" bytes")[0])
    there = wrapped_side(model, adamw, device_memory=least, window="auto", optimizer_device="device", kernel="torch")
    there.train(0, 3)
    streams(there)


# ---- failures -----------------------------------------------------------------------------------------------------


def raising(*args: Any) -> None:
    raise ValueError("as the test wants it")


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (torch_on_device, "step_of", lambda cls: raising),
        (streamed_step.StreamedStep, "_scale", raising),  # before torch's step, as if memory were missing
    ],
    ids=["in torch's step", "before it"],
)
def test_an_update_that_raises_there_is_told_where_the_unit_is_needed(monkeypatch, stepping_there, where, name, broken):
    side = wrapped_side(Net().cpu(), adamw, {}, kernel="torch", optimizer_device="device")
    side.train(0, 2)
    before = copy.deepcopy(side.model.state_dict())
    loss_of(side.model, 2).backward()
    side.optimizer.step()
    with monkeypatch.context() as patched:
        patched.setattr(where, name, broken)
        with pytest.raises(ValueError, match="as the test wants it") as caught:
            loss_of(side.model, 3)
    assert any("raised by the update of unit" in note for note in caught.value.__notes__)
    assert any("The step is broken off" in note for note in caught.value.__notes__)
    assert_same_bits(side.model.state_dict(), before)  # broken off before it had changed anything
    side.optimizer.zero_grad()
    side.train(3, 5)


@pytest.mark.parametrize(
    ("optimizer", "policy", "expected"),
    [
        (adamw, {"update": "backward"}, 'update="backward"'),
        (adamw, {"state_dtype": "bf16", "kernel": "fused"}, 'state_dtype="bf16"'),
        (lambda parameters: torch.optim.LBFGS(parameters), {}, "LBFGS, which may look at all parameters"),
    ],
)
def test_what_cannot_run_there_is_refused(optimizer, policy, expected):
    model = Net().cpu()
    with pytest.raises(noria.UsageError, match=expected):
        noria.wrap(model, optimizer(model.parameters()), device=DEVICE, optimizer_device="device", **policy)
    assert not noria.is_wrapped(model)


def test_other_places_are_refused():
    with pytest.raises(noria.UsageError, match="optimizer_device"):
        noria.Policy(optimizer_device="cuda")


@pytest.mark.skipif(DEVICE == "cpu", reason="there the device is the host, which has the same bits")
def test_a_load_warns_if_torchs_code_ran_elsewhere_before(tmp_path):
    torch.manual_seed(0)
    there = wrapped_side(Net().cpu(), adamw, {}, kernel="torch", optimizer_device="device")
    here = wrapped_side(Net().cpu(), adamw, {}, kernel="torch")
    there.train(0, 2)
    noria.save(tmp_path / "run.pt", there.model, there.optimizer, step=2)
    with pytest.warns(UserWarning, match="on cuda until now, and will run them on cpu"):
        assert noria.load(tmp_path / "run.pt", here.model, here.optimizer) == {"step": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        noria.load(tmp_path / "run.pt", there.model, there.optimizer)
    with pytest.raises(noria.UsageError, match="rename it"):
        noria.save(tmp_path / "run.pt", here.model, here.optimizer, noria=1)


def test_a_device_too_small_for_pieces_says_so():
    model = Net().cpu()
    with pytest.raises(noria.UsageError, match=r"for pieces that are updated there.*optimizer_device=\"host\""):
        noria.wrap(model, adamw(model.parameters()), device=DEVICE, device_memory=1024, optimizer_device="device")


@pytest.mark.skipif(DEVICE == "cuda", reason="there a fraction is one of the device's memory")
def test_a_fraction_of_the_model_counts_its_pieces():
    side = wrapped_side(Net(), adamw, {}, window="auto", device_memory=1.0, optimizer_device="device")
    side.train(0, 2)
    streams(side)


# ---- memory that is not there -------------------------------------------------------------------------------------


@NEEDS_KERNELS
def test_slots_that_find_no_memory_later_are_asked_for_again(monkeypatch):
    """An optimizer comes later. The device is full then, and has room again at the next pass."""
    torch.manual_seed(0)
    plain, model = new_side(), Net().cpu()
    model.load_state_dict(plain.model.state_dict())
    noria.wrap(model, device=DEVICE, window=2, kernel="fused", optimizer_device="device")
    optimizer = adamw(model.parameters())
    take = DeviceBuffers.take

    def refuse(self: DeviceBuffers, purpose: str, size: int) -> None:
        raise noria.MachineError("no room")

    with monkeypatch.context() as full:
        full.setattr(DeviceBuffers, "take", refuse)
        with pytest.raises(noria.MachineError, match="no room"):
            noria.wrap(model, optimizer)
        with pytest.raises(noria.MachineError, match="no room"):
            loss_of(model, 0)
    assert DeviceBuffers.take is take
    side = Side(model, optimizer, True)
    side.train(0, 3)
    streams(side)
    host = wrapped_side(plain.model.cpu(), adamw, {}, kernel="fused")
    host.train(0, 3)
    assert_same_bits(side.kept, host.kept)


@NEEDS_KERNELS
def test_an_optimizer_may_come_while_the_model_sleeps():
    torch.manual_seed(0)
    model = Net().cpu()
    noria.wrap(model, device=DEVICE, window=2, kernel="fused", optimizer_device="device")
    with noria.asleep(model):
        optimizer = adamw(model.parameters())
        noria.wrap(model, optimizer)
        assert wrapped_by(model).context.backend.allocated == 0
    side = Side(model, optimizer, True)
    side.train(0, 3)
    streams(side)


def test_a_nan_with_all_bits_set_stays_a_nan():
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32)  # where journeys train
    master, working = bits.view(torch.float32), torch.zeros(4, dtype=torch.bfloat16)
    round_there(master, working)
    assert working.isnan().all()
    values = torch.randn(1000)
    rounded = torch.zeros(1000, dtype=torch.bfloat16)
    round_there(values, rounded)
    at_home, other = values.cpu(), torch.zeros(1000, dtype=torch.bfloat16, device="cpu")
    _C.split_master(at_home.data_ptr(), other.data_ptr(), 0, 1000)
    assert torch.equal(rounded.cpu(), other)


def test_a_master_follows_what_was_written_to_its_working_copy():
    master = torch.randn(1000)
    working = torch.zeros(1000, dtype=torch.bfloat16)
    round_there(master, working)
    before = master.clone()
    follow_there(master, working)
    assert torch.equal(master, before)
    working[::7] = 3
    follow_there(master, working)
    assert torch.equal(master[::7], torch.full_like(master[::7], 3))
    others = torch.arange(1000) % 7 > 0
    assert torch.equal(master[others], before[others])
