"""Every example runs as printed, and fails loudly when what it shows is not true."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import noria
import psutil
import pytest
import torch
from noria.testing import assert_same_bits

from tests.device import NEEDS_FULL_HOST, SHARES

ROOT = Path(__file__).parents[2]
TINY_DEMO = "--steps 8 --twin-steps 4 --layers 12 --width 64 --vocab 400 --text-bytes 60000 --generate 3 --out {out}"
TINY_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.own_device]


@pytest.fixture
def run(monkeypatch, capsys):
    """run("examples/x.py", "--flag ...") gives (exit status, what it printed)."""
    monkeypatch.syspath_prepend(ROOT / "examples")

    def run_it(script: str, arguments: str = "") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
        status = 0
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        return status, capsys.readouterr().out

    return run_it


def moved(report: str) -> list[tuple[int, int]]:
    """(fetches, planned) of each kind of pass in a printed report; a pass without a plan is an error."""
    passes = report.partition("passes (last occurrence):")[2].partition("memory")[0].strip().splitlines()
    passes = [line for line in passes if not line.endswith("for a forward pass that did not come next")]
    return [tuple(map(int, re.search(r"(\d+) fetches \(planned (\d+)\)", line).groups())) for line in passes]


def test_the_mlp_learns_through_its_window(run):
    status, printed = run("examples/01_mlp.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert status == 0
    assert len(losses) == 10 and losses[-1] < losses[0] / 2
    assert all(fetches == planned > 0 for fetches, planned in moved(printed))
    assert re.search(r"leases: at most [23] units", printed)


def test_the_demo_keeps_its_promises_and_leaves_a_curve_and_a_trace(run, tmp_path):
    status, printed = run("examples/02_gpt.py", TINY_DEMO.format(out=tmp_path))
    assert status == 0, printed
    assert printed.count("\nyes  ") == 3 and "NO " not in printed
    assert "the first 4 losses, and all weights after them, have the bits of plain PyTorch" in printed
    assert int(re.search(r"yes  (\d+) fetches in 5 steps", printed)[1]) > 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    names = {event["name"].split()[0] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"forward", "backward", "fetch", "drain", "update", "wait"} <= names

    status, printed = run("tools/draw_trace.py", f"{tmp_path / 'trace.json'} {tmp_path / 'wheel.png'} --unit blocks.6")
    assert status == 0
    assert (tmp_path / "wheel.png").read_bytes().startswith(b"\x89PNG")
    assert int(re.search(r"'fetch -> compute': (\d+)", printed)[1]) > 0


def test_the_picture_of_drafts_comes_out_of_traces(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    status, printed = run("tools/draw_drafts.py", f"{tmp_path / 'drafts.png'} --blocks 3 --steps 6")
    assert status == 0
    assert (tmp_path / "drafts.png").read_bytes().startswith(b"\x89PNG")
    assert "0.0 behind backward" in printed and int(re.search(r"drafts: (\d+) kept", printed)[1]) > 0


def test_the_live_view_shows_the_units_that_are_in_the_window(run, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run_live = sys.modules.get("live_view") or __import__("live_view")
    monkeypatch.setattr(run_live, "REFRESH_S", 0.0)
    draw = run_live.LiveView.show

    def show_and_note(view):
        draw(view)
        if view.model is not None:
            shown.append(noria.report(view.model, write_trace=False).resident)

    monkeypatch.setattr(run_live.LiveView, "show", show_and_note)
    status, printed = run("examples/02_gpt.py", TINY_DEMO.format(out=tmp_path))
    assert status == 0, printed
    assert "units in the window now" in printed
    windows = {frozenset(units) for units in shown}
    assert len(windows) > 12, "the wheel did not turn"
    assert {unit for window in windows for unit in window} >= {f"blocks.{i}" for i in range(12)}


def test_the_demo_fails_when_one_bit_of_one_weight_differs(run, tmp_path, monkeypatch):
    wrap = noria.wrap

    def wrap_disturbed(model, optimizer, policy):
        with torch.no_grad():
            model.blocks[5].expand.weight.view(torch.int32)[0, 0] ^= 1
        return wrap(model, optimizer, policy)

    monkeypatch.setattr(noria, "wrap", wrap_disturbed)
    status, printed = run("examples/02_gpt.py", TINY_DEMO.format(out=tmp_path))
    assert status == 1
    assert "NO   the first 4 losses" in printed
    assert "weights after step 4: " in printed


def test_the_demo_fails_when_fewer_units_are_fetched_than_planned(run, tmp_path, monkeypatch):
    wrap = noria.wrap

    def wrap_roomily(model, optimizer, policy):
        return wrap(model, optimizer, replace(policy, device_memory="auto"))

    monkeypatch.setattr(noria, "wrap", wrap_roomily)
    status, printed = run("examples/02_gpt.py", TINY_DEMO.format(out=tmp_path))
    assert status == 1
    assert re.search(r"NO   \d+ fetches in 5 steps", printed)


FLAGS = [
    pytest.param("", id="fp32", marks=pytest.mark.rest),
    pytest.param("--bf16 --gradient-checkpointing", id="bf16 and checkpointing"),
]


@pytest.mark.parametrize("flags", FLAGS)
def test_a_finetuning_run_that_is_resumed_ends_with_the_same_bits(run, tmp_path, flags):
    config, text = tmp_path / "config.json", tmp_path / "text.txt"
    config.write_text(json.dumps(TINY_LLAMA))
    text.write_text(Path(json.__file__).read_text())
    arguments = f"--model {config} --text {text} --steps 4 --context 16 --batch 2 --save-every 2 --eval-every 2 "
    arguments += f"--generate 4 --device-memory {SHARES * (60 if flags else 100)}KiB {flags} --out {tmp_path}/"
    status, printed = run("examples/03_hf_finetune.py", arguments + "whole")
    assert status == 0
    assert printed.count("held-out loss") == 2 and "--- generated" in printed
    assert all(fetches == planned > 0 for fetches, planned in moved(printed))

    status, resumed = run("examples/03_hf_finetune.py", arguments + f"second --resume {tmp_path}/whole/step2.pt")
    assert status == 0
    assert "resumed after step 2" in resumed and "step    2  loss" not in resumed
    steps = [line for line in printed.splitlines() if re.match(r"step +[34]  (loss|held-out)", line)]
    assert steps and all(line in resumed for line in steps)
    whole, second = (torch.load(tmp_path / run / "step4.pt", weights_only=True) for run in ("whole", "second"))
    begun = torch.load(tmp_path / "whole" / "step2.pt", weights_only=True)
    assert any(not torch.equal(begun["model"][name], value) for name, value in whole["model"].items())
    assert_same_bits(tensors(whole), tensors(second))


def tensors(checkpoint: dict) -> dict[str, torch.Tensor]:
    states = checkpoint["optimizer"]["state"]
    named = {f"{index}.{key}": value for index, state in states.items() for key, value in state.items()}
    return checkpoint["model"] | named


SHARED = "--steps 24 --save-every 6 --layers 9 --width 64 --vocab 300 --text-bytes 60000"


def shared_gpt(checkpoint: Path, *options: str, kill_at: str | None = None, rank: str = "1") -> tuple[int, str]:
    """The line of docs/distributed.md on two ranks, with more options for torchrun: exit status and what it printed.
    `kill_at`: this rank is killed at this line. Each start has a store of its own, as that page asks for."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    command += ["examples/04_sharded_gpt.py", *SHARED.split(), "--checkpoint", str(checkpoint)]
    printed = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as torchrun:
        for line in torchrun.stdout:
            printed.append(line)
            if kill_at is not None and line.startswith(kill_at):
                ranks = {each.environ().get("RANK"): each for each in psutil.Process(torchrun.pid).children()}
                ranks[rank].kill()
    return torchrun.returncode, "".join(printed)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What that line printed when no process was killed, and its checkpoint."""
    path = tmp_path_factory.mktemp("shared") / "whole.pt"
    status, printed = shared_gpt(path)
    assert status == 0, printed
    return printed, torch.load(path, weights_only=True)


@pytest.mark.long
def test_ranks_that_share_a_gpt_are_killed_and_end_with_the_same_bits(shared, tmp_path):
    printed, first = shared
    killed = tmp_path / "killed.pt"
    homes = re.findall(r"rank (\d): (\d+) bytes at home, (\d+) planned", printed)
    assert [rank for rank, _, _ in homes] == ["0", "1"]
    assert all(taken == planned for _, taken, planned in homes)
    losses = re.findall(r"step +(\d+)  loss (\S+),", printed)
    assert float(losses[-1][1]) < float(losses[0][1])

    status, printed = shared_gpt(killed, kill_at="step    6  saved")
    assert status != 0 and "step   24" not in printed, printed
    begun = torch.load(killed, weights_only=True)
    assert 6 <= begun["step"] < 24
    status, printed = shared_gpt(killed)
    assert status == 0, printed
    assert f"resumed after step {begun['step']}" in printed and "step    5" not in printed
    assert all(line in losses for line in re.findall(r"step +(\d+)  loss (\S+),", printed))
    assert any(not torch.equal(begun["model"][name], value) for name, value in first["model"].items())
    assert_same_bits(tensors(first), tensors(torch.load(killed, weights_only=True)))


@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_torchrun_restarts_ranks_that_share_a_gpt_and_they_end_with_the_same_bits(shared, tmp_path, rank):
    killed = tmp_path / "killed.pt"
    status, printed = shared_gpt(killed, "--max-restarts", "1", kill_at="step    6  saved", rank=rank)
    assert status == 0, printed
    before, _, after = printed.partition("resumed after step ")
    assert "step    6  saved" in before and int(after.split()[0]) in range(6, 24) and "step   24  saved" in after
    assert_same_bits(tensors(shared[1]), tensors(torch.load(killed, weights_only=True)))


PIPELINE = "--steps 3 --micro-batches 4 --layers 12 --width 64 --vocab 300 --text-bytes 60000"


def pipeline_d2d(options: str) -> tuple[int, str]:
    """On two stages: exit status and what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["examples/05_pipeline_d2d.py", *PIPELINE.split(), *options.split()]
    found = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    return found.returncode, found.stdout


def test_a_pipeline_whose_last_stage_lends_the_first_memory_has_the_bits_of_plain_pytorch(tmp_path):
    status, printed = pipeline_d2d(f"--trace {tmp_path}")
    assert status == 0, printed
    assert printed.count("\nyes  ") == 3 and "NO " not in printed
    plain, ours = (
        [line for line in printed.splitlines() if line.startswith(name)] for name in ("plain", "noria: step")
    )
    losses = [re.findall(r"step +(\d+)  loss (\S+)", "\n".join(lines)) for lines in (plain, ours)]
    assert len(losses[0]) == 2 and losses[0] == losses[1]
    assert re.search(r"stage 1 lends \d\.\d MiB to stage 0", printed)
    to_host, to_peers = re.search(
        r"sent to the host .* step, (\S+) MiB after it; to other stages (\S+) MiB", printed
    ).groups()
    assert float(to_host) == 0 < float(to_peers)
    traces = [json.loads((tmp_path / f"stage{rank}.json").read_text())["traceEvents"] for rank in range(2)]
    lanes = [peer_spans(events) for events in traces]
    assert set(lanes[0]) == {"offload", "reload"} and not lanes[1]
    assert lanes[0].count("offload") >= lanes[0].count("reload"), "what is needed before it has left stays"
    for events in traces:  # what was for units goes back, where copies there have not paid
        notes = [event["name"] for event in events if event["ph"] == "i"]
        told = [re.match(r"stage 1 lends (\d\.\d) MiB to stage 0", note) for note in notes]
        sizes = [float(each[1]) for each in told if each is not None]
        assert len(sizes) == len(notes) > 0 and sizes == sorted(sizes, reverse=True)
    saved = [[event["args"] for event in events if event["ph"] == "C"] for events in traces]
    assert max(each["at peers"] for each in saved[0]) > 0 == max(each["lent"] for each in saved[0])
    lent = [each["lent"] for each in saved[1]]
    assert lent[0] == 0 < lent[-1]
    while_lent = lent[lent.index(max(lent)) :]
    assert while_lent == sorted(while_lent, reverse=True), "it rises once, and falls where it is given back"
    assert set(lent[: lent.index(max(lent))]) == {0}


FILES = "--steps 4 --save-every 2 --kill-at 3 --width 64 --vocab 300 --text-bytes 60000"


@NEEDS_FULL_HOST
def test_a_gpt_whose_home_is_twice_host_memory_is_killed_and_ends_with_the_same_bits(run, tmp_path):
    status, printed = run("examples/10_files.py", f"{FILES} --folder {tmp_path}")
    assert status == 0, printed
    assert printed.count("\nyes  ") == 4 and "NO " not in printed
    assert printed.count("resumed after step 2") == 1 and "\n  step   3  loss" in printed.partition("killed")[0]
    told = r"home is (\S+) MiB, host_memory is (\S+) MiB: (\S+) MiB are taken there, (\S+) MiB in files"
    sizes = [tuple(map(float, each)) for each in re.findall(told, printed)]
    assert len(sizes) == 2
    for home, limit, taken, in_files in sizes:
        assert taken <= limit == pytest.approx(home / 2, abs=0.1)
        assert taken + in_files > home
    assert not os.listdir(tmp_path)


def test_that_example_fails_when_one_bit_of_one_moment_or_one_loss_differs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    compare = runpy.run_path(str(ROOT / "examples/10_files.py"))["compare"]

    def checkpoint(moment: float = 1.0, loss: float = 2.0) -> dict[str, Any]:
        state = {0: {"exp_avg": torch.tensor([moment])}}
        return {"model": {"weight": torch.ones(2)}, "optimizer": {"state": state}, "losses": [loss]}

    assert [kept for kept, _ in compare(checkpoint(), checkpoint())] == [True] * 3
    assert [kept for kept, _ in compare(checkpoint(), checkpoint(moment=1 + 2**-23))] == [True, True, False]
    assert [kept for kept, _ in compare(checkpoint(), checkpoint(loss=2 + 2**-50))] == [False, True, True]


@pytest.mark.parametrize("script", ["examples/04_sharded_gpt.py", "examples/05_pipeline_d2d.py"])
@pytest.mark.parametrize("num_devices, backend", [(0, "gloo"), (1, "gloo"), (2, "nccl")])
def test_two_processes_use_cuda_where_each_has_a_device(run, monkeypatch, script, num_devices, backend):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", sys.exit)
    assert run(script)[0] == backend


def peer_spans(events: list[dict[str, Any]]) -> list[str]:
    """The verbs on the lane of that name, but for the measuring of links."""
    [lane] = [event["tid"] for event in events if event["ph"] == "M" and event["args"].get("name") == "peer"]
    verbs = [event["name"].split()[0] for event in events if event["ph"] == "X" and event["tid"] == lane]
    return [verb for verb in verbs if verb != "probe"]


@pytest.mark.long
def test_the_pipeline_fails_if_no_stage_needed_to_borrow():
    status, printed = pipeline_d2d("--activation-memory 1000000000")
    assert status != 0
    assert "NO   stages save more than that ([])" in printed and printed.count("\nyes  ") == 2


def test_a_local_model_directory_brings_its_own_weights_and_tokenizer(run, tmp_path, monkeypatch):
    import text
    import transformers

    source = Path(json.__file__).read_text()
    (tmp_path / "text.txt").write_text(source)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=text.Tokenizer(source, vocab_size=300)._bpe)
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(text, "Tokenizer", None)  # the example must not need one of its own
    torch.manual_seed(7)
    fields = {name: value for name, value in TINY_LLAMA.items() if name not in ("model_type", "architectures")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    model.save_pretrained(tmp_path / "model")
    arguments = (
        f"--model {tmp_path}/model --text {tmp_path}/text.txt --out {tmp_path} --device-memory {SHARES * 100}KiB"
    )
    status, printed = run(
        "examples/03_hf_finetune.py", arguments + " --steps 2 --lr 0 --context 16 --batch 2 --generate 4"
    )
    assert status == 0
    assert all(fetches == planned > 0 for fetches, planned in moved(printed))
    saved = torch.load(tmp_path / "step2.pt", weights_only=True)["model"]
    assert_same_bits(saved, {name: model.state_dict()[name] for name in saved})


@pytest.mark.parametrize("page", ["README.md", "docs/options.md"])
def test_every_snippet_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text().partition("## In your trainer")[0]  # the others: tests/ecosystem/test_pages.py
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert snippets
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)
    assert all(fetches == planned > 0 for fetches, planned in moved(capsys.readouterr().out))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "gpu_all.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    for path, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        if path.startswith("https://"):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


def test_every_option_and_no_other_has_a_row():
    table = (ROOT / "docs" / "options.md").read_text().split("## All of them")[1].split("## Around")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert rows == [field.name for field in fields(noria.Policy)]
