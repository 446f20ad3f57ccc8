// A unit as the engine sees it: what the planner knows of it, where its home is, and where a draft of its update goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "plan/planner.h"

namespace noria {

/// The parts of the home, as places of buffers name them.
enum HomeRegion : std::int32_t {
  kWorkingRegion,
  kHeldRegion,
  kStateRegion,  // one token a unit
  kSpareWorkingRegion,
  kSpareStateRegion,
  kSumRegion,
  kRingRegion
};

/// Working copy and state of a unit once more; see engine/engine.h, Note [Drafts].
struct Spare {
  std::byte* working = nullptr;
  BufferId working_buffer;
  BufferId state_buffer;
};

struct EngineUnit {
  UnitFacts facts;
  std::byte* working = nullptr;  // facts.weights bytes, registered host memory
  std::byte* held = nullptr;     // facts.gradients bytes; null when frozen, and while the gradient ring has none of it
  std::optional<Spare> spare;    // none: the unit is never drafted
  BufferId sum;                  // of the squares of what is held, as sum ops write it
};

}  // namespace noria
