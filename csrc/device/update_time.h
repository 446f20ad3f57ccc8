// Tells how much of the time of updates is hidden behind forward passes, and how much behind backward passes.
//
// Each lane reports its work in its own order: the update lane as updates end, the compute lane as visits end. On a
// device that becomes known later. The time that an update and a visit share is hidden behind that pass.
//
// Units: nanoseconds of `now_ns`.
// Threads: any.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <optional>

#include "base/mutex.h"
#include "base/words.h"

namespace noria {

class UpdateTime {
 public:
  struct Behind {
    std::int64_t forward_us = 0, backward_us = 0;
  };

  /// Counts forwards and backwards of the compute lane, and all work of the update lane. Ignores other lanes.
  void worked(Lane lane, Verb verb, std::int64_t start_ns, std::int64_t end_ns);
  /// Tells that an update has been running since `start_ns`, and ends at `due_ns` at the latest. `worked` or `stopped`
  /// reports its end.
  void works(std::int64_t start_ns, std::int64_t due_ns);
  void stopped();

  /// Ignores everything before `since_ns`.
  void begin_counting(std::int64_t since_ns);
  /// Returns the hidden time, including the share of the update that runs now.
  Behind behind() const;

 private:
  struct Work {
    std::int64_t start_ns, end_ns;
    Verb verb;
  };
  struct Hidden {
    std::int64_t since_ns = std::numeric_limits<std::int64_t>::min();
    std::int64_t forward_ns = 0, backward_ns = 0;

    /// Adds the time that both share, from `since_ns` on.
    void count(const Work& visit, const Work& update);
  };
  static constexpr std::size_t kMostKept = 1024;  // kept of one lane while the other lane reports nothing

  mutable Mutex mutex_;
  std::deque<Work> visits_ NORIA_GUARDED_BY(mutex_), updates_ NORIA_GUARDED_BY(mutex_);
  std::optional<Work> running_ NORIA_GUARDED_BY(mutex_);
  Hidden hidden_ NORIA_GUARDED_BY(mutex_);
};

}  // namespace noria
