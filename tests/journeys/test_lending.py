"""Stages of a pipeline lend each other memory: the same bits in the same budgets, and less over the host's link."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import noria
import pytest
import torch
import torch.distributed as dist
from noria import _C
from noria.forward.recompute import Recomputation
from noria.host.device_buffers import DeviceBuffers
from noria.pipeline.peer_links import Handover, Source
from noria.pipeline.peer_memory import PeerMemory
from noria.planning import wrap_plan
from noria.step.driver import StepDriver
from noria.testing import assert_same_bits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage

from tests.device import DEVICE, finish
from tests.journeys import test_pipelines
from tests.journeys.pairs import Block, adamw
from tests.journeys.test_pipelines import NUM_MICRO_BATCHES, Stage, trained
from tests.ranks import asked_for, assert_fine, in_turn_on_ranks
from tests.torch_versions import GROWING

LENGTH = 128
BUNDLE = 100_352  # what a block saves of a micro-batch of 2 x 128 x 16
KIB64 = 65_536


def lends(
    rank: int, size: int, schedule: str, policy: dict[str, Any], look: Callable[[int, int, noria.Report], None]
) -> None:
    wrap_plan.LEAST_SAVED = 64
    policy = {"kernel": "torch", **policy}
    ours = trained(schedule, policy, adamw, length=LENGTH, look=lambda report: look(rank, size, report))
    assert_same_bits(ours, trained(schedule, None, adamw, length=LENGTH))


def keeps_in_room(rank: int, size: int, report: noria.Report) -> None:
    room = ROOM
    assert report.saved["num_unforeseen"] == 0, str(report)
    assert report.saved["most_there"] <= room, str(report)
    lent = [loan for loan in report.loans if loan.lender == rank]
    borrowed = [loan for loan in report.loans if loan.borrower == rank]
    rows = {row.purpose: row for row in report.ledger if row.place == report.device}
    assert sum(loan.bytes for loan in lent) == (rows["lent to other stages"].taken if lent else 0)
    assert report.saved["most_there"] + sum(loan.bytes for loan in lent) <= room
    if rank == 0:
        assert borrowed and not lent and report.saved["most_saved"] > room, str(report)
    if rank == size - 1:
        assert lent and not borrowed and report.saved["num_offloaded"] == 0, str(report)
    assert report.saved["most_at_peers"] <= sum(loan.bytes for loan in borrowed)
    assert (report.saved["offloaded_to_peers"] > 0) == bool(borrowed), str(report)
    assert [lane.lane for lane in report.lanes if lane.lane == "peer"] == ["peer"] * bool(borrowed)


# In flight under 1F1B: as many micro-batches as stages from here on. Three blocks each.
ROOM = 5 * BUNDLE


def is_lent_all_it_needs(rank: int, size: int, borrower: dict[str, Any]) -> None:
    """The last stage has room for all; after the first step, which comes before any loan, nothing goes to the host."""
    wrap_plan.LEAST_SAVED = 64
    policy = {"kernel": "torch", **(borrower if rank == 0 else {**AUTO, "activation_memory": "1GiB"})}
    reports: list[noria.Report] = []

    def after_step(step: int, models: list[nn.Module]) -> None:
        finish()
        reports.append(noria.report(models[0]))

    ours = trained("1F1B", policy, adamw, length=LENGTH, after_step=after_step)
    assert_same_bits(ours, trained("1F1B", None, adamw, length=LENGTH))
    assert reports[0].loans and reports[-1].saved["num_unforeseen"] == 0, str(reports[-1])
    if rank == 0:
        to_host = [each.saved["offloaded"] - each.saved["offloaded_to_peers"] for each in reports]
        assert 0 < to_host[0] == to_host[-1], str(reports[-1])
        [peer] = [lane for lane in reports[-1].lanes if lane.lane == "peer"]
        saved, copies = reports[-1].saved, reports[-1].copies
        swapped = saved["offloaded_to_peers"] + saved["reloaded_from_peers"]
        assert 0 < swapped == peer.bytes - copies["stashed"] - copies["fetched"]


def lends_nothing(rank: int, size: int, report: noria.Report) -> None:
    assert not any(loan.for_saved for loan in report.loans) and not report.saved["offloaded_to_peers"]


AUTO: dict[str, Any] = {"activations": "auto", "activation_memory": ROOM}
OF_TWO: dict[str, tuple[Callable[..., Any], Any]] = {
    "1F1B": (lends, ("1F1B", AUTO, keeps_in_room)),
    "all that is needed": (is_lent_all_it_needs, (AUTO,)),
    "to one that offloads": (is_lent_all_it_needs, ({"activations": "offload"},)),
    "blocking": (lends, ("1F1B", {**AUTO, "update": "blocking"}, keeps_in_room)),
    "room for all": (lends, ("1F1B", {**AUTO, "activation_memory": "1GiB"}, lends_nothing)),
    "GPipe": (lends, ("GPipe", AUTO, lends_nothing)),  # all stages have all micro-batches in flight
    "offload": (lends, ("1F1B", {"activations": "offload"}, lends_nothing)),
    "keep": (lends, ("1F1B", {"activations": "keep"}, lends_nothing)),
}


# The last stage has one micro-batch in flight: it keeps three bundles, and lends two.
GROWN = {"some of it": 148, "all of it": 212}
BEFORE, AFTER = 3, 6


def grows(rank: int, size: int, length: int) -> None:
    """The lender's own need grows: it gets memory back, all at once where a device can only do that, and then all that
    its blocks save stays with it again."""
    wrap_plan.LEAST_SAVED = 64
    reports: list[noria.Report] = []
    lengths = [LENGTH] * BEFORE + [length] * AFTER
    policy = {"kernel": "torch", **AUTO}

    def after_step(step: int, models: list[nn.Module]) -> None:
        reports.append(noria.report(models[0]))

    with mock.patch.object(Recomputation, "begin_step"):  # computing again is chosen by the clock, and needs no loan
        ours = trained("1F1B", policy, adamw, length=lengths, after_step=after_step)
    assert_same_bits(ours, trained("1F1B", None, adamw, length=lengths))
    lent = [[loan.bytes for loan in report.loans] for report in reports]
    if rank == 1:
        bundle = BUNDLE * length // LENGTH
        assert all(report.ledger_agrees for report in reports)
        room_left = ROOM - 3 * bundle if DEVICE == "cpu" else 0
        assert sum(loan.bytes for loan in reports[-1].loans) == room_left // KIB64 * KIB64
        offloaded = [report.saved["num_offloaded"] for report in reports]
        assert offloaded[BEFORE - 1] == 0 < offloaded[-1], offloaded
        assert offloaded[BEFORE + 2 :] == [offloaded[-1]] * (AFTER - 2), offloaded
        assert reports[-1].saved["most_there"] == 3 * bundle, str(reports[-1])
    assert lent[0] == lent[BEFORE - 1] > lent[-1] == lent[BEFORE + 2], lent
    swapped = [report.saved["offloaded_to_peers"] for report in reports]
    if rank == 0 and not lent[-1]:
        assert swapped[BEFORE + 2] == swapped[-1] > 0, swapped
    elif rank == 0:
        assert swapped[BEFORE + 2] < swapped[-1], swapped


# Which rank fails in which part of the first step.
PARTS: dict[str, tuple[int, Any, str]] = {
    "an arena": (1, DeviceBuffers, "take_shared"),
    "a connection": (0, _C, "Borrower"),
    "an offer": (1, _C.Lender, "lend"),
    "a loan that has come": (0, _C.Borrower, "receive"),
    "a loan that is opened": (0, _C.Backend, "open_shared"),
}


def goes_without(rank: int, size: int, part: str) -> None:
    """What a machine refuses is no link: no rank raises, all say why, and what has no room goes to the host."""
    wrap_plan.LEAST_SAVED = 64
    failing, where, what = PARTS[part]

    def look(report: noria.Report) -> None:
        assert not report.loans and not report.saved["offloaded_to_peers"], str(report)
        assert all(row.purpose != "lent to other stages" for row in report.ledger), str(report)
        assert report.ledger_agrees and report.saved["most_there"] <= ROOM, str(report)
        told = "stage 1 lends nothing: " if part == "an arena" else "stage 0 borrows nothing of stage 1: "
        assert [note for note in report.notes if note == told + "no such luck"] == [told + "no such luck"], str(report)
        assert rank or report.saved["num_offloaded"] > 0

    refused = mock.patch.object(where, what, side_effect=_C.MachineError("no such luck"))
    with refused if rank == failing else contextlib.nullcontext():
        ours = trained("1F1B", {"kernel": "torch", **AUTO}, adamw, length=LENGTH, look=look)
    assert_same_bits(ours, trained("1F1B", None, adamw, length=LENGTH))


def opens_nothing_after_the_probe(rank: int, size: int) -> None:
    """The link has been measured, and then the arena cannot be opened: its lender has its memory back at once, however
    late the other one closes."""
    wrap_plan.LEAST_SAVED = 64
    opened, own = [], _C.Backend.open_shared
    close, take_back = Handover._close, PeerMemory._take_back
    store = dist.PrefixStore("taken back", dist.distributed_c10d._get_default_store())

    def open_shared(backend: _C.Backend, told: Any) -> int:
        opened.append(told.bytes)
        if len(opened) == 2:
            raise _C.MachineError("no such luck")
        return own(backend, told)

    def close_late(handover: Handover, source: Source) -> None:
        if len(opened) == 2:  # no rank takes back what the probe has opened
            with contextlib.suppress(RuntimeError):
                store.wait(["begun"], datetime.timedelta(seconds=0.5))
        close(handover, source)

    def take_back_now(lending: PeerMemory) -> None:
        store.set("begun", "")
        take_back(lending)

    reports: list[noria.Report] = []
    look = lambda step, models: reports.append(noria.report(models[0]))  # noqa: E731
    with (
        mock.patch.object(_C.Backend, "open_shared", open_shared),
        mock.patch.object(Handover, "_close", close_late),
        mock.patch.object(PeerMemory, "_take_back", take_back_now if rank == 1 else take_back),
    ):
        ours = trained("1F1B", {"kernel": "torch", **AUTO}, adamw, length=LENGTH, after_step=look)
    assert len(opened) == (2 if rank == 0 else 0)
    for report in reports:
        assert not report.loans and "stage 0 borrows nothing of stage 1: no such luck" in report.notes, str(report)
        assert all(row.purpose != "lent to other stages" for row in report.ledger), str(report)
        assert report.ledger_agrees
    assert_same_bits(ours, trained("1F1B", None, adamw, length=LENGTH))


def are_apart(rank: int, size: int) -> None:
    """Stages of different machines."""
    wrap_plan.LEAST_SAVED = 64

    def look(report: noria.Report) -> None:
        assert not report.loans
        assert [note for note in report.notes if note.endswith("alone: [0], [1]")], str(report)

    with mock.patch("noria.pipeline.peer_memory._machine", lambda: f"machine {rank}"):
        trained("1F1B", {"kernel": "torch", **AUTO}, adamw, length=LENGTH, look=look)


# Once all has been handed over: what the engine is told.
TOLD: dict[str, tuple[int, Any, str]] = {
    "a place for what is saved": (0, _C.EngineSaved, "add_peer"),
    "a place for units": (0, _C.EngineCopies, "add_copy_peer"),
}


def fails_to_lend(rank: int, size: int, part: str) -> None:
    """What is no word of the machine raises on all; the step that is made again is made without lending."""
    wrap_plan.LEAST_SAVED = 64
    failing, where, what = {**PARTS, **TOLD}[part]
    policy = {"kernel": "torch", **AUTO}
    if part in TOLD and rank == 1:
        policy["activation_memory"] = "1GiB"  # some is left for units
    step, failures = StepDriver.step, []

    def twice(self: StepDriver, closure: Any) -> Any:
        if not failures:
            with pytest.raises(Exception, match="no such luck") as caught, failing_there():
                step(self, closure)
            failures.append(str(caught.value))
        return step(self, closure)

    def failing_there() -> contextlib.AbstractContextManager[Any]:
        if rank != failing:
            return contextlib.nullcontext()
        return mock.patch.object(where, what, side_effect=ValueError("no such luck"))

    def look(report: noria.Report) -> None:
        assert not any(loan.bytes for loan in report.loans) and not report.saved["offloaded_to_peers"], str(report)
        assert all(row.purpose != "lent to other stages" for row in report.ledger), str(report)
        assert report.saved["most_there"] <= ROOM, str(report)

    with mock.patch.object(StepDriver, "step", twice):
        ours = trained("1F1B", policy, adamw, length=LENGTH, look=look)
    told = f"noria's lending between stages on rank {failing} failed: ValueError: no such luck"
    assert failures == ["no such luck" if rank == failing else told]
    assert_same_bits(ours, trained("1F1B", None, adamw, length=LENGTH))


class OneBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


def keeps_room_for_two(rank: int, size: int) -> None:
    """A lender whose blocks save less than two bundles at once: less than their room is refused to no stage."""

    def look(report: noria.Report) -> None:
        [loan] = report.loans
        assert loan.bytes == (ROOM - 2 * BUNDLE) // KIB64 * KIB64, str(report)
        assert rank == 0 or report.saved["most_saved"] == BUNDLE, str(report)

    wrap_plan.LEAST_SAVED = 64
    make_stage = OneBlock if rank == 1 else Stage
    policy = {"kernel": "torch", "units": [Block], **AUTO}
    trained("1F1B", policy, adamw, length=LENGTH, make_stage=make_stage, look=look)


def refuses(rank: int, size: int) -> None:
    model = test_pipelines.Stage()
    wrong: dict[str, Any] = {
        "found stages='stages'": "stages",
        "a DeviceMesh of one dimension": init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("replicas", "stages")),
    }
    for told, stages in wrong.items():
        with pytest.raises(noria.UsageError, match=told):
            noria.wrap(model, device=DEVICE, stages=stages)
    elsewhere = DeviceMesh(DEVICE, [1])
    if rank == 0:
        told = r"expected stages with rank 0 in them, but found ranks \[1\]\. Remedy: let those ranks alone call it"
        with pytest.raises(noria.UsageError, match=told):
            noria.wrap(model, device=DEVICE, stages=elsewhere)
    else:
        noria.wrap(model, device=DEVICE, stages=elsewhere)  # of one stage, which lends to none
        noria.unwrap(model)
    meshes = {"stages": init_device_mesh(DEVICE, (2,))} if rank == 0 else {}
    told = (
        r"expected the same mesh= and stages= on all ranks of them, but found on rank 0: stages=\[0, 1\]; on rank 1: a "
        r"mesh of 1 x 2 ranks, \[\[0, 1\]\]\. Remedy: call noria.wrap with the same ones there"
    )
    with pytest.raises(noria.UsageError, match=told):
        noria.wrap(model, device=DEVICE, **meshes)


OF_TWO |= {f"{name} fails": (fails_to_lend, (name,)) for name in PARTS | TOLD}
OF_TWO |= {f"{name} is refused": (goes_without, (name,)) for name in PARTS}
OF_TWO |= {"an arena cannot be opened": (opens_nothing_after_the_probe, ()), "two machines": (are_apart, ())}
OF_TWO |= {"a small lender": (keeps_room_for_two, ()), "misuse": (refuses, ())}
OF_TWO |= {f"{what} comes back": (grows, (length,)) for what, length in GROWN.items()}


def refuses_a_stage_without_an_optimizer(rank: int, size: int) -> None:
    """Both hear of it at once."""
    model = Stage()
    mesh = init_device_mesh(DEVICE, (size,), mesh_dim_names=("stages",))
    with pytest.raises(noria.UsageError, match="an optimizer with stages="):
        noria.wrap(model, adamw(model.parameters()) if rank else None, device=DEVICE, stages=mesh["stages"])


OF_TWO["no optimizer"] = (refuses_a_stage_without_an_optimizer, ())


def refuses_stages_that_would_share_a_model(rank: int, size: int) -> None:
    """Both hear of it, and keep their weights."""
    mesh = init_device_mesh(DEVICE, (size, 1), mesh_dim_names=("stages", "replicas"))
    torch.manual_seed(rank)
    model = Stage()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer, group = adamw(model.parameters()), mesh["stages"].get_group()
    stage = PipelineStage(model, rank, size, torch.device(DEVICE), group=group)
    for options in ({}, {"mesh": mesh["stages"]}, {"mesh": mesh["stages"], "stages": mesh["stages"]}):
        with pytest.raises(noria.UsageError, match=r'mesh=grid\["replicas"\]') as caught:
            noria.wrap(stage, optimizer, device=DEVICE, **options)
        assert "stages [[0], [1]]" in str(caught.value)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    noria.wrap([stage], optimizer, device=DEVICE, mesh=mesh["replicas"])
    assert noria.report([stage]).num_units == noria.report(stage).num_units > 0
    with noria.materialize([stage]):
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    noria.unwrap([stage], optimizer)


OF_TWO["stages that would share a model"] = (refuses_stages_that_would_share_a_model, ())


def lends_by_links(rank: int, size: int, links: dict[str, tuple[float, float]], shares: list[int]) -> None:
    """The first stage needs fourteen granules, and both others have it to spare."""
    wrap_plan.LEAST_SAVED = 64

    def look(report: noria.Report) -> None:
        loans = [loan for loan in report.loans if loan.for_saved]
        assert [(loan.lender, loan.borrower) for loan in loans] == [(1, 0), (2, 0)], str(report)
        assert [loan.for_saved // KIB64 for loan in loans] == shares, str(report)
        assert rank or report.saved["offloaded_to_peers"] > 0, str(report)

    policy = {"kernel": "torch", **AUTO, **({"activation_memory": "1GiB"} if rank else {})}
    ours = trained("1F1B", policy, adamw, length=LENGTH, look=look, machine={"limits": links})
    assert_same_bits(ours, trained("1F1B", None, adamw, length=LENGTH))


class CountedBlock(Block):
    num_computed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_computed += 1
        return super().forward(x)


class CountedStage(Stage):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.blocks = nn.ModuleList(CountedBlock() for _ in range(3))


def goes_as_chosen(rank: int, size: int, ways: list[str]) -> None:
    """Where lenders have room for some alone: in the steps after the third, which is looked at, each block's
    activations go where they shall, or are computed again."""
    wrap_plan.LEAST_SAVED = 64
    described: list[Any] = []
    choose = _C.choose_ways

    def choose_these(blocks: Any, size: int, host: Any, peers: Any) -> list[str]:
        described.append((blocks, size, host, peers))
        assert set(choose(blocks, size, host, peers)) <= {"peers", "host", "recompute"}
        return ways

    reports: list[noria.Report] = []
    num_computed: list[list[int]] = []  # by step, of each block until then

    def after_step(step: int, models: list[nn.Module]) -> None:
        reports.append(noria.report(models[0]))
        num_computed.append([block.num_computed for block in models[0].blocks])

    made: dict[str, Any] = {"length": [LENGTH] * 6, "make_stage": CountedStage}
    with mock.patch.object(_C, "choose_ways", choose_these), mock.patch.object(Recomputation, "_look_again"):
        ours = trained("1F1B", {"kernel": "torch", **AUTO}, adamw, after_step=after_step, **made)
    assert_same_bits(ours, trained("1F1B", None, adamw, **made))
    if rank > 0:
        assert not described and not reports[-1].recomputed  # nothing leaves there
        return
    [(blocks, left, host, peers)] = described
    steps = [{name: b.saved[name] - a.saved[name] for name in b.saved} for a, b in itertools.pairwise(reports)]
    assert left == steps[0]["offloaded"] and peers[0] == steps[0]["offloaded_to_peers"], described
    assert len(blocks) == 3 and all(us >= 0 for us in (*host, *peers)), described
    again = [way == "recompute" for way in ways]
    assert [report.recomputed for report in reports[:2]] == [[], []]
    assert reports[-1].recomputed == [f"blocks.{nth}" for nth in range(3) if again[nth]]
    last = [after - before for before, after in zip(*num_computed[-2:], strict=True)]
    assert last == [NUM_MICRO_BATCHES * (1 + each) for each in again], num_computed
    assert any(loan.for_saved for loan in reports[-1].loans) and reports[-1].loans == reports[0].loans
    assert reports[-1].saved["most_there"] <= ROOM, str(reports[-1])
    to_host = [each["offloaded"] - each["offloaded_to_peers"] for each in steps]
    assert steps[-1]["offloaded_to_peers"] > 0 and to_host[-1] > 0, steps
    if any(again):
        assert steps[-1]["offloaded"] < steps[0]["offloaded"], steps
    else:
        assert to_host[-1] > to_host[0], steps


OF_TWO["some go home"] = (goes_as_chosen, (["host", "peers", "peers"],))
OF_TWO["some are computed again"] = (goes_as_chosen, (["recompute", "host", "peers"],))
SLOW, FAST = (0.05, 0.0), (0.2, 0.0)  # GiB/s, far below what copies take
OF_THREE: dict[str, tuple[Callable[..., Any], Any]] = {
    "one link is faster": (lends_by_links, ({"peer": SLOW, "peer:1": FAST}, [12, 2])),
    "the other one is": (lends_by_links, ({"peer": SLOW, "peer:2": FAST}, [2, 12])),
    "links are nearly alike": (lends_by_links, ({"peer": SLOW, "peer:1": (0.06, 0.0)}, [7, 7])),
}


@pytest.mark.long
@pytest.mark.cpu_only("the links of a device have no limits that a test sets")
def test_three_stages_lend_in_proportion_to_links():
    for name, failure in in_turn_on_ranks(3, OF_THREE).items():
        assert not failure, f"{name}: {failure}"


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str]:
    return in_turn_on_ranks(2, asked_for(request, OF_TWO))


CHOSEN_BY_TIME = pytest.mark.cpu_only("on a device blocks are not timed, so none is chosen to be computed again")
CHOSEN = ("some go home", "some are computed again")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=CHOSEN_BY_TIME if name in CHOSEN else GROWING if name.removesuffix(" comes back") in GROWN else (),
        )
        for name in OF_TWO
    ],
)
def test_two_stages_have_the_bits_of_the_same_pipeline(found, name):
    assert_fine(found, name)


def test_lender_that_has_back_only_the_whole_asks_for_what_it_lacks_of_all_that_is_taken():
    """One of two loans has come to nothing: a device has its part of the arena back with the other one."""
    asked: list[tuple[int, int]] = []
    of_arena = 8 * KIB64
    context: Any = SimpleNamespace(
        device=torch.device("cuda"),
        plan=SimpleNamespace(saved_room=2 * of_arena),
        ledger=SimpleNamespace(expected=lambda *_: of_arena),
        engine=SimpleNamespace(
            saved=SimpleNamespace(saved_stats=lambda: {"most_saved": of_arena + KIB64, "largest": KIB64})
        ),
    )
    stages: Any = SimpleNamespace(rank=0, group=SimpleNamespace(ranks=[0, 1, 2]))
    lender: Any = SimpleNamespace(ask_back=lambda *told: asked.append(told))
    run: Any = SimpleNamespace(on_close=[])
    lending = PeerMemory(context, run, stages)
    lending._lender, lending._asked = lender, {1: 0, 2: of_arena // 2}
    lending._ask_back()
    lending._ask_back()
    assert asked == [(2, 0)]


def test_stages_without_a_process_group_are_refused():
    with pytest.raises(noria.UsageError, match=r"a process group before stages=.*call init_process_group first"):
        noria.wrap(test_pipelines.Stage(), device=DEVICE, stages="any")
