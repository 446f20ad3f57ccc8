// Counts what the lanes of a backend did: time, bytes and stalls for each lane. It also writes spans into a trace.
//
// Units: nanoseconds of `now_ns` in, microseconds out.
// Threads: any thread may call every member.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/trace.h"
#include "device/backend.h"
#include "device/update_time.h"

namespace noria {

class LaneLedger {
 public:
  /// Tells that the waiter's lane stood still for `ns`, because `giver` was not done yet.
  void stalled(const OpLabel& waiter, Verb giver, std::int64_t ns);
  /// Tells that `lane` has been working on an op since `start_ns`. From now on `stats` and `busy_us` include its share,
  /// up to `due_ns` once that is known. The op ends with `worked` (at `due_ns` at the latest, if one was told), or with
  /// `stopped`, which counts nothing.
  void works(Lane lane, std::int64_t start_ns, std::int64_t due_ns = std::numeric_limits<std::int64_t>::max());
  void stopped(Lane lane);
  /// Counts work of `num_ops` ops. Ignores probes.
  void worked(const OpLabel& label, std::int64_t start_ns, std::int64_t end_ns, Bytes bytes, int num_ops = 1);
  /// Does `worked`, and adds a span to the trace: for all ops but those of the user's loop. The span begins with the
  /// op's first part.
  void transferred(const OpLabel& label, std::int64_t start_ns, std::int64_t end_ns, Bytes bytes,
                   std::vector<OpId> waits, int num_ops = 1);
  /// Counts a part of an op that was paused in the middle. The rest comes with `worked` or `transferred`.
  void worked_in_part(const OpLabel& label, std::int64_t start_ns, std::int64_t end_ns);

  LaneStats stats(Lane lane) const;
  /// Makes `counted` count the ops from `first` on. `first` is the op that comes next.
  void begin_counting(OpId first);
  LaneStats counted(Lane lane) const;
  std::int64_t busy_us(Lane lane) const;
  void set_trace(std::shared_ptr<Trace> trace);
  void set_update_time(std::shared_ptr<UpdateTime> update_time);

 private:
  struct Row {
    std::int64_t busy_until(std::int64_t time_ns) const;
    LaneStats stats() const;

    std::int64_t busy_ns = 0;              // of finished ops
    std::map<Verb, std::int64_t> verb_ns;  // the same by verb
    std::optional<std::int64_t> start_ns;  // of the op at work
    std::int64_t due_ns = 0;
    std::int64_t num_ops = 0;
    Bytes bytes;
    std::map<std::pair<Verb, Verb>, std::int64_t> stalled_ns;
    std::optional<std::int64_t> began_ns;  // the first part of an op that was paused
  };
  Row& row(Lane lane) NORIA_REQUIRES(mutex_) { return rows_[static_cast<std::size_t>(lane)]; }
  /// Returns the rows in which an op counts.
  std::vector<Row*> rows_of(const OpLabel& label) NORIA_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::array<Row, kNumLanes> rows_ NORIA_GUARDED_BY(mutex_);
  std::array<Row, kNumLanes> earlier_ NORIA_GUARDED_BY(mutex_);  // the same, of ops before the first one that counts
  std::optional<OpId> first_ NORIA_GUARDED_BY(mutex_);
  std::shared_ptr<UpdateTime> update_time_ NORIA_GUARDED_BY(mutex_);
  std::shared_ptr<Trace> trace_ NORIA_GUARDED_BY(mutex_);
};

}  // namespace noria
