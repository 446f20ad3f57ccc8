// TorchBridge connects autograd with the engine. The engine tells it where a unit's bytes are, and hooks tell it what
// modules and autograd do. It has an owner for each part:
//
//   StorageBinding   which bytes the parameters show
//   GradientViews    what `p.grad` shows, and late scales
//   GradientCatcher  gradients on their way from autograd into buffers
//   ModuleVisits     hooks of modules, and which visit they announce
//   Backwards        where a backward begins, where it ends, and that it has raised
//   BackwardClaims   update="backward": each update has its `step`
//   HomeView         the home as the user sees it
//   RankAudit        what ranks that share the model compare
//   SavedTensors     what autograd saves
//   Rest             units that stay on the device
//
// Ownership: owns all of these, the table of parameters, and the engine. Keeps the parameters alive.
// Threads: hooks of one model run one at a time. They run on the launching thread, or on autograd's thread for the
// device while the launching thread waits in `backward`. Members that call the engine are called without the GIL;
// callbacks into Python take it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/living.h"
#include "bindings/backwards.h"
#include "bindings/bridge_parts.h"
#include "bindings/rest.h"

namespace noria {

class TorchBridge final : public EngineCallbacks, public Living<TorchBridge> {
 public:
  TorchBridge(EngineOptions options, std::shared_ptr<Backend> backend, const UnitMap<BridgedUnit>& units,
              BufferTable buffers, std::shared_ptr<HostOptimizer> optimizer, c10::Device device,
              const std::shared_ptr<void>& held_home, Bytes least_saved);
  ~TorchBridge() override;
  TorchBridge(const TorchBridge&) = delete;  // its owners and the engine point into it
  TorchBridge& operator=(const TorchBridge&) = delete;

  // ---- its owners ----
  Engine& engine() { return engine_; }
  StorageBinding& storages() { return storages_; }
  GradientViews& gradients() { return views_; }
  ModuleVisits& visits() { return visits_; }
  Backwards& backwards() { return backwards_; }
  BackwardClaims& claims() { return claims_; }
  HomeView& home() { return home_; }
  RankAudit& audit() { return audit_; }
  Rest& rest() { return rest_; }

  // ---- callbacks of the caller ----
  using MoreHome = std::function<std::pair<std::byte*, Bytes>(Bytes)>;
  void set_update_callback(std::function<void(UnitId)> run_update) { run_update_ = std::move(run_update); }
  void set_saved_callback(MoreHome more_home) { more_home_ = std::move(more_home); }
  void clear_callbacks();

  // ---- what more than one owner does ----
  /// Do what the hooks of torch.autograd.graph.saved_tensors_hooks do.
  std::shared_ptr<SavedTensor> pack(const at::Tensor& tensor) { return saved_.pack(engine_, tensor); }
  at::Tensor unpack(const SavedTensor& saved) { return saved_.unpack(engine_, saved, parts_.current_stream()); }
  void begin_step();
  std::vector<std::vector<double>> sum_gradients(std::vector<std::pair<UnitId, UpdateJob>> jobs);
  void set_asleep(bool asleep);
  /// These units are at rest from now on, and no others. Order: the engine sleeps, so no copy of them is in the window.
  void set_resting(const std::vector<UnitId>& units);
  void hold_all(const UnitMap<std::byte*>& held) { engine_.hold_all(held, parts_.current_stream()); }
  void hold_unreduced(const UnitMap<std::byte*>& memory) { engine_.hold_unreduced(memory, parts_.current_stream()); }
  /// As HomeView::open, once a pass that is over has ended.
  void open_home(const std::vector<UnitId>& units, const std::vector<std::byte*>& shown, bool write, bool frozen);
  /// As Engine::access_home. If it only reads, it raises lost writes first.
  void access_home(UnitId unit, bool write_weights, bool writes_frozen);
  /// Raises UsageError, once, if weights were written on the device. Blocks until that is known.
  void raise_lost_writes() { storages_.raise_late_writes(/*waits=*/true); }
  void close();

  // ---- EngineCallbacks ----
  void attach(UnitId unit, std::byte* weights) override { storages_.attach(unit, weights); }
  bool evict(UnitId unit) override { return storages_.evict(unit); }
  std::vector<UnitId> take_stale() override { return storages_.take_stale(); }
  void open_gradients(UnitId unit, std::byte* buffer) override { catcher_.open(unit, buffer); }
  void close_gradients(UnitId unit, bool is_drained) override { catcher_.close(unit, is_drained); }
  Ranges held_gradients(UnitId unit) const override { return catcher_.held_gradients(unit); }
  void held_moved(UnitId unit, std::byte* held) override { views_.held_moved(unit, held); }
  void update(UnitId unit) override { run_update_(unit); }
  Stream current_stream() const override { return parts_.current_stream(); }
  std::pair<std::byte*, Bytes> more_home(Bytes least) override { return more_home_(least); }
  std::byte* make_room(SavedId saved, Bytes bytes) override {
    return saved_.make_room(saved, bytes, /*poisoned=*/parts_.backend.poisons());
  }
  void fill(SavedId saved, const std::byte* from, Bytes bytes) override { saved_.fill(saved, from, bytes); }
  void release_saved(SavedId saved) override { saved_.release_saved(saved); }

 private:
  const std::shared_ptr<Backend> backend_;
  const ParameterTable parameters_;
  const BridgeParts parts_;
  const AutogradEventsRef events_;  // held by hooks; emptied when this object closes
  StorageBinding storages_;
  GradientViews views_;
  GradientCatcher catcher_;
  SavedTensors saved_;
  HomeView home_;
  RankAudit audit_;
  Rest rest_;
  BackwardClaims claims_;
  ModuleVisits visits_;
  Backwards backwards_;
  std::function<void(UnitId)> run_update_;
  MoreHome more_home_;
  Engine engine_;  // last: it calls back into everything above
};

}  // namespace noria
