#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/from_blob.h>

#include <optional>
#include <tuple>
#include <utility>

#include "bindings/element_types.h"
#include "bindings/lane_stats.h"
#include "bindings/listening.h"
#include "bindings/python_errors.h"
#include "bindings/torch_bridge.h"
#include "bindings/watched.h"
#include "store/arena.h"

namespace py = pybind11;

namespace noria {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// For results that become Python objects afterwards. A thread that holds the engine's mutex may be waiting for the GIL:
// an update on the launching thread does so.
template <class Question>
auto without_gil(Question question) {
  const py::gil_scoped_release no_gil;
  return question();
}

/// Asks the engine for a property. It takes the engine's gate, so it must not hold the GIL.
template <class Question>
auto asked(Question question) {
  return py::cpp_function([question](const TorchBridge& self) { return question(self.engine()); }, NoGil());
}

/// Binds a member function of one of the bridge's owners.
template <class Owner, class Result, class... Arguments>
auto of_owner(Owner& (TorchBridge::*owner)(), Result (Owner::*call)(Arguments...)) {
  return [=](TorchBridge& self, Arguments... arguments) -> Result {
    return ((self.*owner)().*call)(std::forward<Arguments>(arguments)...);
  };
}
template <class Owner, class Result, class... Arguments>
auto of_owner(Owner& (TorchBridge::*owner)(), Result (Owner::*call)(Arguments...) const) {
  return [=](TorchBridge& self, Arguments... arguments) -> Result {
    return ((self.*owner)().*call)(std::forward<Arguments>(arguments)...);
  };
}

std::byte* pointer(std::int64_t address) { return reinterpret_cast<std::byte*>(address); }

std::vector<std::byte*> pointers(const std::vector<std::int64_t>& addresses) {
  std::vector<std::byte*> found;
  for (std::int64_t address : addresses) found.push_back(pointer(address));
  return found;
}

std::vector<UnitId> unit_ids(const std::vector<std::int32_t>& units) {
  std::vector<UnitId> ids;
  for (std::int32_t unit : units) ids.emplace_back(unit);
  return ids;
}

std::vector<std::int32_t> plain(const std::vector<UnitId>& ids) {
  std::vector<std::int32_t> units;
  for (UnitId id : ids) units.push_back(id.value);
  return units;
}

/// Describes a parameter as Python lays it out. Offsets are in bytes.
struct ParameterSpec {
  at::Tensor parameter;
  std::string name;
  at::ScalarType dtype;  // of the working copy
  std::int64_t offset;
  std::int64_t gradient_offset;  // -1: frozen
  std::int64_t scales;           // the address of its late scales; 0: it never has any
};

/// Describes a unit as Python lays it out: sizes in bytes, and addresses in the home. An address is 0 if the home has
/// no such part.
struct UnitSpec {
  std::string name;
  std::int64_t weights, gradients;
  std::int64_t working, held, spare;
  std::vector<ParameterSpec> parameters;
};

/// Home buffers are ranges of regions. Each purpose has its region, and so have the spare buffers. Each region is a
/// place of its own.
std::vector<BridgedUnit> read_units(const std::vector<UnitSpec>& specs, BufferTable& buffers, const Shards& shards) {
  std::vector<BridgedUnit> units;
  Bytes working_end, held_end, spare_end;
  for (const UnitSpec& spec : specs) {
    BridgedUnit unit;
    const UnitId id(static_cast<std::int32_t>(units.size()));
    UnitFacts& facts = unit.engine.facts;
    facts.name = spec.name;
    facts.weights = Bytes{spec.weights};
    facts.gradients = Bytes{spec.gradients};
    unit.engine.working = pointer(spec.working);
    if (facts.gradients > Bytes{0}) unit.engine.held = pointer(spec.held);
    const auto range = [&](HomeRegion region, Bytes& end, Bytes bytes, Format format, Purpose purpose) {
      const Buffer buffer{{Place::Kind::host, region}, end, bytes, format, purpose, id};
      end += bytes;
      return buffers.intern(buffer);
    };
    Bytes state_start{id.value};
    const Bytes weights = shards.bytes_of(facts.weights);
    facts.working = range(kWorkingRegion, working_end, weights, Format::travel, Purpose::working_copy);
    facts.held = range(kHeldRegion, held_end, shards.bytes_of(facts.gradients), Format::travel, Purpose::held_gradient);
    facts.state =
        range(kStateRegion, state_start, Bytes{1}, Format::master, Purpose::optimizer_state);  // one token per unit
    Bytes sum_start{id.value};
    unit.engine.sum = range(kSumRegion, sum_start, Bytes{1}, Format::master, Purpose::gradient_sum);
    Bytes scales_start{id.value};
    unit.engine.scales = range(kScalesRegion, scales_start, Bytes{1}, Format::master, Purpose::gradient_scales);
    if (spec.spare != 0) {
      Spare spare;
      spare.working = pointer(spec.spare);
      Bytes spare_state_start{id.value};
      spare.working_buffer = range(kSpareWorkingRegion, spare_end, weights, Format::travel, Purpose::working_copy);
      spare.state_buffer =
          range(kSpareStateRegion, spare_state_start, Bytes{1}, Format::master, Purpose::optimizer_state);
      unit.engine.spare = spare;
    }
    for (const ParameterSpec& each : spec.parameters) {
      auto* const scales = reinterpret_cast<float*>(pointer(each.scales));
      unit.parameters.push_back({each.parameter, each.name, each.dtype, each.offset, each.gradient_offset, scales});
      if (each.gradient_offset >= 0) unit.engine.gradient_offsets.push_back(Bytes{each.gradient_offset});
    }
    units.push_back(std::move(unit));
  }
  return units;
}

/// The address, the bytes of a slot, the number of slots.
using RingOfSlots = std::tuple<std::int64_t, std::int64_t, int>;

std::shared_ptr<TorchBridge> make_torch_bridge(const std::vector<UnitSpec>& specs, std::shared_ptr<Backend> backend,
                                               std::shared_ptr<HostOptimizer> optimizer, const std::string& device,
                                               std::int64_t arena, std::int32_t window, bool prefetch_at_step,
                                               std::shared_ptr<Arena> held_home, const std::optional<RingOfSlots>& ring,
                                               const std::shared_ptr<Collectives>& collectives,
                                               std::int64_t reduce_scratch, std::int64_t assist_scratch,
                                               std::optional<std::int64_t> least_saved,
                                               std::optional<std::int64_t> saved_room) {
  BufferTable buffers;
  const Shards shards = collectives ? collectives->shards() : Shards{};
  std::vector<BridgedUnit> units = read_units(specs, buffers, shards);
  const c10::Device on(device);
  EngineOptions options;
  options.device = {Place::Kind::device, on.has_index() ? on.index() : 0};
  options.budget = {Bytes{arena}, window};
  options.prefetch_at_step = prefetch_at_step;
  options.saves = least_saved.has_value();
  if (saved_room) options.saved_room = Bytes{*saved_room};
  if (ring) {
    const auto& [address, slot, num_slots] = *ring;
    options.ring = GradientRing(pointer(address), Bytes{slot}, num_slots);
  }
  if (collectives) {
    std::vector<std::string> names;
    for (BridgedUnit& unit : units) {
      names.push_back(unit.engine.facts.name);
      for (const BridgedParameter& parameter : unit.parameters) {  // all parameters of a unit have the same dtype
        if (parameter.gradient_offset == 0) unit.engine.type = element_type(parameter.dtype);
      }
    }
    options.lane = std::make_shared<CollectLane>(backend, collectives, std::move(names));
    options.scratch = {pointer(reduce_scratch), pointer(assist_scratch)};
  }
  const py::gil_scoped_release no_gil;
  return std::make_shared<TorchBridge>(options, std::move(backend), units, std::move(buffers), std::move(optimizer), on,
                                       held_home, Bytes{least_saved.value_or(0)});
}

/// Shared, so that a copy needs no GIL. The last owner takes the GIL and frees it.
std::shared_ptr<py::function> keep(py::function callback) {
  return {new py::function(std::move(callback)), [](py::function* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

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
  result["offload_us"] = sums.offload_us;
  result["peer_us"] = sums.peer_us;
  result["forward_collect_us"] = sums.forward_collect_us;
  result["backward_collect_us"] = sums.backward_collect_us;
  result["update_us"] = sums.update_us;
  result["update_behind_forward_us"] = sums.update_behind_forward_us;
  result["update_behind_backward_us"] = sums.update_behind_backward_us;
  result["update_exposed_us"] = sums.update_exposed_us;
  return result;
}

}  // namespace

void bind_torch_bridge(py::module_& m) {
  register_kept_python_errors();
  register_listening();
  m.def("living", [] {
    py::dict result;
    result["bridges"] = Living<TorchBridge>::count();
    result["backends"] = Living<Backend>::count();
    result["arena_bytes"] = Arena::all_mapped().count;
    return result;
  });
  m.def(
      "tensor_in",
      [](std::shared_ptr<Arena> arena, std::int64_t offset, at::ScalarType dtype,
         const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides) {
        std::byte* data = arena->data() + offset;
        return at::from_blob(data, sizes, strides, [arena](void*) {}, at::TensorOptions().dtype(dtype));
      },
      py::arg("arena"), py::arg("offset"), py::arg("dtype"), py::arg("sizes"), py::arg("strides"));

  m.def(
      "watched_tensor_in",
      [](const std::shared_ptr<Arena>& arena, std::int64_t offset, const at::Tensor& like, at::ScalarType dtype,
         py::function before_write) {
        // The tensor keeps the callback, and the callback keeps the arena mapped.
        auto callback = std::make_shared<std::function<void()>>([kept = keep(std::move(before_write)), arena] {
          as_python_errors([&] { keep_python_errors([&] { (*kept)(); }); });
        });
        const auto num_bytes = like.numel() * static_cast<std::int64_t>(c10::elementSize(dtype));
        return tensor_over(arena->data() + offset, num_bytes, c10::Device(c10::kCPU), dtype, like.sizes(),
                           like.strides(), callback);
      },
      py::arg("arena"), py::arg("offset"), py::arg("like"), py::arg("dtype"), py::arg("before_write"));
  m.attr("LAZY_COPIES") = uses_lazy_copies();
  m.def(
      "storage_of",
      [](const at::Tensor& tensor) {
        return reinterpret_cast<std::uintptr_t>(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
      },
      py::arg("tensor"));
  m.def("watch", [](const at::Tensor& tensor) { watch(tensor.storage()); }, py::arg("tensor"));
  m.def(
      "move_tensor",
      [](const at::Tensor& tensor, std::int64_t address) { move_storage(tensor.storage(), pointer(address)); },
      py::arg("tensor"), py::arg("address"));

  py::class_<ParameterSpec>(m, "ParameterSpec")
      .def(py::init([](at::Tensor parameter, std::string name, at::ScalarType dtype, std::int64_t offset,
                       std::int64_t gradient_offset, std::int64_t scales) {
             return ParameterSpec{std::move(parameter), std::move(name), dtype, offset, gradient_offset, scales};
           }),
           py::kw_only(), py::arg("parameter"), py::arg("name"), py::arg("dtype"), py::arg("offset"),
           py::arg("gradient_offset"), py::arg("scales"));
  py::class_<UnitSpec>(m, "UnitSpec")
      .def(py::init([](std::string name, std::int64_t weights, std::int64_t gradients, std::int64_t working,
                       std::int64_t held, std::int64_t spare, std::vector<ParameterSpec> parameters) {
             return UnitSpec{std::move(name), weights, gradients, working, held, spare, std::move(parameters)};
           }),
           py::kw_only(), py::arg("name"), py::arg("weights"), py::arg("gradients"), py::arg("working"),
           py::arg("held"), py::arg("spare"), py::arg("parameters"));
  py::class_<SavedTensor, std::shared_ptr<SavedTensor>>(m, "SavedTensor");
  py::class_<TorchBridge, std::shared_ptr<TorchBridge>>(m, "TorchBridge")
      .def(py::init(&make_torch_bridge), py::arg("units"), py::arg("backend"), py::arg("optimizer"), py::arg("device"),
           py::arg("arena"), py::arg("window"), py::arg("prefetch_at_step"), py::arg("held_home"), py::arg("ring"),
           py::arg("collectives"), py::arg("reduce_scratch"), py::arg("assist_scratch"),
           py::arg("least_saved") = py::none(), py::arg("saved_room") = py::none())
      .def("set_update_callback",
           [](TorchBridge& self, py::function run_update) {
             self.set_update_callback([kept = keep(std::move(run_update))](UnitId unit) {
               keep_python_errors([&] { (*kept)(unit.value); });
             });
           })
      .def(
          "add_peer",
          [](TorchBridge& self, std::int32_t rank, int link, double bandwidth, std::int64_t address,
             std::int64_t bytes) {
            self.engine().activations()->add_peer({rank, link, bandwidth, pointer(address), Bytes{bytes}});
          },
          py::arg("rank"), py::arg("link"), py::arg("bandwidth"), py::arg("address"), py::arg("bytes"), NoGil())
      .def(
          "shrink_peer",
          [](TorchBridge& self, std::int32_t rank, std::int64_t left) {
            return self.engine().activations()->shrink_peer(rank, Bytes{left});
          },
          py::arg("rank"), py::arg("left"), NoGil())
      .def(
          "send_saved_home",
          [](TorchBridge& self, const std::set<std::int32_t>& hooks) {
            std::set<HookId> all;
            for (const std::int32_t hook : hooks) all.insert(HookId(hook));
            self.engine().activations()->send_home(std::move(all));
          },
          py::arg("hooks"), NoGil())
      .def(
          "add_copy_peer",
          [](TorchBridge& self, std::int32_t rank, int link, double bandwidth, std::int64_t address, std::int64_t bytes,
             std::int64_t begin) {
            self.engine().copies()->add_peer({rank, link, bandwidth, pointer(address), Bytes{bytes}, Bytes{begin}});
          },
          py::arg("rank"), py::arg("link"), py::arg("bandwidth"), py::arg("address"), py::arg("bytes"),
          py::arg("begin"), NoGil())
      .def(
          "shrink_copy_peer",
          [](TorchBridge& self, std::int32_t rank, std::int64_t left) {
            self.engine().copies()->shrink_peer(rank, Bytes{left});
          },
          py::arg("rank"), py::arg("left"), NoGil())
      .def(
          "keep_copies",
          [](TorchBridge& self, const std::vector<std::int32_t>& units) {
            self.engine().keep_copies({units.begin(), units.end()});
          },
          py::arg("units"), NoGil())
      .def("copy_stats",
           [](TorchBridge& self) {
             const CopyStats stats = without_gil([&] { return self.engine().copies()->stats(); });
             py::dict result;
             result["num_units"] = stats.num_units;
             result["num_stashed"] = stats.num_stashed;
             result["num_fetched"] = stats.num_fetched;
             result["stashed"] = stats.stashed.count;
             result["fetched"] = stats.fetched.count;
             return result;
           })
      .def(
          "times_fetched",
          [](TorchBridge& self) {
            const auto fetcher = self.engine().fetcher();
            const UnitMap<std::int64_t>& times = fetcher->times_fetched();
            std::vector<std::int64_t> result;
            for (UnitId unit : times.ids()) result.push_back(times[unit]);
            return result;
          },
          NoGil())
      .def(
          "set_saved_room", [](TorchBridge& self, std::int64_t room) { self.engine().activations()->set_room(Bytes{room}); },
          py::arg("room"), NoGil())
      .def("set_saved_callback",
           [](TorchBridge& self, py::function more_home) {
             self.set_saved_callback([kept = keep(std::move(more_home))](Bytes least) {
               std::pair<std::int64_t, std::int64_t> taken;
               keep_python_errors([&] { taken = (*kept)(least.count).cast<decltype(taken)>(); });
               return std::pair{pointer(taken.first), Bytes{taken.second}};
             });
           })
      .def("pack", &TorchBridge::pack, NoGil())
      .def("unpack", &TorchBridge::unpack, NoGil())
      .def("saved_stats",
           [](TorchBridge& self) {
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
           })
      .def("saved_by_module",
           [](TorchBridge& self) {
             std::map<std::int32_t, std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>> result;
             for (const auto& [hook, saved] : without_gil([&] { return self.engine().saved_by_module(); })) {
               result[hook.value] = {saved.num_visits, saved.bytes.count, saved.forward_us, saved.gap_us};
             }
             return result;
           })
      .def("set_backward_callback",
           [](TorchBridge& self, py::function begin) {
             self.claims().set_callback([kept = keep(std::move(begin))] { keep_python_errors([&] { (*kept)(); }); });
           })
      .def(
          "expect_in_backward",
          [](TorchBridge& self, std::int32_t unit, UpdateJob job, const std::vector<std::int64_t>& gradients) {
            std::vector<Bytes> offsets;
            for (const std::int64_t offset : gradients) offsets.push_back(Bytes{offset});
            self.engine().backward_updates()->expect(UnitId(unit), {std::move(job), std::move(offsets)});
          },
          NoGil())
      .def("set_accumulating", of_owner(&TorchBridge::claims, &BackwardClaims::set_accumulating), NoGil())
      .def(
          "set_last_of",
          [](TorchBridge& self, const std::optional<std::vector<std::int32_t>>& units) {
            self.claims().set_last_of(units ? std::optional(unit_ids(*units)) : std::nullopt);
          },
          NoGil())
      .def(
          "begin_scaling",
          [](TorchBridge& self, std::int32_t unit) { self.engine().begin_scaling(UnitId(unit), nullptr); }, NoGil())
      .def(
          "end_scaling",
          [](TorchBridge& self, std::int32_t unit, float divisor, float prefactor) {
            self.engine().drafts()->end_scaling(UnitId(unit), divisor, prefactor);
          },
          NoGil())
      .def(
          "hold_all",
          [](TorchBridge& self, const std::vector<std::int64_t>& addresses) { self.hold_all(pointers(addresses)); },
          NoGil())
      .def(
          "hold_unreduced",
          [](TorchBridge& self, const std::vector<std::int64_t>& addresses) {
            self.hold_unreduced(pointers(addresses));
          },
          NoGil())
      .def(
          "holds_unreduced", [](TorchBridge& self) { return self.engine().holds_unreduced(); }, NoGil())
      .def("set_unsynced", of_owner(&TorchBridge::backwards, &Backwards::set_unsynced), NoGil())
      .def(
          "access_held", [](TorchBridge& self, std::int32_t unit) { self.engine().access_held(UnitId(unit), nullptr); },
          NoGil())
      .def(
          "holds_all", [](TorchBridge& self) { return self.engine().holds_all(); }, NoGil())
      .def("is_held_back", of_owner(&TorchBridge::claims, &BackwardClaims::is_held_back), NoGil())
      .def("update_held", of_owner(&TorchBridge::claims, &BackwardClaims::update_held), NoGil())
      .def("refuse_unclaimed", of_owner(&TorchBridge::claims, &BackwardClaims::refuse_unclaimed), NoGil())
      .def("take_updated",
           [](TorchBridge& self, const std::vector<std::int32_t>& units) {
             const std::vector<UnitId> ids = unit_ids(units);
             const auto taken =
                 without_gil([&] { return self.engine().backward_updates()->take_updated({ids.begin(), ids.end()}); });
             std::vector<std::pair<std::int32_t, std::vector<std::pair<std::int64_t, UpdateScalars>>>> result;
             for (const auto& each : taken) {
               auto& pieces = result.emplace_back(each.unit.value, 0).second;
               for (const auto& [offset, scalars] : each.pieces) pieces.emplace_back(offset.count, scalars);
             }
             return result;
           })
      .def_property_readonly(
          "has_unclaimed",
          [](TorchBridge& self) { return without_gil([&] { return !self.engine().unclaimed().empty(); }); })
      .def(
          "mark_torn", [](TorchBridge& self, const std::string& why) { self.engine().mark_torn(why); }, NoGil())
      .def("torn", [](TorchBridge& self) { return without_gil([&] { return self.engine().torn(); }); })
      .def(
          "clear_torn", [](TorchBridge& self) { self.engine().clear_torn(); }, NoGil())
      .def("clear_callbacks", &TorchBridge::clear_callbacks)
      .def("add_hook",
           [](TorchBridge& self, std::string name, const std::vector<std::int32_t>& needs) {
             return self.visits().add_hook(std::move(name), unit_ids(needs)).value;
           })
      .def("begin_forward", of_owner(&TorchBridge::visits, &ModuleVisits::begin_forward), NoGil())
      .def("end_forward", of_owner(&TorchBridge::visits, &ModuleVisits::end_forward), NoGil())
      .def(
          "enter", [](TorchBridge& self, std::int32_t hook) { self.visits().enter(HookId(hook)); }, NoGil())
      .def(
          "leave",
          [](TorchBridge& self, std::int32_t hook, const std::vector<at::Tensor>& outputs) {
            self.visits().leave(HookId(hook), outputs);
          },
          NoGil())
      .def(
          "inner_outputs",
          [](TorchBridge& self, std::int32_t hook, const std::vector<at::Tensor>& outputs) {
            self.visits().inner_outputs(HookId(hook), outputs);
          },
          NoGil())
      .def("inner_was_first", [](TorchBridge& self, std::int32_t hook) { return self.visits().inner_was_first(HookId(hook)); })
      .def(
          "visit_for_operator", [](TorchBridge& self, std::int32_t hook) { self.visits().visit_for_operator(HookId(hook)); },
          NoGil())
      .def("recover", of_owner(&TorchBridge::backwards, &Backwards::recover), NoGil())
      .def("abandon_forward", of_owner(&TorchBridge::backwards, &Backwards::abandon_forward), NoGil())
      .def("gradient_is",
           [](TorchBridge& self, int index) {
             switch (self.gradients().is(index)) {
             case GradientIs::none:
               return "none";
             case GradientIs::held:
               return "held";
             case GradientIs::foreign:
               return "foreign";
             }
             return "";
           })
      .def("take_foreign_gradient", of_owner(&TorchBridge::gradients, &GradientViews::take_foreign), NoGil())
      .def("begin_step", &TorchBridge::begin_step, NoGil())
      .def(
          "late_scales",
          [](TorchBridge& self, int index) {
            const auto [memory, count] = self.gradients().late_scales(index);
            return std::pair{reinterpret_cast<std::uintptr_t>(memory), count};
          },
          NoGil())
      .def("take_scales", of_owner(&TorchBridge::gradients, &GradientViews::take_scales), NoGil())
      .def("scale_values", of_owner(&TorchBridge::gradients, &GradientViews::scale_values), NoGil())
      .def("drop_scales", of_owner(&TorchBridge::gradients, &GradientViews::drop_scales), NoGil())
      .def("first_scaled", of_owner(&TorchBridge::gradients, &GradientViews::first_scaled), NoGil())
      .def("sums_in_backward",
           [](TorchBridge& self, const std::vector<std::int32_t>& units) {
             std::map<std::pair<std::int32_t, std::int64_t>, double> result;
             for (const std::int32_t unit : units) {
               for (const auto& [offset, sum] :
                    without_gil([&] { return self.engine().backward_updates()->sums(UnitId(unit)); }))
                 result[{unit, offset.count}] = sum;
             }
             return result;
           })
      .def("set_parts_callbacks",
           [](TorchBridge& self, py::function norms, py::function multiply) {
             const auto norms_of = [kept = keep(std::move(norms))](const std::vector<int>& indices,
                                                                   const NormAsked& asked) {
               std::vector<at::Tensor> found;
               keep_python_errors([&] {
                 const py::object dtype = asked.dtype ? py::cast(*asked.dtype) : py::none();
                 for (const py::handle& each : (*kept)(indices, asked.of_list, asked.order, dtype)) {
                   found.push_back(each.is_none() ? at::Tensor() : each.cast<at::Tensor>());
                 }
               });
               return found;
             };
             self.gradients().set_rank_parts({norms_of, [kept = keep(std::move(multiply))](int index) {
                               keep_python_errors([&] { (*kept)(index); });
                             }});
           })
      .def("apply_scales", of_owner(&TorchBridge::gradients, &GradientViews::apply_scales), NoGil())
      .def("unscale_used", of_owner(&TorchBridge::gradients, &GradientViews::unscale_used), NoGil())
      .def(
          "is_swapped",
          [](TorchBridge& self, std::int32_t unit) { return self.engine().drafts()->is_swapped(UnitId(unit)); }, NoGil())
      .def("draft_counts",
           [](TorchBridge& self) {
             const DraftCounts counts = without_gil([&] { return self.engine().drafts()->counts(); });
             py::dict result;
             result["kept"] = counts.kept;
             result["looked_at"] = counts.looked_at;
             result["unchanged"] = counts.unchanged;
             result["changed"] = counts.changed;
             result["redone"] = counts.redone;
             result["dropped"] = counts.dropped;
             return result;
           })
      .def(
          "expect_update",
          [](TorchBridge& self, std::int32_t unit, UpdateJob job) {
            self.engine().drafts()->expect(UnitId(unit), std::move(job));
          },
          NoGil())
      .def(
          "sum_gradients",
          [](TorchBridge& self, const std::vector<std::pair<std::int32_t, UpdateJob>>& jobs) {
            std::vector<std::pair<UnitId, UpdateJob>> asked;
            for (const auto& [unit, job] : jobs) asked.emplace_back(UnitId(unit), job);
            return self.sum_gradients(std::move(asked));
          },
          NoGil())
      .def(
          "update_on_pool",
          [](TorchBridge& self, std::int32_t unit, UpdateJob job, int priority) {
            return self.engine().update_on_pool(UnitId(unit), std::move(job), priority);
          },
          NoGil())
      .def(
          "defer_update", [](TorchBridge& self, std::int32_t unit) { self.engine().defer_update(UnitId(unit)); },
          NoGil())
      .def(
          "end_step", [](TorchBridge& self, bool blocking) { self.engine().end_step(blocking); }, NoGil())
      .def(
          "run_deferred", [](TorchBridge& self, std::int32_t unit) { self.engine().run_deferred(UnitId(unit)); }, NoGil())
      .def(
          "run_all_deferred", [](TorchBridge& self) { self.engine().run_all_deferred(); }, NoGil())
      .def(
          "next_forward_order", [](TorchBridge& self) { return plain(self.engine().next_forward_order()); }, NoGil())
      .def("guard_gradients", [](TorchBridge& self) { self.gradients().guard(); }, NoGil())
      .def("bump_versions", of_owner(&TorchBridge::storages, &StorageBinding::bump_versions))
      .def("note_step", of_owner(&TorchBridge::audit, &RankAudit::note_step), py::arg("updated"), py::arg("hyperparameters"))
      .def(
          "access_home",
          [](TorchBridge& self, std::int32_t unit, bool write) { self.engine().access_home(UnitId(unit), write); },
          NoGil())
      .def(
          "open_home",
          [](TorchBridge& self, const std::vector<std::int32_t>& units, bool write,
             const std::vector<std::int64_t>& shown) { self.open_home(unit_ids(units), pointers(shown), write); },
          NoGil(), py::arg("units"), py::arg("write"), py::arg("shown") = std::vector<std::int64_t>())
      .def(
          "is_written", [](TorchBridge& self, std::int32_t unit) { return self.home().is_written(UnitId(unit)); },
          py::arg("unit"))
      .def(
          "close_home",
          [](TorchBridge& self, const std::vector<std::int32_t>& units, bool write) {
            self.home().close(unit_ids(units), write);
          },
          NoGil())
      .def("bring_home", of_owner(&TorchBridge::home, &HomeView::bring), NoGil())
      .def("release", of_owner(&TorchBridge::storages, &StorageBinding::release))
      .def("exchange", of_owner(&TorchBridge::audit, &RankAudit::exchange), NoGil())
      .def(
          "idle", [](TorchBridge& self) { self.engine().idle(); }, NoGil())
      .def("close", &TorchBridge::close, NoGil())
      .def(
          "set_trace",
          [](TorchBridge& self, std::shared_ptr<Trace> trace) { self.engine().set_trace(std::move(trace)); }, NoGil())
      .def(
          "omit_wait", [](TorchBridge& self, const std::string& kind) { self.engine().issuer()->hazards().omit(kind); },
          NoGil())
      .def(
          "wait_kinds", [](TorchBridge& self) { return self.engine().issuer()->wait_kinds(); }, NoGil())
      .def("passes",
           [](TorchBridge& self) {
             py::list result;
             for (const PassStats& stats : without_gil([&] { return self.engine().stats()->passes(); })) {
               result.append(pass_dict(stats));
             }
             return result;
           })
      .def("step_sums",
           [](TorchBridge& self) { return sums_dict(without_gil([&] { return self.engine().stats()->sums(); })); })
      .def_property_readonly(
          "compute_us",
          [](TorchBridge& self) { return without_gil([&] { return self.engine().stats()->compute_us(); }); })
      .def("update_stats",
           [](TorchBridge& self) { return stats_dict(without_gil([&] { return self.engine().updates()->stats(); })); })
      .def(
          "resident_units",
          [](TorchBridge& self) {
            std::vector<UnitId> units;
            for (const Resident& resident : self.engine().fetcher()->residents()) units.push_back(resident.unit);
            return plain(units);
          },
          NoGil())
      .def_property_readonly("arena_bytes",
                             asked([](const Engine& engine) { return engine.leases()->arena_bytes().count; }))
      .def_property_readonly("peak_bytes", asked([](const Engine& engine) { return engine.leases()->peak().count; }))
      .def_property_readonly("peak_units", asked([](const Engine& engine) { return engine.leases()->peak_units(); }))
      .def_property_readonly("num_fetches", asked([](const Engine& engine) { return engine.fetcher()->num_fetches(); }))
      .def_property_readonly("num_forgotten_passes",
                             asked([](const Engine& engine) { return engine.stats()->num_forgotten_passes(); }))
      .def_property_readonly("num_unclaimed_fetches",
                             asked([](const Engine& engine) { return engine.runner()->num_unclaimed_fetches(); }))
      .def_property_readonly("num_remembered",
                             asked([](const Engine& engine) { return engine.issuer()->num_remembered(); }));
}

}  // namespace noria
