#include "engine/step_stats.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "device/timing.h"

namespace noria {
namespace {

std::int64_t busy_us(const LaneStats& stats, Verb verb) {
  const auto found = stats.busy_us_by_verb.find(verb);
  return found == stats.busy_us_by_verb.end() ? 0 : found->second;
}

/// Shares out the time of a lane by bytes: a lane does not count its time by pass.
std::pair<std::int64_t, std::int64_t> shared(const LaneStats& lane, Bytes one, Bytes other, Bytes rest = {}) {
  const Bytes all = one + other + rest;
  if (all == Bytes{0}) return {0, 0};
  const double per_byte = static_cast<double>(lane.busy_us) / static_cast<double>(all.count);
  return {static_cast<std::int64_t>(per_byte * static_cast<double>(one.count)),
          static_cast<std::int64_t>(per_byte * static_cast<double>(other.count))};
}

}  // namespace

PassTotals operator-(PassTotals after, const PassTotals& before) {
  after.fetches -= before.fetches;
  after.stalled_us -= before.stalled_us;
  after.fetched -= before.fetched;
  after.brought -= before.brought;
  after.drained -= before.drained;
  after.reduced -= before.reduced;
  return after;
}

void StepStats::end_pass(const ItineraryBook& book, ItineraryId itinerary, const PassTotals& pass,
                         std::optional<std::int64_t> planned, std::int64_t unplanned_visits) {
  PassStats& stats = passes_[itinerary];
  stats.itinerary = itinerary;
  stats.signature = book.signature(itinerary);
  stats.num_visits = static_cast<std::int64_t>(book.visits(itinerary).size());
  ++stats.times;
  stats.planned_fetches = planned;
  stats.fetches = pass.fetches;
  stats.unplanned_visits += unplanned_visits;
  if (stats.signature.phase == Phase::forward) {
    sums_.forward_stall_us += pass.stalled_us;
    sums_.forward_fetched += pass.fetched;
  } else {
    sums_.backward_stall_us += pass.stalled_us;
    sums_.backward_fetched += pass.fetched + pass.brought;
    sums_.drained += pass.drained;
    sums_.reduced += pass.reduced;
  }
}

void StepStats::forget(ItineraryId itinerary) {
  const auto row = passes_.find(itinerary);
  if (row == passes_.end()) return;
  forgotten_passes_ += row->second.times;
  passes_.erase(row);
}

void StepStats::end_step() {
  const std::int64_t now = clock_us();
  if (!first_step_) {
    const Bytes updated = parts_.optimizer != nullptr ? parts_.optimizer->stats().bytes : Bytes{};
    first_step_ = {sums_,
                   saved(),
                   drainer_.drained(),
                   updates_.busy_us(),
                   updated,
                   updates_.streamed().come(),
                   updates_.streamed().gone()};
    update_time_->begin_counting(now_ns());
    parts_.backend.begin_counting(parts_.issuer.next_op());
  }
  if (last_step_us_ != 0) {
    ++sums_.num_steps;
    sums_.wall_us += now - last_step_us_;
  }
  last_step_us_ = now;
}

std::vector<PassStats> StepStats::passes() const {
  std::vector<PassStats> result;
  for (const auto& [id, stats] : passes_) result.push_back(stats);
  return result;
}

std::int64_t StepStats::compute_us() const {
  const LaneStats compute = parts_.backend.stats(Lane::compute);
  return busy_us(compute, Verb::forward) + busy_us(compute, Verb::backward);
}

StepSums StepStats::sums() const {
  const FirstStep first = first_step_.value_or(FirstStep{});
  StepSums sums = sums_;
  sums.forward_stall_us -= first.sums.forward_stall_us;
  sums.backward_stall_us -= first.sums.backward_stall_us;
  sums.forward_fetched -= first.sums.forward_fetched;
  sums.backward_fetched -= first.sums.backward_fetched;
  sums.drained -= first.sums.drained;
  sums.reduced -= first.sums.reduced;
  add_lane_times(sums, first);
  if (parts_.optimizer != nullptr) sums.updated = parts_.optimizer->stats().bytes - first.updated;
  const UpdateTime::Behind behind = update_time_->behind();
  sums.update_us = updates_.busy_us() - first.update_us;
  sums.update_behind_forward_us = std::min(behind.forward_us, sums.update_us);
  sums.update_behind_backward_us = std::min(behind.backward_us, sums.update_us - sums.update_behind_forward_us);
  sums.update_exposed_us = sums.update_us - sums.update_behind_forward_us - sums.update_behind_backward_us;
  return sums;
}

void StepStats::add_lane_times(StepSums& sums, const FirstStep& first) const {
  const auto lane = [&](Lane which) {
    return first_step_ ? parts_.backend.counted(which) : parts_.backend.stats(which);
  };
  const LaneStats compute = lane(Lane::compute);
  sums.forward_us = busy_us(compute, Verb::forward);
  sums.backward_us = busy_us(compute, Verb::backward);
  sums.device_update_us = busy_us(compute, Verb::update);
  const SavedStats saved = this->saved();
  const Bytes reloaded =
      (saved.reloaded - saved.reloaded_from_peers) - (first.saved.reloaded - first.saved.reloaded_from_peers);
  const Bytes offloaded =
      (saved.offloaded - saved.offloaded_to_peers) - (first.saved.offloaded - first.saved.offloaded_to_peers);
  const Bytes come = updates_.streamed().come() - first.come, gone = updates_.streamed().gone() - first.gone;
  std::tie(sums.forward_fetch_us, sums.backward_fetch_us) =
      shared(lane(Lane::fetch), sums.forward_fetched + come, sums.backward_fetched + reloaded);
  const LaneStats drains = lane(Lane::drain);
  const Bytes others_drained = drainer_.drained() - first.drained + offloaded;
  std::tie(sums.forward_drain_us, std::ignore) = shared(drains, gone, others_drained);
  std::tie(sums.offload_us, sums.drain_us) = shared(drains, offloaded, drainer_.drained() - first.drained, gone);
  sums.peer_us = lane(Lane::peer).busy_us;
  sums.copied = lane(Lane::fetch).bytes + lane(Lane::drain).bytes;
  if (parts_.collector == nullptr) return;
  const std::int64_t others = parts_.collector->shards().size - 1;
  std::tie(sums.forward_collect_us, sums.backward_collect_us) =
      shared(lane(Lane::collect), sums.forward_fetched * others, sums.backward_fetched * others + sums.reduced);
}

}  // namespace noria
