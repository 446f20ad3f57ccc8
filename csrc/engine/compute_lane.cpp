#include "engine/compute_lane.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/errors.h"
#include "base/trace.h"
#include "device/timing.h"

namespace noria {

void ComputeLane::continue_on(Stream stream) {
  const auto before = std::exchange(stream_, stream);
  if (!before || *before == stream) return;
  const Ticket ticket = backend_.open({OpId(), Lane::compute, Verb::user, UnitId()});
  backend_.give(ticket, *before);
  backend_.wait({ticket}, stream, {OpId(), Lane::compute, Verb::user, UnitId()});
}

bool ComputeLane::is_visited(const std::vector<UnitId>& needs) const {
  if (!visit_) return false;
  const std::vector<UnitId>& open = visit_->visit.needs;
  return std::includes(open.begin(), open.end(), needs.begin(), needs.end());
}

void ComputeLane::begin(OpenVisit& open) {
  auto begun = issuer_.begin(open.op);
  open.ticket = backend_.open(begun.label);
  issuer_.keep(open.op.id, open.ticket);
  open.waits = std::move(begun.waits);
}

void ComputeLane::issue(OpenVisit open) {
  begin(open);
  visit_ = std::move(open);
}

void ComputeLane::await(Stream stream) {
  OpenVisit& open = *visit_;
  const std::int64_t before = clock_us();
  backend_.wait(open.waits, stream, OpLabel{open.op.id, Lane::compute, open.op.verb, open.op.unit});
  open.waits.clear();
  stalled_us_ += clock_us() - before;
}

void ComputeLane::enter(Stream stream) {
  NORIA_INVARIANT(visit_.has_value(), "the plan has no compute op for this visit");
  await(stream);
  visit_->opened_us = clock_us();
}

void ComputeLane::go_on(Stream stream, const std::vector<Access>& accesses) {
  if (accesses.empty()) return;
  backend_.give(visit_->ticket, stream);
  visit_->op.accesses.insert(visit_->op.accesses.end(), accesses.begin(), accesses.end());
  begin(*visit_);
  await(stream);
}

OpenVisit ComputeLane::end(Stream stream) {
  OpenVisit open = std::move(*visit_);
  visit_.reset();
  backend_.give(open.ticket, stream);
  return open;
}

void ComputeLane::abandon(Stream stream) {
  if (visit_) backend_.give(visit_->ticket, stream);  // what was launched cannot be taken back
  visit_.reset();
}

void ComputeLane::pass(Op op, Stream stream, const std::function<void()>& act) {
  NORIA_INVARIANT(!visit_, "an op of the user's inside of a visit");
  issuer_.pass(std::move(op), stream, act);
}

void ComputeLane::write(UnitId unit, BufferId written, Stream stream) {
  Op op;
  op.verb = Verb::user;
  op.unit = unit;
  op.accesses = {{written, issuer_.next_version(written), Access::Mode::write}};
  // Inside of a visit, in a gradient hook of the user's: the op that goes on ends when the user has written.
  if (visit_) visit_->op.accesses.push_back(op.accesses.front());
  interrupt(std::move(op), stream);
}

void ComputeLane::interrupt(Op op, Stream stream, const std::function<void()>& act) {
  if (!visit_) {
    pass(std::move(op), stream, act);
    return;
  }
  OpenVisit open = std::move(*visit_);
  visit_.reset();
  backend_.give(open.ticket, stream);
  std::exception_ptr failure;
  try {
    pass(std::move(op), stream, act);
  } catch (...) {
    failure = std::current_exception();
  }
  begin(open);
  NORIA_INVARIANT(open.waits.empty(), "a visit that goes on waits for nothing new");
  visit_ = std::move(open);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace noria
