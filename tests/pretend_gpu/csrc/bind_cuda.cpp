// Devices, streams, memory and random numbers for torch.cuda.
#include <pybind11/stl.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <thread>

#include "allocator.h"
#include "bind.h"
#include "generator.h"
#include "pinned.h"
#include "settings.h"
#include "storage_ops.h"
#include "streams.h"

namespace py = pybind11;

namespace pretend_gpu {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;
using Told = std::tuple<c10::StreamId, int, int>;  // as torch._C tells of a stream: id, device, device type

Told told(const c10::Stream& stream) {
  return {stream.id(), stream.device_index(), static_cast<int>(stream.device_type())};
}

c10::Stream stream_of(c10::StreamId id, int device) { return c10::Stream(c10::Stream::UNSAFE, device_of(device), id); }

py::dict told(const c10::CachingAllocator::Stat& stat) {
  py::dict made;
  made["current"] = stat.current;
  made["peak"] = stat.peak;
  made["allocated"] = stat.allocated;
  made["freed"] = stat.freed;
  return made;
}

py::dict told(const c10::CachingAllocator::StatArray& stats) {
  py::dict made;
  made["all"] = told(stats[0]);
  made["small_pool"] = told(stats[1]);
  made["large_pool"] = told(stats[2]);
  return made;
}

py::dict memory_stats(int device) {
  const auto stats = allocator().getDeviceStats(static_cast<c10::DeviceIndex>(device));
  py::dict made;
  made["num_alloc_retries"] = stats.num_alloc_retries;
  made["num_ooms"] = stats.num_ooms;
  made["max_split_size"] = -1;
  made["num_sync_all_streams"] = stats.num_sync_all_streams;
  made["num_device_alloc"] = stats.num_device_alloc;
  made["num_device_free"] = stats.num_device_free;
  made["allocation"] = told(stats.allocation);
  made["segment"] = told(stats.segment);
  made["active"] = told(stats.active);
  made["inactive_split"] = told(stats.inactive_split);
  made["allocated_bytes"] = told(stats.allocated_bytes);
  made["reserved_bytes"] = told(stats.reserved_bytes);
  made["active_bytes"] = told(stats.active_bytes);
  made["inactive_split_bytes"] = told(stats.inactive_split_bytes);
  made["requested_bytes"] = told(stats.requested_bytes);
  made["oversize_allocations"] = told(stats.oversize_allocations);
  made["oversize_segments"] = told(stats.oversize_segments);
  return made;
}

/// On the stream, not here.
void sleep_on_stream(std::int64_t cycles) {
  constexpr std::int64_t kCyclesPerUs = 2000;
  run_on(current_stream(-1), "_sleep",
         [us = cycles / kCyclesPerUs] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
}

}  // namespace

void bind_cuda(py::module_& m) {
  // Streams are threads, and those are not forked.
  m.def("watch_forks", [] { torch::utils::register_fork_handler_for_device_init(kDevice); });
  m.def("is_in_bad_fork", [] { return torch::utils::is_device_in_bad_fork(kDevice); });

  m.def("device_count", [] { return fake_cuda::kNumDevices; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def(
      "synchronize",
      [] {
        announce_wait();
        synchronize_device(-1);
      },
      Release());
  m.def("mem_get_info", [](int device) { return allocator().getMemoryInfo(static_cast<c10::DeviceIndex>(device)); });
  m.def("pci_bus_id", [](int device) {
    char id[32] = {};
    check(cudaDeviceGetPCIBusId(id, sizeof(id), device), "cudaDeviceGetPCIBusId");
    return std::string(id);
  });
  m.def("sleep", &sleep_on_stream, Release());
  m.def("set_sync_debug_mode", [](int mode) { settings().sync_debug_mode = mode; });
  m.def("sync_debug_mode", [] { return settings().sync_debug_mode.load(); });

  m.def("current_stream", [](int device) { return told(current_stream(device)); });
  m.def("default_stream", [](int device) { return told(default_stream(device)); });
  m.def("pool_stream", [](int device, int priority) { return told(pool_stream(device, priority)); });
  m.def("external_stream", [](std::uintptr_t handle, int device) { return told(external_stream(handle, device)); });
  m.def("set_stream", [](c10::StreamId id, int device) {
    set_device(device);
    set_current_stream(stream_of(id, device));
  });
  m.def("native_stream",
        [](c10::StreamId id, int device) { return reinterpret_cast<std::uintptr_t>(native(stream_of(id, device))); });
  m.def("is_capturing", [] {
    const c10::Stream stream = current_stream(-1);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(native(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  });

  m.def("elapsed_time", [](std::uintptr_t start, std::uintptr_t end) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, reinterpret_cast<cudaEvent_t>(start), reinterpret_cast<cudaEvent_t>(end)),
          "cudaEventElapsedTime");
    return milliseconds;
  });

  m.def("default_generator", [](int device) { return default_generator(device); });

  m.def("memory_stats", &memory_stats);
  m.def("reset_peak_stats", [](int device) { allocator().resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
  m.def("reset_accumulated_stats",
        [](int device) { allocator().resetAccumulatedStats(static_cast<c10::DeviceIndex>(device)); });
  m.def("empty_cache", [] { allocator().emptyCache(); }, Release());
  m.def("tell_when_full", [](py::function observer) {
    auto* const kept = new py::function(std::move(observer));  // for good
    allocator().tell_when_full([kept](int device, std::size_t asked, std::size_t reserved, std::size_t free) {
      const py::gil_scoped_acquire gil;
      (*kept)(device, asked, reserved, free);
    });
  });
  m.def("empty_pinned", &empty_pinned, Release());
  m.def("set_memory_fraction", [](double fraction, int device) { allocator().set_fraction(device, fraction); });
  m.def("memory_fraction", [](int device) { return allocator().fraction(device); });
  m.def("raw_alloc", [](std::size_t num_bytes, c10::StreamId id) {
    const c10::Stream before = set_current_stream(stream_of(id, current_device()));
    void* const memory = allocator().raw_allocate(num_bytes);
    set_current_stream(before);
    return reinterpret_cast<std::uintptr_t>(memory);
  });
  m.def("raw_delete", [](std::uintptr_t memory) { allocator().raw_deallocate(reinterpret_cast<void*>(memory)); });
  m.def(
      "resize_storage",
      [](const at::Tensor& over, std::size_t num_bytes) {
        resize_storage(*over.storage().unsafeGetStorageImpl(), num_bytes);
      },
      Release());

  // The part of torch.cuda.cudart() that people use.
  m.def("host_register", [](std::uintptr_t memory, std::size_t num_bytes, unsigned flags) {
    return static_cast<int>(cudaHostRegister(reinterpret_cast<void*>(memory), num_bytes, flags));
  });
  m.def("host_unregister",
        [](std::uintptr_t memory) { return static_cast<int>(cudaHostUnregister(reinterpret_cast<void*>(memory))); });
  m.def("error_string", [](int error) { return std::string(cudaGetErrorString(static_cast<cudaError_t>(error))); });
}

}  // namespace pretend_gpu
