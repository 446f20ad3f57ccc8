// The host pool that updates units: one unit after another as their waits pass, the most urgent first, each spread over
// a TBB arena.
//
// Units: elements and bytes; bandwidth in GiB/s. Ownership: jobs point into the home, which outlives the optimizer;
// tickets are shared, and let go of as soon as a job is done. Order: among the queued jobs whose waits have all passed
// the one of the smallest priority runs next, and of equal ones the first submitted; results depend neither on that nor
// on threads (elementwise formulas, fixed chunks). A failed job fails its ticket, so no waiter waits for ever; a failed
// wait fails the job that waited for it, which is then not run.
// Threads: `submit` from any thread; jobs run on the pool's own threads, which never take the GIL. A forked child has
// none of them: there `submit` refuses, `idle`, `close` and the destructor do nothing.
//
// Note [Tickets of a device]. A ticket calls back when it is issued, and on a device that is not yet passed: the host
// runs ahead of the device by many layers. If no job's waits have all passed, the pool blocks on the job whose waits
// were issued first, for they pass first; the most urgent one would keep it waiting while others are ready. What has
// been issued waits for nothing but what was issued before it, never for an update, so this always ends.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/trace.h"
#include "device/backend.h"
#include "optim/update.h"

namespace noria {

struct HostOptimizerOptions {
  /// 0: all cores of the process but one, for the launching thread. Beside a CUDA device: of `numa_node`'s cores (-1:
  /// of all), one thread each where two share one, and four left free for those that launch, as far as half remain.
  int num_threads = 0;
  bool is_beside_device = false;
  int numa_node = -1;  // the threads' and, by who takes it, the home's: TBB binds them where it can (libtbbbind)
  LaneLimit limit;      // so that an update-bound step can be measured on any machine
  Hostility hostility;  // delays and holds come between a job's waits and its work
};

class HostOptimizer {
 public:
  explicit HostOptimizer(const HostOptimizerOptions& options);
  ~HostOptimizer();                              // abandons what is queued, joins; does not throw
  HostOptimizer(const HostOptimizer&) = delete;  // owns threads
  HostOptimizer& operator=(const HostOptimizer&) = delete;

  /// Does not block. `label.verb` is `update`, `draft` or `sum`; a smaller `priority` is more urgent. Throws
  /// InvariantError for a job that no plan makes (see `check`).
  Ticket submit(const OpLabel& label, UpdateJob job, std::vector<Ticket> waits, int priority = 0);
  /// True: the job of this ticket had not begun and never will; its arrays are as they were, and the ticket passes as
  /// soon as what the job waited for has passed (who waits for it counts on that). False: it has begun, is done, has
  /// failed, was recalled before, or is no job of this pool.
  bool recall(const Ticket& ticket);
  /// True: the job of this ticket had not begun a moment ago.
  bool is_queued(const Ticket& ticket) const;
  /// Units whose update broke off in the middle or could not begin, and why, until `mend`: weights and state are of two
  /// steps.
  std::map<UnitId, std::string> torn() const;
  void mend();
  /// Tests only: the next update breaks off half-way, as if the machine had failed.
  void break_next_update();
  /// Blocks until nothing is queued or running.
  void idle();
  /// Finishes the running job, fails the tickets of the others, joins. Idempotent.
  void close();

  LaneStats stats() const;
  /// As in `stats`, with the share of the job that runs now; falls only when that job fails.
  std::int64_t busy_us() const;
  void set_trace(std::shared_ptr<Trace> trace);
  /// Told when updates run, from now on.
  void set_update_time(std::shared_ptr<UpdateTime> update_time);
  int num_threads() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace noria
