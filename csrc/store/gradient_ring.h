// GradientRing hands out slots of host memory for the gradients of a few units at a time. A slot is taken just before a
// unit's first gradient comes. It is given back when the update that reads it has been issued.
//
// Units: bytes. Every slot is as large as the largest unit that uses the ring, so no free slot is too small.
// Ownership: the memory is the caller's.
// Order: none. The op that writes a slot next waits for the op that still reads it, as for any other memory
// (plan/hazards.h). So `take` prefers a slot whose reader is done. If every free slot is still to be read, it takes the
// one given back last. The update of that slot is the most urgent, because the next forward wants its unit first.
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

  /// Returns a free slot (see Order), or none if all are taken. `is_read` tells of a free slot whether its reader is
  /// done; true if it had none.
  std::optional<int> take(const std::function<bool(int)>& is_read);
  void release(int slot);

  Bytes offset(int slot) const { return slot_ * slot; }
  std::byte* at(int slot) const { return memory_ + offset(slot).count; }

 private:
  std::byte* memory_;
  Bytes slot_;
  std::vector<bool> is_taken_;
  std::vector<int> free_;  // the slot given back last is at the end
};

}  // namespace noria
