"""Collectives of the pretend GPU: gloo's bits, behind streams, as NCCL is used."""

from __future__ import annotations

import pytest

from tests.pretend_gpu import acts, vehicle
from tests.pretend_gpu.machine import machine
from tests.ranks import assert_fine, in_turn_on_ranks, on_ranks

ACTS = [
    acts.reductions_have_the_bits_of_gloo,
    acts.tensors_reach_whom_they_are_for,
    acts.neighbours_send_to_each_other,
    acts.the_host_waits_for_no_collective,
    acts.tensors_of_the_cpu_are_refused,
    acts.a_call_keeps_its_tensors_until_it_is_waited_for,
    acts.ddp_trains_as_over_gloo,
    acts.fsdp_trains_as_a_whole_model,
    acts.pipelines_hand_device_tensors_on,
    acts.a_group_can_be_left,
]
MACHINES = {"eager": (2, {}), "three ranks": (3, {}), "lazy": (2, {"lazy": True, "seed": 1, "max_delay_us": 100})}
_found: dict[str, dict[str, str]] = {}


def found_on(name: str) -> dict[str, str]:
    """All acts on one machine, in processes that start once."""
    if name not in _found:
        size, fields = MACHINES[name]
        try:
            with machine(**fields):
                _found[name] = in_turn_on_ranks(size, {act.__name__: (act, ()) for act in ACTS})
        except AssertionError as error:
            _found[name] = dict.fromkeys((act.__name__ for act in ACTS), str(error))
    return _found[name]


@pytest.mark.parametrize("act", [act.__name__ for act in ACTS])
@pytest.mark.parametrize("name", MACHINES)
def test_ranks(name, act):
    assert_fine(found_on(name), act)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_world_is_made_as_programs_make_it(tmp_path, backend):
    assert on_ranks(2, acts.everything_at_once, str(tmp_path / "meeting"), backend) == [backend] * 2


def test_a_rank_that_does_not_come_is_missed(tmp_path):
    told = on_ranks(2, acts.a_rank_that_does_not_come_is_missed, str(tmp_path / "meeting"))
    assert told == ["missed it", "stayed away"]


def test_nccl_is_there_before_anybody_asks():
    import torch.distributed as dist

    assert vehicle.is_installed() and dist.is_nccl_available()
    assert dist.distributed_c10d.ProcessGroupNCCL.Options()._timeout.total_seconds() == 600
