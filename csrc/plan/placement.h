// The first half of planning: which bytes of the arena each unit and each gradient buffer takes, visit by visit.
//
// `place` walks the visits as if every fetch came at the last moment, and gives memory to what is needed by Belady's
// rule. When the fetches are really issued is the second half (planner.cpp); it moves them earlier, but keeps their
// order and their places, so nothing that is decided here can become wrong there.
//
// Note [Choosing a range]. A range for what is missing begins where a hole or a lease begins (sliding a range to the
// left never makes it touch more) and may cover holes and leases that the visit does not need. The best one has, in
// this order: the farthest next use of anything in it (holes: never); the fewest bytes that will be needed again; the
// earliest time from which on it is free, because only such memory can be filled ahead of need, and a gradient buffer
// put where the last one was would make compute wait for its drain; the lowest offset. For units of one size this is
// Belady's optimum.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "plan/planner.h"

namespace noria {

inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

/// A unit's weights, or a gradient buffer, at one place: from the visit that first needs it until it is given up.
/// An *opening* is the moment when a visit opens, named by the visit's index; -1 is before the first.
struct Stay {
  UnitId unit;
  bool is_weights = true;
  Bytes offset;
  Bytes bytes;
  std::int64_t first_visit = -1;      // -1: lay there at entry
  std::int64_t free_at = -1;          // the opening after its last use: from then on it may be evicted
  std::int64_t ready_at = -1;         // the opening at which all its predecessors in this memory are free
  std::int64_t given_up_at = kNever;  // as many fetches came before it was given up
};

/// All stays in the order of need: at entry, then by visit, a visit's weights before its gradient buffers. The request
/// has been found to fit.
std::vector<Stay> place(const PlanRequest& request, const std::vector<UnitFacts>& units);

}  // namespace noria
