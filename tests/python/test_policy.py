"""A policy is refused as soon as it is wrong, in three parts; a right one means what its text says."""

import ast
import dataclasses
import inspect
import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from noria._errors import UsageError
from noria.policy import Policy, compute_device, format_bytes, make_policy, parse_bytes, to_bytes
from torch import nn

FACTORS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


@given(
    thousandths=st.integers(0, 10**7),
    unit=st.sampled_from(sorted(FACTORS)),
    space=st.sampled_from(["", " "]),
    lower=st.booleans(),
)
def test_bytes_are_parsed_exactly_in_every_unit_and_spelling(thousandths, unit, space, lower):
    text = f"{thousandths // 1000}.{thousandths % 1000:03d}{space}{unit}"
    exact = Fraction(thousandths, 1000) * FACTORS[unit]
    assert parse_bytes(text.lower() if lower else text) == exact.numerator // exact.denominator


@given(st.integers(0, 2**45))
def test_formatted_bytes_parse_back_to_within_the_shown_digit(num_bytes):
    text = format_bytes(num_bytes)
    amount, unit = text.split()
    shown_digit = 0 if unit == "B" else Fraction(FACTORS[unit], 10)
    assert abs(parse_bytes(text) - num_bytes) <= shown_digit / 2 + 1  # parsing drops less than a byte
    assert float(amount) < 1024


@pytest.mark.parametrize("text", ["", "8", "GiB", "8 GiB 2", "-1GiB", "1e3MiB", "8Gi", "8GiBs", "٨GiB", "inf GiB"])
def test_text_that_is_no_amount_of_memory_is_refused(text):
    with pytest.raises(UsageError, match=r"expected .*, but found .*\. Remedy: "):
        parse_bytes(text)


WRONG = {
    "device": ["gpu", "cuda:", "cuda:-1", "cuda:01", "CPU", 0, None, "cuda:0\n"],
    "device_memory": [
        "8",
        "lots",
        "0GiB",
        0,
        -1,
        0.0,
        1.5,
        8.0,
        -0.5,
        float("nan"),
        float("inf"),
        True,
        None,
    ],
    "host_memory": ["", "0B", 0, -5, 0.5, 1.0, False, None],
    "files": [[], 7, [3], ["/a", "/a"], True],
    "file_memory": ["", "0B", 0, -5, 0.5, False, None, "1GiB"],  # the last one lacks files
    "window": [1, 0, -3, 2.0, "4", True, None],
    "resident": ["some", "", 1.0, 0, True, None],
    "units": ["blocks", nn.Linear, [], [""], [3], [nn.Linear(1, 1)], [int], None],
    "dtype": [torch.float16, torch.float32, "bfloat16", "auto"],
    "kernel": ["triton", "", None, True],
    "optimizer_device": ["cuda", "cpu", "auto", True, None],
    "state_dtype": ["fp16", "bfloat16", torch.bfloat16, 8, None],
    "rounding_seed": [-1, 2**64, 0.5, True, "0", None],
    "activations": ["drop", None],
    "activation_memory": [0, 0.5, -1, "much", None],
    "update": ["inside", "async", None],
    "draft_memory": [-1, True, "lots", 0.5, None],
    "max_grad_norm": [0, -1.0, True, "1", float("nan"), 10**400],
    "reduce_dtype": [torch.bfloat16, "float32", 32],
    "find_unused_parameters": [0, 1, "yes", None],
    "check": ["on", True, None],
    "reads": ["always", True, None],
    "trace": ["", 3, True],
}
RIGHT = {
    "device": ["auto", "cuda", "cuda:0", "cuda:12", "cpu"],
    "device_memory": ["auto", "8GiB", "1.5 gb", 1, 2**40, 0.5, 1.0],
    "host_memory": ["auto", "64GiB", 10**9],
    "files": [None],
    "file_memory": ["auto"],
    "window": ["auto", 2, 17],
    "resident": ["none", "all", "auto", "8GiB", 1 << 30],
    "units": ["auto", ["*.layers.*"], [nn.Linear, "h.*"]],
    "dtype": [None, torch.bfloat16],
    "kernel": ["auto", "fused", "torch"],
    "optimizer_device": ["host", "device"],
    "state_dtype": ["fp32", "bf16", "8bit"],
    "rounding_seed": [0, 2**64 - 1],
    "activations": ["keep", "offload", "recompute", "auto"],
    "activation_memory": ["auto"],
    "update": ["auto", "backward", "blocking"],
    "draft_memory": ["auto", 0, 1 << 20, "8GiB"],
    "max_grad_norm": [None, 1, 0.5, float("inf")],
    "reduce_dtype": [None, torch.float32],
    "find_unused_parameters": [True, False],
    "check": ["auto", "operators", "off"],
    "reads": ["passes", "home"],
    "trace": [None, "trace.json"],
}


def pairs(values_by_name):
    return [(name, value) for name, values in values_by_name.items() for value in values]


def test_every_field_is_tried_with_right_and_wrong_values():
    names = [field.name for field in dataclasses.fields(Policy)]
    assert list(WRONG) == list(RIGHT) == names


@pytest.mark.parametrize(("name", "value"), pairs(WRONG))
def test_a_nonsense_value_is_refused_with_its_field_what_was_found_and_a_remedy(name, value):
    with pytest.raises(UsageError, match=rf"^noria expected .*{name}.*, but found .*\. Remedy: .+"):
        make_policy(None, {name: value})


@pytest.mark.parametrize(("name", "value"), pairs(RIGHT))
def test_a_right_value_is_kept_as_it_was_given(name, value):
    kept = getattr(make_policy(None, {name: value}), name)
    assert (list(kept) if isinstance(value, list) else kept) == value


def test_activation_memory_is_for_auto():
    assert make_policy(None, {"activations": "auto", "activation_memory": "1MiB"}).activation_memory == "1MiB"
    for other in ("keep", "offload", "recompute"):
        with pytest.raises(UsageError, match=f'activations="auto", but found it with activations="{other}"'):
            make_policy(None, {"activations": other, "activation_memory": "1MiB"})


def test_a_window_of_one_is_refused_with_the_reason():
    with pytest.raises(UsageError, match=r"nothing can be fetched while the only leased unit computes"):
        Policy(window=1)


def test_a_misspelt_field_is_refused_and_the_near_one_is_named():
    with pytest.raises(UsageError, match=r"device_memroy=.*did you mean 'device_memory'"):
        make_policy(None, {"device_memroy": "8GiB"})
    with pytest.raises(UsageError, match=r"policy fields out of device, .*, trace"):
        make_policy(None, {"zero_stage": 3})


def test_a_policy_and_fields_together_are_refused_even_if_they_agree():
    with pytest.raises(UsageError, match=r"not both"):
        make_policy(Policy(), {"window": "auto"})


@pytest.mark.parametrize("not_a_policy", ["8GiB", {"window": 2}, 3])
def test_something_else_in_place_of_a_policy_is_refused(not_a_policy):
    with pytest.raises(UsageError, match=r"expected a noria.Policy"):
        make_policy(not_a_policy, {})


def test_a_given_policy_is_returned_itself_and_cannot_be_edited():
    policy = Policy(window=3)
    assert make_policy(policy, {}) is policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.window = 4  # type: ignore[misc]


def test_editing_the_list_that_was_given_as_units_does_not_edit_the_policy():
    units = [nn.Linear]
    policy = Policy(units=units)
    units.append(nn.Embedding)
    assert list(policy.units) == [nn.Linear]
    assert hash(policy) == hash(Policy(units=[nn.Linear]))


def test_a_torch_device_is_taken_like_its_name():
    assert Policy(device=torch.device("cuda", 1)).device == "cuda:1"


def test_every_field_has_a_docstring_of_its_own():
    body = ast.parse(inspect.getsource(Policy)).body[0].body
    for field, following in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)


def test_a_fraction_is_of_the_whole_and_amounts_are_themselves():
    assert to_bytes(Policy(device_memory=0.25).device_memory, 1000) == 250
    assert to_bytes(Policy(device_memory=1.0).device_memory, 1001) == 1001
    assert to_bytes(Policy(device_memory=1).device_memory, 1000) == 1
    assert to_bytes(Policy(device_memory="2KiB").device_memory, 1000) == 2048
    assert to_bytes(Policy().device_memory, 1000) is None
    assert to_bytes(Policy(host_memory="3KiB").host_memory) == 3072
    assert to_bytes(Policy().host_memory) is None


@pytest.mark.parametrize(
    ("num_devices", "wanted", "expected"),
    [
        (0, "auto", "cpu"),
        (2, "auto", "cuda:1"),
        (2, "cuda", "cuda:1"),
        (2, "cuda:0", "cuda:0"),
        (2, "cpu", "cpu"),
    ],
)
def test_auto_is_the_current_cuda_device_where_there_is_one(monkeypatch, num_devices, wanted, expected):
    pretend_cuda(monkeypatch, num_devices)
    assert str(compute_device(Policy(device=wanted))) == expected


@pytest.mark.parametrize(("num_devices", "wanted"), [(0, "cuda"), (0, "cuda:0"), (2, "cuda:2")])
def test_a_device_that_the_machine_lacks_is_refused(monkeypatch, num_devices, wanted):
    pretend_cuda(monkeypatch, num_devices)
    with pytest.raises(UsageError, match=r"cuda|CUDA"):
        compute_device(Policy(device=wanted))


def pretend_cuda(monkeypatch, num_devices):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
