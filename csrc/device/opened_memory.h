// Lists the device memory of other processes that a backend has opened, and checks what the peer lane does with it.
//
// Ownership: none; the backend closes the memory.
// Threads: the caller holds its own lock.
#pragma once

#include <cstddef>
#include <functional>
#include <map>

#include "device/backend.h"

namespace noria {

class OpenedMemory {
 public:
  /// Adds a range. If a device returns the same address for two openings, the range is listed twice.
  void add(std::byte* memory, Bytes bytes) { ranges_.emplace(memory, bytes); }
  /// Removes one entry. Returns its size.
  Bytes remove(std::byte* memory);
  void clear() { ranges_.clear(); }
  auto begin() const { return ranges_.begin(); }
  auto end() const { return ranges_.end(); }

  /// Throws InvariantError unless exactly one side of each copy lies in opened memory.
  void check(const Transfer& transfer) const;

 private:
  bool holds(const std::byte* memory, Bytes bytes) const;

  std::multimap<std::byte*, Bytes, std::less<>> ranges_;
};

}  // namespace noria
