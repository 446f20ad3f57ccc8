"""What the process has grown by is what the ledger says: no host memory is taken behind the plan's back."""

import json
import os
import subprocess
import sys
import tempfile

import noria
import pytest

MIB = 1 << 20

PROGRAM = """
import gc, json, sys
import psutil, torch, noria
from noria import _C
from noria.wrapped import wrapped_by
from noria.testing import on_machine
from torch import nn

from benchmarks.systems.by_noria import least_host_memory
from tests.device import DEVICE

settings = json.loads(sys.argv[1])
torch.set_num_threads(1)

def resident():
    gc.collect()
    _C.return_freed_memory()  # what torch has given back to malloc it does not use
    process = psutil.Process()
    # Slots have two addresses. Their pages count once in the pss, and twice in the rss.
    return process.memory_full_info().pss if settings["files"] else process.memory_info().rss

def wrapped(width, depth):
    dtype = torch.bfloat16 if settings["bfloat16"] else None
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    optimizer = torch.optim.AdamW(model.parameters())
    policy = dict(device=DEVICE, window=2, units=[nn.Linear], kernel=settings["kernel"], dtype=dtype)
    if settings["files"]:
        policy["files"] = settings["files"]
        policy["host_memory"] = least_host_memory(model, optimizer, **policy)
    with on_machine(hostility={"seed": 1, "poison": True}):  # so that the device's memory is all touched
        noria.wrap(model, optimizer, **policy)
    for _ in range(3):
        model(torch.ones(4, width, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    noria.materialize(model).__enter__()  # the last updates are done
    return model, optimizer

wrapped(8, 2)  # torch loads its libraries at a first step
before = resident()
model, optimizer = wrapped(settings["width"], settings["depth"])
rows = noria.report(model).ledger
print(json.dumps({
    "growth": resident() - before,
    "device": sum(row.taken for row in rows if row.place == "cpu"),
    "host": sum(row.taken for row in rows if row.place == "host"),
    "files": sum(row.taken for row in rows if row.place == "files"),
    "agrees": all(row.planned == row.taken for row in rows),
    "elements": sum(p.numel() for p in model.parameters()),
}))
"""


WRAPS_AFTER_LARGE_BLOCKS = """
import json
import psutil, torch, noria
from torch import nn

from tests.device import DEVICE

resident = lambda: psutil.Process().memory_info().rss
small = lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)])
noria.wrap(small(), device=DEVICE, units=[nn.Linear])  # what noria loads at first
for _ in range(2):
    torch.empty(31 << 20, dtype=torch.uint8)  # once freed, malloc keeps blocks of this size
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(32)]).requires_grad_(False)
top = torch.empty(64 << 10, dtype=torch.uint8)  # what lies below it malloc does not return by itself
before = resident()
noria.wrap(model, device=DEVICE, window=2, units=[nn.Linear], resident="none")
print(json.dumps({"growth": resident() - before, "weights": sum(p.nbytes for p in model.parameters())}))
"""


def measured(program=PROGRAM, **settings):
    paths = os.pathsep.join([os.path.dirname(os.path.dirname(noria.__file__)), "."])
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


PER_ELEMENT = {("torch", False): 16, ("fused", False): 16, ("torch", True): 16, ("fused", True): 14}
"""Bytes of docs/memory.md: working copy, held gradient, master or low bits, two moments."""


@pytest.mark.parametrize(
    ("kernel", "bfloat16", "width", "depth"),
    [
        ("torch", False, 1024, 12),  # 12.6 M parameters
        pytest.param("torch", False, 2048, 18, marks=pytest.mark.long),  # 75.5 M
        pytest.param("fused", True, 2048, 18, marks=pytest.mark.long),
        pytest.param("torch", True, 2048, 18, marks=pytest.mark.long),
    ],
)
@pytest.mark.cpu_only("the pretend device's memory is the process's own")
def test_the_process_grows_by_its_ledger(kernel, bfloat16, width, depth):
    found = measured(kernel=kernel, bfloat16=bfloat16, width=width, depth=depth, files=None)
    growth = found["growth"] - found["device"]
    assert found["agrees"]
    assert abs(growth - found["host"]) <= 0.02 * found["host"] + 64 * MIB, found
    scratch = 4 * width * (width + 1) if (kernel, bfloat16) == ("torch", True) else 0
    padding = 1 << 12
    assert 0 <= found["host"] - scratch - PER_ELEMENT[kernel, bfloat16] * found["elements"] <= padding * depth, found


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.cpu_only("the pretend device's memory is the process's own")
def test_the_process_grows_by_its_ledger_while_state_lies_in_files(bfloat16):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        found = measured(kernel="fused", bfloat16=bfloat16, width=1024, depth=24, files=folder)
    assert found["agrees"]
    assert abs(found["growth"] - found["device"] - found["host"]) <= 0.02 * found["host"] + 64 * MIB, found
    assert found["files"] >= 8 * found["elements"] > 128 * MIB


@pytest.mark.cpu_only("the pretend device's memory is the process's own")
def test_the_memory_of_weights_that_have_moved_goes_back_to_the_system():
    found = measured(WRAPS_AFTER_LARGE_BLOCKS)
    assert found["growth"] < found["weights"] // 2, found
