"""Pipelines of two to four stages, with replicas and with several stages on each rank, lend each other memory: the bits
of the whole model on one device, and every stage within its budget, under all that may be late."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import noria
import pytest
import torch
import torch.distributed as dist
from noria import _C
from noria.model.partition import partition
from noria.pipeline import pipeline_plan as pipeline
from noria.pipeline.pipeline_plan import plan_pipeline, saved_by_block
from noria.planning import wrap_plan
from noria.testing import assert_same_bits, first_difference, omit_wait
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE
from tests.journeys.lending_cases import BLOCKS, BUNDLE, CHOSEN, LENGTH, Case, Stage, drawn, train_as_told
from tests.journeys.pairs import WIDTH, adamw
from tests.journeys.test_lending import KIB64
from tests.journeys.test_pipelines import NUM_MICRO_BATCHES, SCHEDULES, trained
from tests.ranks import asked_for, in_turn_on_ranks
from tests.torch_versions import GROWING

Acts = dict[str, tuple[Callable[..., Any], Any]]

LATE = {"seed": 3, "max_delay_us": 200, "poison": True, "hold_us": {"offload": 2_000, "reload": 2_000}}


# ---- in the bits of one device ----

TIGHT = ("auto 5", "auto 5")
MIXED = ("recompute", "host", "peers")
OF_TWO = [
    Case("1F1B", 2, 4, TIGHT, lends=True, steps=CHOSEN),
    Case("1F1B", 2, 4, TIGHT, lends=True, delays=tuple(LATE.items()), steps=CHOSEN, ways=MIXED),
    Case("1F1B", 2, 3, ("auto 2", "auto 1000"), update="drafts", lends=True),
    Case("1F1B", 2, 2, ("offload", "auto 9"), update="blocking", lends=True),
    Case("GPipe", 2, 3, ("auto 4", "auto 1000"), lends=True),
    Case("interleaved 1F1B", 2, 4, ("auto 12", "auto 12"), lends=True, steps=CHOSEN, ways=MIXED),
    Case("interleaved 1F1B", 2, 3, ("auto 4", "auto 1000"), lends=True, delays=tuple(LATE.items())),
]
OF_THREE = [
    Case("1F1B", 3, 6, ("auto 5", "auto 6", "auto 7"), lends=True, steps=CHOSEN, ways=MIXED),
    # Two blocks' room, and backwards that find what the one before has left.
    Case("1F1B", 3, 3, ("auto 2", "auto 1000", "auto 2"), lends=True),
    Case("1F1B", 3, 5, ("auto 3", "recompute", "auto 1000"), lends=True, delays=tuple(LATE.items())),
    Case("interleaved 1F1B", 3, 3, ("offload", "keep", "auto 40"), lends=True),
    Case("1F1B", 3, 4, ("offload", "offload", "offload")),
]
OF_FOUR = [
    Case("1F1B", 4, 4, ("auto 8",) * 4, lends=True),
    Case("1F1B", 2, 2, TIGHT, replicas=2, lends=True, steps=CHOSEN, ways=MIXED),
    Case("1F1B", 2, 4, ("recompute", "recompute"), replicas=2),
    Case("interleaved 1F1B", 2, 2, ("auto 10", "auto 10"), replicas=2, lends=True, delays=tuple(LATE.items())),
]


# ---- with a pair that has come to nothing ----

LENDERS_ROOM = 18 * BUNDLE  # twice what its blocks save at first
GROWN = 220


def asks_back_of_those_who_have_it(rank: int, size: int) -> None:
    """The first stage lends to both others, but one of them cannot reach it when links have been measured. Later the
    first stage's own need grows."""
    wrap_plan.LEAST_SAVED = 64
    made: list[int] = []
    reports: list[noria.Report] = []
    own = _C.Borrower

    def connect(*args: Any) -> _C.Borrower:
        made.append(rank)
        if rank == 1 and len(made) > 1:
            raise _C.MachineError("no such luck")
        return own(*args)

    lengths = [LENGTH] * 3 + [GROWN] * 4
    policy: dict[str, Any] = {"kernel": "torch", "activations": "offload"}
    if rank == 0:
        policy |= {"activations": "auto", "activation_memory": LENDERS_ROOM}
    look = lambda step, models: reports.append(noria.report(models[0]))  # noqa: E731
    how: dict[str, Any] = {"length": lengths, "make_stage": Stage}
    with mock.patch.object(_C, "Borrower", connect):
        ours = trained("1F1B", policy, adamw, after_step=look, **how)
    assert_same_bits(ours, trained("1F1B", None, adamw, **how))
    assert len(made) == (2 if rank else 0)
    for report in reports:
        assert report.ledger_agrees and "stage 1 borrows nothing of stage 0: no such luck" in report.notes, str(report)
    lent = [[(loan.lender, loan.borrower, loan.bytes) for loan in report.loans] for report in reports]
    [(lender, borrower, first)] = lent[2]
    assert (lender, borrower) == (0, 2), lent
    last = [num_bytes for _, _, num_bytes in lent[-1]]
    in_parts = DEVICE == "cpu"  # a device has memory back as a whole
    assert len(last) == int(in_parts or rank == 1), lent
    if rank != 1:  # who knows of its own loans as they are now
        assert all(0 < left < first for left in last), lent
    if rank == 0:
        need = 9 * BUNDLE * GROWN // LENGTH
        assert last == ([(LENDERS_ROOM - need) // KIB64 * KIB64] if in_parts else []), lent
        assert reports[-1].saved["most_there"] == need, str(reports[-1])


# ---- as it was planned ----


class Counter:
    """Bytes of what plain blocks save, by autograd's own hooks."""

    def __init__(self) -> None:
        self.most = 0
        self._there: dict[int, tuple[int, int]] = {}  # by storage: its bytes, and how many handles of it there are

    def count(self, block: nn.Module) -> None:
        weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
        inside: list[Any] = []
        counter = self

        class Kept:
            def __init__(self, tensor: torch.Tensor) -> None:
                self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
                size, handles = counter._there.get(self.key, (tensor.untyped_storage().nbytes(), 0))
                counter._there[self.key] = (0 if self.key in weights else size, handles + 1)
                counter.most = max(counter.most, sum(size for size, _ in counter._there.values()))

            def __del__(self) -> None:
                size, handles = counter._there.pop(self.key)
                if handles > 1:
                    counter._there[self.key] = (size, handles - 1)

        def enter(module: nn.Module, args: Any) -> None:
            inside.append(torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor))
            inside[-1].__enter__()

        block.register_forward_pre_hook(enter)
        block.register_forward_hook(lambda *_: inside.pop().__exit__(None, None, None))


def saves_and_lends_as_planned(rank: int, size: int, schedule: str, bundles: int) -> None:
    """To the byte: what plain torch's blocks save at most, what noria counts of them, and who lends what to whom."""
    name = schedule.lower().replace(" ", "-")
    virtual_stages, room = SCHEDULES[schedule][1], bundles * BUNDLE
    num_blocks = size * virtual_stages * BLOCKS
    parts = partition(Stage(num_blocks))
    with mock.patch.object(pipeline, "LEAST_SAVED", 64):
        saved = saved_by_block(parts, lambda: parts.roots[0](torch.randn(2, LENGTH, WIDTH)))
    assert [sum(each.values()) for each in saved] == [BUNDLE] * num_blocks
    planned = plan_pipeline(
        parts,
        saved,
        [0] * len(parts.units),
        num_stages=size,
        schedule=name,
        num_micro_batches=NUM_MICRO_BATCHES,
        room=room,
        virtual_stages=virtual_stages,
    )
    own = planned.stages[rank]
    counter = Counter()

    def counted() -> Stage:
        stage = Stage()
        for block in stage.blocks:
            counter.count(block)
        return stage

    trained(schedule, None, adamw, length=LENGTH, make_stage=counted)
    assert counter.most == own.saved, (counter.most, own)

    wrap_plan.LEAST_SAVED = 64
    for memory in ("1GiB", room):
        reports: list[noria.Report] = []
        policy = {"kernel": "torch", "activations": "auto", "activation_memory": memory}
        trained(schedule, policy, adamw, length=LENGTH, make_stage=Stage, look=reports.append)
        assert reports[-1].saved["most_saved"] == own.saved, (str(reports[-1]), own)
    assert reports[-1].loans == planned.loans, (reports[-1].loans, planned.loans)
    assert reports[-1].saved["most_there"] == own.kept, (str(reports[-1]), own)


PLANNED: Acts = {
    f"{schedule} as planned": (saves_and_lends_as_planned, (schedule, bundles))
    for schedule, bundles in (("GPipe", 9), ("1F1B", 5), ("interleaved 1F1B", 12))
}


# ---- every wait matters ----


def is_wrong_without(rank: int, size: int, kind: str) -> None:
    """On the first stage. All that leaves it goes to the last one once that has lent. The calling thread computes
    here, so that only what the lanes give can be late. tests/csrc/engine/activation_store_test.cpp has the other
    kinds."""
    wrap_plan.LEAST_SAVED = 64
    policy: dict[str, Any] = {"kernel": "torch", "activations": "offload"}
    if rank > 0:
        policy |= {"activations": "auto", "activation_memory": "1GiB"}
    kinds: set[str] = set()

    def run(omitted: str, hold_us: int) -> dict[str, torch.Tensor]:
        def after_step(step: int, models: list[nn.Module]) -> None:
            wrapped = wrapped_by(models[0])
            assert wrapped is not None
            kinds.update(wrapped.context.engine.wait_kinds() if rank == 0 else ())
            if rank == 0 and step == 0:
                omit_wait(models[0], omitted)

        hostility = {"hold_us": {kind.split()[0]: hold_us}, "poison": True}
        return trained(
            "1F1B", policy, adamw, hostility=hostility, length=LENGTH, make_stage=Stage, after_step=after_step
        )

    with mock.patch.object(torch.autograd.graph, "saved_tensors_hooks", StayingTensors):
        prompt = run("", 0)
        assert rank > 0 or kind in kinds, kinds
        for hold_us in (5_000, 20_000, 80_000):  # later and later, should the machine be busy
            assert_same_bits(run("", hold_us), prompt)
            without = run(kind, hold_us)
            differs = first_difference(list(without.values()), [prompt[name] for name in without], list(without))
            gathered: list[Any] = [None] * size
            dist.all_gather_object(gathered, differs)
            if any(gathered):
                return
    raise AssertionError("nothing went wrong without it")


class StayingTensors(torch.autograd.graph.saved_tensors_hooks):
    """Memory that is written late, for want of a wait, shall not be anybody else's by then."""

    kept: ClassVar[list[torch.Tensor]] = []

    def __init__(self, pack: Any, unpack: Any) -> None:
        def staying(packed: Any) -> Any:
            self.kept.append(unpack(packed))
            return self.kept[-1]

        super().__init__(pack, staying)


ASKS_BACK: Acts = {"a pair that fails, and a lender in need": (asks_back_of_those_who_have_it, ())}
WAITS: Acts = {f"without {kind}": (is_wrong_without, (kind,)) for kind in ("reload -> backward on saved_tensor (RAW)",)}


# ---- run ----


def acts_of(cases: list[Case]) -> Acts:
    return {str(case): (train_as_told, (case,)) for case in cases}


ACTS: dict[int, Acts] = {2: acts_of(OF_TWO) | PLANNED | WAITS, 3: acts_of(OF_THREE) | ASKS_BACK, 4: acts_of(OF_FOUR)}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Callable[[int], dict[str, str]]:
    return functools.cache(lambda num_ranks: in_turn_on_ranks(num_ranks, asked_for(request, ACTS[num_ranks])))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [
        pytest.param(num_ranks, name, marks=GROWING if name in ASKS_BACK else ())
        for num_ranks in ACTS
        for name in ACTS[num_ranks]
    ],
)
def test_pipelines_that_lend_have_the_bits_of_one_device_in_their_budgets(found, num_ranks, name):
    failure = found(num_ranks)[name]
    assert not failure, f"{ACTS[num_ranks][name]}\n{failure}"


# ---- many more ----

# By ranks and replicas: how many, so that a round of processes takes about a minute.
NUM_DRAWN = {(2, 1): 80, (3, 1): 50, (4, 1): 25, (4, 2): 20}
DRAWN = {
    shape: acts_of([drawn(1000 * shape[0] + 100 * shape[1] + nth, *shape) for nth in range(num)])
    for shape, num in NUM_DRAWN.items()
}


@pytest.fixture(scope="module")
def all_found(request: pytest.FixtureRequest) -> Callable[[tuple[int, int]], dict[str, str]]:
    return functools.cache(lambda shape: in_turn_on_ranks(shape[0], asked_for(request, DRAWN[shape])))


@pytest.mark.long
@pytest.mark.parametrize(("shape", "name"), [(shape, name) for shape in DRAWN for name in DRAWN[shape]])
def test_pipelines_drawn_at_random_have_the_bits_of_one_device_in_their_budgets(all_found, shape, name):
    failure = all_found(shape)[name]
    assert not failure, f"{DRAWN[shape][name]}\n{failure}"
