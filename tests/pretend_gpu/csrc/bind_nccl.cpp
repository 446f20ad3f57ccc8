// The process group for torch.distributed: what a CUDA build of torch has in torch._C._distributed_c10d.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bind.h"
#include "nccl.h"

namespace py = pybind11;

namespace pretend_gpu {
namespace {

using c10d::Backend;

/// gloo, made by Python: its headers are not installed. It connects when it is first used, as NCCL does.
c10::intrusive_ptr<Backend> make_gloo(const py::object& store, const char* prefix, int rank, int size,
                                      const Nccl::Options& options) {
  const py::module_ c10d = py::module_::import("torch._C._distributed_c10d");
  const py::object gloo = c10d.attr("ProcessGroupGloo");
  py::object its = gloo.attr("_Options")();
  its.attr("_timeout") = options.timeout;
  its.attr("_devices") = py::make_tuple(gloo.attr("create_default_device")(py::arg("lazy_init") = true));
  return gloo(c10d.attr("PrefixStore")(prefix, store), rank, size, its).cast<c10::intrusive_ptr<Backend>>();
}

}  // namespace

void bind_nccl(py::module_& m) {
  const py::object base = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<Nccl, Backend, c10::intrusive_ptr<Nccl>> nccl(m, "ProcessGroupNCCL", py::dynamic_attr());
  py::class_<Nccl::Options, Backend::Options, c10::intrusive_ptr<Nccl::Options>>(nccl, "Options", py::dynamic_attr())
      .def(py::init([](bool is_high_priority_stream) {
             auto options = c10::make_intrusive<Nccl::Options>();
             options->is_high_priority_stream = is_high_priority_stream;
             return options;
           }),
           py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Nccl::Options::is_high_priority_stream);
  const auto make = [](const py::object& store, int rank, int size, c10::intrusive_ptr<Nccl::Options> options) {
    return c10::make_intrusive<Nccl>(rank, size, options, make_gloo(store, "collectives", rank, size, *options),
                                     make_gloo(store, "pairs", rank, size, *options));
  };
  nccl.def(py::init(make), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def(py::init([make](const py::object& store, int rank, int size, std::chrono::milliseconds timeout) {
             auto options = c10::make_intrusive<Nccl::Options>();
             options->timeout = timeout;
             return make(store, rank, size, options);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout") = std::chrono::minutes(10))
      .def_property_readonly(
          "options",
          [](Nccl& self) { return c10::static_intrusive_pointer_cast<Nccl::Options>(self.getBackendOptions()); })
      .def_property_readonly("uid", [](const Nccl& self) { return self.getID(); })
      .def("_group_start", [](Nccl&) {})
      .def("_group_end", [](Nccl&) {})
      .def("_add_ephemeral_timeout", [](Nccl&, std::chrono::milliseconds) {})
      .def("_is_initialized", [](Nccl&) { return true; });
  m.def("abort_groups", &Nccl::abort_all, py::call_guard<py::gil_scoped_release>());
}

}  // namespace pretend_gpu
