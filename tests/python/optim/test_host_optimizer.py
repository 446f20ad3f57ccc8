"""The host pool: the result depends on no thread, and order, failures and counts are as promised."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}


class Unit:
    """A unit's arrays, fp32 or split; the seed alone says what they hold."""

    def __init__(self, count, seed=0, split=False):
        rng = np.random.default_rng(seed)
        self.count, self.split = count, split
        self.p = rng.standard_normal(count, dtype=np.float32)
        self.m = rng.standard_normal(count, dtype=np.float32) * np.float32(1e-3)
        self.v = rng.random(count, dtype=np.float32) * np.float32(1e-6)
        self.g = rng.standard_normal(count, dtype=np.float32)
        self.arrays = [self.p, self.m, self.v]
        if split:
            self.g = (self.g.view(np.uint32) >> 16).astype(np.uint16)
            self.high, self.low = np.empty(count, np.uint16), np.empty(count, np.uint16)
            _C.split_master(self.p.ctypes.data, self.high.ctypes.data, self.low.ctypes.data, count)
            self.arrays = [self.high, self.low, self.m, self.v]

    def job(self, step=1, cut=()):
        edges = [0, *sorted(cut), self.count]
        scalars = _C.adamw_scalars(step, **HYPER)
        pieces = [(begin, end - begin, scalars) for begin, end in pairwise(edges)]
        at = {"m": self.m.ctypes.data, "v": self.v.ctypes.data, "gradient": self.g.ctypes.data}
        if self.split:
            return _C.AdamWJob(pieces, working=self.high.ctypes.data, low=self.low.ctypes.data, **at)
        return _C.AdamWJob(pieces, master=self.p.ctypes.data, **at)

    def update_by_hand(self, step=1):
        at = [array.ctypes.data for array in [*self.arrays, self.g]]
        (_C.adamw_split if self.split else _C.adamw_fp32)(*at, self.count, _C.adamw_scalars(step, **HYPER))

    def bits(self):
        return b"".join(array.tobytes() for array in self.arrays)


@pytest.fixture
def optimizer():
    pool = _C.HostOptimizer(1)
    yield pool
    pool.close()


def gate(op=1000):
    return _C.HostTicket(op, "drain", "drain", 0)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
@pytest.mark.parametrize("split", [False, True])
def test_threads_and_pieces_change_no_bit(num_threads, split):
    count = 300_001  # several chunks, the last one odd
    twin = Unit(count, split=split)
    for step in (1, 2, 3):
        twin.update_by_hand(step)
    pool = _C.HostOptimizer(num_threads)
    assert pool.num_threads == num_threads
    rng = np.random.default_rng(num_threads)
    for cuts in (0, 1, 7):
        unit = Unit(count, split=split)
        before = unit.bits()
        for step in (1, 2, 3):
            pool.submit(unit.job(step, rng.integers(0, count, cuts).tolist())).wait_passed()
        assert unit.bits() == twin.bits() != before
    pool.close()


@given(
    seed=st.integers(1, 2**32),
    edges=st.lists(st.lists(st.integers(0, 100), max_size=3), min_size=1, max_size=8),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_job_runs_after_all_its_tickets_whatever_is_late(seed, edges, data):
    """Random graphs of updates, gates given in random order, random delays. Each unit is updated twice, the
    second time after the first: any other order shows in its bits."""
    pool = _C.HostOptimizer(2, seed=seed, max_delay_us=50)
    gates, units, tickets, twins = [], [], [], []
    for index, wanted in enumerate(edges):
        unit, twin = Unit(1000, seed=index), Unit(1000, seed=index)
        for step in (1, 2):
            gates.append(gate())
            waits = [gates[-1]] + [tickets[i % len(tickets)] for i in wanted if tickets]
            if step == 2:
                waits.append(tickets[-1])
            tickets.append(pool.submit(unit.job(step), waits, op=len(tickets), unit=index))
            twin.update_by_hand(step)
        units.append(unit)
        twins.append(twin)
    for which in data.draw(st.permutations(range(len(gates)))):
        assert not tickets[which].passed()
        gates[which].pass_()
    pool.idle()
    assert all(ticket.passed() for ticket in tickets)
    for unit, twin in zip(units, twins, strict=True):
        assert unit.bits() == twin.bits()
    pool.close()


def test_ready_job_overtakes_one_that_waits_and_ready_jobs_keep_their_order():
    # The first job takes long, so that all others are ready when the pool looks again.
    optimizer = _C.HostOptimizer(1, latency_us=3000)
    trace = _C.Trace(100)
    optimizer.set_trace(trace)
    late, hold = gate(), gate()
    waiting = optimizer.submit(Unit(10).job(), [late], op=0)
    ready = [optimizer.submit(Unit(10).job(), [hold] if op > 1 else [], op=op) for op in range(1, 6)]
    hold.pass_()
    for ticket in ready:
        ticket.wait_passed()
    assert not waiting.passed()
    late.pass_()
    waiting.wait_passed()
    assert [span.op for span in trace.spans()] == [1, 2, 3, 4, 5, 0]
    assert [span.waits for span in trace.spans()[:2]] == [[], [1000]]
    assert {(span.lane, span.verb) for span in trace.spans()} == {("update", "update")}
    optimizer.close()


def test_failed_wait_fails_the_job_unrun_and_all_that_wait_for_it(optimizer):
    first, second, other = Unit(10), Unit(10), Unit(10)
    before = first.bits(), second.bits(), other.bits()
    drain = gate()
    sealed = optimizer.submit(first.job(), [drain])
    after = optimizer.submit(second.job(), [sealed])
    drain.fail("the drain broke")
    for ticket in (sealed, after):
        with pytest.raises(_C.MachineError, match="the drain broke"):
            ticket.wait_passed()
    assert (first.bits(), second.bits()) == before[:2]
    optimizer.submit(other.job()).wait_passed()
    assert other.bits() != before[2]


def test_close_releases_waiters_with_an_error_and_refuses_what_comes_later(optimizer):
    never = gate()
    sealed = optimizer.submit(Unit(10).job(), [never])
    optimizer.close()
    optimizer.close()
    with pytest.raises(_C.MachineError, match="closed before this update"):
        sealed.wait_passed()
    with pytest.raises(_C.InvariantError, match="closed host optimizer"):
        optimizer.submit(Unit(10).job())


def test_tickets_of_a_backend_are_waited_for(optimizer):
    backend = _C.make_host_backend(1 << 20)
    compute = backend.open(op=1, verb="user")
    unit = Unit(10)
    before = unit.bits()
    sealed = optimizer.submit(unit.job(), [compute])
    optimizer.submit(Unit(10).job()).wait_passed()
    assert unit.bits() == before and not sealed.passed()
    backend.give(compute)
    sealed.wait_passed()
    assert unit.bits() != before
    backend.close()


def test_steady_state_starts_no_thread_and_counts_every_byte(optimizer):
    units = [Unit(100, split=bool(i % 2)) for i in range(4)]

    def steps(n):
        for _ in range(n):
            for unit in units:
                optimizer.submit(unit.job())
        optimizer.idle()

    steps(5)
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    steps(200)
    assert len(list(Path("/proc/self/task").iterdir())) <= num_threads
    stats = optimizer.stats()
    assert stats["num_ops"] == 205 * 4
    assert stats["bytes"] == 205 * 100 * (2 * 28 + 2 * 26)


def test_limit_is_a_lower_bound_of_busy_time():
    pool = _C.HostOptimizer(1, bandwidth_gib_s=2.0, latency_us=100)
    unit = Unit(100_000)
    for step in (1, 2, 3):
        pool.submit(unit.job(step))
    pool.idle()
    stats = pool.stats()
    assert stats["busy_us"] + 1 >= 3 * (100 + 28 * 100_000 / (2 * 2**30) * 1e6)
    pool.close()


def test_stall_is_booked_on_whoever_was_late():
    pool = _C.HostOptimizer(1)
    holder = _C.HostOptimizer(1, hold_us=2000)  # its update is late by so much at least
    sealed = holder.submit(Unit(10).job())
    pool.submit(Unit(10).job(), [sealed]).wait_passed()
    assert set(pool.stats()["stalled_us"]) == {("update", "update")}
    assert pool.stats()["stalled_us"]["update", "update"] > 0
    for one in (pool, holder):
        one.close()


def test_jobs_that_no_plan_makes_are_refused(optimizer):
    unit = Unit(10)
    scalars = _C.adamw_scalars(1, **HYPER)
    at = {"m": unit.m.ctypes.data, "v": unit.v.ctypes.data, "gradient": unit.g.ctypes.data}
    master = unit.p.ctypes.data
    for job in (
        _C.AdamWJob([(0, 6, scalars), (5, 5, scalars)], master=master, **at),
        _C.AdamWJob([(0, 10, scalars)], **at),
        _C.AdamWJob([(0, 10, scalars)], master=master, working=master, **at),
        _C.AdamWJob([(-1, 10, scalars)], master=master, **at),
    ):
        with pytest.raises(_C.InvariantError):
            optimizer.submit(job)
    with pytest.raises(_C.UsageError, match="num_threads"):
        _C.HostOptimizer(-1)


def test_forked_child_neither_hangs_nor_updates(optimizer):
    optimizer.submit(Unit(10).job()).wait_passed()
    child = os.fork()
    if child == 0:
        refused = False
        try:
            optimizer.submit(Unit(10).job())
        except _C.UsageError:
            refused = True
        optimizer.idle()
        optimizer.close()
        os._exit(0 if refused else 1)
    assert os.waitpid(child, 0)[1] == 0
