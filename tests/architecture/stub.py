"""Reads `_C.pyi`, and the signatures that pybind11 writes into docstrings, as the same kind of syntax tree."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

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


def is_dict(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and "TypedDict" in (ast.unparse(base) for base in node.bases)


TREE = ast.parse(STUB.read_text(encoding="utf-8"))
DICTS = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef) and is_dict(node)}
"""What dicts hold. The built module has no such classes."""
BODY = [node for node in TREE.body if not is_dict(node)]
CLASSES = {node.name: node for node in BODY if isinstance(node, ast.ClassDef)}


def is_public(name: str) -> bool:
    return not name.startswith("_") or name in SPOKEN


def decorators_of(node: ast.FunctionDef) -> set[str]:
    """For `@property`, "property"; for `@x.setter`, "setter"."""
    return {each.attr if isinstance(each, ast.Attribute) else each.id for each in node.decorator_list}  # type: ignore[attr-defined]


def parsed(signature: str) -> ast.FunctionDef:
    [node] = ast.parse(f"def {signature}: ...").body
    assert isinstance(node, ast.FunctionDef)
    return node


FUNCTIONS: dict[tuple[str, str], list[ast.FunctionDef]] = {}
"""Functions of the stub by class and name, with their overloads. A function of the module has the class ""."""
for owner, nodes in [("", BODY), *((name, node.body) for name, node in CLASSES.items())]:
    for function in nodes:
        if isinstance(function, ast.FunctionDef) and not decorators_of(function) & {"property", "setter"}:
            FUNCTIONS.setdefault((owner, function.name), []).append(function)


def built(owner: str) -> Any:
    """Returns the built class, or the module for ""."""
    return getattr(_C, owner) if owner else _C


def built_functions(owner: str, name: str) -> list[ast.FunctionDef]:
    first, *others = getattr(built(owner), name).__doc__.splitlines()
    if not first.startswith(f"{name}(*args, **kwargs)"):
        return [parsed(first)]
    overloads = [line.split(". ", 1)[-1] for line in others]
    return [parsed(each) for each in overloads if each.startswith(f"{name}(")]


def arguments_of(node: ast.FunctionDef) -> list[ast.arg]:
    """Returns all arguments but `self`, in order."""
    found = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return found[1:] if found and found[0].arg == "self" else found


def defaults_of(node: ast.FunctionDef) -> dict[str, ast.expr]:
    """Returns the defaults of the arguments that have one."""
    positional = [*node.args.posonlyargs, *node.args.args]
    names = [each.arg for each in positional[len(positional) - len(node.args.defaults) :]]
    found = dict(zip(names, node.args.defaults, strict=True))
    keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return found | {each.arg: default for each, default in keywords if default is not None}
