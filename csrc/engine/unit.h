// EngineUnit describes a unit as the engine sees it: what the planner knows, where its home is, and where a draft keeps
// what undoes it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/collectives.h"
#include "optim/undo_log.h"
#include "plan/planner.h"
#include "store/arena.h"

namespace noria {

/// Names the regions of the home, for `Place::index`. A token is a buffer of one byte that stands for something else.
enum HomeRegion : std::int32_t {
  kWorkingRegion,
  kHeldRegion,
  kStateRegion,   // a byte for each byte of gradients; a frozen unit has one byte
  kSumRegion,     // tokens, one for each unit
  kScalesRegion,  // likewise
  kRingRegion,
  kUnreducedRegion,
  kSavedRegion,        // tokens, one for each saved storage
  kSavedCopiesRegion,  // copies of saved storages
  kUpdateSlotsRegion,  // on the device: slots of updates that run there
  kStateSlotsRegion,   // tokens, one for each slot for state that comes from files
  kWeightsSlotsRegion  // likewise, for frozen weights
};

struct EngineUnit {
  UnitFacts facts;
  std::byte* working = nullptr;  // facts.weights bytes, or this rank's shards of them; registered, but for `in_file`
  ByteRange in_file;             // what of it is mapped from a file; empty: nothing
  std::byte* held = nullptr;  // facts.gradients bytes, or this rank's shard; null: frozen, or no slot of the ring now
  UndoLog undo_log;           // no header: the unit is never drafted
  // If ranks share the home: facts.gradients bytes for gradients that are not reduced yet; null before hold_unreduced.
  std::byte* unreduced = nullptr;
  BufferId unreduced_buffer;
  BufferId sum;                          // token of the sums of squares of held gradients
  BufferId scales;                       // token of the late scales of held gradients
  ElementType type = ElementType::fp32;  // of gradients that ranks sum
  std::vector<Bytes> gradient_offsets;   // of its trainable parameters' gradients in facts.gradients; ascending

  /// Returns the index of this offset in `gradient_offsets`. If several parameters have it, all but the last are empty,
  /// and it returns the last.
  std::size_t parameter_at(Bytes gradient_offset) const {
    const auto after = std::upper_bound(gradient_offsets.begin(), gradient_offsets.end(), gradient_offset);
    return static_cast<std::size_t>(after - gradient_offsets.begin()) - 1;
  }
};

/// Describes a part of a unit's weights that this rank has at home: all of them, or its shards.
struct HomePart {
  Bytes begin;  // in the unit's weights
  std::byte* memory;
  Bytes bytes;
};

/// Returns them in the order in which they lie at `working`. See engine/engine.h, Note [Shards].
inline std::vector<HomePart> home_parts(const UnitFacts& unit, std::byte* working, const Shards& shards) {
  std::vector<HomePart> parts;
  const auto add = [&](Bytes begin, Bytes whole) {
    const Bytes shard = shards.bytes_of(whole);
    if (shard == Bytes{0}) return;
    parts.push_back({begin + shards.begin_of(whole), working, shard});
    working += shard.count;
  };
  if (shards.size == 1) {
    add({}, unit.weights);
  } else {
    add({}, unit.gradients);
    add(unit.gradients, unit.weights - unit.gradients);
  }
  return parts;
}

/// Describes bytes of a HomePart that one copy can move: no copy spans registered memory and a mapped file.
struct HomePiece {
  Bytes begin;  // in the part
  std::byte* memory;
  Bytes bytes;
  bool is_in_file;
};

/// Returns the pieces of a part of the unit whose home begins at `working`, in order.
inline std::vector<HomePiece> pieces_of(const HomePart& part, const std::byte* working, ByteRange in_file) {
  std::vector<HomePiece> pieces;
  const Bytes at{part.memory - working};
  const auto add = [&](Bytes begin, Bytes end, bool is_in_file) {
    begin = std::max(begin - at, Bytes{0});
    end = std::min(end - at, part.bytes);
    if (begin < end) pieces.push_back({begin, part.memory + begin.count, end - begin, is_in_file});
  };
  add(at, in_file.begin, false);
  add(in_file.begin, in_file.end, true);
  add(in_file.end, at + part.bytes, false);
  return pieces;
}

}  // namespace noria
