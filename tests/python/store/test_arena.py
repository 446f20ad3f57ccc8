"""An arena takes exactly what it says, lazily, and gives all of it back."""

import ctypes
import mmap
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20


def mapped_range(address):
    """The mapping that holds `address`, as the kernel tells it, with its counts; None when there is none."""
    current, found = None, {}
    with open("/proc/self/smaps") as lines:
        for line in lines:
            head = line.split(maxsplit=1)[0]
            if "-" in head and not head.endswith(":"):
                begin, end = (int(part, 16) for part in head.split("-"))
                current = begin <= address < end
                if current:
                    found = {"begin": begin, "end": end}
            elif current:
                key, value = line.split(":", 1)
                found[key] = value.split() if key == "VmFlags" else value
    return found or None


def address_space_bytes():
    with open("/proc/self/statm") as counts:
        return int(counts.read().split()[0]) * PAGE


def resident_bytes(mapping):
    return int(mapping["Rss"].split()[0]) * 1024


@given(num_bytes=st.integers(1, 3 * HUGE_PAGE))
@settings(max_examples=25)
def test_size_is_rounded_to_the_page_and_to_nothing_else(num_bytes):
    arena = _C.Arena(num_bytes)
    assert arena.bytes == num_bytes
    assert arena.mapped_bytes == -(-num_bytes // PAGE) * PAGE
    assert arena.data % HUGE_PAGE == 0
    mapping = mapped_range(arena.data)
    assert mapping["begin"] == arena.data
    assert mapping["end"] == arena.data + arena.mapped_bytes
    arena.close()


def test_nothing_of_what_alignment_took_is_kept():
    num_bytes = 3 * PAGE + 1
    growths, arenas = [], []
    for _ in range(20):
        before = address_space_bytes()
        arenas.append(_C.Arena(num_bytes))
        growths.append(address_space_bytes() - before)
    assert min(growths) == 4 * PAGE  # the least: another thread may map something meanwhile


def test_pages_are_taken_when_first_written():
    arena = _C.Arena(16 << 20)
    assert resident_bytes(mapped_range(arena.data)) == 0
    ctypes.memset(arena.data, 1, 1)
    assert 0 < resident_bytes(mapped_range(arena.data)) <= HUGE_PAGE
    ctypes.memset(arena.data, 1, arena.bytes)
    assert resident_bytes(mapped_range(arena.data)) == 16 << 20


def test_huge_pages_are_advised_and_children_may_read_what_no_device_reads():
    arena = _C.Arena(4 << 20)
    flags = mapped_range(arena.data)["VmFlags"]
    assert "dc" not in flags  # copied on fork
    if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        assert "hg" in flags


def test_memory_is_unmapped_by_close_and_by_the_last_reference():
    arena = _C.Arena(10 << 20)
    data = arena.data
    arena.close()
    arena.close()
    assert mapped_range(data) is None
    assert (arena.data, arena.bytes, arena.mapped_bytes) == (0, 0, 0)
    arena = _C.Arena(10 << 20)
    data = arena.data
    del arena
    assert mapped_range(data) is None


def test_registered_arena_keeps_its_backend_and_unregisters_once():
    backend = _C.make_host_backend(1 << 20)
    arena = _C.Arena(1 << 20)
    arena.register_with(backend)
    assert arena.registered
    with pytest.raises(_C.InvariantError, match="registered twice"):
        arena.register_with(backend)
    arena.close()
    assert not arena.registered
    backend.close()


def test_empty_arena_takes_nothing():
    arena = _C.Arena(0)
    assert (arena.data, arena.bytes, arena.mapped_bytes) == (0, 0, 0)
    arena.register_with(_C.make_host_backend(1 << 20))
    assert not arena.registered


def test_refusal_names_the_sizes():
    with pytest.raises(_C.MachineError, match=r"mmap failed for an arena of .*1152921504606846976 bytes"):
        _C.Arena(1 << 60)
    with pytest.raises(_C.InvariantError):
        _C.Arena(-1)


# ---- populate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask_kernel", [True, False])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_populate_takes_all_pages_and_keeps_what_they_hold(ask_kernel, num_threads):
    arena = _C.Arena(37 * (1 << 20) + 5)
    ctypes.memset(arena.data + (10 << 20), 7, 3)
    told = []
    arena.populate(told.append, num_threads, ask_kernel)
    resident = resident_bytes(mapped_range(arena.data))
    assert resident == arena.mapped_bytes
    assert told[-1] == arena.bytes and told == sorted(told)
    assert ctypes.string_at(arena.data + (10 << 20) - 1, 5) == b"\0\7\7\7\0"
    arena.close()


def test_no_arena_no_pages():
    told = []
    _C.Arena(0).populate(told.append)
    assert told == []


def test_threads_are_as_many_as_the_process_may_use():
    allowed = os.sched_getaffinity(0)
    assert _C.num_usable_cpus() == len(allowed)
    os.sched_setaffinity(0, [min(allowed)])
    try:
        assert _C.num_usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, allowed)


class EnoughError(Exception):
    pass


def test_any_error_while_populating_ends_it_and_close_gives_all_back():
    def told(populated):
        raise EnoughError

    arena = _C.Arena(256 << 20)
    with pytest.raises(EnoughError):
        arena.populate(told)
    data = arena.data
    arena.close()
    assert mapped_range(data) is None


def test_a_memory_node_that_does_not_exist_is_said_and_harms_nothing():
    arena = _C.Arena(1 << 20)
    assert arena.prefer_node(1023).startswith("mbind to node 1023 failed: ")
    assert arena.prefer_node(0) == "" or "mbind to node 0 failed" in arena.prefer_node(0)  # containers may forbid it
    arena.populate()
    assert resident_bytes(mapped_range(arena.data)) == 1 << 20
    with pytest.raises(_C.InvariantError, match="no such NUMA node"):
        arena.prefer_node(-1)


def test_a_use_of_home_memory_is_one_of_two():
    with pytest.raises(_C.UsageError, match='"copies" or "device"'):
        _C.Arena(4096).register_with(_C.make_host_backend(1 << 20), "both")
