"""The machines that the contract suite runs on: the host, CUDA over the fake runtime, and a real device."""

import mmap
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from noria import _C

BUILD = Path(__file__).parents[3] / "build" / "current"
MIB = 1 << 20
PATIENCE_S = 60


class Machine:
    """A kind of backend, and what a user's own code does on it between the verbs."""

    name: str
    staged = False  # home memory is not pinned

    def __init__(self) -> None:
        self.backends: list[Any] = []
        self.homes: list[tuple[Any, np.ndarray]] = []
        self.held: list[Any] = []
        self.lent: list[tuple[Any, int]] = []
        self.lenders: list[Lender] = []

    def backend(self, capacity: int = 64 * MIB, **options: Any) -> Any:
        self.backends.append(self.make(capacity, **options))
        return self.backends[-1]

    def make(self, capacity: int, **options: Any) -> Any:
        raise NotImplementedError

    def home(self, backend: Any, content: bytes | int) -> np.ndarray:
        """Registered host memory: zeros, or these bytes."""
        content = bytes(content)  # bytes(int) are zeros
        # Pages of its own, because memory is registered by pages.
        array = np.frombuffer(mmap.mmap(-1, len(content)), np.uint8)
        array[:] = np.frombuffer(content, np.uint8)
        self.register(backend, array.ctypes.data, array.nbytes)
        self.homes.append((backend, array))
        return array

    def register(self, backend: Any, memory: int, num_bytes: int) -> None:
        assert backend.register_home(memory, num_bytes) == ""

    def fetched(self, backend: Any, content: bytes) -> int:
        """Device memory that holds these bytes."""
        memory: int = backend.allocate(len(content))
        home = self.home(backend, content)
        backend.submit("fetch", [(memory, home.ctypes.data, home.nbytes)]).wait_passed()
        return memory

    def drained(self, backend: Any, memory: int, num_bytes: int, waits: Any = ()) -> bytes:
        home = self.home(backend, num_bytes)
        backend.submit("drain", [(home.ctypes.data, memory, num_bytes)], waits=waits).wait_passed()
        return home.tobytes()

    def opened(self, backend: Any, content: bytes) -> int:
        """Memory of another backend that holds these bytes, opened by this one."""
        lender = self.backend()
        memory = lender.allocate_shared(len(content))
        self.lent.append((lender, memory))
        home = self.home(lender, content)
        lender.submit("fetch", [(memory, home.ctypes.data, home.nbytes)]).wait_passed()
        return backend.open_shared(lender.shared(memory))

    def lender(self) -> "Lender":
        self.lenders.append(Lender(self))
        return self.lenders[-1]

    def ticket(self, **label: Any) -> Any:
        """A ticket that the test itself gives; given at the latest when the test ends."""
        self.held.append(_C.HostTicket(**label))
        return self.held[-1]

    def stream(self, backend: Any) -> int:
        raise NotImplementedError

    def copy_on(self, backend: Any, stream: int, to: int, from_: int, num_bytes: int) -> None:
        """The stream copies within device memory: the stand-in for a layer's kernels."""
        raise NotImplementedError

    def hold(self, backend: Any, stream: int) -> Callable[[], None]:
        """Nothing that comes later on the stream happens before the returned function is called."""
        raise NotImplementedError

    def close(self) -> None:
        for ticket in self.held:
            if not ticket.passed():
                ticket.pass_()
        for backend in self.backends:
            backend.close()
        for backend, array in self.homes:
            backend.unregister_home(array.ctypes.data)
        for lender, memory in self.lent:
            lender.free(memory)
        for process in self.lenders:
            process.close()


class Lender:
    """Another process with a backend of the same kind, which lends device memory: lender.py."""

    def __init__(self, machine: Machine) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            script = [sys.executable, str(Path(__file__).with_name("lender.py")), machine.name, str(theirs.fileno())]
            self.process = subprocess.Popen(script, pass_fds=[theirs.fileno()])
        self.pipe = Connection(ours.detach())

    def _answer(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), "the lender does not answer"
        return self.pipe.recv()

    def lend(self, content: bytes) -> Any:
        """Memory there that holds these bytes, as it is told. The descriptor in it is the caller's."""
        self.pipe.send(("lend", content))
        num_bytes, has_fd, handle = self._answer()
        return _C.SharedMemory(num_bytes, recv_handle(self.pipe) if has_fd else -1, handle)

    def read(self) -> bytes:
        """What the memory that was lent last holds, as its owner sees it."""
        self.pipe.send(("read",))
        return self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.pipe.close()
        assert self.process.wait(PATIENCE_S) in (0, -9)


class Host(Machine):
    name = "host"

    def make(self, capacity: int, **options: Any) -> Any:
        limits = options.pop("limits", {})
        return _C.make_host_backend(capacity, _C.SlowPace(limits, options))

    def stream(self, backend: Any) -> int:
        stream: int = import_built("_host_streams").create_stream(backend)
        return stream

    def copy_on(self, backend: Any, stream: int, to: int, from_: int, num_bytes: int) -> None:
        import_built("_host_streams").enqueue_copy(backend, stream, to, from_, num_bytes)

    def hold(self, backend: Any, stream: int) -> Callable[[], None]:
        until = self.ticket()
        import_built("_host_streams").enqueue_hold(backend, stream, until)
        return until.pass_


class FakeCuda(Machine):
    """noria's CUDA backend on a runtime without a device, which is opened as the real one is."""

    name = "fake_cuda"

    def __init__(self) -> None:
        super().__init__()
        self.module = import_fake_cuda()
        self.module.reset()
        self.streams: list[int] = []
        self.empty_waits = self.module.num_empty_waits()

    def make(self, capacity: int, **options: Any) -> Any:
        device = options.pop("device", 0)
        return _C.make_cuda_backend(device, capacity, _C.SlowPace(hostility=options), runtime=fake_runtime())

    def stream(self, backend: Any) -> int:
        before = self.module.get_device()
        self.module.set_device(int(backend.name.removeprefix("cuda:")))
        self.streams.append(self.module.make_stream())
        self.module.set_device(before)
        return self.streams[-1]

    def copy_on(self, backend: Any, stream: int, to: int, from_: int, num_bytes: int) -> None:
        self.module.enqueue_copy(stream, to, from_, num_bytes)

    def hold(self, backend: Any, stream: int) -> Callable[[], None]:
        until = self.ticket()
        self.module.enqueue_hold(stream, until)
        return until.pass_

    def close(self) -> None:
        super().close()
        for stream in self.streams:
            self.module.destroy_stream(stream)
        # Two promises that hold in every test: no stream waits for an event that was never recorded, and no
        # error is left behind for the next user of CUDA on this thread.
        assert self.module.num_empty_waits() == self.empty_waits
        assert self.module.pending_error() == 0


class StagedFakeCuda(FakeCuda):
    """All home memory is refused by the driver, so every transfer goes through the ring: here, one of small pieces."""

    staged = True

    def make(self, capacity: int, **options: Any) -> Any:
        device = options.pop("device", 0)
        pace = _C.SlowPace(hostility=options)
        return _C.make_cuda_backend(device, capacity, pace, staging_piece=1000, runtime=fake_runtime())

    def register(self, backend: Any, memory: int, num_bytes: int) -> None:
        self.module.fail_next("cudaHostRegister", error=2)
        assert "cudaHostRegister of" in backend.register_home(memory, num_bytes, "copies")


class Cuda(Machine):
    name = "cuda"

    def make(self, capacity: int, **options: Any) -> Any:
        device = options.pop("device", 0)
        return _C.make_cuda_backend(device, capacity, _C.SlowPace(hostility=options))

    def opened(self, backend: Any, content: bytes) -> int:
        # A process cannot open what it has exported itself.
        return backend.open_shared(self.lender().lend(content))

    def stream(self, backend: Any) -> int:
        import torch

        self.held_streams = [*getattr(self, "held_streams", []), torch.cuda.Stream()]
        return self.held_streams[-1].cuda_stream

    def _on(self, stream: int) -> Any:
        import torch

        return torch.cuda.stream(torch.cuda.ExternalStream(stream))

    def copy_on(self, backend: Any, stream: int, to: int, from_: int, num_bytes: int) -> None:
        import torch

        def tensor(address: int) -> Any:
            interface = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}
            return torch.as_tensor(type("Range", (), {"__cuda_array_interface__": interface})(), device="cuda")

        with self._on(stream):
            tensor(to).copy_(tensor(from_), non_blocking=True)

    def hold(self, backend: Any, stream: int) -> Callable[[], None]:
        import torch

        with self._on(stream):
            torch.cuda._sleep(2_000_000_000)  # about a second: a real stream cannot be held for good
        return lambda: None


MACHINES = {"host": Host, "fake_cuda": FakeCuda, "staged_fake_cuda": StagedFakeCuda, "cuda": Cuda}


def import_built(module: str) -> ModuleType:
    """Imports a module that only tests use, or skips the test if it is not built."""
    if str(BUILD) not in sys.path:
        sys.path.append(str(BUILD))
    return pytest.importorskip(module, reason=f"{module} is not built in {BUILD}: make test-modules")


def import_fake_cuda() -> ModuleType:
    return import_built("_fake_cuda")


def fake_runtime() -> Any:
    return _C.CudaRuntime(str(BUILD / "libfake_cudart.so"))


def opened(machine: type[Machine]) -> Iterator[Machine]:
    the_machine = machine()
    yield the_machine
    the_machine.close()


@pytest.fixture(params=["host", "fake_cuda", "staged_fake_cuda", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    if request.param == "cuda" and (reason := _C.cuda_absent_reason()):
        pytest.skip(f"needs a CUDA device: {reason}")
    yield from opened(MACHINES[request.param])


@pytest.fixture
def host() -> Iterator[Machine]:
    yield from opened(Host)


@pytest.fixture
def fake_cuda() -> Iterator[Machine]:
    yield from opened(FakeCuda)


@pytest.fixture
def staged_fake_cuda() -> Iterator[Machine]:
    yield from opened(StagedFakeCuda)
