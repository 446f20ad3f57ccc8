"""What a pipeline's stages would save and lend is told before anything has run, and is what then happens."""

from __future__ import annotations

import sys
import types

import noria
import pytest
import torch
from noria.cli import main
from noria.custody import wrapped_by
from noria.lending import Loan
from noria.partition import partition
from noria.pipeline import SCHEDULES, drawing, plan_pipeline, run_without_memory, saved_by_block
from torch import nn

from tests.journeys.pairs import Net

LENGTH = 2048  # so that storages are large enough to be worth their way


def gpt2():
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_layer=3, n_embd=32, n_head=2, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
        )
    )


MODELS = {"own": Net, "gpt2": gpt2}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_blocks_will_save_is_known_to_the_byte(name, dtype):
    with torch.device("meta"):
        model = MODELS[name]()
    parts = partition(model)
    told = saved_by_block(parts, run_without_memory(model, dtype, (1, LENGTH)))
    assert len(told) > 2 and all(told)
    real = MODELS[name]()
    noria.wrap(real, device="cpu", activations="auto", activation_memory="4GiB", dtype=dtype)
    real(torch.zeros(1, LENGTH, dtype=torch.int64))
    assert wrapped_by(real).custody.saved_stats()["most_saved"] == sum(told)


def planned(saved, num_stages, room, schedule="1f1b", num_micro_batches=8):
    parts = partition(Net(len(saved)))
    weights = [100] * len(parts.units)
    return plan_pipeline(
        parts,
        saved,
        weights,
        num_stages=num_stages,
        schedule=schedule,
        num_micro_batches=num_micro_batches,
        room=room,
    )


KIB64 = 65536


def test_early_stages_borrow_of_late_ones():
    found = planned([KIB64] * 6, 3, room=6 * KIB64)
    assert [stage.saved // KIB64 for stage in found.stages] == [6, 4, 2]
    assert found.loans == []
    found = planned([KIB64] * 6, 3, room=4 * KIB64)
    assert [(stage.in_flight, stage.kept // KIB64) for stage in found.stages] == [(3, 4), (2, 4), (1, 2)]
    # 2 have no room, 2 more are under way at times.
    assert found.loans == [Loan(2, 0, 0, 2 * KIB64)]
    assert [stage.at_host for stage in found.stages] == [0, 0, 0]
    lines = drawing(found)
    assert len(lines) == 7 and "+" in lines[-1] and "+" not in lines[2]


def test_nobody_lends_under_gpipe_or_without_a_limit():
    assert planned([KIB64] * 6, 3, room=4 * KIB64, schedule="gpipe").loans == []
    found = planned([KIB64] * 6, 3, room=None)
    assert found.loans == [] and all(stage.kept == stage.saved for stage in found.stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_few_micro_batches_are_all_in_flight(schedule):
    assert [SCHEDULES[schedule](rank, 4, 1) for rank in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("num_stages", [0, 1, 7])
def test_stages_without_blocks_are_refused(num_stages):
    with pytest.raises(noria.UsageError, match="stages, 2 to 6"):
        planned([KIB64] * 6, num_stages, room=None)


def test_a_room_for_less_than_two_blocks_is_refused():
    with pytest.raises(noria.UsageError, match="what two blocks save, 131072 bytes; found 131071"):
        planned([KIB64] * 6, 3, room=2 * KIB64 - 1)


def test_the_command_tells_and_draws_it(capsys, monkeypatch):
    module = types.ModuleType("made_for_pipelines")
    module.net = Net
    monkeypatch.setitem(sys.modules, "made_for_pipelines", module)
    arguments = [
        "plan",
        "--model",
        "made_for_pipelines:net",
        "--device",
        "cpu",
        "--pipeline",
        "2",
        "--length",
        str(LENGTH),
    ]
    assert main([*arguments, "--activation-memory", "2560KiB"]) == 0
    out = capsys.readouterr().out
    assert "2 stages by 1f1b, 4 micro-batches of 1 x 2048 tokens" in out
    assert "stage 1 lends" in out and "before |####" in out and "#+" in out
    assert main([*arguments, "--activation-memory", "1KiB"]) == 2
    assert "what two blocks save" in capsys.readouterr().err
    assert main([*arguments, "--micro-batches", "0"]) == 2
    module.net = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(4)))
    assert main(arguments) == 2
    assert "a model whose forward takes token ids of shape (1, 2048)" in capsys.readouterr().err
