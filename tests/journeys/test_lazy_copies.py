"""With a torch whose storages call back: the same journeys without it, as before torch 2.13 (csrc/bindings/watched.h),
drafts among them, where journeys train, and CUDA's on the pretend GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from noria import _C

from tests.device import DEVICE
from tests.pretend_gpu import vehicle

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    _C.LAZY_COPIES, reason="storages are lazy copies in this process already: this torch has no other way"
)


def passed(*arguments: str, **environment: str) -> set[str]:
    """The names of the journeys that had tests. One process for several: its start takes longer than most tests."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rsp", *arguments],
        env={**os.environ, "NORIA_LAZY_COPIES": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search("^SKIPPED", done.stdout, re.MULTILINE), done.stdout
    return set(re.findall(r"^PASSED tests/journeys/(\w+)\.py::", done.stdout, re.MULTILINE))


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        pytest.param("test_drafts", "", marks=pytest.mark.long),
        pytest.param(
            "test_gradients", "after_step or not_copied or second_edit or accumulated", marks=pytest.mark.long
        ),
        (
            "test_misuse test_checkpoints",
            "read_only or no_version_counter or hidden or evicted or through_a_state_dict",
        ),
    ],
)
def test_where_journeys_train(names, chosen):
    for_all = ["-m", "not cpu_only and not long and not search and not rest"] if DEVICE != "cpu" else []
    journeys = [f"tests/journeys/{name}.py" for name in names.split()]
    assert passed(*journeys, "-k", chosen, *for_all) == set(names.split())


@pytest.mark.long
def test_on_the_pretend_gpu():
    if reason := vehicle.absent():
        pytest.skip(f"needs the pretend GPU: {reason}")
    journeys = [f"tests/journeys/{name}.py" for name in ("test_cuda", "test_cuda_writes")]
    assert passed(*journeys, "-k", "draft or set_to_zero or between_passes", PRETEND_GPU="seed=1,max_delay_us=200") == {
        "test_cuda",
        "test_cuda_writes",
    }
