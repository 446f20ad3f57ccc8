"""Public docstrings say what each argument is, what comes back and what is raised, and their examples run."""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import dataclasses
import doctest
import inspect
import io
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import noria
import pytest
import torch
from torch import nn

from tests.architecture.public import callables, docstrings, objects


def section(doc: str, name: str) -> str:
    """Returns the text of a section such as "Args", or nothing."""
    found = re.search(rf"^{name}:\n((?:    .*\n|\n)+)", inspect.cleandoc(doc) + "\n", re.MULTILINE)
    return found[1] if found else ""


def parameters(value: Callable[..., Any]) -> list[str]:
    """Returns names as a docstring writes them, such as "model" or "**extra"."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    every = inspect.signature(value).parameters.values()
    return [stars.get(each.kind, "") + each.name for each in every if each.name != "self"]


def names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def raises_usage_error(function: Any, seen: set[Any] | None = None) -> bool:
    """Returns True if the function makes a UsageError, or calls a function of noria by name that does."""
    function, seen = inspect.unwrap(function), set() if seen is None else seen
    if not inspect.isfunction(function) or function in seen or not function.__module__.startswith("noria"):
        return False
    seen.add(function)
    if function.__name__ == "usage_error":
        return True
    called = [function.__globals__.get(name) for name in names_in(function.__code__)]
    return any(raises_usage_error(each, seen) for each in called)


def written_for(value: Any) -> list[Any]:
    """Returns the functions that run when `value` is called, without the `__init__` that a dataclass makes."""
    if not inspect.isclass(value):
        return [value]
    made = "__post_init__" if dataclasses.is_dataclass(value) else "__init__"
    return [vars(value)[made]] if made in vars(value) else []


@pytest.mark.parametrize("name", objects())
def test_a_public_name_says_what_it_is(name):
    assert docstrings()[name]


def test_each_class_says_what_it_is():
    """Private ones, too."""
    classes = [
        (path.name, node)
        for path in Path(noria.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert [(name, node.name) for name, node in classes if not ast.get_docstring(node)] == []
    assert len(classes) > 50


@pytest.mark.parametrize("name", callables())
def test_each_argument_is_described(name):
    described = re.findall(r"^    (\S+): ", section(docstrings()[name], "Args"), re.MULTILINE)
    fields = [each.removeprefix(f"{name}.") for each in docstrings() if each.startswith(f"{name}.")]
    wanted = [each for each in parameters(callables()[name]) if each not in fields]
    assert described == wanted


@pytest.mark.parametrize("name", callables())
def test_a_result_is_described(name):
    value = callables()[name]
    result = inspect.signature(value).return_annotation
    if inspect.isclass(value) or result in ("None", None):
        pytest.skip("it returns nothing")
    doc = docstrings()[name]
    assert section(doc, "Returns") or section(doc, "Yields") or doc.startswith("Returns")


@pytest.mark.parametrize("name", callables())
def test_errors_are_described(name):
    raised: set[str] = set()
    for function in written_for(callables()[name]):
        raised |= set(re.findall(r"^ +raise ([A-Z]\w+)\(", inspect.getsource(function), re.MULTILINE))
        raised |= {"UsageError"} if raises_usage_error(function) else set()
    assert all(f"    {each}: " in section(docstrings()[name], "Raises") for each in raised)


@pytest.mark.parametrize("name", docstrings())
def test_errors_have_a_section(name):
    """An error in the running text is easily overlooked."""
    assert not re.search(r"Raises [`A-Z]", docstrings()[name])


@pytest.mark.parametrize("name", callables())
def test_a_public_function_has_an_example(name):
    assert section(docstrings()[name], "Example")


@pytest.mark.parametrize("name", [name for name, doc in docstrings().items() if section(doc, "Example")])
def test_an_example_runs(name, tmp_path, monkeypatch):
    """`model` has five units, `optimizer` updates it. Both are plain; an example wraps them if it needs that."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 1), nn.Linear(1, 9)) for _ in range(5)))
    names = {
        "__builtins__": builtins,
        "copy": copy,
        "inputs": torch.rand(4, 9),
        "model": model,
        "nn": nn,
        "noria": noria,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "torch": torch,
    }
    test = doctest.DocTestParser().get_doctest(section(docstrings()[name], "Example"), names, name, None, None)
    assert test.examples
    told = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    with contextlib.redirect_stderr(io.StringIO()):
        runner.run(test, out=told.write)
    assert not told.getvalue(), told.getvalue()
