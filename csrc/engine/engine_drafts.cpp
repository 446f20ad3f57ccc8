// The part of the engine that carries out updates before they are asked for; see engine.h, Note [Drafts].
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "base/errors.h"
#include "engine/engine.h"

namespace noria {
namespace {

bool is_same_range(const UpdatePiece& a, const UpdatePiece& b) { return a.offset == b.offset && a.count == b.count; }

bool has_same_scalars(const UpdatePiece& a, const UpdatePiece& b) {
  using Bits = std::array<std::uint32_t, sizeof(UpdateScalars) / sizeof(std::uint32_t)>;
  return std::bit_cast<Bits>(a.scalars) == std::bit_cast<Bits>(b.scalars);
}

bool updates_the_same(const UpdateJob& a, const UpdateJob& b) {
  const auto same_arrays = [](const UnitArrays& x, const UnitArrays& y) {
    return x.master == y.master && x.working == y.working && x.low == y.low && x.m == y.m && x.v == y.v;
  };
  return a.rule == b.rule && same_arrays(a.from, b.from) && a.gradient == b.gradient &&
         std::equal(a.pieces.begin(), a.pieces.end(), b.pieces.begin(), b.pieces.end(), is_same_range);
}

}  // namespace

void Engine::expect_update(UnitId unit, UpdateJob job) {
  const std::lock_guard lock(mutex_);
  auto& expected = drafts_[static_cast<std::size_t>(unit.value)];
  if (!unit_of(unit).spare || (expected && expected->ticket)) return;
  NORIA_INVARIANT(!job.in_place(), "a draft is written elsewhere");
  Draft draft;
  draft.awaited = job.gradient_bytes();
  draft.job = std::move(job);
  expected = std::move(draft);
}

bool Engine::is_drafted(UnitId unit) const {
  const std::lock_guard lock(mutex_);
  const auto& draft = drafts_[static_cast<std::size_t>(unit.value)];
  return draft && draft->ticket;
}

void Engine::begin_drafting(std::optional<ItineraryId> expected) {
  drop_drafts();
  landing_.assign(units_.size(), Bytes{});
  last_gradient_.assign(units_.size(), -1);
  if (last_backward_) is_last_[*std::exchange(last_backward_, std::nullopt)] = false;
  const auto known = expected ? is_last_.find(*expected) : is_last_.end();
  may_draft_ = known != is_last_.end() && known->second;
  if (!may_draft_) return;
  const std::vector<Visit>& visits = book_.visits(*expected);
  for (std::size_t i = 0; i < visits.size(); ++i) {
    for (UnitId unit : visits[i].gradients) {
      last_gradient_[static_cast<std::size_t>(unit.value)] = static_cast<std::int64_t>(i);
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

void Engine::drain_open() {
  const std::int64_t visit = book_.position();
  for (const auto& [unit, bytes] : drainer_.drain_open()) {
    const auto index = static_cast<std::size_t>(unit.value);
    auto& expected = drafts_[index];
    if (expected && expected->ticket) drop_draft(unit);  // more came than was foreseen
    if (!may_draft_) continue;
    landing_[index] += bytes;
    if (expected && visit >= last_gradient_[index] && landing_[index] == expected->awaited) draft(unit);
  }
}

void Engine::draft(UnitId unit) {
  Draft& made = *drafts_[static_cast<std::size_t>(unit.value)];
  const UnitFacts& facts = facts_[static_cast<std::size_t>(unit.value)];
  const Spare& spare = *unit_of(unit).spare;
  made.job.note = std::make_shared<std::atomic<std::uint64_t>>(0);
  Op op;
  op.lane = Lane::update;
  op.verb = Verb::draft;
  op.unit = unit;
  op.bytes = made.job.bytes();
  // The spare becomes the version after the unit's, so that no copy on the device is taken for it.
  issuer_.set_version(spare.working_buffer, issuer_.version(facts.working) + 1);
  issuer_.set_version(spare.state_buffer, issuer_.version(facts.state) + 1);
  op.accesses = {{facts.held, issuer_.version(facts.held), Access::Mode::read},
                 {facts.state, issuer_.version(facts.state), Access::Mode::read},
                 {facts.working, issuer_.version(facts.working), Access::Mode::read},
                 {spare.state_buffer, issuer_.version(spare.state_buffer), Access::Mode::write},
                 {spare.working_buffer, issuer_.version(spare.working_buffer), Access::Mode::write}};
  auto begun = issuer_.begin(op);
  made.ticket =
      optimizer_->submit(begun.label, made.job, std::move(begun.waits), urgency_[static_cast<std::size_t>(unit.value)]);
  issuer_.keep(op.id, made.ticket);
}

void Engine::drop_draft(UnitId unit) {
  auto& dropped = drafts_[static_cast<std::size_t>(unit.value)];
  if (!dropped || !dropped->ticket) return;
  optimizer_->recall(dropped->ticket);  // if it has begun: it writes where nobody looks
  dropped.reset();
  ++draft_counts_.dropped;
}

void Engine::drop_drafts() {
  for (std::size_t unit = 0; unit < drafts_.size(); ++unit) drop_draft(UnitId(static_cast<std::int32_t>(unit)));
}

void Engine::gradient_is_written(UnitId unit) {
  auto& read = drafts_[static_cast<std::size_t>(unit.value)];
  if (!read || !read->ticket) return;
  // One that has not begun need not be waited for.
  if (optimizer_->recall(read->ticket)) {
    read.reset();
    ++draft_counts_.dropped;
  } else {
    read->is_written = true;
  }
}

bool Engine::update_on_pool(UnitId unit, UpdateJob job, int priority) {
  const std::lock_guard lock(mutex_);
  NORIA_INVARIANT(optimizer_ != nullptr, "this engine has no host pool");
  auto draft = std::exchange(drafts_[static_cast<std::size_t>(unit.value)], std::nullopt);
  const bool is_drafted = draft && draft->ticket;
  const bool is_committed = is_drafted && updates_the_same(draft->job, job);
  if (is_committed) {
    const bool as_expected =
        std::equal(draft->job.pieces.begin(), draft->job.pieces.end(), job.pieces.begin(), has_same_scalars);
    if (as_expected && !draft->is_written) {
      ++draft_counts_.kept;
      change_places(unit);
      return true;
    }
    ++(as_expected ? draft_counts_.looked_at : draft_counts_.redone);
    if (!as_expected) optimizer_->recall(draft->ticket);
    job.to = draft->job.to;
    job.note = as_expected ? draft->job.note : nullptr;
    job.only_if_changed = as_expected;
    job.looks = looks_;
    change_places(unit);  // the op below then writes what is the unit's from now on
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
  custodian_.home_moved(unit, changed.working);
}

DraftCounts Engine::draft_counts() const {
  const std::lock_guard lock(mutex_);
  DraftCounts counts = draft_counts_;
  counts.unchanged = looks_->unchanged;
  counts.changed = looks_->changed;
  return counts;
}

}  // namespace noria
