// What a backend has opened of other processes' device memory, and what the peer lane may do with it.
//
// Ownership: none: whoever opened it gives it back. Threads: the caller's lock.
#pragma once

#include <cstddef>
#include <functional>
#include <map>

#include "device/backend.h"

namespace noria {

class OpenedMemory {
 public:
  /// A device gives the same address to what it opens twice; it is then here twice.
  void add(std::byte* memory, Bytes bytes) { ranges_.emplace(memory, bytes); }
  /// Once; what it held.
  Bytes remove(std::byte* memory);
  void clear() { ranges_.clear(); }
  auto begin() const { return ranges_.begin(); }
  auto end() const { return ranges_.end(); }

  /// Throws InvariantError unless of each copy one side lies in here, and the other does not.
  void check(const Transfer& transfer) const;

 private:
  bool holds(const std::byte* memory, Bytes bytes) const;

  std::multimap<std::byte*, Bytes, std::less<>> ranges_;
};

}  // namespace noria
