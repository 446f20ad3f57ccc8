#include "bindings/torch_bridge.h"

#include "base/errors.h"

namespace noria {
namespace {

UnitMap<EngineUnit> engine_units(const UnitMap<BridgedUnit>& units) {
  UnitMap<EngineUnit> result(units.size());
  for (UnitId unit : units.ids()) result[unit] = units[unit].engine;
  return result;
}

// Collectives get the home's own addresses, so the device must use the same ones.
void refuse_other_addresses(const Backend& backend, std::byte* held) {
  if (held == nullptr || backend.device_address(held) == held) return;
  throw UsageError("a device that reads pinned host memory under the host's own addresses, if ranks share a model",
                   backend.name() + ", which maps it elsewhere (cudaDevAttrCanUseHostPointerForRegisteredMem is 0)",
                   "train on Linux itself, not under WSL or a virtual GPU that lacks it, or with one rank a model");
}

}  // namespace

TorchBridge::TorchBridge(EngineOptions options, std::shared_ptr<Backend> backend, const UnitMap<BridgedUnit>& units,
                         BufferTable buffers, std::shared_ptr<HostOptimizer> optimizer, c10::Device device,
                         const std::shared_ptr<void>& held_home, Bytes least_saved)
    : backend_(std::move(backend)),
      parameters_(units),
      parts_{device,
             options.ring.has_value(),
             options.lane != nullptr,
             options.lane != nullptr ? options.lane->shards() : Shards{},
             parameters_,
             *backend_,
             engine_},
      events_(std::make_shared<AutogradEvents*>(&backwards_)),
      storages_(parts_),
      views_(parts_),
      catcher_(parts_, views_),
      saved_(
          device, least_saved,
          [this](const c10::Storage& storage) { return storages_.has(storage) || catcher_.has(storage); },
          [this](const c10::Storage& storage) { return storages_.is_attached(storage); }),
      home_(parts_, storages_),
      audit_(parts_),
      rest_(parts_, storages_, backend_),
      claims_(parts_, views_),
      visits_(parts_, storages_, saved_, rest_, events_,
              {[this](bool grad_enabled) { backwards_.before_forward(grad_enabled); }, [this] { backwards_.arm(); }}),
      backwards_(parts_, {storages_, saved_, views_, catcher_, visits_, claims_, home_, audit_, rest_}, events_),
      engine_(options, backend_, engine_units(units), std::move(buffers), *this, std::move(optimizer)) {
  if (parts_.is_shared) {
    for (UnitId unit : units.ids()) refuse_other_addresses(*backend_, units[unit].engine.held);
  }
  storages_.bind(units);
  catcher_.bind(units);
  views_.bind(units, held_home);
}

TorchBridge::~TorchBridge() {
  *events_ = nullptr;
  views_.end();
}

void TorchBridge::clear_callbacks() {
  run_update_ = {};
  more_home_ = {};
  claims_.set_callback({});
  rest_.set_callback({});
  views_.set_rank_parts({});
}

void TorchBridge::begin_step() {
  home_.refuse_open();
  backwards_.forget_failed();
  views_.refuse_unreduced();
  if (!parts_.updates_in_backward) storages_.raise_late_writes(/*waits=*/false);  // else the updates are made
  views_.begin_step();
}

std::vector<std::vector<double>> TorchBridge::sum_gradients(std::vector<std::pair<UnitId, UpdateJob>> jobs) {
  home_.refuse_open();
  backwards_.forget_failed();
  views_.refuse_unreduced();
  if (jobs.empty()) return {};  // also if there is no pool
  return engine_.sum_gradients(std::move(jobs), parts_.current_stream());
}

void TorchBridge::open_home(const std::vector<UnitId>& units, const std::vector<std::byte*>& shown, bool write,
                            bool frozen) {
  backwards_.forget_failed();
  visits_.end_lone_pass();
  if (!write) raise_lost_writes();
  for (const UnitId unit : units) rest_.look(unit, write, home_.is_open(unit));
  home_.open(units, shown, write, frozen);
}

void TorchBridge::access_home(UnitId unit, bool write_weights, bool writes_frozen) {
  if (!write_weights) raise_lost_writes();
  rest_.look(unit, write_weights, home_.is_open(unit));
  engine_.access_home(unit, write_weights, writes_frozen);
}

void TorchBridge::set_asleep(bool asleep) {
  if (!asleep) return engine_.wake();
  backwards_.forget_failed();
  visits_.end_lone_pass();
  engine_.sleep(parts_.current_stream());
}

void TorchBridge::set_resting(const std::vector<UnitId>& units) {
  catcher_.drop_accumulators(units);
  rest_.set_units(units);
}

void TorchBridge::close() {
  *events_ = nullptr;
  views_.end();
  engine_.close();
  storages_.end();
}

}  // namespace noria
