"""A file of python/noria imports only files on lower floors, or earlier on its own; type-only imports count, too."""

from __future__ import annotations

import ast
from pathlib import Path

import noria
import pytest

ROOT = Path(noria.__file__).parent

# From the ground up. A folder is one floor; on a floor, files may import each other without a circle.
FLOORS = [
    ["_version", "_build_check", "_errors", "_lists", "_progress", "optim", "policy", "torch_state"],
    ["model"],
    ["host"],
    ["dist"],
    ["planning"],
    ["runtime"],
    ["pipeline"],
    ["forward"],
    ["step"],
    ["optimizer"],
    ["wrapped"],
    ["checkpoint"],
    ["out_of_memory", "doctor", "report", "trace_file", "wrap"],
    ["cli"],
    ["testing"],  # what tests and benchmarks put in the place of parts; nothing below knows of it
]


def modules() -> dict[str, Path]:
    """By name below `noria`; of a package, its __init__."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del found[""]  # noria/__init__.py stands above all
    return found


def imports_of(path: Path, names: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "noria":
            base = node.module.removeprefix("noria").removeprefix(".")
            for each in node.names:
                full = f"{base}.{each.name}" if base else each.name
                found.add(full if full in names else base)
    return found & set(names)


def floor_of(module: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if module.split(".")[0] in floor)


def test_every_file_is_on_a_floor():
    first = {name.split(".")[0] for name in modules()}
    assert first == {name for floor in FLOORS for name in floor}


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_file_imports_nothing_from_above(module):
    names = modules()
    above = {each for each in imports_of(names[module], names) if floor_of(each) > floor_of(module)}
    assert not above


def test_no_files_import_each_other_in_a_circle():
    names = modules()
    arrows = {name: imports_of(path, names) for name, path in names.items()}
    while leaves := [name for name, targets in arrows.items() if not targets]:
        for leaf in leaves:
            del arrows[leaf]
        for targets in arrows.values():
            targets.difference_update(leaves)
    assert not arrows


def test_an_import_from_above_would_be_seen(tmp_path):
    file = tmp_path / "low.py"
    file.write_text("if TYPE_CHECKING:\n    from noria.wrapped import Wrapped\nfrom noria.step import driver\n")
    assert imports_of(file, modules()) == {"wrapped", "step.driver"}
