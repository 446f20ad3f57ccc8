// The pretend GPU as a Python module: the controls of the machine here, what torch.cuda is made of in bind_cuda.cpp.
#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstring>

#include "bind.h"
#include "faults.h"
#include "register.h"
#include "settings.h"
#include "streams.h"

namespace py = pybind11;

namespace {

using Release = py::call_guard<py::gil_scoped_release>;

py::dict counters() {
  const pretend_gpu::Launches::Seen seen = pretend_gpu::launches().seen();
  py::dict told;
  told["operators"] = seen.asynchronous;
  told["synchronizing_operators"] = seen.synchronous;
  told["most_ahead"] = seen.most_ahead;
  told["link_bytes_read"] = seen.link_bytes_read;
  told["link_bytes_written"] = seen.link_bytes_written;
  told["host_waits"] = fake_cuda::num_host_waits();
  told["full_queues"] = fake_cuda::num_full_queues();
  return told;
}

std::atomic<std::int64_t> num_writes{0};

}  // namespace

PYBIND11_MODULE(_pretend_gpu, m) {
  fake_cuda::protect_memory();
  pretend_gpu::register_operators();

  m.def("set_pace", [](bool lazy, std::uint64_t seed, std::int64_t max_delay_us, int percent) {
    fake_cuda::set_lazy(lazy);
    fake_cuda::set_delays(seed, max_delay_us, percent);
  });
  m.def("set_observers", &fake_cuda::set_observers);
  m.def("set_kernels", [](bool poison, bool writes_everything, int threads) {
    pretend_gpu::settings().poison = poison;
    pretend_gpu::settings().writes_everything = writes_everything;
    pretend_gpu::settings().threads = threads;
  });
  m.def("set_capacity", &fake_cuda::set_capacity);
  m.def("counters", &counters);
  m.def("calls", &fake_cuda::counts);
  m.def("reset_counters", [] {
    pretend_gpu::launches().reset();
    fake_cuda::reset_waits();
  });
  m.def("report_faults", &fake_cuda::report_faults);
  m.def("has_failed", &pretend_gpu::has_failed);
  m.def("forget_failure", &pretend_gpu::forget_failure);
  m.def("stop", &fake_cuda::stop, Release());
  m.def(
      "fail_next",
      [](const std::string& call, int nth, int error) {
        fake_cuda::fail_next(call, nth, static_cast<cudaError_t>(error));
      },
      py::arg("call"), py::arg("nth") = 1, py::arg("error") = static_cast<int>(cudaErrorUnknown));
  m.def("begin_capture",
        [](std::uintptr_t stream) { fake_cuda::begin_capture(reinterpret_cast<cudaStream_t>(stream)); });
  m.def("end_capture", &fake_cuda::end_capture);
  m.def("alive", &fake_cuda::alive);

  // What noria watches gradients by: a call-back of a storage, once, when its pointer is asked for to write through.
  m.def("watch_writes", [](const at::Tensor& tensor) {
    tensor.storage().unsafeGetStorageImpl()->set_materializer([](c10::StorageImpl*) { ++num_writes; });
  });
  m.def("num_writes", [] { return num_writes.load(); });
  // Device memory by its address, as noria makes tensors over its own.
  m.def(
      "at_address",
      [](std::uintptr_t memory, std::int64_t count, int device) {
        const auto options = at::TensorOptions().dtype(at::kFloat).device(pretend_gpu::device_of(device));
        return at::for_blob(reinterpret_cast<void*>(memory), {count})
            .options(options)
            .target_device(options.device())
            .make_tensor();
      },
      py::arg("memory"), py::arg("count"), py::arg("device") = 0);
  m.def("ipc_handle", [](std::uintptr_t memory) {
    cudaIpcMemHandle_t handle{};
    pretend_gpu::check(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(memory)), "cudaIpcGetMemHandle");
    return py::bytes(handle.reserved, sizeof(handle.reserved));
  });
  m.def("ipc_open", [](const std::string& told) {
    cudaIpcMemHandle_t handle{};
    std::memcpy(handle.reserved, told.data(), std::min(told.size(), sizeof(handle.reserved)));
    void* memory = nullptr;
    pretend_gpu::check(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    return reinterpret_cast<std::uintptr_t>(memory);
  });
  m.def("ipc_close", [](std::uintptr_t memory) {
    pretend_gpu::check(cudaIpcCloseMemHandle(reinterpret_cast<void*>(memory)), "cudaIpcCloseMemHandle");
  });

  pretend_gpu::bind_cuda(m);
  m.def("bind_nccl", [m]() mutable { pretend_gpu::bind_nccl(m); });
}
