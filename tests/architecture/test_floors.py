"""A file of python/noria imports only files on lower floors, or earlier on its own; type-only imports count, too."""

from __future__ import annotations

import ast
import re
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
    ["out_of_memory", "doctor", "one_card", "report", "trace_file", "wrap"],
    ["pretrained"],
    ["cli"],
    ["integrations"],
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
    """The modules that it imports, and those that it uses as `noria.module`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: an import relative to the file; expected from noria..."
            words = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            words = [each.name for each in node.names]
        elif isinstance(node, ast.Attribute):
            words = [ast.unparse(node)]
        else:
            continue
        for word in words:
            if word.startswith("noria."):
                full = word.removeprefix("noria.")
                found.add(full if full in names else full.rpartition(".")[0])
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


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("if TYPE_CHECKING:\n    from noria.wrapped import Wrapped", "wrapped"),
        ("from noria.step import driver", "step.driver"),
        ("from noria import testing", "testing"),
        ("import noria.testing.twin as twin", "testing.twin"),
        ("import noria\nnoria.testing.assert_same_bits({}, {})", "testing"),
        ("import torch.testing", ""),
    ],
)
def test_an_import_from_above_would_be_seen(tmp_path, text, imported):
    file = tmp_path / "low.py"
    file.write_text(text)
    assert imports_of(file, modules()) == set(imported.split())


def test_what_users_run_offers_the_helpers_of_tests_and_uses_none():
    names = modules()
    production = [path for name, path in names.items() if name.split(".")[0] != "testing"]
    users = [path for path in production if any(each.split(".")[0] == "testing" for each in imports_of(path, names))]
    assert users == [] and len(production) > 50
    package = ROOT / "__init__.py"  # `import noria` is enough for noria.testing.assert_same_bits
    assert {each for each in imports_of(package, names) if each.split(".")[0] == "testing"} == {"testing"}
    assert len(re.findall(r"\btesting\b", package.read_text())) == 2, "once imported, once in __all__"
