"""Lists what noria makes public: names in `__all__`, their members, and the classes that users get from them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import noria
from noria.one_card import WeightAverage
from noria.optimizer import WrappedOptimizer
from noria.planning.wrap_plan import WrapPlan
from noria.report import Report

_GIVEN = {"Report": Report, "WrapPlan": WrapPlan, "optimizer": WrappedOptimizer, "WeightAverage": WeightAverage}
"""Classes of objects that `report`, `plan`, `wrap` and `ema` return."""
_RAISED = (noria.UsageError, noria.MachineError)


def _members(cls: type) -> dict[str, Any]:
    """Returns the public methods and properties that a class of noria defines or inherits from another one."""
    owners = [each for each in cls.__mro__ if each.__module__.startswith("noria")]
    found = {name: value for owner in reversed(owners) for name, value in vars(owner).items()}
    kinds = (property, classmethod, staticmethod)
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
    }


def objects() -> dict[str, Any]:
    """Returns public functions, classes, methods and properties by name, such as "optim.Lion.step"."""
    found: dict[str, Any] = {}
    for name in noria.__all__:
        value = getattr(noria, name)
        found |= {f"{name}.{each}": getattr(value, each) for each in value.__all__} if inspect.ismodule(value) else {}
        found[name] = value
    found |= _GIVEN
    for name, value in list(found.items()):
        if inspect.isclass(value):
            found |= {f"{name}.{each}": member for each, member in _members(value).items()}
    return found


def callables() -> dict[str, Callable[..., Any]]:
    """Returns the public functions and methods, and the classes that users make themselves."""
    return {
        name: value
        for name, value in objects().items()
        if inspect.isfunction(value) or (inspect.isclass(value) and value not in (*_GIVEN.values(), *_RAISED))
    }


def docstrings() -> dict[str, str]:
    """Returns the docstrings of `objects()`, and those below the fields of classes."""
    found = {name: value.__doc__ or "" for name, value in objects().items()}
    for name, value in objects().items():
        if inspect.isclass(value) and value.__module__.startswith("noria") and value not in _RAISED:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
            for field, text in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[f"{name}.{field.target.id}"] = text.value.value
    return found
