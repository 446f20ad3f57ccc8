"""What forwards keep for their backwards goes to the home and comes back, or is computed again: the same bits, less
memory on the device, and a home that says what it takes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import json
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import noria
import pytest
import torch
from noria import _C
from noria.forward.activations import Activations
from noria.forward.recompute import Recomputation
from noria.pipeline.peer_cache import PeerCache
from noria.planning import wrap_plan
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.testing import assert_same_bits, omit_wait, on_machine
from noria.wrapped import wrapped_by
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.device import DEVICE, NEEDS_FULL_HOST, NEEDS_SLOW_LINKS, not_on_a_gpu
from tests.journeys.pairs import HOSTILE, VOCAB, WIDTH, Block, Net, Side, adamw, both, loss_of, tokens

pytestmark = pytest.mark.usefixtures("one_thread")
LATE = {**HOSTILE, "hold_us": {"offload": 3000, "reload": 3000}}
MODES: dict[str, dict[str, Any]] = {
    "offload": {"activations": "offload"},
    "recompute": {"activations": "recompute"},
    "auto": {"activations": "auto", "activation_memory": "12KiB"},  # two of the largest blocks'
}


@pytest.fixture(autouse=True)
def least_saved(monkeypatch):
    monkeypatch.setattr(wrap_plan, "LEAST_SAVED", 64)


class Dropping(Net):
    """Random numbers in each block."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = F.dropout(block(x), 0.2, training=self.training)
        return self.head(x)


class Attention(nn.Module):
    """Views of one tensor are saved, and a tuple is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.into(x).view(*x.shape[:2], 2, 3 * WIDTH // 2).transpose(1, 2).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2)) * scale, scale.exp().sqrt()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x, scale = self.embed(batch), torch.ones(WIDTH)
        for block in self.blocks:
            x, scale = block(x, scale)
        return self.head(x)


class Twice(Net):
    """Blocks that run twice in a forward, in another order."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in (*self.blocks, self.blocks[1], self.blocks[0]):
            x = block(x)
        return self.head(x)


class Checkpointed(Net):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)
        return self.head(x)


class CheckpointedWithMore(Net):
    """Each checkpoint has its own operators before and after a block."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for number, block in enumerate(self.blocks):
            x = checkpoint(around(block), x, use_reentrant=False) if number % 2 else block(x)
        return self.head(x)


def around(block: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (block(x.sin()) * x).cos()


def plain(side: Side) -> None:
    side.train(0, 4)


def micro_batches(side: Side) -> None:
    """Several forwards are under way at once: all go before any comes back, then one for one."""
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
        losses = [loss_of(side.model, 10 + number) for number in range(4)]
        for number in order:
            losses[number].backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
    waiting = [loss_of(side.model, 20), loss_of(side.model, 21)]
    for number in range(22, 26):
        waiting.pop(0).backward()
        waiting.append(loss_of(side.model, number))
    for loss in waiting:
        loss.backward()
    side.keep_gradients("micro-batches")
    side.optimizer.step()
    side.optimizer.zero_grad()
    side.train(0, 1)


def interruptions(side: Side) -> None:
    """Evaluation, a graph that is dropped, a backward that comes twice, one that raises."""
    side.train(0, 1)
    loss_of(side.model, 7)
    with torch.no_grad():
        side.keep("evaluation", loss_of(side.model.eval(), 8))
    side.model.train()
    loss = loss_of(side.model, 1)
    loss.backward(retain_graph=True)
    loss.backward()
    side.keep_gradients("twice")
    side.optimizer.zero_grad()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for register in (side.model.blocks[2].register_forward_hook, side.model.blocks[2].register_full_backward_pre_hook):
        handle = register(fail)
        with pytest.raises(ZeroDivisionError):
            loss_of(side.model, 2).backward()
        handle.remove()
        side.optimizer.zero_grad()
    side.train(3, 6)


def inner_loss(side: Side) -> None:
    """Backward from the middle of the model, and gradients of inputs."""
    for number in range(3):
        x = side.model.embed(tokens(number)).detach().requires_grad_()
        y = side.model.blocks[1](side.model.blocks[0](x))
        (y.square().mean() + side.model.blocks[2](y).mean()).backward()
        side.keep(f"gradient {number}", x.grad)
        side.optimizer.step()
        side.optimizer.zero_grad()


JOURNEYS = [plain, micro_batches, interruptions, inner_loss]
MODELS = [Net, Dropping, Attending, Twice, Checkpointed, CheckpointedWithMore]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hostility", [HOSTILE, LATE], ids=["hostile", "late"])
@pytest.mark.parametrize("journey", JOURNEYS, ids=lambda journey: journey.__name__)
def test_journeys_have_the_bits_of_plain_torch(mode, hostility, journey):
    both(journey, **MODES[mode], hostility=hostility)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_models_have_the_bits_of_plain_torch(mode, model):
    both(plain, model=model, **MODES[mode], hostility=LATE)
    both(micro_batches, model=model, **MODES[mode], window=4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "policy", [{"update": "backward"}, {"draft_memory": "64MiB"}, {"dtype": torch.bfloat16}], ids=str
)
def test_other_policies_have_the_same_bits(mode, policy):
    both(plain, **MODES[mode], kernel="fused", **policy)


def test_autocast_has_the_same_bits():
    def journey(side: Side) -> None:
        for number in range(3):
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = loss_of(side.model, number)
            loss.backward()
            side.optimizer.step()
            side.optimizer.zero_grad()
            side.keep(f"loss {number}", loss)

    both(journey, activations="offload")


class WideCast(nn.Module):
    """Weights are far more than what blocks save beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def under_autocast(model: nn.Module) -> torch.Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        return model(torch.linspace(-1, 1, 1024).reshape(4, 256)).float().square().mean()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_autocast_makes_of_trained_weights_is_not_kept(is_frozen):
    left = {}
    for wraps in (True, False):
        torch.manual_seed(0)
        model = WideCast()
        model.blocks[2].weight.requires_grad_(not is_frozen)
        optimizer = adamw(model.parameters())
        if wraps:
            noria.wrap(model, optimizer, device=DEVICE, window=2, activations="offload", kernel="torch")
        for _ in range(3):
            under_autocast(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        if wraps:
            of_cast, most = 256 * 256 * 2, saved_of(model)["most_saved"]
            assert (most > of_cast) == is_frozen and most < 2 * of_cast
            noria.unwrap(model, optimizer)
        left[wraps] = {name: value.clone() for name, value in model.state_dict().items()}
    assert_same_bits(left[True], left[False])


def test_a_cast_is_not_made_again_of_a_weight_that_has_changed():
    model = WideCast()
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2, activations="offload")
    under_autocast(model).backward()
    loss = under_autocast(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- memory -----------------------------------------------------------------------------------------------------


BUNDLE = 100352  # bytes that a block saves of `step_of`


class Wide(nn.Module):
    """What each block saves is far more than its weights."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def crammed(drain_gib_s: float | None) -> tuple[Wide, torch.optim.Optimizer]:
    """Wrapped, with room for what two of six blocks save, over a slow link; None: not wrapped."""
    torch.manual_seed(0)
    model = Wide(6)
    optimizer = adamw(model.parameters())
    if drain_gib_s is not None:
        with on_machine(limits={"drain": (drain_gib_s, 0.0)}):
            policy = {"activations": "auto", "activation_memory": 2 * BUNDLE, "kernel": "torch", "window": 2}
            noria.wrap(model, optimizer, device=DEVICE, **policy)
    return model, optimizer


def saved_of(model: nn.Module) -> dict[str, int]:
    wrapped = wrapped_by(model)
    assert wrapped is not None
    return wrapped.context.engine.saved.saved_stats()


def step_of(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(4, 64, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_is_saved_stays_on_the_device_for_a_few_blocks_only():
    for num_blocks in (8, 16):
        model = Wide(num_blocks)
        optimizer = adamw(model.parameters())
        noria.wrap(model, optimizer, device=DEVICE, window=2, activations="offload")
        for number in range(4):
            step_of(model, optimizer)
            stats = saved_of(model)
            if number == 0:
                first, rows = stats, noria.report(model).ledger
        assert stats["num_offloaded"] == 4 * first["num_offloaded"] > num_blocks
        # All but what the backward began with came back, and no thread waited for an unforeseen tensor.
        assert stats["num_unforeseen"] == 0
        assert 0 < stats["num_reloaded"] <= stats["num_offloaded"]
        assert noria.report(model).ledger == rows
        assert noria.report(model).ledger_agrees
        bundle = first["offloaded"] / (num_blocks - 1)
        # One is saved, one or two stay, up to three are leaving.
        assert stats["most_there"] <= 6 * bundle < num_blocks * bundle


def test_as_much_stays_as_there_is_room_for():
    for num_blocks, room in ((8, 2 * BUNDLE), (8, 5 * BUNDLE), (16, 5 * BUNDLE)):
        model = Wide(num_blocks)
        optimizer = adamw(model.parameters())
        noria.wrap(model, optimizer, device=DEVICE, window=2, activations="auto", activation_memory=room)
        for _ in range(4):
            step_of(model, optimizer)
        stats = saved_of(model)
        assert stats["most_saved"] == num_blocks * stats["largest"] == num_blocks * BUNDLE
        assert stats["most_there"] == room and stats["num_unforeseen"] == 0
        assert stats["offloaded"] >= 4 * (num_blocks * BUNDLE - room)
        # What comes ahead, and what leaves while one is saved, have two more.
        assert stats["offloaded"] <= 4 * (num_blocks * BUNDLE - room + 2 * BUNDLE)
        assert noria.report(model).ledger_agrees


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("resident", ["40KiB", "1GiB"])
def test_what_blocks_save_moves_though_they_stay_themselves(mode, resident):
    """Of all units the smallest still streams then, unless blocks compute again: nothing moves."""
    left: list[dict[str, torch.Tensor]] = []
    for stays in (False, True):
        model, optimizer = crammed(None)
        policy = MODES[mode] | ({"activation_memory": 2 * BUNDLE} if mode == "auto" else {}) if stays else {}
        resident_now = resident if stays else "none"
        noria.wrap(model, optimizer, device=DEVICE, kernel="fused", resident=resident_now, **policy)
        offloaded = []
        for _ in range(6):
            step_of(model, optimizer)
            offloaded.append(noria.report(model).saved["offloaded"])
        left.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same_bits(*left)
    plan = wrapped_by(model).context.plan
    assert len(plan.stays) == (6 if mode == "recompute" else 5) if resident == "1GiB" else 0 < len(plan.stays) < 5
    assert plan.stands_still == (mode == "recompute" and resident == "1GiB")
    if mode != "recompute":  # as much as before any unit stayed
        assert offloaded[5] - offloaded[4] == offloaded[1] - offloaded[0] >= 2 * BUNDLE


@NEEDS_SLOW_LINKS
def test_the_planner_chooses_who_computes_again_when_costs_are_known(monkeypatch, tmp_path):
    """The clock alone would choose none. The next run begins with the choice."""
    monkeypatch.setenv("NORIA_CACHE", str(tmp_path))
    left: list[dict[str, torch.Tensor]] = []
    found = []
    with (
        mock.patch.object(_C, "choose_ways", lambda blocks, *_: ["host"] * len(blocks)),
        mock.patch.object(Recomputation, "_look_again"),
    ):
        for drain_gib_s in (None, 1e-3, 1e-3):
            model, optimizer = crammed(drain_gib_s)
            for _ in range(10):
                step_of(model, optimizer)
                found.append(noria.report(model).recomputed if drain_gib_s else [])
            left.append({name: value.clone() for name, value in model.state_dict().items()})
    _, first, second = (found[begin : begin + 10] for begin in (0, 10, 20))
    assert first[:8] == [[]] * 8 and first[8] and first[9] == first[8] == second[0]
    assert second[9]  # perhaps other blocks: all are alike, and were measured anew
    assert_same_bits(left[1], left[0])
    assert_same_bits(left[2], left[0])


@NEEDS_SLOW_LINKS
@pytest.mark.parametrize(
    "policy", [MODES["offload"], {"activations": "auto", "activation_memory": 3 * BUNDLE}], ids=str
)
def test_a_simulated_step_moves_what_a_step_moves(keeps_plan, policy):
    model = Wide(8)
    optimizer = adamw(model.parameters())
    with on_machine(limits={"drain": (0.02, 0.0)}):
        noria.wrap(model, optimizer, device=DEVICE, window=2, kernel="fused", resident="none", **policy)
    for _ in range(10):
        before = saved_of(model)
        step_of(model, optimizer)
    after = saved_of(model)
    wrapped = wrapped_by(model)
    step = PlannedStep(wrapped.context.plan, 0, PlanSpeeds(0, 0, 0, 0), wrapped.recorder.known.costs)
    for verb, moved in (("offload", "offloaded"), ("reload", "reloaded")):
        simulated = sum(span.bytes for span in step.spans if span.verb == verb)
        # Whole tensors move. What is still leaving when a backward begins stays there.
        assert abs(simulated - (after[moved] - before[moved])) <= BUNDLE


@NEEDS_SLOW_LINKS
def test_blocks_are_computed_again_where_the_link_is_too_slow_for_them():
    """When they pay: tests/csrc/plan/swap_test.cpp."""
    left: dict[bool, dict[str, torch.Tensor]] = {}
    offloaded: list[int] = []
    for wraps in (False, True):
        model, optimizer = crammed(1e-3 if wraps else None)
        for _ in range(6):
            step_of(model, optimizer)
            if wraps:
                offloaded.append(saved_of(model)["offloaded"])
        left[wraps] = {name: value.clone() for name, value in model.state_dict().items()}
    assert_same_bits(left[True], left[False])
    again = noria.report(model).recomputed
    assert again and set(again) <= {f"blocks.{number}" for number in range(6)}
    assert offloaded[5] - offloaded[2] < offloaded[2]


@pytest.mark.skipif(DEVICE == "cpu", reason="the host's clock tells what blocks take there")
def test_on_a_device_blocks_are_computed_again_by_what_its_clock_says(monkeypatch):
    monkeypatch.setattr("noria.wrapped.Wrapped._decide", lambda wrapped: None)  # as in a pipeline
    left, told = {}, []

    def choose(blocks: Any, *links: Any) -> list[str]:
        told.append(blocks)
        return ["recompute" if number % 2 else "host" for number in range(len(blocks))]

    for wraps in (False, True):
        model, optimizer = crammed(1e-3 if wraps else None)
        with mock.patch.object(_C, "choose_ways", choose):
            for _ in range(11):
                step_of(model, optimizer)
        left[wraps] = {name: value.clone() for name, value in model.state_dict().items()}
    assert_same_bits(left[True], left[False])
    report = noria.report(model)
    assert report.recomputed == ["blocks.1", "blocks.3", "blocks.5"]
    assert [each[3] for each in told[0]] == report.costs.forward_us


@NEEDS_SLOW_LINKS
def test_what_is_computed_again_is_chosen_once_it_is_known_what_units_do_to_the_links():
    """Those that are tried at other stages."""
    model, optimizer = crammed(1e-3)
    with mock.patch.object(PeerCache, "is_settled", False):
        for _ in range(4):
            step_of(model, optimizer)
        assert not noria.report(model).recomputed
    for _ in range(3):
        step_of(model, optimizer)
    assert noria.report(model).recomputed


@NEEDS_SLOW_LINKS
def test_copies_hide_behind_forwards_on_their_way_out_and_behind_backwards_on_their_way_back():
    model, optimizer = crammed(0.02)
    wrapped = wrapped_by(model)
    sums, offered = [], []

    def choose(blocks: Any, swapped: int, host: tuple[float, ...], peers: Any) -> list[str]:
        offered.append(host)
        return ["host"] * len(blocks)

    with mock.patch.object(_C, "choose_ways", choose):
        for _ in range(3):
            model(torch.randn(4, 64, WIDTH)).square().mean().backward()
            sums.append(wrapped.context.engine.statistics.step_sums())
            optimizer.step()
            optimizer.zero_grad()
    [(_, _, out_free_us, back_free_us)] = offered
    assert 0 < out_free_us <= sums[2]["forward_us"] - sums[1]["forward_us"]
    assert 0 < back_free_us <= sums[2]["backward_us"] - sums[1]["backward_us"]


@NEEDS_SLOW_LINKS
@pytest.mark.parametrize(("num_paying", "counts"), [(0, [1, 0, 0, 0, 0]), (1, [1, 2, 1, 1, 1]), (6, [1, 2, 3, 4, 5])])
def test_more_is_computed_again_as_long_as_that_pays(monkeypatch, num_paying, counts):
    """Where the planner does not choose, as in a pipeline."""
    alone = functools.partial(dataclasses.replace, chooses_activations=False)
    monkeypatch.setattr(sys.modules["noria.wrap"], "as_costs_choose", lambda planned, costs: alone(planned))
    left, stalled_us, see = {}, 0, Recomputation._see

    def seen(looking: Recomputation) -> Any:
        """A step waits for ten seconds, less two for each block that pays, at most five."""
        nonlocal stalled_us
        stalled_us += 10_000_000 - 2_000_000 * min(len(looking.names()), num_paying)
        return dataclasses.replace(see(looking), stalled_us=stalled_us)

    for wraps in (True, False):
        model, optimizer = crammed(0.02 if wraps else None)
        found = []
        with (
            mock.patch.object(_C, "choose_ways", lambda blocks, *_: ["host"] * len(blocks)),
            mock.patch.object(Recomputation, "_see", seen),
        ):
            for _ in range(8):
                step_of(model, optimizer)
                found.append(len(noria.report(model).recomputed) if wraps else 0)
        assert not wraps or found == [0, 0, 0, *counts]
        left[wraps] = {name: value.clone() for name, value in model.state_dict().items()}
    assert_same_bits(left[True], left[False])


@NEEDS_SLOW_LINKS
def test_a_checkpoint_whose_graph_is_kept_until_its_block_is_computed_again_has_the_same_bits():
    left: dict[bool, list[torch.Tensor]] = {}
    for wraps in (False, True):
        model, optimizer = crammed(1e-3 if wraps else None)
        for number in range(4):
            if number == 1:
                x = torch.randn(256, WIDTH, generator=torch.Generator(DEVICE).manual_seed(1), requires_grad=True)
                kept = checkpoint(around(model.blocks[0]), x, use_reentrant=False).square().mean()
            step_of(model, optimizer)
        assert not wraps or "blocks.0" in noria.report(model).recomputed
        kept.backward()
        assert x.grad is not None
        left[wraps] = [x.grad]
        optimizer.step()
        left[wraps] += [value.clone() for value in model.state_dict().values()]
    for ours, theirs in zip(left[True], left[False], strict=True):
        assert torch.equal(ours, theirs)


@not_on_a_gpu("its link may be so fast that nothing waits")
@pytest.mark.usefixtures("prompt_device")
def test_what_forward_and_backward_wait_for_what_leaves_is_among_their_stalls():
    model, optimizer = crammed(0.02)
    wrapped = wrapped_by(model)
    waited = []
    for _ in range(3):
        step_of(model, optimizer)
        stalled = wrapped.context.backend.stats("compute")["stalled_us"]
        waited.append(stalled.get(("offload", "save"), 0))
    sums = wrapped.context.engine.statistics.step_sums()  # but for the first step
    assert waited[2] > waited[0] or DEVICE != "cpu"  # only there the link is slowed down
    assert sums["forward_stall_us"] + sums["backward_stall_us"] >= waited[2] - waited[0] - 2 * 12  # whole microseconds


class Normed(nn.Module):
    """Each block notes what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(WIDTH) if number % 2 else nn.Identity(), Block()) for number in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@NEEDS_SLOW_LINKS
def test_blocks_that_write_buffers_are_not_computed_again():
    left: dict[bool, dict[str, torch.Tensor]] = {}
    for wraps in (False, True):
        torch.manual_seed(0)
        model = Normed()
        optimizer = adamw(model.parameters())
        if wraps:
            with on_machine(limits={"drain": (1e-3, 0.0)}):
                policy = {"activations": "auto", "activation_memory": 250_000, "kernel": "torch", "window": 2}
                noria.wrap(model, optimizer, device=DEVICE, **policy)
        for _ in range(6):
            model(torch.randn(256, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        left[wraps] = {name: value.clone() for name, value in model.state_dict().items()}
    assert_same_bits(left[True], left[False])
    again = noria.report(model).recomputed
    assert again and set(again) <= {"blocks.0", "blocks.2", "blocks.4"}


def test_the_trace_shows_what_lies_where_over_time(tmp_path):
    room, path = 3 * BUNDLE, tmp_path / "trace.json"
    model = Wide(8)
    optimizer = adamw(model.parameters())
    policy = {"activations": "auto", "activation_memory": room, "trace": path}
    noria.wrap(model, optimizer, device=DEVICE, window=2, **policy)
    for _ in range(2):
        step_of(model, optimizer)
    noria.report(model)
    events = json.loads(path.read_text())["traceEvents"]
    seen = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "saved for backward"]
    assert len(seen) == 2 * 8 * 3  # at the ends of visits, and where one of backward begins
    assert max(each["on the device"] for each in seen) == room
    assert max(each["at home"] for each in seen) >= 8 * BUNDLE - room
    assert all(each["at peers"] == 0 for each in seen)


def test_nothing_leaves_where_all_has_room():
    model = Wide(4)
    noria.wrap(model, device=DEVICE, window=2, activations="auto", activation_memory=4 * BUNDLE)
    for _ in range(3):
        model(torch.randn(4, 64, WIDTH)).mean().backward()
    assert saved_of(model)["num_offloaded"] == 0
    assert not any("saved" in row.purpose for row in noria.report(model).ledger)


def test_too_little_room_for_one_block_beside_another_is_refused():
    model = Wide(4)
    noria.wrap(model, device=DEVICE, window=2, activations="auto", activation_memory=2 * BUNDLE - 1)
    with pytest.raises(noria.UsageError, match=r"activation_memory for what two blocks save.*200704 bytes"):
        model(torch.randn(4, 64, WIDTH))
    with torch.no_grad():
        assert model(torch.randn(4, 64, WIDTH)).isfinite().all()


def test_nothing_is_held_once_the_graph_is_gone():
    model = Wide(4)
    noria.wrap(model, device=DEVICE, window=2, activations="offload")
    for number in range(6):
        y = model(torch.randn(4, 64, WIDTH))
        if number % 2:
            y.square().mean().backward()
            model.zero_grad()
        del y
        gc.collect()
        report = noria.report(model)
        if number == 0:
            first = report.ledger
    assert report.ledger == first
    with torch.no_grad():
        model(torch.randn(4, 64, WIDTH))


class Remembered(torch.autograd.Function):
    """Saves what it returns. `alive`: its nodes."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        Remembered.alive.add(ctx)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


@pytest.mark.parametrize("least", [64, 1 << 20])  # bytes that go: all, or none
def test_a_graph_ends_without_a_backward(least, monkeypatch):
    monkeypatch.setattr(wrap_plan, "LEAST_SAVED", least)

    class Remembering(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Remembered.apply(x))

    model = Net()
    model.blocks = nn.ModuleList(Remembering() for _ in range(4))
    noria.wrap(model, device=DEVICE, window=2, activations="offload")
    for _ in range(2):
        loss = loss_of(model, 0)
        assert len(Remembered.alive) == 4
        del loss
        assert not Remembered.alive
    loss_of(model, 0).backward()
    assert not Remembered.alive


@NEEDS_FULL_HOST
def test_what_does_not_fit_host_memory_is_refused():
    model = Wide(4)
    noria.wrap(model, device=DEVICE, window=2)
    home = sum(row.taken for row in noria.report(model).ledger if row.place == "host")
    noria.unwrap(model)
    noria.wrap(model, device=DEVICE, window=2, activations="offload", host_memory=home + 1024)
    with pytest.raises(noria.UsageError, match="saved for backward"):
        model(torch.randn(4, 64, WIDTH))
    with torch.no_grad():
        assert model(torch.randn(4, 64, WIDTH)).isfinite().all()


def test_code_that_runs_while_the_home_grows_may_ask_the_engine(monkeypatch):
    """Python runs signal handlers wherever it runs."""
    own, texts = Activations.more_home, []

    def more_home(self: Activations, least: int) -> tuple[int, int]:
        texts.append(str(noria.report(model)))
        return own(self, least)

    monkeypatch.setattr(Activations, "more_home", more_home)
    model = Wide(3)
    noria.wrap(model, device=DEVICE, window=2, activations="offload")
    model(torch.randn(256, 256, WIDTH)).mean().backward()
    assert texts


def test_the_first_pieces_grow_and_then_no_more():
    model = Wide(3)
    noria.wrap(model, device=DEVICE, window=2, activations="offload")
    for _ in range(2):
        for _ in range(2):
            model(torch.randn(256, 256, WIDTH)).mean().backward()
        pieces = [row for row in noria.report(model).ledger if row.purpose.startswith("saved for backward")]
        assert len(pieces) > 1 and all(row.planned == row.taken for row in pieces)
    assert len(pieces) < 8


# ---- misuse -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [64, 1 << 20])  # bytes that go: all, or none
def test_a_saved_tensor_that_is_changed_in_place_raises_as_in_torch(least, monkeypatch):
    monkeypatch.setattr(wrap_plan, "LEAST_SAVED", least)

    class Changed(Net):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.embed(batch))
            y = self.blocks[1](x)
            x.mul_(2.0)
            return self.head(y)

    for wraps in (False, True):
        model = Changed()
        if wraps:
            noria.wrap(model, device=DEVICE, window=2, activations="offload")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(model, 0).backward()
        model.zero_grad()


@pytest.mark.parametrize("mode", ["keep", "offload", "auto"])
def test_a_graph_that_is_older_than_an_update_raises_as_in_torch(mode):
    for policy in (None, {"activations": "keep"} if mode == "keep" else MODES[mode]):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(4)))  # saves weights, and little else
        optimizer = adamw(model.parameters())
        if policy is not None:
            noria.wrap(model, optimizer, device=DEVICE, window=2, kernel="torch", **policy)
        old, new = model(torch.ones(2, 8)).sum(), model(torch.ones(2, 8)).sum()
        new.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()


def test_a_backward_after_unwrap_says_so():
    model = Net()
    noria.wrap(model, device=DEVICE, window=2, activations="offload")
    loss = loss_of(model, 0)
    noria.unwrap(model)
    with pytest.raises(RuntimeError, match=r"noria\.unwrap|is evicted"):
        loss.backward()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_and_unwrapped_models_are_ordinary(mode, how):
    model = Net()
    plain_model = copy.deepcopy(model)
    noria.wrap(model, device=DEVICE, window=2, **MODES[mode])
    loss_of(model, 0).backward()
    with noria.materialize(model):
        copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)
        for parameter in plain_model.parameters():
            parameter.mul_(1.5)
    loss_of(copied.to(DEVICE), 1).backward()
    noria.unwrap(model)
    loss_of(plain_model, 1).backward()
    for ours, theirs in zip(copied.parameters(), plain_model.parameters(), strict=True):
        assert_same_bits({"": ours.grad}, {"": theirs.grad})
    assert all("forward" not in block.__dict__ for block in model.blocks)
    loss_of(model.to(DEVICE), 1).backward()


def test_a_forward_of_the_instances_own_is_kept():
    model = Net()
    calls = []
    own = model.blocks[0].forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return own(x)

    model.blocks[0].forward = forward
    noria.wrap(model, device=DEVICE, window=2, activations="recompute")
    loss_of(model, 0).backward()
    assert len(calls) == 2
    noria.unwrap(model)
    assert model.blocks[0].forward is forward


def test_blocks_are_computed_again_and_evaluated_once():
    model = Net()
    calls = []
    for block in model.blocks:
        block.expand.register_forward_hook(lambda *_: calls.append(1))
    noria.wrap(model, device=DEVICE, window=2, activations="recompute")
    loss_of(model, 0).backward()
    assert len(calls) == 2 * len(model.blocks)
    with torch.no_grad():
        loss_of(model, 0)
    assert len(calls) == 3 * len(model.blocks)


# ---- waits ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("prompt_device")
@pytest.mark.parametrize("omitted", ["", "reload -> backward on saved_tensor (RAW)"])
def test_a_backward_waits_for_what_its_forward_saved(omitted):
    """With all weights on the device: where some are fetched after it, waiting for those implies it."""
    found = []
    for kind in ("", omitted):
        torch.manual_seed(0)
        model = Wide(6)
        with on_machine(hostility={"hold_us": {"reload": 20_000}, "poison": True}):
            noria.wrap(model, device=DEVICE, device_memory=1.0, activations="offload")
        omit_wait(model, kind)
        wrapped = wrapped_by(model)
        assert wrapped is not None
        torch.manual_seed(1)
        for _ in range(2):
            loss = model(torch.randn(4, 64, WIDTH)).square().mean()
            loss.backward(retain_graph=True)
            wrapped.context.engine.idle()  # a copy that no thread has waited for must not come into memory that is gone
            del loss
        found.append({name: value.grad.clone() for name, value in model.named_parameters()})
        if not kind:
            assert {omitted} - {""} <= set(wrapped.context.engine.wait_kinds())
    same = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert same == (omitted == "")
