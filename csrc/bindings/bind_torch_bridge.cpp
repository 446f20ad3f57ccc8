// Binds TorchBridge, and tensors over the home.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/from_blob.h>

#include <optional>
#include <tuple>
#include <utility>

#include "bindings/bind_bridge.h"
#include "bindings/element_types.h"
#include "bindings/listening.h"
#include "bindings/python_errors.h"
#include "bindings/watched.h"
#include "store/arena.h"

namespace py = pybind11;

namespace noria {
namespace {

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
  std::int64_t working, held;
  std::vector<ParameterSpec> parameters;
  std::pair<std::int64_t, std::int64_t> in_file;  // where the bytes at `working` begin and end that a file has
};

/// Reads the units, and makes their home buffers: ranges of regions. Each purpose has its region, which is a place of
/// its own.
UnitMap<BridgedUnit> read_units(const std::vector<UnitSpec>& specs, BufferTable& buffers, const Shards& shards) {
  UnitMap<BridgedUnit> units(specs.size());
  Bytes working_end, held_end, state_end;
  for (UnitId id : units.ids()) {
    const UnitSpec& spec = specs[static_cast<std::size_t>(id.value)];
    BridgedUnit& unit = units[id];
    UnitFacts& facts = unit.engine.facts;
    facts.name = spec.name;
    facts.weights = Bytes{spec.weights};
    facts.gradients = Bytes{spec.gradients};
    unit.engine.working = pointer(spec.working);
    unit.engine.in_file = {Bytes{spec.in_file.first}, Bytes{spec.in_file.second}};
    if (facts.gradients > Bytes{0}) unit.engine.held = pointer(spec.held);
    const auto range = [&](HomeRegion region, Bytes& end, Bytes bytes, Format format, Purpose purpose) {
      const Buffer buffer{{Place::Kind::host, region}, end, bytes, format, purpose, id};
      end += bytes;
      return buffers.intern(buffer);
    };
    const Bytes weights = shards.bytes_of(facts.weights);
    facts.working = range(kWorkingRegion, working_end, weights, Format::travel, Purpose::working_copy);
    facts.held = range(kHeldRegion, held_end, shards.bytes_of(facts.gradients), Format::travel, Purpose::held_gradient);
    const Bytes state = std::max(shards.bytes_of(facts.gradients), Bytes{1});  // a frozen unit has a byte, too
    facts.state = range(kStateRegion, state_end, state, Format::master, Purpose::optimizer_state);
    Bytes sum_start{id.value};
    unit.engine.sum = range(kSumRegion, sum_start, Bytes{1}, Format::master, Purpose::gradient_sum);
    Bytes scales_start{id.value};
    unit.engine.scales = range(kScalesRegion, scales_start, Bytes{1}, Format::master, Purpose::gradient_scales);
    for (const ParameterSpec& each : spec.parameters) {
      auto* const scales = pointer<float>(each.scales);
      unit.parameters.push_back({each.parameter, each.name, each.dtype, each.offset, each.gradient_offset, scales});
      if (each.gradient_offset >= 0) unit.engine.gradient_offsets.push_back(Bytes{each.gradient_offset});
    }
  }
  return units;
}

/// Holds address, bytes of a slot, number of slots.
using RingOfSlots = std::tuple<std::int64_t, std::int64_t, int>;

/// Holds the files that have frozen weights, records by unit, and slots.
using WeightsInFiles = std::tuple<std::shared_ptr<FileStore>, std::vector<int>, RingOfSlots>;

std::shared_ptr<TorchBridge> make_torch_bridge(
    const std::vector<UnitSpec>& specs, std::shared_ptr<Backend> backend, std::shared_ptr<HostOptimizer> optimizer,
    const std::string& device, std::int64_t arena, std::int32_t window, bool prefetch_at_step,
    std::shared_ptr<Arena> held_home, const std::optional<RingOfSlots>& ring, int most_postponed,
    const std::shared_ptr<Collectives>& collectives, bool assists, std::int64_t reduce_scratch,
    std::int64_t assist_scratch, std::optional<std::int64_t> least_saved, std::optional<std::int64_t> saved_room,
    std::shared_ptr<FileHome> files, std::vector<int> records, const std::optional<WeightsInFiles>& file_weights) {
  BufferTable buffers;
  const Shards shards = collectives ? collectives->shards() : Shards{};
  UnitMap<BridgedUnit> units = read_units(specs, buffers, shards);
  const c10::Device on(device);
  EngineOptions options;
  options.device = {Place::Kind::device, on.has_index() ? on.index() : 0};
  options.budget = {Bytes{arena}, window};
  options.prefetch_at_step = prefetch_at_step;
  options.saves = least_saved.has_value();
  options.files = {std::move(files), std::move(records), most_postponed};
  if (file_weights) {
    const auto& [store, of_units, slots] = *file_weights;
    const auto& [address, slot, num_slots] = slots;
    options.file_weights = {store, of_units, pointer(address), Bytes{slot}, num_slots};
  }
  if (saved_room) options.saved_room = Bytes{*saved_room};
  if (ring) {
    const auto& [address, slot, num_slots] = *ring;
    options.ring = GradientRing(pointer(address), Bytes{slot}, num_slots);
  }
  if (collectives) {
    std::vector<std::string> names;
    for (UnitId id : units.ids()) {
      BridgedUnit& unit = units[id];
      names.push_back(unit.engine.facts.name);
      for (const BridgedParameter& parameter : unit.parameters) {  // all parameters of a unit have the same dtype
        if (parameter.gradient_offset == 0) unit.engine.type = element_type(parameter.dtype);
      }
    }
    options.lane = std::make_shared<CollectLane>(backend, collectives, std::move(names), assists);
    options.scratch = {pointer(reduce_scratch), pointer(assist_scratch)};
  }
  const py::gil_scoped_release no_gil;
  return std::make_shared<TorchBridge>(options, std::move(backend), units, std::move(buffers), std::move(optimizer), on,
                                       held_home, Bytes{least_saved.value_or(0)});
}

template <class Part>
auto part() {
  return [](const std::shared_ptr<TorchBridge>& self) { return Part{{self}}; };
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
  m.def(
      "bytes_at",
      [](std::int64_t address, std::int64_t num_bytes, const std::string& device) {
        return tensor_over(pointer(address), num_bytes, c10::Device(device), at::kByte, {num_bytes}, {1});
      },
      py::arg("address"), py::arg("num_bytes"), py::arg("device"));
  m.attr("LAZY_COPIES") = uses_lazy_copies();
  m.def(
      "storage_of",
      [](const at::Tensor& tensor) {
        return address_of(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
      },
      py::arg("tensor"));
  m.def(
      "refuse_access", [](const at::Tensor& tensor, const std::string& why) { refuse_access(tensor.storage(), why); },
      py::arg("tensor"), py::arg("why"));
  m.def("allow_access", [](const at::Tensor& tensor) { allow_access(tensor.storage()); }, py::arg("tensor"));
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
                       std::int64_t held, std::vector<ParameterSpec> parameters,
                       std::pair<std::int64_t, std::int64_t> in_file) {
             return UnitSpec{std::move(name), weights, gradients, working, held, std::move(parameters), in_file};
           }),
           py::kw_only(), py::arg("name"), py::arg("weights"), py::arg("gradients"), py::arg("working"),
           py::arg("held"), py::arg("parameters"), py::arg("in_file"));
  py::class_<SavedTensor, std::shared_ptr<SavedTensor>>(m, "SavedTensor");
  bind_bridge_autograd(m);
  bind_bridge_engine(m);
  bind_bridge_memory(m);
  py::class_<TorchBridge, std::shared_ptr<TorchBridge>>(m, "TorchBridge")
      .def(py::init(&make_torch_bridge), py::arg("units"), py::arg("backend"), py::arg("optimizer"), py::arg("device"),
           py::arg("arena"), py::arg("window"), py::arg("prefetch_at_step"), py::arg("held_home"), py::arg("ring"),
           py::arg("most_postponed"), py::arg("collectives"), py::arg("assists"), py::arg("reduce_scratch"),
           py::arg("assist_scratch"), py::arg("least_saved") = py::none(), py::arg("saved_room") = py::none(),
           py::arg("files") = py::none(), py::arg("records") = std::vector<int>(), py::arg("file_weights") = py::none())
      .def_property_readonly("hooks", part<EngineHooks>())
      .def_property_readonly("gradients", part<EngineGradients>())
      .def_property_readonly("home", part<EngineHome>())
      .def_property_readonly("ranks", part<EngineRanks>())
      .def_property_readonly("updates", part<EngineUpdates>())
      .def_property_readonly("backward", part<EngineBackward>())
      .def_property_readonly("saved", part<EngineSaved>())
      .def_property_readonly("copies", part<EngineCopies>())
      .def_property_readonly("statistics", part<EngineStatistics>())
      .def_property_readonly("rest", part<EngineRest>())
      .def("torn", [](TorchBridge& self) { return without_gil([&] { return self.engine().torn(); }); })
      .def(
          "mark_torn", [](TorchBridge& self, const std::string& why) { self.engine().mark_torn(why); }, py::arg("why"),
          NoGil())
      .def(
          "clear_torn", [](TorchBridge& self) { self.engine().clear_torn(); }, NoGil())
      .def(
          "set_trace",
          [](TorchBridge& self, std::shared_ptr<Trace> trace) { self.engine().set_trace(std::move(trace)); },
          py::arg("trace"), NoGil())
      .def(
          "wait_kinds", [](TorchBridge& self) { return self.engine().issuer()->wait_kinds(); }, NoGil())
      .def(
          "omit_wait", [](TorchBridge& self, const std::string& kind) { self.engine().issuer()->hazards().omit(kind); },
          py::arg("kind"), NoGil())
      .def("clear_callbacks", &TorchBridge::clear_callbacks)
      .def(
          "idle", [](TorchBridge& self) { self.engine().idle(); }, NoGil())
      .def("close", &TorchBridge::close, NoGil());
}

}  // namespace noria
