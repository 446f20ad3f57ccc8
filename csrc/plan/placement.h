// Decides which bytes of the arena each unit and each gradient buffer takes, visit by visit: the first half of
// planning.
//
// `place` walks the visits as if every fetch came at the last moment. It assigns memory by Belady's rule: what is used
// again last is given up first. The second half (planner.cpp) decides when each fetch is issued. It moves fetches
// earlier but keeps their order and their places, so no decision made here can become wrong there.
//
// Note [Choosing a range]. A range for missing bytes begins where a hole or a lease begins, because a range that slides
// left to there touches no more. It may cover holes and leases that the visit does not need. The best range has, in
// this order:
// 1. the farthest first use of what lies in it (a hole is never used);
// 2. the fewest bytes that will be needed again;
// 3. the earliest time from which it is free;
// 4. the lowest offset.
// Key 3 has two reasons. Only memory that is free early can be filled ahead of need. And a gradient buffer put where
// the last one was would make compute wait for that drain. So for a gradient buffer, a hole whose drain begins now
// counts as used when the pass ends. A unit that only the next pass needs then goes, which makes a second buffer. For
// units of one size this is Belady's optimum of the pass.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "plan/planner.h"

namespace noria {

inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

/// A stay is a unit's weights, or a gradient buffer, at one place: from the visit that first needs it until it is given
/// up. An *opening* is the moment when a visit opens, named by the visit's index; -1 is before the first.
struct Stay {
  UnitId unit;
  bool is_weights = true;
  Bytes offset;
  Bytes bytes;
  std::int64_t first_visit = -1;      // -1: lay there at entry
  std::int64_t free_at = -1;          // the opening after its last use: it may be evicted from then on
  std::int64_t ready_at = -1;         // the opening at which earlier stays in this memory, and of this unit, are free
  std::int64_t given_up_at = kNever;  // how many fetches come before it is given up
};

/// Returns all stays in the order of need: those at entry, then by visit. Within a visit, weights come before gradient
/// buffers. The caller has checked that the request fits.
std::vector<Stay> place(const PlanRequest& request, const UnitMap<UnitFacts>& units);

}  // namespace noria
