// What a rank has of each unit, and what must be over before others may have it: all that the collect lane needs to
// assist. See comm/collect_lane.h, Note [Assistance].
//
// Ownership: points into the home, which outlives the lane. Threads: made anew by the launching thread whenever
// something has changed, and never changed after that.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "comm/collectives.h"

namespace noria {

/// Of one unit.
struct Share {
  std::int64_t version = 0;     // of its weights: n, as the n-th step left them; -1 - n, as loaded after it
  std::vector<Giving> weights;  // one for each stretch that is gathered
  std::vector<Ticket> before_read;
  Taking gradient;  // `to` null: there is nowhere to hold it
  std::vector<Ticket> before_write;
};

struct Shares {
  std::vector<std::shared_ptr<const Share>> of;  // by unit
};

}  // namespace noria
