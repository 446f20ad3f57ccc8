#include "device/lane_follower.h"

#include <algorithm>
#include <utility>

#include "device/timing.h"

namespace noria {

namespace {

// A failed op has no times, and its ticket tells everybody who waits for it: nothing is lost here.
void ignore_failure(const std::function<void()>& work) {
  try {
    work();
  } catch (...) {  // NOLINT(bugprone-empty-catch): see above
  }
}

}  // namespace

LaneFollower::LaneFollower(Lane lane, LaneLedger& ledger, std::function<void()> prepare_thread)
    : lane_(lane),
      ledger_(ledger),
      thread_(std::string(to_string(lane)) + "-log") {
  thread_.enqueue(
      {[prepare = std::move(prepare_thread)] { ignore_failure(prepare); }, [](const std::exception_ptr&) {}});
}

void LaneFollower::follow(FollowedOp op) {
  thread_.enqueue(
      {[this, op = std::move(op)] { ignore_failure([&] { observe(op); }); }, [](const std::exception_ptr&) {}});
}

void LaneFollower::observe(const FollowedOp& op) {
  free_ns_ = std::max(free_ns_, op.told_ns);
  for (const auto& [ticket, issued_ns] : op.waits) {
    std::int64_t passed_ns = issued_ns;
    if (!ticket->passed()) {
      ticket->wait_passed();
      passed_ns = now_ns();
    }
    if (passed_ns > free_ns_) ledger_.stalled(lane_, ticket->label.verb, op.label.verb, passed_ns - free_ns_);
    free_ns_ = std::max(free_ns_, passed_ns);
    waited_.push_back(ticket->label.op);
  }
  if (!op.ticket) return;
  const std::int64_t start_ns = std::max(free_ns_, op.begun_ns);
  op.ticket->wait_passed();
  free_ns_ = std::max(start_ns, now_ns());
  ledger_.transferred(op.label, start_ns, free_ns_, op.bytes, std::exchange(waited_, {}));
}

}  // namespace noria
