// Host memory for the gradients of a few units at a time: a slot is taken when a unit's first gradient is about to
// come, and given back when the update that reads it has been issued.
//
// Units: bytes; slots are as large as the largest unit that uses them, so that what is free is never cut too small.
// Ownership: the memory is the caller's. Order: none; whoever writes a slot next waits for who still reads it, as for
// any other memory (plan/hazards.h). Slots are handed out in a circle, so that this is long ago.
// Threads: the caller serialises.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "base/bytes.h"

namespace noria {

class GradientRing {
 public:
  GradientRing(std::byte* memory, Bytes slot, int num_slots)
      : memory_(memory),
        slot_(slot),
        is_taken_(static_cast<std::size_t>(num_slots), false) {}

  /// The next free slot; none: all are taken.
  std::optional<int> take();
  void release(int slot);

  Bytes offset(int slot) const { return slot_ * slot; }
  std::byte* at(int slot) const { return memory_ + offset(slot).count; }

 private:
  std::byte* memory_;
  Bytes slot_;
  std::vector<bool> is_taken_;
  std::size_t next_ = 0;  // where the search begins
};

}  // namespace noria
