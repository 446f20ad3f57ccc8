// Rest is the state in which the wheel stands still: all units stay in memory of the device that the caller has filled.
//
// Parameters are then ordinary tensors of the device, and no hook does anything: autograd itself keeps gradients in
// p.grad. The engine sleeps. The home is older than the device, so before anything uses the home, `look` tells the
// caller, who brings it up to date.
//
// Ownership: borrows the bridge's parts and the storages. The caller owns the memory that the units lie in.
// Order: begun and ended between passes. What the caller is told of comes before the use of the home.
// Threads: as TorchBridge's hooks.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <utility>

#include "bindings/storage_binding.h"

namespace noria {

class Rest {
 public:
  /// Called with a unit, and with true if its weights are about to be written at home.
  using Look = std::function<void(UnitId, bool)>;

  Rest(const BridgeParts& parts, StorageBinding& storages) : parts_(parts), storages_(storages) {}

  void set_callback(Look look) { look_ = std::move(look); }
  void set_on(bool on) { is_on_ = on; }
  bool is_on() const { return is_on_; }

  /// From now on the unit's parameters lie there.
  void show(UnitId unit, std::byte* weights) { storages_[unit].attach(weights); }
  /// From now on an access to the unit's parameters raises.
  void hide(UnitId unit) { storages_[unit].evict(); }
  bool is_shown(UnitId unit) const { return storages_[unit].attached(); }
  /// Returns true if something may have written the unit's parameters since `show`.
  bool is_written(UnitId unit) const { return storages_[unit].written(); }
  /// Returns true if an operator has written them.
  bool is_told(UnitId unit) const { return storages_[unit].is_told(); }
  /// Raises UsageError if a parameter has left its storage, or trains though it was frozen at the wrap.
  void check() const {
    for (const UnitId unit : parts_.parameters.units()) storages_.check({unit});
  }
  /// Call it before a use of the unit's home.
  void look(UnitId unit, bool write_weights) const {
    if (is_on_ && look_) look_(unit, write_weights);
  }

 private:
  const BridgeParts& parts_;
  StorageBinding& storages_;
  Look look_;
  std::atomic<bool> is_on_{false};
};

}  // namespace noria
