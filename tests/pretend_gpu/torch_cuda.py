"""What torch.cuda is made of: the names that a CUDA build of torch has in torch._C.

torch.cuda itself is torch's own code, unchanged. So streams, events, statistics, guards and random states are looked at
and refused as on a real device. Missing: graphs, IPC of events, memory snapshots, jiterator.
"""

from __future__ import annotations

import uuid
from types import ModuleType, SimpleNamespace
from typing import Any

import _pretend_gpu as gpu

from tests.pretend_gpu import nccl

ARCHITECTURE = "sm_90"
RUNTIME_VERSION = 13000
_DEVICE_TYPE = 1  # at::DeviceType::CUDA


def exchange_device(device: int) -> int:
    before = gpu.current_device()
    if device >= 0:
        gpu.set_device(device)
    return before


def maybe_exchange_device(device: int) -> int:
    """Another function than `exchange_device`: dynamo knows them by identity."""
    before = gpu.current_device()
    if device >= 0:
        gpu.set_device(device)
    return before


def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    gpu.set_stream(stream_id, device_index)


def raw_stream(device: int) -> int:
    stream_id, index, _ = gpu.current_stream(device)
    return gpu.native_stream(stream_id, index)


class Properties:
    """Of a device: torch.cuda.get_device_properties."""

    name = "a pretend GPU"
    major, minor = 9, 0
    multi_processor_count = 1
    warp_size = 32
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 232448
    shared_memory_per_multiprocessor = 233472
    L2_cache_size = 1 << 20
    clock_rate = 2_000_000
    memory_clock_rate = 1_000_000
    memory_bus_width = 64
    is_integrated = False
    is_multi_gpu_board = False
    gcnArchName = ARCHITECTURE  # noqa: N815

    def __init__(self, device: int) -> None:
        self.total_memory = gpu.mem_get_info(device)[1]
        domain, bus, slot = gpu.pci_bus_id(device).split(":")
        self.pci_domain_id, self.pci_bus_id = int(domain, 16), int(bus, 16)
        self.pci_device_id = int(slot.partition(".")[0], 16)
        self.uuid = uuid.UUID(int=self.pci_bus_id)

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count})"
        )


def init() -> None:
    """The rest of what a CUDA build puts into torch.cuda when it is first used."""
    import torch

    gpu.watch_forks()
    torch.cuda.default_generators = tuple(gpu.default_generator(i) for i in range(gpu.device_count()))
    torch.cuda._get_device_properties = Properties  # type: ignore[attr-defined]


def bases(torch_c: Any) -> tuple[type, type]:
    """Of torch.cuda.Stream and torch.cuda.Event."""

    class CudaStreamBase(torch_c.Stream):
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
        ) -> Any:
            if stream_ptr:
                stream_id, device_index, device_type = gpu.external_stream(stream_ptr, -1)
            elif not (stream_id or device_index or device_type):
                stream_id, device_index, device_type = gpu.pool_stream(-1, priority)
            return super().__new__(
                cls, stream_id=stream_id, device_index=device_index, device_type=device_type or _DEVICE_TYPE
            )

        @property
        def cuda_stream(self) -> int:
            return gpu.native_stream(self.stream_id, self.device_index)

        @property
        def priority(self) -> int:
            return -1 if self.stream_id % 2 and self.stream_id > 64 else 0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -1

    class CudaEventBase(torch_c.Event):
        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            if interprocess:
                raise NotImplementedError("the pretend GPU has no events for several processes")
            made = super().__new__(cls, device="cuda", enable_timing=enable_timing)
            made._has_timing = enable_timing
            return made

        @property
        def cuda_event(self) -> int:
            return self.event_id

        def elapsed_time(self, end: Any) -> float:  # torch_c's own takes nothing but its own type
            if not (self.event_id and end.event_id):
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            if not (self._has_timing and end._has_timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            return gpu.elapsed_time(self.event_id, end.event_id)

    return CudaStreamBase, CudaEventBase


class NoGraph:
    """torch.cuda.CUDAGraph."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the pretend GPU records no graphs")


def no_graph_pool() -> tuple[int, int]:
    return 0, 0


def cudart() -> Any:
    """Returns the part of torch.cuda.cudart() that is used."""
    errors = {"success": 0, "memory_allocation": 2, "not_ready": 600}
    return SimpleNamespace(
        cudaError=type("cudaError", (int,), errors),
        cudaGetErrorString=gpu.error_string,
        cudaMemGetInfo=gpu.mem_get_info,
        cudaHostRegister=gpu.host_register,
        cudaHostUnregister=gpu.host_unregister,
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
    )


def fill(torch_c: ModuleType) -> None:
    """Before torch.cuda is imported."""
    c: Any = torch_c
    nccl.promise(c)
    c._has_cuda = True
    c._CudaStreamBase, c._CudaEventBase = bases(c)
    c._CudaDeviceProperties = Properties
    c._cudart = cudart()
    c._CUDAGraph, c._graph_pool_handle = NoGraph, no_graph_pool
    for name in ("_cuda_CUDAAllocator", "_cuda_CUDAAllocator_AllocatorState"):
        setattr(c, name, type(name, (), {}))

    c._cuda_init = init
    c._cuda_isInBadFork = gpu.is_in_bad_fork
    c._cuda_getDeviceCount = gpu.device_count
    c._cuda_getDevice = gpu.current_device
    c._cuda_setDevice = gpu.set_device
    c._cuda_exchangeDevice = exchange_device
    c._cuda_maybeExchangeDevice = maybe_exchange_device
    c._cuda_hasPrimaryContext = lambda device: True
    c._cuda_canDeviceAccessPeer = lambda device, peer: device != peer
    c._cuda_getCompiledVersion = lambda: RUNTIME_VERSION
    c._cuda_getArchFlags = lambda: ARCHITECTURE
    c._cuda_synchronize = gpu.synchronize
    c._cuda_sleep = gpu.sleep
    c._cuda_set_sync_debug_mode = gpu.set_sync_debug_mode
    c._cuda_get_sync_debug_mode = gpu.sync_debug_mode
    c._cuda_getCurrentBlasHandle = lambda: 0
    c._cuda_clearCublasWorkspaces = lambda: None

    c._cuda_getCurrentStream = gpu.current_stream
    c._cuda_getDefaultStream = gpu.default_stream
    c._cuda_getStreamFromExternal = gpu.external_stream
    c._cuda_setStream = set_stream
    c._cuda_getCurrentRawStream = raw_stream
    c._cuda_isCurrentStreamCapturing = gpu.is_capturing

    c._cuda_memoryStats = gpu.memory_stats
    c._cuda_resetPeakMemoryStats = gpu.reset_peak_stats
    c._cuda_resetAccumulatedMemoryStats = gpu.reset_accumulated_stats
    c._cuda_emptyCache = gpu.empty_cache
    c._cuda_attach_out_of_memory_observer = gpu.tell_when_full
    c._cuda_setMemoryFraction = gpu.set_memory_fraction
    c._cuda_getMemoryFraction = gpu.memory_fraction
    c._cuda_cudaCachingAllocator_raw_alloc = gpu.raw_alloc
    c._cuda_cudaCachingAllocator_raw_delete = gpu.raw_delete
    c._cuda_cudaCachingAllocator_is_enabled = lambda: True
    c._cuda_getAllocatorBackend = lambda: "native"
    c._cuda_ipc_collect = lambda: None
    c._host_emptyCache = gpu.empty_pinned
