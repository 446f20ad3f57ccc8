#include "plan/costs.h"

#include <algorithm>

namespace noria {
namespace {

double by_unit(const std::vector<double>& times_us, UnitId unit) {
  const auto index = static_cast<std::size_t>(unit.value);
  return unit.valid() && index < times_us.size() ? times_us[index] : 0.0;
}

double by_lane(const std::map<Lane, double>& values, Lane lane) {
  const auto found = values.find(lane);
  return found == values.end() ? 0.0 : found->second;
}

}  // namespace

double duration_us(const Op& op, const Costs& costs) {
  if (op.verb == Verb::forward) return by_unit(costs.forward_us, op.unit);
  if (op.verb == Verb::backward) return by_unit(costs.backward_us, op.unit);
  const double bandwidth_gib_s = bandwidth_gib_s_of(op, costs);
  const double gib = static_cast<double>(op.bytes.count) / static_cast<double>(std::int64_t{1} << 30);
  const double bytes_us = op.verb != Verb::evict && bandwidth_gib_s > 0 ? 1e6 * gib / bandwidth_gib_s : 0.0;
  return latency_us_of(op, costs) + bytes_us;
}

double latency_us_of(const Op& op, const Costs& costs) {
  const bool is_loop = op.verb == Verb::user;  // the only op of the compute lane that has one
  const bool has_none = op.verb == Verb::evict || (op.lane == Lane::compute && !is_loop);
  return has_none ? 0.0 : by_lane(costs.latency_us, op.lane);
}

double bandwidth_gib_s_of(const Op& op, const Costs& costs) {
  const bool has_own = op.verb == Verb::draft && costs.draft_gib_s > 0;
  return has_own ? costs.draft_gib_s : by_lane(costs.bandwidth_gib_s, op.lane);
}

namespace {

double forward_of(const StepTimes& t) {
  return std::max({t.forward_us, t.forward_fetch_us, t.forward_collect_us, t.forward_drain_us});
}

double drains_of(const StepTimes& t) { return t.forward_drain_us + t.drain_us + t.offload_us; }

double backward_of(const StepTimes& t) {
  return std::max({t.backward_us, t.drain_us, t.backward_fetch_us, t.backward_collect_us});
}

}  // namespace

double blocking_bound_us(const StepTimes& t) {
  return std::max({forward_of(t) + backward_of(t), drains_of(t), t.peer_us, t.host_copies_us}) +
         std::max(t.update_us, t.host_updates_us);
}

double deferred_bound_us(const StepTimes& t) {
  return std::max({std::max(forward_of(t), t.update_us) + backward_of(t), drains_of(t), t.peer_us,
                   t.host_copies_us + t.host_updates_us});
}

double drafting_bound_us(const StepTimes& t) {
  return std::max({t.forward_us + t.backward_us, t.update_us, t.forward_fetch_us + t.backward_fetch_us, drains_of(t),
                   t.forward_collect_us + t.backward_collect_us, t.peer_us, t.host_copies_us + t.host_updates_us});
}

}  // namespace noria
