"""Journeys run on the CPU, and in a process with PRETEND_GPU=1 on the pretend GPU."""

import pytest

from tests.device import DEVICE, leave_device, use_device


def pytest_collection_modifyitems(items):
    if DEVICE == "cpu":
        return
    for item in items:
        if (marker := item.get_closest_marker("cpu_only")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"{item.name} is for the CPU alone: {marker.args[0]}"))


@pytest.fixture(autouse=True, scope="package")
def default_device():
    """Before fixtures of modules, which start ranks."""
    use_device()
    yield
    leave_device()


@pytest.fixture(autouse=True)
def place(request, default_device):
    """The journey trains on DEVICE, unless it is marked as one that chooses for itself."""
    chooses = any(request.node.get_closest_marker(name) is not None for name in ("gpu", "own_device"))
    (leave_device if chooses else use_device)()
    yield
    try:
        leave_device()  # raises what failed behind the journey's back
    finally:
        use_device()


@pytest.fixture
def keeps_plan(monkeypatch):
    """Costs of a run change nothing in it: what the planner would choose depends on the time that steps took."""
    monkeypatch.setattr("noria.wrapped.choose_again", lambda planned, costs: None)
