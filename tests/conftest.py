"""What all tests share: the `gpu` marker skips by name, saying what is missing; `sampled` leaves most cases of a test
to `make test-all`, which runs a share of them; it runs all cases of a test that is `daily`; `one_thread` for models
compared to the bit, and so small that threads would only wait for each other."""

import contextlib
import gc
import importlib
import os
from collections import Counter, defaultdict

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


def pytest_addoption(parser):
    parser.addoption(
        "--share",
        default="1/1",
        metavar="K/N",
        help="of the cases of each test that `make test` leaves out: the K-th, and every N-th behind it",
    )
    parser.addoption("--share-all", action="store_true", help="--share counts all cases of each test")


def share(config):
    nth, _, of = config.getoption("share").partition("/")
    if not (nth.isdecimal() and of.isdecimal() and 1 <= int(nth) <= int(of)):
        raise pytest.UsageError(f"--share: expected K/N with K from 1 to N, as in 2/3, but found {nth}/{of}")
    return int(nth), int(of)


def pytest_report_header(config):
    nth, of = share(config)
    return f"share: {nth}/{of}" if of > 1 else None


def is_left_out(item):
    return any(item.get_closest_marker(marker) for marker in ("long", "rest", "search"))


def outside_share(items, nth, of, of_all):
    """Of a test with fewer than `of` such cases one is left each time."""
    cases = defaultdict(list)
    for item in items:
        if (of_all or is_left_out(item)) and not item.get_closest_marker("daily"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for each in cases.values():
        step = min(of, len(each))
        yield from (item for place, item in enumerate(each) if place % step != (nth - 1) % step)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
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
    if outside := set(outside_share(items, *share(config), config.getoption("share_all"))):
        items[:] = [item for item in items if item not in outside]
        config.hook.pytest_deselected(items=list(outside))
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
