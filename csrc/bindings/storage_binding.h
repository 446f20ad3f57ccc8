// StorageBinding owns the storages of all parameters, and decides which bytes they show: a range on the device, the
// home, or none.
//
// It also finds writes to weights while they are on the device. They would be lost, so the next call of a hook raises.
// Ownership: owns the storages. Borrows the bridge's parts.
// Order: parameters lie in their storages from `bind` to `release`.
// Threads: as TorchBridge's hooks. Operators that write weights are heard on any thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bindings/bridge_parts.h"
#include "bindings/listening.h"
#include "bindings/unit_storage.h"

namespace noria {

class StorageBinding {
 public:
  explicit StorageBinding(const BridgeParts& parts);
  ~StorageBinding();
  StorageBinding(const StorageBinding&) = delete;  // its storages are listened to
  StorageBinding& operator=(const StorageBinding&) = delete;

  /// Makes the storages, and moves the parameters into them. They show nothing yet.
  void bind(const std::vector<BridgedUnit>& units);
  /// Ends all storages: a later access raises.
  void end();

  // ---- on the device ----
  void attach(UnitId unit, std::byte* weights);
  /// Returns false if the weights were written meanwhile.
  bool evict(UnitId unit);
  /// Raises UsageError, once, if weights were written on the device.
  void raise_lost_writes();
  /// Raises UsageError if a parameter of these units has left its storage, or has been unfrozen.
  void check(const std::vector<UnitId>& units);

  // ---- where parameters are ----
  bool is_in_place(int index) const;
  /// Puts a parameter back into its unit's storage. Returns false if it was there.
  bool rejoin(int index);
  /// Gives the parameter up for good. It becomes `replacement`.
  void release(int index, const at::Tensor& replacement);
  /// Increments the version counters of these parameters. Autograd then raises "modified by an inplace operation" for
  /// graphs that are older than the update.
  void bump_versions(const std::vector<int>& indices);

  // ---- storages ----
  UnitStorage& operator[](UnitId unit) { return *storages_[unit]; }
  bool has(const c10::Storage& storage) const;
  /// Returns true if this is the storage of weights that are on the device now.
  bool is_attached(const c10::Storage& storage) const;

  // ---- the home ----
  /// Returns the device's address of the unit's working copy; null if it has none.
  std::byte* home_of(UnitId unit) const { return homes_[unit]; }
  /// Returns true if the device cannot address the unit's working copy.
  bool is_staged(UnitId unit) const { return is_staged_[unit]; }
  void home_moved(UnitId unit, std::byte* working);

 private:
  class Writes;

  void place(int index);

  const BridgeParts& parts_;
  const std::shared_ptr<StorageBinding*> self_;  // emptied when this object ends
  const std::shared_ptr<Listener> writes_;       // numbers are units
  UnitMap<std::unique_ptr<UnitStorage>> storages_;
  UnitMap<std::byte*> homes_;
  UnitMap<bool> is_staged_;
  UnitMap<int> comparisons_left_;         // see `evict`
  std::vector<std::uint32_t> versions_;   // by parameter: its variable's, when its unit was attached
  std::vector<std::string> lost_writes_;  // changed in place on the device, not yet reported
};

}  // namespace noria
