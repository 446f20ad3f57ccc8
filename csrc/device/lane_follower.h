// Follows one lane of a device, op by op, and writes down when it stood still and when it worked.
//
// A device lane runs behind the host, and its events carry no times (they are cheaper so). The follower blocks on the
// same tickets in the same order as the lane does, so what it sees on the host's clock is what the lane did, late by
// one wake-up. It orders nothing.
//
// Units: nanoseconds of `now_ns`. Ownership: holds tickets until it has passed them. Threads: one of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "device/host_lane.h"
#include "device/lane_ledger.h"

namespace noria {

/// What a lane was told to do. Without a ticket it only waits: the work is announced later.
struct FollowedOp {
  struct Wait {
    Ticket ticket;
    std::int64_t issued_ns = 0;  // when it was seen issued
  };
  OpLabel label;
  std::int64_t told_ns = 0;  // when the lane had nothing but this op's waits left to wait for, at the earliest
  std::vector<Wait> waits;
  std::int64_t begun_ns = 0;  // the work did not begin before
  Ticket ticket;
  Bytes bytes;
};

class LaneFollower {
 public:
  /// `prepare_thread` runs first on the follower's thread.
  LaneFollower(Lane lane, LaneLedger& ledger, std::function<void()> prepare_thread);

  void follow(FollowedOp op);
  void idle() { thread_.idle(); }
  void close() { thread_.close(); }

 private:
  void observe(const FollowedOp& op);

  const Lane lane_;
  LaneLedger& ledger_;
  std::int64_t free_ns_ = 0;  // when the lane's last op was over; follower's thread only, as the next
  std::vector<OpId> waited_;  // what the lane has waited for since
  HostLane thread_;
};

}  // namespace noria
