// What the lanes of a backend did: time, bytes and stalls by lane, and spans into a trace.
//
// Units: nanoseconds of `now_ns` in, microseconds out. Threads: every member from any thread.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/trace.h"
#include "device/backend.h"

namespace noria {

class LaneLedger {
 public:
  /// `lane` stood still for so long because of what `giver` had not done yet.
  void stalled(Lane lane, Verb giver, Verb waiter, std::int64_t ns);
  /// The op that `lane` works on since `start_ns`: its share is in `stats` and `busy_us` from now on, up to `due_ns`
  /// once that is known. It ends with `worked` (by a `due_ns`, if any was told), or with `stopped`, which counts
  /// nothing.
  void works(Lane lane, std::int64_t start_ns, std::int64_t due_ns = std::numeric_limits<std::int64_t>::max());
  void stopped(Lane lane);
  void worked(const OpLabel& label, std::int64_t start_ns, std::int64_t end_ns, Bytes bytes);
  /// `worked`, and a span in the trace, but for an op of the compute lane, whose spans are the caller's.
  void transferred(const OpLabel& label, std::int64_t start_ns, std::int64_t end_ns, Bytes bytes,
                   std::vector<OpId> waits);

  LaneStats stats(Lane lane) const;
  std::int64_t busy_us(Lane lane) const;
  void set_trace(std::shared_ptr<Trace> trace);

 private:
  struct Row {
    std::int64_t busy_until(std::int64_t time_ns) const;

    std::int64_t busy_ns = 0;  // of ops that are done
    std::optional<std::int64_t> start_ns;
    std::int64_t due_ns = 0;
    std::int64_t num_ops = 0;
    Bytes bytes;
    std::map<std::pair<Verb, Verb>, std::int64_t> stalled_ns;
  };
  mutable std::mutex mutex_;
  std::array<Row, kNumLanes> rows_;
  std::shared_ptr<Trace> trace_;
};

}  // namespace noria
