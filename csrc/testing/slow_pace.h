// SlowPace delays all that may be late, and limits lanes. Only tests, benchmarks and examples use it.
//
// Units: microseconds, GiB/s. Threads: any thread may draw a delay. What is drawn depends only on seed and lane.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "base/mutex.h"
#include "device/backend.h"
#include "device/pace.h"

namespace noria {

/// Limits the rate of a lane, or of each link of the peer lane, so that overlap can be measured on any machine. 0 means
/// unlimited.
struct LaneLimit {
  double bandwidth_gib_s = 0;
  double latency_us = 0;
};

/// Describes the hostile setting: everything that may happen late does happen late.
struct Hostility {
  std::uint64_t seed = 0;                // 0: no random delays
  std::int64_t max_delay_us = 0;         // random, up to this: before and after each lane op, and after compute waits
  std::map<Verb, std::int64_t> hold_us;  // how long ops of this verb are held back before they run
  bool poison = false;                   // overwrite vacated memory with 0xFF
  std::int64_t hold_peer_us = 0;         // how much longer each op of the peer lane waits
};

struct Limits {
  std::map<Lane, LaneLimit> lanes;
  std::map<int, LaneLimit> links = {};  // NOLINT(readability-redundant-member-init): links of the peer lane that differ
};

/// Returns how many ns `bytes` take under `limit`: bytes / bandwidth + latency, rounded up.
std::int64_t least_duration_ns(const LaneLimit& limit, Bytes bytes);

/// Returns how long a transfer takes if each link has its limit in `links`, or else `limit`. That is the time of the
/// slowest link; the fills count on every link.
std::int64_t least_duration_ns(const LaneLimit& limit, const Transfer& transfer,
                               const std::map<int, LaneLimit>& links = {});

class SlowPace final : public Pace {
 public:
  explicit SlowPace(Hostility hostility, Limits limits = {});

  std::int64_t before_us(Lane lane, Verb verb) override { return drawn_us(lane) + held_us(lane, verb); }
  std::int64_t after_us(Lane lane) override { return drawn_us(lane); }
  std::int64_t least_ns(Lane lane, const Transfer& transfer) const override;
  std::int64_t least_ns(Lane lane, Bytes bytes) const override;
  bool poisons() const override { return hostility_.poison; }
  void part_done() override;

  /// Draws the next random delay of a lane.
  std::int64_t drawn_us(Lane lane);
  /// The next part of an update that is done throws MachineError.
  void break_next_update() { breaks_next_ = true; }

 private:
  std::int64_t held_us(Lane lane, Verb verb) const;
  LaneLimit limit_of(Lane lane) const;

  const Hostility hostility_;
  const Limits limits_;
  std::atomic<bool> breaks_next_ = false;
  Mutex mutex_;
  std::vector<std::mt19937_64> random_ NORIA_GUARDED_BY(mutex_);  // by lane
};

/// Makes a SlowPace; for tests.
inline std::shared_ptr<Pace> slow(Hostility hostility, Limits limits = {}) {
  return std::make_shared<SlowPace>(std::move(hostility), std::move(limits));
}

}  // namespace noria
