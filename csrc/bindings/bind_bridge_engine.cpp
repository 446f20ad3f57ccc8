#include "bindings/bind_bridge.h"
#include "bindings/lane_stats.h"
#include "bindings/python_errors.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/from_blob.h>

#include <map>
#include <optional>
#include <set>
#include <string>

namespace py = pybind11;

namespace noria {
namespace {

// ---- updates ----------------------------------------------------------------------------------------------------

void set_update_callback(const EngineUpdates& self, py::function run_update) {
  self->set_update_callback(
      [kept = keep(std::move(run_update))](UnitId unit) { keep_python_errors([&] { (*kept)(unit.value); }); });
}

using CopyTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // offset in the slot, address at home, bytes
using PieceTuple = std::tuple<std::int64_t, std::int64_t, std::vector<CopyTuple>, std::vector<CopyTuple>>;

void set_pieces(const EngineUpdates& self, std::int32_t unit, const std::vector<PieceTuple>& pieces) {
  const auto copies = [](const std::vector<CopyTuple>& tuples) {
    std::vector<StreamedUpdates::Copy> made;
    for (const auto& [at, home, bytes] : tuples) made.push_back({Bytes{at}, pointer(home), Bytes{bytes}});
    return made;
  };
  std::vector<StreamedUpdates::Piece> made;
  for (const auto& [begin, end, comes, goes] : pieces) {
    made.push_back({Bytes{begin}, Bytes{end}, copies(comes), copies(goes)});
  }
  self.engine().set_update_pieces(UnitId(unit), std::move(made));
}

py::dict draft_counts(const EngineUpdates& self) {
  const DraftCounts counts = without_gil([&] { return self.engine().drafts()->counts(); });
  py::dict result;
  result["kept"] = counts.kept;
  result["looked_at"] = counts.looked_at;
  result["unchanged"] = counts.unchanged;
  result["changed"] = counts.changed;
  result["redone"] = counts.redone;
  result["undone"] = counts.undone;
  result["dropped"] = counts.dropped;
  return result;
}

void bind_updates(py::module_& m) {
  py::class_<EngineUpdates>(m, "EngineUpdates")
      .def("set_update_callback", &set_update_callback, py::arg("run_update"))
      .def(
          "begin_step", [](const EngineUpdates& self) { self->begin_step(); }, NoGil())
      .def(
          "give_undo_log",
          [](const EngineUpdates& self, std::int32_t unit, std::int64_t address, std::int64_t num_elements,
             std::int64_t num_blocks, std::int64_t num_slots) {
            const UndoLogSize size{num_elements, num_blocks, num_slots};
            self.engine().drafts()->give_log(UnitId(unit), undo_log_at(pointer(address), size));
          },
          py::arg("unit"), py::arg("address"), py::arg("num_elements"), py::arg("num_blocks"), py::arg("num_slots"),
          NoGil())
      .def(
          "expect_update",
          [](const EngineUpdates& self, std::int32_t unit, UpdateJob job) {
            self.engine().drafts()->expect(UnitId(unit), std::move(job));
          },
          py::arg("unit"), py::arg("job"), NoGil())
      .def(
          "update_on_pool",
          [](const EngineUpdates& self, std::int32_t unit, UpdateJob job, int priority) {
            self.engine().update_on_pool(UnitId(unit), std::move(job), priority);
          },
          py::arg("unit"), py::arg("job"), py::arg("priority"), NoGil())
      .def(
          "defer_update",
          [](const EngineUpdates& self, std::int32_t unit) { self.engine().defer_update(UnitId(unit)); },
          py::arg("unit"), NoGil())
      .def(
          "set_slots",
          [](const EngineUpdates& self, std::int64_t address, std::int64_t bytes_of_one, int num_slots) {
            self.engine().set_update_slots(pointer(address), Bytes{bytes_of_one}, num_slots);
          },
          py::arg("address"), py::arg("bytes_of_one"), py::arg("num_slots"), NoGil())
      .def("set_pieces", &set_pieces, py::arg("unit"), py::arg("pieces"), NoGil())
      .def(
          "updated_now",
          [](const EngineUpdates& self) {
            const StreamedUpdates::Now now = self.engine().updated_now();
            return std::pair(now.piece, address_of(now.memory));
          },
          NoGil())
      .def(
          "run_deferred",
          [](const EngineUpdates& self, std::int32_t unit) { self.engine().run_deferred(UnitId(unit)); },
          py::arg("unit"), NoGil())
      .def(
          "run_all_deferred", [](const EngineUpdates& self) { self.engine().run_all_deferred(); }, NoGil())
      .def(
          "end_step", [](const EngineUpdates& self, bool blocking) { self.engine().end_step(blocking); },
          py::arg("blocking"), NoGil())
      .def(
          "next_forward_order", [](const EngineUpdates& self) { return plain(self.engine().next_forward_order()); },
          NoGil())
      .def("draft_counts", &draft_counts);
}

// ---- update="backward" ------------------------------------------------------------------------------------------

using UpdatedPieces = std::vector<std::pair<std::int64_t, UpdateScalars>>;

std::vector<std::pair<std::int32_t, UpdatedPieces>> take_updated(const EngineBackward& self,
                                                                 const std::vector<std::int32_t>& units) {
  const std::vector<UnitId> ids = unit_ids(units);
  const auto taken =
      without_gil([&] { return self.engine().backward_updates()->take_updated({ids.begin(), ids.end()}); });
  std::vector<std::pair<std::int32_t, UpdatedPieces>> result;
  for (const auto& each : taken) {
    auto& pieces = result.emplace_back(each.unit.value, 0).second;
    for (const auto& [offset, scalars] : each.pieces) pieces.emplace_back(offset.count, scalars);
  }
  return result;
}

std::map<std::pair<std::int32_t, std::int64_t>, double> sums_in_backward(const EngineBackward& self,
                                                                         const std::vector<std::int32_t>& units) {
  std::map<std::pair<std::int32_t, std::int64_t>, double> result;
  for (const std::int32_t unit : units) {
    for (const auto& [offset, sum] :
         without_gil([&] { return self.engine().backward_updates()->sums(UnitId(unit)); })) {
      result[{unit, offset.count}] = sum;
    }
  }
  return result;
}

template <class Call>
auto of_claims(Call call) {
  return of_owner<EngineBackward>(&TorchBridge::claims, call);
}

void bind_backward(py::module_& m) {
  py::class_<EngineBackward>(m, "EngineBackward")
      .def(
          "set_backward_callback",
          [](const EngineBackward& self, py::function begin) {
            self->claims().set_callback([kept = keep(std::move(begin))] { keep_python_errors([&] { (*kept)(); }); });
          },
          py::arg("begin"))
      .def(
          "expect_in_backward",
          [](const EngineBackward& self, std::int32_t unit, UpdateJob job, const std::vector<std::int64_t>& gradients) {
            std::vector<Bytes> offsets;
            for (const std::int64_t offset : gradients) offsets.push_back(Bytes{offset});
            self.engine().backward_updates()->expect(UnitId(unit), {std::move(job), std::move(offsets)});
          },
          py::arg("unit"), py::arg("job"), py::arg("gradients"), NoGil())
      .def(
          "expect_here",
          [](const EngineBackward& self, std::int32_t unit) {
            self.engine().backward_updates()->expect(UnitId(unit), {std::nullopt, {}});
          },
          py::arg("unit"), NoGil())
      .def(
          "used_now",
          [](const EngineBackward& self, std::int32_t unit) {
            std::set<std::int64_t> offsets;
            for (const Bytes offset : self.engine().backward_updates()->used_now(UnitId(unit)))
              offsets.insert(offset.count);
            return offsets;
          },
          py::arg("unit"), NoGil())
      .def(
          "gradient_now",
          [](const EngineBackward& self, std::int32_t unit, std::int64_t offset, const at::Tensor& like,
             at::ScalarType dtype) {
            std::byte* const data = self.engine().backward_updates()->gradients_now(UnitId(unit)) + offset;
            return at::from_blob(data, like.sizes(), like.strides(), at::TensorOptions().dtype(dtype));
          },
          py::arg("unit"), py::arg("offset"), py::arg("like"), py::arg("dtype"), NoGil())
      .def("set_accumulating", of_claims(&BackwardClaims::set_accumulating), py::arg("accumulating"), NoGil())
      .def(
          "set_last_of",
          [](const EngineBackward& self, const std::optional<std::vector<std::int32_t>>& units) {
            self->claims().set_last_of(units ? std::optional(unit_ids(*units)) : std::nullopt);
          },
          py::arg("units"), NoGil())
      .def(
          "hold_all",
          [](const EngineBackward& self, const std::vector<std::int64_t>& addresses) {
            self->hold_all(UnitMap(pointers(addresses)));
          },
          py::arg("addresses"), NoGil())
      .def(
          "holds_all", [](const EngineBackward& self) { return self.engine().holds_all(); }, NoGil())
      .def("is_held_back", of_claims(&BackwardClaims::is_held_back), py::arg("index"), NoGil())
      .def("update_held", of_claims(&BackwardClaims::update_held), NoGil())
      .def("refuse_unclaimed", of_claims(&BackwardClaims::refuse_unclaimed), py::arg("found"), NoGil())
      .def("take_updated", &take_updated, py::arg("units"))
      .def_property_readonly(
          "has_unclaimed",
          [](const EngineBackward& self) { return without_gil([&] { return !self.engine().unclaimed().empty(); }); })
      .def("sums_in_backward", &sums_in_backward, py::arg("units"));
}

// ---- statistics -------------------------------------------------------------------------------------------------

py::dict pass_dict(const PassStats& stats) {
  py::dict result;
  result["itinerary"] = stats.itinerary.value;
  result["phase"] = std::string(to_string(stats.signature.phase));
  result["training"] = stats.signature.training;
  result["grad_enabled"] = stats.signature.grad_enabled;
  result["accumulating"] = stats.signature.accumulating;
  result["num_visits"] = stats.num_visits;
  result["times"] = stats.times;
  result["planned_fetches"] = stats.planned_fetches ? py::object(py::int_(*stats.planned_fetches)) : py::none();
  result["fetches"] = stats.fetches;
  result["unplanned_visits"] = stats.unplanned_visits;
  return result;
}

py::dict sums_dict(const StepSums& sums) {
  py::dict result;
  result["num_steps"] = sums.num_steps;
  result["wall_us"] = sums.wall_us;
  result["forward_us"] = sums.forward_us;
  result["backward_us"] = sums.backward_us;
  result["forward_stall_us"] = sums.forward_stall_us;
  result["backward_stall_us"] = sums.backward_stall_us;
  result["forward_fetched"] = sums.forward_fetched.count;
  result["backward_fetched"] = sums.backward_fetched.count;
  result["drained"] = sums.drained.count;
  result["reduced"] = sums.reduced.count;
  result["copied"] = sums.copied.count;
  result["updated"] = sums.updated.count;
  result["forward_fetch_us"] = sums.forward_fetch_us;
  result["backward_fetch_us"] = sums.backward_fetch_us;
  result["drain_us"] = sums.drain_us;
  result["forward_drain_us"] = sums.forward_drain_us;
  result["offload_us"] = sums.offload_us;
  result["peer_us"] = sums.peer_us;
  result["forward_collect_us"] = sums.forward_collect_us;
  result["backward_collect_us"] = sums.backward_collect_us;
  result["device_update_us"] = sums.device_update_us;
  result["update_us"] = sums.update_us;
  result["update_behind_forward_us"] = sums.update_behind_forward_us;
  result["update_behind_backward_us"] = sums.update_behind_backward_us;
  result["update_exposed_us"] = sums.update_exposed_us;
  return result;
}

std::vector<std::int32_t> resident_units(const EngineStatistics& self) {
  std::vector<UnitId> units;
  for (const Resident& resident : self.engine().fetcher()->residents()) units.push_back(resident.unit);
  return plain(units);
}

/// Asks the engine for a number, without the GIL.
template <class Question>
auto asked(Question question) {
  return py::cpp_function([question](const EngineStatistics& self) { return question(self.engine()); }, NoGil());
}

void bind_statistics(py::module_& m) {
  py::class_<EngineStatistics>(m, "EngineStatistics")
      .def("passes",
           [](const EngineStatistics& self) {
             py::list result;
             for (const PassStats& stats : without_gil([&] { return self.engine().stats()->passes(); })) {
               result.append(pass_dict(stats));
             }
             return result;
           })
      .def("step_sums",
           [](const EngineStatistics& self) {
             return sums_dict(without_gil([&] { return self.engine().stats()->sums(); }));
           })
      .def("update_stats",
           [](const EngineStatistics& self) { return asked_stats([&] { return self.engine().updates()->stats(); }); })
      .def("resident_units", &resident_units, NoGil())
      .def(
          "file_stats",
          [](const EngineStatistics& self, const std::string& lane) {
            return asked_stats([&, which = parse_lane(lane)] { return self.engine().file_stats(which); });
          },
          py::arg("lane"))
      .def_property_readonly("compute_us", asked([](Engine& engine) { return engine.stats()->compute_us(); }))
      .def_property_readonly("arena_bytes", asked([](Engine& engine) { return engine.leases()->arena_bytes().count; }))
      .def_property_readonly("peak_bytes", asked([](Engine& engine) { return engine.leases()->peak().count; }))
      .def_property_readonly("peak_units", asked([](Engine& engine) { return engine.leases()->peak_units(); }))
      .def_property_readonly("num_fetches", asked([](Engine& engine) { return engine.fetcher()->num_fetches(); }))
      .def_property_readonly("num_forgotten_passes",
                             asked([](Engine& engine) { return engine.stats()->num_forgotten_passes(); }))
      .def_property_readonly("num_unclaimed_fetches",
                             asked([](Engine& engine) { return engine.runner()->num_unclaimed_fetches(); }))
      .def_property_readonly("num_remembered", asked([](Engine& engine) { return engine.issuer()->num_remembered(); }));
}

}  // namespace

void bind_bridge_engine(py::module_& m) {
  bind_updates(m);
  bind_backward(m);
  bind_statistics(m);
}

}  // namespace noria
