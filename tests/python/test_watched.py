"""Storages that say when they are about to be written (csrc/bindings/watched.h), by torch's call-back or, as before
torch 2.13, as lazy copies. With a torch that has the call-back, the second way is tried in a process of its own."""

import gc
import io
import os
import subprocess
import sys
import weakref

import noria  # noqa: F401
import pytest
import torch
from noria import _C

WIDTH = 8


class Callback:
    def __init__(self, before_write):
        self.count = 0
        self.before_write = before_write

    def __call__(self):
        self.count += 1
        self.before_write()


class Watched:
    """A tensor in an arena, beside a tensor that is not watched."""

    def __init__(self, before_write=lambda: None):
        self.arena = _C.Arena(1 << 16)
        self.callback = Callback(before_write)
        self.plain = _C.tensor_in(self.arena, 0, torch.float32, [WIDTH], [1])
        self.plain.copy_(torch.arange(float(WIDTH)))
        self.tensor = _C.watched_tensor_in(self.arena, 0, torch.empty(WIDTH), torch.float32, self.callback)
        _C.watch(self.tensor)

    @property
    def calls(self):
        return self.callback.count


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.mul_(2),
        lambda t: t.data.mul_(2),
        lambda t: t.detach()[2:4].fill_(7),
        lambda t: t.numpy().fill(7),
        lambda t: torch.add(t, 1, out=t),
        lambda t: torch._foreach_mul_([t], 2.0),
        lambda t: t.untyped_storage().fill_(1),
        lambda t: torch.from_dlpack(t).zero_(),
        lambda t: t.untyped_storage().copy_(torch.ones(WIDTH).untyped_storage()),
    ],
    ids=range(9),
)
def test_the_first_write_calls_back_before_it_happens_and_the_second_does_not(write):
    seen = []
    watched = Watched(lambda: seen.append(watched.plain.clone()))
    write(watched.tensor)
    write(watched.tensor)
    assert watched.calls == 1
    assert torch.equal(seen[0], torch.arange(float(WIDTH)))
    assert torch.equal(watched.tensor, watched.plain)  # the write went where all look
    assert not torch.equal(watched.plain, seen[0])
    watched.callback.before_write = None  # for the tensor keeps its callback, which keeps the tensor


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t + 1,
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: t.clone(),
        lambda t: torch.equal(t, t.flip(0)),
        lambda t: repr(t),
        lambda t: t.to(torch.float64),
        lambda t: torch._foreach_norm([t]),
        lambda t: torch.ones(WIDTH).copy_(t),
    ],
    ids=range(9),
)
def test_reading_does_not(read):
    watched = Watched()
    read(watched.tensor)
    assert watched.calls == 0


def test_it_is_watched_again_when_asked_for():
    watched = Watched()
    for number in range(1, 4):
        watched.tensor.add_(1)
        watched.tensor.add_(1)
        assert watched.calls == number
        _C.watch(watched.tensor)
        _C.watch(watched.tensor)
    assert watched.plain.tolist() == [each + 6.0 for each in range(WIDTH)]


def test_a_write_that_is_refused_does_not_happen_and_the_next_one_is_asked_for_again():
    def refuse():
        raise RuntimeError("not now")

    watched = Watched(refuse)
    for number in range(1, 4):
        with pytest.raises(RuntimeError, match="not now"):
            watched.tensor.add_(1)
        assert watched.calls == number
    assert watched.plain.tolist() == list(range(WIDTH))
    watched.callback.before_write = lambda: None
    watched.tensor.add_(1)
    assert watched.plain.tolist() == [each + 1.0 for each in range(WIDTH)]


@pytest.mark.parametrize("in_the_call", [False, True])
def test_it_stays_watched_where_it_is_moved_to(in_the_call):
    def move():
        _C.move_tensor(watched.tensor, watched.arena.data + 4096)

    watched = Watched()
    if in_the_call:
        watched.callback.before_write = move
    there = _C.tensor_in(watched.arena, 4096, torch.float32, [WIDTH], [1])
    there.zero_()
    if not in_the_call:
        move()
    watched.tensor.add_(1)
    assert watched.calls == 1
    assert there.tolist() == [1.0] * WIDTH
    assert watched.plain.tolist() == list(range(WIDTH))
    _C.watch(watched.tensor)
    watched.tensor.add_(1)
    assert watched.calls == 2
    watched.callback.before_write = None  # as above


@pytest.mark.parametrize("state", ["watched", "written", "watched again"])
def test_its_memory_and_its_callback_are_let_go_of_with_it(state):
    gc.collect()
    before = _C.living()["arena_bytes"]
    watched = Watched()
    if state != "watched":
        watched.tensor.add_(1)
    if state == "watched again":
        _C.watch(watched.tensor)
    alias = watched.tensor[2:]
    known = weakref.ref(watched.callback)
    del watched
    gc.collect()
    assert known() is not None  # the alias keeps it
    assert _C.living()["arena_bytes"] > before
    del alias
    gc.collect()
    assert known() is None
    assert _C.living()["arena_bytes"] == before


def test_a_saved_tensor_is_whole():
    watched = Watched()
    file = io.BytesIO()
    torch.save(watched.tensor, file)
    file.seek(0)
    assert torch.equal(torch.load(file), watched.plain)


@pytest.mark.skipif(
    _C.LAZY_COPIES, reason="storages are watched as lazy copies in this process already: this torch has no other way"
)
def test_all_of_this_holds_for_lazy_copies_too():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "NORIA_LAZY_COPIES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 skipped" in done.stdout  # this one
