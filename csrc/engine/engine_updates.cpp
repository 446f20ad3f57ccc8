// Issues updates, and gives access to the home from outside, as a part of the engine; see engine.h, Note [Updates].
#include <algorithm>
#include <exception>
#include <tuple>
#include <utility>

#include "base/errors.h"
#include "device/host_ticket.h"
#include "device/timing.h"
#include "engine/engine.h"

namespace noria {

void Engine::begin_step(Stream stream, const std::vector<UnitId>& scaled, const std::function<void()>& scale) {
  const std::lock_guard lock(mutex_);
  end_passes(stream);
  issuer_.sweep();
  refuse_torn();
  if (shows_gradients() || !scaled.empty()) note_edits(Stage::step, stream, scaled, scale);
}

void Engine::end_passes(Stream stream) {
  continue_on(stream);
  if (phase_ == Phase::backward) reset_unlocked(stream);
  if (phase_) end_pass_unlocked(stream);
}

// All that the user's loop did to the held gradients is on the stream by now. Before a backward the op names only
// gradients that are added to, because a backward must not wait for updates that still read others.
void Engine::note_edits(Stage stage, Stream stream, const std::vector<UnitId>& scaled,
                        const std::function<void()>& scale) {
  Op op;
  op.verb = Verb::user;
  for (UnitId unit : scaled) {
    const BufferId scales = unit_of(unit).scales;
    op.accesses.push_back({scales, issuer_.next_version(scales), Access::Mode::write});
    has_scales_[static_cast<std::size_t>(unit.value)] = true;
  }
  for (const EngineUnit& unit : units_) {
    if (unit.held == nullptr || !shows_gradients()) continue;
    const UnitId id(static_cast<std::int32_t>(&unit - units_.data()));
    if (stage == Stage::backward && callbacks_.held_gradients(id).empty()) continue;
    const auto& early = early_of(id);
    if (early && early->ticket && !early->is_written) continue;  // no one has edited it, or the engine would know
    op.accesses.push_back({unit.facts.held, issuer_.next_version(unit.facts.held), Access::Mode::write});
  }
  finish_user_op(std::move(op), stream, scale);
}

Op Engine::update_op(UnitId unit) {
  const UnitFacts& facts = facts_[static_cast<std::size_t>(unit.value)];
  Op op;
  op.lane = Lane::update;
  op.verb = Verb::update;
  op.unit = unit;
  op.accesses = {{facts.held, issuer_.version(facts.held), Access::Mode::read},
                 {facts.state, issuer_.next_version(facts.state), Access::Mode::write},
                 {facts.working, issuer_.version(facts.working), Access::Mode::write}};
  if (has_scales_[static_cast<std::size_t>(unit.value)]) {
    const BufferId scales = unit_of(unit).scales;
    op.accesses.push_back({scales, issuer_.version(scales), Access::Mode::read});
  }
  return op;
}

void Engine::defer_update(UnitId unit) {
  const std::lock_guard lock(mutex_);
  NORIA_INVARIANT(!pending_[static_cast<std::size_t>(unit.value)], "an update is deferred twice");
  drop_early(unit);
  if (collector_) collector_->note_update(unit);
  issuer_.next_version(facts_[static_cast<std::size_t>(unit.value)].working);
  pending_[static_cast<std::size_t>(unit.value)] = true;
}

void Engine::settle(UnitId unit) {
  const std::lock_guard lock(mutex_);
  if (!pending_[static_cast<std::size_t>(unit.value)]) return;
  Op op = update_op(unit);
  auto begun = issuer_.begin(op);
  const auto ticket = std::make_shared<HostTicket>(begun.label);
  issuer_.keep(op.id, ticket);
  const std::int64_t asked_us = clock_us();
  try {
    wait_for_all(begun.waits);  // an op that waits for this one alone must be able to count on all of its waits
    const std::int64_t start_us = clock_us(), start_ns = now_ns();
    pending_[static_cast<std::size_t>(unit.value)] = false;  // before the update, which may itself look at the home
    callbacks_.update(unit);
    const std::int64_t end_us = clock_us();
    update_time_->worked(Lane::update, Verb::update, start_ns, now_ns());
    launching_updates_.busy_us += end_us - start_us;
    ++launching_updates_.num_ops;
    launching_updates_.bytes += facts_[static_cast<std::size_t>(unit.value)].weights;
    if (start_us > asked_us && !begun.waits.empty()) {
      launching_updates_.stalled_us[{begun.waits.front()->label.verb, Verb::update}] += start_us - asked_us;
    }
    if (trace_) {
      Span span;
      span.op = op.id;
      span.lane = Lane::update;
      span.verb = Verb::update;
      span.unit = unit;
      span.end_us = trace_->now_us();
      span.start_us = span.end_us - (end_us - start_us);
      for (const Ticket& wait : begun.waits) span.waits.push_back(wait->label.op);
      trace_->add(std::move(span));
    }
  } catch (...) {
    ticket->pass();  // the caller hears of it, once; no op can be waiting yet, since such ops are issued after this
    throw;
  }
  ticket->pass();
}

void Engine::settle_all() {
  const std::lock_guard lock(mutex_);
  for (UnitId unit : next_forward_order()) settle(unit);
}

void Engine::end_step(bool blocking) {
  const std::lock_guard lock(mutex_);
  book_.note_update();
  if (collector_) {
    collector_->end_step();
    collector_->turn(Phase::forward);
    try {
      settle_all();  // other ranks may need the weights before this rank does
    } catch (...) {
      torn_ = "an update by torch has raised, and others of the same step were not made";  // other ranks have made them
      throw;
    }
  }
  if (last_backward_) is_last_[*std::exchange(last_backward_, std::nullopt)] = true;
  if (blocking) {
    settle_all();
    if (optimizer_) optimizer_->idle();
    issuer_.sweep();
  }
  const bool none_pending = std::none_of(pending_.begin(), pending_.end(), [](bool pending) { return pending; });
  if (options_.prefetch_at_step && none_pending && !is_uneven_) prepare_next_forward();
  const std::int64_t now = clock_us();
  if (!first_step_) {
    first_step_ = {sums_, saver_ ? saver_->stats() : SavedStats{}, drainer_.drained(), update_us(),
                   optimizer_ ? optimizer_->stats().bytes : Bytes{}};
    update_time_->begin_counting(now_ns());
    backend_->begin_counting(issuer_.next_op());
  }
  if (last_step_us_ != 0) {
    ++sums_.num_steps;
    sums_.wall_us += now - last_step_us_;
  }
  last_step_us_ = now;
  if (!trace_) return;
  Span span;  // marks the end of a step: with micro-batches a trace shows only backward after forward
  span.lane = Lane::compute;
  span.verb = Verb::user;
  span.start_us = span.end_us = trace_->now_us();
  trace_->add(std::move(span));
}

void Engine::prepare_next_forward() {
  drop_prepared();
  const auto next = book_.expected_after_update();
  if (!next) return;
  count_ = {};
  count_.first_fetch = fetcher_.num_fetches();
  count_.first_fetched = fetcher_.fetched();
  following_ = {};
  following_.itinerary = next;
  following_.plan = plan_from(*next, 0);
  play_until(-1);
  prepared_ = following_;
  prepared_count_ = count_;
  prepared_fetches_ = fetcher_.num_fetches() - count_.first_fetch;
  prepared_residents_ = fetcher_.residents();
  following_ = {};
}

void Engine::drop_prepared() {
  if (!prepared_) return;
  unclaimed_fetches_ += prepared_fetches_;
  prepared_.reset();
}

std::vector<UnitId> Engine::next_forward_order() const {
  const std::lock_guard lock(mutex_);
  std::vector<UnitId> order;
  std::vector<bool> seen(units_.size(), false);
  const auto add = [&](UnitId unit) {
    if (seen[static_cast<std::size_t>(unit.value)]) return;
    seen[static_cast<std::size_t>(unit.value)] = true;
    order.push_back(unit);
  };
  const auto next = book_.expected_after_update();
  if (next) {
    for (const Visit& visit : book_.visits(*next)) {
      for (UnitId unit : visit.needs) add(unit);
    }
  }
  for (std::size_t i = 0; i < units_.size(); ++i) add(UnitId(static_cast<std::int32_t>(i)));
  return order;
}

void Engine::access_home(UnitId unit, bool write_weights) {
  const std::lock_guard lock(mutex_);
  settle(unit);
  if (auto& early = early_of(unit); early && early->is_draft()) {
    drop_early(unit);
    if (write_weights) early.reset();  // more writes may follow without a call
  }
  const UnitFacts& facts = facts_[static_cast<std::size_t>(unit.value)];
  Op op;
  op.lane = Lane::update;  // the calling thread runs it, not its stream: only waits order it
  op.verb = Verb::load;
  op.unit = unit;
  // The state is always written, so that ops of one unit on the update lane form a chain.
  op.accesses = {{facts.state, issuer_.next_version(facts.state), Access::Mode::write}};
  if (write_weights) op.accesses.push_back({facts.working, issuer_.next_version(facts.working), Access::Mode::write});
  // It gives no ticket: the caller is done with the home before its next call, so no op ever has to wait for it.
  try {
    wait_for_all(issuer_.begin(op).waits);
  } catch (...) {
    if (torn().empty()) throw;  // else the failure is known, and this may be the load that mends it
  }
  if (write_weights && collector_) collector_->note_load(unit);
  if (write_weights) following_ = {};  // inside of a pass: the rest is planned again without the stale copies
}

void Engine::access_held(UnitId unit, Stream stream) {
  const std::lock_guard lock(mutex_);
  continue_on(stream);
  settle(unit);
  gradient_is_written(unit);
  write_held(unit, stream);
}

void Engine::write_held(UnitId unit, Stream stream) {
  const BufferId held = facts_[static_cast<std::size_t>(unit.value)].held;
  Op op;
  op.verb = Verb::user;
  op.unit = unit;
  op.accesses = {{held, issuer_.next_version(held), Access::Mode::write}};
  if (!visit_) {
    finish_user_op(std::move(op), stream);
    return;
  }
  // Inside of a visit, in a gradient hook of the user's. Ops of one lane end in the order of their issue, so the
  // visit's op ends here. The visit goes on as another op, which ends when the user has written.
  const Access written = op.accesses.front();
  OpenVisit open = std::move(*visit_);
  visit_.reset();
  backend_->give(open.ticket, stream);
  std::exception_ptr failure;
  try {
    finish_user_op(std::move(op), stream);
  } catch (...) {
    failure = std::current_exception();
  }
  open.op.accesses.push_back(written);
  begin_op(open);
  NORIA_INVARIANT(open.waits.empty(), "a visit that goes on waits for nothing new");
  visit_ = std::move(open);
  if (failure) std::rethrow_exception(failure);
}

std::int64_t Engine::update_us() const { return launching_updates_.busy_us + (optimizer_ ? optimizer_->busy_us() : 0); }

namespace {

std::int64_t busy_us(const LaneStats& stats, Verb verb) {
  const auto found = stats.busy_us_by_verb.find(verb);
  return found == stats.busy_us_by_verb.end() ? 0 : found->second;
}

/// Shares out the time of a lane by bytes: a lane counts its time only as a whole.
std::pair<std::int64_t, std::int64_t> shared(const LaneStats& lane, Bytes one, Bytes other) {
  const Bytes all = one + other;
  if (all == Bytes{0}) return {0, 0};
  const double per_byte = static_cast<double>(lane.busy_us) / static_cast<double>(all.count);
  return {static_cast<std::int64_t>(per_byte * static_cast<double>(one.count)),
          static_cast<std::int64_t>(per_byte * static_cast<double>(other.count))};
}

}  // namespace

std::int64_t Engine::compute_us() const {
  const LaneStats compute = backend_->stats(Lane::compute);
  return busy_us(compute, Verb::forward) + busy_us(compute, Verb::backward);
}

StepSums Engine::step_sums() const {
  const std::lock_guard lock(mutex_);
  const FirstStep first = first_step_.value_or(FirstStep{});
  const auto lane = [&](Lane which) { return first_step_ ? backend_->counted(which) : backend_->stats(which); };
  StepSums sums = sums_;
  sums.forward_stall_us -= first.sums.forward_stall_us;
  sums.backward_stall_us -= first.sums.backward_stall_us;
  sums.forward_fetched -= first.sums.forward_fetched;
  sums.backward_fetched -= first.sums.backward_fetched;
  sums.drained -= first.sums.drained;
  sums.reduced -= first.sums.reduced;

  const LaneStats compute = lane(Lane::compute);
  sums.forward_us = busy_us(compute, Verb::forward);
  sums.backward_us = busy_us(compute, Verb::backward);
  const SavedStats saved = saver_ ? saver_->stats() : SavedStats{};
  const Bytes reloaded =
      (saved.reloaded - saved.reloaded_from_peers) - (first.saved.reloaded - first.saved.reloaded_from_peers);
  const Bytes offloaded =
      (saved.offloaded - saved.offloaded_to_peers) - (first.saved.offloaded - first.saved.offloaded_to_peers);
  std::tie(sums.forward_fetch_us, sums.backward_fetch_us) =
      shared(lane(Lane::fetch), sums.forward_fetched, sums.backward_fetched + reloaded);
  std::tie(sums.offload_us, sums.drain_us) = shared(lane(Lane::drain), offloaded, drainer_.drained() - first.drained);
  sums.peer_us = lane(Lane::peer).busy_us;
  sums.copied = lane(Lane::fetch).bytes + lane(Lane::drain).bytes;
  if (optimizer_) sums.updated = optimizer_->stats().bytes - first.updated;
  if (options_.lane) {
    const std::int64_t others = options_.lane->shards().size - 1;
    std::tie(sums.forward_collect_us, sums.backward_collect_us) =
        shared(lane(Lane::collect), sums.forward_fetched * others, sums.backward_fetched * others + sums.reduced);
  }
  const UpdateTime::Behind behind = update_time_->behind();
  sums.update_us = update_us() - first.update_us;
  sums.update_behind_forward_us = std::min(behind.forward_us, sums.update_us);
  sums.update_behind_backward_us = std::min(behind.backward_us, sums.update_us - sums.update_behind_forward_us);
  sums.update_exposed_us = sums.update_us - sums.update_behind_forward_us - sums.update_behind_backward_us;
  return sums;
}

LaneStats Engine::update_stats() const {
  const std::lock_guard lock(mutex_);
  LaneStats stats = launching_updates_;
  if (!optimizer_) return stats;
  const LaneStats pool = optimizer_->stats();
  stats.busy_us += pool.busy_us;
  stats.num_ops += pool.num_ops;
  stats.bytes += pool.bytes;
  for (const auto& [kind, us] : pool.stalled_us) stats.stalled_us[kind] += us;
  return stats;
}

}  // namespace noria
