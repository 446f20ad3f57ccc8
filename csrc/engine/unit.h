// A unit as the engine sees it: what the planner knows of it, and where its home is.
#pragma once

#include <cstddef>

#include "plan/planner.h"

namespace noria {

struct EngineUnit {
  UnitFacts facts;
  std::byte* working = nullptr;  // facts.weights bytes, registered host memory
  std::byte* held = nullptr;     // facts.gradients bytes; null when frozen
};

}  // namespace noria
