// Time on a lane: a precise clock, the least time an op takes, and the delays of the hostile setting.
//
// Units: nanoseconds of CLOCK_MONOTONIC inside, microseconds where people set or read them.
// Threads: `Delays` may be drawn from by any thread; the sequence is a pure function of seed and lane.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <random>

#include "device/backend.h"

namespace noria {

std::int64_t now_ns();

/// Sleeps until the clock shows `deadline_ns`; returns at once when it has passed.
void sleep_until_ns(std::int64_t deadline_ns);

/// Asks the kernel to wake this thread on time: by default a sleep may be 50 us late.
void ask_for_precise_sleep();

/// What `bytes` take under `limit`: bytes / bandwidth + latency, rounded up.
std::int64_t least_duration_ns(const LaneLimit& limit, Bytes bytes);

/// What a transfer takes where each of its links has this limit, or its own: as long as the slowest, then its fills.
std::int64_t least_duration_ns(const LaneLimit& limit, const Transfer& transfer,
                               const std::map<int, LaneLimit>& links = {});

class Delays {
 public:
  Delays(const Hostility& hostility, Lane lane);

  /// The next random delay; always 0 when the setting is not hostile.
  std::int64_t next_us();
  /// How long ops of this verb are held back on this lane.
  std::int64_t hold_us(Verb verb) const;

  /// Sleeps the next delay, the first form also the hold of `verb`. Returns whether there was anything to sleep.
  bool sleep(Verb verb);
  bool sleep();

 private:
  const Hostility hostility_;
  const std::int64_t hold_lane_us_;
  std::mutex mutex_;
  std::mt19937_64 random_;
};

}  // namespace noria
