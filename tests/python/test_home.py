"""The home is taken whole or not at all, and what the machine does not grant is said."""

import copy
import io
import os
import signal
import threading
import time
import types

import noria
import pytest
import torch
from noria import _C
from noria._progress import Bar
from noria.host import home
from noria.host.home import Home
from noria.host.limits import Limit
from noria.model.layout import Region
from noria.planning.wrap_plan import STAGING_RING
from noria.report import LedgerRow, _ledger
from noria.runtime.ledger import Ledger
from noria.wrapped import wrapped_by
from rich.console import Console
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.python.store.test_arena import mapped_range, resident_bytes

MIB = 1 << 20
REGIONS = [
    Region.of("working copies", [3 * MIB]),
    Region.of("held gradients", [2 * MIB]),
    Region.of("first moments", [MIB]),
]


class FakeArena:
    """An arena of a machine that refuses what its lists name."""

    made: list["FakeArena"]
    refuses_to_pin = ()
    refuses_to_bind = ""

    def __init__(self, num_bytes, elsewhere):
        self.bytes, self.data, self.did = num_bytes, 4096, []
        self.made.append(self)

    def prefer_node(self, node):
        self.did.append(f"node {node}")
        return self.refuses_to_bind

    def populate(self, told):
        self.did.append("populate")
        told(self.bytes)

    def register_with(self, backend, use):
        self.did.append(f"register for {use}")
        if use not in self.refuses_to_pin:
            return ""
        if use == "device":
            raise _C.MachineError("cudaHostRegister failed: out of memory")
        return "cudaHostRegister failed: out of memory"

    def close(self):
        self.did.append("close")


@pytest.fixture
def arenas(monkeypatch):
    made = []
    monkeypatch.setattr(_C, "Arena", type("Arena", (FakeArena,), {"made": made}))
    return made


BACKEND = types.SimpleNamespace(pci_bus_id="0000:3B:00.0", staging_bytes=32 * MIB)


def test_pages_are_placed_then_taken_then_registered(arenas, monkeypatch):
    monkeypatch.setattr(home, "numa_node", {"0000:3B:00.0": 1}.get)
    taken = Home([], REGIONS, BACKEND)
    assert [arena.did for arena in arenas] == [
        ["node 1", "populate", "register for copies"],
        ["node 1", "populate", "register for device"],
        ["node 1"],
    ]
    assert taken.notes == [] and taken.staged == []
    taken.take_rest()
    assert [arena.did.count("populate") for arena in arenas] == [1, 1, 1]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "masters"])
def test_pages_for_masters_and_state_are_taken_when_the_models_own_memory_is_free(dtype, monkeypatch):
    model = nn.Linear(512, 512)
    old = StorageWeakRef(model.weight.untyped_storage())
    freed = {}

    class Arena(_C.Arena):
        def populate(self, told):
            freed.setdefault(self.bytes, []).append(old.expired())
            super().populate(told)

    with monkeypatch.context() as patched:
        patched.setattr(_C, "Arena", Arena)
        noria.wrap(model, torch.optim.AdamW(model.parameters()), device="cpu", kernel="torch", dtype=dtype)
    # By size: what gradients are multiplied by; working copies and gradients; masters and scratch memory; both moments.
    when = [sorted(freed[size]) for size in sorted(freed)]
    of_masters = [] if dtype is None else [[False, True]]
    assert when == [[False], [False, False], *of_masters, [True]]


def test_memory_that_cannot_lie_near_is_a_note(arenas, monkeypatch):
    monkeypatch.setattr(home, "numa_node", lambda pci_bus_id: 1)
    monkeypatch.setattr(_C.Arena, "refuses_to_bind", "mbind to node 1 failed: Operation not permitted")
    notes = Home([], REGIONS, BACKEND).notes
    assert len(notes) == 3 and all("far from the device: mbind to node 1 failed" in note for note in notes)


def test_weights_that_are_not_pinned_are_staged_and_it_is_said(arenas, monkeypatch):
    monkeypatch.setattr(_C.Arena, "refuses_to_pin", ("copies",))
    taken = Home([], REGIONS, BACKEND)
    assert taken.staged == ["working copies"]
    (note,) = taken.notes
    assert "staging ring of 32.0 MiB" in note and "cudaHostRegister failed: out of memory" in note


def test_gradients_that_are_not_pinned_are_refused_and_nothing_is_kept(arenas, monkeypatch):
    monkeypatch.setattr(_C.Arena, "refuses_to_pin", ("copies", "device"))
    with pytest.raises(noria.UsageError) as caught:
        Home([], REGIONS, BACKEND)
    for part in ("2.0 MiB of pinned host memory for held gradients", "p.grad", "out of memory", "ulimit -l unlimited"):
        assert part in str(caught.value)
    assert all(arena.did[-1] == "close" for arena in arenas) and len(arenas) == 3


def ledger_with(staging_bytes: int) -> list[LedgerRow]:
    """Of a home that the driver has refused to pin, with so many bytes of staging ring."""
    planned = noria.plan(nn.Linear(3, 3), device="cpu")
    ledger = Ledger(planned)
    ledger.expect("host", STAGING_RING, _C.STAGING_BYTES)
    context = types.SimpleNamespace(
        ledger=ledger,
        device=planned.device,
        home=types.SimpleNamespace(arenas={}, files=None, weight_files=None),
        device_buffers=types.SimpleNamespace(taken={}),
        engine=types.SimpleNamespace(statistics=types.SimpleNamespace(arena_bytes=planned.arena_bytes)),
        backend=types.SimpleNamespace(staging_bytes=staging_bytes, allocated=planned.device_bytes),
    )
    return _ledger(types.SimpleNamespace(context=context))


def test_the_staging_ring_is_in_the_ledger_if_and_only_if_there_is_one():
    planned = noria.plan(nn.Linear(3, 3), device="cpu")
    assert not any(purpose == STAGING_RING for _, purpose, _ in planned.rows())
    (row,) = [row for row in ledger_with(32 * MIB) if row.purpose == STAGING_RING]
    assert row.planned == row.taken == 32 * MIB
    (row,) = [row for row in ledger_with(33 * MIB) if row.purpose == STAGING_RING]
    assert row.planned != row.taken, "a ring of another size is not what was planned"


# ---- planned and taken ----


def larger_arenas(monkeypatch, of_bytes):
    """From now on an arena of this size is a page larger than it was asked to be."""
    arena = _C.Arena
    monkeypatch.setattr(_C, "Arena", lambda size, elsewhere: arena(size + 4096 if size == of_bytes else size))


def test_a_home_that_takes_more_than_was_planned_is_told_in_capitals(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    planned = {purpose: size for place, purpose, size in noria.plan(model, optimizer, device="cpu").rows()}
    larger_arenas(monkeypatch, planned["first moments"])
    noria.wrap(model, optimizer, device="cpu")
    report = noria.report(model)
    wrong = {row.purpose: row.taken - row.planned for row in report.ledger if row.taken != row.planned}
    of_that_size = [purpose for purpose, size in planned.items() if size == planned["first moments"]]
    assert wrong == dict.fromkeys(of_that_size, 4096)
    assert not report.ledger_agrees and "PLAN AND LEDGER DIFFER" in str(report)


def test_memory_that_is_taken_late_is_planned_first(monkeypatch):
    """`optimizer.accumulate()` takes memory for all gradients."""
    for is_wrong in (False, True):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
        optimizer = torch.optim.AdamW(model.parameters())
        noria.wrap(model, optimizer, device="cpu", update="backward")
        held = sum(unit.gradients for unit in wrapped_by(model).context.units)
        assert all(row.purpose != "held gradients" for row in noria.report(model).ledger)
        if is_wrong:
            larger_arenas(monkeypatch, held)
        with optimizer.accumulate():
            model(torch.ones(2, 64)).sum().backward()
        report = noria.report(model)
        (row,) = [row for row in report.ledger if row.purpose == "held gradients"]
        assert row.planned == held and row.taken == held + (4096 if is_wrong else 0)
        assert report.ledger_agrees is not is_wrong
        optimizer.step()


def test_late_memory_that_cannot_be_taken_leaves_no_row(monkeypatch):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters())
    noria.wrap(model, optimizer, device="cpu", update="backward")
    before = noria.report(model).ledger

    def refuse(size: int, elsewhere: object) -> None:
        raise MemoryError("on purpose")

    monkeypatch.setattr(_C, "Arena", refuse)
    with pytest.raises(MemoryError, match="on purpose"), optimizer.accumulate():
        pass
    assert noria.report(model).ledger == before


def test_a_ledger_has_the_rows_that_it_was_told_of_the_hosts_first():
    planned = noria.plan(nn.Linear(3, 3), device="cpu")
    ledger = Ledger(planned)
    assert ledger.rows() == sorted(planned.rows(), key=lambda row: row[0] != "host")
    ledger.expect("host", "later", 5)
    assert ("host", "later", 5) in ledger.rows() and ledger.expected("host", "later") == 5
    assert ledger.on("host") == planned.home_bytes + 5 and ledger.on("cpu") == planned.device_bytes
    ledger.expect("host", "later", 0)
    assert ledger.rows() == sorted(planned.rows(), key=lambda row: row[0] != "host")


# ---- limits --------------------------------------------------------------------------------------------------------


def test_what_the_machine_does_not_have_is_refused_before_anything_is_changed(monkeypatch):
    limit = Limit("the memory limit of the control group", "/sys/fs/cgroup/memory.max", 300 * MIB)
    monkeypatch.setattr("noria.host.limits.host_limits", lambda: [limit])
    model = nn.Linear(4096, 4096)  # 64 MiB; with AdamW the home has 256 MiB
    optimizer = torch.optim.AdamW(model.parameters())
    before = model.weight.data_ptr()
    for call in (noria.plan, noria.wrap):
        with pytest.raises(noria.UsageError) as caught:
            call(model, optimizer, device="cpu")
        for part in ("working copies 64.0 MiB", "second moments 64.0 MiB", "/sys/fs/cgroup/memory.max", "256.0 MiB"):
            assert part in str(caught.value)
    assert model.weight.data_ptr() == before and type(optimizer) is torch.optim.AdamW
    noria.plan(model, optimizer, device="cpu", host_memory="1GiB")  # fits, without a margin
    noria.plan(model, device="cpu", host_memory="1GiB")
    with torch.device("meta"):
        elsewhere = nn.Linear(4096, 4096)
    planned = noria.plan(elsewhere, torch.optim.AdamW(elsewhere.parameters()), device="cpu")
    assert any("this machine would refuse it" in note for note in planned.unpredicted)
    with pytest.raises(noria.UsageError, match="the memory limit of the control group"):
        noria.wrap(elsewhere, torch.optim.AdamW(elsewhere.parameters()), device="cpu")


# ---- population ----------------------------------------------------------------------------------------------------


@pytest.fixture
def interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_leaves_nothing_taken_and_nothing_changed(monkeypatch, capfd, interruptible):
    made = []

    class Arena(_C.Arena):
        def __init__(self, num_bytes, elsewhere):
            super().__init__(num_bytes)
            made.append(self)

        def populate(self, told):
            if self is made[1]:
                os.kill(os.getpid(), signal.SIGINT)
            super().populate(told)

    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    values = [p.detach().clone() for p in model.parameters()]
    with monkeypatch.context() as patched:
        patched.setattr(_C, "Arena", Arena)
        with pytest.raises(KeyboardInterrupt):
            noria.wrap(model, optimizer, device="cpu")
    assert [(arena.data, arena.bytes) for arena in made] == [(0, 0)] * 5
    assert type(optimizer) is torch.optim.AdamW
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    noria.wrap(model, optimizer, device="cpu")
    assert capfd.readouterr().err == ""  # and no progress bar where there is no terminal


def test_an_interrupt_behind_the_move_leaves_a_model_that_is_wrapped(monkeypatch, interruptible):
    model = nn.Linear(512, 512)
    twin = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, twin))
    with monkeypatch.context() as patched:
        patched.setattr(Home, "take_rest", lambda home: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            noria.wrap(model, optimizer, device="cpu", kernel="torch")
    for each, updater in ((model, optimizer), (twin, theirs)):
        each(torch.ones(2, 512)).square().mean().backward()
        updater.step()
    noria.unwrap(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_an_interrupt_is_heard_while_pages_are_taken(interruptible):
    arena = _C.Arena(256 * MIB)
    heard = []
    main = threading.get_ident()

    def told(populated):
        heard.append(populated)
        if len(heard) == 1:
            signal.pthread_kill(main, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        arena.populate(told)
        time.sleep(60)  # where population was over at the first telling, the interrupt comes here
    arena.close()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("terminal", "seconds", "shown"),
    [(Terminal, 1.5, True), (Terminal, 0.5, False), (io.StringIO, 1.5, False)],
)
def test_a_bar_is_shown_on_a_terminal_after_a_second(terminal, seconds, shown):
    now = [0.0]
    out = terminal()
    console = Console(file=out, force_terminal=True, width=80)
    with Bar("taking the home", 100 * MIB, console, clock=lambda: now[0]) as bar:
        bar.tell(0, MIB)
        assert out.getvalue() == ""
        now[0] = seconds
        bar.tell(MIB, 49 * MIB)
        now[0] += 10
        bar.tell(MIB, 99 * MIB)
    assert ("taking the home" in out.getvalue()) == shown


def test_a_wrapped_model_has_taken_its_home():
    model = nn.Linear(1024, 1024, bias=False)
    noria.wrap(model, torch.optim.AdamW(model.parameters()), device="cpu")
    arenas = dict(wrapped_by(model).context.home.arenas)
    assert arenas.pop("gradient scales").bytes == 8 and len(arenas) == 4
    for arena in arenas.values():  # nothing but its weights has been written
        assert arena.bytes == 4 * MIB
        assert resident_bytes(mapped_range(arena.data)) >= arena.bytes
