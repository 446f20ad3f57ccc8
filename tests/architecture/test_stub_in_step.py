"""`_C.pyi` and the built `_C` name the same things: what mypy believes is what there is."""

import ast
import re
from pathlib import Path

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


def names_in(body: list[ast.stmt]) -> set[str]:
    """The names that a stub's statements define."""
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets}
    return {name for name in names if not name.startswith("_") or name in SPOKEN}


def members_of(cls: type) -> set[str]:
    """The names that a built class defines itself."""
    if hasattr(cls, "__members__"):  # py::enum_
        return set(cls.__members__)
    names = {name for name in vars(cls) if not name.startswith("_") or name in SPOKEN}
    # Where nothing was bound, pybind11 has put a slot there that raises.
    constructed = isinstance(vars(cls).get("__init__"), type(_C.Trace.__init__))
    return names if constructed else names - {"__init__"}


TREE = ast.parse(STUB.read_text(encoding="utf-8"))
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}


def test_module_and_stub_define_the_same_names():
    built = {name for name in vars(_C) if not name.startswith("_")}
    assert names_in(TREE.body) == built


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_class_and_stub_define_the_same_members(name):
    assert names_in(CLASSES[name].body) == members_of(getattr(_C, name))


def arguments_of(node: ast.FunctionDef) -> list[str]:
    arguments = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return arguments[1:] if arguments[:1] == ["self"] else arguments


def built_arguments(doc: str) -> list[str]:
    """Argument names out of the signature that pybind11 writes on the first line of a docstring."""
    depth, start, parts = 0, doc.index("(") + 1, []
    for i in range(start, len(doc)):
        if doc[i] in "([{":
            depth += 1
        elif doc[i] in ")]}":
            if depth == 0:
                parts.append(doc[start:i])
                break
            depth -= 1
        elif doc[i] == "," and depth == 0:
            parts.append(doc[start:i])
            start = i + 1
    names = [part.split(":")[0].strip() for part in parts]
    return [name for name in names if name not in ("", "self", "*")]


FUNCTIONS = [("", node) for node in TREE.body if isinstance(node, ast.FunctionDef)] + [
    (name, node) for name, cls in CLASSES.items() for node in cls.body if isinstance(node, ast.FunctionDef)
]


@pytest.mark.parametrize(("owner", "node"), FUNCTIONS, ids=[f"{owner}.{node.name}" for owner, node in FUNCTIONS])
def test_function_and_stub_name_the_same_arguments(owner, node):
    holder = getattr(_C, owner) if owner else _C
    doc = getattr(holder, node.name).__doc__ or ""
    if isinstance(vars(holder).get(node.name), property) or doc.startswith(f"{node.name}(*args, **kwargs)"):
        return  # a property has no arguments, an overloaded function has several signatures
    built, stated = built_arguments(doc), arguments_of(node)
    assert len(stated) == len(built)
    for at, name in enumerate(built):  # pybind11 calls an argument arg<n> where the binding gives it no name
        assert stated[at] == name or re.fullmatch(r"arg\d+", name), f"{stated[at]} is {name} in the built module"
