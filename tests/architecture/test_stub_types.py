"""`_C.pyi` gives arguments, results, properties and dicts the types that the built `_C` has."""

from __future__ import annotations

import ast
from typing import Any

import noria
import pytest
import torch
from noria import _C
from noria.wrapped import wrapped_by

from tests.architecture import stub
from tests.architecture.stub import BODY, CLASSES, DICTS, FUNCTIONS, parsed

# ---- one spelling -----------------------------------------------------------------------------------------------

# pybind11 takes for an int or a float what Python can make one. The stub is stricter.
WORDS = {"SupportsInt": "int", "SupportsFloat": "float"}
WORDS |= {
    each.asname: each.name
    for node in BODY
    if isinstance(node, ast.ImportFrom)
    for each in node.names
    if each.asname is not None
}
MODULES = ("typing", "collections.abc", "noria._C")


def or_none(node: ast.expr) -> ast.expr:
    return ast.BinOp(node, ast.BitOr(), ast.Constant(None))


def members_of(node: ast.expr) -> set[str]:
    """Returns the types that a union joins."""
    return members_of(node.left) | members_of(node.right) if isinstance(node, ast.BinOp) else {plain(node)}


def plain(node: ast.expr) -> str:
    """Returns a type as both may spell it: without modules, and unions in order."""
    match node:
        case ast.BinOp():
            members = members_of(node) - {"SupportsIndex"}
            return "object" if "object" in members else " | ".join(sorted(members))
        # A std::array: Annotated[Sequence[float], "FixedSize(4)"].
        case ast.Subscript(_, ast.Tuple([ast.Subscript(_, element), ast.Constant(str(size))])):
            num_elements = int(size.removeprefix("FixedSize(").removesuffix(")"))
            return f"tuple[{', '.join([plain(element)] * num_elements)}]"
        case ast.Subscript(value, ast.Tuple(inner)):
            return f"{plain(value)}[{', '.join(map(plain, inner))}]"
        case ast.Subscript(value, inner):
            return f"{plain(value)}[{plain(inner)}]"
        case ast.List(inner):  # the arguments of a Callable
            return f"[{', '.join(map(plain, inner))}]"
        case ast.Attribute(module, name) if ast.unparse(module) in MODULES:
            return WORDS.get(name, name)
    text = ast.unparse(node)
    return WORDS.get(text, text)


# ---- comparison -------------------------------------------------------------------------------------------------

# pybind11 does not say where an object of a bound class may be None, unless that is the default.
MAY_BE_NONE = {
    "Backend.set_trace(trace)",
    "HostOptimizer.set_trace(trace)",
    "TorchBridge.__init__(optimizer)",
    "TorchBridge.__init__(held_home)",
    "TorchBridge.__init__(collectives)",
    "TorchBridge.set_trace(trace)",
    "find_cuda_runtime() ->",
}


def is_same(stated: str, built: str) -> bool:
    """Returns True if the stub's type is pybind11's, or a narrower one where pybind11 does not look inside."""
    if built in ("dict", "list", "Callable"):
        return stated.startswith(f"{built}[") or (built == "dict" and stated in DICTS)
    return built in ("object", stated)


def types_of(node: ast.FunctionDef, of: str) -> dict[str, ast.expr]:
    """Returns types by place, such as "Backend.free(memory)" and "Backend.free() ->"."""
    defaults = stub.defaults_of(node)
    found = {f"{of}() ->": node.returns}
    for each in stub.arguments_of(node):
        is_none = each.arg in defaults and ast.unparse(defaults[each.arg]) == "None"
        found[f"{of}({each.arg})"] = or_none(each.annotation) if is_none and each.annotation else each.annotation
    typed = {place: type for place, type in found.items() if type is not None}
    assert typed.keys() == found.keys(), f"{sorted(found.keys() - typed.keys())} have no type"
    return typed


def differences(stated: ast.FunctionDef, built: ast.FunctionDef, of: str) -> list[str]:
    found = []
    for (place, own), its in zip(types_of(stated, of).items(), types_of(built, of).values(), strict=True):
        spelled, known = plain(own), plain(or_none(its) if place in MAY_BE_NONE else its)
        if not is_same(spelled, known):
            found.append(f"{place}: the stub says {spelled}, pybind11 {known}")
    return found


@pytest.mark.parametrize(("owner", "name"), FUNCTIONS, ids=[".".join(key) for key in FUNCTIONS])
def test_function_and_stub_have_the_same_types(owner, name):
    of = f"{owner}.{name}" if owner else name
    pairs = zip(FUNCTIONS[owner, name], stub.built_functions(owner, name), strict=True)
    assert [each for stated, built in pairs for each in differences(stated, built, of)] == []


def test_only_what_the_stub_says_may_be_none():
    places = set()
    for (owner, name), nodes in FUNCTIONS.items():
        places |= {place for node in nodes for place in types_of(node, f"{owner}.{name}" if owner else name)}
    assert places >= MAY_BE_NONE


PROPERTIES = {
    (owner, node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node.target)): node
    for owner, cls in CLASSES.items()
    for node in cls.body
    if isinstance(node, ast.AnnAssign)
    or (isinstance(node, ast.FunctionDef) and stub.decorators_of(node) & {"property", "setter"})
}


@pytest.mark.parametrize(("owner", "name"), PROPERTIES, ids=[".".join(key) for key in PROPERTIES])
def test_property_and_stub_have_the_same_type(owner, name):
    node, built = PROPERTIES[owner, name], vars(getattr(_C, owner))[name]
    stated = node.annotation if isinstance(node, ast.AnnAssign) else node.returns
    got = parsed("got" + built.fget.__doc__.splitlines()[0])
    assert is_same(plain(stated), plain(got.returns))
    if built.fset is not None:
        put = parsed("put" + built.fset.__doc__.splitlines()[0])
        assert is_same(plain(stated), plain(stub.arguments_of(put)[0].annotation))


def is_of(value: object, stated: ast.expr) -> bool:
    """Returns True if the value is of the stated type, or of one that the type joins. Items are not looked at."""
    return type(value).__name__.removesuffix("Type") in {each.partition("[")[0] for each in members_of(stated)}


CONSTANTS = {ast.unparse(node.target): node.annotation for node in BODY if isinstance(node, ast.AnnAssign)}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_is_of_the_type_that_the_stub_says(name):
    assert is_of(getattr(_C, name), CONSTANTS[name])


# ---- dicts ------------------------------------------------------------------------------------------------------


def assert_holds(values: dict[str, Any], name: str) -> None:
    stated = {ast.unparse(node.target): node.annotation for node in DICTS[name].body if isinstance(node, ast.AnnAssign)}
    assert values.keys() == stated.keys()
    assert [key for key, value in values.items() if not is_of(value, stated[key])] == []


def test_statistics_of_a_lane_hold_what_the_stub_says():
    backend, pool = _C.make_host_backend(1 << 20), _C.HostOptimizer(1)
    backend.begin_counting(0)
    for stats in (backend.stats("fetch"), backend.counted("fetch"), pool.stats()):
        assert_holds(stats, "LaneStats")
    backend.close()
    pool.close()


def test_statistics_of_a_wrapped_model_hold_what_the_stub_says():
    model = torch.nn.Linear(8, 8)
    model, _ = noria.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")
    model(torch.ones(1, 8)).sum().backward()
    statistics = wrapped_by(model).context.engine.statistics
    assert_holds(statistics.update_stats(), "LaneStats")
    for each in statistics.passes():
        assert_holds(each, "PassStats")
    assert len(statistics.passes()) == 2
    noria.unwrap(model)


def test_a_pace_takes_the_hostility_that_the_stub_says():
    hostility = {"seed": 1, "max_delay_us": 2, "hold_us": {"fetch": 3}, "poison": True}
    _C.SlowPace(hostility=hostility)
    assert_holds(hostility, "Hostility")


# ---- the test's own promise -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "built"),
    [
        ("f(a: str) -> None", "f(a: typing.SupportsInt | typing.SupportsIndex) -> None"),
        ("f(a: int) -> None", "f(a: typing.SupportsFloat | typing.SupportsIndex) -> None"),
        ("f(a: Sequence[int]) -> None", "f(a: collections.abc.Sequence[str]) -> None"),
        ("f(a: list[int]) -> None", "f(a: collections.abc.Sequence[typing.SupportsInt]) -> None"),
        ("f(a: Mapping[str, int]) -> None", "f(a: dict) -> None"),
        ("f(a: Ticket) -> None", "f(a: noria._C.Trace) -> None"),
        ("f(a: Ticket | None) -> None", "f(a: noria._C.Ticket) -> None"),
        ("f(a: Ticket) -> None", "f(a: noria._C.Ticket | None) -> None"),
        ("f(a: Ticket) -> None", "f(a: noria._C.Ticket = None) -> None"),
        ("f(a: tuple[float, float]) -> None", 'f(a: typing.Annotated[Sequence[float], "FixedSize(3)"]) -> None'),
        ("f() -> int", "f() -> str"),
        ("f() -> int", "f() -> int | None"),
        ("f() -> list[Op]", "f() -> list[noria._C.Span]"),
        ("f() -> list[int]", "f() -> dict"),
        ("f() -> torch.dtype", "f() -> torch.Tensor"),
    ],
)
def test_a_difference_of_types_is_seen(stated, built):
    [found] = differences(parsed(stated), parsed(built), "f")
    assert "the stub says" in found


@pytest.mark.parametrize(
    ("stated", "built"),
    [
        (
            "f(a: int, b: float) -> int",
            "f(a: typing.SupportsInt, b: typing.SupportsFloat | typing.SupportsIndex) -> int",
        ),
        ("f(a: Ticket | None = None) -> None", "f(a: noria._C.Ticket = None) -> None"),
        ("f(a: int | None = ...) -> None", "f(a: typing.SupportsInt | typing.SupportsIndex | None = None) -> None"),
        ("f(a: Callable[[int], None]) -> dict[str, int]", "f(a: collections.abc.Callable) -> dict"),
        ("f(a: _Bytes) -> list[LaneStats]", "f(a: bytes) -> list"),
        ("f(a: tuple[float, float]) -> None", 'f(a: typing.Annotated[Sequence[float], "FixedSize(2)"]) -> None'),
        ("f(a: Pace | None) -> None", "f(a: object = None) -> None"),
    ],
)
def test_one_type_may_be_spelled_in_two_ways(stated, built):
    assert differences(parsed(stated), parsed(built), "f") == []
