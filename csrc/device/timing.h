// Provides time on a lane: a precise clock, the shortest time an op may take, and the delays of the hostile setting.
//
// Units: nanoseconds of CLOCK_MONOTONIC inside, microseconds in options and reports.
// Threads: any thread may draw from `Delays`. The sequence depends only on seed and lane.
#pragma once

#include <cstdint>
#include <map>
#include <random>

#include "base/mutex.h"
#include "device/backend.h"

namespace noria {

std::int64_t now_ns();

/// Sleeps until the clock shows `deadline_ns`. Returns at once if that has passed.
void sleep_until_ns(std::int64_t deadline_ns);

/// Asks the kernel to wake this thread on time. By default a sleep may be 50 us late.
void ask_for_precise_sleep();

/// Returns how long `bytes` take under `limit`: bytes / bandwidth + latency, rounded up.
std::int64_t least_duration_ns(const LaneLimit& limit, Bytes bytes);

/// Returns how long a transfer takes if each link has its limit in `links`, or else `limit`. That is the time of the
/// slowest link; the fills count on every link.
std::int64_t least_duration_ns(const LaneLimit& limit, const Transfer& transfer,
                               const std::map<int, LaneLimit>& links = {});

class Delays {
 public:
  Delays(const Hostility& hostility, Lane lane);

  /// Returns the next random delay: 0 if the seed or the longest delay is 0.
  std::int64_t next_us();
  /// Returns how long ops of this verb are held back on this lane.
  std::int64_t hold_us(Verb verb) const;

  /// Sleeps for the next delay; the first form adds the hold of `verb`. Returns whether there was anything to sleep.
  bool sleep(Verb verb);
  bool sleep();

 private:
  const Hostility hostility_;
  const std::int64_t hold_lane_us_;
  Mutex mutex_;
  std::mt19937_64 random_ NORIA_GUARDED_BY(mutex_);
};

}  // namespace noria
