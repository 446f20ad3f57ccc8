"""The staircase of csrc/: a room includes only lower steps, and torch and CUDA stop where they should."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("check_layers", ROOT / "tools" / "check_layers.py")
check_layers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_layers)


def test_every_room_includes_only_lower_steps():
    assert check_layers.check(ROOT) == []


def test_every_source_lies_in_a_room_that_is_built():
    built = (ROOT / "CMakeLists.txt").read_text()
    for room in check_layers.STEPS:
        assert (ROOT / "csrc" / room).is_dir(), f"the staircase names {room}, which does not exist"
        assert room in built
    assert not list((ROOT / "csrc").glob("*.*")), "a source outside all rooms"


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize("room", check_layers.STEPS)
@pytest.mark.parametrize("other", check_layers.STEPS)
def test_each_step_up_or_sideways_is_found(tmp_path, room, other):
    write(tmp_path, f"csrc/{other}/thing.h", "#pragma once\n")
    write(tmp_path, f"csrc/{room}/user.cpp", f'#include "{other}/thing.h"\n')
    allowed = room == other or check_layers.STEPS[other] < check_layers.STEPS[room]
    assert (check_layers.check(tmp_path) == []) == allowed


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("csrc/engine/a.cpp", "#include <torch/torch.h>\n"),
        ("csrc/engine/a.cpp", "#include <ATen/ATen.h>\n"),
        ("csrc/store/a.cpp", "#include <c10/core/Storage.h>\n"),
        ("csrc/base/a.cpp", "#include <pybind11/pybind11.h>\n"),
        ("csrc/device/cuda_backend.cpp", "#include <cuda_runtime_api.h>\n"),
        ("csrc/bindings/a.cpp", "#include <cuda_runtime.h>\n"),
        ("csrc/engine/a.cpp", '#include "thing.h"\n'),
        ("csrc/plans/a.cpp", "\n"),
        ("csrc/plan/a.h", "namespace noria {}\n"),
        ("tests/csrc/engine/a_test.cpp", "#include <cuda_runtime_api.h>\n"),
    ],
)
def test_what_belongs_elsewhere_is_found(tmp_path, path, text):
    write(tmp_path, path, text)
    assert len(check_layers.check(tmp_path)) == 1


def test_what_belongs_there_is_allowed(tmp_path):
    write(tmp_path, "csrc/bindings/module.cpp", "#include <pybind11/pybind11.h>\n#include <ATen/ATen.h>\n")
    write(tmp_path, "tests/csrc/device/fake_cuda/fake.cpp", "#include <cuda_runtime_api.h>\n")
    assert check_layers.check(tmp_path) == []
