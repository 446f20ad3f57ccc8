#include "optim/undo_log.h"

#include "base/errors.h"

namespace noria {
namespace {

constexpr std::int64_t kAlignment = 64;

std::int64_t aligned(std::int64_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Where the parts of a log lie, behind its header.
struct Layout {
  explicit Layout(const UndoLogSize& size)
      : bytes(kAlignment + aligned(size.num_blocks * 4)),
        slots(bytes + aligned(size.num_elements)),
        end(slots + aligned(size.num_slots * 4)) {
    NORIA_INVARIANT(size.num_slots < std::int64_t{kLeftOut}, "a unit has too many slots for an undo log");
  }
  std::int64_t bytes, slots, end;
};

}  // namespace

Bytes undo_log_bytes(const UndoLogSize& size) { return Bytes{Layout(size).end}; }

UndoLog undo_log_at(std::byte* memory, const UndoLogSize& size) {
  const Layout layout(size);
  return {reinterpret_cast<UndoHeader*>(memory), reinterpret_cast<std::uint32_t*>(memory + kAlignment),
          reinterpret_cast<std::uint8_t*>(memory + layout.bytes),
          reinterpret_cast<std::uint32_t*>(memory + layout.slots), static_cast<std::uint32_t>(size.num_slots)};
}

}  // namespace noria
