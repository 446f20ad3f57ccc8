#include "engine/updates.h"

#include <exception>
#include <utility>

#include "base/errors.h"
#include "device/host_ticket.h"
#include "device/timing.h"

namespace noria {

Op Updates::op_of(UnitId unit, bool reads_scales) {
  Issuer& issuer = parts_.issuer;
  const UnitFacts& facts = parts_.units[unit].facts;
  Op op;
  op.lane = Lane::update;
  op.verb = Verb::update;
  op.unit = unit;
  op.accesses = {{facts.held, issuer.version(facts.held), Access::Mode::read},
                 {facts.state, issuer.next_version(facts.state), Access::Mode::write},
                 {facts.working, issuer.version(facts.working), Access::Mode::write}};
  if (reads_scales && has_scales_[unit]) {
    const BufferId scales = parts_.units[unit].scales;
    op.accesses.push_back({scales, issuer.version(scales), Access::Mode::read});
  }
  if (parts_.has_file(unit)) {
    parts_.files->bring(unit);
    op.accesses.push_back(parts_.files->access(unit));
  }
  return op;
}

void Updates::note_issued(UnitId unit) {
  if (parts_.has_file(unit)) parts_.files->put_back(unit);
}

Access Updates::write_scales(UnitId unit) {
  has_scales_[unit] = true;
  const BufferId scales = parts_.units[unit].scales;
  return {scales, parts_.issuer.next_version(scales), Access::Mode::write};
}

void Updates::defer(UnitId unit) {
  NORIA_INVARIANT(!deferred_[unit], "an update is deferred twice");
  if (parts_.collector != nullptr) parts_.collector->note_update(unit);
  parts_.issuer.next_version(parts_.units[unit].facts.working);
  deferred_[unit] = true;
  if (streamed_.has(unit)) streamed_.expect(unit);
}

bool Updates::is_any_deferred() const {
  for (UnitId unit : deferred_.ids()) {
    if (deferred_[unit]) return true;
  }
  return false;
}

void Updates::run_deferred(UnitId unit) {
  if (!deferred_[unit]) return;
  if (streamed_.has(unit)) {
    run_streamed(unit);
    return;
  }
  Op op = op_of(unit);
  auto begun = parts_.issuer.begin(op);
  const auto ticket = std::make_shared<HostTicket>(begun.label);
  parts_.issuer.keep(op.id, ticket);
  const std::int64_t asked_us = clock_us();
  try {
    await_inputs(unit, begun.waits);
    const std::int64_t start_us = clock_us(), start_ns = now_ns();
    deferred_[unit] = false;  // before the update: a call of the engine from there must not run it again
    run_(unit);
    time_->worked(Lane::update, Verb::update, start_ns, now_ns());
    note_ran(op, begun.waits, asked_us, start_us);
  } catch (...) {
    ticket->pass();  // the caller hears of it, once; no op can be waiting yet, since such ops are issued after this
    throw;
  }
  ticket->pass();
}

void Updates::run_streamed(UnitId unit) {
  if (!deferred_[unit] || !streamed_.has(unit)) return;
  deferred_[unit] = false;
  streamed_.run(unit, has_scales_[unit],
                [&](const std::string& why) { mark_torn(broke_off("the update of ", unit, why)); });
  streamed_.fetch_ahead();
}

// An op that waits for the update alone must be able to count on all waits of the update.
void Updates::await_inputs(UnitId unit, const std::vector<Ticket>& waits) {
  try {
    wait_for_all(waits);
  } catch (const std::exception& error) {  // its gradient did not come, and other units may have been updated
    deferred_[unit] = false;
    mark_torn(broke_off("the update of ", unit, error.what()));
    throw;
  }
}

void Updates::note_ran(const Op& op, const std::vector<Ticket>& waits, std::int64_t asked_us, std::int64_t start_us) {
  const std::int64_t busy_us = clock_us() - start_us;
  launching_.busy_us += busy_us;
  ++launching_.num_ops;
  launching_.bytes += parts_.units[op.unit].facts.weights;
  if (start_us > asked_us && !waits.empty()) {
    launching_.stalled_us[{waits.front()->label.verb, Verb::update}] += start_us - asked_us;
  }
  if (!trace_) return;
  Span span;
  span.op = op.id;
  span.lane = Lane::update;
  span.verb = Verb::update;
  span.unit = op.unit;
  span.end_us = trace_->now_us();
  span.start_us = span.end_us - busy_us;
  for (const Ticket& wait : waits) span.waits.push_back(wait->label.op);
  trace_->add(std::move(span));
}

void Updates::mark_torn(const std::string& why) {
  if (torn_.empty()) torn_ = why;
}

std::string Updates::broke_off(const std::string& what, UnitId unit, const std::string& why) const {
  return what + parts_.units[unit].facts.name + " broke off (" + why + ")";
}

std::string Updates::torn() const {
  std::string found = torn_;
  const auto add = [&](const std::string& what, UnitId unit, const std::string& why) {
    found += (found.empty() ? "" : "; ") + broke_off(what, unit, why);
  };
  for (UnitId unit : parts_.units.ids()) {
    const std::string why = streamed_.torn(unit);
    if (!why.empty()) add("the update of ", unit, why);
    if (!parts_.has_file(unit)) continue;
    if (const std::string lost = parts_.files->torn(unit); !lost.empty()) add("writing the state of ", unit, lost);
  }
  if (parts_.optimizer == nullptr) return found;
  for (UnitId unit : kept_.ids()) {
    if (!kept_[unit] || !kept_[unit]->passed()) continue;
    try {
      kept_[unit]->wait_passed();
    } catch (const std::exception& error) {
      add("the draft of ", unit, error.what());
    }
  }
  for (const auto& [unit, why] : parts_.optimizer->torn()) add("the update of ", unit, why);
  return found;
}

void Updates::refuse_torn() const {
  const std::string why = torn();
  if (why.empty()) return;
  throw MachineError("weights and optimizer state are of different steps: " + why +
                     ". Load a checkpoint of both: model.load_state_dict and optimizer.load_state_dict");
}

void Updates::clear_torn() {
  torn_.clear();
  streamed_.clear_torn();
  if (parts_.files != nullptr) parts_.files->clear_torn();
  if (parts_.optimizer == nullptr) return;
  parts_.optimizer->idle();
  parts_.backend.idle();
  parts_.optimizer->clear_torn();
  kept_.fill(nullptr);
}

std::int64_t Updates::busy_us() const {
  return launching_.busy_us + (parts_.optimizer != nullptr ? parts_.optimizer->busy_us() : 0);
}

LaneStats Updates::stats() const {
  LaneStats stats = launching_;
  if (parts_.optimizer == nullptr) return stats;
  const LaneStats pool = parts_.optimizer->stats();
  stats.busy_us += pool.busy_us;
  stats.num_ops += pool.num_ops;
  stats.bytes += pool.bytes;
  for (const auto& [kind, us] : pool.stalled_us) stats.stalled_us[kind] += us;
  return stats;
}

}  // namespace noria
