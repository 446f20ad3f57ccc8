"""What noria refuses, and says, on a device: shown where a capture and a full device can be had at will."""

from __future__ import annotations

import re

import _pretend_gpu
import noria
import pytest
import torch
from noria import _C
from noria.wrapped import wrapped_by

from tests.journeys.pairs import Net, adamw, loss_of
from tests.pretend_gpu.machine import machine

MIB = 1 << 20


def _taken(model):
    wrapped = wrapped_by(model)
    assert wrapped is not None
    return wrapped.context.plan.device_bytes


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = Net(width=64)
    optimizer = adamw(made.parameters())
    noria.wrap(made, optimizer, device="cuda", window=2)
    yield made
    noria.unwrap(made, optimizer)


def test_a_forward_that_is_captured_for_a_graph_is_refused(model):
    side, batch = torch.cuda.Stream(), torch.zeros(1, 4, dtype=torch.long, device="cuda")
    model(batch).square().mean().backward()
    _pretend_gpu.begin_capture(side.cuda_stream)
    with torch.cuda.stream(side), pytest.raises(noria.UsageError, match=r"torch\.cuda\.graph"):
        model(batch)
    assert _pretend_gpu.end_capture(), "noria's calls have broken it"
    model(batch).square().mean().backward()


@pytest.mark.skipif(not _C.has_kernel_images(), reason="this build has no kernels for devices: it had no nvcc")
def test_a_step_of_a_model_that_stays_is_refused_in_a_capture():
    """A graph would replay the step's number and learning rate."""
    model = Net()
    optimizer = adamw(model.parameters())
    noria.wrap(model, optimizer, device="cuda", resident="all")
    for number in range(3):
        loss_of(model, number).backward()
        if number < 2:
            optimizer.step()
            optimizer.zero_grad()
    assert noria.report(model).at_rest
    side = torch.cuda.Stream()
    _pretend_gpu.begin_capture(side.cuda_stream)
    with torch.cuda.stream(side), pytest.raises(noria.UsageError, match=r"torch\.cuda\.graph"):
        optimizer.step()
    assert _pretend_gpu.end_capture(), "noria's calls have broken it"
    optimizer.step()
    noria.unwrap(model, optimizer)


def test_the_attempt_after_an_out_of_memory_error_runs_with_a_smaller_window():
    """With the bits of a run that never had one; as accelerate's find_executable_batch_size tries again."""
    losses: list[list[float]] = []
    for is_full in (False, True):
        torch.manual_seed(0)
        with machine(memory=256 * MIB):
            model = Net(width=1024)
            optimizer = adamw(model.parameters())
            noria.wrap(model, optimizer, device="cuda", draft_memory=0)
            found: list[float] = []
            for number in range(4):
                if number == 2 and is_full:
                    before = _taken(model)
                    filler = torch.empty(256 * MIB - before - 8 * MIB, dtype=torch.uint8, device="cuda")
                    loss = loss_of(model, number)
                    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(torch.OutOfMemoryError):
                        torch.empty(12 * MIB, dtype=torch.uint8, device="cuda")
                    del loss, filler
                    optimizer.zero_grad()
                loss = loss_of(model, number)
                if number == 2 and is_full:
                    assert before - _taken(model) >= 12 * MIB
                    assert "the window has shrunk" in str(noria.report(model)) and noria.report(model).ledger_agrees
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            losses.append(found)
            noria.unwrap(model, optimizer)
    assert losses[0] == losses[1]


def test_a_full_device_says_which_device_memory_would_do():
    with machine(memory=256 * MIB):
        model = Net(width=1024)
        optimizer = adamw(model.parameters())
        noria.wrap(model, optimizer, device="cuda")
        taken = _taken(model)
        filler = torch.empty(256 * MIB - taken - 8 * MIB, dtype=torch.uint8, device="cuda")
        with (
            pytest.warns(UserWarning, match=r"out of memory for 12.* device_memory=") as told,
            pytest.raises(torch.OutOfMemoryError),
        ):
            torch.empty(12 * MIB, dtype=torch.uint8, device="cuda")
        noria.unwrap(model, optimizer)
        would = re.search(r'device_memory="([^"]+)"', "".join(str(each.message) for each in told))
        assert would is not None
        noria.wrap(model, optimizer, device="cuda", device_memory=would[1])
        assert torch.empty(12 * MIB, dtype=torch.uint8, device="cuda").numel() + filler.numel()
        noria.unwrap(model, optimizer)
