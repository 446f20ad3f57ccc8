"""What the report says of the host's updates: where their time went, and what would hide more of it; and of loans.

Times are what the report promises. So layers sleep and updates are limited: each takes a known time on any machine, and
nothing here depends on how exact that is."""

from __future__ import annotations

import dataclasses
import re
import time
import warnings
from typing import Any

import noria
import pytest
import torch
from noria import doctor
from noria.host.limits import Found, Limit
from noria.pipeline.peer_memory import Loan
from noria.policy import format_bytes
from noria.report import Bound, HostMemory, UpdateTime, _advice
from noria.testing import on_machine
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE

pytestmark = pytest.mark.usefixtures("one_thread", "keeps_plan")

BLOCKS, WIDTH = 4, 16
FORWARD_S, BACKWARD_S = 0.003, 0.005
SLOW, FAST = 4_000, 0  # us that the update of one unit takes; there are BLOCKS units
ALL_DRAFTED = "1MiB"


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(BACKWARD_S)
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(self.linear(x))


def trained(update_us: float, *, steps: int = 6, **policy: Any) -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters())
    with on_machine(limits={"update": (0.0, update_us)}, update_threads=1):
        noria.wrap(model, optimizer, device=DEVICE, window=2, units=[Block], **{"kernel": "fused", **policy})
    for _ in range(steps):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def updates_of(model: nn.Module) -> UpdateTime:
    report = noria.report(model)
    found = report.updates
    assert found is not None
    assert report.to_dict()["updates"]["total_us"] == found.total_us
    shares = (found.behind_forward_us, found.behind_backward_us, found.exposed_us)
    assert round(1e3 * found.total_us) == round(1e3 * sum(shares))  # nanoseconds, per step
    assert min(found.behind_forward_us, found.behind_backward_us, found.exposed_us) >= 0
    assert "behind backward" in str(report)
    return found


POLICIES = {
    "deferred": {"draft_memory": 0},
    "drafts": {"draft_memory": ALL_DRAFTED},
    "blocking": {"update": "blocking"},
    "torch": {"kernel": "torch"},
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_three_shares_are_all_that_the_pool_did(policy):
    model = trained(SLOW, steps=1, **policy)
    engine = wrapped_by(model).context.engine
    engine.updates.run_all_deferred()
    engine.idle()
    optimizer = wrapped_by(model).drivers[0].optimizer
    sums, busy_us = engine.statistics.step_sums(), engine.statistics.update_stats()["busy_us"]
    for _ in range(4):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        now = engine.statistics.step_sums()  # while updates run
        shares = ("update_behind_forward_us", "update_behind_backward_us", "update_exposed_us")
        assert now["update_us"] == sum(now[each] for each in shares)
    engine.updates.run_all_deferred()
    engine.idle()
    grown_us = engine.statistics.step_sums()["update_us"] - sums["update_us"]
    assert grown_us == engine.statistics.update_stats()["busy_us"] - busy_us > 0


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({"update": "blocking"}, id="blocking"),
        pytest.param(
            {"kernel": "torch"},
            id="torch",
            marks=pytest.mark.cpu_only("a device computes on while the launching thread updates"),
        ),
    ],
)
def test_what_runs_inside_step_or_on_the_launching_thread_is_exposed(policy):
    found = updates_of(trained(SLOW, **policy))
    assert found.behind_forward_us == found.behind_backward_us == 0 < found.exposed_us


def test_deferred_updates_hide_behind_forward_only():
    found = updates_of(trained(SLOW, draft_memory=0))
    assert found.behind_backward_us == 0 < found.behind_forward_us


def test_what_a_pass_waits_for_is_exposed():
    found = updates_of(trained(30_000, draft_memory=0))
    assert found.behind_forward_us < found.total_us / 2


@pytest.mark.usefixtures("prompt_device")
def test_drafts_hide_behind_backward_too():
    found = updates_of(trained(SLOW, draft_memory=ALL_DRAFTED))
    assert found.behind_backward_us > 0


def test_the_first_step_is_left_out():
    model = trained(SLOW, steps=1, update="blocking")
    assert noria.report(model).updates is None
    assert wrapped_by(model).context.engine.statistics.update_stats()["busy_us"] >= SLOW * BLOCKS
    assert wrapped_by(model).context.engine.statistics.step_sums()["update_us"] == 0


# ---- the memory of the host -----------------------------------------------------------------------------------------

PARAMETERS = BLOCKS * (WIDTH * WIDTH + WIDTH)
UNIT_BYTES = WIDTH * WIDTH * 4 + 512  # of fp32, as it is fetched: biases fill 512 bytes; gradients are drained as such


def host_memory_of(model: nn.Module, gib_s: float) -> tuple[Bound, HostMemory]:
    engine = wrapped_by(model).context.engine
    engine.updates.run_all_deferred()
    engine.idle()
    bound = noria.report(model, host_memory_gib_s=gib_s).bound
    assert bound is not None
    return bound, bound.host_memory


def test_bytes_through_the_memory_of_the_host_are_those_counted_by_hand():
    """A window of two of four units: forward fetches all of them, for they have been updated, backward the first two
    again, and all gradients are drained. Where the device is the host, that reads and writes what is copied."""
    memory = host_memory_of(trained(FAST, update="blocking"), 1.0)[1]
    assert memory.updated == 28 * PARAMETERS  # fp32: weight, two moments, each read and written; a gradient
    assert memory.copied == (2 if DEVICE == "cpu" else 1) * ((4 + 2) * UNIT_BYTES + 4 * PARAMETERS)
    assert memory.us == pytest.approx((memory.updated + memory.copied) / 2**30 * 1e6)
    assert memory.parameters == PARAMETERS


@pytest.mark.parametrize(
    ("policy", "each"),
    [
        ({"kernel": "torch"}, 28),
        ({"kernel": "fused", "dtype": torch.bfloat16}, 26),  # the weight is 2 bytes and 2 more, the gradient 2
        ({"kernel": "fused", "state_dtype": "bf16"}, 20),
        # In torch's way: gradient 2, to scratch memory and from there 8, master 8, moments 16, working copy 2.
        ({"kernel": "torch", "dtype": torch.bfloat16}, 36),
    ],
)
def test_an_update_moves_what_its_states_and_dtypes_make_it_move(policy, each):
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2, units=[Block], update="blocking", **policy)
    for _ in range(3):
        model(torch.ones(2, WIDTH, dtype=policy.get("dtype"))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert host_memory_of(model, 1.0)[1].updated == each * PARAMETERS


@pytest.mark.parametrize(("state_dtype", "most"), [("fp32", 32), ("bf16", 24), ("8bit", 20)])
@pytest.mark.parametrize("update", ["blocking", "backward"])
def test_a_step_moves_few_bytes_of_host_memory_for_each_parameter(state_dtype, most, update):
    """At most the update's, and 2 by each of two fetches and a drain. Two of four blocks are fetched only once."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    policy = {"dtype": torch.bfloat16, "kernel": "fused", "state_dtype": state_dtype, "draft_memory": 0}
    noria.wrap(model, optimizer, device=DEVICE, window=2, units=[nn.Linear], update=update, **policy)
    for _ in range(3):
        model(torch.ones(2, 256, dtype=torch.bfloat16)).square().mean().backward()
        wrapped_by(model).context.engine.idle()  # updates in backward belong to this step
        optimizer.step()
        optimizer.zero_grad()
    memory = host_memory_of(model, 1.0)[1]
    copied = memory.copied / (2 if DEVICE == "cpu" else 1)
    assert most - 1 <= (memory.updated + copied) / memory.parameters <= most
    assert memory.bytes_per_parameter == (memory.updated + memory.copied) / (4 * 256 * 256)
    assert f"{memory.bytes_per_parameter:.1f} bytes for each trained parameter" in str(noria.report(model))


def test_where_the_memory_of_the_host_is_slowest_it_is_the_bound_and_named():
    model = trained(FAST, draft_memory=0)
    fast, _ = host_memory_of(model, 1e6)
    slow, memory = host_memory_of(model, 1e-6)
    assert "host memory" not in fast.limit and slow.limit == "host memory"
    assert slow.bound_us == memory.us > fast.bound_us
    assert "deferred: host memory)" in str(noria.report(model, host_memory_gib_s=1e-6))


def test_under_blocking_copies_and_updates_use_the_memory_in_turns():
    bound, memory = host_memory_of(trained(FAST, update="blocking"), 1e-6)
    assert bound.limit == "host memory"
    assert bound.bound_us == pytest.approx(memory.us)


@pytest.mark.parametrize(
    "update_us, policy, limit",
    [
        (5 * SLOW, {"draft_memory": 0}, "updates, compute"),
        (5 * SLOW, {"update": "blocking"}, "updates, compute"),
        (5 * SLOW, {"draft_memory": ALL_DRAFTED}, "updates"),
        (FAST, {"draft_memory": 0}, "compute"),
    ],
)
def test_the_limit_is_all_that_would_raise_the_bound(update_us, policy, limit):
    bound, _ = host_memory_of(trained(update_us, **policy), 1e6)
    assert bound.limit == limit


def test_without_a_number_the_memory_is_measured_once(monkeypatch):
    model, measured = trained(FAST, draft_memory=0), []
    monkeypatch.setattr(doctor, "_measure_update", lambda count, tries: measured.append(count) or 12.5)
    doctor.host_memory_gib_s.cache_clear()
    for _ in range(2):
        bound = noria.report(model).bound
        assert bound is not None and bound.host_memory.gib_s == 12.5
    assert len(measured) == 1 and measured[0] * 16 >= 64 << 20  # bytes of four arrays
    doctor.host_memory_gib_s.cache_clear()


@pytest.mark.parametrize(
    ("free_mib", "ranks", "mib"), [(64, 1, 64), (1024, 1, 256), (1024, 2, 128), (1 << 20, 8, 2048)]
)
def test_measuring_the_memory_leaves_room_where_caches_are_large(monkeypatch, free_mib, ranks, mib):
    """A virtual machine may see all caches of a large host."""
    limit = Limit("MemAvailable", "/proc/meminfo", free_mib << 20)
    measured = []
    monkeypatch.setattr(doctor, "_measure_update", lambda count, tries: measured.append(count) or 12.5)
    monkeypatch.setattr(doctor, "_cache_bytes", lambda: 1 << 30)
    monkeypatch.setattr(doctor, "probe_limits", lambda device: Found("here", ranks, None, (limit,)))
    doctor.host_memory_gib_s.__wrapped__()
    assert measured == [mib * (1 << 20) // 16]


def advice_of(model: nn.Module) -> str:
    report = noria.report(model)
    assert (report.advice is None) == ("advice: " not in str(report))
    return report.advice or ""


def test_where_updates_hold_up_the_step_more_drafts_are_advised_with_their_bytes():
    model = trained(5 * SLOW, draft_memory=0)  # more than all compute
    needed = sum(wrapped_by(model).context.plan.draftable.values())
    assert f"draft_memory={needed} " in advice_of(model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_advised_bytes_draft_every_unit_and_one_less_does_not(dtype):
    def planned(draft_memory: int) -> Any:
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        optimizer = torch.optim.AdamW(model.parameters())
        return noria.plan(
            model, optimizer, device=DEVICE, kernel="fused", units=[Block], dtype=dtype, draft_memory=draft_memory
        )

    needed = sum(planned(0).draftable.values())
    assert planned(needed).drafted == set(planned(needed).draftable) == set(range(BLOCKS))
    assert planned(needed - 1).drafted < set(range(BLOCKS))


@pytest.mark.parametrize("kernel", ["torch", "auto"])
def test_plan_report_and_one_warning_say_what_updates_in_bfloat16_lose_and_what_masters_take(kernel):
    def made(dtype: torch.dtype = torch.bfloat16, frozen: bool = False) -> tuple[nn.Module, Any]:
        model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(dtype).requires_grad_(not frozen)
        return model, None if frozen else torch.optim.AdamW(model.parameters())

    options = {"device": DEVICE, "kernel": kernel, "draft_memory": 0}
    planned, with_masters = noria.plan(*made(), **options), noria.plan(*made(), **options, dtype=torch.bfloat16)
    more = format_bytes(with_masters.home_bytes - planned.home_bytes)
    [note] = [each for each in planned.unpredicted if "without fp32 masters" in each]
    assert note.endswith(f"dtype=torch.bfloat16 keeps masters, for {more} more of host memory")
    assert f"note: {note}" in str(planned)
    model, optimizer = made()
    with pytest.warns(UserWarning, match="without fp32 masters") as warned:
        noria.wrap(model, optimizer, **options)
    assert [each.filename for each in warned] == [__file__]
    assert note in noria.report(model).notes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given, more_options in (
            (made(), {"dtype": torch.bfloat16}),
            (made(torch.float32), {}),
            (made(frozen=True), {}),
        ):
            noria.wrap(*given, **options, **more_options)


def test_where_all_is_drafted_only_more_compute_helps():
    model = trained(FAST, draft_memory=ALL_DRAFTED)
    bound = noria.report(model).bound
    assert bound is not None
    bound, updates = dataclasses.replace(bound, step_us=6000.0), UpdateTime(5000.0, 0.0, 2000.0, 3000.0)
    for compute_us, helps in ((2000, True), (6000, False)):
        times = {"forward_us": compute_us // 2, "backward_us": compute_us // 2, "num_steps": 1}
        advice = _advice(wrapped_by(model), times, bound, updates) or ""
        assert ("larger batch" in advice) == helps and "draft_memory" not in advice


def test_blocking_is_advised_against():
    assert 'update="auto"' in advice_of(trained(SLOW, update="blocking"))


def test_nothing_is_advised_where_updates_are_hidden():
    assert advice_of(trained(FAST, draft_memory=0)) == ""


@pytest.mark.parametrize("num_stages, row_name", [(1, "stage"), (2, "rank")])
def test_who_lends_is_called_a_rank_where_it_has_several_stages(num_stages, row_name):
    models = [nn.Sequential(Block(), Block()) for _ in range(num_stages)]
    noria.wrap(models, torch.optim.AdamW([p for model in models for p in model.parameters()]), device=DEVICE)
    lending = wrapped_by(models[0]).peer_memory
    lending.loans = [Loan(lender=1, borrower=0, offset=0, bytes=1 << 20)]
    lending._note_failed({(2, 0): "no such luck"})
    lines = str(noria.report(models)).splitlines()
    assert f"{row_name} 1 lends 1.0 MiB to {row_name} 0" in lines
    assert f"note: {row_name} 0 borrows nothing of {row_name} 2: no such luck" in lines


class Plus(nn.Module):
    """Adds a weight of its own, then runs the modules inside it."""

    def __init__(self, *inside: nn.Module, listed: bool = True) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(WIDTH))
        self.inside: Any = nn.ModuleList(inside) if listed else nn.Sequential(*inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.own
        for each in self.inside:
            x = each(x)
        return x


def linears(number: int) -> list[nn.Linear]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(number)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(*linears(4)),
        lambda: Plus(*linears(4)),
        lambda: Plus(*linears(4), listed=False),
        lambda: nn.Sequential(Plus(*linears(4)), *linears(1)),
        lambda: Plus(Plus(Plus(*linears(3)))),
    ],
)
def test_a_plan_counts_the_visits_that_training_makes_if_each_module_runs_once(make):
    model = make()
    optimizer = torch.optim.SGD(model.parameters())
    planned = noria.plan(model, optimizer, device=DEVICE)
    noria.wrap(model, optimizer, device=DEVICE)
    for _ in range(2):
        model(torch.randn(2, WIDTH, device=DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    made = {each.phase: each.num_visits for each in noria.report(model).passes}
    assert made == {name: len(each.visits) for name, each in planned.passes.items()}
    assert f"forward: {made['forward']} visits" in str(planned)


def test_one_of_a_thing_reads_as_one():
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters())
    planned = str(noria.plan(model, optimizer, device=DEVICE))
    assert "1 unit, " in planned and "forward: 1 visit, 1 fetch, " in planned and "at most 1 unit and" in planned
    noria.wrap(model, optimizer, device=DEVICE)
    model(torch.randn(2, WIDTH, device=DEVICE)).sum().backward()
    optimizer.step()
    report = str(noria.report(model))
    assert "1 unit, 1 step, " in report and "at most 1 unit, " in report
    assert not re.search(r"\b1 (visits|units|steps|times|fetches|unplanned visits)\b", report), report
