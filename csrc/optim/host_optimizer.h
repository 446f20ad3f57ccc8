// The host pool that updates units: one unit after another in the order of submission as their waits pass, each spread
// over a TBB arena.
//
// Units: elements and bytes; bandwidth in GiB/s. Ownership: jobs point into the home, which outlives the optimizer;
// tickets are shared, and let go of as soon as a job is done. Order: among queued jobs the first whose waits have all
// passed runs next, so results never depend on threads (elementwise formula, fixed chunks). A failed job fails its
// ticket, so no waiter waits for ever; a failed wait fails the job that waited for it, which is then not run.
// Threads: `submit` from any thread; jobs run on the pool's own threads, which never take the GIL. A forked child has
// none of them: there `submit` refuses, `idle`, `close` and the destructor do nothing.
//
// Note [Tickets of a device]. A ticket calls back when it is issued, and on a device that is not yet passed. When no
// job's waits have all passed, the pool blocks on the first job whose waits are all issued: what has been issued waits
// for nothing but what was issued before it, never for an update, so this always ends.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/trace.h"
#include "device/backend.h"
#include "optim/adamw.h"

namespace noria {

/// A contiguous run of elements that share hyperparameters (one parameter). Pieces of a job do not overlap.
struct AdamWPiece {
  std::int64_t offset = 0;  // elements, into every array of the job
  std::int64_t count = 0;
  AdamWScalars scalars{};
};

/// One unit's update. fp32: `master` is the working copy itself, `working` and `low` are null. Split (bf16): `working`
/// holds the high halves and `low` the low 16 bits, `master` is null; see optim/adamw.h.
struct AdamWJob {
  float* master = nullptr;
  std::uint16_t* working = nullptr;
  std::uint16_t* low = nullptr;
  float* m = nullptr;
  float* v = nullptr;
  const void* gradient = nullptr;  // float for fp32, bf16 bits for split
  std::vector<AdamWPiece> pieces;
  Bytes bytes() const;  // read plus written: 28 per element in fp32 (p, m, v in and out, g in), 26 split
};

struct HostOptimizerOptions {
  int num_threads = 0;  // 0: cores of the process less one for the launching thread, at least 1
  LaneLimit limit;      // so that an update-bound step can be measured on any machine
  Hostility hostility;  // delays and holds come between a job's waits and its work
};

class HostOptimizer {
 public:
  explicit HostOptimizer(const HostOptimizerOptions& options);
  ~HostOptimizer();                              // abandons what is queued, joins; does not throw
  HostOptimizer(const HostOptimizer&) = delete;  // owns threads
  HostOptimizer& operator=(const HostOptimizer&) = delete;

  /// Does not block. Throws InvariantError for a job that no plan makes (missing arrays, overlapping pieces).
  Ticket submit(const OpLabel& label, AdamWJob job, std::vector<Ticket> waits);
  /// Blocks until nothing is queued or running.
  void idle();
  /// Finishes the running job, fails the tickets of the others, joins. Idempotent.
  void close();

  LaneStats stats() const;
  void set_trace(std::shared_ptr<Trace> trace);
  int num_threads() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace noria
