#include "device/opened_memory.h"

#include <iterator>
#include <string>

#include "base/errors.h"

namespace noria {

Bytes OpenedMemory::remove(std::byte* memory) {
  const auto found = ranges_.find(memory);
  NORIA_INVARIANT(found != ranges_.end(), "closed shared memory that is not open");
  const Bytes bytes = found->second;
  ranges_.erase(found);
  return bytes;
}

bool OpenedMemory::holds(const std::byte* memory, Bytes bytes) const {
  const auto next = ranges_.upper_bound(memory);
  return next != ranges_.begin() && memory + bytes.count <= std::prev(next)->first + std::prev(next)->second.count;
}

void OpenedMemory::check(const Transfer& transfer) const {
  for (const CopySpan& copy : transfer.copies) {
    NORIA_INVARIANT(holds(copy.to, copy.bytes) != holds(copy.from, copy.bytes),
                    "a copy of " + to_string(copy.bytes) +
                        " on the peer lane has not exactly one side in opened memory");
  }
}

}  // namespace noria
