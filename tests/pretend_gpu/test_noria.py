"""What noria refuses, and says, on a device: shown where a capture and a full device can be had at will."""

from __future__ import annotations

import re

import _pretend_gpu
import noria
import pytest
import torch
from noria.wrapped import wrapped_by

from tests.journeys.pairs import Net, adamw
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
