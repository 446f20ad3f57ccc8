// Updates units on a pool of host threads: one unit at a time, spread over a TBB arena. Among the units whose waits
// have passed, the most urgent comes first.
//
// Units: elements and bytes; bandwidth in GiB/s.
// Ownership: jobs point into the home, which outlives the optimizer. Tickets are shared, and released as soon as a job
//   is done.
// Order: among the queued jobs whose waits have all passed, the one with the smallest priority runs next; of equal
//   ones, the first submitted. Results depend neither on this order nor on threads (elementwise formulas, fixed
//   chunks). A failed job fails its ticket, so no waiter waits for ever. A failed wait fails the job that waited for
//   it, and the job does not run.
// Threads: any thread may call every member. Jobs run on the pool's own threads, which never take the GIL; muon's
//   products run on the serving thread, and on threads that torch starts for it. A forked child has none of them: there
//   `submit` refuses, and `idle`, `close` and the destructor do nothing.
//
// Note [Tickets of a device]. A ticket calls back when it is issued. On a device that is before it has passed, because
// the host runs ahead of the device by many layers. If no job's waits have all passed, the pool blocks on the job whose
// waits were issued first, because these pass first. If it blocked on the most urgent job, others could be ready
// meanwhile. An issued op waits only for ops that were issued before it, never for an update. So this always ends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/trace.h"
#include "device/backend.h"
#include "optim/update.h"

namespace noria {

/// Returns how many threads a pool has by default, of `hardware` hardware threads on `cores` cores: one for each core.
/// One hardware thread is left to the launching thread. Beside a device four are left, also for autograd's thread and
/// those of lanes. Each of these wakes for microseconds, and the device waits for it.
inline int chosen_threads(int hardware, int cores, bool is_beside_device) {
  const int left = is_beside_device ? 4 : 1;
  const int least = is_beside_device ? cores / 2 : 1;
  return std::max({1, least, std::min(cores, hardware - left)});
}

struct HostOptimizerOptions {
  /// 0 means: one thread for each core of `numa_node` (-1: of all nodes); hardware threads that share a core count
  /// once. One hardware thread is left free for the launching thread. Beside a CUDA device four are left, but the pool
  /// keeps at least half of the cores.
  int num_threads = 0;
  bool is_beside_device = false;
  int numa_node = -1;  // the node of the pool's threads: TBB binds them if it can (libtbbbind). The home uses it too
  std::shared_ptr<Pace> pace = std::make_shared<Pace>();  // its delays come between a job's waits and its work
};

class HostOptimizer {
 public:
  explicit HostOptimizer(const HostOptimizerOptions& options);
  ~HostOptimizer();                              // abandons what is queued, joins; does not throw
  HostOptimizer(const HostOptimizer&) = delete;  // owns threads
  HostOptimizer& operator=(const HostOptimizer&) = delete;

  /// Queues a job. Does not block. `label.verb` is `update`, `draft`, `undo` or `sum`. A smaller `priority` is more
  /// urgent. Throws InvariantError for a malformed job (see `check`).
  Ticket submit(const OpLabel& label, UpdateJob job, std::vector<Ticket> waits, int priority = 0);
  /// Returns true if the job of this ticket had not begun. Then it never will, and its arrays are unchanged. Its ticket
  /// passes as soon as the job's own waits have passed, which waiters of the ticket rely on. Returns false if the job
  /// has begun, is done, has failed, was recalled before, or is not of this pool.
  bool recall(const Ticket& ticket);
  /// Returns true if the job of this ticket had not begun a moment ago.
  bool is_queued(const Ticket& ticket) const;
  /// Returns the units whose update broke off in the middle or could not begin, and why, until `clear_torn`. Their
  /// weights and state belong to two different steps.
  std::map<UnitId, std::string> torn() const;
  void clear_torn();
  /// Blocks until no job is queued or running.
  void idle();
  /// Finishes the running job, fails the tickets of the others, joins the thread. Idempotent.
  void close();

  LaneStats stats() const;
  /// Returns the busy time of `stats`, including the share of the job that runs now. It falls only if that job fails.
  std::int64_t busy_us() const;
  void set_trace(std::shared_ptr<Trace> trace);
  /// From now on `update_time` is told when updates run.
  void set_update_time(std::shared_ptr<UpdateTime> update_time);
  int num_threads() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace noria
