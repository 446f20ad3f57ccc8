// TimedLane runs ops on a thread, one after the other. Each op waits for its tickets, keeps to a pace, and is counted
// in a ledger.
//
// Ownership: owns its thread. Borrows the ledger.
// Order: first in, first out.
// Threads: any thread may call every member. The lane's thread never takes the GIL.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device/backend.h"
#include "device/host_lane.h"
#include "device/lane_ledger.h"

namespace noria {

class TimedLane {
 public:
  TimedLane(Lane lane, std::shared_ptr<Pace> pace, LaneLedger& ledger);

  struct Op {
    OpLabel label;
    std::vector<Ticket> waits;
    Bytes bytes;                // for the statistics
    std::int64_t least_ns = 0;  // how long the op takes at least
    std::function<void()> work;
    bool needs_success = true;  // false: the waits only say when memory is free, so their failures do not matter
  };
  /// Queues an op. Does not block. If a wait or the work throws, the ticket fails with the same error.
  Ticket submit(Op op);

  void idle() { thread_.idle(); }
  void close() { thread_.close(); }
  bool is_forked() const { return thread_.is_forked(); }

 private:
  void run(const Op& op, std::int64_t submitted_ns);

  const Lane lane_;
  const std::shared_ptr<Pace> pace_;
  LaneLedger& ledger_;
  std::int64_t free_ns_ = 0;  // when the last op ended; only the lane's thread uses it
  HostLane thread_;           // last: destroyed before what it uses
};

/// Counts how long the waiter's lane stood still for a ticket that has been given. Returns until when it did.
std::int64_t stood_until(LaneLedger& ledger, const Ticket& ticket, const OpLabel& waiter, std::int64_t since_ns);
std::vector<OpId> ids_of(const std::vector<Ticket>& tickets);

}  // namespace noria
