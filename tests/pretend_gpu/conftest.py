"""Tests of the pretend GPU itself run on it: PRETEND_GPU=1 python -m pytest tests/pretend_gpu."""

import pytest

from tests.pretend_gpu import vehicle


def pytest_collection_modifyitems(items):
    if vehicle.is_installed():
        return
    reason = vehicle.absent() or f"it is not asked for: {vehicle.VARIABLE}=1"
    for item in items:
        if "tests/pretend_gpu/" in item.path.as_posix() and item.get_closest_marker("anywhere") is None:
            item.add_marker(pytest.mark.skip(reason=f"{item.name} needs the pretend GPU: {reason}"))


@pytest.fixture(autouse=True)
def clean():
    """No test finds what another has left behind."""
    yield
    if vehicle.is_installed():
        import _pretend_gpu
        import torch

        _pretend_gpu.forget_failure()
        torch.cuda.set_device(0)
        torch.cuda.synchronize()
