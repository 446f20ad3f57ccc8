// StorageBinding owns the storages of all parameters, and decides which bytes they show: a range on the device, the
// home, or none.
//
// It also finds writes to weights while they are on the device. They would be lost, so the next call of a hook raises.
//
// Note [Looks]. Compiled code, `numpy()` and `data_ptr()` ask for an address to write at, and most only read. So noria
// looks whether the bytes have changed. On the CPU it compares them with the home at once. On a device it compares sums
// of the bytes (bindings/byte_sums.h), and the calling thread does not wait. The first look at a unit compares with the
// home. Later looks compare with sums that were taken before the visit. The answer comes through pinned memory, and a
// later hook reads it.
//
// Ownership: owns the storages. Borrows the bridge's parts.
// Order: parameters lie in their storages from `bind` to `release`.
// Threads: as TorchBridge's hooks. Operators that write weights are heard on any thread.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bridge_parts.h"
#include "bindings/byte_sums.h"
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
  /// Returns false if it is known already that the weights were written meanwhile.
  bool evict(UnitId unit);
  /// Returns the units that were written, as later became known, since the last call.
  std::vector<UnitId> take_stale();
  /// Raises UsageError, once, if weights were written on the device.
  void raise_lost_writes();
  /// Blocks until all looks are answered.
  void await_looks();
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
  std::byte* home_of(UnitId unit) const {
    return working_[unit] == nullptr ? nullptr : parts_.backend.device_address(working_[unit]);
  }
  /// Returns true if the device cannot address the unit's working copy.
  bool is_staged(UnitId unit) const { return working_[unit] != nullptr && home_of(unit) == nullptr; }
  void home_moved(UnitId unit, std::byte* working) { working_[unit] = working; }

 private:
  class Writes;
  /// See Note [Looks].
  struct Look {
    UnitId unit;
    at::Tensor answer;  // a bool in pinned memory, when `ticket` has passed
    Ticket ticket;
  };

  void place(int index);
  at::Tensor home_bytes(const HomePart& part) const;
  /// Compares what the unit's storage shows with what this rank has at home. Waits for the device.
  bool is_as_at_home(UnitId unit) const;
  /// Does the same by sums, without a wait. Returns a bool on the device.
  at::Tensor differs_from_home(UnitId unit, const at::Tensor& bytes) const;
  void look(UnitId unit, const at::Tensor& bytes);
  std::string some_parameter_of(UnitId unit) const;
  void read_looks();

  const BridgeParts& parts_;
  const std::shared_ptr<StorageBinding*> self_;  // emptied when this object ends
  const std::shared_ptr<Listener> writes_;       // numbers are units
  UnitMap<std::unique_ptr<UnitStorage>> storages_;
  UnitMap<UnitFacts> facts_;
  UnitMap<std::byte*> working_;            // at home; null: the unit has none
  UnitMap<std::optional<ByteSums>> sums_;  // when it was attached; of units that have been looked at
  UnitMap<bool> is_looked_at_;
  std::deque<Look> looks_;  // in the order of the stream
  std::vector<UnitId> stale_;
  std::vector<std::uint32_t> versions_;   // by parameter: its variable's, when its unit was attached
  std::vector<std::string> lost_writes_;  // changed in place on the device, not yet reported
};

}  // namespace noria
