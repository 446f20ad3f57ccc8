"""The command line: plans without memory, diagnoses, traces summed up, and misuse answered in words."""

import dataclasses
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import noria
import pytest
import torch
from noria import _C
from noria.cli import main
from noria.doctor import diagnose
from noria.planning import machines
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.planning.what_if import break_even_tokens, changes, compute_us, largest_model, simulated, wall
from noria.testing import on_machine
from noria.trace_file import covered, read_trace, whole_steps
from noria.wrap import plan_elsewhere
from torch import nn

SPEEDS = ["--fetch-gib-s", "2", "--drain-gib-s", "3", "--update-gib-s", "5", "--tflops", "1", "--tokens", "512"]


class Chain(nn.Module):
    def __init__(self, num_blocks=6, width=16):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_blocks))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def factories(monkeypatch):
    """A module `made_here` that --model can name."""
    module = types.ModuleType("made_here")
    module.chain = Chain

    def with_optimizer():
        model = Chain()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    module.with_optimizer = with_optimizer
    module.no_model = lambda: "a string"
    monkeypatch.setitem(sys.modules, "made_here", module)
    return module


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# ---- plan ----------------------------------------------------------------------------------------------------------


def test_plan_of_a_model_without_memory_is_the_plan_of_the_real_one(capsys, factories):
    status, out, _ = run(capsys, "plan", "--model", "made_here:chain", "--window", 3, "--device", "cpu", *SPEEDS)
    assert status == 0
    model = Chain()
    planned = noria.plan(model, torch.optim.AdamW(model.parameters()), window=3, device="cpu")
    assert out.startswith(str(planned) + "\n")
    assert planned.passes["forward"].num_fetches == 7  # it says something: one per unit
    with torch.device("meta"):
        on_meta = Chain(num_blocks=64, width=16384)  # 64 GiB
    assert noria.plan(on_meta, device="cpu").home_bytes > 64 << 30


def test_a_model_without_memory_can_be_planned_and_wrapped_but_not_used():
    with torch.device("meta"):
        model = Chain()
    noria.plan(model, device="cpu")
    assert model.embed.weight.device.type == "meta"
    noria.wrap(model, device="cpu")
    assert model.state_dict()["embed.weight"].is_meta  # loaders look at names and shapes
    with pytest.raises(noria.UsageError, match=r"embed\.weight.*meta device"):
        noria.weights(model)


def test_plan_reads_a_config_of_transformers(capsys, tmp_path):
    pytest.importorskip("transformers")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "vocab_size": 32000}
    config |= {"num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 11008}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        status, out, _ = run(
            capsys, "plan", "--hf-config", path, "--dtype", "bf16", "--kernel", "fused", "--device", "cpu",
            "--device-memory", "4GiB", "--check", *SPEEDS,
        )  # fmt: skip
        assert status == 0
        assert "51 units, 48 of them blocks" in out
        assert "model.layers.0-47 " in out and "model.layers.1 " not in out  # equal units share a line
        assert "low bits" in out
        assert out.endswith("every conflicting pair is ordered\n")


def test_plan_without_waits_is_found_wanting(capsys, factories, monkeypatch):
    arguments = ["plan", "--model", "made_here:chain", "--window", 2, "--device", "cpu", "--check", *SPEEDS]
    status, out, _ = run(capsys, *arguments)
    assert (status, "every conflicting pair is ordered" in out) == (0, True)
    derive = _C.derive
    monkeypatch.setattr(_C, "derive", lambda ops, buffers: [[] for _ in derive(ops, buffers)])
    status, out, _ = run(capsys, *arguments)
    assert status == 1
    assert "every conflicting pair is ordered" not in out
    assert "nothing orders op" in out
    assert "(update of unit 0)" in out  # the step before is part of what is proved


def test_every_kind_of_wait_in_the_planned_step_is_missed_when_it_is_left_out(factories):
    model = Chain()
    planned = noria.plan(model, torch.optim.AdamW(model.parameters()), window=2, device="cpu")
    step = PlannedStep(planned, 512, PlanSpeeds(2, 3, 5, 1))
    assert step.check() == []
    pairs = {(step.ops[giver].verb, step.ops[i].verb) for i, on in enumerate(step.waits) for giver in on}
    assert {("update", "fetch"), ("fetch", "forward"), ("fetch", "backward"), ("backward", "drain")} <= pairs
    complete = step.waits
    for pair in pairs:
        step.waits = [
            [giver for giver in on if (step.ops[giver].verb, step.ops[i].verb) != pair] for i, on in enumerate(complete)
        ]
        assert step.check(), f"{pair} is not needed"


def test_simulated_step_takes_the_time_of_its_bytes_and_is_never_shorter_than_the_bound():
    model = Chain()
    planned = noria.plan(model, torch.optim.AdamW(model.parameters()), window=3, device="cpu")
    fetched = {name: each.fetched for name, each in planned.passes.items()}
    gradients = sum(unit.gradients for unit in planned.units)
    for fetch, drain, update, tflops in ((1e-3, 1, 1, 1), (1, 1e-3, 1, 1), (1, 1, 1e-3, 1), (1, 1, 1, 1e-6)):
        step = PlannedStep(planned, 512, PlanSpeeds(fetch, drain, update, tflops))
        times = step.times()
        ops = len(step.ops)  # each span is rounded to microseconds
        assert abs(times.forward_fetch_us - 1e6 * fetched["forward"] / (fetch * 2**30)) <= ops
        assert abs(times.backward_fetch_us - 1e6 * fetched["backward"] / (fetch * 2**30)) <= ops
        assert abs(times.drain_us - 1e6 * gradients / (drain * 2**30)) <= ops
        assert abs(times.update_us - 1e6 * 28 * sum(p.numel() for p in model.parameters()) / (update * 2**30)) <= ops
        flops = 2 * 512 * sum(p.numel() for block in model.blocks for p in block.parameters())
        assert abs(times.forward_us - flops / tflops / 1e6) <= ops
        assert abs(times.backward_us - 2 * flops / tflops / 1e6) <= ops
        end_us = max(span.end_us for span in step.spans)
        assert end_us + ops >= max(times.update_us, times.forward_us + times.backward_us, times.drain_us)
        assert end_us > 1000


def test_each_update_mode_has_a_simulated_step_of_its_own():
    """Updates take longer than a forward, and as long as forward and backward together."""
    model = Chain()
    weights = sum(p.numel() for block in model.blocks for p in block.parameters())
    whole_us, tflops = 1e6, 6 * 512 * weights / 1e6 / 1e6
    speeds = PlanSpeeds(1e9, 1e9, 28 * sum(p.numel() for p in model.parameters()) / 2**30, tflops)
    modes = {"drafts": {"draft_memory": "1GiB"}, "deferred": {"draft_memory": 0}} | {
        update: {"update": update} for update in ("backward", "blocking")
    }
    steps = {
        name: PlannedStep(
            noria.plan(model, torch.optim.AdamW(model.parameters()), device="cpu", kernel="fused", **policy),
            512,
            speeds,
        )
        for name, policy in modes.items()
    }
    assert all(step.check() == [] for step in steps.values())
    times = {name: step.step_us / whole_us for name, step in steps.items()}
    assert 1 <= times["backward"] <= times["drafts"] < 1.5 < times["deferred"] < times["blocking"]
    assert times["blocking"] == pytest.approx(2, abs=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here a plan is of the GPU that is here")
def test_a_plan_with_device_memory_is_of_a_gpu_elsewhere(capsys, factories):
    arguments = ["plan", "--model", "made_here:chain", "--device-memory", "1GiB", "--host-memory", "1TiB", *SPEEDS]
    status, out, _ = run(capsys, *arguments)
    assert status == 0 and "cuda:0" in out and "drafts: of" in out
    status, out, _ = run(capsys, *arguments, "--device", "cpu")
    assert "cuda:0" not in out


def test_a_plan_of_several_micro_batches_simulates_their_backwards(capsys, factories):
    arguments = ["plan", "--model", "made_here:chain", "--device", "cpu", *SPEEDS]
    status, once, _ = run(capsys, *arguments)
    assert status == 0 and "micro-batches" not in once
    status, often, _ = run(capsys, *arguments, "--micro-batches", 8, "--check")
    assert status == 0 and "512 tokens in 8 micro-batches" in often and "every conflicting pair is ordered" in often

    def num_drains(text):
        return int(next(line for line in text.splitlines() if line.split()[:1] == ["drain"]).split()[1])

    assert num_drains(often) == 8 * num_drains(once)
    for wrong in (0, 513):
        status, _, told = run(capsys, *arguments, "--micro-batches", wrong)
        assert status == 2 and f"found {wrong}" in told


def test_modules_that_share_a_unit_take_the_time_of_their_own_weights():
    """Two layers that are no blocks, and a head that has the embedding's weight."""
    model = nn.ModuleDict(
        {"embed": nn.Embedding(32, 16), "up": nn.Linear(16, 64, bias=False), "head": nn.Linear(16, 32)}
    )
    model["head"].weight = model["embed"].weight
    planned = noria.plan(model, torch.optim.AdamW(model.parameters()), device="cpu")
    times = PlannedStep(planned, 512, PlanSpeeds(1, 1, 1, 1e-6)).times()
    weights = 16 * 64 + 16 * 32 + 32
    assert abs(times.forward_us - 2 * 512 * weights / 1e-6 / 1e6) <= 9


def test_a_weight_that_two_modules_use_takes_its_time_in_each():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    model[2].weight = model[0].weight
    planned = noria.plan(model, torch.optim.AdamW(model.parameters()), device="cpu")
    assert len(planned.units) == 2
    times = PlannedStep(planned, 512, PlanSpeeds(1, 1, 1, 1e-6)).times()
    product_us = 2 * 512 * 64 * 64 / 1e-6 / 1e6
    assert abs(times.forward_us - 3 * product_us) <= 3
    assert abs(times.backward_us - 6 * product_us) <= 3


def test_plan_takes_the_optimizer_from_the_factory_or_from_the_command_line(capsys, factories):
    purposes = ("first moments", "second moments", "optimizer state")

    def state_of(*arguments):
        status, out, _ = run(capsys, "plan", "--device", "cpu", *SPEEDS, *arguments)
        assert status == 0
        return [line.split()[-2] for line in out.splitlines() if any(purpose in line for purpose in purposes)]

    weights = 6 * (16 * 16 + 128) * 4 + 32 * 16 * 4  # each bias takes 512 bytes
    once, twice = f"{weights / 1024:.1f}", f"{2 * weights / 1024:.1f}"
    assert state_of("--model", "made_here:with_optimizer") == [once]
    assert state_of("--model", "made_here:chain", "--optimizer", "SGD(momentum=0.5)") == [once]
    assert state_of("--model", "made_here:chain", "--optimizer", "SGD") == []
    assert state_of("--model", "made_here:chain") == [once, once]
    assert state_of("--model", "made_here:chain", "--kernel", "torch") == [twice]
    half = f"{weights / 2 / 1024:.1f}"
    assert state_of("--model", "made_here:chain", "--state-dtype", "bf16") == [half, half]
    assert state_of("--model", "made_here:with_optimizer", "--optimizer", "AdamW") == [once, once]
    assert state_of("--model", "made_here:chain", "--optimizer", "none") == []


# ---- other machines ------------------------------------------------------------------------------------------------


def on_meta(num_blocks=12, width=512):
    with torch.device("meta"):
        return Chain(num_blocks, width)


def planned_on_meta(num_blocks=12, **policy):
    model = on_meta(num_blocks)
    policy = {"device": "cpu", "kernel": "fused", **policy}
    return noria.plan(model, torch.optim.AdamW(model.parameters()), **policy)


def test_a_plan_for_another_machine_says_what_limits_it_and_what_would_help(capsys, factories, tmp_path):
    factories.big = lambda: Chain(12, 512)
    picture, trace = tmp_path / "wheel.svg", tmp_path / "trace.json"
    status, out, _ = run(
        capsys, "plan", "--model", "made_here:big", "--gpu", "rtx 4090", "--cores", 16, "--dram-gib-s", 70,
        "--host-memory", "1GiB", "--tokens", 4096, "--picture", picture, "--trace", trace, "--check",
    )  # fmt: skip
    assert status == 0
    for text in (
        "blocks.0-11",
        "cuda:0",
        "tokens/s; ",
        "the wall: ",
        "break-even: from ",
        "largest model",
        "blocks like",
    ):
        assert text in out, text
    gains = [float(line.split()[-2]) for line in out.splitlines() if line.endswith(" x")]
    assert len(gains) > 5 and gains == sorted(gains, reverse=True)
    assert picture.read_text().lstrip().startswith("<?xml")
    status, out, _ = run(capsys, "trace", trace)
    assert status == 0 and "3 whole steps" in out


def test_units_that_stay_are_planned_for_another_machine_too(capsys, factories):
    factories.big = lambda: Chain(12, 512)
    common = ("plan", "--model", "made_here:big", "--gpu", "H100", "--host-memory", "1GiB", "--tokens", 64)
    times = []
    little = ("--device-memory", "60MiB")
    for more in (("--resident", "none"), (*little, "--resident", "none"), little):
        status, out, _ = run(capsys, *common, *more)
        assert status == 0
        [text] = [line for line in out.splitlines() if line.startswith("step ")]
        times.append(float(text.split()[1]))
        assert ("of these stay on the device" in out) == (more == little)
    assert times[2] < 0.9 * times[1]
    status, out, _ = run(capsys, *common, "--resident", "all")
    assert status == 0 and "all of the model stays on the device" in out


def test_a_model_that_the_host_cannot_hold_is_told_so_with_the_largest_that_it_can(capsys, factories):
    factories.big = lambda: Chain(12, 512)
    status, out, _ = run(capsys, "plan", "--model", "made_here:big", "--gpu", "RTX 3090", "--host-memory", "40MiB")
    assert status == 1
    assert "does not fit: noria expected host_memory of at least" in out
    assert "largest model of this shape in 40.0 MiB of host memory: " in out


@pytest.mark.parametrize("policy", [{}, {"update": "backward"}, {"kernel": "torch"}, {"state_dtype": "8bit"}], ids=str)
def test_the_largest_model_fits_and_one_block_more_does_not(policy):
    budget = 64 << 20
    found = largest_model(planned_on_meta(**policy), budget)
    assert found.num_parameters == sum(p.numel() for p in on_meta(found.num_blocks).parameters())
    planned_on_meta(found.num_blocks, **policy, host_memory=budget)
    with pytest.raises(noria.UsageError, match="host_memory of at least"):
        planned_on_meta(found.num_blocks + 1, **policy, host_memory=budget)


@pytest.mark.parametrize("num_blocks", [2, 12, 200])  # with few blocks each unit's gradient has a place of its own
def test_so_it_does_beside_units_that_are_much_larger(num_blocks):
    def planned(num_blocks, host_memory):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4096, 128), Chain(num_blocks, 128).blocks, nn.Linear(128, 4096))
        policy = {"device": "cpu", "update": "backward", "host_memory": host_memory}
        return noria.plan(model, torch.optim.AdamW(model.parameters()), **policy)

    budget = planned(num_blocks, 1 << 30).home_bytes
    in_place, in_slots = planned(2, 1 << 30), planned(245, 70 << 20)
    assert in_place.ring.num_slots == 0 and in_slots.ring.num_slots > 0
    for each in (in_place, in_slots):
        found = largest_model(each, budget)
        planned(found.num_blocks, budget)
        with pytest.raises(noria.UsageError, match="host_memory of at least"):
            planned(found.num_blocks + 1, budget)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here a plan is of the GPU that is here")
def test_so_it_does_beside_a_gpu_where_copies_may_need_staging_memory():
    def planned(num_blocks, host_memory):
        model = on_meta(num_blocks)
        return plan_elsewhere(
            model, [torch.optim.AdamW(model.parameters())], 1 << 30, device="cuda", host_memory=host_memory
        )

    for budget in (128 << 20, 200 << 20, 331 << 20):
        found = largest_model(planned(12, 1 << 30), budget)
        least = planned(found.num_blocks, budget)
        assert least.home_bytes + _C.STAGING_BYTES <= budget  # drafts have left room for it
        with pytest.raises(noria.UsageError, match="host_memory of at least"):
            planned(found.num_blocks + 1, budget)


MACHINE = machines.Machine(fetch=10, drain=10, tflops=1, host=20, cores=2, both_ways=0.9)


def test_from_the_break_even_on_a_step_hides_all_but_its_compute():
    planned = planned_on_meta(draft_memory="1GiB")
    tokens = break_even_tokens(planned, MACHINE)
    steps = [simulated(planned, MACHINE, number) for number in (tokens, tokens * 9 // 10)]
    ratios = [step.step_us / compute_us(step) for step in steps]
    assert ratios[0] <= 1.05 < ratios[1]


@pytest.mark.parametrize(
    ("slow", "named", "better"),
    [
        ({"tflops": 1e-3}, "compute of the device", "a device twice as fast"),
        ({"fetch": 1e-2, "drain": 1e-2}, "fetches over the link", "a link twice as fast"),
        ({"host": 1e-2}, "memory of the host", "host memory twice as fast"),
    ],
)
def test_the_wall_is_what_is_slow_and_a_faster_one_helps_most(slow, named, better):
    machine = dataclasses.replace(MACHINE, **slow)
    planned = planned_on_meta(draft_memory="1GiB", window=3)
    step = simulated(planned, machine, 64)
    name, share = wall(step)
    assert name == named and 0.8 < share <= 1.01
    all_changes = changes(step, machine, lambda fields: planned_on_meta(window=3, **fields))
    gains = {each.what: each.gain for each in all_changes if "twice" in each.what and each.tokens == 64}
    assert max(gains, key=gains.get) == better and gains.pop(better) > 1.6
    assert all(0.99 < gain < 1.05 for gain in gains.values())


@pytest.mark.parametrize(
    ("disk", "named"),
    [
        ({"disk_read": 1e-2, "disk_write": 1}, "reads from disk"),
        ({"disk_read": 1, "disk_write": 1e-2}, "writes to disk"),
    ],
)
def test_a_slow_disk_is_the_wall_and_a_faster_one_helps_most(disk, named):
    machine = dataclasses.replace(MACHINE, **disk)
    planned = planned_with_files()
    step = simulated(planned, machine, 64)
    name, share = wall(step)
    assert name == named and 0.8 < share <= 1.01
    all_changes = changes(step, machine, lambda fields: planned_with_files(**fields))
    gains = {each.what: each.gain for each in all_changes if "twice" in each.what and each.tokens == 64}
    assert max(gains, key=gains.get) == "disks twice as fast" and gains["disks twice as fast"] > 1.8
    no_files = planned_on_meta()
    assert not any(
        "disks" in each.what for each in changes(simulated(no_files, MACHINE, 64), MACHINE, lambda _: no_files)
    )


def planned_with_files(num_blocks=12, **policy):
    return planned_on_meta(num_blocks, **{"files": "/never/made", "host_memory": 40 << 20, **policy})


@pytest.mark.parametrize("update", ["auto", "backward"])
def test_the_largest_model_with_files_fits_and_one_block_more_does_not(update):
    budget = 64 << 20
    found = largest_model(planned_with_files(update=update), budget)
    assert found.num_blocks > largest_model(planned_on_meta(update=update), budget).num_blocks
    planned_with_files(found.num_blocks, update=update, host_memory=budget)
    with pytest.raises(noria.UsageError, match="host_memory of at least"):
        planned_with_files(found.num_blocks + 1, update=update, host_memory=budget)
    of_8_blocks = 8 * max(planned_with_files(update=update).files.sizes.values())
    assert (
        largest_model(planned_with_files(update=update, file_memory=of_8_blocks + (4 << 20)), budget).num_blocks <= 10
    )


def test_a_plan_with_files_says_what_lies_there_and_how_long_the_disk_lasts(capsys, factories, tmp_path):
    factories.big = lambda: Chain(12, 512)
    arguments = ["plan", "--model", "made_here:big", "--device", "cpu", "--kernel", "fused", "--host-memory", 40 << 20]
    arguments += ["--files", tmp_path / "run", *SPEEDS, "--check"]
    status, out, _ = run(capsys, *arguments)
    planned = planned_with_files(files=tmp_path / "run")
    assert status == 0 and str(planned) in out and not (tmp_path / "run").exists()
    assert "of 13 units lie in files" in out
    lanes = {
        line.split()[0]: int(line.split()[1]) for line in out.splitlines() if line.startswith(("  read", "  write"))
    }
    assert lanes == dict.fromkeys(("read", "write"), len(planned.files.sizes))
    assert "of disks 2.5 read and 1.2 written" in out
    assert "at this rate a disk rated for 600 TBW lasts " in out and "the wall: " in out
    slow = ["--disk-read-gib-s", 1, "--disk-write-gib-s", 0.001]
    status, out, _ = run(capsys, *arguments, "--files", tmp_path / "two", *slow)
    assert status == 0 and "of disks 2.0 read and 0.0 written" in out  # two folders, so two disks
    assert "at this rate each of 2 disks rated for 600 TBW" in out and "the wall: writes to disk, 100%" in out
    status, out, _ = run(capsys, *arguments[:-5], "--files", tmp_path, "--file-memory", "10MiB", *SPEEDS)
    assert status == 2  # that is too little
    status, out, _ = run(capsys, "plan", "--model", "made_here:big", "--device", "cpu", *SPEEDS)
    assert status == 0 and "TBW" not in out and "of disks" not in out and "the wall: " in out


def test_a_device_is_known_by_its_name_or_a_part_of_it():
    for name in ("RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "4090"):
        assert machines.device_named(name) is machines.DEVICES["RTX 4090"]
    for device in machines.DEVICES.values():
        assert 0 < device.free_bytes < device.memory_gib * 2**30
        assert 5 < device.link_gib_s < 60
    assert machines.device_named("H200").link_gib_s == pytest.approx(55.1e9 / 2**30, rel=0.06)  # measured


def test_the_page_about_what_if_has_every_device():
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    for name, device in machines.DEVICES.items():
        generation, lanes = device.pcie
        memory = f"{device.memory_gib} | {device.memory_gb_s}"
        numbers = f"{memory} | {device.peak_tflops} | PCIe {generation} x{lanes}"
        assert f"| {name} | {numbers} | {device.link_gib_s:.1f} | {device.host_gib_s} |" in page, name


def test_fewer_cores_update_no_faster_than_they_compute():
    few, many = (dataclasses.replace(MACHINE, cores=cores, host=1000.0) for cores in (1, 100))
    for state_dtype in ("fp32", "bf16", "8bit"):
        speeds = few.speeds(state_dtype)
        assert speeds.draft < speeds.update < 50
        assert many.speeds(state_dtype).update == min(100 * speeds.update, 1000)
        assert dataclasses.replace(few, update=7.0).speeds(state_dtype).draft == 7.0


@pytest.mark.parametrize("draft_memory", [0, 100_000, "1GiB"], ids=str)
def test_the_bounds_are_those_of_every_mode_however_much_is_drafted(draft_memory):
    """Cores are the limit, and drafts take them longer. Yet updates are no slower because other units are drafted."""
    machine = dataclasses.replace(MACHINE, host=1000.0, cores=1)
    drafting, plain = (simulated(planned_on_meta(draft_memory=each), machine, 64) for each in (draft_memory, 0))
    assert _C.drafting_bound_us(drafting.times()) == _C.drafting_bound_us(plain.times())
    backward = simulated(planned_on_meta(update="backward"), machine, 64)
    assert _C.drafting_bound_us(drafting.times()) <= min(backward.step_us, drafting.step_us) + 2
    rates = {span.verb: span.bytes / (span.end_us - span.start_us) for span in drafting.spans if span.lane == "update"}
    wanted = {"update": 30.9, "draft": 14.7}
    for verb, rate in rates.items():
        assert rate * 1e6 / 2**30 == pytest.approx(wanted[verb], rel=0.05)


def test_a_step_that_takes_no_time_is_printed_too(capsys, factories):
    arguments = ["plan", "--model", "made_here:chain", "--gpu", "H100", "--host-memory", "1GiB", "--tokens", 1]
    status, out, _ = run(capsys, *arguments, "--optimizer", "none")
    assert status == 0 and "tokens/s" in out and "update=" not in out


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["plan", "--hf-config", "/nowhere/at/all"], "none at /nowhere/at/all"),
        (["plan", "--model", "no_such_module_here:make"], "no_such_module_here"),
        (["plan", "--model", "made_here:missing"], "no such name"),
        (["plan", "--model", "made_here"], "module:function"),
        (["plan", "--model", "made_here:no_model"], "found str"),
        (["plan", "--model", "made_here:chain", "--optimizer", "Adamant"], "found Adamant"),
        (["plan", "--model", "made_here:chain", "--optimizer", "SGD(0.1)"], "by name"),
        (["plan", "--model", "made_here:chain", "--optimizer", "SGD(momentum=)"], "by name"),
        (["plan", "--model", "made_here:chain", "--device-memory", "8 bananas"], "8 bananas"),
        (
            ["plan", "--model", "made_here:chain", "--device-memory", "600", "--device", "cpu"],
            "Remedy: raise device_memory",
        ),
        (["plan", "--model", "made_here:chain", "--window", "1"], "window of 2 units"),
        (["plan", "--model", "made_here:chain", "--pipeline", "0"], "--pipeline of 2 or more, but found 0."),
        (["plan", "--model", "made_here:chain", "--pipeline", "1"], "--pipeline of 2 or more, but found 1."),
        (
            ["plan", "--model", "made_here:chain", "--pipeline", "2", "--micro-batches", "0"],
            "--micro-batches of 1 or more, but found 0.",
        ),
        (
            ["plan", "--model", "made_here:chain", "--pipeline", "2", "--micro-batch-size", "0"],
            "--micro-batch-size of 1 or more, but found 0.",
        ),
        (
            ["plan", "--model", "made_here:chain", "--pipeline", "2", "--micro-batch-size", "-1"],
            "--micro-batch-size of 1 or more, but found -1.",
        ),
        (
            ["plan", "--model", "made_here:chain", "--pipeline", "2", "--length", "0"],
            "--length of 1 or more, but found 0.",
        ),
        (["plan", "--model", "made_here:chain", "--gpu", "RTX 4090"], "--host-memory with an amount"),
        (["plan", "--model", "made_here:chain", "--gpu", "RTX 4090", "--host-memory", "auto"], "found auto"),
        (["plan", "--model", "made_here:chain", "--pipeline", "2", "--picture", "a.svg"], "of one device"),
        (
            ["plan", "--model", "made_here:chain", "--gpu", "RTX 409O", "--host-memory", "1GiB"],
            "did you mean RTX 4090?",
        ),
        (["plan", "--model", "made_here:chain", "--gpu", "RTX", "--host-memory", "1GiB"], "a device that noria knows"),
        (["plan", "--model", "made_here:chain", *SPEEDS, "--picture", "/tmp/wheel.txt"], "ends in .svg"),
        (["plan", "--model", "made_here:chain", *SPEEDS, "--picture", "/nowhere/wheel.svg"], "can be written"),
        (["plan", "--model", "made_here:chain", *SPEEDS, "--trace", "/nowhere/trace.json"], "can be written"),
        (["trace", "/nowhere.json"], "No such file"),
        (
            ["plan", "--model", "made_here:chain", "--gpu", "H100", "--host-memory", "1GiB", "--device", "cpu"],
            "leave --device out",
        ),
        (
            [
                "plan",
                "--model",
                "made_here:chain",
                "--gpu",
                "H100",
                "--host-memory",
                "1GiB",
                "--device-memory",
                "90GiB",
            ],
            "lower it",
        ),
        (["plan", "--model", "made_here:chain", "--gpu", "H100", "--host-memory", "lots"], "lots"),
        (["plan", "--model", "made_here:chain", "--picture", "a.svg", "--trace", "a.svg"], "two files"),
        (["trace"], "neither"),
        (["trace", "a.json", "--diff", "a.json", "b.json"], "both"),
    ],
)
def test_misuse_is_answered_with_expected_found_and_remedy_and_exit_code_2(capsys, factories, arguments, found):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert err.startswith(f"noria {arguments[0]}: noria expected ")
    assert found in err
    assert ". Remedy: " in err


def test_command_in_a_process_of_its_own_prints_no_traceback(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    command = [sys.executable, "-m", "noria.cli", "trace", str(tmp_path / "other.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "as noria writes it" in done.stderr
    assert "Traceback" not in done.stderr


# ---- doctor --------------------------------------------------------------------------------------------------------


def test_doctor_says_what_the_engine_and_the_system_say(capsys):
    status, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["instruction_sets"] == _C.instruction_sets()
    assert found["versions"]["torch"] == torch.__version__
    assert found["backends"]["host"] == "ready"
    if _C.cuda_absent_reason():
        assert found["backends"]["cuda"] == f"absent: {_C.cuda_absent_reason()}"
        assert any("no CUDA device" in lack for lack in found["missing"])
    assert all(speed > 0 for speed in found["speeds"].values())
    assert found["cores"] >= 1
    if sys.platform == "linux":
        assert 0 < found["memory_available"] <= found["memory_total"]


def test_doctor_prints_every_fact_on_a_line_of_its_own(capsys):
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    for name, value in diagnose().rows():
        if not any(word in name for word in ("copy", "fetch", "update", "memory")):  # those may have changed meanwhile
            assert any(line.startswith(name) and line.endswith(value) for line in out.splitlines()), name


def test_doctor_says_how_files_are_read_and_whether_a_folder_can_have_them(capsys, monkeypatch, tmp_path):
    own, others = tmp_path / "own", tmp_path / "others"
    own.mkdir(mode=0o700)
    others.mkdir()
    others.chmod(0o777)
    folders = ["--files", own, "--files", others, "--files", tmp_path / "none"]
    found = {}
    for reason in ("", "io_uring_setup: Operation not permitted"):
        monkeypatch.setattr(_C, "uring_absent_reason", lambda reason=reason: reason)
        status, out, _ = run(capsys, "doctor", "--json", *folders)
        assert status == 0
        found = json.loads(out)
        assert ("threads" in found["files"]["files"]) == bool(reason) and reason in found["files"]["files"]
        assert any("liburing-dev" in lack and "seccomp" in lack for lack in found["missing"]) == bool(reason)
    assert re.search("page cache", found["files"][f"files in {own}"])
    assert "all users can write to" in found["files"][f"files in {others}"]
    assert found["files"][f"files in {tmp_path / 'none'}"] == "no such folder" and not (tmp_path / "none").exists()


# ---- trace ---------------------------------------------------------------------------------------------------------


def written(tmp_path, spans, names=("a", "b")):
    trace = _C.Trace(100)
    for span in spans:
        trace.add(_C.Span(*span))
    path = tmp_path / "trace.json"
    path.write_text(trace.chrome_json(list(names)))
    return path


def test_trace_says_who_waited_for_whom_and_how_long(capsys, tmp_path):
    path = written(
        tmp_path,
        [
            (0, "fetch", "fetch", 0, 0, 1000, 1 << 20),
            (1, "compute", "forward", 0, 1000, 2000, 0, [0]),
            (2, "fetch", "fetch", 1, 1000, 5000, 1 << 20),
            (3, "compute", "forward", 1, 5000, 6000, 0, [2]),  # stood 3 ms
            (4, "compute", "backward", 1, 6000, 9000),
            (5, "drain", "drain", 1, 9000, 9500, 1 << 20, [4]),  # the lane's first: it had nothing to do before
        ],
    )
    spans = {span.name: span for span in read_trace(path)}
    assert spans["forward b"].idle == 3000
    assert spans["forward b"].givers == [spans["fetch b"]]
    assert [span.idle for name, span in spans.items() if name != "forward b"] == [0] * 5
    status, out, _ = run(capsys, "trace", path)
    assert status == 0
    assert "fetch -> forward  3.0 ms" in out
    assert out.splitlines()[0].startswith("9.5 ms of ")
    compute = next(line.split() for line in out.splitlines() if line.startswith("  compute"))
    assert compute == ["compute", "3", "5.0", "ms", "53%", "3.0", "ms"]


def test_trace_knows_every_lane(capsys, tmp_path):
    spans = [(number, lane, "update", 0, 0, 1000) for number, lane in enumerate(_C.LANES)]
    status, out, err = run(capsys, "trace", written(tmp_path, spans))
    assert status == 0, err
    table = out.partition("waits by kind")[0].splitlines()[1:]
    assert [row.split()[0] for row in table if "1.0 ms" in row] == list(_C.LANES)


def test_trace_counts_what_a_lane_covers_not_what_overlaps(tmp_path):
    path = written(tmp_path, [(0, "update", "update", 0, 0, 100), (1, "update", "update", 1, 50, 200)])
    assert covered(read_trace(path)) == 200


def test_trace_of_a_training_run_shows_as_many_fetches_per_step_as_the_report(capsys, tmp_path):
    torch.manual_seed(0)
    model, path = Chain(), tmp_path / "trace.json"
    optimizer = torch.optim.AdamW(model.parameters())
    with on_machine(update_threads=1):
        noria.wrap(model, optimizer, device="cpu", window=3, trace=path, kernel="fused")
    for _ in range(6):
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    passes = noria.report(model).passes
    per_step = sum(each.fetches for each in passes)
    assert per_step == sum(each.planned_fetches for each in passes) > 7
    noria.unwrap(model, optimizer)
    status, out, _ = run(capsys, "trace", path)
    assert status == 0
    steps, fetches = next(line for line in out.splitlines() if "whole steps" in line).split("; fetches per step: ")
    assert steps.startswith("5 whole steps")
    assert f"{per_step} (" in fetches or fetches == str(per_step)


def test_trace_counts_steps_and_not_micro_batches(capsys, tmp_path):
    model, path = Chain(), tmp_path / "trace.json"
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in model.children()]
    noria.wrap(model, optimizers, device="cpu", trace=path)
    for _ in range(4):
        for _ in range(3):
            model(torch.arange(8)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    noria.unwrap(model, optimizers)
    status, out, _ = run(capsys, "trace", path)
    assert status == 0 and "\n3 whole steps, " in out, out


def test_a_step_ends_with_its_last_backward_though_the_host_is_ahead(tmp_path):
    spans = []
    for step in range(3):
        begin, now = len(spans), 1000 * step
        for number, verb in enumerate(("forward", "backward", "forward", "backward")):
            spans.append((begin + number, "compute", verb, 0, now + 100 * number, now + 100 * number + 100))
        spans.append((begin + 4, "compute", "user", -1, now + 150, now + 150))  # while the first backward runs
    assert whole_steps(read_trace(written(tmp_path, spans))) == [(400, 1400), (1400, 2400)]


def test_trace_refuses_what_is_no_trace_of_noria(capsys, tmp_path):
    path = written(tmp_path, [])
    assert run(capsys, "trace", path)[0] == 2
    whole = json.loads(written(tmp_path, [(0, "fetch", "fetch", 0, 0, 1000, 1 << 20)]).read_text())
    damaged = []
    for key, value in (("name", None), ("dur", "long"), ("args", {"op": 0, "bytes": "many"}), ("args", {"bytes": 0})):
        copied = json.loads(json.dumps(whole))
        next(event for event in copied["traceEvents"] if event["ph"] == "X")[key] = value
        damaged.append(json.dumps(copied))
    damaged += [json.dumps(whole).replace('"fetch"', '"elevator"'), "[" * 100_000]
    for text in (*damaged, "", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}'):
        path.write_text(text)
        status, _, err = run(capsys, "trace", path)
        assert status == 2
        assert "as noria writes it" in err


def test_a_diff_names_the_ops_where_two_traces_part(capsys, tmp_path):
    planned, other = planned_on_meta(window=3, draft_memory=0), noria.plan(nn.Linear(4, 4), device="cpu")
    traces = {
        "fast": PlannedStep(planned, 4096, PlanSpeeds(10, 10, 10, 1)),
        "slow": PlannedStep(planned, 4096, PlanSpeeds(10, 1, 10, 1)),
        "other": PlannedStep(other, 4096, PlanSpeeds(10, 1, 10, 1)),
    }
    paths = {name: tmp_path / f"{name}.json" for name in traces}
    for name, step in traces.items():
        paths[name].write_text(step.trace_json())
    status, out, _ = run(capsys, "trace", "--diff", paths["fast"], paths["slow"])
    assert status == 0
    kinds, apart = out.split("ops that part most:")
    rows = {line.split()[0]: line.split() for line in kinds.splitlines() if line.endswith("ms")}
    fast, slow = (float(rows["drain"][column]) for column in (1, 3))
    assert slow == pytest.approx(10 * fast, rel=0.05)
    assert rows["forward"][1] == rows["forward"][3]
    assert all("drain blocks" in line for line in apart.splitlines()[2:7])
    assert "waits that part most:" in apart
    assert "(+0.0%)" in run(capsys, "trace", "--diff", paths["fast"], paths["fast"])[1]
    status, _, err = run(capsys, "trace", "--diff", paths["fast"], paths["other"])
    assert status == 2 and "of the same model" in err
