// HomeView opens the home to the user: inside `with noria.materialize(...)` parameters show their working copies.
//
// Ownership: borrows the bridge's parts and the storages.
// Order: opened between passes. While the home is open, no pass and no step begins.
// Threads: as TorchBridge's hooks.
#pragma once

#include <string>
#include <vector>

#include "bindings/storage_binding.h"

namespace noria {

class HomeView {
 public:
  HomeView(const BridgeParts& parts, StorageBinding& storages) : parts_(parts), storages_(storages) {}

  /// Makes the parameters of these units show the home. If ranks share the home, no rank holds a whole unit: the
  /// parameters then show `shown`, one address for each unit. The caller fills that memory, and takes the changes from
  /// it.
  void open(const std::vector<UnitId>& units, const std::vector<std::byte*>& shown, bool write, bool writes_frozen);
  /// Closes what has been opened since `num_open` returned `before`; nothing, if an interrupt came before that.
  void close(std::size_t before, bool write);
  bool is_open(UnitId unit) const;
  std::size_t num_open() const { return open_.size(); }
  /// Returns true if something has asked for write access to the unit's parameters since the home was opened.
  bool is_written(UnitId unit) const { return storages_[unit].written(); }
  /// Copies the data of parameters that were given other data (`p.data = x`) into the open home. Returns the names of
  /// two parameters that were given the same memory, or an empty string. Each of these two has its own memory
  /// afterwards.
  std::string bring();
  /// Raises UsageError if the home is open.
  void refuse_open() const;

 private:
  const BridgeParts& parts_;
  StorageBinding& storages_;
  std::vector<UnitId> open_;  // in order; a unit is in it once for each call of `open`, because materialize nests
};

}  // namespace noria
