#include "bindings/bind_bridge.h"
#include "bindings/python_errors.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <set>
#include <tuple>

namespace py = pybind11;

namespace noria {
namespace {

// ---- what forwards save -----------------------------------------------------------------------------------------

void set_saved_callback(const EngineSaved& self, py::function more_home) {
  self->set_saved_callback([kept = keep(std::move(more_home))](Bytes least) {
    std::pair<std::int64_t, std::int64_t> taken;
    keep_python_errors([&] { taken = (*kept)(least.count).cast<decltype(taken)>(); });
    return std::pair{pointer(taken.first), Bytes{taken.second}};
  });
}

py::dict saved_stats(const EngineSaved& self) {
  const SavedStats stats = without_gil([&] { return self.engine().saved_stats(); });
  py::dict result;
  result["num_offloaded"] = stats.num_offloaded;
  result["num_reloaded"] = stats.num_reloaded;
  result["num_unforeseen"] = stats.num_unforeseen;
  result["offloaded"] = stats.offloaded.count;
  result["reloaded"] = stats.reloaded.count;
  result["offloaded_to_peers"] = stats.offloaded_to_peers.count;
  result["reloaded_from_peers"] = stats.reloaded_from_peers.count;
  result["there"] = stats.there.count;
  result["most_there"] = stats.most_there.count;
  result["saved"] = stats.saved.count;
  result["most_saved"] = stats.most_saved.count;
  result["most_at_peers"] = stats.most_at_peers.count;
  result["largest"] = stats.largest.count;
  return result;
}

using SavedNumbers = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

std::map<std::int32_t, SavedNumbers> saved_by_module(const EngineSaved& self) {
  std::map<std::int32_t, SavedNumbers> result;
  for (const auto& [hook, saved] : without_gil([&] { return self.engine().saved_by_module(); })) {
    result[hook.value] = {saved.num_visits, saved.bytes.count, saved.forward_us, saved.gap_us};
  }
  return result;
}

void bind_saved(py::module_& m) {
  py::class_<EngineSaved>(m, "EngineSaved")
      .def("set_saved_callback", &set_saved_callback, py::arg("more_home"))
      .def(
          "pack", [](const EngineSaved& self, const at::Tensor& tensor) { return self->pack(tensor); },
          py::arg("tensor"), NoGil())
      .def(
          "unpack", [](const EngineSaved& self, const SavedTensor& saved) { return self->unpack(saved); },
          py::arg("saved"), NoGil())
      .def(
          "add_peer",
          [](const EngineSaved& self, std::int32_t rank, int link, double bandwidth, std::int64_t address,
             std::int64_t bytes) {
            self.engine().activations()->add_peer({rank, link, bandwidth, pointer(address), Bytes{bytes}});
          },
          py::arg("rank"), py::arg("link"), py::arg("bandwidth"), py::arg("address"), py::arg("bytes"), NoGil())
      .def(
          "shrink_peer",
          [](const EngineSaved& self, std::int32_t rank, std::int64_t left) {
            return self.engine().activations()->shrink_peer(rank, Bytes{left});
          },
          py::arg("rank"), py::arg("left"), NoGil())
      .def(
          "send_saved_home",
          [](const EngineSaved& self, const std::set<std::int32_t>& hooks) {
            std::set<HookId> all;
            for (const std::int32_t hook : hooks) all.insert(HookId(hook));
            self.engine().activations()->send_home(std::move(all));
          },
          py::arg("hooks"), NoGil())
      .def(
          "set_saved_room",
          [](const EngineSaved& self, std::int64_t room) { self.engine().activations()->set_room(Bytes{room}); },
          py::arg("room"), NoGil())
      .def(
          "resize_saved_room",
          [](const EngineSaved& self, std::int64_t room) { self.engine().activations()->resize_room(Bytes{room}); },
          py::arg("room"), NoGil())
      .def("saved_stats", &saved_stats)
      .def("saved_by_module", &saved_by_module);
}

// ---- copies of units at peers -----------------------------------------------------------------------------------

py::dict copy_stats(const EngineCopies& self) {
  const CopyStats stats = without_gil([&] { return self.engine().copies()->stats(); });
  py::dict result;
  result["num_units"] = stats.num_units;
  result["num_stashed"] = stats.num_stashed;
  result["num_fetched"] = stats.num_fetched;
  result["stashed"] = stats.stashed.count;
  result["fetched"] = stats.fetched.count;
  return result;
}

std::vector<std::int64_t> times_fetched(const EngineCopies& self) {
  const auto fetcher = self.engine().fetcher();
  const UnitMap<std::int64_t>& times = fetcher->times_fetched();
  std::vector<std::int64_t> result;
  for (UnitId unit : times.ids()) result.push_back(times[unit]);
  return result;
}

void bind_copies(py::module_& m) {
  py::class_<EngineCopies>(m, "EngineCopies")
      .def(
          "add_copy_peer",
          [](const EngineCopies& self, std::int32_t rank, int link, double bandwidth, std::int64_t address,
             std::int64_t bytes, std::int64_t begin) {
            self.engine().copies()->add_peer({rank, link, bandwidth, pointer(address), Bytes{bytes}, Bytes{begin}});
          },
          py::arg("rank"), py::arg("link"), py::arg("bandwidth"), py::arg("address"), py::arg("bytes"),
          py::arg("begin"), NoGil())
      .def(
          "shrink_copy_peer",
          [](const EngineCopies& self, std::int32_t rank, std::int64_t left) {
            self.engine().copies()->shrink_peer(rank, Bytes{left});
          },
          py::arg("rank"), py::arg("left"), NoGil())
      .def(
          "keep_copies",
          [](const EngineCopies& self, const std::vector<std::int32_t>& units) {
            self.engine().keep_copies({units.begin(), units.end()});
          },
          py::arg("units"), NoGil())
      .def("copy_stats", &copy_stats)
      .def("times_fetched", &times_fetched, NoGil());
}

// ---- units that stay on the device ------------------------------------------------------------------------------

void bind_rest(py::module_& m) {
  py::class_<EngineRest>(m, "EngineRest")
      .def(
          "set_callback",
          [](const EngineRest& self, py::function look) {
            self->rest().set_callback([kept = keep(std::move(look))](UnitId unit, bool write_weights, bool is_open) {
              keep_python_errors([&] { (*kept)(unit.value, write_weights, is_open); });
            });
          },
          py::arg("look"))
      .def(
          "set_asleep", [](const EngineRest& self, bool asleep) { self->set_asleep(asleep); }, py::arg("asleep"),
          NoGil())
      .def(
          "resize", [](const EngineRest& self, std::int64_t arena) { return self.engine().resize(Bytes{arena}).count; },
          py::arg("arena"), NoGil())
      .def(
          "set_units",
          [](const EngineRest& self, const std::vector<std::int32_t>& units) {
            self->set_resting({units.begin(), units.end()});
          },
          py::arg("units"), NoGil())
      .def(
          "update", [](const EngineRest& self, const std::vector<UpdateJob>& jobs) { self->rest().update(jobs); },
          py::arg("jobs"), NoGil())
      .def(
          "sum",
          [](const EngineRest& self, const std::vector<UpdateJob>& jobs, std::int64_t sums) {
            self->rest().sum(jobs, pointer<double>(sums));
          },
          py::arg("jobs"), py::arg("sums"), NoGil())
      .def(
          "has", [](const EngineRest& self, std::int32_t unit) { return self->rest().has(UnitId(unit)); },
          py::arg("unit"))
      .def(
          "show",
          [](const EngineRest& self, std::int32_t unit, std::int64_t weights) {
            self->rest().show(UnitId(unit), pointer(weights));
          },
          py::arg("unit"), py::arg("weights"))
      .def("check",
           [](const EngineRest& self) {
             self->home().refuse_open();
             self->rest().check();
           })
      .def(
          "hide", [](const EngineRest& self, std::int32_t unit) { self->rest().hide(UnitId(unit)); }, py::arg("unit"))
      .def(
          "is_shown", [](const EngineRest& self, std::int32_t unit) { return self->rest().is_shown(UnitId(unit)); },
          py::arg("unit"))
      .def(
          "is_written", [](const EngineRest& self, std::int32_t unit) { return self->rest().is_written(UnitId(unit)); },
          py::arg("unit"))
      .def(
          "is_told", [](const EngineRest& self, std::int32_t unit) { return self->rest().is_told(UnitId(unit)); },
          py::arg("unit"));
}

}  // namespace

void bind_bridge_memory(py::module_& m) {
  bind_saved(m);
  bind_copies(m);
  bind_rest(m);
}

}  // namespace noria
