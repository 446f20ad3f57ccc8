// EngineUnit describes a unit as the engine sees it: what the planner knows of it, where its home is, and where a draft
// of its update goes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "comm/collectives.h"
#include "plan/planner.h"

namespace noria {

/// Lists the parts of the home, as places of buffers name them.
enum HomeRegion : std::int32_t {
  kWorkingRegion,
  kHeldRegion,
  kStateRegion,  // one token a unit
  kSpareWorkingRegion,
  kSpareStateRegion,
  kSumRegion,
  kScalesRegion,
  kRingRegion,
  kUnreducedRegion,
  kSavedRegion,       // one token for each storage
  kSavedCopiesRegion  // the pieces of memory, one behind the other
};

/// Holds a second working copy and state of a unit; see engine/drafts.h, Note [Drafts].
struct Spare {
  std::byte* working = nullptr;
  BufferId working_buffer;
  BufferId state_buffer;
};

struct EngineUnit {
  UnitFacts facts;
  std::byte* working = nullptr;  // facts.weights bytes, or this rank's shards of them; registered host memory
  std::byte* held = nullptr;   // facts.gradients bytes, or this rank's shard; null when frozen, and while the gradient
                               // ring has none of it
  std::optional<Spare> spare;  // none: the unit is never drafted
  // If ranks share the home: facts.gradients bytes that are not reduced over the ranks yet; null until some are wanted.
  std::byte* unreduced = nullptr;
  BufferId unreduced_buffer;
  BufferId sum;                          // the sum of the squares of what is held; sum ops write it
  BufferId scales;                       // the late scales of gradients that are held
  ElementType type = ElementType::fp32;  // of gradients that ranks sum
  std::vector<Bytes> gradient_offsets;   // of its trainable parameters' gradients in facts.gradients; ascending

  /// Returns which of these parameters lies at this offset. If several have this offset, all but the last are empty,
  /// and it returns the last.
  std::size_t parameter_at(Bytes gradient_offset) const {
    const auto after = std::upper_bound(gradient_offsets.begin(), gradient_offsets.end(), gradient_offset);
    return static_cast<std::size_t>(after - gradient_offsets.begin()) - 1;
  }
};

}  // namespace noria
