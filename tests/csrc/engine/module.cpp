// The bare engine as a Python module, over the host backend or over CUDA's on a fake runtime. For tests only.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <dlfcn.h>

#include "../comm/local_collectives.h"
#include "bare_engine.h"
#include "base/errors.h"
#include "device/cuda_runtime.h"
#include "fake_cuda.h"

namespace py = pybind11;

namespace noria {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;

std::vector<UnitId> unit_ids(const std::vector<std::int32_t>& units) {
  std::vector<UnitId> ids;
  for (std::int32_t unit : units) ids.emplace_back(unit);
  return ids;
}

/// The shared library that has this function.
std::string library_of(const void* function) {
  Dl_info info{};
  NORIA_INVARIANT(dladdr(function, &info) != 0, "a function of no library");
  return info.dli_fname;
}

BareMachine make_machine(const std::string& name, const Hostility& hostility) {
  if (name == "host") return make_host_machine(hostility, /*asynchronous=*/true);
  if (name == "calling thread") return make_host_machine(hostility, /*asynchronous=*/false);
  NORIA_INVARIANT(name == "fake cuda", "no such machine: " + name);
  static const auto runtime = cuda::Runtime::open(library_of(reinterpret_cast<const void*>(&fake_cuda::make_stream)));
  auto backend = make_cuda_backend({0, Bytes{1 << 24}, slow(hostility)}, runtime);
  const std::shared_ptr<CUstream_st> stream(fake_cuda::make_stream(), &cudaStreamDestroy);
  const std::shared_ptr<CUstream_st> other(fake_cuda::make_stream(), &cudaStreamDestroy);
  return {backend, Stream::of(stream.get()), Stream::of(other.get()),
          [stream, other](Stream on, std::function<void()> work) {
            fake_cuda::run_on(static_cast<CUstream_st*>(on.handle()), std::move(work));
          }};
}

std::unique_ptr<BareEngine> make(const std::vector<std::pair<int, int>>& units, std::int64_t arena, std::int32_t window,
                                 const std::string& machine, bool pool, bool prefetch_at_step, std::uint64_t seed,
                                 std::int64_t max_delay_us, const std::map<std::string, std::int64_t>& hold_us,
                                 bool poison, std::int64_t kernel_us, bool drafts, int ring_slots,
                                 const std::shared_ptr<LocalGroup>& group, int rank, int threads,
                                 std::int64_t hold_peer_us, bool assists) {
  Hostility hostility{seed, max_delay_us, {}, poison, hold_peer_us};
  for (const auto& [verb, us] : hold_us) hostility.hold_us[parse_verb(verb)] = us;
  std::vector<BareUnit> described;
  for (const auto& [slots, trainable] : units) described.push_back({slots, trainable});
  HostOptimizerOptions options;
  options.num_threads = threads;
  options.pace = slow(hostility);
  BareMachine computes = make_machine(machine, hostility);
  computes.kernel_us = kernel_us;
  return std::make_unique<BareEngine>(described, std::move(computes), Budget{Bytes{arena}, window}, prefetch_at_step,
                                      pool ? std::make_shared<HostOptimizer>(options) : nullptr, drafts, ring_slots,
                                      group ? std::make_shared<LocalCollectives>(group, rank) : nullptr, assists);
}

py::list passes_of(BareEngine& bare) {
  std::vector<PassStats> passes;
  {
    const py::gil_scoped_release release;
    passes = bare.engine().stats()->passes();
  }
  py::list result;
  for (const PassStats& stats : passes) {
    py::dict each;
    each["itinerary"] = stats.itinerary.value;
    each["phase"] = std::string(to_string(stats.signature.phase));
    each["times"] = stats.times;
    each["planned_fetches"] = stats.planned_fetches;
    each["fetches"] = stats.fetches;
    each["unplanned_visits"] = stats.unplanned_visits;
    result.append(each);
  }
  return result;
}

}  // namespace
}  // namespace noria

PYBIND11_MODULE(_bare_engine, m) {
  using noria::BareEngine;
  using noria::Release;
  py::module_::import("noria._C");  // registers the exceptions
  m.attr("SLOT_ELEMENTS") = noria::kSlotElements;
  m.attr("SLOT_BYTES") = noria::kSlotBytes.count;
  m.def("num_empty_waits", &fake_cuda::num_empty_waits);

  py::class_<noria::Leases>(m, "Leases")
      .def(py::init([](std::int64_t arena, std::int64_t capacity) {
             return std::make_unique<noria::Leases>(noria::make_host_backend({noria::Bytes{capacity}}),
                                                    noria::Bytes{arena});
           }),
           py::arg("arena"), py::arg("capacity"))
      .def("take",
           [](noria::Leases& self, std::int64_t offset, std::int64_t bytes, bool is_weights) {
             return self.take(noria::Bytes{offset}, noria::Bytes{bytes}, is_weights) - self.at(noria::Bytes{0});
           })
      .def("release", [](noria::Leases& self, std::int64_t offset) { self.release(noria::Bytes{offset}); })
      .def_property_readonly("peak", [](noria::Leases& self) { return self.peak().count; })
      .def_property_readonly("peak_units", &noria::Leases::peak_units)
      .def_property_readonly("num_units", &noria::Leases::num_units)
      .def_property_readonly("num_leases", &noria::Leases::num_leases);

  py::class_<noria::LocalGroup, std::shared_ptr<noria::LocalGroup>>(m, "LocalGroup")
      .def(py::init<int>(), py::arg("size"))
      .def("leave", &noria::LocalGroup::leave, Release());

  py::class_<BareEngine>(m, "BareEngine")
      .def(py::init(&noria::make), py::arg("units"), py::kw_only(), py::arg("arena"), py::arg("window") = 0,
           py::arg("machine") = "host", py::arg("pool") = true, py::arg("prefetch_at_step") = true, py::arg("seed") = 0,
           py::arg("max_delay_us") = 0, py::arg("hold_us") = std::map<std::string, std::int64_t>(),
           py::arg("poison") = false, py::arg("kernel_us") = 0, py::arg("drafts") = false, py::arg("ring_slots") = 0,
           py::arg("group") = nullptr, py::arg("rank") = 0, py::arg("threads") = 1, py::arg("hold_peer_us") = 0,
           py::arg("assists") = false)
      .def("begin_forward", &BareEngine::begin_forward, py::arg("root") = 0, py::arg("training") = true,
           py::arg("grad_enabled") = true, Release())
      .def("begin_backward", &BareEngine::begin_backward, Release())
      .def(
          "visit",
          [](BareEngine& self, std::int32_t hook, const std::vector<std::int32_t>& needs) {
            self.visit(hook, noria::unit_ids(needs));
          },
          Release())
      .def("leave", &BareEngine::leave, Release())
      .def("gradient", &BareEngine::gradient, Release())
      .def("end_pass", &BareEngine::end_pass, Release())
      .def("reset", &BareEngine::reset, Release())
      .def("clip", &BareEngine::clip, Release())
      .def("zero_grad", &BareEngine::zero_grad, Release())
      .def("set_unsynced", &BareEngine::set_unsynced, Release())
      .def("begin_step", &BareEngine::begin_step, Release())
      .def(
          "lend", [](BareEngine& self, std::int64_t bytes) { self.lend(noria::Bytes{bytes}); }, Release())
      .def(
          "keep_copies",
          [](BareEngine& self, const std::vector<std::int32_t>& units) { self.keep_copies(noria::unit_ids(units)); },
          Release())
      .def(
          "shrink_copies", [](BareEngine& self, std::int64_t left) { self.shrink_copies(noria::Bytes{left}); },
          Release())
      .def("lose", &BareEngine::lose, Release())
      .def("copy_stats",
           [](BareEngine& self) {
             const noria::CopyStats stats = self.engine().copies()->stats();
             return std::tuple(stats.num_units, stats.num_stashed, stats.num_fetched);
           })
      .def("update", py::overload_cast<std::size_t, bool>(&BareEngine::update), Release())
      .def("end_step", &BareEngine::end_step, Release())
      .def("read_home", &BareEngine::read_home, Release())
      .def("write_home", &BareEngine::write_home, Release())
      .def("fail_next_update", &BareEngine::fail_next_update)
      .def("await_stream", &BareEngine::await_stream, Release())
      .def("keep", &BareEngine::keep)
      .def("look", &BareEngine::look, Release())
      .def("change_stream", &BareEngine::change_stream)
      .def("expect_updates", &BareEngine::expect_updates, Release())
      .def("sums", &BareEngine::sums, Release())
      .def("expect_in_backward", &BareEngine::expect_in_backward, Release())
      .def("claim", &BareEngine::claim, Release())
      .def("draft_counts",
           [](BareEngine& bare) {
             const noria::DraftCounts counts = bare.engine().drafts()->counts();
             return std::tuple(counts.kept, counts.looked_at, counts.redone, counts.undone, counts.dropped);
           })
      .def("hold_stream", &BareEngine::hold_stream, Release())
      .def("release_stream", &BareEngine::release_stream, Release())
      .def("break_stream", &BareEngine::break_stream, Release())
      .def("idle", &BareEngine::idle, Release())
      .def("close", &BareEngine::close, Release())
      .def(
          "omit_wait", [](BareEngine& self, const std::string& kind) { self.engine().issuer()->hazards().omit(kind); },
          Release())
      .def(
          "wait_kinds", [](BareEngine& self) { return self.engine().issuer()->wait_kinds(); }, Release())
      .def("result", &BareEngine::result)
      .def("array", &BareEngine::array)
      .def("arena", &BareEngine::arena)
      .def("passes", &noria::passes_of)
      .def_property_readonly("arena_bytes",
                             [](BareEngine& self) { return self.engine().leases()->arena_bytes().count; })
      .def_property_readonly("peak_bytes", [](BareEngine& self) { return self.engine().leases()->peak().count; })
      .def_property_readonly("peak_units", [](BareEngine& self) { return self.engine().leases()->peak_units(); })
      .def_property_readonly("num_fetches", [](BareEngine& self) { return self.engine().fetcher()->num_fetches(); })
      .def_property_readonly("num_allocations", [](BareEngine& self) { return self.backend().num_allocations(); })
      .def_property_readonly("num_events", [](BareEngine& self) { return self.backend().num_events(); })
      .def_property_readonly("num_buffers", [](BareEngine& self) { return self.engine().buffers()->size(); })
      .def_property_readonly("num_remembered",
                             [](BareEngine& self) { return self.engine().issuer()->num_remembered(); });
}
