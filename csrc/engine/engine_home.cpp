// Engine, second part: the home between passes, gradients that updates inside backward hold, and ranks.
#include "engine/engine.h"

#include <utility>

#include "base/errors.h"

namespace noria {

namespace {

// If such an op has failed, the home is as it was.
bool only_reads_home(Verb verb) {
  return verb == Verb::fetch || verb == Verb::gather || verb == Verb::stash || verb == Verb::read_weights;
}

}  // namespace

// ---- the home, seen from outside ----------------------------------------------------------------------------------

void Engine::access_home(UnitId unit, bool write_weights, bool writes_frozen) {
  const Entry entry(gate_);
  updates_.run_deferred(unit);
  drafts_.note_access(unit);
  const BufferId working = units_[unit].facts.working;
  std::vector<Access> more;
  if (write_weights) more.push_back({working, issuer_.next_version(working), Access::Mode::write});
  await_load(unit, more);
  if (!write_weights) return;
  if (writes_frozen && file_weights_ && file_weights_->has(unit)) file_weights_->note_written(unit);
  if (collector_) collector_->note_load(unit);
  runner_.forget_plan();
}

// Blocks until no op still uses the unit's state, nor what is in `more`. Returns false if one of these ops has failed
// and a unit is torn. Then the failure is known, and the caller may be the load that mends it.
bool Engine::await_load(UnitId unit, const std::vector<Access>& more) {
  const BufferId state = units_[unit].facts.state;
  Op op;
  op.lane = Lane::update;  // the calling thread runs it, not its stream: only waits order it
  op.verb = Verb::load;
  op.unit = unit;
  // The state is always written, so that ops of one unit on the update lane form a chain.
  op.accesses = {{state, issuer_.next_version(state), Access::Mode::write}};
  op.accesses.insert(op.accesses.end(), more.begin(), more.end());
  // It gives no ticket: the caller is done with the home before its next call, so no op ever has to wait for it.
  std::exception_ptr failure;
  for (const Ticket& ticket : issuer_.begin(op).waits) {
    try {
      ticket->wait_passed();
    } catch (...) {
      if (!only_reads_home(ticket->label.verb)) failure = std::current_exception();
    }
  }
  if (failure && updates_.torn().empty()) std::rethrow_exception(failure);
  return failure == nullptr;
}

void Engine::access_state(UnitId unit, bool writes, bool holds) {
  const Entry entry(gate_);
  NORIA_INVARIANT(parts_.has_file(unit), "its state lies in no file");
  files_->bring(unit);
  if (!await_load(unit, {files_->access(unit)})) {
    files_->bring_blank(unit);
    forget_failures();
  }
  if (writes) files_->note_changed(unit);
  if (holds) files_->hold(unit);
}

void Engine::release_states() {
  const Entry entry(gate_);
  if (files_) files_->release();
}

void Engine::check_weights(UnitId unit, bool awaits_writes) {
  const Entry entry(gate_);
  if (file_weights_ && file_weights_->has(unit)) file_weights_->check(unit, awaits_writes);
}

std::vector<Engine::LostWeights> Engine::lost_weights() const {
  const Entry entry(gate_);
  std::vector<LostWeights> lost;
  if (!file_weights_ || !file_weights_->is_any_lost()) return lost;
  for (UnitId unit : units_.ids()) {
    if (!file_weights_->has(unit)) continue;
    if (auto [times, why] = file_weights_->loss(unit); !why.empty()) lost.push_back({unit, times, std::move(why)});
  }
  return lost;
}

void Engine::clear_lost_weights(UnitId unit) {
  const Entry entry(gate_);
  NORIA_INVARIANT(file_weights_ && file_weights_->has(unit), "its weights lie in no file");
  file_weights_->clear_torn(unit);
}

LaneStats Engine::file_stats(Lane lane) const {
  const Entry entry(gate_);
  if (lane == Lane::read_weights) return file_weights_ ? file_weights_->stats() : LaneStats{};
  return files_ ? files_->stats(lane) : LaneStats{};
}

void Engine::access_held(UnitId unit, Stream stream) {
  const Entry entry(gate_);
  compute_.continue_on(stream);
  updates_.run_deferred(unit);
  drafts_.note_written(unit);
  compute_.write(unit, units_[unit].facts.held, stream);
}

void Engine::begin_scaling(UnitId unit, float divisor, float prefactor, Stream stream) {
  const Entry entry(gate_);
  compute_.continue_on(stream);
  updates_.run_deferred(unit);
  drafts_.begin_scaling(unit, divisor, prefactor);
  compute_.write(unit, units_[unit].facts.held, stream);
}

void Engine::keep_gradient(UnitId unit, Bytes offset, Bytes bytes) {
  const Entry entry(gate_);
  drainer_.note_reduced(unit, offset, bytes);
}

void Engine::drop_gradient(UnitId unit, Bytes offset, Bytes bytes) {
  const Entry entry(gate_);
  drainer_.forget(unit, offset, bytes);
  if (backward_updates_) backward_updates_->drop_gradient(unit, offset);
}

// ---- update="backward" --------------------------------------------------------------------------------------------

void Engine::hold_all(const UnitMap<std::byte*>& held, Stream stream) {
  const Entry entry(gate_);
  end_open_pass(stream);
  NORIA_INVARIANT(backward_updates_.has_value(), "no update runs inside backward");
  backward_updates_->hold_all(held);
}

bool Engine::holds_all() const {
  const Entry entry(gate_);
  return !backward_updates_ || backward_updates_->holds_all();
}

bool Engine::is_held_back(UnitId unit, Bytes offset) const {
  const Entry entry(gate_);
  return backward_updates_ &&
         (backward_updates_->is_held_back(unit, offset) || drainer_.is_unreduced(unit, offset, Bytes{1}));
}

std::vector<UnitId> Engine::unclaimed() const {
  const Entry entry(gate_);
  return backward_updates_ ? backward_updates_->unclaimed() : std::vector<UnitId>();
}

void Engine::update_held(Stream stream) {
  const Entry entry(gate_);
  NORIA_INVARIANT(backward_updates_.has_value(), "no update runs inside backward");
  backward_updates_->update_held(stream);
}

Held<BackwardUpdates> Engine::backward_updates() {
  NORIA_INVARIANT(backward_updates_.has_value(), "no update runs inside backward");
  return {gate_, *backward_updates_};
}

// ---- ranks that share the home ------------------------------------------------------------------------------------

void Engine::hold_unreduced(const UnitMap<std::byte*>& memory, Stream stream) {
  const Entry entry(gate_);
  end_open_pass(stream);
  NORIA_INVARIANT(options_.lane && !holds_unreduced_ && !pass_.phase && memory.size() == units_.size(),
                  "memory for gradients that are not reduced comes once, between passes");
  holds_unreduced_ = true;
  Bytes end;
  for (UnitId unit : units_.ids()) {
    const Bytes bytes = units_[unit].facts.gradients;
    if (bytes == Bytes{0}) continue;
    const Place place{Place::Kind::host, kUnreducedRegion};
    const BufferId buffer = buffers_.intern({place, end, bytes, Format::travel, Purpose::unreduced_gradient, unit});
    units_.hold_unreduced(unit, memory[unit], buffer);
    end += bytes;
    callbacks_.held_moved(unit, units_[unit].unreduced);
  }
}

bool Engine::holds_unreduced() const {
  const Entry entry(gate_);
  return holds_unreduced_;
}

void Engine::set_unsynced(bool unsynced) {
  const Entry entry(gate_);
  NORIA_INVARIANT(!unsynced || holds_unreduced_, "there is no memory for gradients that are not reduced");
  drainer_.set_unsynced(unsynced);
}

bool Engine::is_unreduced(UnitId unit, Bytes offset, Bytes bytes) const {
  const Entry entry(gate_);
  return drainer_.is_unreduced(unit, offset, bytes);
}

bool Engine::is_reduced(UnitId unit, Bytes offset, Bytes bytes) const {
  const Entry entry(gate_);
  return drainer_.is_reduced(unit, offset, bytes);
}

void Engine::end_reductions(Stream stream) {
  const Entry entry(gate_);
  if (!pass_.is(Phase::backward)) return;
  compute_.continue_on(stream);
  runner_.leave(stream);
  runner_.reduce_rest(stream);
}

std::vector<std::int64_t> Engine::exchange(std::vector<std::int64_t> numbers, SyncPoint point) {
  RankPosition position;
  {
    const Entry entry(gate_);
    NORIA_INVARIANT(collector_.has_value(), "no other rank shares this home");
    position = collector_->position();
  }
  CollectLane::Met met = options_.lane->exchange(std::move(numbers), point, position);
  const Entry entry(gate_);
  if (point == SyncPoint::backward) has_diverged_ = has_diverged_ || met.has_diverged;
  if (met.has_assisted) collector_->note_assisted();
  for (UnitId unit : met.taken) {
    collector_->note_taken(unit);
    drafts_.drop(unit);  // its gradients were not complete yet
  }
  return std::move(met.numbers);
}

}  // namespace noria
