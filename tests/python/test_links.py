"""Links between stages are tried and measured: what fails is no link, and nothing is left of either."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from noria import _C
from noria.dist.stage_group import StageGroup
from noria.pipeline.peer_links import measured

from tests.python.device.conftest import fake_runtime, import_fake_cuda
from tests.ranks import assert_fine, in_turn_on_ranks

MIB = 1 << 20
SPARE = [0, 8 * MIB]
PAIRS = [(1, 0)]


def of_host(rank: int, size: int) -> None:
    """No faster than the link is, nothing of it among the lane's numbers, and all memory is back."""
    stages = StageGroup([0, 1])
    backend = _C.make_host_backend(8 * MIB, _C.SlowPace({"peer": (8.0, 0.0), "peer:1": (0.25, 0.0)}))
    trace = _C.Trace(100)
    backend.set_trace(trace)
    bandwidth, failed = measured(stages, backend, torch.device("cpu"), PAIRS, SPARE)
    assert not failed and bandwidth[0] == [0, 0] and bandwidth[1][1] == 0
    assert 0 < bandwidth[1][0] <= 0.25
    assert stages.group.gather_objects(bandwidth) == [bandwidth] * 2
    backend.idle()
    assert {span.verb for span in trace.spans()} == ({"probe"} if rank == 0 else set())
    assert {key: value for key, value in backend.stats("peer").items() if value} == {}
    assert backend.allocated == 0
    stages.close()


class FakeDevice:
    """The CUDA backend on the fake runtime. Own memory is a device's too, and not a CPU tensor's."""

    def __init__(self) -> None:
        self.module = import_fake_cuda()
        self.module.reset()
        self._backend = _C.make_cuda_backend(0, 64 * MIB, runtime=fake_runtime())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def measure_link(self, own: int, peers: int, size: int, link: int) -> float:
        own = self._backend.allocate(size)
        try:
            gib_s: float = self._backend.measure_link(own, peers, size, link)
            return gib_s
        finally:
            self._backend.free(own)


def of_devices(rank: int, size: int, call: str, nth: int, on: int) -> None:
    """A call of the runtime that fails in one process."""
    stages, backend = StageGroup([0, 1]), FakeDevice()
    if call and rank == on:
        backend.module.fail_next(call, nth)
    bandwidth, failed = measured(stages, backend, torch.device("cpu"), PAIRS, SPARE)  # type: ignore[arg-type]
    assert (bandwidth[1][0] > 0) == (not call)
    assert list(failed) == PAIRS * bool(call), failed
    assert not call or f"{call} of" in failed[PAIRS[0]], failed
    assert stages.group.gather_objects(failed) == [failed] * 2
    assert backend.allocated == 0
    alive = backend.module.alive()
    assert (alive["allocations"], alive["opened"]) == (0, 0), alive
    assert backend.module.pending_error() == 0
    backend.close()
    stages.close()


ACTS: dict[str, Any] = {
    "host": (of_host, ()),
    "devices": (of_devices, ("", 0, 0)),
    "no peer access": (of_devices, ("cudaIpcOpenMemHandle", 1, 0)),
    "no handle": (of_devices, ("cudaIpcGetMemHandle", 1, 1)),
    "no memory": (of_devices, ("cudaMalloc", 1, 1)),
    "no copy": (of_devices, ("cudaMemcpyAsync", 1, 0)),
}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    import_fake_cuda()
    return in_turn_on_ranks(2, ACTS)


@pytest.mark.parametrize("name", ACTS)
def test_links_are_measured_or_found_missing(found, name):
    assert_fine(found, name)
