#include "device/timed_lane.h"

#include <algorithm>
#include <string>
#include <utility>

#include "device/host_ticket.h"
#include "device/timing.h"

namespace noria {

TimedLane::TimedLane(Lane lane, std::shared_ptr<Pace> pace, LaneLedger& ledger)
    : lane_(lane),
      pace_(std::move(pace)),
      ledger_(ledger),
      thread_(std::string(to_string(lane))) {}

Ticket TimedLane::submit(Op op) {
  auto ticket = std::make_shared<HostTicket>(op.label);
  const std::int64_t submitted_ns = now_ns();
  thread_.enqueue({[this, ticket, submitted_ns, op = std::move(op)] {
                     try {
                       run(op, submitted_ns);
                     } catch (...) {
                       ticket->fail(std::current_exception());
                       return;
                     }
                     ticket->pass();  // last: a waiter that sees it passed also sees its bytes and its numbers
                   },
                   [ticket](std::exception_ptr error) { ticket->fail(std::move(error)); }});
  return ticket;
}

void TimedLane::run(const Op& op, std::int64_t submitted_ns) {
  // Counts free and waiting time from when things happened, not from when this thread was scheduled to see them.
  std::int64_t free_ns = std::max(free_ns_, submitted_ns);
  for (const Ticket& ticket : op.waits) {
    try {
      thread_.await_issued(ticket);
      ticket->wait_passed();  // a device's op may still be under way
    } catch (...) {
      if (op.needs_success || !ticket->passed()) throw;  // not passed: the lane is being closed
    }
    free_ns = stood_until(ledger_, ticket, op.label, free_ns);
  }
  const bool delayed = sleep_for_us(pace_->before_us(lane_, op.label.verb));
  // An op with a limit begins when it could have begun. So the lane reaches its bandwidth even if wake-ups are late.
  const std::int64_t start_ns = op.least_ns > 0 && !delayed ? free_ns : now_ns();
  op.work();
  free_ns_ = std::max(start_ns + op.least_ns, now_ns());
  sleep_until_ns(free_ns_);
  ledger_.transferred(op.label, start_ns, free_ns_, op.bytes, ids_of(op.waits));
  if (sleep_for_us(pace_->after_us(lane_))) free_ns_ = now_ns();
}

std::int64_t stood_until(LaneLedger& ledger, const Ticket& ticket, const OpLabel& waiter, std::int64_t since_ns) {
  const auto* host = dynamic_cast<const HostTicket*>(ticket.get());
  const std::int64_t until_ns = host != nullptr ? host->done_ns() : now_ns();
  if (until_ns > since_ns) ledger.stalled(waiter, ticket->label.verb, until_ns - since_ns);
  return std::max(since_ns, until_ns);
}

std::vector<OpId> ids_of(const std::vector<Ticket>& tickets) {
  std::vector<OpId> ids;
  ids.reserve(tickets.size());
  for (const Ticket& ticket : tickets) ids.push_back(ticket->label.op);
  return ids;
}

}  // namespace noria
