#include "engine/drafts.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

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

void Drafts::expect(UnitId unit, UpdateJob job) {
  if (is_read(unit)) return;
  Early early;
  early.awaited = job.gradient_bytes();
  early.job = std::move(job);
  NORIA_INVARIANT(!early.is_draft() || (parts_.units[unit].spare && !early.job.in_place()),
                  "a draft is written elsewhere");
  eager_[unit] = std::move(early);
}

void Drafts::set_last_of(const std::optional<std::vector<UnitId>>& units) {
  last_of_.reset();
  if (!units) return;
  last_of_.emplace(parts_.units.size());
  for (UnitId unit : *units) (*last_of_)[unit] = true;
  is_any_last_ = !units->empty();
}

void Drafts::begin_scaling(UnitId unit) {
  if (!is_read(unit) || !parts_.optimizer->recall(eager_[unit]->ticket)) return;
  eager_[unit]->ticket = nullptr;
  eager_[unit]->is_recalled = true;
}

void Drafts::end_scaling(UnitId unit, float divisor, float prefactor) {
  auto& early = eager_[unit];
  if (!early || !(early->ticket || early->is_recalled)) return;
  const bool as_told = std::all_of(early->job.pieces.begin(), early->job.pieces.end(), [&](const UpdatePiece& piece) {
    return piece.scalars.divisor == divisor && piece.scalars.prefactor == prefactor;
  });
  if (!early->is_draft() || !as_told) {
    drop(unit);
    early.reset();
    return;
  }
  for (UpdatePiece& piece : early->job.pieces) piece.scalars.divisor = piece.scalars.prefactor = 1.0f;
  if (early->is_recalled) {
    draft(unit, *early);
    may_recall_ = true;
    return;
  }
  early->is_scaled = true;
  early->job.sums = nullptr;  // these sums are of the gradient before it was scaled
}

// ---- a backward ---------------------------------------------------------------------------------------------------

void Drafts::begin_backward(const PassState& pass, std::optional<ItineraryId> expected, bool is_synced) {
  if (!last_of_) drop_all();
  last_backward_.begin_backward();
  is_eager_ = is_synced && (last_of_ ? is_any_last_ : expected && last_backward_.is_last(*expected));
  if (is_eager_) timing_.begin_backward(expected ? &pass.book.visits(*expected) : nullptr);
  if (is_eager_ || parts_.options.ring) note_priorities(pass);
}

void Drafts::note_priorities(const PassState& pass) {
  const int not_needed = static_cast<int>(parts_.units.size());
  priority_.fill(not_needed);
  if (!pass.last_forward.valid()) return;
  int next = 0;
  for (const Visit& visit : pass.book.visits(pass.last_forward)) {
    for (UnitId unit : visit.needs) {
      if (priority_[unit] == not_needed) priority_[unit] = next++;
    }
  }
}

void Drafts::note_drained(std::int64_t position, const std::vector<std::pair<UnitId, Bytes>>& drained) {
  for (const auto& [unit, bytes] : drained) {
    drop(unit);  // work that has begun has read an incomplete gradient
    if (!is_eager_ || !brings_last(unit)) continue;
    auto& expected = eager_[unit];
    // A shard lands as a whole, so its bytes do not tell which gradients have come.
    const bool awaits_all = expected && parts_.collector == nullptr;
    const bool has_last =
        timing_.note_drained(unit, bytes, position, awaits_all ? std::optional(expected->awaited) : std::nullopt);
    if (!expected || !has_last) continue;
    if (expected->is_draft()) draft(unit, *expected);
    else expected->ticket = sum(unit, expected->job);
    may_recall_ = true;
  }
}

void Drafts::draft(UnitId unit, Early& made) {
  Issuer& issuer = parts_.issuer;
  const UnitFacts& facts = parts_.units[unit].facts;
  const Spare& spare = *parts_.units[unit].spare;
  made.job.note = std::make_shared<std::atomic<std::uint64_t>>(0);
  made.is_recalled = false;
  Op op;
  op.lane = Lane::update;
  op.verb = Verb::draft;
  op.unit = unit;
  op.bytes = made.job.bytes();
  // The spare becomes the version after the unit's, so no copy on the device is taken for it.
  issuer.set_version(spare.working_buffer, issuer.version(facts.working) + 1);
  issuer.set_version(spare.state_buffer, issuer.version(facts.state) + 1);
  op.accesses = {{facts.held, issuer.version(facts.held), Access::Mode::read},
                 {facts.state, issuer.version(facts.state), Access::Mode::read},
                 {facts.working, issuer.version(facts.working), Access::Mode::read},
                 {spare.state_buffer, issuer.version(spare.state_buffer), Access::Mode::write},
                 {spare.working_buffer, issuer.version(spare.working_buffer), Access::Mode::write}};
  auto begun = issuer.begin(op);
  made.ticket = parts_.optimizer->submit(begun.label, made.job, std::move(begun.waits), priority_of(unit));
  issuer.keep(op.id, made.ticket);
}

// ---- sums ---------------------------------------------------------------------------------------------------------

// Queues sums of squares. They are more urgent than any draft or update: a thread will block for them, and they take a
// fraction of the time of those.
Ticket Drafts::sum(UnitId unit, UpdateJob job) {
  Issuer& issuer = parts_.issuer;
  const EngineUnit& summed = parts_.units[unit];
  Op op;
  op.lane = Lane::update;
  op.verb = Verb::sum;
  op.unit = unit;
  op.bytes = job.bytes();
  op.accesses = {{summed.facts.held, issuer.version(summed.facts.held), Access::Mode::read},
                 {summed.sum, issuer.next_version(summed.sum), Access::Mode::write}};
  auto begun = issuer.begin(op);
  const Ticket ticket = parts_.optimizer->submit(begun.label, std::move(job), std::move(begun.waits), -1);
  issuer.keep(op.id, ticket);
  return ticket;
}

std::vector<std::vector<double>> Drafts::sums(std::vector<std::pair<UnitId, UpdateJob>> jobs) {
  std::vector<std::pair<Ticket, GradientSums>> awaited;
  for (auto& [unit, job] : jobs) {
    const auto& early = eager_[unit];
    // A draft that still waits for its turn would keep the caller waiting.
    const bool is_known = is_unedited(unit) && early->job.sums && early->job.gradient == job.gradient &&
                          has_same_ranges(early->job, job) && !parts_.optimizer->is_queued(early->ticket);
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

// ---- dropped ------------------------------------------------------------------------------------------------------

void Drafts::drop(UnitId unit) {
  if (!is_read(unit)) return;
  auto& dropped = eager_[unit];
  parts_.optimizer->recall(dropped->ticket);
  if (dropped->is_draft()) ++counts_.dropped;
  dropped.reset();
}

void Drafts::drop_all() {
  for (UnitId unit : eager_.ids()) drop(unit);
}

// Recalls all early work that has not begun, at the first write, so that no write waits for it. A clip writes every
// gradient in turn. Without the recall it would wait at each one for a draft that had just begun.
void Drafts::recall_all() {
  for (UnitId unit : eager_.ids()) {
    if (is_read(unit) && parts_.optimizer->recall(eager_[unit]->ticket)) drop(unit);
  }
}

void Drafts::note_written(UnitId unit) {
  if (!is_read(unit)) return;
  if (std::exchange(may_recall_, false)) recall_all();
  if (is_read(unit)) eager_[unit]->is_written = true;
}

void Drafts::note_access(UnitId unit, bool writes) {
  if (!eager_[unit] || !eager_[unit]->is_draft()) return;
  drop(unit);
  if (writes) eager_[unit].reset();  // more writes may follow without a call
}

// ---- updates ------------------------------------------------------------------------------------------------------

bool Drafts::update(UnitId unit, UpdateJob job, int priority) {
  if (parts_.collector != nullptr) parts_.collector->note_update(unit);
  const auto draft = std::exchange(eager_[unit], std::nullopt);
  const bool is_drafted = draft && draft->ticket && draft->is_draft();
  const bool is_committed = is_drafted && updates_the_same(draft->job, job);
  if (is_committed) {
    // A draft notes the bytes of its gradient before they were scaled. The scaled bytes cannot be compared with them.
    const bool may_be_known = !draft->is_written || !draft->is_scaled;
    const bool as_expected = may_be_known && std::equal(draft->job.pieces.begin(), draft->job.pieces.end(),
                                                        job.pieces.begin(), has_same_scalars);
    // The device may not know yet the late scale of this gradient. A job with late scales looks when it is known.
    if (as_expected && !draft->is_written && !job.has_late_scales()) {
      ++counts_.kept;
      updates_.note_committed(unit, draft->ticket);
      swap_with_spare(unit);
      return true;
    }
    commit(unit, *draft, job, as_expected);
  } else if (is_drafted) {
    parts_.optimizer->recall(draft->ticket);
    ++counts_.dropped;
  }
  submit(unit, std::move(job), priority, is_committed);
  return is_committed;
}

// Unit and spare change places, but the update is made anew: in any case, or if a look finds that the gradient has
// changed.
void Drafts::commit(UnitId unit, const Early& draft, UpdateJob& job, bool as_expected) {
  ++(as_expected ? counts_.looked_at : counts_.redone);
  if (as_expected) updates_.note_committed(unit, draft.ticket);
  else parts_.optimizer->recall(draft.ticket);
  job.to = draft.job.to;
  job.note = as_expected && draft.is_written ? draft.job.note : nullptr;
  if (as_expected) job.task = UpdateTask::update_if_changed;
  job.looks = looks_;
  swap_with_spare(unit);  // the update then writes what belongs to the unit from now on
}

void Drafts::submit(UnitId unit, UpdateJob job, int priority, bool is_committed) {
  Issuer& issuer = parts_.issuer;
  if (!is_committed) issuer.next_version(parts_.units[unit].facts.working);
  Op op = updates_.op_of(unit);
  if (is_committed) {
    const Spare& left = *parts_.units[unit].spare;
    op.accesses.push_back({left.state_buffer, issuer.version(left.state_buffer), Access::Mode::read});
    op.accesses.push_back({left.working_buffer, issuer.version(left.working_buffer), Access::Mode::read});
  }
  op.bytes = job.bytes();
  auto begun = issuer.begin(op);
  issuer.keep(op.id, parts_.optimizer->submit(begun.label, std::move(job), std::move(begun.waits), priority));
}

void Drafts::swap_with_spare(UnitId unit) {
  parts_.units.swap_with_spare(unit);
  is_swapped_[unit] = !is_swapped_[unit];
  parts_.callbacks.home_moved(unit, parts_.units[unit].working);
}

DraftCounts Drafts::counts() const {
  DraftCounts counts = counts_;
  counts.unchanged = looks_->unchanged;
  counts.changed = looks_->changed;
  return counts;
}

}  // namespace noria
