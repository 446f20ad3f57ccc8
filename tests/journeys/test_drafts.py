"""Updates that are drafted during backward have the bits of those that are not. The loop may do anything between
backward and step. If it does nothing, drafts are kept.
"""

from __future__ import annotations

import copy
import dataclasses

import noria
import pytest
import torch
from noria.model import layout
from noria.model.layout import UNDO_LOGS
from noria.testing import assert_same_bits, on_machine
from noria.wrapped import wrapped_by

from tests.device import DEVICE
from tests.journeys.edits import replaced, taken_away
from tests.journeys.pairs import (
    HOSTILE,
    OPTIMIZERS,
    Net,
    Side,
    adamw,
    assert_moved,
    both,
    go_on_here,
    halved_in_hooks,
    loss_of,
    new_side,
    state_tensors,
    wrap_side,
)
from tests.roomy_logs import PLANNED_SLOTS

pytestmark = pytest.mark.usefixtures("one_thread", "keeps_plan")

LATE_DRAFTS = {**HOSTILE, "hold_us": {"draft": 3_000}}


def counts_of(side: Side) -> dict[str, int]:
    return noria.report(side.model).drafts


def loop(between=lambda side, number: None, *, steps=6, micro_batches=1, settled=False):
    """`between` comes between backward and step; `settled`: when all that can be drafted has been."""

    def journey(side: Side) -> None:
        for number in range(steps):
            for micro in range(micro_batches):
                loss = loss_of(side.model, 10 * number + micro)
                loss.backward()
            if settled:
                wrapped_by(side.model).context.engine.idle()
            between(side, number)
            side.optimizer.step()
            side.optimizer.zero_grad()
            side.keep(f"loss {number}", loss)

    return journey


def both_drafting(
    between=lambda side, number: None, *, optimizer=adamw, hostility=HOSTILE, **options
) -> dict[str, int]:
    """The bits of a twin without drafts; returns what became of the drafts."""
    counts = {}
    policy = {"dtype": options.pop("dtype", None), "draft_memory": options.pop("draft_memory", "64MiB")}
    journey = loop(between, **options)

    def counted(side):
        journey(side)
        wrapped_by(side.model).context.engine.idle()
        counts.update(counts_of(side))  # the twin goes first

    both(counted, optimizer=optimizer, kernel="fused", window=3, hostility=hostility, **policy)
    return counts


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_plain_loop_keeps_its_drafts(optimizer, dtype):
    counts = both_drafting(optimizer=OPTIMIZERS[optimizer], dtype=dtype)
    assert counts["kept"] > 0
    assert counts["looked_at"] == counts["redone"] == counts["undone"] == counts["dropped"] == 0


def test_blocks_that_have_no_room_in_the_log_are_updated_by_step(monkeypatch):
    """As planned for users: most blocks of the first steps are left out."""
    monkeypatch.setattr(layout, "SLOTS_PER_ELEMENT", PLANNED_SLOTS)
    assert both_drafting()["kept"] > 0
    assert both_drafting(evaluated, settled=True)["undone"] > 0
    assert both_drafting(other_rate, settled=True)["redone"] > 0


def test_some_units_are_drafted_where_memory_is_short():
    model = Net()
    needs = noria.plan(model, adamw(model.parameters()), device=DEVICE, kernel="fused", draft_memory="1GiB")
    logs = sum(needs.draftable.values())
    half = noria.plan(model, adamw(model.parameters()), device=DEVICE, kernel="fused", draft_memory=logs // 2)
    assert 0 < len(half.drafted) < len(needs.drafted) == len(needs.units)
    taken = sum(half.draftable[unit] for unit in half.drafted)
    assert taken <= logs // 2
    assert half.home_bytes == needs.home_bytes - logs + taken
    assert both_drafting(draft_memory=logs // 2)["kept"] > 0


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_accumulation_drafts_in_the_last_backward_only(micro_batches):
    counts = both_drafting(micro_batches=micro_batches)
    assert counts["kept"] > 0 and counts["dropped"] == counts["undone"] == 0


@pytest.mark.parametrize("hostility", [HOSTILE, LATE_DRAFTS])
def test_hooks_that_write_gradients_while_the_last_backward_drafts(hostility):
    def journey(side):
        for number in range(6):
            loss_of(side.model, 10 * number).backward()
            with halved_in_hooks(side.model.head.weight, side.model.embed.weight):
                loss_of(side.model, 10 * number + 1).backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    both(journey, kernel="fused", window=3, hostility=hostility, draft_memory="64MiB")


def wait(side):
    """Until all that can be drafted has been; the twin has no drafts to wait for."""
    if side.is_wrapped:
        wrapped_by(side.model).context.engine.idle()


def other_rate(side, number):
    for group in side.optimizer.param_groups:
        group["lr"] *= 0.5


def another_backward(side, number):
    if number % 3 == 2:
        loss_of(side.model, 100 + number).backward()


def through_data(side, number):
    side.model.blocks[number % 5].expand.weight.grad.data.mul_(0.5)


def through_numpy(side, number):
    side.model.blocks[number % 5].expand.weight.grad.numpy()[:] *= 0.5


def through_an_alias(side, number):
    side.model.blocks[number % 5].expand.weight.grad.detach().view(-1)[::2].zero_()


def infinite(side, number):
    if number == 4:
        side.model.head.bias.grad[0] = float("inf")


def evaluated(side, number):
    with torch.no_grad():
        side.keep(f"eval {number}", loss_of(side.model, 50))


def state_edited(side, number):
    parameter = side.model.blocks[2].expand.weight
    if parameter in side.optimizer.state:
        side.optimizer.state[parameter]["exp_avg"].mul_(0.5)


def all_state_edited(side, number):
    for values in side.optimizer.state.values():
        values["exp_avg"].mul_(0.5)


def state_dict_edited(side, number):
    for values in side.optimizer.state_dict()["state"].values():
        values["exp_avg_sq"].mul_(0.5)


def kept_moment_edited(side, number):
    if number == 1:
        side.moment = side.optimizer.state[side.model.blocks[2].expand.weight]["exp_avg"]
    elif number > 1:
        side.moment.mul_(0.5)


def kept_moment_edited_early(side, number):
    """Once before backward, which no draft has read yet, and once after."""
    if number == 1:
        side.moment = side.optimizer.state[side.model.blocks[2].expand.weight]["exp_avg"]
    elif number > 1:
        side.optimizer.zero_grad()
        loss = loss_of(side.model, 90 + number)
        side.moment.mul_(0.5)
        loss.backward()
        wait(side)
        side.moment.mul_(0.5)


def given_other_data(side, number):
    gradient = side.model.blocks[number % 5].expand.weight.grad
    gradient.data = gradient.detach() * 0.5


def weights_written_twice(side, number):
    """Through a view that was kept; once in the forward's shadow, and once more."""
    if number == 1:
        side.view = side.model.state_dict()["blocks.3.norm.bias"]
    elif number > 1:
        with torch.no_grad():
            side.view.add_(0.25)
            loss_of(side.model, 60)
            side.view.add_(0.25)


def state_loaded(side, number):
    side.optimizer.load_state_dict(side.optimizer.state_dict())


def weights_written(side, number):
    with torch.no_grad():
        side.model.state_dict()["blocks.3.norm.bias"].add_(0.25)


def weights_looked_at(side, number):
    for name, value in side.model.state_dict().items():
        side.keep(f"{name} {number}", value)


EDITS = [
    other_rate,
    another_backward,
    through_data,
    pytest.param(through_numpy, marks=pytest.mark.cpu_only("numpy has no device memory")),
    through_an_alias,
    replaced,
    taken_away,
    infinite,
    evaluated,
    state_edited,
    all_state_edited,
    state_dict_edited,
    kept_moment_edited,
    kept_moment_edited_early,
    given_other_data,
    weights_written_twice,
    state_loaded,
    weights_written,
    weights_looked_at,
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_each_edit_between_backward_and_step_counts(edit, settled):
    counts = both_drafting(edit, settled=settled)
    assert sum(counts.values()) > 0, "nothing was drafted"


@pytest.mark.parametrize("hostility", [HOSTILE, LATE_DRAFTS])
@pytest.mark.parametrize("bites", [True, False])
def test_clipping(bites, hostility):
    def clip(side, number):
        side.keep(
            f"norm {number}",
            torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1e-3 if bites else 1e3),
        )

    counts = both_drafting(clip, settled=True, hostility=hostility)
    assert counts["looked_at"] > 0
    assert (counts["changed"] == counts["looked_at"]) if bites else (counts["changed"] == 0)


def test_drafts_stop_where_every_step_throws_them_away():
    model = Net()
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=3, kernel="fused", draft_memory="64MiB")
    for number in range(14):
        loss_of(model, number).backward()
        wrapped_by(model).context.engine.idle()  # a draft that has not begun when `step()` comes is not lost
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    report = noria.report(model)
    assert any("drafts have stopped" in note for note in report.notes)
    before = report.drafts
    loss_of(model, 20).backward()
    optimizer.step()
    assert noria.report(model).drafts == before


def test_the_ledger_has_the_undo_logs_and_units_really_move():
    model = Net()
    optimizer = adamw(model.parameters())
    with on_machine(hostility=HOSTILE):
        noria.wrap(model, optimizer, device=DEVICE, window=3, kernel="fused", draft_memory="64MiB")
    for number in range(5):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_moved(model, 3)
    report = noria.report(model)
    twin = Net()
    without = noria.plan(twin, adamw(twin.parameters()), device=DEVICE, kernel="fused", draft_memory=0)
    taken = {row.purpose: row.taken for row in report.ledger}
    drafted = noria.plan(twin, adamw(twin.parameters()), device=DEVICE, kernel="fused", draft_memory="64MiB")
    for region in without.regions:
        logs = sum(drafted.draftable.values()) if region.purpose == UNDO_LOGS else 0
        assert taken.get(region.purpose, 0) == region.bytes + logs
    assert report.drafts["kept"] > 0


def test_kept_state_tensors_follow_their_unit():
    """`optimizer.state[p]` gives the same tensors all the time."""

    def journey(side):
        loop(steps=5)(side)
        parameter = side.model.blocks[1].expand.weight
        kept = side.optimizer.state[parameter]["exp_avg"]
        side.keep("first", kept)
        loss_of(side.model, 70).backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
        assert side.optimizer.state[parameter]["exp_avg"] is kept
        side.keep("later", kept)

    both(journey, kernel="fused", window=3, draft_memory="64MiB")


def test_unwrapped_state_is_where_the_last_draft_left_it():
    def journey(side):
        loop(steps=4)(side)
        if side.is_wrapped:
            noria.unwrap(side.model, side.optimizer)
            go_on_here(side.model, side.optimizer)
        for number in range(4, 6):
            loss_of(side.model, number).backward()
            side.optimizer.step()
            side.optimizer.zero_grad()
            side.keep(f"after {number}", side.model.head.weight)

    torch.manual_seed(0)
    ours, plain = Net(), Net()
    plain.load_state_dict(ours.state_dict())
    results = []
    for model, memory in ((ours, "64MiB"), (plain, 0)):
        side = Side(model, adamw(model.parameters()), True)
        noria.wrap(side.model, side.optimizer, device=DEVICE, window=3, kernel="fused", draft_memory=memory)
        journey(side)
        results.append(side.kept)
    noria.testing.assert_same_bits(*results)


def test_a_kept_optimizer_state_dict_follows_its_units_whole():
    """Moments and low bits of one step: loaded back after another, they give the weights of that step."""

    def journey(side):
        loop(steps=4)(side)
        kept = side.optimizer.state_dict()
        loss_of(side.model, 70).backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.optimizer.state_dict()
        side.optimizer.load_state_dict(kept)
        side.train(80, 82)

    both(journey, kernel="fused", dtype=torch.bfloat16, window=3, draft_memory="64MiB")


def test_momentum_that_is_turned_on_and_off():
    """The rule of the wrap call keeps no state; what comes later lies outside of the home and is not drafted."""

    def momentum(side, number):
        for group in side.optimizer.param_groups:
            group["momentum"] = 0.9 if number % 6 in (2, 3) else 0.0
        for values in side.optimizer.state.values():
            for value in values.values():
                side.keep(f"state {len(side.kept)}", value if value is not None else 0.0)

    both_drafting(momentum, optimizer=OPTIMIZERS["sgd"], steps=10)


def test_low_bits_of_other_weights_are_dropped_before_anything_is_drafted():
    def journey(side):
        loop(steps=3)(side)
        state = side.optimizer.state_dict()
        with torch.no_grad():
            values = {name: torch.zeros_like(value) for name, value in side.model.state_dict().items()}
        side.optimizer.load_state_dict(state)
        side.model.load_state_dict(values)
        side.train(80, 84)

    both(journey, optimizer=OPTIMIZERS["sgd"], kernel="fused", dtype=torch.bfloat16, window=3, draft_memory="64MiB")


def test_state_that_is_loaded_while_its_unit_is_not_drafted_is_watched_later():
    """A write to it between backward and step counts, as without drafts."""
    left = []
    for drafts in ("1GiB", 0):
        side = new_side()
        wrap_side(side, {"seed": 3}, window=2, kernel="fused", draft_memory=drafts)
        context, rest = wrapped_by(side.model).context, wrapped_by(side.model).rest
        every = context.plan
        side.train(0, 3)
        rest.adopt(dataclasses.replace(every, drafted=frozenset()))
        side.train(3, 5)
        state = side.optimizer.state_dict()
        side.optimizer.load_state_dict({**state, "state": copy.deepcopy(state["state"])})
        rest.adopt(every)
        side.train(5, 7)
        moment = side.optimizer.state[side.model.head.weight]["exp_avg"]
        loss_of(side.model, 7).backward()
        context.engine.idle()  # the drafts are made
        moment.mul_(0.5)
        side.optimizer.step()
        left.append({**side.kept, **side.model.state_dict(), **state_tensors(side.optimizer)})
        assert (context.engine.updates.draft_counts()["kept"] > 0) == (drafts != 0)
    assert_same_bits(*left)
