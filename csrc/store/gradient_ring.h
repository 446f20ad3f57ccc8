// Host memory for the gradients of a few units at a time: a range is taken when a unit's first gradient is about to
// come, and given back when the update that reads it has been issued.
//
// Units: bytes. Ownership: the memory is the caller's. Order: none; whoever writes a range next waits for who still
// reads it, as for any other memory (plan/hazards.h). Ranges are handed out in a circle, so that this is long ago.
// Threads: the caller serialises.
#pragma once

#include <cstddef>
#include <map>
#include <optional>

#include "base/bytes.h"

namespace noria {

class GradientRing {
 public:
  GradientRing(std::byte* memory, Bytes bytes) : memory_(memory), bytes_(bytes) {}

  /// The next free range of this size, as its offset; none: what is free is cut too small.
  std::optional<Bytes> take(Bytes bytes);
  void release(Bytes offset);

  std::byte* at(Bytes offset) const { return memory_ + offset.count; }
  Bytes bytes() const { return bytes_; }

 private:
  /// The first free range of this size that begins at `from` or later.
  std::optional<Bytes> free_from(Bytes from, Bytes bytes) const;

  std::byte* memory_;
  Bytes bytes_;
  Bytes next_;                    // where the search begins
  std::map<Bytes, Bytes> taken_;  // offset -> end
};

}  // namespace noria
