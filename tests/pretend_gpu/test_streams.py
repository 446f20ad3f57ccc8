"""Streams and events of the pretend GPU: order, laziness, and what the host waits for."""

from __future__ import annotations

import threading

import _pretend_gpu
import pytest
import torch

from tests.pretend_gpu.machine import counters, machine, reset_counters


def ones(count=8):
    made = torch.ones(count, device="cuda")
    torch.cuda.synchronize()
    return made


def test_a_lazy_stream_does_nothing_until_a_thread_waits_and_then_only_what_that_needs():
    x = ones()
    with machine(lazy=True):
        events = [torch.cuda.Event() for _ in range(4)]
        for event in events:
            x.add_(1)
            event.record()
        assert not events[0].query()
        events[1].synchronize()
        assert [event.query() for event in events] == [True, True, False, False]
        torch.cuda.current_stream().synchronize()
        assert all(event.query() for event in events)


def test_the_demand_is_passed_on_to_the_streams_that_are_waited_for():
    first, second, third = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()
    x, y = ones(), ones()
    with machine(lazy=True):
        with torch.cuda.stream(first):
            x.mul_(3)
            halfway = first.record_event()
            y.mul_(100)
            rest = first.record_event()
        second.wait_event(halfway)
        with torch.cuda.stream(second):
            x.add_(1)
        third.wait_stream(second)
        with torch.cuda.stream(third):
            x.mul_(2)
        third.synchronize()
        assert halfway.query() and not rest.query()
        assert x.tolist() == [8] * 8


def test_polling_gets_a_lazy_stream_to_move():
    x = ones()
    with machine(lazy=True):
        x.add_(1)
        event = torch.cuda.current_stream().record_event()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x.sum()
        while not event.query():
            pass
        while not stream.query():
            pass


def test_who_only_watches_does_not_make_a_lazy_stream_move():
    x = ones()
    with machine(lazy=True, observers=("watcher",)):
        x.add_(1)
        event = torch.cuda.current_stream().record_event()

        def watch():
            name_this_thread("watcher")
            started.set()
            event.synchronize()

        started = threading.Event()
        thread = threading.Thread(target=watch)
        thread.start()
        started.wait()
        reset_counters()
        x.add_(1)
        later = torch.cuda.current_stream().record_event()
        thread.join()  # after a while he is patient no longer, and then wants no more than he waits for
        assert event.query() and not later.query()


def name_this_thread(name):
    import ctypes

    ctypes.CDLL(None).pthread_setname_np(ctypes.c_void_p(threading.get_ident()), name.encode())


def test_an_event_waits_for_the_record_of_that_moment():
    side = torch.cuda.Stream()
    x = ones()
    with machine(lazy=True):
        event = torch.cuda.Event()
        side.wait_event(event)  # never recorded: no wait
        event.record()
        x.add_(1)
        side.wait_event(event)
        event.record()
        side.synchronize()
        assert not event.query()
        assert x.sum().item() == 16


def test_streams_run_side_by_side():
    side = torch.cuda.Stream()
    x, y = ones(), ones()
    with machine(lazy=True):
        x.add_(1)
        with torch.cuda.stream(side):
            y.add_(1)
        side.synchronize()
        assert not torch.cuda.current_stream().query(), "no stream waits for the other one"
        assert y.record_stream(side) is None


def test_events_tell_the_time_between_them():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="Both events must be recorded"):
        start.elapsed_time(end)
    with machine(lazy=True):
        start.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        with pytest.raises(RuntimeError, match="cudaErrorNotReady"):
            start.elapsed_time(end)
        end.synchronize()
    assert 10 <= start.elapsed_time(end) < 10_000
    plain = torch.cuda.Event()
    plain.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        plain.elapsed_time(end)


def test_the_hosts_waits_are_counted_where_it_had_to_wait():
    x = ones()
    with machine(lazy=True):
        reset_counters()
        torch.cuda.synchronize()
        x.add_(1)
        event = torch.cuda.current_stream().record_event()
        assert counters()["host_waits"] == 0
        event.synchronize()
        event.synchronize()
        assert counters()["host_waits"] == 1
        x.add_(1)
        torch.cuda.synchronize()
        x.add_(1)
        torch.cuda.current_stream().synchronize()
        assert counters()["host_waits"] == 3


def test_streams_of_the_pool_come_in_turn():
    streams = [torch.cuda.Stream() for _ in range(33)]
    assert len({each.cuda_stream for each in streams}) == 32 and streams[0] == streams[32]
    high = torch.cuda.Stream(priority=-1)
    assert high.priority == -1 and streams[0].priority == 0 and high not in streams
    assert torch.cuda.Stream(device=1).device == torch.device("cuda:1")


def test_a_stream_that_another_library_made_is_wrapped():
    foreign = torch.cuda.Stream()
    wrapped = torch.cuda.ExternalStream(foreign.cuda_stream)
    assert wrapped.cuda_stream == foreign.cuda_stream
    x = ones()
    with machine(lazy=True):
        with torch.cuda.stream(wrapped):
            assert torch.cuda.current_stream().cuda_stream == foreign.cuda_stream
            x.add_(1)
        foreign.synchronize()
        assert wrapped.query()
    assert x.sum().item() == 16


def test_the_current_stream_is_a_threads_and_a_devices_own():
    side = torch.cuda.Stream()
    seen = []
    with torch.cuda.stream(side):
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
        assert torch.cuda.current_stream() == side
        assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1)
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
            assert torch.empty(1, device="cuda").device.index == 1
    assert torch.cuda.current_device() == 0
    assert seen == [torch.cuda.default_stream()] == [torch.cuda.current_stream()]
    assert torch.cuda.default_stream().cuda_stream == 0


def test_a_capture_is_seen_and_broken_by_what_breaks_it_on_a_gpu():
    side = torch.cuda.Stream()
    assert not torch.cuda.is_current_stream_capturing()
    _pretend_gpu.begin_capture(side.cuda_stream)
    with torch.cuda.stream(side):
        assert torch.cuda.is_current_stream_capturing()
    assert _pretend_gpu.end_capture()
    event = side.record_event()
    _pretend_gpu.begin_capture(side.cuda_stream)
    with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureUnsupported"):
        event.query()
    assert not _pretend_gpu.end_capture()
    with pytest.raises(NotImplementedError, match="records no graphs"):
        torch.cuda.CUDAGraph()


def test_backward_runs_on_the_streams_of_the_forward():
    """Nothing is told to wait by hand: autograd synchronises with the stream on which backward is called."""
    side = torch.cuda.Stream()
    x = ones().requires_grad_()
    with machine(lazy=True, seed=5, max_delay_us=300):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = (x * 3).square().sum()
        torch.cuda.current_stream().wait_stream(side)
        y.backward()
        assert x.grad.tolist() == [18] * 8


def test_a_failing_call_of_the_runtime_is_raised():
    _pretend_gpu.fail_next("cudaEventRecord", 1, 999)
    with pytest.raises(RuntimeError, match=r"CUDA error: .*cudaErrorUnknown by cudaEventRecord"):
        torch.cuda.current_stream().record_event()
