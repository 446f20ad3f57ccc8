// Rest keeps some units in device memory, which the caller has allocated and filled.
//
// Their parameters are then ordinary tensors of the device. Visits do not name these units, and hooks of autograd leave
// their gradients alone: autograd keeps them in p.grad. If all units are at rest, the engine stands still. The home of
// such a unit may be out of date. Before a use of it, `look` calls the callback, which copies the unit home.
//
// Ownership: owns the DeviceOptimizer. Borrows the bridge's parts and the storages. The caller owns the memory of the
// units.
// Order: begins and ends between passes. The callback returns before the home is used.
// Threads: the same rules as for TorchBridge's hooks.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/storage_binding.h"
#include "optim/device_optimizer.h"

namespace noria {

class Rest {
 public:
  /// `write_weights`: the unit's weights are about to be written at home. `is_open`: its parameters show the home now.
  using Look = std::function<void(UnitId, bool write_weights, bool is_open)>;

  Rest(const BridgeParts& parts, StorageBinding& storages, std::shared_ptr<Backend> backend)
      : parts_(parts),
        storages_(storages),
        optimizer_(make_device_optimizer(std::move(backend))),
        is_at_rest_(parts.parameters.num_units()) {}

  void set_callback(Look look) { look_ = std::move(look); }
  /// These units are at rest from now on, and no others. Empty: the rest is over.
  void set_units(const std::vector<UnitId>& units) {
    is_at_rest_.fill(false);
    for (const UnitId unit : units) is_at_rest_[unit] = true;
    units_ = units;
    num_units_ = units.size();
  }
  bool has(UnitId unit) const { return is_on() && is_at_rest_[unit]; }
  bool is_on() const { return num_units_ > 0; }
  /// Returns true if all units are at rest.
  bool is_whole() const { return is_on() && num_units_ == is_at_rest_.size(); }
  /// Returns those of these units that stream.
  std::vector<UnitId> streaming(const std::vector<UnitId>& units) const {
    std::vector<UnitId> found;
    for (const UnitId unit : units) {
      if (!has(unit)) found.push_back(unit);
    }
    return found;
  }

  /// The unit's parameters lie at `weights` from now on.
  void show(UnitId unit, std::byte* weights) { storages_[unit].attach(weights); }
  /// From now on an access to the unit's parameters raises.
  void hide(UnitId unit) { storages_[unit].evict(); }
  bool is_shown(UnitId unit) const { return storages_[unit].attached(); }
  /// Returns true if the bytes may have changed since `show`: something has asked for write access.
  bool is_written(UnitId unit) const { return storages_[unit].written(); }
  /// Returns true if an operator of torch's has written them.
  bool is_told(UnitId unit) const { return storages_[unit].is_told(); }
  /// Raises UsageError if a parameter of these units has left its storage, or trains though it was frozen at the wrap.
  /// Also while a CUDA graph is captured.
  void check() const {
    parts_.refuse_capture();
    storages_.check(units_);
  }
  /// Updates what lies on the device, on the current stream; see DeviceOptimizer.
  void update(const std::vector<UpdateJob>& jobs) { optimizer_->update(jobs, parts_.current_stream()); }
  void sum(const std::vector<UpdateJob>& jobs, double* sums) { optimizer_->sum(jobs, sums, parts_.current_stream()); }
  /// Call it before a use of the unit's home.
  void look(UnitId unit, bool write_weights, bool is_open) const {
    if (has(unit) && look_) look_(unit, write_weights, is_open);
  }

 private:
  const BridgeParts& parts_;
  StorageBinding& storages_;
  const std::unique_ptr<DeviceOptimizer> optimizer_;
  Look look_;
  std::vector<UnitId> units_;
  UnitMap<bool> is_at_rest_;
  std::atomic<std::size_t> num_units_{0};
};

}  // namespace noria
