#include "engine/backward_updates.h"

#include <utility>

#include "base/errors.h"

namespace noria {
namespace {

constexpr const char* kRemedy = "wrap with update=\"auto\", which holds every gradient until step()";

}  // namespace

BackwardUpdates::BackwardUpdates(EngineParts parts, const PassState& pass, ComputeLane& compute, Updates& updates,
                                 Drafts& drafts, Drainer& drainer, GradientRing ring)
    : parts_(parts),
      pass_(pass),
      compute_(compute),
      updates_(updates),
      drafts_(drafts),
      drainer_(drainer),
      ring_(std::move(ring)),
      expected_(parts.units.size()),
      arriving_(parts.units.size()),
      arrived_(parts.units.size()),
      slot_(parts.units.size()),
      completion_(parts.units.size()),
      is_updated_(parts.units.size()),
      sums_(parts.units.size()) {}

void BackwardUpdates::expect(UnitId unit, Expected update) {
  if (update.job) {
    NORIA_INVARIANT(update.job->pieces.size() == update.gradients.size(), "each piece is of one gradient");
  }
  expected_[unit] = std::move(update);
}

void BackwardUpdates::forget_expected() { expected_.fill(std::nullopt); }

void BackwardUpdates::set_accumulating(bool accumulating) {
  NORIA_INVARIANT(!accumulating || !ring_, "the gradient ring cannot accumulate");
  accumulating_ = accumulating;
}

std::vector<UnitId> BackwardUpdates::unclaimed() const {
  std::vector<UnitId> units;
  for (const Updated& each : unclaimed_) units.push_back(each.unit);
  return units;
}

std::vector<BackwardUpdates::Updated> BackwardUpdates::take_updated(const std::set<UnitId>& units) {
  std::vector<Updated> taken;
  std::erase_if(unclaimed_, [&](Updated& each) {
    if (!units.contains(each.unit)) return false;
    taken.push_back(std::move(each));
    return true;
  });
  return taken;
}

std::map<Bytes, double> BackwardUpdates::sums(UnitId unit) const {
  const Sums& known = sums_[unit];
  std::map<Bytes, double> found;
  if (!known.update || !known.sums) return found;
  known.update->wait_passed();
  for (std::size_t i = 0; i < known.gradients.size(); ++i) found[known.gradients[i]] = (*known.sums)[i];
  return found;
}

std::set<Bytes> BackwardUpdates::used_now(UnitId unit) const {
  NORIA_INVARIANT(!unclaimed_.empty() && unclaimed_.back().unit == unit, "another unit is updated now");
  return unclaimed_.back().come;
}

// ---- memory -------------------------------------------------------------------------------------------------------

void BackwardUpdates::hold_all(const UnitMap<std::byte*>& held) {
  NORIA_INVARIANT(ring_ && !pass_.phase && held.size() == parts_.units.size(),
                  "memory for all gradients comes once, between passes");
  ring_.reset();
  Bytes end;
  for (UnitId unit : parts_.units.ids()) {
    if (parts_.units[unit].facts.gradients == Bytes{0}) continue;
    std::byte* const memory = held[unit];
    const Bytes bytes = held_bytes(unit);
    const Place place{Place::Kind::host, kHeldRegion};
    parts_.units.hold(unit, memory,
                      parts_.buffers.intern({place, end, bytes, Format::travel, Purpose::held_gradient, unit}));
    end += bytes;
    if (parts_.collector == nullptr) parts_.callbacks.held_moved(unit, memory);
  }
}

std::optional<int> BackwardUpdates::take_slot() {
  return ring_->take([&](int free) {
    const auto reader = reader_.find(free);
    return reader == reader_.end() || reader->second->passed();
  });
}

void BackwardUpdates::hold(UnitId unit) {
  if (parts_.units[unit].held != nullptr) return;
  auto slot = take_slot();
  if (!slot) {  // some are postponed; of others the expected backward may know better than the forwards' count
    const std::int64_t position = pass_.book.position();
    for (UnitId other : slot_.ids()) {
      if (slot_[other] && (completed_.contains(other) || completion_.is_past(other, position))) update(other);
    }
    slot = take_slot();
  }
  if (!slot) refuse_full_ring(unit);
  slot_[unit] = slot;
  std::byte* const memory = ring_->at(*slot);
  const Place place{Place::Kind::host, kRingRegion};
  parts_.units.hold(unit, memory,
                    parts_.buffers.intern(
                        {place, ring_->offset(*slot), held_bytes(unit), Format::travel, Purpose::held_gradient, unit}));
  if (parts_.collector == nullptr) parts_.callbacks.held_moved(unit, memory);  // else gradients are added elsewhere
}

void BackwardUpdates::refuse_full_ring(UnitId unit) const {
  std::string waiting;
  for (UnitId other : slot_.ids()) {
    if (slot_[other]) waiting += (waiting.empty() ? "" : ", ") + parts_.units[other].facts.name;
  }
  throw UsageError("gradients of few units on their way at once under update=\"backward\", as each is visited as often "
                   "in backward as in forward",
                   "no room for those of \"" + parts_.units[unit].facts.name + "\" beside the incomplete ones of " +
                       waiting,
                   std::string("run forwards that no backward follows under torch.no_grad(), or ") + kRemedy);
}

Bytes BackwardUpdates::held_bytes(UnitId unit) const {
  const Bytes whole = parts_.units[unit].facts.gradients;
  return parts_.collector != nullptr ? parts_.collector->shards().bytes_of(whole) : whole;
}

void BackwardUpdates::release_held(UnitId unit) {
  if (!slot_[unit]) return;
  ring_->release(*std::exchange(slot_[unit], std::nullopt));
  parts_.units.release_held(unit);
}

// ---- visits -------------------------------------------------------------------------------------------------------

void BackwardUpdates::end_forward(ItineraryId forward) {
  for (const Visit& visit : pass_.book.visits(forward)) {
    for (UnitId unit : visit.needs) completion_.note_forward(unit);
  }
}

bool BackwardUpdates::count_use(const std::vector<UnitId>& units) {
  if (!is_counted_) return false;
  for (UnitId unit : units) {
    if (pass_.is(Phase::forward)) completion_.note_forward(unit);
    else completion_.note_backward(unit, completes(unit));
  }
  return true;
}

void BackwardUpdates::begin_backward(std::optional<ItineraryId> expected) {
  completion_.begin_backward(expected ? &pass_.book.visits(*expected) : nullptr);
  is_updated_.fill(false);
  completed_.clear();
  if (parts_.files != nullptr) parts_.files->bring_ahead();
  for (UnitId unit : parts_.units.ids()) {
    drainer_.take_arrivals(unit);
    if (completes(unit)) completion_.expect(unit);
  }
}

void BackwardUpdates::note_drained(const std::vector<std::pair<UnitId, Bytes>>& drained) {
  for (const auto& [unit, bytes] : drained) {
    std::set<Bytes> arrived = std::exchange(arriving_[unit], {});
    if (!drainer_.is_unsynced()) arrived_[unit].merge(arrived);
  }
}

void BackwardUpdates::end_visit(const Visit& visit, bool is_recomputed) {
  if (!pass_.is(Phase::backward)) return;
  const std::int64_t position = pass_.book.position();
  for (UnitId unit : visit.needs) {
    if (!is_recomputed) completion_.note_backward(unit, completes(unit));
    if (completes(unit) && completion_.is_complete(unit, position)) complete(unit);
  }
}

void BackwardUpdates::refuse_updated(UnitId unit, const std::string& what) {
  if (!is_updated_[unit] || !pass_.is(Phase::backward)) return;
  const std::string name = "\"" + parts_.units[unit].facts.name + "\"";
  updates_.mark_torn("backward updated " + name + " before it was done with it");
  throw UsageError("each unit visited as often in backward as in forward under update=\"backward\"",
                   name + ": " + what + " in the backward that had updated it already", kRemedy);
}

// ---- updates ------------------------------------------------------------------------------------------------------

void BackwardUpdates::complete(UnitId unit) {
  if (parts_.has_file(unit)) {
    const auto [found, is_new] = completed_.try_emplace(unit, static_cast<int>(completed_.size()));
    if (parts_.files->postpones(found->second)) return;
  }
  update(unit);
}

void BackwardUpdates::update(UnitId unit) {
  if (arrived_[unit].empty()) {
    release_held(unit);
    return;
  }
  NORIA_INVARIANT(expected_[unit].has_value(), "it is not known how to update " + parts_.units[unit].facts.name);
  Updated& claimed = unclaimed_.emplace_back(Updated{unit, {}, std::exchange(arrived_[unit], {})});
  drainer_.forget_reduced(unit);
  is_updated_[unit] = true;
  if (!expected_[unit]->job) {
    update_here(unit, claimed);
    return;
  }
  UpdateJob job = take_job(unit, claimed);
  if (parts_.collector != nullptr) {
    parts_.collector->note_update(unit);
    job.sums = std::make_shared<std::vector<double>>();
  }
  Issuer& issuer = parts_.issuer;
  issuer.next_version(parts_.units[unit].facts.working);
  Sums& sums = sums_[unit];
  sums = {nullptr, job.sums, {}};
  for (const auto& [offset, scalars] : claimed.pieces) sums.gradients.push_back(offset);
  Op op = updates_.op_of(unit);
  op.bytes = job.bytes();
  auto begun = issuer.begin(op);
  const int priority = drafts_.priority_of(unit);
  const Ticket ticket = parts_.optimizer->submit(begun.label, std::move(job), std::move(begun.waits), priority);
  issuer.keep(op.id, ticket);
  updates_.note_issued(unit);
  if (parts_.has_file(unit)) parts_.files->note_used(unit);
  sums.update = ticket;
  if (slot_[unit]) reader_[*slot_[unit]] = ticket;
  release_held(unit);
}

void BackwardUpdates::update_here(UnitId unit, Updated& claimed) {
  NORIA_INVARIANT(parts_.collector == nullptr, "ranks that share the home update on the pool");
  for (const Bytes offset : claimed.come) claimed.pieces.emplace_back(offset, UpdateScalars{});
  updates_.defer(unit);
  updates_.run_deferred(unit);
  release_held(unit);
}

// Fills the job with the gradients that have come, and records them in `claimed`. If ranks share the home, other ranks
// may have gradients that this rank does not know of before the pass has ended. Then the job names all pieces, and
// leaves out those that no rank has when it begins.
UpdateJob BackwardUpdates::take_job(UnitId unit, Updated& claimed) {
  const bool is_known = parts_.collector == nullptr || !pass_.phase;
  const Expected& expected = *expected_[unit];
  UpdateJob job = *expected.job;
  job.gradient = parts_.units[unit].held;
  job.pieces.clear();
  std::vector<std::optional<std::size_t>> asked;  // by piece: the parameter whose arrival decides; none: it has come
  for (std::size_t i = 0; i < expected.gradients.size(); ++i) {
    const Bytes offset = expected.gradients[i];
    const bool has_come = claimed.come.contains(offset);
    if (is_known && !has_come) continue;
    job.pieces.push_back(expected.job->pieces[i]);
    claimed.pieces.emplace_back(offset, expected.job->pieces[i].scalars);
    asked.push_back(has_come ? std::nullopt : std::optional(parts_.units[unit].parameter_at(offset)));
  }
  if (is_known) {
    NORIA_INVARIANT(job.pieces.size() == claimed.come.size(), "a gradient came that no update wants");
    return job;
  }
  job.wants = [arrived = drainer_.take_arrivals(unit), asked](std::size_t piece) {
    return !asked[piece] || (arrived && arrived->contains(*asked[piece]));
  };
  return job;
}

void BackwardUpdates::note_arrived(const std::map<UnitId, std::set<Bytes>>& came) {
  for (const auto& [unit, offsets] : came) {
    if (!is_updated_[unit]) arrived_[unit].insert(offsets.begin(), offsets.end());
  }
  // Updates of this backward have left out pieces whose gradients no rank had. Their record must leave out the same
  // pieces.
  for (Updated& each : unclaimed_) {
    const auto found = came.find(each.unit);
    std::erase_if(each.pieces, [&](const auto& piece) {
      const bool is_come = found != came.end() && found->second.contains(piece.first);
      return !is_come && !each.come.contains(piece.first);
    });
  }
}

void BackwardUpdates::update_rest(bool what_accumulates) {
  for (UnitId unit : parts_.units.ids()) {
    if (is_updated_[unit] || (!completes(unit) && !what_accumulates)) continue;
    update(unit);
  }
}

void BackwardUpdates::update_held(Stream stream) {
  NORIA_INVARIANT(!pass_.phase, "what is held is updated between passes");
  Op edits;  // for example a clip, which the device may not have reached yet
  edits.verb = Verb::user;
  for (UnitId unit : arrived_.ids()) {
    if (arrived_[unit].empty()) continue;
    const BufferId held = parts_.units[unit].facts.held;
    edits.accesses.push_back({held, parts_.issuer.next_version(held), Access::Mode::write});
  }
  compute_.pass(std::move(edits), stream);
  update_rest(/*what_accumulates=*/true);
}

void BackwardUpdates::abandon() {
  if (!unclaimed_.empty()) {  // by it, or by backwards of other stages
    updates_.mark_torn("a backward raised after " + std::to_string(unclaimed_.size()) + " of " +
                       std::to_string(parts_.units.size()) + " units had been updated");
  }
  arriving_.fill({});
  if (!ring_) return;  // what was accumulated is still held
  for (UnitId unit : parts_.units.ids()) {
    drainer_.forget_reduced(unit);
    arrived_[unit].clear();
    release_held(unit);
  }
}

}  // namespace noria
