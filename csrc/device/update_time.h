// Where the time of updates goes: behind a forward pass, behind a backward pass, or nowhere (exposed).
//
// Lanes tell when they worked, after the fact and each in its own order: updates as they end, visits of the compute
// lane as they end, which of a device is learnt later. What two of them have in common lies behind the pass.
//
// Units: nanoseconds of `now_ns`. Threads: any.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>

#include "base/words.h"

namespace noria {

class UpdateTime {
 public:
  struct Behind {
    std::int64_t forward_us = 0, backward_us = 0;
  };

  /// Of the compute lane forwards and backwards count, of the update lane everything; other lanes do not.
  void worked(Lane lane, Verb verb, std::int64_t start_ns, std::int64_t end_ns);
  /// An update runs since `start_ns`, until `due_ns` at most. It ends with `worked`, or with `stopped`.
  void works(std::int64_t start_ns, std::int64_t due_ns);
  void stopped();

  /// What was before `since_ns` does not count.
  void begin_counting(std::int64_t since_ns);
  /// With the share of the update that runs now.
  Behind behind() const;

 private:
  struct Work {
    std::int64_t start_ns, end_ns;
    Verb verb;
  };
  static constexpr std::size_t kMostKept = 1024;  // without anything of the other lane to compare it with

  void count(const Work& visit, const Work& update);

  mutable std::mutex mutex_;  // protects all below
  std::deque<Work> visits_, updates_;
  std::optional<Work> running_;
  std::int64_t since_ns_ = std::numeric_limits<std::int64_t>::min();
  std::int64_t forward_ns_ = 0, backward_ns_ = 0;
};

}  // namespace noria
