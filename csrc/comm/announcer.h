// Announcer tells the other ranks which ops this rank has queued, and compares them with theirs, ahead of the lane that
// runs them.
//
// Example: a forward queues the gathers of 4 units. The ranks agree on all 4 in one exchange, while the first one still
// waits for its shard to be copied. So an op seldom waits for the agreement, and no op begins that is not the same on
// all ranks.
//
// Order: first in, first out. All ranks announce the same ops in the same order, or all throw. After a failure the
// announcer asks nothing of the other ranks any more: what is announced fails with the same error.
// Ownership: owns its thread. Threads: any thread may call every member. None takes the GIL or blocks, but for `close`.
#pragma once

#include <deque>
#include <exception>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "comm/agreement.h"
#include "device/host_lane.h"

namespace noria {

class Announcer {
 public:
  using Numbers = std::vector<std::int64_t>;

  Announcer(std::shared_ptr<Collectives> collectives, std::vector<std::string> names);

  /// Announces an op with the numbers that ranks exchange for it, which may be none. The result is ready when the ranks
  /// have agreed: the numbers of all ranks, by rank. It throws UsageError if another rank does something else.
  std::shared_future<Numbers> announce(const Intent& intent, Numbers numbers);

  /// Finishes the exchange that runs, abandons the rest, joins the thread. Idempotent.
  void close() { thread_.close(); }

 private:
  struct Announced {
    Intent intent;
    Numbers numbers;
    std::promise<Numbers> agreed;
  };

  void agree_on_all();
  /// Returns what was announced first and is not agreed on yet.
  std::vector<Intent> intents();
  /// Ranks have agreed on the first. Exchanges its numbers, and makes its result ready.
  void settle_first();
  void fail_all(const std::exception_ptr& error);

  const std::shared_ptr<Collectives> collectives_;
  Agreement agreement_;
  std::exception_ptr failure_;  // the first; own thread only
  Mutex mutex_;
  std::deque<std::shared_ptr<Announced>> waiting_ NORIA_GUARDED_BY(mutex_);
  HostLane thread_;  // last: it is destroyed before what it uses
};

}  // namespace noria
