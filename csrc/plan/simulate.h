// Runs a plan in virtual time: each op starts when its lane is free and its waits have ended.
//
// Lanes that run at once may slow each other down. While a fetch and a drain run, both may be slower than alone. If
// fetches, drains and updates together ask for more than the host's memory gives, each gets the same share of what it
// asks for.
#pragma once

#include <cstdint>
#include <vector>

#include "base/trace.h"
#include "plan/costs.h"
#include "plan/hazards.h"

namespace noria {

/// Says which ops take a slot of a ring, and which give one back when they end. An op begins only if a slot is free.
struct RingUse {
  enum class Change : std::uint8_t { none, takes, gives };
  int num_slots = 0;
  std::vector<Change> changes;  // by op; empty: no op uses a ring
};

/// Returns the spans of all ops but evictions, in issue order, starting at 0. The update lane is one host pool. With
/// `priorities`, by op, the update with the smallest one runs next, of those whose waits have ended. If `priorities` is
/// empty, updates run in issue order.
std::vector<Span> simulate(const std::vector<Op>& ops, const WaitList& waits, const Costs& costs,
                           const std::vector<int>& priorities = {}, const RingUse& ring = {});

}  // namespace noria
