// UndoLog points at the memory in which a draft keeps what it takes to undo it: about 1.1 bytes for each element.
//
// Units: elements, from the unit's beginning as in UnitArrays; blocks of kUndoBlock elements, counted by the job.
// Ownership: none; the memory is the home's.
// Order: a draft writes the log of its unit. Until that draft is undone, redone or kept, no other draft of the unit
//   begins.
// Threads: those of one job write different blocks.
//
// Note [Undo]. A draft updates in place. The old values are nearly determined by the new ones and the gradient. Adam's
// first moment was about (m - (1 - beta1) g) / beta1, for example. So for each element the log keeps how far the old
// value is from that estimate. It counts floats, bf16 values or codes, as the value is stored. With two moments, m has
// 4 bits for this number, v and p have 2. If one of them is too far away, its old bits are kept in a list (an
// exception). The estimate is a formula (optim/walk_back.inc), and both the draft and the undo compute it, with the
// same bits. So the old bits come back however bad an estimate is.
//
// The list of a unit has a planned number of slots, one for each exception and for each old scale. If it is full, a
// block is left out: the draft undoes what it has made of the block, and `step` updates it. In the first steps after a
// start many estimates are bad, and many blocks are left out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "optim/update_kernels.h"

namespace noria {

struct UndoLog {
  UndoHeader* header = nullptr;  // null: no log
  std::uint32_t* begins = nullptr;
  std::uint8_t* bytes = nullptr;
  std::uint32_t* slots = nullptr;
  std::uint32_t num_slots = 0;
};

/// Returns how many blocks a parameter of so many elements has.
inline std::int64_t num_undo_blocks(std::int64_t count) {
  constexpr auto kBlock = static_cast<std::int64_t>(kUndoBlock);
  return (count + kBlock - 1) / kBlock;
}

/// Says how large the log of a unit is: its elements, the blocks of all its parameters, and the slots of its list.
struct UndoLogSize {
  std::int64_t num_elements, num_blocks, num_slots;
};

Bytes undo_log_bytes(const UndoLogSize& size);
/// `memory`: aligned to 64 bytes, undo_log_bytes long. Does not touch it.
UndoLog undo_log_at(std::byte* memory, const UndoLogSize& size);

}  // namespace noria
