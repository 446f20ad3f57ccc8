"""The pretend GPU leans on what torch does not promise: these tests say at once when a new torch closes the way."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.pretend_gpu import vehicle

RELEASE = torch.__version__.partition("+")[0]


def numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:2])


def test_a_torch_that_it_was_not_tried_with_is_named_with_those_that_it_was_tried_with():
    newest = vehicle.TRIED_WITH[-1]
    assert vehicle.unsuitable(f"{newest}+cpu", None) == ""
    assert "has CUDA 13.0 itself" in vehicle.unsuitable(f"{newest}+cu130", "13.0")
    told = vehicle.unsuitable("99.0.0", None)
    assert newest in told and "not with 99.0.0" in told and "PrivateUse1" in told


def test_the_torch_that_is_here_is_one_that_it_was_tried_with():
    if torch.version.cuda is not None:
        pytest.skip(f"torch {torch.__version__} is a CUDA build: the pretend GPU is for CPU builds")
    if numbers(RELEASE) < min(map(numbers, vehicle.TRIED_WITH)):
        pytest.skip(f"torch {torch.__version__} is older than those that the pretend GPU was tried with")
    assert RELEASE in vehicle.TRIED_WITH, (
        f"expected a torch that the pretend GPU was tried with, {', '.join(vehicle.TRIED_WITH)}; found {RELEASE}; "
        f"remedy: add it to tests/pretend_gpu/torch_versions.txt and run `make pretend`. {vehicle.FALLBACK}"
    )


def run(program, machine):
    environment = {**os.environ, vehicle.VARIABLE: machine}
    environment["PYTHONPATH"] = os.pathsep.join([str(vehicle.CHILD), str(vehicle.ROOT)])
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def test_the_torch_that_is_here_believes_in_it():
    if reason := vehicle.absent():
        pytest.skip(f"the pretend GPU cannot be here: {reason}")
    program = (
        "import torch; print(torch.cuda.is_initialized()); x = torch.ones(3, device='cuda'); "
        "print(x.mul(2).sum().item(), x.is_cuda, torch.cuda.get_device_name())"
    )
    done = run(program, "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["False", "6.0 True a pretend GPU"], vehicle.FALLBACK


def test_a_machine_that_there_is_not_is_told_before_torch_is_imported():
    if reason := vehicle.absent():
        pytest.skip(f"the pretend GPU cannot be here: {reason}")
    told = run("import sys; print('torch' in sys.modules)", "lazzy")
    assert "lazy, writes_everything" in told.stderr and "found 'lazzy'" in told.stderr
    assert "PrivateUse1" not in told.stderr and told.stdout.strip() == "False"


@pytest.mark.parametrize("target, status", [("test", 0), ("pretend", 2)])
def test_make_says_that_it_cannot_be_here_and_only_make_pretend_fails(target, status, tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\ncase "$*" in *pretend_gpu.vehicle) echo because; exit 1;; esac\necho ran "$@"\n')
    python.chmod(0o755)
    built = ["-o", "all", "-o", "test-modules"]
    done = subprocess.run(
        ["make", *built, target, f"VENV={tmp_path}"], cwd=vehicle.ROOT, capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "no pretend GPU: because\n" in done.stdout
    assert ("[Makefile" in done.stderr and f": {target}] Error" in done.stderr) == (status != 0)
