"""What a pipeline's stages would save and lend is told before anything has run, and is what then happens."""

from __future__ import annotations

import sys
import types

import noria
import pytest
import torch
from noria.cli import main
from noria.model.partition import partition
from noria.pipeline.peer_memory import Loan
from noria.pipeline.pipeline_plan import drawing, plan_pipeline, run_without_memory, saved_by_block
from noria.wrapped import wrapped_by
from torch import nn

from tests.journeys.pairs import WIDTH, Net

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
    together = {key: size for each in told for key, size in each.items()}
    real = MODELS[name]()
    noria.wrap(real, device="cpu", activations="auto", activation_memory="4GiB", dtype=dtype)
    real(torch.zeros(1, LENGTH, dtype=torch.int64))
    assert wrapped_by(real).context.engine.saved.saved_stats()["most_saved"] == sum(together.values())


class OfReLUs(nn.Module):
    """What a block gives is what its last module saves, and what the next block saves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_two_stages_save_counts_for_both():
    parts = partition(OfReLUs())
    x = torch.randn(LENGTH, WIDTH)
    saved = saved_by_block(parts, lambda: parts.roots[0](x))
    size = x.nbytes
    assert [sum(each.values()) for each in saved] == [2 * size] * 4
    together = {key: size for each in saved for key, size in each.items()}
    assert sum(together.values()) == 5 * size
    found = plan_pipeline(
        parts, saved, [100] * len(parts.units), num_stages=2, schedule="gpipe", num_micro_batches=2, room=None
    )
    assert [stage.saved for stage in found.stages] == [2 * 3 * size] * 2


def planned(saved, num_stages, room, schedule="1f1b", num_micro_batches=8, virtual_stages=1):
    parts = partition(Net(len(saved)))
    weights = [100] * len(parts.units)
    return plan_pipeline(
        parts,
        [{nth: size} for nth, size in enumerate(saved)],
        weights,
        num_stages=num_stages,
        schedule=schedule,
        num_micro_batches=num_micro_batches,
        room=room,
        virtual_stages=virtual_stages,
    )


KIB64 = 65536


def test_early_stages_borrow_of_late_ones():
    found = planned([KIB64] * 6, 3, room=6 * KIB64)
    assert [stage.saved // KIB64 for stage in found.stages] == [6, 4, 2]
    assert found.loans == []
    found = planned([KIB64] * 6, 3, room=4 * KIB64)
    assert [(stage.in_flight, stage.kept // KIB64) for stage in found.stages] == [([3], 4), ([2], 4), ([1], 2)]
    # 2 have no room, 2 more are under way at times.
    assert found.loans == [Loan(2, 0, 0, 2 * KIB64)]
    assert [stage.at_host for stage in found.stages] == [0, 0, 0]
    lines = drawing(found)
    assert len(lines) == 7 and "+" in lines[-1] and "+" not in lines[2]


def test_no_stage_lends_under_gpipe_or_without_a_limit():
    assert planned([KIB64] * 6, 3, room=4 * KIB64, schedule="gpipe").loans == []
    found = planned([KIB64] * 6, 3, room=None)
    assert found.loans == [] and all(stage.kept == stage.saved for stage in found.stages)


def test_a_rank_with_several_stages_has_most_when_they_have_most_together():
    """Blocks of stages 0 and 2 on rank 0, of 1 and 3 on rank 1; those of the late stages save more."""
    found = planned([KIB64, KIB64, 3 * KIB64, 3 * KIB64], 2, None, "interleaved-1f1b", 4, virtual_stages=2)
    assert [stage.blocks for stage in found.stages] == [["blocks.0", "blocks.2"], ["blocks.1", "blocks.3"]]
    # Rank 1: F1 F1 F3 (2 + 3), B3, F3, B3, F1, B1, F1, B1, F3, B3, ...: with two of stage 1 beside one of stage 3.
    assert found.stages[1].in_flight == [2, 1] and found.stages[1].saved == 5 * KIB64
    # Rank 0: F0 F0 F2 F2 F0 (2 + 6 + 1), B2, F0 (after it 4 of stage 0 and 1 of stage 2), B2, F2, ...
    assert found.stages[0].in_flight == [3, 2] and found.stages[0].saved == 9 * KIB64
    # With three of stage 1 alone, where its blocks save more.
    third = planned([KIB64, 3 * KIB64, KIB64, KIB64], 2, None, "interleaved-1f1b", 4, virtual_stages=2).stages[1]
    assert third.in_flight == [3, 0] and third.saved == 9 * KIB64
    assert found.row_name == "rank" and drawing(found)[1].startswith("rank 0  before |")


def test_memory_is_drawn_over_the_time_of_the_schedule():
    found = planned([KIB64] * 6, 3, room=4 * KIB64, num_micro_batches=3)
    first, _, last = found.stages
    # Forwards take 1, backwards 2: the first stage's come back from 3 on, 2 of each way behind the last one's.
    bundle = 2 * KIB64
    assert first.saved_over_time == [bundle * n for n in [1, 2, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 1, 1, 1]]
    assert last.saved_over_time == [bundle * n for n in [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]]
    rows = [line.rsplit(" ", 1)[1] for line in drawing(found)[1:]]
    assert rows[0] == "369999999666333"  # of 6 blocks' memory
    assert rows[1] == "366666666666333"  # its room is 4
    assert rows[4] == "003333333330000"
    assert rows[5] == "336666666663333"  # beside what it lends, 2
    assert len(drawing(planned([KIB64] * 6, 3, None, num_micro_batches=64))[1].rsplit(" ", 1)[1]) == 40


def test_a_room_for_less_than_two_blocks_is_refused():
    with pytest.raises(noria.UsageError, match="what two blocks save, 131072 bytes, but found 131071"):
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
    interleaved = [*arguments, "--schedule", "interleaved-1f1b", "--micro-batches", "4"]
    module.net = lambda: Net(8)
    assert main([*interleaved, "--activation-memory", "6MiB"]) == 0
    out = capsys.readouterr().out
    assert "2 ranks of 2 stages by interleaved-1f1b, 4 micro-batches" in out and "3 + 2" in out
    assert "rank 1 lends" in out and "to rank 0" in out
    assert main([*interleaved, "--virtual-stages", "5"]) == 2
    assert "with at most 8 stages in all, one for each block, but found 2 ranks with 10" in capsys.readouterr().err
    assert main([*arguments, "--schedule", "zero-bubble"]) == 2
    assert "found 'zero-bubble', whose backwards of inputs and of weights are apart" in capsys.readouterr().err
    module.net = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(4)))
    assert main(arguments) == 2
    assert "a model whose forward takes token ids of shape (1, 2048)" in capsys.readouterr().err
