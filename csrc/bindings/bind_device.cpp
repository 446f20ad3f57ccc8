// Binds backends, tickets, shared memory and CUDA runtimes. Addresses and stream handles are integers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string_view>
#include <tuple>

#include "base/errors.h"
#include "base/words.h"
#include "bindings/bind_words.h"
#include "bindings/home_use.h"
#include "bindings/lane_stats.h"
#include "device/backend.h"
#include "device/cuda_runtime.h"
#include "device/host_backend.h"
#include "device/host_memory.h"
#include "device/host_ticket.h"
#include "device/kernel_images.h"
#include "device/link_probe.h"
#include "device/own_thread.h"
#include "device/timing.h"

namespace py = pybind11;

namespace noria {
namespace {

OpLabel make_label(std::int64_t op, const std::string& lane, const std::string& verb, std::int32_t unit) {
  return {OpId(op), parse_lane(lane), parse_verb(verb), UnitId(unit)};
}

std::shared_ptr<HostBackend> make_host(std::int64_t capacity, std::shared_ptr<Pace> pace) {
  HostBackendOptions options{Bytes{capacity}};
  if (pace) options.pace = std::move(pace);
  return std::make_shared<HostBackend>(options);
}

std::shared_ptr<Backend> make_cuda(int device_index, std::int64_t capacity, std::shared_ptr<Pace> pace,
                                   std::int64_t staging_piece, const std::shared_ptr<const cuda::Runtime>& runtime,
                                   std::int64_t copy_piece) {
  CudaBackendOptions options{device_index, Bytes{capacity}};
  if (pace) options.pace = std::move(pace);
  options.copy_piece = Bytes{copy_piece};
  options.staging_piece = Bytes{staging_piece};
  py::gil_scoped_release release;
  return make_cuda_backend(options, runtime);
}

std::shared_ptr<const cuda::Runtime> open_cuda(const std::string& path) {
  const py::gil_scoped_release release;
  return cuda::Runtime::open(path);
}

/// "13.0"
std::string version_of(const cuda::Runtime& runtime) {
  int version = 0;
  if (runtime.RuntimeGetVersion(&version) != cuda::kSuccess) {
    (void)runtime.GetLastError();
    return "unknown";
  }
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Transfer make_transfer(const std::vector<std::tuple<Address, Address, std::int64_t>>& copies,
                       const std::vector<std::pair<Address, std::int64_t>>& poison, const std::vector<int>& links) {
  NORIA_INVARIANT(links.empty() || links.size() == copies.size(), "links are by copy");
  Transfer transfer;
  for (const auto& [to, from, bytes] : copies) transfer.copies.push_back({pointer(to), pointer(from), Bytes{bytes}});
  for (std::size_t i = 0; i < links.size(); ++i) transfer.copies[i].link = links[i];
  for (const auto& [memory, bytes] : poison) transfer.poison.emplace_back(pointer(memory), Bytes{bytes});
  return transfer;
}

void bind_tickets(py::module_& m) {
  py::class_<TicketState, std::shared_ptr<TicketState>>(m, "Ticket")
      .def_property_readonly("op", [](const TicketState& ticket) { return ticket.label.op.value; })
      .def_property_readonly("lane", [](const TicketState& ticket) { return to_string(ticket.label.lane); })
      .def_property_readonly("verb", [](const TicketState& ticket) { return to_string(ticket.label.verb); })
      .def_property_readonly("unit", [](const TicketState& ticket) { return ticket.label.unit.value; })
      .def("passed", &TicketState::passed, NoGil())
      .def("wait_passed", &TicketState::wait_passed, NoGil())
      .def("wait_issued", &TicketState::wait_issued, NoGil());

  py::class_<HostTicket, TicketState, std::shared_ptr<HostTicket>>(m, "HostTicket")
      .def(py::init([](std::int64_t op, const std::string& lane, const std::string& verb, std::int32_t unit) {
             return std::make_shared<HostTicket>(make_label(op, lane, verb, unit));
           }),
           py::arg("op") = -1, py::arg("lane") = "update", py::arg("verb") = "update", py::arg("unit") = -1)
      .def("pass_", &HostTicket::pass, NoGil())
      .def(
          "fail",
          [](HostTicket& ticket, const std::string& why) { ticket.fail(std::make_exception_ptr(MachineError(why))); },
          py::arg("why"), NoGil());
}

SharedMemory make_shared_memory(std::int64_t bytes, int fd, const py::bytes& handle) {
  SharedMemory told{Bytes{bytes}, fd, {}};
  const auto content = static_cast<std::string_view>(handle);
  NORIA_INVARIANT(content.empty() || content.size() == told.handle.size(), "a handle of another size");
  std::memcpy(told.handle.data(), content.data(), content.size());
  return told;
}

py::bytes handle_of(const SharedMemory& told) {
  return {reinterpret_cast<const char*>(told.handle.data()), told.handle.size()};
}

void bind_shared_memory(py::module_& m) {
  py::class_<SharedMemory>(m, "SharedMemory")
      .def(py::init(&make_shared_memory), py::arg("bytes"), py::arg("fd") = -1, py::arg("handle") = py::bytes())
      .def_property_readonly("bytes", [](const SharedMemory& told) { return told.bytes.count; })
      .def_readonly("fd", &SharedMemory::fd)
      .def_property_readonly("handle", &handle_of);
}

void bind_backend(py::module_& m) {
  py::class_<Backend, std::shared_ptr<Backend>>(m, "Backend")
      .def_property_readonly("name", &Backend::name)
      .def(
          "allocate", [](Backend& b, std::int64_t bytes) { return address_of(b.allocate(Bytes{bytes})); },
          py::arg("bytes"), NoGil())
      .def(
          "free", [](Backend& b, Address memory) { b.free(pointer(memory)); }, py::arg("memory"), NoGil())
      .def(
          "allocate_shared", [](Backend& b, std::int64_t bytes) { return address_of(b.allocate_shared(Bytes{bytes})); },
          py::arg("bytes"), NoGil())
      .def(
          "shared", [](const Backend& b, Address memory) { return b.shared(pointer(memory)); }, py::arg("memory"),
          NoGil())
      .def(
          "open_shared", [](Backend& b, const SharedMemory& told) { return address_of(b.open_shared(told)); },
          py::arg("told"), NoGil())
      .def(
          "discard_shared",
          [](Backend& b, Address memory, std::int64_t offset, std::int64_t bytes) {
            return b.discard_shared(pointer(memory), Bytes{offset}, Bytes{bytes}).count;
          },
          py::arg("memory"), py::arg("offset"), py::arg("bytes"), NoGil())
      .def(
          "close_shared", [](Backend& b, Address memory) { b.close_shared(pointer(memory)); }, py::arg("memory"),
          NoGil())
      .def_property_readonly("allocated", [](const Backend& b) { return b.allocated().count; })
      .def_property_readonly("capacity", [](const Backend& b) { return b.capacity().count; })
      .def_property_readonly("num_allocations", &Backend::num_allocations)
      .def_property_readonly("num_events", &Backend::num_events)
      .def(
          "register_home",
          [](Backend& b, Address memory, std::int64_t bytes, const std::string& use) {
            return b.register_home(pointer(memory), Bytes{bytes}, parse_home_use(use));
          },
          py::arg("memory"), py::arg("bytes"), py::arg("use") = "device", NoGil())
      .def(
          "unregister_home", [](Backend& b, Address memory) { b.unregister_home(pointer(memory)); }, py::arg("memory"),
          NoGil())
      .def(
          "device_address",
          [](const Backend& b, Address memory) { return address_of(b.device_address(pointer(memory))); },
          py::arg("home_memory"), NoGil())
      .def_property_readonly("staging_bytes", [](const Backend& b) { return b.staging_bytes().count; })
      .def_property_readonly("pci_bus_id", &Backend::pci_bus_id)
      .def(
          "submit",
          [](Backend& b, const std::string& lane, const std::vector<std::tuple<Address, Address, std::int64_t>>& copies,
             const std::vector<std::pair<Address, std::int64_t>>& poison, std::vector<Ticket> waits,
             const std::vector<int>& links, std::int64_t op, const std::string& verb, std::int32_t unit) {
            const OpLabel label = make_label(op, lane, verb.empty() ? lane : verb, unit);
            return b.submit(label, make_transfer(copies, poison, links), std::move(waits));
          },
          py::arg("lane"), py::arg("copies"), py::arg("poison") = std::vector<std::pair<Address, std::int64_t>>(),
          py::arg("waits") = std::vector<Ticket>(), py::kw_only(), py::arg("links") = std::vector<int>(),
          py::arg("op") = -1, py::arg("verb") = "", py::arg("unit") = -1, NoGil())
      .def(
          "open",
          [](Backend& b, std::int64_t op, const std::string& verb, std::int32_t unit, const std::string& lane,
             std::int64_t bytes) { return b.open(make_label(op, lane, verb, unit), Bytes{bytes}); },
          py::arg("op") = -1, py::arg("verb") = "forward", py::arg("unit") = -1, py::arg("lane") = "compute",
          py::arg("bytes") = 0, NoGil())
      .def(
          "give", [](Backend& b, const Ticket& ticket, Address stream) { b.give(ticket, Stream(stream)); },
          py::arg("ticket"), py::arg("stream") = 0, NoGil())
      .def(
          "give_failed",
          [](Backend& b, const Ticket& ticket, const std::string& why) {
            b.give_failed(ticket, std::make_exception_ptr(MachineError(why)));
          },
          py::arg("ticket"), py::arg("why"), NoGil())
      .def(
          "wait",
          [](Backend& b, const std::vector<Ticket>& tickets, Address stream, std::int64_t op, const std::string& verb,
             std::int32_t unit,
             const std::string& lane) { b.wait(tickets, Stream(stream), make_label(op, lane, verb, unit)); },
          py::arg("tickets"), py::arg("stream") = 0, py::kw_only(), py::arg("op") = -1, py::arg("verb") = "forward",
          py::arg("unit") = -1, py::arg("lane") = "compute", NoGil())
      .def(
          "measure_link",
          [](Backend& b, Address own, Address peers, std::int64_t bytes, int link) {
            return measure_link_gib_s(b, pointer(own), pointer(peers), Bytes{bytes}, link);
          },
          py::arg("own"), py::arg("peers"), py::arg("bytes"), py::arg("link"), NoGil())
      .def("kernels_absent", &Backend::kernels_absent, NoGil())
      .def("idle", &Backend::idle, NoGil())
      .def("close", &Backend::close, NoGil())
      .def(
          "stats",
          [](const Backend& backend, const std::string& lane) {
            return asked_stats([&, which = parse_lane(lane)] { return backend.stats(which); });
          },
          py::arg("lane"))
      .def(
          "begin_counting", [](Backend& backend, std::int64_t first) { backend.begin_counting(OpId(first)); },
          py::arg("first_op"), NoGil())
      .def(
          "counted",
          [](const Backend& backend, const std::string& lane) {
            return asked_stats([&, which = parse_lane(lane)] { return backend.counted(which); });
          },
          py::arg("lane"))
      .def("set_trace", &Backend::set_trace, py::arg("trace").none(true), NoGil())
      .def_property_readonly("poisons", &Backend::poisons);

  py::class_<HostBackend, Backend, std::shared_ptr<HostBackend>>(m, "HostBackend");
}

}  // namespace

void bind_device(py::module_& m) {
  bind_tickets(m);
  bind_shared_memory(m);
  bind_backend(m);
  m.attr("DEFAULT_STREAM") = Stream::of(nullptr).value();
  m.def("has_kernel_images", [] { return !kernel_images().empty(); });
  m.def("begin_own_thread", &begin_own_thread, py::arg("name"));
  m.def("return_freed_memory", &return_freed_memory, NoGil());
  m.def("make_host_backend", &make_host, py::arg("capacity"), py::arg("pace") = py::none());
  py::class_<cuda::Runtime, std::shared_ptr<cuda::Runtime>>(m, "CudaRuntime")
      .def(py::init([](const std::string& path) { return std::const_pointer_cast<cuda::Runtime>(open_cuda(path)); }),
           py::arg("path"))
      .def_readonly("path", &cuda::Runtime::path)
      .def_property_readonly("version", &version_of);
  m.def("find_cuda_runtime", [] { return std::const_pointer_cast<cuda::Runtime>(cuda::Runtime::find()); });
  m.def("make_cuda_backend", &make_cuda, py::arg("device_index"), py::arg("capacity"), py::arg("pace") = py::none(),
        py::arg("staging_piece") = CudaBackendOptions{}.staging_piece.count, py::arg("runtime") = py::none(),
        py::arg("copy_piece") = CudaBackendOptions{}.copy_piece.count);
  m.attr("STAGING_BYTES") = CudaBackendOptions{}.staging_bytes().count;
  m.def("cuda_absent_reason", &cuda_absent_reason, py::arg("runtime") = py::none(), NoGil());
}

}  // namespace noria
