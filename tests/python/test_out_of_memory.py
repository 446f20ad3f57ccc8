"""What noria says when torch's allocator finds no memory: how much of it is noria's, and what would do."""

import types
import weakref

import pytest
import torch
from noria import out_of_memory
from noria.out_of_memory import advice, tell_when_full
from noria.planning.budgets import room_on_device
from noria.policy import Policy

MIB = 1 << 20


def told(taken, least, wanted, activations="keep"):
    policy = types.SimpleNamespace(activations=activations)
    plan = types.SimpleNamespace(device="cuda:0", least_device=least, policy=policy, stays=frozenset())
    return advice(plan, taken, wanted)


def test_a_smaller_window_is_named_by_what_leaves_a_quarter_more_than_was_wanted():
    text = told(8000 * MIB, 1000 * MIB, 2000 * MIB)
    assert "out of memory for 2.0 GiB" in text and "noria has 7.8 GiB" in text
    assert f'device_memory="{2 * (8000 - 2500)}MiB"' in text  # half of it is the window's


def test_what_is_named_is_enough_though_it_is_rounded():
    kib = 1 << 10
    text = told(8000 * MIB, 5500 * MIB - 200 * kib, 2000 * MIB + 100 * kib)
    assert "device_memory" not in text  # what is left is 5500 MiB - 125 KiB: 10999 MiB are less than is needed


@pytest.mark.parametrize(("activations", "remedy"), [("keep", 'activations="auto"'), ("offload", "a smaller batch")])
def test_a_window_that_cannot_be_smaller_is_not_to_be(activations, remedy):
    text = told(8000 * MIB, 7000 * MIB, 2000 * MIB, activations)
    assert "device_memory" not in text and remedy in text


def test_rows_of_words_leave_room_for_the_loss_under_auto():
    """16384 tokens x 32768 words x 12 bytes are 6 GiB; of 8 GiB a quarter is left, and no more than asked for."""
    unit = types.SimpleNamespace(is_block=False, parameters=[types.SimpleNamespace(shape=torch.Size([32768, 64]))])
    block = types.SimpleNamespace(is_block=True, parameters=[types.SimpleNamespace(shape=torch.Size([1 << 20, 64]))])
    auto, explicit = Policy(), Policy(device_memory=8 << 30)
    assert room_on_device(auto, (64 << 30, 80 << 30), [unit, block]) == (64 - 6) << 30
    assert room_on_device(auto, (8 << 30, 80 << 30), [unit, block]) == 6 << 30
    assert room_on_device(auto, (8 << 30, 80 << 30), [block]) == 8 << 30
    assert room_on_device(explicit, (64 << 30, 80 << 30), [unit]) == 8 << 30


def test_an_allocator_without_observers_is_no_obstacle(monkeypatch):
    """That of `backend:cudaMallocAsync` refuses to be observed. By then the model has moved."""

    def refuse(observer):
        raise RuntimeError("cudaMallocAsync does not support OOM observers")

    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", refuse, raising=False)
    monkeypatch.setattr(out_of_memory, "_is_told", [])
    monkeypatch.setattr(out_of_memory, "_RUNNING", weakref.WeakSet())

    class Run:
        context = types.SimpleNamespace(device=torch.device("cuda:0"))

    tell_when_full(Run())
    assert out_of_memory._is_told == [], "an allocator that comes later is asked again"
