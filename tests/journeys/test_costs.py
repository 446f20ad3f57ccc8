"""What ops cost is measured in the first steps, shown, and kept for the next run; no bit depends on it."""

import dataclasses
import json
import weakref
from typing import Any

import noria
import pytest
import torch
from noria import _C
from noria.cli.main import main
from noria.forward import update_rates
from noria.planning.cost_cache import load_costs
from noria.planning.measured_costs import MeasuredCosts, measured_costs
from noria.wrapped import wrapped_by
from torch import nn

from tests.device import DEVICE
from tests.ranks import on_ranks

STEPS = 9  # what is measured is over before the last one


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def make():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(1024 * (1 + number)) for number in range(4)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps=STEPS):
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(5, 8, device=DEVICE, dtype=next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run(**policy):
    model, optimizer = noria.wrap(*make(), device=DEVICE, window=2, **policy)
    train(model, optimizer)
    found = noria.report(model)
    noria.unwrap(model, optimizer)
    return found, [each.clone() for each in model.state_dict().values()]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NORIA_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "policy",
    [{}, {"update": "backward"}, {"update": "blocking"}, {"activations": "offload"}, {"draft_memory": "1MiB"}],
    ids=str,
)
def test_the_report_shows_what_ops_cost(folder, policy):
    found, _ = run(**policy)
    costs = found.costs
    assert costs is not None and found.costs_measured.startswith("in this run") and "[5, 8]" in found.costs_measured
    assert min(costs.forward_us) > 0 and min(costs.backward_us) > 0 and costs.hooks_us >= 0
    assert {"fetch", "drain"} <= set(costs.gib_s) and min(costs.gib_s.values()) > 0
    drafts = DEVICE == "cuda" and "update" not in policy  # there "auto" drafts all units
    assert bool(costs.draft_gib_s) == (drafts or "draft_memory" in policy)
    assert f"costs, measured {found.costs_measured}" in str(found)


def test_kept_bytes_are_those_of_the_graph(folder):
    """Of a block: its input, and what tanh returns, which two operators keep."""
    found, _ = run()
    assert found.costs.saved == [4 * 5 * (8 + 1024 * (1 + number)) for number in range(4)]
    assert sum(found.costs.saved_by.values()) == sum(found.costs.saved) and found.costs.saved_by["AddmmBackward0"]


def test_the_next_run_starts_with_them(folder):
    first, bits = run()
    model, optimizer = noria.wrap(*make(), device=DEVICE, window=3)
    known = noria.report(model)
    assert known.costs == first.costs and "[5, 8]" in known.costs_measured and known.num_steps == 0
    train(model, optimizer)
    noria.unwrap(model, optimizer)
    assert all(map(torch.equal, bits, model.state_dict().values()))


@pytest.mark.skipif(DEVICE == "cuda" and not _C.has_kernel_images(), reason="this build has no kernels for devices")
def test_a_run_in_which_units_stay_measures_nothing(folder):
    """Visits would seem to take the time of the units that stay beside them."""
    stays = {"resident": "1MiB", "device_memory": "32MiB", "kernel": "fused"}
    found, _ = run(**stays)
    assert found.at_rest and found.costs is None and not list(folder.iterdir())
    first, _ = run(kernel="fused")
    again, _ = run(**stays)
    assert again.at_rest and again.costs == first.costs


def test_a_damaged_file_is_said_in_the_report_and_replaced(folder):
    run()
    [path] = (folder / "costs").iterdir()
    path.write_text("{")
    found, _ = run()
    assert any("not used" in note for note in found.notes)
    assert json.loads(path.read_text())["costs"]["forward_us"] == found.costs.forward_us


def test_the_users_trace_has_all_steps_still(folder, tmp_path):
    found, _ = run(trace=tmp_path / "trace.json")
    assert found.costs is not None
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["name"].startswith("user") for event in events) == STEPS


def test_plan_shows_them(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.path", ["."])
    run()
    assert main(["plan", "--model", f"{__name__}:make", "--window", "2", "--device", DEVICE]) == 0
    shown = capsys.readouterr().out
    assert "costs, measured on" in shown and "kept for backward by operator" in shown and "Tflop/s" not in shown
    assert main(["plan", "--model", f"{__name__}:make", "--window", "2", "--tflops", "1"]) == 0
    assert "costs, measured" not in capsys.readouterr().out


def test_plan_knows_what_fewer_threads_update(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.path", ["."])
    found, _ = run(kernel="fused")
    rates = found.costs.by_threads_gib_s
    most = noria.report(noria.wrap(*make(), device=DEVICE, window=2, kernel="fused")[0]).costs.by_threads_gib_s
    assert rates == most and next(iter(rates)) == "1" and min(rates.values()) > 0
    half = dataclasses.replace(found.costs, by_threads_gib_s={"1": 2.0, "2": 4.0}).with_threads(1)
    assert half is not None and half.gib_s["update"] == found.costs.gib_s["update"] / 2
    assert found.costs.with_threads(1000) is None
    plan = ["plan", "--model", f"{__name__}:make", "--window", "2", "--device", DEVICE, "--kernel", "fused"]
    assert main([*plan, "--cores", "1"]) == 0
    assert "with 1 threads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("policy", "each"),
    [
        ({}, 28),
        ({"state_dtype": "bf16"}, 20),
        ({"dtype": torch.bfloat16}, 26),
        ({"dtype": torch.bfloat16, "state_dtype": "8bit"}, 14 + 16 / 256),
    ],
)
def test_threads_are_tried_with_the_formats_of_the_run(policy, each, folder, monkeypatch):
    tried = []

    def rate(job, update):
        update()
        tried.append(job.bytes)
        return float(len(tried))

    monkeypatch.setattr(update_rates, "_gib_s", rate)
    rates = run(kernel="fused", **policy)[0].costs.by_threads_gib_s
    assert list(rates.values()) == list(range(1, 1 + len(rates)))
    assert tried[: len(rates)] == [each * (4 << 20)] * len(rates)


def test_the_next_run_leaves_torch_what_it_has_not_found(folder):
    run(kernel="fused")
    model, optimizer = noria.wrap(*make(), device=DEVICE, window=2, kernel="fused")
    train(model, optimizer)
    wrapped = wrapped_by(model)
    before = wrapped.recorder.known.costs
    for told in wrapped.run.on_out_of_memory:
        told(1 << 30)
    kept = load_costs(wrapped.context.plan)
    assert kept.costs.workspace >= (1 << 30) - sum(before.saved) > before.workspace
    assert "[5, 8]" in kept.measured and dataclasses.replace(kept.costs, workspace=before.workspace) == before
    for told in wrapped.run.on_out_of_memory:
        told(1 << 20)
    assert load_costs(wrapped.context.plan) == kept  # it knows of more
    noria.unwrap(model, optimizer)
    found, _ = run(kernel="fused")  # the run after that one remembers it, too
    assert found.costs.workspace == kept.costs.workspace


def test_looking_at_a_graph_runs_no_hook_of_the_users(folder):
    """Neither a checkpoint, which would compute again, nor a hook that unpacks."""
    unpacked = []

    def unpack(each):
        unpacked.append(each)
        return each

    model, optimizer = noria.wrap(*make(), device=DEVICE, window=2)
    for _ in range(STEPS):
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each.clone(), unpack):
            loss = model(torch.randn(5, 8, device=DEVICE)).square().mean()
        assert not unpacked
        loss.backward()
        unpacked.clear()
        optimizer.step()
    assert sum(noria.report(model).costs.saved) > 0
    noria.unwrap(model, optimizer)


def _costs_on(rank, size):
    model, optimizer = noria.wrap(*make(), device="cpu", window=2)
    wrapped = wrapped_by(model)
    before = wrapped.recorder.known.costs
    train(model, optimizer)
    after = wrapped.recorder.known.costs
    is_kept = load_costs(wrapped.context.plan).costs == after
    noria.unwrap(model, optimizer)
    return before, after, is_kept


@pytest.mark.skipif(DEVICE != "cpu", reason="ranks of this test compute on the CPU")
def test_ranks_have_the_same_costs(folder):
    first = on_ranks(2, _costs_on)
    (before, after, is_kept), (other_before, other_after, _) = first
    assert before is None and other_before is None
    assert after == other_after and is_kept
    again = on_ranks(2, _costs_on)
    assert again[0][0] == again[1][0] == after


def slow_drafts(monkeypatch: Any, draft_gib_s: float) -> None:
    """Costs are measured, but for updates, which are the wall, and for drafts."""

    def measured(*args: Any) -> MeasuredCosts:
        found = measured_costs(*args)
        gib_s = found.gib_s | {"update": 1e-2}
        return dataclasses.replace(found, gib_s=gib_s, latency_us={}, draft_gib_s=draft_gib_s and 1e-2 * draft_gib_s)

    monkeypatch.setattr("noria.forward.cost_recorder.measured_costs", measured)


def test_slow_drafts_are_not_made_any_more_and_no_bit_changes(folder, monkeypatch):
    def ran(**policy: Any) -> tuple[Any, list[torch.Tensor]]:
        model, optimizer = noria.wrap(*make(), device=DEVICE, kernel="fused", window=2, **policy)
        train(model, optimizer, 14)
        wrapped, report = wrapped_by(model), noria.report(model)
        kept = [each.clone() for each in model.state_dict().values()]
        counts = wrapped.context.engine.updates.draft_counts()
        noria.unwrap(model, optimizer)
        return (wrapped.context.plan, report, counts), kept

    _, without = ran(draft_memory=0)
    for path in (folder / "costs").iterdir():
        path.unlink()
    slow_drafts(monkeypatch, 0.1)
    (plan, report, counts), first = ran(draft_memory="1GiB")
    assert plan.drafted < plan.undo_logs.keys() and any("are drafted" in note for note in report.notes)
    assert counts["kept"] > 0  # those of the first steps
    assert all(map(torch.equal, first, without))
    slow_drafts(monkeypatch, 0.0)  # as a run without drafts measures them
    for _ in range(2):
        (lean, report, counts), again = ran(draft_memory="1GiB")
        assert lean.drafted == plan.drafted == lean.undo_logs.keys() and lean.home_bytes < plan.home_bytes
        assert report.costs.draft_gib_s == pytest.approx(1e-3)
        assert all(map(torch.equal, again, without))


def _drafts_on(rank, size):
    with pytest.MonkeyPatch.context() as patch:
        slow_drafts(patch, [0.1, 1.0][rank])  # rank 1 would draft all
        model, optimizer = noria.wrap(*make(), device="cpu", kernel="fused", draft_memory="1GiB", window=2)
        train(model, optimizer, 14)
    wrapped = wrapped_by(model)
    found = sorted(wrapped.context.plan.drafted), wrapped.recorder.known.costs
    kept = [each.clone() for each in model.state_dict().values()]
    noria.unwrap(model, optimizer)
    return *found, kept


@pytest.mark.skipif(DEVICE != "cpu", reason="ranks of this test compute on the CPU")
def test_ranks_with_different_costs_draft_the_same_units(folder):
    for _ in range(2):
        (drafted, costs, kept), (other_drafted, other_costs, other_kept) = on_ranks(2, _drafts_on)
        assert drafted == other_drafted and costs == other_costs and len(drafted) < 4
        assert all(map(torch.equal, kept, other_kept))


def all_or_none(planned, costs):
    """All units are drafted if forwards are long."""
    drafted = frozenset(planned.undo_logs if costs.elements > 400 else ())
    return None if drafted == planned.drafted else dataclasses.replace(planned, drafted=drafted)


def _drafts_anew_on(rank, size):
    """Rank 1 gets longer inputs in mid-run, then shorter ones again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("noria.wrapped.choose_again", all_or_none)
        patch.setattr("noria.forward.cost_recorder._LOOKED_AT", 4)
        model, optimizer = noria.wrap(*make(), device="cpu", kernel="fused", draft_memory="1GiB", window=2)
        wrapped, found = wrapped_by(model), []
        for batch in ([5] * 14, [5 + 400 * rank] * 8, [5] * 8):
            for rows in batch:
                model(torch.randn(rows, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append((sorted(wrapped.context.plan.drafted), wrapped.recorder.known))
    kept = [each.clone() for each in model.state_dict().values()]
    noria.unwrap(model, optimizer)
    return found, kept


@pytest.mark.skipif(DEVICE != "cpu", reason="ranks of this test compute on the CPU")
def test_ranks_with_different_steps_choose_anew_alike(folder):
    (found, kept), (other_found, other_kept) = on_ranks(2, _drafts_anew_on)
    assert found == other_found and all(map(torch.equal, kept, other_kept))
    first, longer, shorter = (known.costs for _, known in found)
    assert longer.forward_us > first.forward_us and "scaled to inputs of now" in found[1][1].measured
    assert shorter.elements == pytest.approx(first.elements)
    assert [drafted for drafted, _ in found] == [[], [0, 1, 2, 3], []]


class UsesItsEmbedding(nn.Module):
    """The head computes with the weight of a unit that has left the device when the graph is looked at."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList(Block(64) for _ in range(3))

    def forward(self, x):
        x = x @ self.embed.weight
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.embed.weight)


def test_looking_touches_no_weight_and_keeps_no_graph(folder, monkeypatch):
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = torch.ones(3)
            kept.append(weakref.ref(ctx.held))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    torch.manual_seed(0)
    kept: list[Any] = []
    model = UsesItsEmbedding()
    optimizer = torch.optim.AdamW(model.parameters())
    noria.wrap(model, optimizer, device=DEVICE, window=2)
    context, own = wrapped_by(model).context, torch.Tensor.untyped_storage
    weights, touched = {_C.storage_of(slot.parameter) for slot in context.slots}, []

    def untyped_storage(tensor):
        touched.append(_C.storage_of(tensor) in weights)
        return own(tensor)

    monkeypatch.setattr(torch.Tensor, "untyped_storage", untyped_storage)
    for _ in range(STEPS):
        loss = Kept.apply(model(torch.randn(5, 8, device=DEVICE))).square().mean()
        loss.backward()
        del loss
        assert kept.pop()() is None
        optimizer.step()
        optimizer.zero_grad()
    assert noria.report(model).costs.saved and touched and not any(touched)  # else each later visit would be compared
    noria.unwrap(model, optimizer)


def test_a_count_that_fails_ends_no_training(folder, monkeypatch):
    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr("noria.forward.saved_bytes._kept_by", broken)
    found, _ = run()
    assert found.costs is not None


def test_backwards_of_a_step_are_counted(folder):
    for number in (1, 3):
        model, optimizer = noria.wrap(*make(), device=DEVICE, window=2)
        for _ in range(STEPS):
            for _ in range(number):
                model(torch.randn(5, 8, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert noria.report(model).costs.backwards == number
        noria.unwrap(model, optimizer)


def test_no_home_directory_means_no_cache(monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NORIA_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", none)
    found, _ = run()
    assert found.costs is not None
