"""The memory that records pass through: its pages lie side by side in the machine, where the kernel allows it."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import struct
from pathlib import Path

import pytest
from noria import _C

MIB = 1 << 20
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def kernel() -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", platform.release())[:2])


def frames(address: int, count: int) -> list[int]:
    """Where pages lie in the machine's memory; zeros, if this process may not know."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(address // mmap.PAGESIZE * 8)
        return [entry & (1 << 55) - 1 for (entry,) in struct.iter_unpack("Q", pages.read(8 * count))]


def test_shared_pages_begin_as_zeros_and_keep_what_is_written():
    pages = _C.SharedPages(5 * MIB + 4096)
    assert ctypes.string_at(pages.address, 5 * MIB + 4096) == bytes(5 * MIB + 4096)
    ctypes.memset(pages.address + 3 * MIB, 7, MIB)
    assert ctypes.string_at(pages.address + 3 * MIB - 1, MIB + 2) == b"\0" + b"\7" * MIB + b"\0"


@pytest.mark.skipif(kernel() < (6, 1) or not HUGE.exists(), reason="this kernel does not join pages at once")
def test_shared_pages_are_those_of_2_mib_but_for_the_last():
    pages = _C.SharedPages(5 * MIB)
    ctypes.memset(pages.address, 1, 5 * MIB)
    for begin in (0, 2 * MIB):
        first, *others = frames(pages.address + begin, 2 * MIB // mmap.PAGESIZE)
        if first == 0:
            pytest.skip("only root may know where pages lie")
        assert others == list(range(first + 1, first + 1 + len(others)))
