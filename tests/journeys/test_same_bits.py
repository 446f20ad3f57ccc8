"""Training through a window gives the bits of plain PyTorch: losses, gradients, weights and optimizer states, whichever
way the memory was moved.
"""

from __future__ import annotations

import collections
import itertools
from typing import Any

import noria
import pytest
import torch
from noria.testing import assert_same_bits
from noria.wrapped import wrapped_by

from tests.device import DEVICE
from tests.journeys.models import ZOO, batch_for, build
from tests.journeys.twins import (
    AXES,
    Case,
    check_memory,
    check_moved,
    compare,
    end,
    is_possible,
    pairwise,
    record,
    run,
    twin_side,
    values_of,
    wrapped_side,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("error:Detected call of `lr_scheduler"),
]

HELD = ("", "fetch", "drain", "update", "poison")
COVER = [
    Case(**row, seed=number, held=HELD[number % len(HELD)]) for number, row in enumerate(pairwise(AXES, is_possible))
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", COVER, ids=str)
def test_a_run_has_the_bits_of_its_twin_and_really_streams(case: Case):
    run(case)


def test_the_cover_holds_every_possible_pair_of_values_of_every_two_axes():
    rows = [vars(case) for case in COVER]
    assert all(is_possible(row) for row in rows)
    for a, b in itertools.combinations(AXES, 2):
        seen = {(row[a], row[b]) for row in rows}
        wanted = {(x, y) for x in AXES[a] for y in AXES[b] if is_possible({a: x, b: y})}
        assert wanted <= seen, (a, b, wanted - seen)


# ---- twenty hostile seeds -----------------------------------------------------------------------------------------

_RECORDED: dict[str, Any] = {}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_delays_changes_a_bit(seed: int):
    """Kernel, update mode, window, tied weights and threads take turns; the poison shows all that is used too late."""
    case = Case(
        model=("gpt_tied", "gpt")[seed % 2],
        kernel=("torch", "fused")[seed // 2 % 2],
        update=("auto", "blocking")[seed // 4 % 2],
        window=("least", "two", "half")[seed % 3],
        update_threads=1 + seed % 4,
        micro_batches=2,
        seed=100 + seed,
        held=HELD[seed % len(HELD)],
    )
    key = f"{case.model} {case.kernel}"
    if key not in _RECORDED:
        twin = twin_side(case)
        _RECORDED[key] = record(twin)
        end(twin)
    ours = wrapped_side(case)
    first = values_of(ours.model)
    compare(ours.journey(), iter(_RECORDED[key]))
    check_moved(case, ours, noria.report(ours.model), first)
    end(ours)


# ---- the comparison itself ----------------------------------------------------------------------------------------


def test_one_flipped_bit_of_one_weight_is_seen():
    case = Case(window="two", hostile=False, steps=3)
    ours, twin = wrapped_side(case), twin_side(case)
    with noria.materialize(ours.model) as model, torch.no_grad():
        model.head.weight.view(torch.int32)[5, 7] ^= 1
    with pytest.raises(AssertionError, match=r"step [01], "):
        compare(ours.journey(), twin.journey())
    end(ours, twin)


@pytest.mark.parametrize(
    ("kernel", "held", "kind"),
    [
        ("torch", "", "fetch -> forward on weights (RAW)"),
        ("torch", "", "fetch -> backward on weights (RAW)"),
        ("fused", "update", "update -> fetch on working_copy (RAW)"),
    ],
)
def test_the_hostile_machine_is_hostile_enough_to_show_a_wait_that_is_left_out(kernel: str, held: str, kind: str):
    case = Case(window="least", kernel=kernel, held=held, hold_us=10_000, seed=1)  # longer than a busy machine dawdles
    ours, twin = wrapped_side(case), twin_side(case)
    noria.testing.omit_wait(ours.model, kind)
    with pytest.raises(AssertionError, match="step "):
        compare(ours.journey(), twin.journey())
    end(ours, twin)


# ---- steady state -------------------------------------------------------------------------------------------------


@pytest.mark.cpu_only("a device may be further behind in a later step, with more ops and events under way")
@pytest.mark.parametrize("update", AXES["update"])
@pytest.mark.parametrize("kernel", AXES["kernel"])
def test_after_three_steps_nothing_is_taken_any_more(kernel: str, update: str):
    """No arena grows, no device memory or event is made, and the engine remembers no more ops, for 20 steps."""
    case = Case(kernel=kernel, update=update, window="two", micro_batches=2, hostile=False, steps=23)
    ours = wrapped_side(case)
    wrapped = wrapped_by(ours.model)
    assert wrapped is not None
    taken = collections.defaultdict(list)
    fetches = []
    for moment, _ in ours.journey():
        if not moment.endswith("update"):
            continue
        fetches.append(wrapped.context.engine.statistics.num_fetches)
        taken["arenas"].append({purpose: arena.bytes for purpose, arena in wrapped.context.home.arenas.items()})
        taken["device memory"].append((wrapped.context.backend.allocated, wrapped.context.backend.num_allocations))
        taken["kinds of passes"].append(len(wrapped.context.engine.statistics.passes()))
        taken["events"].append(wrapped.context.backend.num_events)
        wrapped.context.engine.idle()  # what has not passed yet would be remembered
        taken["remembered ops"].append(wrapped.context.engine.statistics.num_remembered)
    assert len(fetches) == case.steps
    assert all(before < after for before, after in itertools.pairwise(fetches))
    assert taken["remembered ops"][-1] > 0
    for what, amounts in taken.items():
        assert all(amount == amounts[2] for amount in amounts[3:]), (what, amounts)
    check_memory(wrapped, noria.report(ours.model))
    end(ours)


# ---- between steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt_tied", "t5"])
def test_inference_without_an_optimizer_has_the_bits_of_the_plain_model(name: str):
    model, plain = build(name).eval(), build(name).eval()
    noria.wrap(model, device=DEVICE, window=2 if name == "t5" else 3)
    species = ZOO[name]
    with torch.no_grad():
        for number in range(3):
            batch = batch_for(name, number)
            for use in (species.loss, species.generate):
                assert_same_bits({"out": use(model, batch)}, {"out": use(plain, batch)})
    report = noria.report(model)
    assert report.ledger_agrees
    assert report.num_fetches > report.num_units
