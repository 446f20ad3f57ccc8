// Runs a plan in virtual time: each op starts when its lane is free and its waits have ended.
#pragma once

#include <vector>

#include "base/trace.h"
#include "plan/costs.h"
#include "plan/hazards.h"

namespace noria {

/// Returns the spans of all ops but evictions, in issue order, starting at 0. Update ops run one after another in issue
/// order (one host pool), each when its waits have ended.
std::vector<Span> simulate(const std::vector<Op>& ops, const WaitList& waits, const Costs& costs);

}  // namespace noria
