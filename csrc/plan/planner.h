// From the visits of a pass to a plan of it: a pure function. Every choice of placement is made here; the engine has
// none of its own.
//
// Eviction is Belady's: the unit whose next use is farthest goes. A fetch is issued as early as the memory it takes and
// the cap on leases allow, in the order of need. Weights on the device are never newer than the home's, so evicting one
// costs nothing but a later fetch.
//
// Note [Issue points]. Within the opening of visit i the order of ops is: drains of visit i-1; evictions and fetches
// that visit i itself still needs; the compute op of visit i; then evictions and fetches for later visits. Memory that
// visit k was the last to use, weights or gradient buffer, is taken at the opening of visit k+1 at the earliest, when
// the end of visit k has been marked. To queue such a fetch while k is open would win nothing, since it waits for the
// end of k anyway, and would lose two promises: a unit lies in its place for as long as its visit is open, and whoever
// waits for the lanes from inside a visit does not wait for that visit. `visit == visits.size()` marks the drains (and
// nothing else) after the last visit.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace noria {

/// What the planner must know of a unit. The three home buffers are interned by the caller.
struct UnitFacts {
  std::string name;
  Bytes weights;    // travel format, padded
  Bytes gradients;  // 0: frozen
  BufferId working;
  BufferId held;
  BufferId state;
};

struct Budget {
  Bytes arena;              // leases and gradient buffers share it
  std::int32_t window = 0;  // most units leased at once; 0: no cap
};

struct PlanRequest {
  Place device;
  Budget budget;
  std::vector<Visit> visits;       // the pass, or what is left of it
  std::vector<Visit> next_visits;  // what is expected after it, with only the units whose copies will still be valid
  std::vector<Resident> entry;     // what lies there now, at the home's version
};

/// Throws UsageError when a visit's units and gradient buffers do not fit the arena or the window: it names the units,
/// what they need, what there is, and what would fit. Interns device buffers in `buffers`.
PassPlan plan_pass(const PlanRequest& request, const std::vector<UnitFacts>& units, BufferTable& buffers);

/// The smallest arena with which every visit can be planned, and the smallest window.
Budget smallest_budget(const std::vector<Visit>& visits, const std::vector<UnitFacts>& units);

}  // namespace noria
