"""The command line: plans without memory, diagnoses, traces summed up, and misuse answered in words."""

import json
import subprocess
import sys
import types

import noria
import pytest
import torch
from noria import _C
from noria.cli import main
from noria.doctor import diagnose
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.testing import on_machine
from noria.trace_file import covered, read_trace
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
        assert "model.layers.47" in out
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
    step = PlannedStep(planned, 512, PlanSpeeds(2, 3, 5, 1, ()))
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
        step = PlannedStep(planned, 512, PlanSpeeds(fetch, drain, update, tflops, ()))
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
    speeds = PlanSpeeds(1e9, 1e9, 28 * sum(p.numel() for p in model.parameters()) / 2**30, tflops, ())
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


def test_a_weight_that_two_modules_use_takes_its_time_in_each():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    model[2].weight = model[0].weight
    planned = noria.plan(model, torch.optim.AdamW(model.parameters()), device="cpu")
    assert len(planned.units) == 2
    times = PlannedStep(planned, 512, PlanSpeeds(1, 1, 1, 1e-6, ())).times()
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
        (["trace", "/nowhere.json"], "No such file"),
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


def test_trace_refuses_what_is_no_trace_of_noria(capsys, tmp_path):
    path = written(tmp_path, [])
    assert run(capsys, "trace", path)[0] == 2
    for text in ("", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}'):
        path.write_text(text)
        status, _, err = run(capsys, "trace", path)
        assert status == 2
        assert "as noria writes it" in err
