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
  return a.rule == b.rule && a.arrays == b.arrays && a.gradient == b.gradient && has_same_ranges(a, b) &&
         std::equal(a.pieces.begin(), a.pieces.end(), b.pieces.begin(), has_same_numbers);
}

}  // namespace

void Drafts::expect(UnitId unit, UpdateJob job) {
  // A rank that assists others may give them its weights at any time, so it makes no draft.
  const bool may_draft = !parts_.options.lane || !parts_.options.lane->assists();
  if (is_read(unit) || (job.task == UpdateTask::update && !may_draft)) return;
  Early early;
  early.awaited = job.gradient_bytes();
  if (job.task == UpdateTask::update) make_draft(job, parts_.units[unit].undo_log);
  early.job = std::move(job);
  eager_[unit] = std::move(early);
}

void Drafts::set_last_of(const std::optional<std::vector<UnitId>>& units) {
  last_of_.reset();
  if (!units) return;
  last_of_.emplace(parts_.units.size());
  for (UnitId unit : *units) (*last_of_)[unit] = true;
  is_any_last_ = !units->empty();
}

void Drafts::begin_scaling(UnitId unit, float divisor, float prefactor) {
  if (!is_read(unit)) return;
  Early& early = *eager_[unit];
  const bool as_told = std::all_of(early.job.pieces.begin(), early.job.pieces.end(), [&](const UpdatePiece& piece) {
    return piece.scalars.divisor == divisor && piece.scalars.prefactor == prefactor;
  });
  if (!early.is_draft() || !as_told) {
    drop(unit);
  } else if (parts_.optimizer->recall(early.ticket)) {
    early.ticket = nullptr;
    early.is_recalled = true;
  }
}

void Drafts::end_scaling(UnitId unit) {
  auto& early = eager_[unit];
  if (!early || !(early->ticket || early->is_recalled)) {
    early.reset();  // what was expected is of a gradient that is not yet scaled
    return;
  }
  // From now on the gradient is as the draft has seen it, or will see it.
  for (UpdatePiece& piece : early->job.pieces) piece.scalars.divisor = piece.scalars.prefactor = 1.0f;
  if (early->is_recalled) {
    draft(unit, *early);
    may_recall_ = true;
  } else {
    early->job.sums = nullptr;  // these sums are of the gradient before it was scaled
  }
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
    drop(unit);  // sums that have begun are of an incomplete gradient
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
  made.is_recalled = false;
  made.ticket = submit(unit, Verb::draft, made.job, priority_of(unit));
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
    const bool is_known = is_read(unit) && early->job.sums && early->job.gradient == job.gradient &&
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
  const Early dropped = *std::exchange(eager_[unit], std::nullopt);
  const bool is_recalled = parts_.optimizer->recall(dropped.ticket);
  if (!dropped.is_draft()) return;
  ++(is_recalled ? counts_.dropped : counts_.undone);
  // More urgent than any update: what comes next waits for it.
  if (!is_recalled) submit(unit, Verb::undo, undo_of(dropped.job), -1);
}

void Drafts::drop_all() {
  for (UnitId unit : eager_.ids()) drop(unit);
}

// Recalls all early work that has not begun, at the first write, so that no write waits for it. A clip writes every
// gradient in turn. Without the recall it would wait at each one for a draft that had just begun.
void Drafts::recall_all() {
  for (UnitId unit : eager_.ids()) {
    if (is_read(unit) && parts_.optimizer->is_queued(eager_[unit]->ticket)) drop(unit);
  }
}

void Drafts::note_written(UnitId unit) {
  if (!is_read(unit)) return;
  if (std::exchange(may_recall_, false)) recall_all();
  drop(unit);
}

void Drafts::note_access(UnitId unit) {
  if (!eager_[unit] || !eager_[unit]->is_draft()) return;
  drop(unit);
  eager_[unit].reset();  // a write to what is looked at now may come without a call
}

// ---- updates ------------------------------------------------------------------------------------------------------

void Drafts::update(UnitId unit, UpdateJob job, int priority) {
  if (parts_.collector != nullptr) parts_.collector->note_update(unit);
  if (!is_drafted(unit) || !updates_the_same(eager_[unit]->job, job)) {
    drop(unit);
    eager_[unit].reset();
    submit(unit, Verb::update, std::move(job), priority);
    return;
  }
  const Early draft = *std::exchange(eager_[unit], std::nullopt);
  const bool as_expected =
      std::equal(draft.job.pieces.begin(), draft.job.pieces.end(), job.pieces.begin(), has_same_scalars);
  const bool may_change = job.has_late_scales();  // the device may not know yet
  if (parts_.optimizer->recall(draft.ticket)) {   // an update without a log is cheaper
    if (!as_expected) ++counts_.dropped;
    else if (!may_change) ++counts_.kept;
    submit(unit, Verb::update, std::move(job), priority);
    return;
  }
  ++(!as_expected ? counts_.redone : may_change ? counts_.looked_at : counts_.kept);
  updates_.note_kept(unit, draft.ticket);
  if (as_expected && !may_change && draft.ticket->passed() && draft.job.progress->num_left_out == 0) return;
  make_redo(job, draft.job);
  if (as_expected && may_change) job.looks = looks_;
  submit(unit, Verb::update, std::move(job), priority);
}

Ticket Drafts::submit(UnitId unit, Verb verb, UpdateJob job, int priority) {
  Issuer& issuer = parts_.issuer;
  issuer.next_version(parts_.units[unit].facts.working);
  Op op = updates_.op_of(unit, /*reads_scales=*/verb == Verb::update);
  op.verb = verb;
  op.bytes = job.bytes();
  auto begun = issuer.begin(op);
  Ticket ticket = parts_.optimizer->submit(begun.label, std::move(job), std::move(begun.waits), priority);
  issuer.keep(op.id, ticket);
  updates_.note_issued(unit);
  return ticket;
}

DraftCounts Drafts::counts() const {
  DraftCounts counts = counts_;
  counts.unchanged = looks_->unchanged;
  counts.changed = looks_->changed;
  return counts;
}

}  // namespace noria
