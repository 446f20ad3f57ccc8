// Where the time of updates goes: behind a forward pass, behind a backward pass, or nowhere (exposed).
//
// Units: microseconds of the host's clock. The updates' busy time is read whenever what the compute lane does changes;
// what it has grown by since the last reading lies behind what the lane did until now, so that the three sum to all of
// it. Threads: the caller serialises.
#pragma once

#include <algorithm>
#include <cstdint>

namespace noria {

/// What updates can lie behind. `nothing`: the lane stands still, or no pass is open.
enum class Behind : std::uint8_t { forward, backward, nothing };

class UpdateTime {
 public:
  /// The lane does `next` from now on; updates have been busy for `busy_us` in all. Returns what it did until now.
  Behind goes_on(Behind next, std::int64_t busy_us) {
    const std::int64_t grown_us = std::max<std::int64_t>(0, busy_us - seen_us_);  // a job that failed was not busy
    seen_us_ += grown_us;
    (now_ == Behind::forward ? forward_us_ : now_ == Behind::backward ? backward_us_ : exposed_us_) += grown_us;
    const Behind before = now_;
    now_ = next;
    return before;
  }
  Behind now() const { return now_; }

  std::int64_t forward_us() const { return forward_us_; }
  std::int64_t backward_us() const { return backward_us_; }
  std::int64_t exposed_us() const { return exposed_us_; }

 private:
  Behind now_ = Behind::nothing;
  std::int64_t seen_us_ = 0;
  std::int64_t forward_us_ = 0, backward_us_ = 0, exposed_us_ = 0;
};

}  // namespace noria
