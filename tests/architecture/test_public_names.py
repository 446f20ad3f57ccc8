"""The public surface is what the documentation names, and nothing else."""

import noria

PUBLIC = {
    "MachineError",
    "Policy",
    "UsageError",
    "asleep",
    "ema",
    "is_wrapped",
    "load",
    "load_pretrained",
    "materialize",
    "optim",
    "plain_state_dict",
    "plan",
    "report",
    "save",
    "sharded_state",
    "testing",
    "unwrap",
    "weights",
    "wrap",
}


def test_public_names_are_exactly_these():
    assert set(noria.__all__) == PUBLIC
    assert len(noria.__all__) == len(PUBLIC)


def test_every_public_name_exists_and_says_what_it_is():
    for name in noria.__all__:
        assert getattr(noria, name).__doc__, f"noria.{name} has no docstring"


def test_nothing_else_looks_public():
    submodules = {name for name, value in vars(noria).items() if type(value).__name__ == "module"}
    visible = {name for name in vars(noria) if not name.startswith("_")}
    assert visible - submodules <= PUBLIC
