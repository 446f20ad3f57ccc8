// StorageBinding owns the storages of all parameters, and decides which bytes they show: a range on the device, the
// home, or none.
//
// It also finds writes to weights while they are on the device. They would be lost, so noria raises: in the next call
// of a hook, or between passes (Note [Looks]).
//
// Note [Looks]. Compiled code, `numpy()` and `data_ptr()` ask for an address to write at, and most only read. So noria
// looks whether the bytes have changed. On the CPU, and at a unit's first look, it compares them with the home, and
// waits. On a device later looks compare sums of before and after the visit, without a wait (bindings/byte_looks.h).
// Their answers are read when no pass is under way: a root's forward, `step()`, or a read of the weights then raises.
// No pass is broken off, and under update="backward" nothing is torn.
//
// Ownership: owns the storages. Borrows the bridge's parts.
// Order: parameters lie in their storages from `bind` to `release`.
// Threads: as TorchBridge's hooks. Operators that write weights are heard on any thread.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "bindings/bridge_parts.h"
#include "bindings/byte_looks.h"
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
  void bind(const UnitMap<BridgedUnit>& units);
  /// Ends all storages: a later access raises.
  void end();

  // ---- on the device ----
  void attach(UnitId unit, std::byte* weights);
  /// Returns false if it is known already that the weights were written meanwhile.
  bool evict(UnitId unit);
  /// Returns the units that were written, if a look has found it since the last call.
  std::vector<UnitId> take_stale();
  /// Raises UsageError, once, if weights were written on the device.
  void raise_lost_writes();
  /// Reads the answers of looks first. Call it between passes. `waits`: for all of them.
  void raise_late_writes(bool waits);
  /// Tells whether a pass is under way: an access to evicted weights then has another remedy.
  void tell_pass(bool is_under_way);
  /// Raises UsageError if a parameter of these units has left its storage, or trains though it was frozen at the wrap.
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
  /// Returns the device's address of the unit's working copy; null if there is none, or the device cannot address it.
  std::byte* home_of(UnitId unit) const;
  /// Returns true if a part of the working copy lies in a file.
  bool lies_in_file(UnitId unit) const { return in_file_[unit].bytes() > Bytes{0}; }
  /// Returns true if the device cannot address the unit's working copy.
  bool is_staged(UnitId unit) const { return working_[unit] != nullptr && home_of(unit) == nullptr; }

 private:
  class Writes;

  void place(int index);
  at::Tensor home_bytes(const HomePiece& piece) const;
  /// Compares the unit's bytes on the device with what this rank has at home. Waits for the device.
  bool is_as_at_home(UnitId unit, const at::Tensor& shown) const;
  std::string some_parameter_of(UnitId unit) const;
  void refuse_strange_step(UnitId unit) const;

  const BridgeParts& parts_;
  const std::shared_ptr<StorageBinding*> self_;  // emptied when this object ends
  const std::shared_ptr<Listener> writes_;       // numbers are units
  UnitMap<std::unique_ptr<UnitStorage>> storages_;
  UnitMap<UnitFacts> facts_;
  UnitMap<std::byte*> working_;                    // at home; null: the unit has none
  UnitMap<ByteRange> in_file_;                     // of these
  std::optional<ByteLooks> looks_;                 // once bound, on a device; see Note [Looks]
  UnitMap<std::string> between_passes_, in_pass_;  // what an access to evicted weights raises
  std::atomic<bool> is_pass_under_way_{false};
  std::vector<std::uint32_t> versions_;  // by parameter: its variable's, when its unit was attached
  Mutex mutex_;
  std::vector<std::string> lost_writes_ NORIA_GUARDED_BY(mutex_);  // changed in place on the device, not yet reported
  std::vector<UnitId> stale_ NORIA_GUARDED_BY(mutex_);
};

}  // namespace noria
