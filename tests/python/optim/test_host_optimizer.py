"""The host pool: the result depends on no thread, and order, failures and counts are as promised."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noria import _C

from tests.python.optim import units

_ALIVE = []  # a job holds addresses, not arrays


def limited(bandwidth_gib_s: float, latency_us: float) -> _C.SlowPace:
    return _C.SlowPace({"update": (bandwidth_gib_s, latency_us)})


class Unit(units.Unit):
    """The seed alone says what the arrays hold; small ones live until the end, so that a test may drop them."""

    def __init__(self, count, seed=0, split=False, rule="adamw"):
        made = units.make(rule, count, seed, split_master=split)
        self.__dict__.update(made.__dict__)
        if count <= 1000:
            _ALIVE.append(self)

    def update_by_hand(self, step=1):
        self.step(step)


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
            pool.submit(unit.job(step, cut=rng.integers(0, count, cuts).tolist())).wait_passed()
        assert unit.bits() == twin.bits() != before
    pool.close()


@given(
    seed=st.integers(1, 2**32),
    edges=st.lists(st.lists(st.integers(0, 100), max_size=3), min_size=1, max_size=8),
    data=st.data(),
)
@settings(max_examples=25)
def test_job_runs_after_all_its_tickets_if_any_of_them_are_late(seed, edges, data):
    """Random graphs of updates, gates given in random order, random delays. Each unit is updated twice, the
    second time after the first: any other order shows in its bits."""
    pool = _C.HostOptimizer(2, pace=_C.SlowPace(hostility={"seed": seed, "max_delay_us": 50}))
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
    optimizer = _C.HostOptimizer(1, pace=limited(0.0, 3000))
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
    pool = _C.HostOptimizer(1, pace=limited(2.0, 100))
    unit = Unit(100_000)
    for step in (1, 2, 3):
        pool.submit(unit.job(step))
    pool.idle()
    stats = pool.stats()
    assert stats["busy_us"] + 1 >= 3 * (100 + 28 * 100_000 / (2 * 2**30) * 1e6)
    pool.close()


def test_a_running_update_counts_already_and_once():
    pool = _C.HostOptimizer(1, pace=limited(0.0, 300_000))
    ticket = pool.submit(Unit(10).job())
    seen = [0]
    while not ticket.passed():
        seen.append(pool.stats()["busy_us"])
    assert seen == sorted(seen)
    assert 0 < seen[-2] <= pool.stats()["busy_us"]
    pool.idle()
    assert pool.stats()["busy_us"] < 2 * 300_000 and pool.stats()["num_ops"] == 1
    pool.close()


def test_stall_is_booked_on_the_lane_that_was_late():
    pool = _C.HostOptimizer(1)
    holder = _C.HostOptimizer(
        1, pace=_C.SlowPace(hostility={"hold_us": {"update": 50_000}})
    )  # its update is late by hold_us at least
    sealed = holder.submit(Unit(10).job())
    pool.submit(Unit(10).job(), [sealed]).wait_passed()
    assert set(pool.stats()["stalled_us"]) == {("update", "update")}
    assert pool.stats()["stalled_us"]["update", "update"] > 0
    for one in (pool, holder):
        one.close()


def test_jobs_that_no_plan_makes_are_refused(optimizer):
    unit = Unit(10)
    scalars = unit.scalars(1)
    m, v, p = (unit.arrays[name].ctypes.data for name in ("m", "v", "master"))
    g = unit.gradient.ctypes.data
    whole = [(0, 10, scalars)]

    def job(pieces=whole, rule="adamw", gradient=g, **arrays):
        return _C.UpdateJob(rule, pieces, _C.UnitArrays(**arrays), gradient=gradient)

    for wrong in (
        job([(0, 6, scalars), (5, 5, scalars)], master=p, m=m, v=v),
        job(m=m, v=v),
        job(master=p, working=p, m=m, v=v),
        job([(-1, 10, scalars)], master=p, m=m, v=v),
        job(master=p, m=m),
        job(rule="sgd", master=p, m=m),
        job(rule="lion", master=p, m=m, v=v),
        job(master=p, m=m, v=v, gradient=0),
    ):
        with pytest.raises(_C.InvariantError):
            optimizer.submit(wrong)
    with pytest.raises(_C.InvariantError, match="its undo or a sum"):
        optimizer.submit(unit.job(), verb="fetch")
    with pytest.raises(_C.UsageError, match="num_threads"):
        _C.HostOptimizer(-1)


def test_a_pool_that_chooses_its_threads_leaves_some_to_those_that_launch():
    hardware = len(os.sched_getaffinity(0))
    assert _C.HostOptimizer().num_threads == max(1, hardware - 1)
    beside = _C.HostOptimizer(is_beside_device=True).num_threads
    assert 1 <= beside <= hardware
    assert hardware - beside >= 4 or beside <= max(1, hardware // 2)  # four free, or half of the cores kept


# ---- rules and drafts ---------------------------------------------------------------------------------------------

BYTES = {"adamw": (28, 26), "adam": (28, 26), "sgd": (12, 10), "sgd_momentum": (20, 18), "lion": (20, 18)}


@pytest.mark.parametrize("rule", units.RULES)
@pytest.mark.parametrize("split", [False, True])
def test_every_rule_has_its_bits_and_bytes_on_any_number_of_threads_as_updates_and_as_drafts(rule, split):
    count = 150_001
    twin = Unit(count, 3, split, rule)
    for step in (1, 2):
        twin.update_by_hand(step)
    for num_threads in range(1, 9):
        pool = _C.HostOptimizer(num_threads)
        for draft in (False, True):
            unit = Unit(count, 3, split, rule)
            before = unit.bits()
            moved = pool.stats()["bytes"]
            for step in (1, 2):
                update = unit.job(step, cut=[77, 80_000])
                if draft:
                    drafted = unit.drafting(update, [77, 80_000])
                    pool.submit(drafted, verb="draft").wait_passed()
                    update = update.redoing(drafted)
                pool.submit(update).wait_passed()
            assert unit.bits() == twin.bits() != before
            if not draft:
                assert pool.stats()["bytes"] == moved + 2 * BYTES[rule][split] * count
        pool.close()


@pytest.mark.parametrize("split", [False, True])
def test_a_draft_moves_a_byte_more_for_each_element_and_its_undo_as_much(split):
    pool, unit = _C.HostOptimizer(2), Unit(100_000, 3, split)
    drafted = unit.drafting(unit.job(5))
    before = unit.bits()
    pool.submit(drafted, verb="draft").wait_passed()
    assert unit.bits() != before
    pool.submit(drafted.undoing(), verb="undo").wait_passed()
    assert unit.bits() == before
    assert pool.stats()["bytes"] == 2 * (BYTES["adamw"][split] + 1) * 100_000
    pool.close()


# ---- priority and recall ------------------------------------------------------------------------------------------


def begun(optimizer):
    """The ticket of a job that the pool is at work on: what is submitted now is ready when it looks again."""
    while True:
        ticket = optimizer.submit(Unit(10).job(), op=1000)
        os.sched_yield()
        if not optimizer.recall(ticket) and not ticket.passed():
            return ticket


def test_among_ready_jobs_the_smallest_priority_runs_first_and_equals_keep_their_order():
    optimizer = _C.HostOptimizer(1, pace=limited(0.0, 50_000))
    trace = _C.Trace(100)
    optimizer.set_trace(trace)
    late = gate()
    urgent_but_waiting = optimizer.submit(Unit(10).job(), [late], op=100, priority=-5)
    begun(optimizer)
    priorities = [3, 7, 3, -1, 7]
    tickets = [optimizer.submit(Unit(10).job(), op=op, priority=priority) for op, priority in enumerate(priorities)]
    for ticket in tickets:
        ticket.wait_passed()
    assert not urgent_but_waiting.passed()
    late.pass_()
    urgent_but_waiting.wait_passed()
    assert [span.op for span in trace.spans() if span.op < 1000] == [3, 0, 2, 1, 4, 100]
    optimizer.close()


def test_recalled_job_never_runs_and_its_ticket_passes_when_its_waits_have(optimizer):
    unit, after = Unit(10), Unit(10)
    before = unit.bits()
    late = gate()
    ticket = optimizer.submit(unit.job(), [late])
    behind = optimizer.submit(after.job(), [ticket])
    assert optimizer.recall(ticket)
    assert not optimizer.recall(ticket)
    optimizer.submit(Unit(10).job()).wait_passed()
    assert not ticket.passed() and not behind.passed(), "who waits for it counts on what it waited for"
    late.pass_()
    behind.wait_passed()
    assert ticket.passed()
    optimizer.idle()
    assert unit.bits() == before and optimizer.stats()["num_ops"] == 2


def test_what_has_begun_or_is_done_or_is_anothers_is_not_recalled():
    optimizer = _C.HostOptimizer(1, pace=_C.SlowPace(hostility={"hold_us": {"update": 50_000}}))
    running = begun(optimizer)
    unit = Unit(10)
    before = unit.bits()
    queued = optimizer.submit(unit.job())
    assert not optimizer.recall(running)
    assert optimizer.recall(queued)
    running.wait_passed()
    optimizer.idle()
    assert unit.bits() == before
    assert not optimizer.recall(running)
    assert not optimizer.recall(gate())
    optimizer.close()


@given(seed=st.integers(1, 2**32), data=st.data())
@settings(max_examples=20)
def test_recall_at_any_moment_leaves_each_job_either_done_or_undone(seed, data):
    pool = _C.HostOptimizer(2, pace=_C.SlowPace(hostility={"seed": seed, "max_delay_us": 100}))
    made = [Unit(500, seed=index) for index in range(8)]
    undone = [unit.bits() for unit in made]
    done = []
    for index in range(8):
        twin = Unit(500, seed=index)
        twin.update_by_hand()
        done.append(twin.bits())
    tickets = [pool.submit(unit.job(), priority=data.draw(st.integers(-2, 2))) for unit in made]
    recalled = {which: pool.recall(tickets[which]) for which in data.draw(st.permutations(range(8)))[:5]}
    pool.idle()
    for index, unit in enumerate(made):
        assert tickets[index].passed()
        assert unit.bits() == (undone if recalled.get(index) else done)[index]
    pool.close()


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
