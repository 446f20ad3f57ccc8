"""`_C.pyi` says what the built `_C` has, in both directions: names, kinds of members, and arguments."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from noria import _C

STUB = Path(__file__).resolve().parents[2] / "python" / "noria" / "_C.pyi"

# Of the dunder names, those that a person writes in a stub; pybind11 defines others for its own use.
SPOKEN = {
    "__init__",
    "__len__",
    "__getitem__",
    "__iter__",
    "__contains__",
    "__call__",
    "__enter__",
    "__exit__",
}

TREE = ast.parse(STUB.read_text(encoding="utf-8"))
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}


def is_public(name: str) -> bool:
    return not name.startswith("_") or name in SPOKEN


# ---- names and kinds --------------------------------------------------------------------------------------------


def decorators_of(node: ast.FunctionDef) -> set[str]:
    """For `@property`, "property"; for `@x.setter`, "setter"."""
    return {each.attr if isinstance(each, ast.Attribute) else each.id for each in node.decorator_list}  # type: ignore[attr-defined]


def stated_kinds(body: list[ast.stmt]) -> dict[str, str]:
    """What a stub's statements define, by name."""
    kinds: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            kinds[node.name] = "class"
        elif isinstance(node, ast.FunctionDef):
            by = decorators_of(node)
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
    assert stated_kinds(TREE.body) == built


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


def stated_arguments(node: ast.FunctionDef) -> list[Argument]:
    positional = [*node.args.posonlyargs, *node.args.args]
    first_default = len(positional) - len(node.args.defaults)
    found = [Argument(each.arg, False, i >= first_default) for i, each in enumerate(positional)]
    keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    found += [Argument(each.arg, True, default is not None) for each, default in keywords]
    return found[1:] if found and found[0].name == "self" else found


def parts_of(text: str) -> list[str]:
    """The arguments, as text, of the signature with which `text` begins."""
    depth, start, parts = 0, text.index("(") + 1, []
    for i in range(start, len(text)):
        if text[i] in "([{<":
            depth += 1
        elif depth > 0 and text[i] in ")]}>":
            depth -= text[i] != ">" or text[i - 1] != "-"  # "->" closes nothing
        elif text[i] == ")" or (text[i] == "," and depth == 0):
            parts.append(text[start:i].strip())
            start = i + 1
            if text[i] == ")":
                break
    return [part for part in parts if part]


def built_arguments(text: str) -> list[Argument]:
    """Arguments out of a signature that pybind11 writes into a docstring."""
    found, is_keyword = [], False
    for part in parts_of(text):
        name = part.split(":")[0].strip()
        if name == "*":
            is_keyword = True
        elif name not in ("self", "/"):
            found.append(Argument(name, is_keyword, " = " in part))
    return found


def built_signatures(function: Any, name: str) -> list[list[Argument]]:
    lines = (function.__doc__ or "").splitlines()
    if not lines[0].startswith(f"{name}(*args, **kwargs)"):
        return [built_arguments(lines[0])]
    return [built_arguments(line) for line in lines[1:] if line.split(". ", 1)[-1].startswith(f"{name}(")]


FUNCTIONS: dict[tuple[str, str], list[ast.FunctionDef]] = {}
for owner, nodes in [("", TREE.body), *((name, cls.body) for name, cls in CLASSES.items())]:
    for function in nodes:
        if isinstance(function, ast.FunctionDef) and not decorators_of(function) & {"property", "setter"}:
            FUNCTIONS.setdefault((owner, function.name), []).append(function)


@pytest.mark.parametrize(("owner", "name"), FUNCTIONS, ids=[".".join(key) for key in FUNCTIONS])
def test_function_and_stub_have_the_same_arguments(owner, name):
    built = built_signatures(getattr(getattr(_C, owner) if owner else _C, name), name)
    stated = [stated_arguments(node) for node in FUNCTIONS[owner, name]]
    if name in SPOKEN - {"__init__", "__call__"}:  # Python calls these, and never by name
        assert [len(each) for each in stated] == [len(each) for each in built]
    else:
        assert stated == built


# ---- the test's own promise -------------------------------------------------------------------------------------


def stated_by(text: str) -> list[Argument]:
    [node] = ast.parse(text).body
    assert isinstance(node, ast.FunctionDef)
    return stated_arguments(node)


@pytest.mark.parametrize(
    ("stub", "built"),
    [
        ("def f(self, unit: int) -> None: ...", "f(self: X, other: int) -> None"),
        ("def f(self, unit: int) -> None: ...", "f(self: X, arg0: int) -> None"),
        ("def f(self, unit: int) -> None: ...", "f(self: X) -> None"),
        ("def f(self) -> None: ...", "f(self: X, unit: int) -> None"),
        ("def f(self, unit: int) -> None: ...", "f(self: X, *, unit: int) -> None"),
        ("def f(self, unit: int = 0) -> None: ...", "f(self: X, unit: int) -> None"),
        ("def f(self, a: int, b: int) -> None: ...", "f(self: X, b: int, a: int) -> None"),
    ],
)
def test_a_difference_of_arguments_is_seen(stub, built):
    assert stated_by(stub) != built_arguments(built)


def test_signatures_are_read_whole():
    text = (
        "f(self: noria._C.X, a: dict[str, tuple[int, int]], *, b: collections.abc.Callable[[int], bool] = None) -> int"
    )
    assert built_arguments(text) == [Argument("a", False, False), Argument("b", True, True)]
    assert stated_by("def f(self, a: int, *, b: int = 0) -> int: ...") == built_arguments(text)
