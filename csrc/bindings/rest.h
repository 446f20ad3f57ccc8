// Rest keeps all units in device memory, which the caller has allocated and filled.
//
// Parameters are then ordinary tensors of the device. The engine copies and updates nothing, and hooks of autograd do
// nothing: autograd keeps gradients in p.grad. The home may be out of date. Before a use of it, `look` calls the
// callback, which copies the unit home.
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
        optimizer_(make_device_optimizer(std::move(backend))) {}

  void set_callback(Look look) { look_ = std::move(look); }
  void set_on(bool on) { is_on_ = on; }
  bool is_on() const { return is_on_; }

  /// The unit's parameters lie at `weights` from now on.
  void show(UnitId unit, std::byte* weights) { storages_[unit].attach(weights); }
  /// From now on an access to the unit's parameters raises.
  void hide(UnitId unit) { storages_[unit].evict(); }
  bool is_shown(UnitId unit) const { return storages_[unit].attached(); }
  /// Returns true if the bytes may have changed since `show`: something has asked for write access.
  bool is_written(UnitId unit) const { return storages_[unit].written(); }
  /// Returns true if an operator of torch's has written them.
  bool is_told(UnitId unit) const { return storages_[unit].is_told(); }
  /// Raises UsageError if a parameter has left its storage, or trains though it was frozen at the wrap. Also while a
  /// CUDA graph is captured.
  void check() const {
    parts_.refuse_capture();
    for (const UnitId unit : parts_.parameters.units()) storages_.check({unit});
  }
  /// Updates what lies on the device, on the current stream; see DeviceOptimizer.
  void update(const std::vector<UpdateJob>& jobs) { optimizer_->update(jobs, parts_.current_stream()); }
  void sum(const std::vector<UpdateJob>& jobs, double* sums) { optimizer_->sum(jobs, sums, parts_.current_stream()); }
  /// Call it before a use of the unit's home.
  void look(UnitId unit, bool write_weights, bool is_open) const {
    if (is_on_ && look_) look_(unit, write_weights, is_open);
  }

 private:
  const BridgeParts& parts_;
  StorageBinding& storages_;
  const std::unique_ptr<DeviceOptimizer> optimizer_;
  Look look_;
  std::atomic<bool> is_on_{false};
};

}  // namespace noria
