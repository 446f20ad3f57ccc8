// Works on gradients before `step` asks for it, as a part of the engine: drafts, and sums of squares; see engine.h,
// Note [Drafts].
#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "engine/engine.h"

namespace noria {
namespace {

bool is_same_range(const UpdatePiece& a, const UpdatePiece& b) { return a.offset == b.offset && a.count == b.count; }

bool has_same_numbers(const UpdatePiece& a, const UpdatePiece& b) {
  return a.first == b.first && a.first_block == b.first_block;
}

bool has_same_scalars(const UpdatePiece& a, const UpdatePiece& b) { return have_same_bits(a.scalars, b.scalars); }

bool has_same_ranges(const UpdateJob& a, const UpdateJob& b) {
  return std::equal(a.pieces.begin(), a.pieces.end(), b.pieces.begin(), b.pieces.end(), is_same_range);
}

bool updates_the_same(const UpdateJob& a, const UpdateJob& b) {
  const auto same_arrays = [](const UnitArrays& x, const UnitArrays& y) {
    return x.master == y.master && x.working == y.working && x.low == y.low && x.m == y.m && x.v == y.v;
  };
  return a.rule == b.rule && same_arrays(a.from, b.from) && a.gradient == b.gradient && has_same_ranges(a, b) &&
         std::equal(a.pieces.begin(), a.pieces.end(), b.pieces.begin(), has_same_numbers);
}

}  // namespace

void Engine::expect_update(UnitId unit, UpdateJob job) {
  const std::lock_guard lock(mutex_);
  auto& expected = early_of(unit);
  if (expected && expected->ticket) return;
  Early early;
  early.awaited = job.gradient_bytes();
  early.job = std::move(job);
  NORIA_INVARIANT(!early.is_draft() || (unit_of(unit).spare && !early.job.in_place()), "a draft is written elsewhere");
  expected = std::move(early);
}

void Engine::set_last_of(const std::optional<std::vector<UnitId>>& units) {
  const std::lock_guard lock(mutex_);
  last_of_.reset();
  if (!units) return;
  last_of_.emplace(units_.size(), false);
  for (UnitId unit : *units) (*last_of_)[static_cast<std::size_t>(unit.value)] = true;
}

void Engine::begin_scaling(UnitId unit, Stream stream) {
  const std::lock_guard lock(mutex_);
  continue_on(stream);
  settle(unit);
  auto& early = early_of(unit);
  if (early && early->ticket && optimizer_->recall(early->ticket)) {
    early->ticket = nullptr;
    early->is_recalled = true;
  }
  write_held(unit, stream);
}

void Engine::end_scaling(UnitId unit, float divisor, float prefactor) {
  const std::lock_guard lock(mutex_);
  auto& early = early_of(unit);
  if (!early || !(early->ticket || early->is_recalled)) return;
  const bool is_recalled = early->is_recalled;
  const bool as_told = std::all_of(early->job.pieces.begin(), early->job.pieces.end(), [&](const UpdatePiece& piece) {
    return piece.scalars.divisor == divisor && piece.scalars.prefactor == prefactor;
  });
  if (!early->is_draft() || !as_told) {
    drop_early(unit);
    early.reset();
    return;
  }
  for (UpdatePiece& piece : early->job.pieces) piece.scalars.divisor = piece.scalars.prefactor = 1.0f;
  if (is_recalled) {
    draft(unit, *early);
    may_recall_ = true;
    return;
  }
  early->is_scaled = true;
  early->job.sums = nullptr;  // these sums are of the gradient before it was scaled
}

bool Engine::is_read_early(UnitId unit) const {
  const std::lock_guard lock(mutex_);
  const auto& early = early_[static_cast<std::size_t>(unit.value)];
  return early && early->ticket;
}

void Engine::begin_early_work(std::optional<ItineraryId> expected) {
  if (!last_of_) drop_all_early();
  landing_.assign(units_.size(), Bytes{});
  last_gradient_.assign(units_.size(), -1);
  if (last_backward_) is_last_[*std::exchange(last_backward_, std::nullopt)] = false;
  const auto known = expected ? is_last_.find(*expected) : is_last_.end();
  const bool is_last = last_of_ ? std::find(last_of_->begin(), last_of_->end(), true) != last_of_->end()
                                : known != is_last_.end() && known->second;
  is_early_ = is_last && !drainer_.is_unsynced();
  if (!is_early_ && !in_backward_) return;
  if (is_early_ && expected) {
    std::int64_t index = 0;
    for (const Visit& visit : book_.visits(*expected)) {
      for (UnitId unit : visit.gradients) last_gradient_[static_cast<std::size_t>(unit.value)] = index;
      ++index;
    }
  }
  urgency_.assign(units_.size(), static_cast<int>(units_.size()));
  int next = 0;
  if (!last_forward_.valid()) return;
  for (const Visit& visit : book_.visits(last_forward_)) {
    for (UnitId unit : visit.needs) {
      int& urgency = urgency_[static_cast<std::size_t>(unit.value)];
      if (urgency == static_cast<int>(units_.size())) urgency = next++;
    }
  }
}

bool Engine::expects_step() const {
  const std::lock_guard lock(mutex_);
  return is_early_;
}

int Engine::urgency_of(UnitId unit) const {
  const auto index = static_cast<std::size_t>(unit.value);
  return index < urgency_.size() ? urgency_[index] : static_cast<int>(units_.size());
}

void Engine::drain_open() {
  const std::int64_t visit = book_.position();
  for (const auto& [unit, bytes] : drainer_.drain_open()) {
    const auto index = static_cast<std::size_t>(unit.value);
    if (in_backward_) {
      std::set<Bytes> arrived = std::exchange(in_backward_->arriving[index], {});
      if (!drainer_.is_unsynced()) in_backward_->come[index].merge(arrived);
    }
    auto& expected = early_[index];
    if (expected && expected->ticket) drop_early(unit);  // more gradients came than were foreseen
    if (!is_early_ || (last_of_ && !(*last_of_)[index])) continue;
    landing_[index] += bytes;
    if (!expected || visit < last_gradient_[index]) continue;
    // A shard lands as a whole, whichever gradients it contains. `step` does not ask for gradients that no rank has.
    if (!options_.lane && landing_[index] != expected->awaited) continue;
    if (expected->is_draft()) draft(unit, *expected);
    else expected->ticket = sum(unit, expected->job);
    may_recall_ = true;
  }
}

// Queues sums of squares. They are more urgent than any draft or update: a thread will block for them, and they take a
// fraction of the time of those.
Ticket Engine::sum(UnitId unit, UpdateJob job) {
  const EngineUnit& summed = unit_of(unit);
  Op op;
  op.lane = Lane::update;
  op.verb = Verb::sum;
  op.unit = unit;
  op.bytes = job.bytes();
  op.accesses = {{summed.facts.held, issuer_.version(summed.facts.held), Access::Mode::read},
                 {summed.sum, issuer_.next_version(summed.sum), Access::Mode::write}};
  auto begun = issuer_.begin(op);
  const Ticket ticket = optimizer_->submit(begun.label, std::move(job), std::move(begun.waits), -1);
  issuer_.keep(op.id, ticket);
  return ticket;
}

std::vector<std::vector<double>> Engine::sum_gradients(std::vector<std::pair<UnitId, UpdateJob>> jobs, Stream stream) {
  const std::lock_guard lock(mutex_);
  NORIA_INVARIANT(optimizer_ != nullptr, "this engine has no host pool");
  end_passes(stream);
  if (shows_gradients()) note_edits(Stage::step, stream);
  std::vector<std::pair<Ticket, GradientSums>> awaited;
  for (auto& [unit, job] : jobs) {
    const auto& early = early_of(unit);
    // A draft that still waits for its turn would keep the caller waiting.
    const bool is_known = early && early->ticket && !early->is_written && early->job.sums &&
                          early->job.gradient == job.gradient && has_same_ranges(early->job, job) &&
                          !optimizer_->is_queued(early->ticket);
    if (is_known) {
      awaited.emplace_back(early->ticket, early->job.sums);
    } else {
      job.sums = std::make_shared<std::vector<double>>();
      GradientSums sums = job.sums;
      awaited.emplace_back(sum(unit, std::move(job)), std::move(sums));
    }
  }
  std::vector<std::vector<double>> result;
  for (const auto& [ticket, sums] : awaited) {
    ticket->wait_passed();
    result.push_back(*sums);
  }
  return result;
}

void Engine::draft(UnitId unit, Early& made) {
  const UnitFacts& facts = facts_[static_cast<std::size_t>(unit.value)];
  const Spare& spare = *unit_of(unit).spare;
  made.job.note = std::make_shared<std::atomic<std::uint64_t>>(0);
  made.is_recalled = false;
  Op op;
  op.lane = Lane::update;
  op.verb = Verb::draft;
  op.unit = unit;
  op.bytes = made.job.bytes();
  // The spare becomes the version after the unit's, so no copy on the device is taken for it.
  issuer_.set_version(spare.working_buffer, issuer_.version(facts.working) + 1);
  issuer_.set_version(spare.state_buffer, issuer_.version(facts.state) + 1);
  op.accesses = {{facts.held, issuer_.version(facts.held), Access::Mode::read},
                 {facts.state, issuer_.version(facts.state), Access::Mode::read},
                 {facts.working, issuer_.version(facts.working), Access::Mode::read},
                 {spare.state_buffer, issuer_.version(spare.state_buffer), Access::Mode::write},
                 {spare.working_buffer, issuer_.version(spare.working_buffer), Access::Mode::write}};
  auto begun = issuer_.begin(op);
  made.ticket = optimizer_->submit(begun.label, made.job, std::move(begun.waits), urgency_of(unit));
  issuer_.keep(op.id, made.ticket);
}

void Engine::drop_early(UnitId unit) {
  auto& dropped = early_of(unit);
  if (!dropped || !dropped->ticket) return;
  optimizer_->recall(dropped->ticket);  // if it has begun, it writes where no op reads
  if (dropped->is_draft()) ++draft_counts_.dropped;
  dropped.reset();
}

void Engine::drop_all_early() {
  for (std::size_t unit = 0; unit < early_.size(); ++unit) drop_early(UnitId(static_cast<std::int32_t>(unit)));
}

// Recalls all early work that has not begun, at the first write, so that no write waits for it. A clip writes every
// gradient in turn. Without the recall it would wait at each one for a draft that had just begun.
void Engine::recall_early() {
  for (std::size_t i = 0; i < early_.size(); ++i) {
    auto& early = early_[i];
    if (early && early->ticket && optimizer_->recall(early->ticket)) drop_early(UnitId(static_cast<std::int32_t>(i)));
  }
}

void Engine::gradient_is_written(UnitId unit) {
  auto& read = early_of(unit);
  if (!read || !read->ticket) return;
  if (std::exchange(may_recall_, false)) recall_early();
  if (read && read->ticket) read->is_written = true;
}

bool Engine::update_on_pool(UnitId unit, UpdateJob job, int priority) {
  const std::lock_guard lock(mutex_);
  NORIA_INVARIANT(optimizer_ != nullptr, "this engine has no host pool");
  if (collector_) collector_->note_update(unit);
  auto draft = std::exchange(early_of(unit), std::nullopt);
  const bool is_drafted = draft && draft->ticket && draft->is_draft();
  const bool is_committed = is_drafted && updates_the_same(draft->job, job);
  if (is_committed) {
    // A draft notes the bytes of its gradient before they were scaled. The scaled bytes cannot be compared with them.
    const bool may_be_known = !draft->is_written || !draft->is_scaled;
    const bool as_expected = may_be_known && std::equal(draft->job.pieces.begin(), draft->job.pieces.end(),
                                                        job.pieces.begin(), has_same_scalars);
    // The device may not know yet the late scale of this gradient. A job with late scales looks when it is known.
    if (as_expected && !draft->is_written && !job.has_late_scales()) {
      ++draft_counts_.kept;
      committed_[static_cast<std::size_t>(unit.value)] = draft->ticket;
      change_places(unit);
      return true;
    }
    ++(as_expected ? draft_counts_.looked_at : draft_counts_.redone);
    if (as_expected) committed_[static_cast<std::size_t>(unit.value)] = draft->ticket;
    if (!as_expected) optimizer_->recall(draft->ticket);
    job.to = draft->job.to;
    job.note = as_expected && draft->is_written ? draft->job.note : nullptr;
    if (as_expected) job.task = UpdateTask::update_if_changed;
    job.looks = looks_;
    change_places(unit);  // the op below then writes what belongs to the unit from now on
  } else if (is_drafted) {
    optimizer_->recall(draft->ticket);
    ++draft_counts_.dropped;
  }
  const UnitFacts& facts = facts_[static_cast<std::size_t>(unit.value)];
  if (!is_committed) issuer_.next_version(facts.working);
  Op op = update_op(unit);
  if (is_committed) {
    const Spare& left = *unit_of(unit).spare;
    op.accesses.push_back({left.state_buffer, issuer_.version(left.state_buffer), Access::Mode::read});
    op.accesses.push_back({left.working_buffer, issuer_.version(left.working_buffer), Access::Mode::read});
  }
  op.bytes = job.bytes();
  auto begun = issuer_.begin(op);
  issuer_.keep(op.id, optimizer_->submit(begun.label, std::move(job), std::move(begun.waits), priority));
  return is_committed;
}

void Engine::change_places(UnitId unit) {
  EngineUnit& changed = unit_of(unit);
  Spare& spare = *changed.spare;
  std::swap(changed.working, spare.working);
  std::swap(changed.facts.working, spare.working_buffer);
  std::swap(changed.facts.state, spare.state_buffer);
  facts_[static_cast<std::size_t>(unit.value)] = changed.facts;
  moved_[static_cast<std::size_t>(unit.value)] = !moved_[static_cast<std::size_t>(unit.value)];
  callbacks_.home_moved(unit, changed.working);
}

DraftCounts Engine::draft_counts() const {
  const std::lock_guard lock(mutex_);
  DraftCounts counts = draft_counts_;
  counts.unchanged = looks_->unchanged;
  counts.changed = looks_->changed;
  return counts;
}

}  // namespace noria
