// Host memory for the gradients of a few units at a time: a slot is taken when a unit's first gradient is about to
// come, and given back when the update that reads it has been issued.
//
// Units: bytes; slots are as large as the largest unit that uses them, so that what is free is never cut too small.
// Ownership: the memory is the caller's. Order: none; whoever writes a slot next waits for who still reads it, as for
// any other memory (plan/hazards.h), so a slot that nobody reads any more comes first. Of slots that are still to be
// read the one that was given back last: its update is the most urgent, for the next forward wants its unit first.
// Threads: the caller serialises.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "base/bytes.h"

namespace noria {

class GradientRing {
 public:
  GradientRing(std::byte* memory, Bytes slot, int num_slots)
      : memory_(memory),
        slot_(slot),
        is_taken_(static_cast<std::size_t>(num_slots), false) {
    for (int slot = num_slots; slot > 0; --slot) free_.push_back(slot - 1);
  }

  /// A free slot, see above; none: all are taken. `is_read`: of a slot that was given back, whether its reader is done.
  std::optional<int> take(const std::function<bool(int)>& is_read);
  void release(int slot);

  Bytes offset(int slot) const { return slot_ * slot; }
  std::byte* at(int slot) const { return memory_ + offset(slot).count; }

 private:
  std::byte* memory_;
  Bytes slot_;
  std::vector<bool> is_taken_;
  std::vector<int> free_;  // given back last: at the end
};

}  // namespace noria
