// Tells what a rank holds of each unit, and what must be over before other ranks may have it. This is all that the
// collect lane needs to assist: see comm/collect_lane.h, Note [Assistance].
//
// Ownership: points into the home, which outlives the lane. Threads: the launching thread makes a new object when
// something has changed. An object never changes after that.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/unit_map.h"
#include "comm/collectives.h"

namespace noria {

/// Describes what this rank holds of one unit.
struct UnitShard {
  std::int64_t version = 0;          // of its weights: n: as step n left them; -1 - n: as loaded after step n
  std::vector<ShardSend> weights;    // one for each extent that is gathered
  std::vector<Ticket> before_read;   // what must be over before `weights` are given
  ShardReceive gradient;             // `to` null: this rank has no memory to hold it
  std::vector<Ticket> before_write;  // what must be over before `gradient` is taken
};

/// Holds what this rank has of all units.
struct UnitShards {
  UnitMap<std::shared_ptr<const UnitShard>> of;
};

}  // namespace noria
