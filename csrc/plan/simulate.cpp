#include "plan/simulate.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/errors.h"

namespace noria {

std::vector<Span> simulate(const std::vector<Op>& ops, const WaitList& waits, const Costs& costs) {
  NORIA_INVARIANT(waits.waits.size() == ops.size(), "the list of waits is not of these ops");
  std::vector<Span> spans;
  std::vector<double> end_us(ops.size(), 0.0);
  std::array<double, kNumLanes> lane_free_us{};
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const Op& op = ops[i];
    if (op.verb == Verb::evict) continue;
    double& free_us = lane_free_us.at(static_cast<std::size_t>(op.lane));
    double start_us = free_us;
    Span span;
    for (const std::int64_t wait : waits.waits[i]) {
      NORIA_INVARIANT(wait >= 0 && wait < static_cast<std::int64_t>(i), "an op waits for one that is issued later");
      start_us = std::max(start_us, end_us[static_cast<std::size_t>(wait)]);
      span.waits.push_back(ops[static_cast<std::size_t>(wait)].id);
    }
    end_us[i] = free_us = start_us + duration_us(op, costs);
    span.op = op.id;
    span.lane = op.lane;
    span.verb = op.verb;
    span.unit = op.unit;
    span.start_us = std::llround(start_us);
    span.end_us = std::llround(end_us[i]);
    span.bytes = op.bytes;
    spans.push_back(std::move(span));
  }
  return spans;
}

}  // namespace noria
