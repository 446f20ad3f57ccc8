"""What all tests share: the `gpu` marker skips by name, saying what is missing; `sampled` leaves most cases of a test
to `make test-all`; `one_thread` for models compared to the bit, and so small that threads would only wait for each
other."""

import contextlib
import gc
import importlib
import os
from collections import Counter

import pytest

from tests.pretend_gpu import vehicle

os.environ["NORIA_CACHE"] = ""  # no test reads the costs of another run, or keeps its own

if vehicle.asked_for():
    vehicle.install()  # before torch

import torch
from hypothesis import HealthCheck, settings
from noria import _C

import tests.roomy_logs  # noqa: F401  its effect is wanted
from tests.device import IS_PRETEND
from tests.pretend_gpu.machine import machine
from tests.ranks import LEFT_OUT

# `make test` draws the same examples each time; `make test-all` draws new ones (--hypothesis-profile=new). Neither
# times its examples: a busy machine is no failure.
NOT_TIMED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
for name, same in {"same": True, "new": False}.items():
    settings.register_profile(name, derandomize=same, deadline=None, suppress_health_check=NOT_TIMED)
settings.load_profile("same")


def missing_for_gpu(needs_torch: bool) -> str:
    """Why tests that need a CUDA device cannot run here; empty when they can."""
    if reason := _C.cuda_absent_reason():
        return reason
    if needs_torch and not torch.cuda.is_available():
        return f"torch {torch.__version__} reaches no CUDA device"
    return ""


def pytest_runtest_setup(item):
    marker = item.get_closest_marker("gpu")
    if marker is not None and (reason := missing_for_gpu(marker.kwargs.get("torch", True))):
        pytest.skip(f"{item.name} needs a CUDA device: {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    seen = Counter()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is None:
            continue
        (step,) = marker.args
        test = item.nodeid.partition("[")[0]
        if seen[test] % step:
            item.add_marker("rest")
        seen[test] += 1
    # A worker takes a whole file at a time. Files with long tests come first in their folder: at the end one worker
    # would run alone.
    long = {item.path for item in items if item.get_closest_marker("long") or item.get_closest_marker("search")}
    folders = list(dict.fromkeys(item.path.parent for item in items))
    items.sort(key=lambda item: (folders.index(item.path.parent), item.path not in long))


def pytest_collection_finish():
    """Has the garbage collector pass by the million objects of modules. noria.wrap collects what is no longer used, and
    the collector would look at all of them each time."""
    importlib.import_module("torch._dynamo")  # a first optimizer would
    gc.collect()
    gc.freeze()


@pytest.fixture
def prompt_device():
    """A pretend GPU that works when it can, and is late with nothing: for tests of what takes time."""
    with machine(lazy=False, max_delay_us=0) if IS_PRETEND else contextlib.nullcontext():
        yield


def pytest_configure(config):
    config.stash[LEFT_OUT] = []


def pytest_deselected(items):
    for item in items:
        item.config.stash[LEFT_OUT].append(item)


@pytest.fixture
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
