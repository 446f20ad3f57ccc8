// Turns the visits of a pass into a plan, as a pure function. It makes every choice of placement; the engine makes
// none.
//
// Eviction follows Belady's rule: the unit whose next use is farthest goes. A fetch is issued as early as the memory it
// takes and the cap on leases allow, in the order of need. Weights on the device are never newer than the home's, so an
// eviction costs nothing but a later fetch.
//
// Note [Issue points]. Within the opening of visit i the order of ops is:
// 1. drains of visit i-1;
// 2. evictions and fetches that visit i itself still needs;
// 3. the compute op of visit i;
// 4. fetches of held gradients for visit i+1, if it adds to them;
// 5. evictions and fetches for later visits.
//
// Held gradients come before other fetches, which may have to wait for memory: a lane runs in order. They come one
// visit ahead, so no more than two visits' gradient buffers are leased at once. Before the first visit none comes: the
// user's loop may still edit them.
//
// Memory that visit k used last, weights or gradient buffer, is taken at the opening of visit k+1 at the earliest. The
// end of visit k has been marked then. A fetch queued while k is open would gain nothing, since it waits for the end of
// k anyway. It would also break two promises:
// - a unit stays in its place while its visit is open;
// - a thread that waits for the lanes inside a visit does not wait for that visit.
//
// `visit == visits.size()` marks the drains (and nothing else) after the last visit.
#pragma once

#include <string>
#include <vector>

#include "base/unit_map.h"
#include "plan/plan.h"

namespace noria {

/// Holds what the planner must know of a unit. The caller interns the three home buffers.
struct UnitFacts {
  std::string name;
  Bytes weights;    // travel format, padded
  Bytes gradients;  // 0: frozen
  BufferId working;
  BufferId held;
  BufferId state;
};

struct Budget {
  Bytes arena;              // weights and gradient buffers share it
  std::int32_t window = 0;  // most units whose weights are leased at once; 0: no cap
};

struct PlanRequest {
  Place device;
  Budget budget;
  std::vector<Visit> visits;       // the pass, or its remaining visits
  std::vector<Visit> next_visits;  // expected after the pass; only units whose copies will still be valid
  std::vector<Resident> entry;     // what lies on the device now, at the home's version
  bool adds = false;               // gradients are added to what is held, which is fetched into their buffers
};

/// Plans a pass and interns its device buffers in `buffers`. Throws UsageError if the units and gradient buffers of a
/// visit do not fit in the arena or the window. The text names the units, what they need, what there is, and what would
/// fit.
PassPlan plan_pass(const PlanRequest& request, const UnitMap<UnitFacts>& units, BufferTable& buffers);

/// Returns the smallest arena and the smallest window with which every visit can be planned.
Budget smallest_budget(const std::vector<Visit>& visits, const UnitMap<UnitFacts>& units);

}  // namespace noria
