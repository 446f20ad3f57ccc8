"""Tests of the pretend GPU itself run on it: PRETEND_GPU=1 python -m pytest tests/pretend_gpu."""

import pytest

from tests import device
from tests.pretend_gpu import vehicle
from tests.pretend_gpu.machine import settle

ANYWHERE = ("test_versions.py",)


def pytest_ignore_collect(collection_path):
    """In a process without it there is nothing to import."""
    is_test = collection_path.name.startswith("test_") and collection_path.name not in ANYWHERE
    return True if is_test and not vehicle.is_installed() else None


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No test finds what another has left behind, and none passes whose kernels fail behind its back."""
    monkeypatch.setattr(device, "steps_at_home", False)
    yield
    if vehicle.is_installed():
        import torch

        torch.cuda.set_device(0)
        settle()
