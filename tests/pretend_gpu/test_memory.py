"""Memory of the pretend GPU: torch's caching allocator, what it counts, and who may touch it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap

import _pretend_gpu
import numpy as np
import pytest
import torch

from tests.pretend_gpu import vehicle
from tests.pretend_gpu.machine import counters, machine, reset_counters

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty_device():
    gc.collect()  # what failed elsewhere is held by its exceptions
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()


def test_memory_is_used_again_at_once_on_its_stream_and_overwritten_first():
    x = torch.zeros(1000, device="cuda")
    address = x.data_ptr()
    del x
    with machine(lazy=True):
        y = torch.empty(1000, device="cuda")
        assert y.data_ptr() == address
        assert y.view(torch.uint8).eq(0xFF).all()
    other = torch.cuda.Stream()
    del y
    with torch.cuda.stream(other):
        assert torch.empty(1000, device="cuda").data_ptr() != address, "the memory of another stream"


def test_a_recorded_stream_is_waited_for_before_memory_is_used_again():
    side = torch.cuda.Stream()
    with machine(lazy=True):
        x = torch.zeros(1000, device="cuda")
        with torch.cuda.stream(side):
            torch.ones(1, device="cuda")  # something that is not done
        x.record_stream(side)
        address = x.data_ptr()
        del x
        kept = torch.empty(1000, device="cuda")
        assert kept.data_ptr() != address
        side.synchronize()
        assert torch.empty(1000, device="cuda").data_ptr() == address


def test_statistics_count_what_torchs_own_allocator_would():
    x = torch.empty(1000, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 1024 and torch.cuda.memory_reserved() == 2 * MIB
    y = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 1024 + 3 * MIB and torch.cuda.memory_reserved() == 22 * MIB
    z = torch.empty(18 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == 40 * MIB
    stats = torch.cuda.memory_stats()
    assert stats["requested_bytes.all.current"] == 1000 + 21 * MIB
    assert stats["active.all.current"] == 3 and stats["segment.all.current"] == 3
    assert stats["inactive_split_bytes.all.current"] == 2 * MIB - 1024 + 17 * MIB
    del y, z
    assert torch.cuda.memory_allocated() == 1024
    assert torch.cuda.max_memory_allocated() == 1024 + 21 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 1024 and torch.cuda.max_memory_reserved() == 40 * MIB
    free, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info() == (free + 38 * MIB, total) and torch.cuda.memory_reserved() == 2 * MIB
    assert x.numel() == 1000 and "1024 B" in torch.cuda.memory_summary()
    assert torch.cuda.memory_allocated(1) == 0
    assert torch.accelerator.memory_allocated() == 1024


def test_neighbours_become_one_again():
    blocks = [torch.empty(5 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    first = min(each.data_ptr() for each in blocks)
    assert torch.cuda.memory_reserved() == 20 * MIB
    del blocks
    whole = torch.empty(9 * MIB, dtype=torch.uint8, device="cuda")
    assert whole.data_ptr() == first and torch.cuda.memory_reserved() == 20 * MIB


def test_a_full_device_is_out_of_memory_as_torch_says_it():
    with machine(memory=64 * MIB):
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        text = str(caught.value)
        assert text.startswith(
            "CUDA out of memory. Tried to allocate 30.00 MiB. GPU 0 has a total capacity of 64.00 MiB"
        )
        assert "40.00 MiB is allocated by PyTorch" in text
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        del kept
        del caught
        assert torch.empty(50 * MIB, dtype=torch.uint8, device="cuda").numel(), "what is cached is given back first"
        assert torch.cuda.memory_stats()["num_alloc_retries"] == 2
        torch.cuda.empty_cache()


def test_who_is_told_of_a_full_device_may_ask_it():
    run(
        """
        import torch
        torch.cuda.init()
        x = [torch.ones(1, device="cuda")]
        def observe(*told):
            seen.append(torch.cuda.memory_allocated())
            x.clear()
            seen.append(torch.cuda.memory_allocated())
        seen = []
        torch._C._cuda_attach_out_of_memory_observer(observe)
        try:
            torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        assert seen == [512, 0], seen
        """
    )


def test_a_fraction_of_the_device_is_a_limit():
    torch.cuda.set_per_process_memory_fraction(0.03)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"30.72 MiB allowed"):
            torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_cpu_and_the_device_copy_to_each_other():
    x = torch.arange(12.0).view(3, 4)
    for source in (x, x.t(), x[:, ::2]):
        up = source.to("cuda")
        assert up.is_cuda and torch.equal(up.cpu(), source)
    into = torch.zeros(3, 4, dtype=torch.float64)
    into.copy_(x.cuda())
    assert torch.equal(into, x.double())
    x.cuda().t().copy_(torch.ones(4, 3, dtype=torch.int32))
    assert torch.equal(x.cuda().to("cuda:1").cpu(), x)


def test_pinned_memory_is_copied_behind_the_hosts_back():
    host = torch.arange(1000.0).pin_memory()
    assert host.is_pinned() and not torch.ones(1).is_pinned()
    back = torch.empty(1000, pin_memory=True)
    with machine(lazy=True):
        reset_counters()
        device = host.to("cuda", non_blocking=True)
        back.copy_(device * 2, non_blocking=True)
        assert counters()["host_waits"] == 0
        assert not torch.equal(back, host * 2)
        torch.cuda.synchronize()
        assert torch.equal(back, host * 2)
        reset_counters()
        device.copy_(torch.ones(1000), non_blocking=True)  # staged at once, and so not waited for
        assert counters()["host_waits"] == 0
        torch.ones(1000).to("cuda")
        assert counters()["host_waits"] == 1


def test_pinned_memory_that_a_stream_still_reads_is_not_given_out_again():
    with machine(lazy=True):
        host = torch.full((1000,), 3.0).pin_memory()
        address = host.data_ptr()
        device = host.to("cuda", non_blocking=True)
        del host
        again = torch.empty(1000, pin_memory=True).fill_(0)
        assert again.data_ptr() != address
        assert device.eq(3).all()
        assert torch.empty(1000, pin_memory=True).data_ptr() == address


def test_between_devices_both_streams_wait():
    with machine(seed=1, max_delay_us=2000, delayed_percent=100):
        x = torch.zeros(1000, device="cuda:0")
        for _ in range(5):
            x.add_(1)
        y = x.to("cuda:1")
        x.zero_()
        y.mul_(2)
        assert y.device.index == 1 and y.eq(10).all()


def registered(count):
    """Registered host memory as noria has it: an array, and a tensor over it that says it is on the device."""
    array = np.zeros(count, np.float32)
    assert torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0) == 0
    return array, _pretend_gpu.at_address(array.ctypes.data, count)


def test_the_device_reaches_registered_host_memory_and_its_bytes_are_counted():
    array, x = registered(1000)
    try:
        reset_counters()
        x.add_(1)  # reads and writes
        seen = counters()
        assert (seen["link_bytes_read"], seen["link_bytes_written"]) == (4000, 4000)
        x.zero_()  # writes
        y = x * 2  # reads
        seen = counters()
        assert (seen["link_bytes_read"], seen["link_bytes_written"]) == (8000, 8000)
        y.copy_(x)  # by a copy engine
        x.cpu()
        assert all(counters()[name] == seen[name] for name in seen if name.startswith("link"))
        y = y.to(torch.float64)
        y.copy_(x)  # by a kernel, which converts
        assert counters()["link_bytes_read"] == 12000
        torch._foreach_mul_([x], 3)
        assert counters()["link_bytes_written"] == 12000
        torch.cuda.synchronize()
        x.add_(5)
        torch.cuda.synchronize()
        assert (array == 5).all()
    finally:
        torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        x.add_(1)


def test_memory_that_goes_away_under_a_kernel_is_a_failure_of_the_device():
    array, x = registered(1000)
    with machine(lazy=True):
        x.add_(1)
        torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)
        with pytest.raises(RuntimeError, match="freed, closed or unregistered between the launch and"):
            torch.cuda.synchronize()
    assert (array == 0).all()


def run(code, expect=0):
    """In a process of its own, which has the pretend GPU too. Its error output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=vehicle.ROOT, timeout=120
    )
    assert (done.returncode == 0) == (expect == 0), done.stderr
    return done.stderr


def test_training_on_a_device_never_touches_another():
    """Setting device 0 on a thread, if only back to it, makes a context there, which takes half a GiB."""
    run(
        """
        import noria, torch
        import _pretend_gpu
        torch.cuda.set_device(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        before = _pretend_gpu.calls().get("cudaSetDevice to 0", 0)
        noria.wrap(model, optimizer, device="cuda:1")
        model(torch.zeros(2, 64, device="cuda:1")).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
        assert _pretend_gpu.calls().get("cudaSetDevice to 0", 0) == before
        """
    )


@pytest.mark.parametrize(
    ("touch", "kind"),
    [
        ("ctypes.string_at(x.data_ptr() + 40, 4)", "byte 40 of a block of 400 bytes that torch's allocator gave out"),
        ("ctypes.memset(x.data_ptr() + 40, 0, 4)", "byte 40 of a block of 400 bytes that torch's allocator gave out"),
        ("ctypes.string_at(x.data_ptr() + (200 << 20), 4)", "memory of cuda:1 that is not allocated"),
    ],
)
def test_a_host_that_touches_device_memory_dies_with_a_report(touch, kind):
    told = run(
        f"""
        import ctypes, faulthandler
        import torch
        faulthandler.enable()
        import _pretend_gpu
        _pretend_gpu.report_faults()
        x = torch.zeros(100, device="cuda:1")
        torch.cuda.synchronize()
        {touch}
        """,
        expect=-11,
    )
    assert "pretend GPU: the host touched device memory at" in told and kind in told
    assert "Fatal Python error: Segmentation fault" in told, "who was in charge before goes on afterwards"


def test_memory_of_another_process_is_opened_by_a_handle():
    x = torch.arange(100.0, device="cuda")
    whole = torch.empty(30 * MIB // 4, device="cuda")  # a segment of its own: handles are of whole segments
    whole[:100].copy_(x)
    torch.cuda.synchronize()
    handle = _pretend_gpu.ipc_handle(whole.data_ptr())
    run(
        f"""
        import torch, _pretend_gpu
        torch.cuda.init()
        memory = _pretend_gpu.ipc_open({handle!r})
        x = _pretend_gpu.at_address(memory, 100)
        assert x.tolist() == list(range(100))
        x.mul_(2)
        torch.cuda.synchronize()
        _pretend_gpu.ipc_close(memory)
        """
    )
    assert torch.equal(whole[:100], x * 2)


def test_memory_that_is_not_poisoned_keeps_what_it_held():
    with machine(poison=False):
        x = torch.full((1000,), 3.0, device="cuda")
        del x
        assert torch.empty(1000, device="cuda").eq(3).all()


def test_undefined_memory_is_filled_where_algorithms_are_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(5, device="cuda").isnan().all()
        assert torch.empty(5, dtype=torch.int32, device="cuda").eq(2**31 - 1).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_children_see_the_machine_of_their_parent():
    with machine(lazy=True, memory=64 * MIB):
        assert "lazy=1" in os.environ[vehicle.VARIABLE]
        run("import torch; assert torch.cuda.mem_get_info()[1] == 64 << 20, torch.cuda.mem_get_info()")
    run("import torch; assert torch.cuda.mem_get_info()[1] == 1 << 30")
