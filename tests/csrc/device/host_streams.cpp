// The host backend's asynchronous compute streams, as a Python module: what a user's own code would queue between the
// verbs of the backend.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <memory>

#include "device/host_backend.h"
#include "device/host_ticket.h"

namespace py = pybind11;

PYBIND11_MODULE(_host_streams, m) {
  py::module_::import("noria._C");  // registers HostBackend and HostTicket

  using Release = py::call_guard<py::gil_scoped_release>;
  m.def("create_stream", [](noria::HostBackend& backend) { return backend.create_stream().value(); }, Release());
  m.def(
      "enqueue_copy",
      [](noria::HostBackend& backend, std::uintptr_t stream, std::uintptr_t to, std::uintptr_t from,
         std::size_t bytes) {
        backend.enqueue(noria::Stream(stream),
                        [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
      },
      Release());
  m.def(
      "enqueue_hold",
      [](noria::HostBackend& backend, std::uintptr_t stream, const std::shared_ptr<noria::HostTicket>& until) {
        backend.enqueue(noria::Stream(stream), [until] { until->wait_passed(); });
      },
      Release());
}
