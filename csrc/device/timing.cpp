#include "device/timing.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <ctime>
#include <map>

#include <sys/prctl.h>

namespace noria {

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void sleep_until_ns(std::int64_t deadline_ns) {
  if (now_ns() >= deadline_ns) return;  // the system call gives the core away all the same: 40 us on a virtual machine
  const timespec deadline{deadline_ns / 1'000'000'000, deadline_ns % 1'000'000'000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, nullptr) == EINTR) {
  }
}

void ask_for_precise_sleep() { prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); }

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

// The lane is mixed into the seed so that the lanes of one backend do not delay in step.
Delays::Delays(const Hostility& hostility, Lane lane)
    : hostility_(hostility),
      hold_lane_us_(lane == Lane::peer ? hostility.hold_peer_us : 0),
      random_(hostility.seed * 1'000'003 + static_cast<std::uint64_t>(lane)) {}

std::int64_t Delays::next_us() {
  if (hostility_.seed == 0 || hostility_.max_delay_us <= 0) return 0;
  const MutexLock lock(mutex_);
  return static_cast<std::int64_t>(random_() % (static_cast<std::uint64_t>(hostility_.max_delay_us) + 1));
}

std::int64_t Delays::hold_us(Verb verb) const {
  const auto found = hostility_.hold_us.find(verb);
  return hold_lane_us_ + (found == hostility_.hold_us.end() ? 0 : found->second);
}

static bool sleep_us(std::int64_t us) {
  if (us > 0) sleep_until_ns(now_ns() + us * 1000);
  return us > 0;
}

bool Delays::sleep(Verb verb) { return sleep_us(next_us() + hold_us(verb)); }

bool Delays::sleep() { return sleep_us(next_us()); }

}  // namespace noria
