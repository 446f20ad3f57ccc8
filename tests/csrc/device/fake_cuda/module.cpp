// The controls of the fake CUDA runtime, as a Python module.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include <dlfcn.h>

#include "device/cuda_runtime.h"
#include "device/host_ticket.h"
#include "fake_cuda.h"

namespace py = pybind11;

namespace {

/// The calls of the very library that this module is linked with. By their names alone they would be the real runtime's
/// where a CUDA build of torch has loaded one.
const noria::cuda::Runtime& runtime() {
  static const auto found = [] {
    Dl_info library{};
    dladdr(reinterpret_cast<void*>(&fake_cuda::make_stream), &library);
    return noria::cuda::Runtime::open(library.dli_fname);
  }();
  return *found;
}

cudaStream_t as_stream(std::uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

}  // namespace

PYBIND11_MODULE(_fake_cuda, m) {
  py::module_::import("noria._C");  // registers HostTicket

  using Release = py::call_guard<py::gil_scoped_release>;
  m.def(
      "fail_next",
      [](const std::string& call, int nth, int error) {
        fake_cuda::fail_next(call, nth, static_cast<cudaError_t>(error));
      },
      py::arg("call"), py::arg("nth") = 1, py::arg("error") = static_cast<int>(cudaErrorUnknown));
  m.def("counts", &fake_cuda::counts);
  m.def("log", &fake_cuda::log);
  m.def("reset", &fake_cuda::reset);
  m.def("alive", &fake_cuda::alive);
  m.def("begin_capture", [](std::uintptr_t stream) { fake_cuda::begin_capture(as_stream(stream)); });
  m.def("end_capture", &fake_cuda::end_capture);
  m.def("num_empty_waits", &fake_cuda::num_empty_waits);
  m.def("take_error", [] { return static_cast<int>(runtime().GetLastError()); });
  m.def("pending_error", [] { return static_cast<int>(fake_cuda::pending_error()); });
  m.def("set_device", [](int device) { return static_cast<int>(runtime().SetDevice(device)); });
  m.def("get_device", [] {
    int device = -1;
    runtime().GetDevice(&device);
    return device;
  });

  // What a user's own CUDA code would do between the verbs of the backend.
  m.def("make_stream", [] { return reinterpret_cast<std::uintptr_t>(fake_cuda::make_stream()); });
  m.def("destroy_stream", [](std::uintptr_t stream) { runtime().StreamDestroy(as_stream(stream)); }, Release());
  m.def("synchronize", [](std::uintptr_t stream) { runtime().StreamSynchronize(as_stream(stream)); }, Release());
  m.def("enqueue_copy", [](std::uintptr_t stream, std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
    fake_cuda::run_on(as_stream(stream),
                      [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
  });
  m.def("hold_copy", [](std::uintptr_t to, const std::shared_ptr<noria::HostTicket>& until) {
    fake_cuda::hold_copy(reinterpret_cast<const void*>(to), [until] { until->wait_passed(); });
  });
  m.def("enqueue_hold", [](std::uintptr_t stream, const std::shared_ptr<noria::HostTicket>& until) {
    fake_cuda::run_on(as_stream(stream), [until] { until->wait_passed(); });
  });
}
