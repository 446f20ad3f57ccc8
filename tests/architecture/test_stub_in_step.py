"""`_C.pyi` says what the built `_C` has, in both directions: names, kinds of members, and arguments."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

import pytest
from noria import _C

from tests.architecture import stub
from tests.architecture.stub import BODY, CLASSES, FUNCTIONS, SPOKEN, is_public, parsed

# ---- names and kinds --------------------------------------------------------------------------------------------


def stated_kinds(body: list[ast.stmt]) -> dict[str, str]:
    """What a stub's statements define, by name."""
    kinds: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            kinds[node.name] = "class"
        elif isinstance(node, ast.FunctionDef):
            by = stub.decorators_of(node)
            plain = "static function" if "staticmethod" in by else "function"
            kinds[node.name] = "attribute" if "setter" in by else "property" if "property" in by else plain
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kinds[node.target.id] = "attribute"
        elif isinstance(node, ast.Assign):
            kinds |= {target.id: "attribute" for target in node.targets if isinstance(target, ast.Name)}
    return {name: kind for name, kind in kinds.items() if is_public(name)}


def kind_of(member: Any) -> str:
    if isinstance(member, type):
        return "class"
    if isinstance(member, property):
        return "property" if member.fset is None else "attribute"
    if isinstance(member, staticmethod):
        return "static function"
    return "function" if callable(member) else "attribute"


def built_kinds(holder: Any) -> dict[str, str]:
    """What the built module or class defines itself, by name."""
    if hasattr(holder, "__members__"):  # py::enum_
        return dict.fromkeys(holder.__members__, "attribute")
    kinds = {name: kind_of(member) for name, member in vars(holder).items() if is_public(name)}
    # Where nothing was bound, pybind11 has put a slot there that raises.
    if isinstance(holder, type) and not isinstance(vars(holder).get("__init__"), type(_C.Trace.__init__)):
        kinds.pop("__init__", None)
    return kinds


def test_module_and_stub_define_the_same_names():
    built = {name: kind for name, kind in built_kinds(_C).items() if not name.startswith("_")}
    assert stated_kinds(BODY) == built


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_class_and_stub_define_the_same_members(name):
    assert stated_kinds(CLASSES[name].body) == built_kinds(getattr(_C, name))


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_class_and_stub_have_the_same_bases(name):
    stated = [base.id for base in CLASSES[name].bases if isinstance(base, ast.Name)]
    own = [base.__name__ for base in getattr(_C, name).__bases__ if base.__name__ != "pybind11_object"]
    assert (stated or ["object"]) == (own or ["object"])


MOST_MEMBERS = 20
# Each member is one call of the machine.
BROAD = {"Backend"}


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - BROAD))
def test_class_shows_few_members(name):
    assert len(built_kinds(getattr(_C, name))) <= MOST_MEMBERS


# ---- arguments --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Argument:
    name: str
    is_keyword: bool  # it is given by name only
    has_default: bool


def arguments_of(node: ast.FunctionDef) -> list[Argument]:
    keywords, defaults = node.args.kwonlyargs, stub.defaults_of(node)
    return [Argument(each.arg, each in keywords, each.arg in defaults) for each in stub.arguments_of(node)]


@pytest.mark.parametrize(("owner", "name"), FUNCTIONS, ids=[".".join(key) for key in FUNCTIONS])
def test_function_and_stub_have_the_same_arguments(owner, name):
    built = [arguments_of(node) for node in stub.built_functions(owner, name)]
    stated = [arguments_of(node) for node in FUNCTIONS[owner, name]]
    if name in SPOKEN - {"__init__", "__call__"}:  # Python calls these, and never by name
        assert [len(each) for each in stated] == [len(each) for each in built]
    else:
        assert stated == built


# ---- the test's own promise -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "built"),
    [
        ("f(self, unit: int) -> None", "f(self: X, other: int) -> None"),
        ("f(self, unit: int) -> None", "f(self: X, arg0: int) -> None"),
        ("f(self, unit: int) -> None", "f(self: X) -> None"),
        ("f(self) -> None", "f(self: X, unit: int) -> None"),
        ("f(self, unit: int) -> None", "f(self: X, *, unit: int) -> None"),
        ("f(self, unit: int = 0) -> None", "f(self: X, unit: int) -> None"),
        ("f(self, a: int, b: int) -> None", "f(self: X, b: int, a: int) -> None"),
    ],
)
def test_a_difference_of_arguments_is_seen(stated, built):
    assert arguments_of(parsed(stated)) != arguments_of(parsed(built))


def test_signatures_are_read_whole():
    text = (
        "f(self: noria._C.X, a: dict[str, tuple[int, int]], *, b: collections.abc.Callable[[int], bool] = None) -> int"
    )
    assert arguments_of(parsed(text)) == [Argument("a", False, False), Argument("b", True, True)]
    assert arguments_of(parsed("f(self, a: int, *, b: int = 0) -> int")) == arguments_of(parsed(text))
