"""What fails on the pretend GPU is heard of: by who waits, or at the latest when a test is over."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap

import _pretend_gpu
import pytest
import torch

from tests.device import leave_device
from tests.pretend_gpu import acts, vehicle
from tests.pretend_gpu.machine import machine, settle
from tests.ranks import in_turn_on_ranks, on_ranks

FAILED = "index_select failed on the device"


def fail(device=0):
    """Fails on the current stream, and no thread waits."""
    acts.fail_unheard(torch.device("cuda", device))


def fail_by_now():
    """As `fail`. Returns when it has failed."""
    _pretend_gpu.forget_failure()  # an earlier one, which was raised
    fail()
    while not _pretend_gpu.has_failed():
        os.sched_yield()


@pytest.mark.parametrize("device", [0, 1])
def test_a_failure_that_no_call_waited_for_is_raised_once_in_the_end(device):
    fail(device)
    with pytest.raises(RuntimeError, match=FAILED):
        leave_device()
    settle()


def test_a_failure_on_one_device_does_not_outlive_one_on_the_other():
    with pytest.raises(RuntimeError, match=FAILED), machine(seed=1, max_delay_us=3000, delayed_percent=100):
        fail(0)
        fail(1)
    settle()


def test_the_machine_raises_a_failure_when_it_goes():
    with pytest.raises(RuntimeError, match=FAILED), machine(lazy=True):
        fail()


def test_ranks_raise_what_failed_behind_their_backs():
    with pytest.raises(AssertionError, match=FAILED):
        on_ranks(1, acts.embeds_out_of_range)
    found = in_turn_on_ranks(2, {"fails": (acts.embeds_out_of_range, ()), "goes on": (acts.embeds_in_range, ())})
    assert FAILED in found["fails"] and not found["goes on"]


@pytest.mark.parametrize("place", ["journeys", "pretend_gpu"])
def test_a_failure_behind_a_tests_back_fails_that_test_alone(tmp_path, place):
    fixtures = "default_device, place" if place == "journeys" else "clean"
    (tmp_path / "conftest.py").write_text(f"from tests.{place}.conftest import {fixtures}\n")
    (tmp_path / "test_two.py").write_text(
        textwrap.dedent(
            f"""
            import torch
            from tests.pretend_gpu import acts

            def test_first():
                acts.fail_unheard(torch.device("cuda:1"))

            def test_second():
                assert torch.get_default_device().type == {"cuda" if place == "journeys" else "cpu"!r}
                assert torch.ones(2, device="cuda").sum().item() == 2
            """
        )
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert "2 passed, 1 error" in done.stdout and FAILED in done.stdout, done.stdout + done.stderr


def test_who_hears_of_a_failure_has_waited():
    """Else a copy would come down to memory that went with the exception."""
    x = torch.ones(8, device="cuda")
    with machine(lazy=False):
        fail_by_now()
        torch.cuda._sleep(400_000_000)
        with pytest.raises(RuntimeError, match=FAILED):
            x.cpu()
        assert torch.cuda.current_stream().query()


def test_an_error_of_a_call_does_not_hide_a_failure_of_the_device():
    with machine(lazy=False):
        fail_by_now()
        with pytest.raises(RuntimeError, match="cudaErrorInvalidDevice"):
            torch.cuda.set_device(7)
        with pytest.raises(RuntimeError, match=FAILED):
            torch.cuda.synchronize()


def test_a_launch_on_a_stream_that_was_destroyed_is_refused():
    runtime = ctypes.CDLL(str(vehicle.BUILD / "pretend_gpu" / "libcudart.so.13"))
    handle = ctypes.c_void_p()
    assert runtime.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
    stream = torch.cuda.ExternalStream(handle.value)
    x = torch.ones(8, device="cuda")
    assert runtime.cudaStreamDestroy(handle) == 0
    with torch.cuda.stream(stream), pytest.raises(RuntimeError, match="cudaErrorInvalidResourceHandle by add_"):
        x.add_(1)
    assert x.tolist() == [1] * 8
