#include "testing/slow_pace.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/errors.h"

namespace noria {

static double duration_ns(const LaneLimit& limit, Bytes bytes) {
  double ns = limit.latency_us * 1e3;
  if (limit.bandwidth_gib_s > 0) ns += static_cast<double>(bytes.count) / (limit.bandwidth_gib_s * 1073741824.0) * 1e9;
  return ns;
}

std::int64_t least_duration_ns(const LaneLimit& limit, Bytes bytes) {
  return static_cast<std::int64_t>(std::ceil(duration_ns(limit, bytes)));
}

std::int64_t least_duration_ns(const LaneLimit& limit, const Transfer& transfer,
                               const std::map<int, LaneLimit>& links) {
  std::map<int, Bytes> by_link;
  for (const CopySpan& copy : transfer.copies) by_link[copy.link] += copy.bytes;
  Bytes filled;
  for (const auto& [memory, bytes] : transfer.poison) filled += bytes;
  double longest_ns = duration_ns(limit, filled);
  for (const auto& [link, bytes] : by_link) {
    const auto own = links.find(link);
    longest_ns = std::max(longest_ns, duration_ns(own == links.end() ? limit : own->second, bytes + filled));
  }
  return static_cast<std::int64_t>(std::ceil(longest_ns));
}

SlowPace::SlowPace(Hostility hostility, Limits limits) : hostility_(std::move(hostility)), limits_(std::move(limits)) {
  // The lane is mixed into the seed, so that the lanes of one machine do not delay in step.
  for (std::uint64_t lane = 0; lane < kNumLanes; ++lane) random_.emplace_back(hostility_.seed * 1'000'003 + lane);
}

void SlowPace::part_done() {
  if (breaks_next_.exchange(false)) throw MachineError("this update was told to break off");
}

std::int64_t SlowPace::drawn_us(Lane lane) {
  if (hostility_.seed == 0 || hostility_.max_delay_us <= 0) return 0;
  const MutexLock lock(mutex_);
  const std::uint64_t drawn = random_[static_cast<std::size_t>(lane)]();
  return static_cast<std::int64_t>(drawn % (static_cast<std::uint64_t>(hostility_.max_delay_us) + 1));
}

std::int64_t SlowPace::held_us(Lane lane, Verb verb) const {
  const auto found = hostility_.hold_us.find(verb);
  return (lane == Lane::peer ? hostility_.hold_peer_us : 0) + (found == hostility_.hold_us.end() ? 0 : found->second);
}

LaneLimit SlowPace::limit_of(Lane lane) const {
  const auto found = limits_.lanes.find(lane);
  return found == limits_.lanes.end() ? LaneLimit{} : found->second;
}

std::int64_t SlowPace::least_ns(Lane lane, const Transfer& transfer) const {
  return least_duration_ns(limit_of(lane), transfer, lane == Lane::peer ? limits_.links : std::map<int, LaneLimit>{});
}

std::int64_t SlowPace::least_ns(Lane lane, Bytes bytes) const { return least_duration_ns(limit_of(lane), bytes); }

}  // namespace noria
